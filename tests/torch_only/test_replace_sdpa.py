"""``replace_sdpa``: plain models compute on a ring what they compute on one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_four_ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from unchanged_models import DIM, GPT, MODELS, Block, SelfAttention, batch_of, model_of

from ring_core import UnsupportedError, WrongResultError
from ring_torch import ContextParallel, replace_sdpa
from ring_torch.local import LocalRanks

MODES = ("eager", "compiled", "blocks compiled", "reentrant", "checkpoint", "autocast", "inference")


def modes_left() -> int:
    """Return the number of torch function modes that are active in this thread."""
    return len(torch.overrides._get_current_function_mode_stack())


def _run(model: Any, batch: dict[str, Tensor], mode: str) -> Tensor:
    """Run a model forward and, unless it is inference, backward; return its output."""
    if mode == "blocks compiled":
        for block in model.modules():
            if isinstance(block, Block):
                block.compile(fullgraph=True, backend="aot_eager")
    call: Any = model
    if mode == "compiled":
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    if mode in ("reentrant", "checkpoint"):
        model.use_reentrant = mode == "reentrant"
    autocast = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
    with torch.inference_mode() if mode == "inference" else nullcontext(), autocast:
        out: Tensor = call(**batch)
        if mode != "inference":
            out.square().sum().backward()
    return out.detach()


SLOW = [
    ("gpt", "blocks compiled", "zigzag"), ("dit", "compiled", "zigzag"),
    ("pair", "blocks compiled", "contiguous"),
]  # fmt: skip
RUNS = [
    *((name, "eager", "zigzag") for name in MODELS),
    *(("gpt", mode, "zigzag") for mode in MODES if mode != "eager"),
    ("gpt", "eager", "striped"), ("vit", "inference", "zigzag"), *SLOW[1:],
]  # fmt: skip


#: A line of each model's list of modules.
LISTED = {
    "gpt": "blocks.1.attention: own keys, causal, 8 queries, 8 keys of this rank",
    "vit": "encoder.layers.0.self_attn: own keys, 8 queries, 8 keys of this rank",
    "dit": "last.cross: whole keys, 6 queries, 5 keys of this rank",
    "pair": "decoder.cross: sharded keys, attn_mask, 8 queries, 12 keys of this rank",
}


@pytest.mark.nightly(only=["-".join(run) for run in SLOW])
@pytest.mark.parametrize(("name", "mode", "layout"), RUNS)
@on_ranks
def test_a_model_is_that_of_one_process(name: str, mode: str, layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    _class, dims, options = MODELS[name]
    batch, whole, model = batch_of(name), model_of(name), model_of(name)
    handle = replace_sdpa(model, cp, **options)
    shards = {key: cp.shard(x, dim=dims[key]) if key in dims else x for key, x in batch.items()}
    expected = _run(whole, batch, "eager" if "compiled" in mode else mode)
    out = _run(model, shards, mode)
    rtol, atol = (3e-2, 3e-2) if mode == "autocast" else (1e-4, 2e-5)
    torch.testing.assert_close(cp.unshard(out), expected, rtol=rtol, atol=atol)
    if mode != "inference":
        cp.reduce_gradients(model)
        for (key, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None, key
            size = float(b.grad.norm())
            torch.testing.assert_close(a.grad / size, b.grad / size, rtol=rtol, atol=atol)
    assert modes_left() == 0
    if mode == "eager":
        handle.verify(batch, dims=dims)
        assert LISTED[name] in str(handle).splitlines()
        with cp.whole():
            torch.testing.assert_close(model(**batch), expected)
    if "compiled" in mode:
        assert "torch.compile" in str(handle)
    handle.remove()
    handle.remove()
    run_alone = _run(model, batch, "inference")
    with torch.inference_mode():
        torch.testing.assert_close(run_alone, model_of(name)(**batch))  # never replaced
    assert type(model) is MODELS[name][0]


class Attend(nn.Module):
    """A module that only calls SDPA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out: Tensor = functional.scaled_dot_product_attention(q, k, v, **options)
        return out


def _qkv(length: int = 16, heads: int = 2, keys: int | None = None) -> list[Tensor]:
    sizes = (heads, length), (2, keys or length), (2, keys or length)
    return [numbers(seed, 2, *size, 8) for seed, size in enumerate(sizes)]


