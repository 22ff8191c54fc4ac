"""Runs cases with equal stages as a loop, or as one function, and with each stage unrolled."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from backends.jax_devices import Arrays, JaxBackend, _program
from cases import Case

from ring_core import KernelConfig, Mask
from ring_core.plan import plan
from ring_jax.strategies import ring

_SHAPE: dict[str, Any] = {"cp_size": 7, "seq_len": 112}
_HELPERS: dict[str, Any] = {**_SHAPE, "cp_size": 8, "strategy": "balanced"}
_EVERYTHING: dict[str, Any] = {
    "softcap": 2.0, "sinks": 0, "bias": "very-negative", "alibi": 1, "dropout_p": 0.1,
    "segments": "padded", "heads": (4, 2), "dims": (8, 6),
}  # fmt: skip
CAUSAL = Mask(causal=True)

#: Cases on seven devices, the fewest for which both passes have a loop: one with an odd, one with
#: an even number of stages. Where ranks help others, eight are the fewest.
CASES = {
    case.name: case
    for case in (
        Case("causal", CAUSAL, "zigzag", **_SHAPE),
        Case("full", Mask(), **_SHAPE),
        Case("window", Mask(causal=True, window=(61, 0)), "zigzag", **_SHAPE, heads=(1, 1)),
        Case("documents", Mask(causal=True, cu_seqlens=(0, 9, 79, 88, 112)), "striped", **_SHAPE),
        Case("chunks", Mask(chunk_size=88), **_SHAPE),
        Case("predicate", Mask(predicate=lambda q, k: (q * 7 + k) % 5 > 0), **_SHAPE),
        Case("keys", CAUSAL, "zigzag", **_SHAPE, kv_seq_len=168, heads=(2, 1)),
        Case("segments", CAUSAL, "zigzag", **_SHAPE, segments="padded", batch=2, lse_grad=True),
        Case("bias", CAUSAL, "striped", **_SHAPE, bias="masked", batch=2, heads=(1, 1)),
        Case("dropout", CAUSAL, "zigzag", **_SHAPE, dropout_p=0.3),
        Case("everything", CAUSAL, "zigzag", **_SHAPE, **_EVERYTHING, lse_grad=True),
        Case("helpers", CAUSAL, **_HELPERS, bias="full", heads=(1, 1), lse_grad=True),
        Case("helpers-everything", CAUSAL, **_HELPERS, **_EVERYTHING),
    )
}  # fmt: skip


def in_loop(backend: JaxBackend, case: Case, kernel: str | KernelConfig) -> Arrays:
    """Run a case, and check that its forward and backward have a loop."""
    program = case.program
    for stages in (program.forward, program.backward):
        assert any(len(run.stages) > 1 for run in ring._runs(program, stages))
    return backend._run(case, (kernel, case.strategy), _program)


def unrolled(backend: JaxBackend, case: Case, kernel: str | KernelConfig) -> Arrays:
    """Run a case with all stages unrolled."""
    plan._make_plan.cache_clear()  # a new plan makes jax trace the call again
    try:
        with patch.object(ring, "_SHORTEST_LOOP", 1 << 30):
            return backend._run(case, (kernel, case.strategy), _program)
    finally:
        plan._make_plan.cache_clear()


def assert_equal_bits(looped: Arrays, unrolled: Arrays) -> None:
    """Assert that results are equal bit for bit, NaN included."""
    assert looped.keys() == unrolled.keys()
    for name, value in looped.items():
        np.testing.assert_array_equal(value, unrolled[name], err_msg=name)
