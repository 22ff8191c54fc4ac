"""The table of cases in the ring, with the Pallas kernels interpreted.

The interpreter detects races and fills fresh memory with NaN. A few cases that use every option
run each time, the others with ``--all``.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from backends.jax_devices import JaxBackend
from backends.tpu_interpreter import InterpretedKernel, interpreted
from cases import CASES, RINGS, Case
from tolerances import assert_close

import ring_jax
import ring_jax_tpu
from ring_core import Mask, UnsupportedError
from ring_jax.attention import RingAttention

SELECTED = (
    "causal-zigzag-cp2", "window-large-contiguous-cp2", "causal-balanced-cp3",
    "documents-chunks-striped-cp2", "keys64-predicate-contiguous", "sinks-many-zigzag",
    "poison-k-contiguous", "batch-0-contiguous", "shortest-zigzag-cp2", "everything-zigzag", "float16-contiguous",
    "large-contiguous", "shown-documents-zigzag",
)  # fmt: skip
IN_ONE_PROGRAM = ("causal-balanced-cp3", "everything-zigzag")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def kernel() -> InterpretedKernel:
    """Return a kernel that all tests share, with its compiled programs."""
    return InterpretedKernel()


def check(case: Case, monkeypatch: pytest.MonkeyPatch, kernel: InterpretedKernel) -> None:
    """Check that a case is right, or raises UnsupportedError for its dtype."""
    monkeypatch.setattr(ring_jax, "ring_attention", RingAttention((kernel,)))
    if case.dtype not in DTYPES:
        with pytest.raises(UnsupportedError, match=f"kernel 'pallas': .*not {case.dtype}"):
            JaxBackend().run(case, kernel="pallas")
        return
    with interpreted():
        results = JaxBackend().run(case, kernel="pallas")
    assert_close(case, results)


@pytest.mark.nightly(only=[
    "causal-zigzag-cp2", "causal-balanced-cp3", "keys64-predicate-contiguous",
    "shortest-zigzag-cp2", "everything-zigzag", "shown-documents-zigzag",
])  # fmt: skip
@pytest.mark.parametrize("name", SELECTED)
def test_selected_cases(
    name: str, monkeypatch: pytest.MonkeyPatch, kernel: InterpretedKernel
) -> None:
    check(CASES[name], monkeypatch, kernel)


@pytest.mark.nightly
@pytest.mark.timeout(1500)  # interpreted programs of eight devices take minutes
@pytest.mark.parametrize("name", [name for name in CASES if name not in SELECTED])
def test_other_cases(name: str, monkeypatch: pytest.MonkeyPatch, kernel: InterpretedKernel) -> None:
    check(CASES[name], monkeypatch, kernel)


@pytest.mark.nightly(unless=["causal-balanced-cp3"])
@pytest.mark.parametrize("name", IN_ONE_PROGRAM)
def test_in_one_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_jax, "ring_attention", ring_jax_tpu.ring_attention)
    with interpreted():
        results = JaxBackend().run(CASES[name], kernel="pallas")
    assert_close(CASES[name], results)


def test_selected_cases_use_everything() -> None:
    cases = [CASES[name] for name in SELECTED]
    plain = Case("", Mask())
    for field in fields(Case):
        if field.name not in ("name", "seq_len", "spread", "numbers", "views"):  # JAX has none
            ordinary = getattr(plain, field.name)
            assert any(getattr(case, field.name) != ordinary for case in cases), field.name
    for field in (field for field in fields(Mask) if field.init):
        assert any(getattr(case.mask, field.name) for case in cases), field.name
    assert {case.ring for case in cases} == set(RINGS)
    assert {case.cp_size for case in cases} >= {2, 3, 4}
