"""Head dims that are no power of two: the kernels are launched at the next one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from backends.triton_compiler import launches_in

from ring_core import Mask
from ring_jax import ContextParallel

LAUNCHED = {
    (96, 96): (128, 128), (80, 80): (128, 128), (48, 48): (64, 64), (192, 128): (256, 128),
    (160, 160): (256, 256), (24, 24): (24, 24), (64, 64): (64, 64), (128, 64): (128, 64),
}  # fmt: skip


@pytest.mark.parametrize(("dims", "launched"), LAUNCHED.items(), ids=str)
def test_they_are_launched_at(dims: tuple[int, int], launched: tuple[int, int]) -> None:
    call = {"dims": dims, "tokens": [256, 256], "options": {"causal": True}}
    launches = [params["launch"] for params, _ in launches_in(call)]
    assert len(launches) >= 2
    for launch in launches:
        consts = dict(launch.consts)
        assert (consts["D"], consts["DV"]) == launched
        assert launch.hopper == (launched[0] == launched[1] in (64, 128))
    assert _says_hopper(dims) == launches[0].hopper


BOTH = "the forward and the backward"
#: Options of a call, and the passes that have a Hopper kernel for it.
PASSES: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"softmax_scale": 0.5}, BOTH), "softcap": ({"softcap": 2.0}, BOTH),
    "segments": ({"segment_ids": jnp.zeros((1, 256), int)}, BOTH),
    "dropout": ({"dropout_p": 0.1, "dropout_seed": 1}, "the backward"),
    "deterministic": ({"deterministic": True}, "the forward"), "negative": ({"softmax_scale": -1.0}, ""),
    "predicate": ({"mask": Mask(predicate=lambda q, k: k <= q)}, ""),
    "documents": ({"mask": Mask(causal=True, cu_seqlens=(0, 9, 256))}, BOTH),
}  # fmt: skip


@pytest.mark.parametrize(("options", "passes"), PASSES.values(), ids=PASSES)
def test_explain_says_what_hopper_would_run(options: dict[str, Any], passes: str) -> None:
    call = {"dims": (64, 64), "tokens": [256, 256], "options": options}
    by_hopper = {
        params["launch"].kernel: params["launch"].hopper for params, _ in launches_in(call)
    }
    assert by_hopper["fwd"] == ("forward" in passes)
    assert by_hopper["bwd_dkv"] == ("backward" in passes)
    assert _says_hopper((64, 64), **options) == bool(passes)
    assert passes in _explained((64, 64), **options)


def _says_hopper(dims: tuple[int, int], **options: Any) -> bool:
    return "  triton on Hopper, with Triton 3.9 or newer: " in _explained(dims, **options)


def _explained(dims: tuple[int, int], **options: Any) -> str:
    cp = ContextParallel(jax.make_mesh((1,), ("cp",), devices=jax.devices()[:1]), axis_name="cp")
    q, v = (jnp.zeros((1, 256, 2, dim), "bfloat16") for dim in dims)
    return cp.explain(q, q, v, kernel="triton", **options)
