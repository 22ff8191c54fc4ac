"""Cases of several blocks on one device, with lengths that no block size divides.

Kernels with blocks of their own run them alone, without a ring. Each backend takes the names whose
masks and options it has. Cases of very negative biases are run with each number in each region.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import EVERYTHING, Case, crossed, diagonals, prefix

from ring_core import Mask

CAUSAL = Mask(causal=True)
_LOW: dict[str, Any] = {"low": -1e10, "batch": 2, "lse_grad": True}


def several_blocks(length: int, longer: int, *left_out: str) -> dict[str, Case]:
    """Return the cases of a length, some of which have other keys, or a longer length."""
    half = length // 2
    documents = (0, 1, half, half + 2, length * 7 // 8, length)
    cases = [
        Case("causal", CAUSAL),
        Case("full", Mask(), heads=(2, 2)),
        Case("window", Mask(causal=True, window=(half, 0)), lse_grad=True),
        Case("window-both", Mask(window=(half + 10, half - 7))),
        Case("chunks", Mask(causal=True, chunk_size=half - 3)),
        Case("documents", Mask(cu_seqlens=documents), batch=2),
        Case("predicate", Mask(causal=True, predicate=diagonals), seq_len=longer),
        Case("predicate-documents", Mask(predicate=prefix, cu_seqlens=(0, half + 3, length))),
        Case("predicate-bits", Mask(predicate=crossed)),
        Case("keys", CAUSAL, kv_seq_len=longer),
        Case("fewer-keys", CAUSAL, kv_seq_len=half + 5),
        Case("gqa", CAUSAL, heads=(4, 2), batch=2, dims=(24, 8)),
        Case("bfloat16", CAUSAL, dtype="bfloat16", dims=(64, 64)),
        Case("float16", Mask(), dtype="float16", dims=(16, 32)),
        Case("wider", CAUSAL, dims=(40, 40), heads=(4, 2), lse_grad=True),
        Case("wider-k", Mask(window=(30, 9)), dims=(48, 16), seq_len=50),
        Case("wider-v", Mask(), dims=(16, 33), bias="masked", segments="padded", seq_len=50),
        Case("softcap", CAUSAL, softcap=1.5, softmax_scale=0.7, sinks=0),
        Case("negative-scale", CAUSAL, softmax_scale=-0.5),
        Case("no-scale", CAUSAL, softmax_scale=0.0),
        Case("segments", CAUSAL, segments="padded", batch=2, heads=(1, 1)),
        Case("segments-pair", Mask(), segments="pair"),
        Case("segments-chunks", Mask(chunk_size=100), segments="padded", seq_len=longer),
        Case(
            "segments-documents", Mask(cu_seqlens=(0, half, longer)), segments="pair", seq_len=longer,
        ),
        Case("alibi", CAUSAL, alibi=2, batch=2, heads=(1, 1)),
        Case("dropout", CAUSAL, dropout_p=0.3, batch=2),
        Case("bias", CAUSAL, bias="masked", batch=2, heads=(1, 1)),
        Case("bias-shared", CAUSAL, bias="shared", batch=2),
        Case("bias-large", CAUSAL, bias="masked", numbers="large", dims=(16, 16)),
        Case("bias-very-negative", CAUSAL, bias="very-negative", batch=2, segments="padded"),
        Case("shown-heads", Mask(), shown="by-head", poison="k", lse_grad=True),
        Case("shown-rows", Mask(), shown="by-sequence", batch=2, bias="full"),
        Case("negative-left", CAUSAL, bias="shared", region="left padding", segments="documents", **_LOW),
        Case("negative-part", CAUSAL, bias="heads", region="part of a row", **_LOW),
        Case("negative-rows", CAUSAL, bias="batch", region="whole rows", segments="documents", **_LOW),
        Case("spread", CAUSAL, spread=40.0),
        Case("poison-q", CAUSAL, poison="q"),
        Case("poison-k", CAUSAL, poison="k"),
        Case("poison-v", CAUSAL, poison="v"),
        Case("v-inf", CAUSAL, poison="v-inf"),
        Case("bias-nan", CAUSAL, bias="shared", poison="bias"),
        Case("poison-padding", Mask(), segments="padded", poison="padding"),
        Case("everything", CAUSAL, **EVERYTHING, softmax_scale=0.4),
    ]  # fmt: skip
    usual = Case("", CAUSAL).seq_len
    return {
        case.name: replace(case, seq_len=length) if case.seq_len == usual else case
        for case in cases
        if case.name not in left_out
    }


_MIXED = Mask(window=(25, 3), chunk_size=30)
_DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 7, 31, 48), predicate=diagonals)
NEGATIVE = [
    Case("one device", CAUSAL, bias="full", lse_grad=True),
    Case("zigzag", CAUSAL, "zigzag", 2, bias="full", lse_grad=True),
    Case("full", Mask(), cp_size=4, bias="shared", batch=2, lse_grad=True),
    Case("sinks", CAUSAL, cp_size=2, bias="heads", sinks=0, lse_grad=True),
    Case("ids", Mask(), "striped", 2, bias="shared", batch=2, segments="scattered"),
    Case("helpers", CAUSAL, cp_size=4, bias="full", strategy="balanced"),
    Case("mixed", _MIXED, "zigzag", 2, kv_seq_len=80, bias="masked", softcap=5.0, alibi=1),
    Case("documents", _DOCUMENTS, "zigzag", 2, bias="batch", batch=2, dropout_p=0.3),
    *(
        Case(dtype, CAUSAL, "zigzag", 2, bias="full", dtype=dtype, lse_grad=True)
        for dtype in ("float64", "bfloat16", "float16")
    ),
]
