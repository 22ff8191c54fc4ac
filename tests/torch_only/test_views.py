"""Tensors as callers give them: views, arguments changed in place, masks as arrays.

What is a view is right compiled and in libraries that read by strides (others: the table); the
second of two calls sees what has changed in place; masks are refused as other options are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from backends.torch_ranks import Arrays, gather, run_rank
from cases import CASES, Case
from patched import chosen, replaced
from plain_flash import FLASH, PlainFlash
from tolerances import assert_close
from torch import Tensor
from views import VIEWS, strided

import ring_torch
from ring_core import ChunkLayout, KernelConfig, Mask, checks, reference
from ring_core.base.config import RingStrategy
from ring_torch import ContextParallel, compat, hf, ring_attention
from ring_torch.kernels.eager import EagerKernel, ScoreBlocks
from ring_torch.records import aligned

#: Number of ranks, layout and strategy.
WAYS: dict[str, tuple[int, Any, Any]] = {
    "alone": (1, "zigzag", "ring"), "ring": (2, "zigzag", "ring"),
    "balanced": (2, "contiguous", "balanced"), "gather": (2, "zigzag", "gather"),
    "ulysses": (2, "zigzag", "ulysses"),
}  # fmt: skip
#: A kernel, which inputs it takes, and whether calls are compiled; the table has `auto` in eager.
HOW = {
    "flash": ("flash", "-few", False), "flash compiled": ("flash", "-few", True),
    "sdpa compiled": ("sdpa", "-few", True), "eager compiled": ("eager", "", True),
}  # fmt: skip


def _on_a_rank(rank: int, case: Case, strategy: str, how: str) -> Arrays:
    kernel, _, is_compiled = HOW[how]
    attention: Any = ring_torch.ring_attention

    def attend(*qkv: Tensor, **options: Any) -> Any:
        outputs: Any = attention(*qkv, **options)
        out, *lse = outputs if isinstance(outputs, tuple) else (outputs,)
        # A model's output projection flattens the heads like this.
        out = out.flatten(2).unflatten(2, out.shape[2:])
        return (out, *lse) if lse else out

    torch._dynamo.reset()
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if is_compiled else attend
    is_flash = kernel == "flash"
    with (
        chosen(FLASH) if is_flash else nullcontext(),
        patch.object(ring_torch, "ring_attention", call),
    ):
        ways = "auto" if is_flash else kernel, strategy, "auto"
        return run_rank(rank, case, ways, None, cuda=False)


@pytest.mark.nightly(
    unless=[f"{how}-{way}-{1 + (n + m) % 7}" for n, how in enumerate(HOW) for m, way in enumerate(WAYS)]
)  # fmt: skip
@pytest.mark.parametrize("turn", range(1, 8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
def test_a_view_is_what_it_shows(how: str, way: str, turn: int, backend: Any) -> None:
    """Also in graphs, which expect strides of what a call returns."""
    (size, layout, strategy), inputs = WAYS[way], HOW[how][1]
    ring: RingStrategy = "balanced" if strategy == "balanced" else "ring"
    case = CASES[f"views{turn}{inputs}-zigzag"]
    case = replace(case, layout=layout, cp_size=size, strategy=ring)
    if how.startswith("flash"):
        case = replace(case, sinks=None)
    parts = backend.pool(size).run(_on_a_rank, replace(case), strategy, how)
    assert_close(case, gather(case, case.plan, parts))


def _inputs(view: Any = lambda x: x) -> tuple[list[Tensor], Tensor]:
    """Return views of q, k and v that are leaves, and the output's gradient."""
    qkv = [view(torch.randn(2, 24, heads, 8, dtype=torch.float64)) for heads in (4, 2, 2)]
    return [x.requires_grad_() for x in qkv], torch.randn(2, 24, 4, 8, dtype=torch.float64)


def _run(qkv: list[Tensor], dout: Tensor, **options: Any) -> None:
    q, k, v = qkv
    ring_attention(q, k, v, causal=True, **options).backward(dout)


