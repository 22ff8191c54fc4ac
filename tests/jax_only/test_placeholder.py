"""``ring_jax`` holds nothing yet: it installs with its dependencies and imports beside them."""

from importlib.metadata import version

from packaging.version import Version

import ring_core
import ring_jax


def test_placeholder_says_so_and_offers_nothing() -> None:
    assert "placeholder" in (ring_jax.__doc__ or "")
    assert not [name for name in vars(ring_jax) if not name.startswith("_")]
    assert ring_jax.__version__ == ring_core.__version__


def test_dependency_is_new_enough() -> None:
    assert Version(version("jax")) >= Version("0.11")
