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
from tolerances import assert_close

from ring_core import LAYOUTS, Mask
from ring_jax_gpu import ring_attention
from ring_jax_gpu.hopper import run as _roles

CAUSAL = Mask(causal=True)
SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)]
USUAL: dict[str, Any] = {"dims": (128, 128), "heads": (4, 2), "dtype": "bfloat16", "seq_len": 320}
#: Token 213, the poisoned one, is a document of its own: no other query may get its NaN.
DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 1, 70, 128, 129, 213, 214, 320))
LONG = Mask(causal=True, cu_seqlens=(0, 5, 700, 705, 706, 764, 1100, 1600))
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
    Case("documents-long", LONG, **{**USUAL, "seq_len": 1600}),
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


STEP_OF_SEVERAL = (
    "causal", "window-both", "odd-length", "narrow", "poison-v", "parts", "poison-parts", "chunks",
    "chunks-narrow", "softcap-alibi", "alibi", "segments-documents", "segments-scattered", "dropout",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "step", "programs"),
    [
        *((case.name, "only", 0) for case in ALONE), *product(STEP_OF_SEVERAL, STEPS, [0]),
        # Programs that compute many tiles each.
        *product(["causal", "parts", "window", "chunks"], ["only"], [1, 5]), ("thirds", "only", 30),
    ],
)  # fmt: skip
def test_on_one_gpu(
    name: str, step: str, programs: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = (case for case in ALONE if case.name == name)
    length = case.seq_len
    if step != "only":
        pretend(monkeypatch, step)
        length += 1 + [*STEPS].index(step)  # avoids another step's cached program
    if programs > 0:
        monkeypatch.setattr(_roles, "_processors", lambda: programs)
        length += 10 + programs
    case = replace(case, name=f"hopper-{length}-{case.name}", seq_len=length)
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton"))
    assert set(calls) == {"bwd_dkv"} | ({"fwd"} if case.dropout_p == 0 else set())


MASKS = {
    "causal": CAUSAL, "full": Mask(),
    "documents": Mask(causal=True, cu_seqlens=(0, 3, 90, 400, 402, 777, 1001)),
    "window": Mask(causal=True, window=(500, 0), cu_seqlens=(0, 3, 90, 400, 402, 777, 1024)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "layout", "strategy"),
    [
        *((mask, *ring) for mask, ring in product(["causal", "full", "documents"], RINGS.values())),
        *product(["causal", "full"], LAYOUTS, ["gather"]),
        *product(["window"], ["contiguous", "zigzag"], ["gather"]),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_in_the_ring(mask: str, layout: Any, strategy: Any, size: int, calls: list[str]) -> None:
    """Over keys that are gathered, too."""
    gathers = strategy == "gather"
    usual = USUAL | {"seq_len": 1001 if mask == "documents" else 1024, "batch": 1 + gathers}
    name = f"hopper-{mask}-{layout}-{strategy}-cp{size}"
    case = Case(name, MASKS[mask], layout, size, strategy="ring" if gathers else strategy, **usual)
    way = "gather" if gathers else "auto"
    assert_close(case, JaxBackend(ring_attention).run(case, kernel="triton", strategy=way))
    assert set(calls) == {"fwd", "bwd_dkv"} if gathers else "fwd" in calls