def _compare(
    cp: ContextParallel, attend: nn.Module, qkv: list[Tensor], whole: dict[str, Any],
    split: dict[str, Any],
) -> None:  # fmt: skip
    """Compare attention of shards with attention of the whole, and the gradients of q, k and v."""
    dim = qkv[0].ndim - 2
    wholes = [x.clone().requires_grad_() for x in qkv]
    shards = [cp.shard(x, dim=dim).requires_grad_() for x in qkv]
    q, k, v = wholes
    expected = functional.scaled_dot_product_attention(q, k, v, **whole)
    out = attend(*shards, **split)
    torch.testing.assert_close(cp.unshard(out.detach(), dim=dim), expected.detach())
    grad = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    expected.backward(grad)
    out.backward(cp.shard(grad, dim=dim))
    for a, b in zip(shards, wholes, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(cp.unshard(a.grad, dim=dim), b.grad)


@on_ranks
def test_masks_and_options_mean_what_they_do_on_one_process(rank: int) -> None:
    cp = ContextParallel()
    attend = Attend()
    handle = replace_sdpa(attend, cp)
    draw = torch.Generator().manual_seed(4)
    shown = torch.rand(2, 1, 1, 16, generator=draw) < 0.6
    square = torch.rand(1, 2, 16, 16, generator=draw) < 0.5
    square |= torch.eye(16, dtype=torch.bool)
    added = torch.randn(2, 2, 1, 16, generator=draw, dtype=torch.float64)
    bias = torch.randn(1, 1, 16, 16, generator=draw, dtype=torch.float64)
    own = cp.shard(shown, dim=3)
    for whole, *splits in (
        (shown, own, own.expand(2, 2, 8, 8), shown, shown.expand(2, 1, 16, 16)),
        (added, cp.shard(added, dim=3)), (square, cp.shard(square, dim=2), square),
        (bias, cp.shard(bias, dim=2)), (bias[0, 0], bias[0, 0]),
    ):  # fmt: skip
        for split in splits:
            _compare(cp, attend, _qkv(), {"attn_mask": whole}, {"attn_mask": split})
    _compare(cp, attend, _qkv(), *[{"is_causal": True, "scale": 0.3}] * 2)
    q, k, v = _qkv()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled(*(cp.shard(x.repeat(1, 2, 1, 1), dim=2) for x in (q, k, v)))
    torch.testing.assert_close(  # the number of heads has changed: it is symbolic in this graph
        compiled(*(cp.shard(x, dim=2) for x in _qkv()), attn_mask=square),
        cp.shard(functional.scaled_dot_product_attention(q, k, v, attn_mask=square), dim=2),
    )
    # A row for a rank's only query, or one expanded over a rank's queries, belongs to this rank:
    # other ranks' rows differ.
    in_order = ContextParallel(layout="contiguous")
    near = Attend()
    replace_sdpa(near, in_order)
    causal = torch.ones(2, 2).tril().bool()
    _compare(in_order, near, _qkv(2), {"attn_mask": causal}, {"attn_mask": causal[[rank]]})
    blocks = torch.arange(16) < torch.tensor([[5], [11]]).repeat_interleave(8, 0)
    mine = blocks[8 * rank].expand(8, 16)
    _compare(in_order, near, _qkv(), {"attn_mask": blocks}, {"attn_mask": mine})
    _compare(cp, attend, _qkv(heads=4), *[{"enable_gqa": True, "is_causal": True}] * 2)
    _compare(cp, attend, [x[:, 0] for x in _qkv()], {}, {})  # heads in the batch dimension, or none
    # The bias of a key gets its gradient from the queries of all ranks.
    weights = [x.clone().requires_grad_() for x in (added, cp.shard(added, dim=3))]
    _compare(cp, attend, _qkv(), {"attn_mask": weights[0]}, {"attn_mask": weights[1]})
    assert weights[0].grad is not None and weights[1].grad is not None
    torch.testing.assert_close(weights[1].grad, cp.shard(weights[0].grad, dim=3))
    # Documents, padding after the last one, and shards that are longer than these.
    for offsets, length in (((0, 5, 13), 13), ((0, 5), 16)):
        handle.documents = offsets
        out = attend(*(cp.shard(x, dim=2, pad=True) for x in _qkv(length)), is_causal=True)
        end = offsets[-1]
        document = torch.bucketize(torch.arange(end), torch.tensor([5]), right=True)
        same = (document[:, None] == document) & torch.ones(end, end).tril().bool()
        q, k, v = (x[:, :, :end] for x in _qkv(length))
        expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=same)
        torch.testing.assert_close(cp.unshard(out, dim=2)[:, :, :end], expected)
    handle.documents = (0, 5, 13)
    attend.register_parameter("unused", nn.Parameter(torch.ones(1)))  # all gradients are zeros
    report = handle.verify(dict(zip("qkv", _qkv(), strict=True)), dims=dict.fromkeys("qkv", 2))
    assert report.logits is not None and report.logits.is_within


