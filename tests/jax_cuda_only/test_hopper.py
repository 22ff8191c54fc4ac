"""The Hopper kernels, which no interpreter runs, agree with the oracle on GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import jax
import pytest
from backends import jax_devices
from backends.jax_devices import JaxBackend
from backends.triton_compiler import STEPS, pretend
from cases import RINGS, Case, Segments
from tolerances import assert_close, findings

from ring_core import KernelConfig, Mask
from ring_jax_gpu import ring_attention
from ring_jax_gpu.hopper import run as _roles

CAUSAL = Mask(causal=True)
SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)]
USUAL: dict[str, Any] = {"dims": (128, 128), "heads": (4, 2), "dtype": "bfloat16", "seq_len": 320}
#: Token 213, the poisoned one, is a document of its own: no other query may get its NaN.
DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 1, 70, 128, 129, 213, 214, 320))
#: Chunks, which may have any length, are documents to a kernel.
CHUNKS = Mask(window=(60, 33), chunk_size=90)
ALONE = [
    Case("causal", CAUSAL, **USUAL, lse_grad=True), Case("full", Mask(), **USUAL),
    Case("odd-full", Mask(), **{**USUAL, "seq_len": 261}, batch=2),
    Case("window", Mask(causal=True, window=(100, 0)), **USUAL),
    Case("window-both", Mask(window=(50, 33)), **USUAL),
    Case("keys", CAUSAL, **USUAL, kv_seq_len=605),
    Case("fewer-keys", CAUSAL, **USUAL, kv_seq_len=133),
    Case("odd-length", CAUSAL, **{**USUAL, "seq_len": 261}, batch=2),
    Case("float16", CAUSAL, **{**USUAL, "dtype": "float16"}),
    Case("narrow", CAUSAL, **{**USUAL, "dims": (64, 64)}), Case("sinks", CAUSAL, **USUAL, sinks=0),
    Case("spread", CAUSAL, **USUAL, spread=40.0), Case("poison-q", CAUSAL, **USUAL, poison="q"),
    Case("poison-k", CAUSAL, **USUAL, poison="k"), Case("poison-v", CAUSAL, **USUAL, poison="v"),
    Case("parts", Mask(), **USUAL, kv_seq_len=2000),
    Case("poison-parts", Mask(), **USUAL, kv_seq_len=2000, poison="v"),
    Case("thirds", Mask(), **{**USUAL, "seq_len": 2304}, kv_seq_len=1601),
    Case("documents", DOCUMENTS, **USUAL, lse_grad=True),
    Case("documents-narrow", DOCUMENTS, **{**USUAL, "dims": (64, 64)}, batch=2),
    Case("documents-full", Mask(cu_seqlens=(0, 100, 261)), **{**USUAL, "seq_len": 261}, batch=2),
    Case("documents-poison-q", DOCUMENTS, **USUAL, poison="q"),
    Case("documents-poison-k", DOCUMENTS, **USUAL, poison="k"),
    Case("documents-poison-v", DOCUMENTS, **USUAL, poison="v"), Case("chunks", CHUNKS, **USUAL),
    Case("chunks-narrow", CHUNKS, **{**USUAL, "dims": (64, 64), "heads": (2, 2)}),
    Case("softcap", CAUSAL, **USUAL, softcap=20.0, lse_grad=True),
    Case("softcap-alibi", Mask(), **USUAL, softcap=5.0, alibi=2, batch=2),
    Case("softcap-poison-k", CAUSAL, **USUAL, softcap=20.0, poison="k"),
    Case("alibi", CAUSAL, **USUAL, alibi=1, batch=2), Case("alibi-keys", Mask(), **USUAL, alibi=1, kv_seq_len=605),
    Case("alibi-narrow", CAUSAL, **{**USUAL, "dims": (64, 64), "seq_len": 261}, alibi=2),
    *(Case(f"segments-{x}", CAUSAL, **USUAL, segments=x, batch=2) for x in get_args(Segments)),
    Case("scattered-poison-k", CAUSAL, **USUAL, segments="scattered", poison="k", batch=2),
    Case("segments-poison-v", CAUSAL, **USUAL, segments="documents", poison="v"),
    Case("dropout", CAUSAL, **USUAL, dropout_p=0.3, batch=2, lse_grad=True),
    Case("dropout-narrow", Mask(), **{**USUAL, "dims": (64, 64)}, dropout_p=0.1, softcap=9.0),
    Case("dropout-segments", CAUSAL, **USUAL, dropout_p=0.2, segments="documents", alibi=1, batch=2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of the Hopper kernels that are compiled."""
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