def _narrowed(x: Tensor) -> Tensor:
    """Return the first half of a tensor that is twice as wide."""
    return torch.cat([x, -x], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("view", [VIEWS["heads_first"], _narrowed])
def test_what_kernels_can_read_is_not_copied(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the caller's tensors without a copy, and so does the backward."""
    read: list[tuple[int, ...]] = []
    for name, tensors in (("forward", 3), ("backward", 4)):
        method = getattr(PlainFlash, name)

        def spy(self: Any, *args: Any, method: Any = method, tensors: int = tensors) -> Any:
            read.append(tuple(x.data_ptr() for x in args[:tensors]))
            return method(self, *args)

        monkeypatch.setattr(PlainFlash, name, spy)
    leaves, dout = _inputs(view)
    with chosen(FLASH):
        _run(leaves, dout)
    places = tuple(leaf.data_ptr() for leaf in leaves)
    assert read == [places, (dout.data_ptr(), *places)]


def test_saved_tensors_are_the_callers_own() -> None:
    qkv, dout = _inputs(strided)
    packed: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved.data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        _run(qkv, dout)
    assert {x.data_ptr() for x in qkv} <= set(packed)


def test_kernels_refuse_what_they_cannot_read() -> None:
    with pytest.raises(AssertionError):
        aligned(strided(torch.zeros(2, 24, 4, 8)))


def test_accumulators_are_contiguous() -> None:
    recorded: list[Tensor] = []
    differentiate = EagerKernel.differentiate

    def spy(self: Any, *args: Any) -> None:
        recorded.extend(x for grads in args[-2:] for x in grads if x is not None)
        differentiate(self, *args)

    with replaced(EagerKernel, differentiate=spy):
        _run(*_inputs(VIEWS["permuted"]), kernel="eager")
    assert len(recorded) == 3 and all(y.is_contiguous() for y in recorded)


T, HEADS = 24, 2
attend: Any = ring_attention


def _narrow(x: Tensor) -> Tensor:
    return x.int() if x.dtype == torch.int64 else x


#: Containers of an argument, made from its values.
KINDS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda values: _narrow(torch.tensor(values)),
    "ndarray": np.array,
    "list": list,
    "tuple of arrays": lambda values: tuple(np.array(value) for value in values),
}
DOCUMENTS, IN_COMPAT = tuple(KINDS), ("tensor", "list")
#: Two values of each argument that can be changed in place.
VALUES: dict[str, tuple[Any, Any]] = {
    "cu_seqlens": ((0, 6, T), (0, 16, T)),
    "window": ((3, 0), (5, 0)),
    "segment_ids": ([[0] * T], [[0] * 9 + [1] * 15]),
    "bias": ([[[[0.0] * T] * T]], [[[[0.0, 1.0] * (T // 2)] * T]]),
    "sinks": ([0.0, 0.0], [1.0, 2.0]),
    "alibi_slopes": ([0.0, 0.0], [0.5, 0.25]),
    "mask": ([[True] * T] * T, [[True, False] * (T // 2)] * T),
}
OURS = {
    "cu_seqlens": DOCUMENTS, "window": ("list",), "segment_ids": ("tensor",), "bias": ("tensor",),
    "sinks": ("tensor",), "alibi_slopes": ("tensor",), "mask": ("tensor",),
}  # fmt: skip
BATCH: dict[str, tuple[str, ...]] = {"window": ("list",), "alibi_slopes": ("tensor",)}
VARLEN = BATCH | {"cu_seqlens": IN_COMPAT}


def _qkv(*lead: int) -> Any:
    torch.manual_seed(0)
    return tuple(torch.randn(*lead, T, 2, 8) for _ in range(3))


def _ours(argument: str, argument_value: Any) -> Any:
    return attend(*_qkv(1), **{argument: argument_value})


def _of_an_object(argument: str, argument_value: Any) -> Any:
    call: Any = ContextParallel().attention
    return call(*_qkv(1), causal=argument != "mask", **{argument: argument_value})


def _explained(argument: str, argument_value: Any) -> str:
    call: Any = ContextParallel().explain
    text: str = call(*_qkv(1), **{argument: argument_value})
    return text


def _of_a_mask(argument: str, argument_value: Any) -> Any:
    mask: Any = Mask
    return attend(*_qkv(1), mask=mask(**{argument: argument_value}))


def _of_the_oracle(argument: str, argument_value: Any) -> Any:
    q, k, v = (x.numpy() for x in _qkv(1))
    options: Any = {argument: argument_value}
    return torch.as_tensor(reference.attention(q, k, v, **options)[0])


def _as_there(name: str) -> Callable[[str, Any], Any]:
    """Return a function of the ring_flash_attn drop-in, which may take packed inputs."""
    call: Any = getattr(compat, name)

    def function(argument: str, argument_value: Any) -> Any:
        is_varlen, is_llama3 = "varlen" in name, name.startswith("llama3")
        q, k, v = _qkv() if is_varlen else _qkv(1)
        dim = 1 if is_varlen else 2
        inputs = [q, k, v]
        if "qkvpacked" in name:
            inputs = [torch.stack([q, k, v], dim=dim)]
        elif "kvpacked" in name:
            inputs = [q, torch.stack([k, v], dim=dim)]
        options = {{"window": "window_size"}.get(argument, argument): argument_value}
        documents = [options.pop("cu_seqlens", torch.tensor([0, T], dtype=torch.int32)), T]
        if is_llama3:
            *documents, part = compat.llama3_flash_attn_prepare_cu_seqlens(documents[0], True, 0, 1)
            options |= {"heads_k_stride": 1, "local_k_slice": part}
        return call(*inputs, *(documents if is_varlen else []), causal=True, **options)

    return function


Function = Callable[[str, Any], Any]
OF_COMPAT = [name for name in vars(compat) if name.endswith("_func")]
#: Every public function with arguments that can be changed in place, and their containers.
FUNCTIONS: dict[str, tuple[Function, dict[str, tuple[str, ...]]]] = {
    "ring_attention": (_ours, OURS),
    "ContextParallel.attention": (_of_an_object, OURS),
    "ContextParallel.explain": (_explained, {name: OURS[name] for name in ("cu_seqlens", "window")}),
    "Mask": (_of_a_mask, {name: OURS[name] for name in ("cu_seqlens", "window")}),
    "reference.attention": (_of_the_oracle, {"cu_seqlens": DOCUMENTS, "window": ("list",)}),
    **{name: (_as_there(name), BATCH) for name in OF_COMPAT if "varlen" not in name},
    **{name: (_as_there(name), VARLEN) for name in OF_COMPAT if "varlen" in name},
    **{
        name: (_as_there(name), BATCH | {"cu_seqlens": ("tensor",)})
        for name in OF_COMPAT if name.startswith("llama3")
    },
}  # fmt: skip
CHANGES = [
    (name, argument, kind)
    for name, (_, arguments) in FUNCTIONS.items()
    for argument, kinds in arguments.items()
    for kind in kinds
]
COMPILED = [case for case in CHANGES if case[0] in {"ring_attention", "ContextParallel.attention"}]


def _change(argument_value: Any, values: Any) -> None:
    if isinstance(argument_value, Tensor):
        argument_value.copy_(torch.tensor(values))
        return
    for n, value in enumerate(values):
        if isinstance(argument_value, tuple):
            argument_value[n][...] = value
        else:
            argument_value[n] = value


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, str) else torch.equal(a, b)


def _check(function: Function, argument: str, kind: str) -> None:
    """Compare two calls with an argument changed between them, and two with fresh ones."""
    first, second = VALUES[argument]
    argument_value = KINDS[kind](first)
    results = [function(argument, argument_value)]
    _change(argument_value, second)
    results.append(function(argument, argument_value))
    for result, value in zip(results, (first, second), strict=True):
        assert _same(result, function(argument, KINDS[kind](value)))
    assert isinstance(results[0], str) or not _same(*results)  # numbers are the same


def test_every_function_that_takes_documents_is_here() -> None:
    taken = {
        name for module in (ring_torch, compat) for name, function in vars(module).items()
        if inspect.isfunction(function) and "cu_seqlens" in str(inspect.signature(function))
    }  # fmt: skip
    others = {"llama3_flash_attn_prepare_cu_seqlens", "update_ring_flash_attn_params"}
    assert taken - others == {name for name, (_, argument_value) in FUNCTIONS.items() if "cu_seqlens" in argument_value} - {
        "ContextParallel.attention", "ContextParallel.explain", "Mask", "reference.attention",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "kind"), CHANGES)
def test_changed_in_place(name: str, argument: str, kind: str) -> None:
    _check(FUNCTIONS[name][0], argument, kind)


@pytest.mark.nightly(  # per change calls of the function cover all arguments
    only=[
        f"ContextParallel.attention-{argument}-{kind}"
        for name, argument, kind in COMPILED
        if name == "ContextParallel.attention" and kind != "list"
    ]
)
@pytest.mark.parametrize(("name", "argument", "kind"), COMPILED)
def test_changed_in_place_under_the_compiler(name: str, argument: str, kind: str) -> None:
    torch._dynamo.reset()
    call: Any = attend if name == "ring_attention" else ContextParallel().attention

    def function(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor = call(q, k, v, **options)
        return out * 2.0

    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    _check(
        lambda argument, argument_value: compiled(*_qkv(1), {argument: argument_value}),
        argument,
        kind,
    )


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "attention_mask"])
def test_batches_refilled_in_place(name: str) -> None:
    cp, model = ContextParallel(), torch.nn.Linear(1, 1)
    ids, labels = torch.arange(T)[None], torch.arange(T)[None]
    labels[:, -4:] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name in {"position_ids", "attention_mask"}:
        batch[name] = torch.arange(T)[None] if name == "position_ids" else torch.ones_like(ids)

    def split(batch: dict[str, Tensor]) -> list[Any]:
        parts = hf.shard_batch(cp, batch, model=model)
        mask: Any = parts.pop("attention_mask")
        numbers = {key: x.tolist() for key, x in parts.items() if isinstance(x, Tensor)}
        return [numbers, mask.cu_seqlens, mask.segment_ids]

    first = split(batch)
    changed = batch[name]
    if name == "attention_mask":
        changed[:, -4:] = 0
    else:
        changed[:, 12:18] = changed[:, :6].clone()
    second = split(batch)
    assert second == split({key: x.clone() for key, x in batch.items()})
    assert first != second


def test_chunks_changed_in_place() -> None:
    rows: Any = [[0, 1], [2, 3]]
    layout = ChunkLayout(rows)
    rows[0][1] = 2
    assert layout == ChunkLayout(((0, 1), (2, 3)))


@pytest.mark.parametrize("inference", [False, True])
def test_prepared_offsets_changed_in_place_are_refused(inference: bool) -> None:
    attend: Any = compat.llama3_flash_attn_varlen_func
    with torch.inference_mode(inference):
        offsets = torch.tensor(VALUES["cu_seqlens"][0], dtype=torch.int32)
        prepared: Any = compat.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
        cu_q, cu_k, most_q, most_k, part = prepared
        cu_q[1] = 16
        with pytest.raises(ValueError, match="cu_seqlens_q is"):
            attend(
                *_qkv(), cu_q, cu_k, most_q, most_k, heads_k_stride=1, local_k_slice=part,
                causal=True,
            )  # fmt: skip


def _in_double() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, T, HEADS, 8, dtype=torch.float64) for _ in range(3)]


MASK = torch.ones(T, T, dtype=torch.bool)


def test_hidden_blocks_are_not_computed() -> None:
    qkv = _in_double()
    chunk = torch.arange(T) // 4
    mask = chunk[:, None] == chunk
    live = mask.view(6, 4, 4, 6).any(dim=3).any(dim=1).sum()
    kernel = KernelConfig("eager", block_q=4, block_k=6)
    with patch.object(
        ScoreBlocks, "scores", autospec=True, side_effect=ScoreBlocks.scores
    ) as scores:
        ring_attention(qkv[0].requires_grad_(), *qkv[1:], mask=mask, kernel=kernel).sum().backward()
    assert live < 6 * 4
    assert scores.call_count == 2 * live


#: Options beside right ones, and the error.
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("mask", torch.zeros(T, T), "array of booleans, got one of float32"),
    ("mask", torch.ones(T, T, dtype=torch.int32), "array of booleans, got one of int32"),
    ("mask", torch.zeros(T, T + 1) > 0, rf"shape \[{T}, {T}\]"),
    ("mask", torch.zeros(3, 1, T, T) > 0, "got"), ("mask", torch.zeros(T) > 0, "got"),
    ("mask", torch.zeros(T, T, device="meta") > 0, "mask is on meta"),
    ("bias", [0.0], "bias must be a torch.Tensor"),
    ("bias", torch.zeros(T, T), "bias must have shape"),
    ("bias", torch.zeros(1, 1, 1, T), "bias must have shape"),
    ("bias", torch.zeros(1, 1, T, T + 1), "bias must have shape"),
    ("bias", torch.zeros(1, 1, T, T, dtype=torch.int64), "bias must be floating point"),
    ("bias", torch.zeros(1, 1, T, T, device="meta"), "bias must be on cpu"),
    *((name, [0.0], f"{name} must be a torch.Tensor") for name in "qkv"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_is_wrong_is_refused_beside_a_mask_as_without_one(
    name: str, value: Any, message: str
) -> None:
    options: list[dict[str, Any]] = [{}, {"mask": MASK}]
    for beside in options:
        call: Any = dict(zip("qkv", _in_double(), strict=True)) | beside | {name: value}
        with pytest.raises(ValueError, match=message):
            ring_attention(**call)


def test_what_is_too_large_is_told_what_to_use() -> None:
    mask = checks.Tensor((1 << 13, (1 << 13) + 1), "bool", "cpu")
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        checks.check_dense_mask(mask, (1, 1 << 13, 1, 8), (1 << 13) + 1, "cpu")
    fits = checks.Tensor((1 << 13, 1 << 13), "bool", "cpu")
    checks.check_dense_mask(fits, (1, 1 << 13, 1, 8), 1 << 13, "cpu")
