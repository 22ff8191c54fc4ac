"""Bad input raises an error that names the argument, before anything is sent.

So does every wrong value of every argument of every public function.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import wrong
from refused import refused
from torch import Tensor, nn
from wrong import COUNT, FLAG, KV, NAME, OPTIONS, REAL, ROWS, SIZE, Q, Subject, Values, entered

import ring_torch
from ring_core import ChunkLayout, Mask, UnsupportedError, reference
from ring_torch import (
    ContextParallel,
    KernelConfig,
    compat,
    hf,
    preflight,
    ring_attention,
    training,
)
from ring_torch.local import LocalRanks
from ring_torch.verification.equality import check_equal

zeros = torch.zeros
inputs: dict[str, Any] = {"q": zeros(Q), "k": zeros(KV), "v": zeros(KV)}


def zeros_of(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return zeros(shape, dtype=getattr(torch, dtype))


BAD: dict[str, tuple[dict[str, Any], str]] = wrong.bad_calls(zeros_of, "torch.Tensor") | {
    "not a tensor": ({"k": [1.0]}, "k must be a torch.Tensor, got list"),
    "device": ({"k": zeros(KV, device="meta")}, "on one device, got cpu for q and meta for k"),
    "no numbers": ({n: x.to("meta") for n, x in inputs.items()}, "q, k and v are on the meta device"),
    "cu_seqlens on a device": ({"cu_seqlens": zeros(3, device="meta", dtype=torch.int32)}, "known on the host"),
    "ids dtype": ({"segment_ids": zeros_of((2, 8), "int64")}, "segment_ids must be int32, got int64"),
    "slopes gradient": ({"alibi_slopes": zeros(4, requires_grad=True)}, "alibi_slopes have no gradient"),
    "kernel": ({"kernel": "flash"}, "unknown kernel 'flash'; known: auto, fa4, fa3, cudnn, fa2, sdpa, triton, eager"),
    "transport": ({"transport": "rdma"}, "unknown transport 'rdma'; known: auto, symm_mem, p2p"),
    "strategy": ({"strategy": "rdma"}, "unknown strategy name 'rdma'; known: auto, ulysses, gather, ring, balanced"),
    "group": ({"group": 3}, "group must be a process group"),
    "kernels": ({"kernel": KernelConfig(fused_backward=True)}, "no kernel can do this call. fa4: .*; eager: has no choice of fused"),
}  # fmt: skip


#: Options of a call with the kernel `sdpa`, or another.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "several reasons": (
        {"softcap": 1.0, "alibi_slopes": zeros(4), "window": (2, 0)},
        ("softcap", "alibi_slopes", "full and square causal blocks only", "kernel='eager'"),
    ),
    "segment_ids": ({"segment_ids": zeros(2, 8, dtype=torch.int32)}, ("segment_ids",)),
    "bias": ({"bias": zeros(1, 1, 8, 8)}, ("bias",)),
    "dropout": ({"dropout_p": 0.1, "dropout_seed": 0}, ("dropout_p",)),
    "deterministic": ({"deterministic": True}, ("deterministic=True",)),
    "documents": ({"cu_seqlens": (0, 3, 8)}, ("several documents",)),
    "chunks": ({"chunk_size": 3}, ("several documents or chunks",)),
    "predicate": ({"mask": Mask(predicate=lambda q, k: q == k)}, ("predicate",)),
    "v dim": ({"v": zeros(2, 8, 2, 8)}, ("head dim 8 to equal Q's 16",)),
    "half": ({n: zeros(KV, dtype=torch.bfloat16) for n in "qkv"}, ("not bfloat16",)),
    "blocks": ({"kernel": KernelConfig("sdpa", block_q=64)}, ("block_q",)),
    "another device": (
        {"kernel": "fa4", **{n: zeros(KV, dtype=torch.bfloat16) for n in "qkv"}},
        ("runs on cuda, not on cpu",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_named_kernel_never_falls_back(name: str) -> None:
    """The error lists every reason, and what would work instead."""
    options, reasons = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        ring_attention(**inputs | {"kernel": "sdpa"} | options)
    words = (*reasons, "kernel '", "Instead: use kernel='eager'")
    assert all(word in str(caught.value) for word in words)


CONTIGUOUS = ContextParallel(layout="contiguous")
CALLS = ring_attention, CONTIGUOUS.attention, CONTIGUOUS.explain
globals().update(wrong.refusals_of(ring_attention, inputs, BAD, CALLS))
torch.manual_seed(0)
EIGHT, SIX = (torch.randn(1, n, 2, 4) for n in (8, 6))
RULE = Mask(causal=True)
RIGHT, _ = reference.attention(*(x.numpy() for x in (EIGHT, SIX, SIX)), mask=RULE)


def compiled(*x: Any, **options: Any) -> Any:
    return torch.compile(ring_attention, backend="eager", fullgraph=True)(*x, **options)


@pytest.mark.parametrize("call", [*CALLS, compiled])
def test_causal_with_fewer_keys_is_refused_and_a_mask_keeps_the_rule(call: Any) -> None:
    for mask in (None, torch.ones(8, 6, dtype=torch.bool)):
        with pytest.raises(Exception, match=wrong.FEWER_KEYS) as error:
            call(EIGHT, SIX, SIX, causal=True, mask=mask)
        assert call is compiled or type(error.value) is ValueError
    if call != CONTIGUOUS.explain:
        np.testing.assert_allclose(call(EIGHT, SIX, SIX, mask=RULE), RIGHT, atol=2e-6)
        # With more keys, and with as many, which a graph need not show again.
        for q in (SIX[:, :5],) if call is compiled else (SIX, SIX[:, :5]):
            assert torch.equal(call(q, SIX, SIX, causal=True), call(q, SIX, SIX, mask=RULE))


@pytest.mark.parametrize("mask_first", [False, True])
def test_an_equal_mask_before_does_not_decide(mask_first: bool) -> None:
    """The cache of prepared calls tells the option from an equal mask, whichever comes first."""
    q, k = (x[:, :, :1].contiguous() for x in (EIGHT, SIX))
    for _ in range(2):
        if mask_first:
            ring_attention(q, k, k, mask=RULE)
        refused(wrong.FEWER_KEYS, ring_attention, q, k, k, causal=True)
        ring_attention(q, k, k, mask=RULE)


def test_calls_of_other_libraries_keep_their_meaning() -> None:
    out = compat.ring_flash_attn_func(EIGHT, SIX, SIX, causal=True)
    np.testing.assert_allclose(out, RIGHT, atol=2e-6)


def ids(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return zeros(shape, dtype=dtype, device=device)


def bad_tensors(*shape: int) -> Values:
    """Return tensors of this shape that are otherwise wrong, and values that are no tensors."""
    good = zeros(shape)
    return {
        "word": "q", "number": 1.0, "flag": True, "list": good.tolist(), "numpy": good.numpy(),
        "class": Tensor, "module": nn.Linear(1, 1), "complex": good.to(torch.complex64),
        "integers": good.to(torch.int32), "flags": good.to(torch.bool), "sparse": good.to_sparse(),
        "8 bits": good.to(torch.float8_e4m3fn), "meta": good.to("meta"),
    }  # fmt: skip


def first_used(group: Any = None, layout: Any = "zigzag") -> int:
    """Return the ranks of a new ``ContextParallel``, which reads its group on first use."""
    return ContextParallel(group, layout).cp_size


def nested(*shape: int) -> Tensor:
    return torch.nested.nested_tensor(list(zeros(shape)), layout=torch.jagged)


def like(*shape: int, but: tuple[str, ...] = ()) -> Values:
    """Return wrong values of a tensor of this shape, beside others of right shapes."""
    values: Values = {
        "none": None, **bad_tensors(*shape), "nested": nested(*shape) if len(shape) > 1 else "x",
        "size": zeros(*shape[:-1], shape[-1] + 5), "one axis more": zeros(*shape, 1),
    }  # fmt: skip
    return {name: x for name, x in values.items() if name not in but}


def optional(values: Values) -> Values:
    return {name: x for name, x in values.items() if x is not None}


CALL = wrong.wrong_call(
    wrong.wrong_tensors(zeros_of, bad_tensors, "int64"), torch.tensor,
    **{n: {"nested": nested(*x.shape)} for n, x in inputs.items()},
    alibi_slopes={"with a gradient": zeros(4, requires_grad=True)}, dropout_seed={"tensor": torch.tensor(1)},
    cu_seqlens={"on a device": ids(3, device="meta"), "floats": torch.tensor([0.0, 8.0]), "two rows": ids(2, 2)},
)  # fmt: skip
GROUP: Values = {"word": "cp", "number": 0, "flag": True, "list": [0, 1], "class": ContextParallel}
SHARD: Values = {
    "none": None, "list": [1.0], "word": "x", "number": 3.0, "scalar": zeros(()), "class": Tensor,
    "numpy": zeros(2).numpy(),
}  # fmt: skip
cp = ContextParallel()
even = ContextParallel(layout=ChunkLayout(((0, 1),)))  # one rank takes any length in zigzag
batch = {"input_ids": ids(2, 8, dtype=torch.int64)}
CLASSES: Values = {**optional(like(5, but=("8 bits",))), "scalar": zeros(())}
NAMES: Values = {
    "none": None, "word": "x", "numbers": (1,), "of no module": ("decoder",), "empty name": ("",),
    "number": 1, "class": nn.Linear,
}  # fmt: skip


@functools.wraps(ring_torch.replace_sdpa)
def replaced(module: Any, cp: Any, **options: Any) -> None:
    """Replace attention, and undo it."""
    ring_torch.replace_sdpa(module, cp, **options).remove()


KEYS, HEADS, VALUES = (1, 8, 2, 4), (1, 8, 4), (1, 8, 4, 3)
recurrent: dict[str, Tensor] = {
    "q": zeros(KEYS), "k": zeros(KEYS), "v": zeros(VALUES), "g": zeros(HEADS), "beta": zeros(HEADS),
}  # fmt: skip
ssd: dict[str, Tensor] = {
    "x": zeros(VALUES), "dt": zeros(HEADS), "A": zeros(4), "B": zeros(KEYS), "C": zeros(KEYS),
}  # fmt: skip
#: A cache of two requests, whose tokens are written, and whose positions may be written again.
cache_of = functools.partial(
    ring_torch.KVCache, cp, num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float32
)
cache = cache_of(max_requests=2, max_tokens=512)
cache.extend(cache.add(2), 8)
cache.write(zeros(KV), zeros(KV), layer=0)
first = cache_of(max_requests=1, max_tokens=8)
first.extend(first.add(), 8)
ROW = {"q": (1, 8, 4, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)}
INDEX: Values = {**ROWS, "too large": 2}
SERVED: dict[str, Values] = {
    "cache": {"none": None, "word": "cache", "class": ring_torch.KVCache, "tensor": zeros(KV)},
    "layer": INDEX, "return_lse": FLAG, "kernel": {**NAME, "other": "fa4"}, "transport": NAME,
    **{n: OPTIONS[n] for n in ("window", "chunk_size", "softmax_scale", "softcap")},
    **{n: CALL[n] for n in ("sinks", "alibi_slopes")},
}  # fmt: skip


MODULE: Values = {"none": None, "tensor": zeros(1), "list": [nn.Linear(1, 1)], "class": nn.Linear}
#: Wrong values of arguments by their names.
BY_NAME: dict[str, Values] = {
    **{n: OPTIONS[n] for n in (
        "seq_len", "cu_seqlens", "kernel", "softcap", "dropout_seed", "strategy",
        "deterministic",
    )},
    **wrong.MOVED, **dict.fromkeys(("model", "module"), MODULE), **dict.fromkeys(("x", "y"), SHARD),
    **dict.fromkeys((
        "output_final_state", "use_qk_l2norm", "dt_softplus", "delta_softplus", "balanced",
        "cuda", "entropy",
    ), FLAG),
    "cp": {"none": None, "word": "cp", "class": ContextParallel}, "weight": CLASSES,
    "ignore_index": {n: x for n, x in wrong.STEPS.items() if n != "huge"},
    "labels": {**like(2, 8, but=("integers",)), "probabilities": zeros(2, 8)},
    "reduction": {"none": None, "word": "none", "other": "max", "flag": True, "list": ["sum"]},
    "label_smoothing": {"negative": -0.1, "more than 1": 1.5, "word": "x", "none": None, "flag": True},
    "count": {
        "negative": -1, "word": "x", "flag": True, "list": [1], "several": zeros(2),
        "flags": zeros((), dtype=torch.bool),
    },
    "grad": {"word": "mean", "flag": True, "number": 1, "list": ["sum"], "class": Tensor},
    "group": GROUP, "dp": optional(GROUP), "scale": REAL, "tokens_at_once": COUNT,
    "device": {"word": "gpu7", "number": 1.5, "list": ["cpu"], "flag": True},
    "batch": {"none": None, "tensor": zeros(2, 8), "list": [zeros(2, 8)], "word": "x"},
    "initial_state": optional(like(1, 4, 4, 3)),  # of linear attention
}  # fmt: skip
#: Wrong prompts and completions of a loader of rollouts.
sequences: Values = {
    "none": None, "word": "x", "number": 1, "rows": [ids(1, 3).long()], "floats": [zeros(3)],
    "of more": [ids(3).long()] * 2,
}  # fmt: skip


def row(call: Any, right: dict[str, Any], free: str = "", /, **values: Values) -> Subject:
    """Return a row, in which tensors have the wrong values of their shapes if no other.

    ``free`` are those of which another last size is right, too.
    """
    shaped = {
        name: like(*x.shape, but=("size",) if name in free.split() else ())
        for name, x in right.items()
        if isinstance(x, Tensor) and x.ndim
    }
    return wrong.subject(shaped | BY_NAME, call, right, **values)


of_tokens: dict[str, Any] = {
    "cp": cp, "hidden": zeros(2, 8, 3), "head_weight": zeros(5, 3), "labels": ids(2, 8),
}  # fmt: skip
HALF: dict[str, Values] = {"bias": {**CLASSES, "half": zeros(5).half()}}

SUBJECTS: dict[str, Subject] = {
    "ring_torch.ContextParallel.gated_delta_rule": row(cp.gated_delta_rule, recurrent, "q v"),
    "ring_torch.ContextParallel.kda": row(cp.kda, {**recurrent, "g": zeros(*HEADS, 4)}, "q v"),
    "ring_torch.ContextParallel.simple_gla": row(
        cp.simple_gla, {name: recurrent[name] for name in "qkvg"}, "q v",
        g=optional(like(*HEADS)), g_gamma=optional(like(4)),
    ),
    "ring_torch.ContextParallel.ssd": row(
        cp.ssd, ssd, "B x", D=optional(like(4, but=("one axis more",))),
        z=optional(like(*VALUES)), dt_bias=optional(like(4)), initial_states=optional(like(1, 4, 3, 4)),
        dt_limit={
            "number": 1.0, "none": None, "falling": (1.0, 0.5), "words": ("0", "1"), "nan": (0.0, float("nan")),
            "flags": (False, True), "three": (0.0, 1.0, 2.0),
        },
    ),
    "ring_torch.ContextParallel.selective_scan": row(
        cp.selective_scan,
        {"u": zeros(HEADS), "delta": zeros(HEADS), "A": zeros(4, 3), "B": zeros(1, 8, 3), "C": zeros(1, 8, 3)},
        "u A", B=like(1, 8, 3, but=("one axis more",)), D=optional(like(4)),
        z=optional(like(*HEADS)), delta_bias=optional(like(4)),
    ),
    "ring_torch.ContextParallel.linear_recurrence": row(
        cp.linear_recurrence, {"a": zeros(VALUES), "b": zeros(VALUES)},
        a=like(*VALUES, but=("size", "one axis more")), initial_state=optional(like(1, 4, 3)),
    ),
    "ring_torch.ContextParallel.causal_conv1d": row(
        cp.causal_conv1d, {"x": zeros(HEADS), "weight": zeros(4, 3)}, "x weight",
        bias=optional(like(4)), activation=optional(OPTIONS["kernel"]),
    ),
    "ring_torch.ring_attention": row(ring_attention, inputs, **CALL),
    "ring_torch.ContextParallel": row(first_used, {}),
    "ring_torch.ContextParallel.attention": row(cp.attention, inputs, **CALL),
    "ring_torch.ContextParallel.explain": row(cp.explain, inputs, **CALL),
    "ring_torch.ContextParallel.explain_recurrent": row(
        lambda layer, a, b: cp.explain_recurrent(layer, a=a, b=b),
        {"layer": "linear_recurrence", "a": zeros(VALUES), "b": zeros(VALUES)},
        layer=optional(OPTIONS["kernel"]), a=like(*VALUES, but=("size", "one axis more")),
    ),
    "ring_torch.KVCache": row(
        ring_torch.KVCache,
        {
            "cp": cp, "num_layers": 1, "num_kv_heads": 2, "head_dim": 4, "max_requests": 1,
            "max_tokens": 8, "dtype": torch.float32,
        },
        v_head_dim=SIZE, page_size={**COUNT, "no power of two": 24},
        **dict.fromkeys(("num_layers", "num_kv_heads", "head_dim", "max_requests", "max_tokens"), COUNT),
        dtype={"none": None, "word": "float32", "integers": torch.int32, "class": float, "8 bits": torch.float8_e4m3fn},
    ),
    "ring_torch.ContextParallel.decode": row(
        cp.decode, {"q": zeros(Q), "cache": cache, "layer": 0}, **SERVED, q=CALL["q"],
        requests={"number": 0, "word": "01", "unknown": (0, 7), "twice": (0, 0), "floats": (0.0, 1.0), "flags": (False, True), "too few": (0,), "none at all": (), "tensor": ids(2)},
    ),
    "ring_torch.ContextParallel.prefill": row(
        cp.prefill, {**{n: zeros(x) for n, x in ROW.items()}, "cache": first, "layer": 0, "request": 0},
        **SERVED, request=INDEX, v=optional(like(*ROW["v"])),
    ),
    "ring_torch.ContextParallel.merge_partials": row(
        cp.merge_partials, {"out": zeros(Q), "lse": zeros(2, 4, 8)}, "out",
        lse={**like(2, 4, 8), "half": zeros(2, 4, 8).half()}, lse_base={**NAME, "ten": "10"},
    ),
    "ring_torch.ContextParallel.explain_serving": row(
        lambda name, q, layer: cp.explain_serving(name, q, cache, layer=layer),
        {"name": "decode", "q": zeros(Q), "layer": 0}, name=NAME, q=CALL["q"], layer=INDEX,
    ),
    "ring_torch.ContextParallel.verify": row(
        cp.verify, {"model": nn.Linear(2, 2), "batch": {"input": zeros(1, 8, 2)}},
        dims={"word": "x", "list": [1], "no tensor": {"other": 1}, "too large": {"input": 3}},
    ),
    "ring_torch.preflight": row(
        preflight, {
            "cp": cp, "step": lambda model, batch: model(batch).sum(), "model": nn.Linear(2, 2),
            "batch": zeros(1, 8, 2),
        },
        step={"none": None, "word": "x"}, batch={"object": object()}, after_backward={"word": "x"},
        loss={"none": None, "word": "all"}, rtol={"word": "x", "negative": -1.0, "nan": math.nan},
    ),
    "ring_torch.ContextParallel.check_equal": row(
        check_equal, {"cp": cp, "x": zeros(2), "what": "x"},
        x={"object": object(), "class": nn.Linear}, what={"none": None, "number": 3}, every=COUNT,
    ),
    "ring_torch.ContextParallel.whole_length": row(
        cp.whole_length, {"x": zeros(1, 8)},
        x={"none": None, "word": "x", "negative": -1, "fraction": 1.5}, dim={"none": None, "too large": 2},
    ),
    "ring_torch.ContextParallel.layout_of": row(
        even.layout_of, {"seq_len": 8}, seq_len={**COUNT, "indivisible": 7}
    ),
    "ring_torch.ContextParallel.positions": row(even.positions, {"seq_len": 8}, seq_len=COUNT),
    "ring_torch.ContextParallel.shard": row(cp.shard, {"x": zeros(Q)}, fill={**wrong.FILL, "without pad": 1.0}),
    "ring_torch.ContextParallel.unshard": row(cp.unshard, {"x": zeros(Q)}),
    "ring_torch.hf.shard_batch": row(hf.shard_batch, {"cp": cp, "batch": batch, "model": nn.Linear(1, 1)}),
    "ring_torch.ContextParallel.reduce_gradients": row(cp.reduce_gradients, {"model": nn.Linear(1, 1)}),
    "ring_torch.ContextParallel.reduce_each_gradient": row(
        cp.reduce_each_gradient, {"model": nn.Linear(1, 1)}
    ),
    "ring_torch.cross_entropy": row(
        ring_torch.cross_entropy, {"cp": cp, "logits": zeros(2, 8, 5), "labels": ids(2, 8)}, "logits"
    ),
    "ring_torch.linear_cross_entropy": row(ring_torch.linear_cross_entropy, of_tokens, **HALF),
    "ring_torch.training.token_log_probs": row(
        training.token_log_probs, of_tokens, **HALF,
        temperature={**REAL, "none": None, "zero": 0.0, "negative": -1.0},
    ),
    "ring_torch.training.sum_by_sequence": row(
        training.sum_by_sequence, {"cp": cp, "x": zeros(1, 8)},
        x=like(1, 8, but=("integers", "flags", "size")),
        segment_ids={
            "floats": zeros(1, 8), "of no token": ids(1, 7), "of a row": ids(8),
            **optional(like(1, 8, but=("integers", "flags"))),
        },
    ),
    "ring_torch.training.RolloutLoader": row(
        training.RolloutLoader,
        {"cp": cp, "prompts": [ids(3).long()], "completions": [ids(5).long()], "tokens": 8},
        **dict.fromkeys(("prompts", "completions"), sequences),
        **dict.fromkeys(("tokens", "hidden_size"), COUNT),
    ),
    "ring_torch.dataloader": row(
        ring_torch.dataloader, {"cp": cp, "loader": [ids(2, 8)]},
        loader={"none": None, "word": "x", "number": 1, "mapping": batch, "class": list},
    ),
    "ring_torch.replace_sdpa": row(
        replaced, {"module": nn.Linear(1, 1), "cp": cp},
        **dict.fromkeys(("whole_keys", "sharded_keys", "local"), NAMES),
        documents={"word": "x", "not from 0": (1, 8), "decreasing": (0, 8, 4), "floats": (0, 8.5), "number": 8},
        transport={"none": None, "word": "tcp", "number": 1, "flag": True, "list": ["p2p"]},
    ),
    "ring_torch.check": row(entered(ring_torch.check), {"every": 1}, every=ROWS),
    "ring_torch.debug": row(entered(ring_torch.debug), {"every": 1}, every=COUNT),
    "ring_torch.local.LocalRanks": row(
        LocalRanks, {"world_size": 2}, world_size=COUNT, threads=COUNT,
        timeout={**REAL, "zero": 0.0, "negative": -1.0, "none": None}, patience={**REAL, "negative": -1.0},
    ),
    "ring_torch.ContextParallel.shift": row(cp.shift, {"x": zeros(Q).half(), "n": 1}),
    "ring_torch.ContextParallel.halo": row(cp.halo, {"x": zeros(Q), "left": 1, "right": 0}),
    "ring_torch.ContextParallel.join": row(cp.join, {"y": zeros(Q)}),
    "ring_torch.ContextParallel.relayout": row(
        cp.relayout, {"x": zeros(Q), "to": "contiguous"}, seq_len=SIZE
    ),
}  # fmt: skip
#: Checked by ring_core's tests; functions with names of other libraries have their own tests.
ELSEWHERE = {
    "ring_torch.Halo", "ring_torch.KernelConfig", "ring_torch.Mask", "ring_torch.ReductionHandle",
    "ring_torch.SDPAHandle", "ring_torch.support_matrix",
}  # fmt: skip


globals().update(wrong.checks_of(SUBJECTS, ("ring_torch",), ELSEWHERE, ContextParallel))
