"""Cases of several blocks on one device, with lengths that no block size divides.

Kernels with blocks of their own run them alone, without a ring. Each backend takes the names whose
masks and options it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import Case, crossed, diagonals, prefix
from negative_biases import NegativeCase

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
        NegativeCase("negative-left", CAUSAL, bias="shared", region="left padding", segments="documents", **_LOW),
        NegativeCase("negative-part", CAUSAL, bias="heads", region="part of a row", **_LOW),
        NegativeCase("negative-rows", CAUSAL, bias="batch", region="whole rows", segments="documents", **_LOW),
        Case("spread", CAUSAL, spread=40.0),
        Case("poison-q", CAUSAL, poison="q"),
        Case("poison-k", CAUSAL, poison="k"),
        Case("poison-v", CAUSAL, poison="v"),
        Case("v-inf", CAUSAL, poison="v-inf"),
        Case("bias-nan", CAUSAL, bias="shared", poison="bias"),
        Case("poison-padding", Mask(), segments="padded", poison="padding"),
        Case(
            "everything", CAUSAL, softcap=2.0, sinks=0, bias="masked", alibi=1, dropout_p=0.1,
            segments="padded", softmax_scale=0.4, heads=(4, 2), dims=(8, 6), batch=2, lse_grad=True,
        ),
    ]  # fmt: skip
    usual = Case("", CAUSAL).seq_len
    return {
        case.name: replace(case, seq_len=length) if case.seq_len == usual else case
        for case in cases
        if case.name not in left_out
    }
