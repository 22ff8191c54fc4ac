"""Tensors as callers give them: views, arguments changed in place, masks as arrays.

Views are not copied where kernels can read them (that results are right: the table, compiled calls
and repeated launches); the second of two calls sees what has changed in place; masks are refused as
other options are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from patched import chosen
from plain_flash import FLASH, PlainFlash
from refused import refused
from torch import Tensor
from torch.nn.functional import pad
from views import VIEWS

import ring_torch
from ring_core import ChunkLayout, KernelConfig, Mask, checks, reference
from ring_torch import ContextParallel, compat, hf, ring_attention
from ring_torch.kernels.eager import ScoreBlocks


def _narrowed(x: Tensor) -> Tensor:
    """Return the first half of a tensor that is twice as wide."""
    return torch.cat([x, -x], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("view", [VIEWS["heads_first"], _narrowed])
def test_what_kernels_can_read_is_not_copied(view: Any) -> None:
    """The kernel gets the caller's tensors without a copy, and so does the backward."""
    *qkv, dout = (torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [view(x).requires_grad_() for x in qkv]
    forward, backward = (
        patch.object(PlainFlash, name, autospec=True, side_effect=getattr(PlainFlash, name))
        for name in ("forward", "backward")
    )
    with chosen(FLASH), forward as attended, backward as differentiated:
        ring_attention(*leaves, causal=True).backward(dout)
    places = [x.data_ptr() for x in leaves]
    assert [x.data_ptr() for x in attended.call_args.args[1:4]] == places
    read = differentiated.call_args.args[1:5]
    assert [x.data_ptr() for x in read] == [dout.data_ptr(), *places]


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
Kinds = dict[str, tuple[str, ...]]
RULES: Kinds = {"cu_seqlens": tuple(KINDS), "window": ("list",)}
OURS: Kinds = RULES | dict.fromkeys(
    ("segment_ids", "bias", "sinks", "alibi_slopes", "mask"), ("tensor",)
)
BATCH: Kinds = {"window": ("list",), "alibi_slopes": ("tensor",)}


def _qkv(*lead: int) -> Any:
    torch.manual_seed(0)
    return tuple(torch.randn(*lead, T, HEADS, 8) for _ in range(3))


def _as_there(name: str, **options: Any) -> Any:
    """Call a function of the ring_flash_attn drop-in."""
    call: Any = getattr(compat, name)
    options = {{"window": "window_size"}.get(key, key): x for key, x in options.items()}
    if "varlen" not in name:
        return call(*_qkv(1), causal=True, **options)
    documents = [options.pop("cu_seqlens", torch.tensor([0, T], dtype=torch.int32)), T]
    if name.startswith("llama3"):
        *documents, part = compat.llama3_flash_attn_prepare_cu_seqlens(documents[0], True, 0, 1)
        options |= {"heads_k_stride": 1, "local_k_slice": part}
    return call(*_qkv(), *documents, causal=True, **options)


def _kinds_there(name: str) -> Kinds:
    """Return the arguments of a function of the drop-in that can be changed in place."""
    documents = ("tensor",) if name.startswith("llama3") else ("tensor", "list")
    return BATCH | ({"cu_seqlens": documents} if "varlen" in name else {})


Function = Callable[..., Any]
CP: Any = ContextParallel
#: Every public function with arguments that can be changed in place, and their containers. Those of
#: packed tensors call the others.
FUNCTIONS: dict[str, tuple[Function, Kinds]] = {
    "ring_attention": (lambda **x: attend(*_qkv(1), **x), OURS),
    "ContextParallel.attention": (
        lambda **x: CP().attention(*_qkv(1), causal="mask" not in x, **x), OURS
    ),
    "ContextParallel.explain": (lambda **x: CP().explain(*_qkv(1), **x), RULES),
    "Mask": (lambda **x: attend(*_qkv(1), mask=Mask(**x)), RULES),
    "reference.attention": (
        lambda **x: torch.as_tensor(reference.attention(*(y.numpy() for y in _qkv(1)), **x)[0]), RULES
    ),
    **{
        name: (partial(_as_there, name), _kinds_there(name))
        for name in vars(compat) if name.endswith("_func") and "packed" not in name
    },
}  # fmt: skip
CHANGES = [
    (name, argument, kind)
    for name, (_, arguments) in FUNCTIONS.items()
    for argument, kinds in arguments.items()
    for kind in kinds
]


def _change(argument_value: Any, values: Any) -> None:
    if isinstance(argument_value, Tensor):
        argument_value.copy_(torch.tensor(values))
        return
    for n, value in enumerate(values):
        if isinstance(argument_value, tuple):
            argument_value[n][...] = value
        else:
            argument_value[n] = value


def test_every_function_that_takes_documents_is_here() -> None:
    taken = {
        name for module in (ring_torch, compat) for name, function in vars(module).items()
        if inspect.isfunction(function) and "cu_seqlens" in str(inspect.signature(function)) and "packed" not in name
    }  # fmt: skip
    others = {"llama3_flash_attn_prepare_cu_seqlens", "update_ring_flash_attn_params"}
    here = {name for name, (_, kinds) in FUNCTIONS.items() if "cu_seqlens" in kinds}
    assert taken - others == {x for x in here if "." not in x and x != "Mask"}


@pytest.mark.parametrize(("name", "argument", "kind"), CHANGES)
def test_changed_in_place(name: str, argument: str, kind: str) -> None:
    """Compare two calls with an argument changed between them, and two with fresh ones."""
    function, values = FUNCTIONS[name][0], VALUES[argument]
    changed = KINDS[kind](values[0])
    results = [function(**{argument: changed})]
    _change(changed, values[1])
    results.append(function(**{argument: changed}))
    expected = [function(**{argument: KINDS[kind](x)}) for x in values]
    if isinstance(results[0], str):  # of ``explain``, whose numbers are the same
        assert results == expected
    else:
        assert all(map(torch.equal, results, expected)) and not torch.equal(*results)


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
        prepared: list[Any]
        *prepared, part = compat.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
        prepared[0][1] = 16
        options = {"heads_k_stride": 1, "local_k_slice": part, "causal": True}
        refused("cu_seqlens_q is", attend, *_qkv(), *prepared, **options)


def test_hidden_blocks_are_not_computed() -> None:
    """Lengths are no multiples of the blocks."""
    q, k, v = _qkv(2)
    chunk, kernel = torch.arange(T) // 4, KernelConfig("eager", block_q=5, block_k=7)
    mask = chunk[:, None] == chunk
    live = pad(mask, (0, 4, 0, 1)).view(5, 5, 4, 7).any(dim=3).any(dim=1).sum()
    expected = attend(q, k, v, mask=mask, kernel="eager")
    with patch.object(
        ScoreBlocks, "scores", autospec=True, side_effect=ScoreBlocks.scores
    ) as scores:
        out = attend(q.requires_grad_(), k, v, mask=mask, kernel=kernel)
        out.sum().backward()
    assert live < 5 * 4
    assert scores.call_count == 2 * live
    torch.testing.assert_close(out, expected)


#: Options beside right ones, and the error.
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("mask", torch.zeros(T, T), "array of booleans, got one of float32"),
    ("mask", torch.ones(T, T, dtype=torch.int32), "array of booleans, got one of int32"),
    ("mask", torch.zeros(T, T + 1) > 0, rf"shape \[{T}, {T}\]"),
    ("mask", torch.zeros(3, 1, T, T) > 0, "got"), ("mask", torch.zeros(T) > 0, "got"),
    ("mask", torch.zeros(T, T, device="meta") > 0, "mask is on meta"),
    ("bias", torch.zeros(1, 1, 1, T), "bias must have shape"),
    ("bias", torch.zeros(1, 1, T, T, dtype=torch.int64), "bias must be floating point"),
    ("bias", torch.zeros(1, 1, T, T, device="meta"), "bias must be on cpu"),
    *((name, [0.0], f"{name} must be a torch.Tensor") for name in ("bias", *"qkv")),
)  # fmt: skip


def test_what_is_wrong_is_refused_beside_a_mask_as_without_one() -> None:
    for name, value, message in REFUSED:
        for mask in (None, torch.ones(T, T, dtype=torch.bool)):
            call: Any = dict(zip("qkv", _qkv(2), strict=True)) | {"mask": mask, name: value}
            refused(message, ring_attention, **call)


def test_what_is_too_large_is_told_what_to_use() -> None:
    mask = checks.Tensor((1 << 13, (1 << 13) + 1), "bool", "cpu")
    said = r"at most 64 MiB .*Mask\(predicate"
    refused(said, checks.check_dense_mask, mask, (1, 1 << 13, 1, 8), (1 << 13) + 1, "cpu")
    fits = checks.Tensor((1 << 13, 1 << 13), "bool", "cpu")
    checks.check_dense_mask(fits, (1, 1 << 13, 1, 8), 1 << 13, "cpu")
