"""``ring_jax_tpu`` holds nothing yet: it installs with its dependencies and imports beside them."""

import importlib.util

import ring_core
import ring_jax_tpu


def test_placeholder_says_so_and_offers_nothing() -> None:
    assert "placeholder" in (ring_jax_tpu.__doc__ or "")
    assert not [name for name in vars(ring_jax_tpu) if not name.startswith("_")]
    assert ring_jax_tpu.__version__ == ring_core.__version__


def test_extra_brings_libtpu() -> None:
    assert importlib.util.find_spec("libtpu") is not None
