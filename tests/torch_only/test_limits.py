"""Limits of kernels, by option, GPU and head dim: a named reason, or none where they support it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import prefix

from ring_core import Mask, Request, make_plan, ring_program
from ring_torch.kernels import fa4, sdpa

CALL = Request(device="cuda", dtype="bfloat16", head_dim=128, v_head_dim=128, grad=True)
CAUSAL, DOCUMENTS = Mask(causal=True), Mask(causal=True, cu_seqlens=(0, 100, 300, 512))
PREDICATE = Mask(predicate=prefix)
REFUSED: dict[str, tuple[Mask, dict[str, Any], tuple[int, int], str]] = {
    "segments on Blackwell": (CAUSAL, {"segment_ids": True}, (10, 0), "on Hopper only"),
    "a predicate on Blackwell": (PREDICATE, {}, (10, 0), "on Hopper only"),
    "ALiBi on Blackwell": (CAUSAL, {"alibi": True}, (10, 0), "on Hopper only"),
    "segments that repeat": (
        CAUSAL, {"segment_ids": True, "deterministic": True}, (9, 0), "is not deterministic"
    ),
    "a predicate that repeats": (PREDICATE, {"deterministic": True}, (9, 0), "not deterministic"),
    "segments and documents": (DOCUMENTS, {"segment_ids": True}, (9, 0), "no segment_ids together"),
    "ALiBi and documents": (DOCUMENTS, {"alibi": True}, (9, 0), "no alibi_slopes together"),
}  # fmt: skip
TAKEN: dict[str, tuple[Mask, dict[str, Any], tuple[int, int]]] = {
    "documents on Blackwell": (DOCUMENTS, {}, (10, 0)),
    "segments": (CAUSAL, {"segment_ids": True, "alibi": True, "softcap": True}, (9, 0)),
    "a predicate and segments": (PREDICATE, {"segment_ids": True}, (9, 0)),
    "causal that repeats": (CAUSAL, {"deterministic": True, "alibi": True}, (9, 0)),
}


def _limits(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, options: dict[str, Any], gpu: tuple[int, int]
) -> tuple[str, ...]:
    monkeypatch.setattr(fa4, "capability", lambda: gpu)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    program = ring_program(make_plan(mask, seq_len=512, cp_size=1))
    assert fa4.FA4.limits is not None
    return fa4.FA4.limits(replace(CALL, **options), program)


@pytest.mark.parametrize("name", REFUSED)
def test_fa4_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, options, gpu, why = REFUSED[name]
    (reason,) = _limits(monkeypatch, mask, options, gpu)
    assert why in reason


@pytest.mark.parametrize("name", TAKEN)
def test_fa4_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _limits(monkeypatch, *TAKEN[name]) == ()


@pytest.mark.parametrize(
    ("dims", "gpu", "version", "takes"),
    [
        ((128, 128), (8, 0), 90000, True), ((192, 128), (9, 0), 91900, True),
        ((256, 256), (9, 0), 91800, False), ((128, 64), (10, 0), 91900, False),
    ],
)  # fmt: skip
def test_cudnn(
    dims: tuple[int, int], gpu: tuple[int, int], version: int, takes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sdpa, "capability", lambda: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    request = replace(CALL, head_dim=dims[0], v_head_dim=dims[1])
    program = ring_program(make_plan(CAUSAL, seq_len=512, cp_size=1))
    limits = sdpa.CUDNN.limits
    assert limits is not None and (limits(request, program) == ()) is takes
