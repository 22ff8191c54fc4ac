"""``ring_jax_gpu`` holds nothing yet: it installs with its dependencies and imports beside them."""

import jax_triton
import triton

import ring_core
import ring_jax_gpu


def test_placeholder_says_so_and_offers_nothing() -> None:
    assert "placeholder" in (ring_jax_gpu.__doc__ or "")
    assert not [name for name in vars(ring_jax_gpu) if not name.startswith("_")]
    assert ring_jax_gpu.__version__ == ring_core.__version__


def test_dependencies_offer_what_the_kernels_will_call() -> None:
    assert callable(jax_triton.triton_call)
    assert callable(triton.jit)