def _dropout(_: int) -> tuple[Tensor, Tensor]:
    """Check dropout on the ring; return outputs of equal queries over whole keys."""
    cp = ContextParallel()
    attend, shards = Attend(), [cp.shard(x, dim=2) for x in _qkv()]
    handle = replace_sdpa(attend, cp)
    torch.manual_seed(5)
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    torch.manual_seed(5)
    out = attend(*shards, dropout_p=0.5)
    plain = ContextParallel(layout="contiguous")  # without positions any order is right
    q, k, v = (x.transpose(1, 2) for x in shards)
    expected = plain.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    # A checkpoint restores the generator, so recomputation drops the same weights.
    x, results = shards[0].clone().requires_grad_(), []
    for call in (attend, partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(5)
        out = call(x, *shards[1:], dropout_p=0.5)
        results.append(torch.autograd.grad(out.sum(), x)[0])
    torch.testing.assert_close(*results)
    handle.remove()
    outer = nn.ModuleDict({"cross": Attend()})
    replace_sdpa(outer, cp, whole_keys=("cross",))
    state = torch.get_rng_state()
    q, k, v = _qkv(keys=5)
    dropped = outer["cross"](q, k, v, dropout_p=0.5)
    torch.set_rng_state(state)
    return dropped, outer["cross"](q, k, v, dropout_p=0.5)


def test_dropout_has_a_seed_that_ranks_share(pool: LocalRanks) -> None:
    (first, again), (second, _) = pool.run(_dropout)
    torch.testing.assert_close(first, again)
    assert not torch.equal(first, second)  # ranks hold different queries, so drop different weights


class Other(nn.Module):
    """A module whose attention is not torch's SDPA."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *tensors: Tensor) -> Any:
        return self.attend(*tensors)


def _heads_by_function(q: Tensor, *_: Tensor) -> Any:
    x, weight = q[0].transpose(0, 1).flatten(1)[:, None], torch.eye(16, dtype=q.dtype)
    return functional.multi_head_attention_forward(
        x, x, x, 16, 2, weight.repeat(3, 1), None, None, None, False, 0.0, weight, None
    )


class OwnHeads(nn.MultiheadAttention):
    """A MultiheadAttention subclass with its own forward."""

    def forward(self, query: Tensor, *_: Any) -> Any:
        return super().forward(2 * query, query, query)


def _varlen(q: Tensor, *_: Tensor) -> Any:
    x, offsets = q[0].transpose(0, 1).bfloat16(), torch.tensor([0, 8], dtype=torch.int32)
    return varlen_attn(x, x, x, offsets, offsets, 8, 8)


def _flex_operator(*tensors: Tensor) -> Any:
    return torch.ops.higher_order.flex_attention(*tensors, None, (), 1.0, {})


@on_ranks
def test_what_cannot_be_exact_is_refused_by_name() -> None:
    """All refusals are raised before anything is sent."""
    cp = ContextParallel()
    attend = nn.ModuleDict({"inner": Attend(), "cross": Attend(), "other": Attend()})
    handle = replace_sdpa(attend, cp, whole_keys=("cross",), sharded_keys=("other",))
    q, k, v = (cp.shard(x, dim=2) for x in _qkv())
    square = torch.ones(8, 8, dtype=torch.bool).tril()
    gpt = model_of("gpt")
    own = copy.deepcopy(gpt)
    own.blocks[0].forward = own.blocks[0].forward

    def inner(**options: Any) -> object:
        return attend["inner"](q, k, v, **options)

    def with_documents(name: str, *offsets: int) -> None:
        handle.documents = offsets
        try:
            attend[name](q, k, v)
        finally:
            handle.documents = None

    x, heads = torch.randn(2, 8, 16), nn.MultiheadAttention(16, 2, batch_first=True)
    replace_sdpa(heads, cp)
    nested = torch.nested.nested_tensor([*x], layout=torch.jagged)
    biased = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2, add_bias_kv=True)})

    def replaced(module: nn.Module, *tensors: Tensor) -> object:
        replace_sdpa(module, cp)
        return module(*(tensors or (q, k, v)))

    def removed() -> None:
        handle.remove()
        handle.verify({"q": q})

    unsupported, wrong = "UnsupportedError replace_sdpa: ", "ValueError replace_sdpa: "
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"{unsupported}inner: 8 queries and 5 keys", lambda: attend["inner"](q, k[:, :, :5], v[:, :, :5])),
        (f"{unsupported}inner: attn_mask (1, 1, 8, 8) has a row", lambda: inner(attn_mask=square)),
        (f"{wrong}inner: attn_mask of (1, 1, 5, 8)", lambda: inner(attn_mask=square[:5])),
        (f"{wrong}give attn_mask or is_causal", lambda: inner(attn_mask=square, is_causal=True)),
        (f"{wrong}inner: 2 query heads and 1 key heads", lambda: attend["inner"](q, k[:, :1], v[:, :1])),
        (f"{unsupported}inner: query (1, 2, 2, 8, 8)", lambda: attend["inner"](q[None], k[None], v[None])),
        (f"{unsupported}cross: is_causal=True", lambda: attend["cross"](q, k, v, is_causal=True)),
        (f"{unsupported}other: is_causal=True", lambda: attend["other"](q, k, v, is_causal=True)),
        (f"{unsupported}other: documents=", lambda: with_documents("other", 0, 16)),
        ("ValueError documents must", lambda: setattr(handle, "documents", (3, 1))),
        (f"{wrong}the attention of inner is", lambda: replace_sdpa(attend, cp)),
        (f"{wrong}the attention of Attend is", lambda: replace_sdpa(attend["inner"], cp)),
        (f"{wrong}blocks.0 has a forward of its own", lambda: replace_sdpa(own, cp)),
        ("ValueError local: no module is named 'block'", lambda: replace_sdpa(gpt, cp, local=("block",))),
        ("ValueError local must be names", lambda: replace_sdpa(gpt, cp, local="blocks")),
        (f"{wrong}blocks.0.attention is named in more", lambda: replace_sdpa(gpt, cp, local=("blocks.*",), whole_keys=("blocks.0.attention",))),
        (f"{unsupported}the forward of Other called no", lambda: replaced(Other(lambda q, k, v: (q @ k.mT).softmax(-1) @ v))),
        (f"{unsupported}multi_head_attention_forward attends inside torch", lambda: replaced(Other(_heads_by_function))),
        (f"{unsupported}flex_attention attends inside torch", lambda: replaced(Other(_flex_operator))),
        (f"{wrong}inner: attn_mask of (3, 1, 1, 8)", lambda: inner(attn_mask=square.new_ones(3, 1, 1, 8))),
        (f"{wrong}inner: attn_mask must be boolean", lambda: inner(attn_mask=square.int())),
        (f"{wrong}inner: attn_mask of (1, 1, 5, 8)", lambda: inner(attn_mask=square[:1].expand(5, 8))),
        (f"{wrong}inner: documents end at 20", lambda: with_documents("inner", 0, 20)),
        (f"{wrong}a MultiheadAttention was given attn_mask of 16 keys", lambda: heads(x, x, x, square[:2], attn_mask=square.repeat(1, 2))),
        (f"{unsupported}a MultiheadAttention was given a nested tensor", lambda: heads(*[nested] * 3)),
        (f"{unsupported}a is a MultiheadAttention with add_bias_kv", lambda: replace_sdpa(biased, cp)),
        ("ValueError local must be names", lambda: replace_sdpa(gpt, cp, local=iter(["no"]))),  # type: ignore[arg-type]  # no strings, on purpose
        (f"{unsupported}multi_head_attention_forward attends inside torch", lambda: replaced(OwnHeads(16, 2), x, x, x)),
        (f"{unsupported}the forward of Sequential called no", lambda: replaced(nn.Sequential(Other(lambda x: x)), x)),
        (f"{unsupported}_varlen_attn attends inside torch", lambda: replaced(Other(_varlen))),
        ("ValueError dims names 'x'", lambda: handle.verify({"q": q}, dims={"x": 1})),
        ("ValueError dims['q'] must be", lambda: handle.verify({"q": q}, dims={"q": 4})),
        ("ValueError verify: no argument", lambda: handle.verify({"q": 3})),
        ("ValueError verify: remove()", removed),
    ]  # fmt: skip
    for start, call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - compared below
            call()
        message = f"{type(error.value).__name__} {error.value}"
        assert message.startswith(start), (message, start)
        assert modes_left() == 0
    assert type(gpt.blocks[0]) is Block
    # The group is still usable, as nothing was sent, and SDPA is torch's function again.
    torch.testing.assert_close(inner(), functional.scaled_dot_product_attention(q, k, v))
    replace_sdpa(again := Attend(), cp)
    _compare(cp, again, _qkv(), {}, {})


@on_ranks
def test_verify_finds_positions_that_a_model_counts_itself() -> None:
    """And modules that mix tokens: models that are wrong on shards."""
    cp, first = ContextParallel(), "the first module whose output differs is "
    mean = nn.Sequential(
        SelfAttention(is_causal=False), Other(lambda x: x - x.mean(1, keepdim=True))
    )
    models: tuple[tuple[nn.Module, dict[str, Tensor], tuple[str, ...]], ...] = (
        (GPT(), {"tokens": batch_of("gpt")["tokens"]}, (f"{first}GPT", "arange")),
        (mean, {"input": torch.randn(2, 16, DIM)}, (f"{first}1 (Other)",)),
    )
    for module, batch, words in models:
        handle = replace_sdpa(module, cp)
        with pytest.raises(WrongResultError) as error:
            handle.verify(batch)
        assert all(word in str(error.value) for word in words)


@on_ranks
def test_modules_are_replaced_wherever_they_are_called() -> None:
    cp = ContextParallel()
    model, plain = model_of("gpt"), model_of("gpt")
    handle = replace_sdpa(model, cp)
    batch = batch_of("gpt")
    shards = {"tokens": cp.shard(batch["tokens"]), "positions": cp.positions(16)}
    expected = cp.shard(plain(**batch).detach())
    outs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outs.append(model(**shards).detach()))
    thread.start()
    thread.join()
    outs += [model(**shards).detach(), copy.deepcopy(model)(**shards).detach()]
    for out in outs:
        torch.testing.assert_close(out, expected)
    with pytest.raises(IndexError):
        model(shards["tokens"], torch.full((8,), 99))
    assert modes_left() == 0
    # One module compiled before it is replaced, and one of the same class that is not.
    compiled, alone = model_of("gpt"), model_of("gpt")
    whole: Any = torch.compile(compiled, backend="aot_eager")
    other: Any = torch.compile(alone, backend="aot_eager")
    torch.testing.assert_close(whole(**batch), plain(**batch))
    removed = replace_sdpa(compiled, cp)
    torch.testing.assert_close(whole(**shards).detach(), expected)
    torch.testing.assert_close(other(**batch), plain(**batch))
    removed.remove()
    torch.testing.assert_close(whole(**batch), plain(**batch))
    # The compiled wrapper itself is replaced, after a class was derived from one of Ring's.
    removed = replace_sdpa(compiled, cp)
    block = compiled.blocks[0]
    block.__class__ = type("Derived", (type(block),), {})
    removed.remove()
    replace_sdpa(whole, cp)
    torch.testing.assert_close(whole(**shards).detach(), expected)
    copied = "SelfAttention"  # names are those of the module that was passed
    assert {*handle.modules} == {"blocks.0.attention", "blocks.1.attention", copied}
    # Modules named in ``local`` attend within a rank, by torch's SDPA.
    near = model_of("gpt")
    replace_sdpa(near, cp, local=("blocks.1",))
    near(**shards)
    x = torch.randn(2, 8, DIM)
    torch.testing.assert_close(near.blocks[1](x), plain.blocks[1](x))


@on_four_ranks
def test_fully_shard_goes_round_replaced_modules_and_inside(rank: int) -> None:
    """Check two rings of two ranks; FSDP2 over all four is applied before and after replacing."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, batch = ContextParallel(mesh["cp"]), batch_of("gpt")
    row = {"tokens": cp.shard(batch["tokens"][rank // 2 :][:1]), "positions": cp.positions(16)}
    whole = model_of("gpt")
    whole(**batch).square().sum().backward()
    for is_first in (True, False):
        model = model_of("gpt")
        if is_first:
            handle = replace_sdpa(model, cp)
        for part in (*model.blocks, model):
            fully_shard(part)
        if not is_first:
            handle = replace_sdpa(model, cp)
        model.use_reentrant = False
        (model(**row).square().sum() * 4).backward()  # FSDP takes the mean over 4 ranks
        for a, b in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-4)
        with pytest.raises(UnsupportedError, match="fully_shard"):
            handle.verify(batch, dims={"tokens": 1, "positions": 0})
        handle.remove()
