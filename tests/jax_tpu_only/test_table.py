"""The one table of cases, through the ring with the Pallas kernels interpreted.

The interpreter looks for races and fills fresh memory with NaN. A few cases that use every option
run each time, the others where all are asked for (``--all``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
from backends.jax_devices import JaxBackend
from cases import CASES, Case
from jax.experimental.pallas import tpu as pltpu
from tolerances import assert_close

import ring_jax
import ring_jax_tpu
from ring_core import SCHEDULES, Mask, UnsupportedError

SELECTED = (
    "causal-zigzag-cp2", "window-large-plain-cp2", "causal-balanced-cp3",
    "documents-chunks-striped-cp2", "keys64-predicate-plain", "sinks-many-zigzag",
    "poison-k-plain", "batch-0-plain", "shortest-zigzag-cp2", "everything-zigzag", "float16-plain",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the host, and the function under test is this package's."""
    monkeypatch.setattr(ring_jax, "ring_attention", ring_jax_tpu.ring_attention)
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def check(case: Case) -> None:
    """A case is right, or refused by name."""
    if case.dtype not in DTYPES:
        with pytest.raises(UnsupportedError, match=f"kernel 'pallas': .*not {case.dtype}"):
            JaxBackend().run(case, kernel="pallas")
        return
    assert_close(case, JaxBackend().run(case, kernel="pallas"))


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.usefixtures("interpreted")
def test_selected_cases(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if name not in SELECTED])
@pytest.mark.usefixtures("interpreted")
def test_other_cases(name: str) -> None:
    check(CASES[name])


def test_selected_cases_use_everything() -> None:
    """Every option of a case and of a mask, every schedule, 2, 3 and 4 devices."""
    cases = [CASES[name] for name in SELECTED]
    plain = Case("", Mask())
    for field in fields(Case):
        if field.name not in ("name", "seq_len", "spread", "numbers"):
            ordinary = getattr(plain, field.name)
            assert any(getattr(case, field.name) != ordinary for case in cases), field.name
    for field in fields(Mask):
        assert any(getattr(case.mask, field.name) for case in cases), field.name
    assert {case.schedule for case in cases} == set(SCHEDULES)
    assert {case.cp_size for case in cases} >= {2, 3, 4}
