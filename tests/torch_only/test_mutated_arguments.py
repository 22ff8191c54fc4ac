"""Arguments changed in place between two calls: the second call sees the new values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ring_torch
from ring_core import ChunkLayout, Mask, reference
from ring_torch import ContextParallel, compat, hf, ring_attention

T = 24
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
CASES = [
    (name, argument, kind)
    for name, (_, arguments) in FUNCTIONS.items()
    for argument, kinds in arguments.items()
    for kind in kinds
]
COMPILED = [case for case in CASES if case[0] in {"ring_attention", "ContextParallel.attention"}]


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
    """No public function with ``cu_seqlens`` in its signature is missing here."""
    taken = {
        name for module in (ring_torch, compat) for name, function in vars(module).items()
        if inspect.isfunction(function) and "cu_seqlens" in str(inspect.signature(function))
    }  # fmt: skip
    others = {"llama3_flash_attn_prepare_cu_seqlens", "update_ring_flash_attn_params"}
    assert taken - others == {name for name, (_, argument_value) in FUNCTIONS.items() if "cu_seqlens" in argument_value} - {
        "ContextParallel.attention", "ContextParallel.explain", "Mask", "reference.attention",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "kind"), CASES)
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


def test_a_mask_keeps_what_its_array_held() -> None:
    offsets = np.array(VALUES["cu_seqlens"][0])
    mask = Mask(cu_seqlens=offsets)  # type: ignore[arg-type]  # an array is taken, too
    offsets[1] = 16
    assert mask == Mask(cu_seqlens=VALUES["cu_seqlens"][0])
    assert torch.equal(attend(*_qkv(1), mask=mask), _ours("cu_seqlens", VALUES["cu_seqlens"][0]))


def test_chunks_changed_in_place() -> None:
    rows: Any = [[0, 1], [2, 3]]
    layout = ChunkLayout(rows)
    rows[0][1] = 2
    assert layout == ChunkLayout(((0, 1), (2, 3)))


@pytest.mark.parametrize("inference", [False, True])
def test_prepared_offsets_changed_in_place_are_refused(inference: bool) -> None:
    """Changed offsets are refused once prepared, also inference tensors, which count no writes."""
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