def kernels_of(case: Case) -> set[str]:
    """Return the passes that have a kernel for Hopper."""
    return {"bwd_dkv"} if case.dropout_p > 0 else {"fwd", "bwd_dkv"}


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_one_step(case: Case, calls: list[str]) -> None:
    case = replace(case, name=f"hopper-{case.name}")
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == kernels_of(case)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "name",
    [
        "causal", "window-both", "odd-length", "narrow", "poison-v", "parts", "poison-parts",
        "chunks", "chunks-narrow", "softcap-alibi", "alibi", "segments-documents",
        "segments-scattered", "dropout",
    ],
)  # fmt: skip
def test_a_step_of_several(
    name: str, step: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, step)
    (case,) = (case for case in ALONE if case.name == name)
    length = case.seq_len + 1 + [*STEPS].index(step)  # avoids another step's cached program
    case = replace(case, name=f"{length}-{case.name}", seq_len=length)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == kernels_of(case)


@pytest.mark.parametrize(
    ("name", "programs"),
    [*product(["causal", "parts", "window", "chunks"], [1, 5]), ("thirds", 30)],
)
def test_many_tiles_a_program(
    name: str, programs: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_roles, "_processors", lambda: programs)
    (case,) = (case for case in ALONE if case.name == name)
    case = replace(case, name=f"{programs}-{case.name}", seq_len=case.seq_len + 10 + programs)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == {"fwd", "bwd_dkv"}


def test_documents_as_in_plain_triton(calls: list[str]) -> None:
    ends = (0, 5, 700, 705, 706, 764, 1100, 1600)
    usual = {**USUAL, "seq_len": ends[-1]}
    case = Case("documents-long", Mask(causal=True, cu_seqlens=ends), **usual)
    results = JaxBackend(ring_attention).run(case, kernel="triton")
    assert_close(case, results)
    assert set(calls) == {"fwd", "bwd_dkv"}
    calls.clear()
    config: Any = KernelConfig("triton", block_q=64, block_k=64)
    plain = JaxBackend(ring_attention).run(case, kernel=config)
    assert calls == []
    for finding in findings(case, plain):
        difference = abs(results[finding.name] - plain[finding.name]).max()
        assert difference <= 2 * finding.bound, finding.name


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("size", SIZES)
def test_documents_in_the_ring(ring: str, size: int, calls: list[str]) -> None:
    layout, strategy = RINGS[ring]
    mask = Mask(causal=True, cu_seqlens=(0, 3, 90, 400, 402, 777, 1001))
    usual = {**USUAL, "seq_len": 1001}
    case = Case(f"hopper-documents-{ring}-cp{size}", mask, layout, size, strategy=strategy, **usual)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert "fwd" in calls


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", [CAUSAL, Mask()], ids=["causal", "full"])
def test_in_the_ring(mask: Mask, ring: str, size: int, calls: list[str]) -> None:
    usual = {**USUAL, "seq_len": 1024}
    layout, strategy = RINGS[ring]
    name = f"hopper-{mask.causal}-{ring}-cp{size}"
    case = Case(name, mask, layout, size, strategy=strategy, **usual)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert "fwd" in calls


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", [CAUSAL, Mask()], ids=["causal", "full"])
def test_over_gathered_keys(mask: Mask, layout: Any, size: int, calls: list[str]) -> None:
    _check_over_gathered_keys(mask, layout, size, calls)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", SIZES)
def test_documents_over_gathered_keys(layout: str, size: int, calls: list[str]) -> None:
    mask = Mask(causal=True, window=(500, 0), cu_seqlens=(0, 3, 90, 400, 402, 777, 1024))
    _check_over_gathered_keys(mask, layout, size, calls)


def _check_over_gathered_keys(mask: Mask, layout: Any, size: int, calls: list[str]) -> None:
    usual = {**USUAL, "seq_len": 1024, "batch": 2}
    case = Case(f"hopper-{mask.causal}-{layout}-all{size}", mask, layout, size, **usual)
    results = JaxBackend(ring_attention).run(case, kernel="triton", strategy="gather")
    assert_close(case, results)
    assert set(calls) == {"fwd", "bwd_dkv"}
