"""The kernels for Hopper, which no interpreter runs, against the oracle on GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import pytest
from backends import jax_devices
from backends.jax_devices import JaxBackend
from backends.triton_compiler import STEPS, pretend
from cases import RINGS, Case
from tolerances import assert_close

from ring_core import Mask
from ring_jax_gpu import ring_attention
from ring_jax_gpu.hopper import run as _roles

CAUSAL = Mask(causal=True)
DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 70, 71, 260, 261, 400, 700, 1024))
MASKS = {"causal": CAUSAL, "full": Mask(), "documents": DOCUMENTS}
#: Masks and layouts; packed documents have to lie in natural order to be gathered.
GATHERED = [
    (name, layout)
    for name, layout in product(MASKS, ("contiguous", "zigzag", "striped"))
    if (name, layout) != ("documents", "striped")
]
SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)]
USUAL: dict[str, Any] = {"dims": (128, 128), "heads": (4, 2), "dtype": "bfloat16", "seq_len": 320}
ALONE = [
    Case("causal", CAUSAL, **USUAL, lse_grad=True),
    Case("full", Mask(), **USUAL),
    Case("window", Mask(causal=True, window=(100, 0)), **USUAL),
    Case("window-both", Mask(window=(50, 33)), **USUAL),
    Case("keys", CAUSAL, **USUAL, kv_seq_len=605),
    Case("fewer-keys", CAUSAL, **USUAL, kv_seq_len=133),
    Case("odd-length", CAUSAL, **{**USUAL, "seq_len": 261}, batch=2),
    Case("float16", CAUSAL, **{**USUAL, "dtype": "float16"}),
    Case("narrow", CAUSAL, **{**USUAL, "dims": (64, 64)}),
    Case("documents", Mask(causal=True, cu_seqlens=(0, 37, 160, 161, 320)), **USUAL),
    Case("documents-full", Mask(cu_seqlens=(0, 64, 250, 320)), **USUAL),
    Case("documents-window", Mask(window=(30, 7), cu_seqlens=(0, 100, 101, 320)), **USUAL),
    Case(
        "documents-odd",
        Mask(causal=True, cu_seqlens=(0, 129, 261)),
        **{**USUAL, "seq_len": 261, "dims": (64, 64)},
        batch=2,
    ),
    Case("poison-documents", Mask(causal=True, cu_seqlens=(0, 100, 320)), **USUAL, poison="v"),
    Case("sinks", CAUSAL, **USUAL, sinks=0),
    Case("spread", CAUSAL, **USUAL, spread=40.0),
    Case("poison-q", CAUSAL, **USUAL, poison="q"),
    Case("poison-k", CAUSAL, **USUAL, poison="k"),
    Case("poison-v", CAUSAL, **USUAL, poison="v"),
    Case("parts", Mask(), **USUAL, kv_seq_len=2000),
    Case("poison-parts", Mask(), **USUAL, kv_seq_len=2000, poison="v"),
    Case("thirds", Mask(), **{**USUAL, "seq_len": 2304}, kv_seq_len=1601),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for Hopper that were compiled."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("these kernels are for compute capability 9.0")
    jax_devices._kept.cache_clear()  # so that every test compiles
    called: list[str] = []
    run = _roles.run

    def note(launch: Any, arrays: Any) -> Any:
        called.append(launch.kernel)
        return run(launch, arrays)

    monkeypatch.setattr(_roles, "run", note)
    return called


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_one_step(case: Case, calls: list[str]) -> None:
    case = replace(case, name=f"hopper-{case.name}")
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == {"fwd", "bwd_dkv"}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "name", ["causal", "window-both", "odd-length", "narrow", "poison-v", "parts", "poison-parts"]
)
def test_a_step_of_several(
    name: str, step: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are wide but for the last step's, and but in the first step merged."""
    pretend(monkeypatch, step)
    (case,) = (case for case in ALONE if case.name == name)
    length = case.seq_len + 1 + [*STEPS].index(step)  # else another's program would be taken
    case = replace(case, name=f"{length}-{case.name}", seq_len=length)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == {"fwd", "bwd_dkv"}


@pytest.mark.parametrize(
    ("name", "programs"), [*product(["causal", "parts", "window"], [1, 5]), ("thirds", 30)]
)
def test_many_tiles_a_program(
    name: str, programs: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_roles, "_processors", lambda: programs)
    (case,) = (case for case in ALONE if case.name == name)
    case = replace(case, name=f"{programs}-{case.name}", seq_len=case.seq_len + 10 + programs)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == {"fwd", "bwd_dkv"}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_in_the_ring(mask: str, ring: str, size: int, calls: list[str]) -> None:
    """Several items a step, and steps that merge."""
    usual = {**USUAL, "seq_len": 1024}
    layout, strategy = RINGS[ring]
    name = f"hopper-{mask}-{ring}-cp{size}"
    case = Case(name, MASKS[mask], layout, size, strategy=strategy, **usual)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert "fwd" in calls


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("mask", "layout"), GATHERED)
def test_over_gathered_keys(mask: str, layout: Any, size: int, calls: list[str]) -> None:
    """Many items in one launch, over the keys of all GPUs."""
    usual = {**USUAL, "seq_len": 1024, "batch": 2}
    case = Case(f"hopper-{mask}-{layout}-all{size}", MASKS[mask], layout, size, **usual)
    results = JaxBackend(ring_attention).run(case, kernel="triton", strategy="gather")
    assert_close(case, results)
    assert set(calls) == {"fwd", "bwd_dkv"}
