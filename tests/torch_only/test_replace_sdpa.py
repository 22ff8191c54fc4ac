"""``replace_sdpa``: plain models compute on a ring what they compute on one process.

Attention that a model reaches by another way than a plain call of torch's SDPA is exact or refused
by name: another name of torch's function; a module that writes attention out, or attends to
windows, next to one that calls it; code that is run again in the backward; modules that torch or
the user compiled; masks of torch's own layers.
"""

from __future__ import annotations

import copy
import operator
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
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
from unchanged_models import DIM, MODELS, Block, batch_of, model_of

from ring_core import UnsupportedError
from ring_torch import ContextParallel, replace_sdpa
from ring_torch.local import LocalRanks


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


SLOW = [("gpt", "blocks compiled", "zigzag"), ("pair", "compiled", "contiguous")]
RUNS = [
    *((name, "eager", "zigzag") for name in MODELS),
    *(("gpt", mode, "zigzag") for mode in (
        "compiled", "blocks compiled", "reentrant", "checkpoint", "autocast", "inference",
    )),
    ("gpt", "eager", "striped"), ("pair", "inference", "zigzag"), *SLOW[1:],
]  # fmt: skip


#: A line of each model's list of modules.
LISTED = {
    "gpt": "blocks.1.attention: own keys, causal, 8 queries, 8 keys of this rank",
    "pair": "decoder.cross: sharded keys, attn_mask, 8 queries, 10 keys of this rank",
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


class Of(nn.Module):
    """A module that computes a function of its part and its inputs."""

    def __init__(self, function: Callable[..., Any], part: Any = None) -> None:
        super().__init__()
        self.function, self.part = function, part

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(self.part, *tensors)


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


def _heads_by_function(_: object, q: Tensor, *__: Tensor) -> Any:
    x, weight = q[0].transpose(0, 1).flatten(1)[:, None], torch.eye(16, dtype=q.dtype)
    return functional.multi_head_attention_forward(
        x, x, x, 16, 2, weight.repeat(3, 1), None, None, None, False, 0.0, weight, None
    )


class OwnHeads(nn.MultiheadAttention):
    """A MultiheadAttention subclass with its own forward."""

    def forward(self, query: Tensor, *_: Any) -> Any:
        return super().forward(2 * query, query, query)


def _varlen(_: object, q: Tensor, *__: Tensor) -> Any:
    x, offsets = q[0].transpose(0, 1).bfloat16(), torch.tensor([0, 8], dtype=torch.int32)
    return varlen_attn(x, x, x, offsets, offsets, 8, 8)


def _flex_operator(_: object, *tensors: Tensor) -> Any:
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
        (f"{unsupported}the forward of Of called no", lambda: replaced(Of(lambda _, q, k, v: (q @ k.mT).softmax(-1) @ v))),
        (f"{unsupported}multi_head_attention_forward attends inside torch", lambda: replaced(Of(_heads_by_function))),
        (f"{unsupported}flex_attention attends inside torch", lambda: replaced(Of(_flex_operator))),
        (f"{wrong}inner: attn_mask of (3, 1, 1, 8)", lambda: inner(attn_mask=square.new_ones(3, 1, 1, 8))),
        (f"{wrong}inner: attn_mask must be boolean", lambda: inner(attn_mask=square.int())),
        (f"{wrong}inner: attn_mask of (1, 1, 5, 8)", lambda: inner(attn_mask=square[:1].expand(5, 8))),
        (f"{wrong}inner: documents end at 20", lambda: with_documents("inner", 0, 20)),
        (f"{wrong}a MultiheadAttention was given attn_mask of 16 keys", lambda: heads(x, x, x, square[:2], attn_mask=square.repeat(1, 2))),
        (f"{unsupported}a MultiheadAttention was given a nested tensor", lambda: heads(*[nested] * 3)),
        (f"{unsupported}a is a MultiheadAttention with add_bias_kv", lambda: replace_sdpa(biased, cp)),
        ("ValueError local must be names", lambda: replace_sdpa(gpt, cp, local=iter(["no"]))),  # type: ignore[arg-type]  # no strings, on purpose
        (f"{unsupported}multi_head_attention_forward attends inside torch", lambda: replaced(OwnHeads(16, 2), x, x, x)),
        (f"{unsupported}the forward of Sequential called no", lambda: replaced(nn.Sequential(Of(lambda _, x: x)), x)),
        (f"{unsupported}_varlen_attn attends inside torch", lambda: replaced(Of(_varlen))),
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
    whole: Any = torch.compile(compiled, backend="eager")
    other: Any = torch.compile(alone, backend="eager")
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


# Other ways to attention -----------------------------------------------------------------------

BATCH, T, WIDTH, HEADS = 2, 32, 12, 2
OWN = T // 2  # tokens of a rank
EXACT = "exact"


class Layer(nn.Module):
    """Attention layer that computes attention by a function it is given."""

    def __init__(self, attend: Any = functional.scaled_dot_product_attention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend = attend

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = [
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        ]
        out: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Model(nn.Module):
    """A layer on the ring if ``has_own``, a tested one, and one that attends within a rank."""

    def __init__(self, tested: nn.Module, *, has_own: bool) -> None:
        super().__init__()
        self.own, self.tested, self.text = Layer() if has_own else nn.Identity(), tested, Layer()

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        out: Tensor = self.tested(self.own(x)) + self.text(text).mean()
        return out


def _outcome(
    make: Callable[[ContextParallel | None], nn.Module], *, has_own: bool, how: str
) -> str:
    """Compare a model on the ring with one process; return ``exact``, or the error's message."""
    cp = ContextParallel(layout="contiguous")
    models = []
    for context in (None, cp):
        torch.manual_seed(0)
        models.append(Model(make(context), has_own=has_own).double())
    whole, model = models
    x, text = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (T, 5))
    call: Any = model
    try:
        replace_sdpa(model, cp, local=("text",))
        if how == "compiled":
            torch.compiler.reset()
            call = torch.compile(model, backend="aot_eager")
        with torch.inference_mode() if how == "inference" else nullcontext():
            out = call(cp.shard(x), text)
        expected = whole(x, text)
        if how != "inference":
            out.square().sum().backward()
            expected.square().sum().backward()
            cp.reduce_gradients(model)
    except Exception as error:  # noqa: BLE001 - whatever a user would get
        return f"{type(error).__name__}: {error}"
    finally:
        assert modes_left() == 0
    torch.testing.assert_close(cp.unshard(out.detach().clone()), expected.detach())
    if how != "inference":
        for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            if not name.startswith("text"):
                torch.testing.assert_close(a.grad, b.grad, msg=name)
    return EXACT


# Other names ----------------------------------------------------------------------------------


def _script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripts
        return torch.jit.script(function)


@_script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@_script
def scripted_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.mT), -1), v)


@_script
def scripted_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


def plainly_named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def calling_on(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plainly_named(q, k, v)


own_operator = torch.library.custom_op("ring_tests::mix", plainly_named, mutates_args=())
deep_operator = torch.library.custom_op("ring_tests::deep", calling_on, mutates_args=())


@torch.library.custom_op("ring_tests::doubled", mutates_args=())
def other_operator(x: Tensor) -> Tensor:
    return 2 * x


other_operator.register_fake(torch.empty_like)
other_operator.register_autograd(lambda _, grad: 2 * grad)


def _registered(name: str, key: str, function: Any) -> Any:
    """Return a call of an operator of a library with a kernel in Python."""
    torch.library.define(f"ring_tests_{name}", "(Tensor q, Tensor k, Tensor v) -> Tensor")
    torch.library.impl(f"ring_tests_{name}", key)(function)
    return operator.attrgetter(f"ring_tests_{name.replace('::', '.')}")(torch.ops)


IMPLICIT = "CompositeImplicitAutograd"
_registered("flash_attn::fwd", IMPLICIT, plainly_named)
halves = _registered("lib::e", IMPLICIT, lambda q, *_: q / 2)
aten = torch.ops.aten
UNSEEN, INSIDE = "whose attention Python does not see", "attends inside torch"

NAMES: dict[str, tuple[Any, str]] = {
    "an operator": (aten.scaled_dot_product_attention, EXACT),
    "an overload": (aten.scaled_dot_product_attention.default, EXACT),
    "by torch._C": (lambda *x: torch._C._nn.scaled_dot_product_attention(*x), EXACT),  # noqa: PLW0108 - looked up when called
    "a fused one": (lambda *x: aten._scaled_dot_product_flash_attention_for_cpu(*x)[0], INSIDE),
    "the plain one": (lambda *x: torch._scaled_dot_product_attention_math(*x)[0], UNSEEN),
    "another library's": (lambda *x: torch.ops.ring_tests_flash_attn.fwd(*x), INSIDE),  # noqa: PLW0108 - looked up when called
    "a script": (scripted, UNSEEN),
    "a script, by a global name": (lambda *x: scripted(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "a script in a list": ([scripted], UNSEEN),
    "a script that writes it out": (scripted_by_hand, UNSEEN),
    "an operator of one's own": (own_operator, UNSEEN),
    "an operator by a global name": (lambda *x: own_operator(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "an operator by torch.ops": (lambda *x: torch.ops.ring_tests.mix(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "an operator whose kernel calls on": (lambda *x: torch.ops.ring_tests.deep(*x), INSIDE),  # noqa: PLW0108 - looked up when called
    "a library's": (_registered("lib::a", IMPLICIT, plainly_named), INSIDE),
    "a library's, explicit": (_registered("lib::b", "CompositeExplicitAutograd", plainly_named), INSIDE),
    "a library's, of a device": (_registered("lib::c", "CPU", plainly_named), INSIDE),
    "a library's that writes it out": (_registered("lib::d", IMPLICIT, lambda q, k, v: (q @ k.mT).softmax(-1) @ v), "writes attention out"),
    "beside operators of another thing": (lambda q, k, v: functional.scaled_dot_product_attention(torch.ops.ring_tests.doubled(q), k, halves(v, q, k)), EXACT),
    "beside a script of another thing": (lambda q, k, v: functional.scaled_dot_product_attention(scripted_gelu(q), k, v), EXACT),
}  # fmt: skip


def _layer(attend: Any, _: object) -> nn.Module:
    """Return a layer that attends by a function, or by one that is also kept in a list."""
    if not isinstance(attend, list):
        return Layer(attend)
    vars(layer := Layer(attend[0]))["kept"] = attend
    return layer


# Attention that is written out ------------------------------------------------------------------


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def _bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), flat[0], flat[1].mT)
    return torch.bmm(functional.softmax(scores, -1), flat[2]).view(q.shape)


def _sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = torch.einsum("ibnd,jbnd->ijbn", q, k).softmax(1)
    return torch.einsum("ijbn,jbnd->ibnd", scores, v).permute(1, 2, 0, 3)


def _additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1)
    return (weights[..., None] * v[:, :, None]).sum(3)


WRITTEN: dict[str, Callable[[object], nn.Module]] = {
    "matmul": lambda _: Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "einsum": lambda _: Layer(_einsum),
    "bmm": lambda _: Layer(_bmm),
    "sequence first": lambda _: Layer(_sequence_first),
    "additive": lambda _: Layer(_additive),
    "without softmax": lambda _: Layer(lambda q, k, v: (q @ k.mT).sigmoid() @ v),
    "by operators": lambda _: Layer(lambda q, k, v: aten.matmul(aten._softmax.default(aten.matmul.default(q, k.mT), -1, False), v)),
    "a graph": lambda _: torch.fx.symbolic_trace(Layer(_einsum)),
}  # fmt: skip


def _router(logits: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Return a router with as many experts as a rank has tokens."""

    def forward(weights: Any, x: Tensor) -> Tensor:
        gates = logits(x.flatten(0, 1), weights["experts"]).softmax(-1)
        out: Tensor = x * (gates @ weights["scales"]).view_as(x)
        return out

    return Of(
        forward, nn.ParameterDict({n: torch.randn(OWN, WIDTH) for n in ("experts", "scales")})
    )


def _in_windows(layer: Any, x: Tensor) -> Tensor:
    """Attend within windows that a rank holds whole."""
    y = layer(x.unflatten(1, (-1, 8)).flatten(0, 1))
    out: Tensor = y.unflatten(0, (x.shape[0], -1)).flatten(1, 2)
    return out


def _of_token(_: Any, x: Tensor) -> Tensor:
    """Attend between the parts of each token, as between its heads or its frames."""
    q: Tensor = x.unflatten(-1, (6, -1))
    return x + ((q @ q.mT).softmax(-1) @ q).flatten(2)


def _angles(product: Any, x: Tensor) -> Tensor:
    """Multiply positions by as many frequencies as a rank has tokens, as rotary angles."""
    angles: Tensor = product(x.new_zeros(x.shape[1]), torch.arange(OWN).to(x))
    return x * angles[:, :WIDTH].cos()


def _to_prompt(prompt: Tensor, x: Tensor) -> Tensor:
    """Attend to keys that every rank holds whole."""
    keys = prompt.expand(x.shape[0], -1, -1) * 1.0
    return x + (x @ keys.mT).softmax(-1) @ keys


def _by_itself(cp: ContextParallel | None, *, in_chunks: bool) -> nn.Module:
    """Return a module that uses Ring itself: attention, or the keys of all ranks, in chunks."""

    def forward(_: Any, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1))
        if cp is None:
            q = q.transpose(1, 2)
            out = functional.scaled_dot_product_attention(q, q, q, scale=1.0)
        elif in_chunks:
            k, q = cp.unshard(q, grad="sum").transpose(1, 2), q.transpose(1, 2)
            scores = torch.cat([q @ part.mT for part in k.chunk(2, dim=2)], dim=-1)
            out = scores.softmax(-1) @ k
        else:
            return x + cp.attention(q, q, q, softmax_scale=1.0).flatten(2)
        return x + out.transpose(1, 2).flatten(2)

    return Of(forward)


EXACT_MODULES: dict[str, Callable[[ContextParallel | None], nn.Module]] = {
    "router": lambda _: _router(functional.linear),
    "router by matmul": lambda _: _router(lambda x, w: x @ w.mT),
    "router by einsum": lambda _: _router(lambda x, w: torch.einsum("td,ed->te", x, w)),
    "router by a computed weight": lambda _: _router(lambda x, w: x @ (2 * w).T),
    "windows": lambda _: Of(_in_windows, WRITTEN["matmul"](None)), "of a token": lambda _: Of(_of_token),
    "angles": lambda _: Of(_angles, lambda t, f: (f[None, :, None] @ t[None, None]).mT[0]),
    "angles by einsum": lambda _: Of(_angles, lambda t, f: torch.einsum("i,j->ij", t, f)),
    "prompt": lambda _: Of(_to_prompt, nn.Parameter(torch.randn(5, WIDTH))),
    # Several sequences of a batch, each of them split, beside one that is longer.
    "towers": lambda _: Of(lambda images, x: x + images(torch.cat([x[:, : OWN // 4]] * 3)).mean() * 0, Layer()),
    "by itself": lambda cp: _by_itself(cp, in_chunks=False),
    "by itself, in chunks": lambda cp: _by_itself(cp, in_chunks=True),
}  # fmt: skip


def _shared(near: nn.Module | None = None) -> nn.Module:
    """Return a module with one layer in two places, or with another one in the first."""
    layer = Layer()
    places = {"near": nn.Sequential(near or layer), "far": nn.Sequential(layer)}
    return Of(lambda parts, x: parts["near"](x) + parts["far"](x), nn.ModuleDict(places))


def _folded(*folds: int) -> Callable[[], nn.Module]:
    """Return what makes a module of windows that are folded into the batch, or frames."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        for size in folds:
            x = layer(x.view(-1, size, WIDTH)).view_as(x)
        return x

    return lambda: Of(forward, Layer())


#: Models, their local modules, and what becomes of them.
MEANINGS: tuple[tuple[Callable[[], nn.Module], tuple[str, ...], str], ...] = (
    (_shared, ("part.near",), "it is also part.far.0, of own keys"),
    (_shared, ("part.near", "part.far"), EXACT), (_shared, ("*",), EXACT),
    *((_folded(*folds), (), "windows or frames") for folds in ((OWN, 4), (4,), (4, 8))),
    (_folded(OWN), (), EXACT),
    # A module within a rank may call a script.
    (lambda: _shared(Layer(scripted)), ("part.near",), EXACT),
)  # fmt: skip


@pytest.mark.parametrize("n", range(len(MEANINGS)))
@on_ranks
def test_modules_of_two_meanings(n: int) -> None:
    """A module whose names fall into two scopes, and calls of two lengths of the same tokens."""
    (make, local, expected), cp = MEANINGS[n], ContextParallel(layout="contiguous")
    model = make()
    with nullcontext() if expected == EXACT else pytest.raises(ValueError, match=expected):
        replace_sdpa(model, cp, local=local)
        model(cp.shard(torch.randn(BATCH, T, WIDTH)))


# Code that is run again, and operators that run functions ----------------------------------------


class Again(torch.autograd.Function):
    """A checkpoint of one's own, as DeepSpeed's and Megatron's."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Any:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad)


class Reversible(Again):
    """Runs its function twice in the backward, once without gradients."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.no_grad():
            ctx.function(ctx.saved_tensors[0])
        return Again.backward(ctx, grad)


class WithContext(Again):
    """The newer form, whose forward is not given its node."""

    @staticmethod
    def forward(function: Any, x: Tensor, *parameters: Tensor) -> Any:  # type: ignore[override]
        del parameters
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.function, x, *parameters = inputs
        ctx.parameters = parameters
        ctx.save_for_backward(x)


def _hooks(function: Any, x: Tensor, *_: Tensor) -> Any:
    """Compute saved tensors again when the first of them is asked for."""
    saved: list[Tensor] = []
    count = iter(range(100))

    def unpack(index: int) -> Tensor:
        if not saved:
            keep = torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.__iadd__([t])[-1], lambda t: t
            )
            with torch.enable_grad(), keep:
                function(x.detach().requires_grad_())
        return saved[index]

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(count), unpack):
        return function(x)


def _scan(function: Any, x: Tensor, *_: Tensor) -> Any:
    def step(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return carry + 1, function(y)

    return torch._higher_order_ops.scan(step, torch.zeros(1), torch.stack([x, x]))[1][1]


def _while(function: Any, x: Tensor, *_: Tensor) -> Any:
    start = torch.tensor(0), x.detach()
    body = torch.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, function(y)), start)[1]
    return x + body


INSIDE_CHECKPOINT = "inside torch.utils.checkpoint within its own forward"
#: For each way to run a function: what it comes to, in graphs too if not said below.
RERUNS: dict[str, tuple[Any, str]] = {
    "own checkpoint": (Again.apply, EXACT),
    "reversible": (Reversible.apply, EXACT),
    "nested": (lambda f, x, *p: Again.apply(lambda y: Again.apply(f, y, *p), x, *p), EXACT),
    "setup_context": (WithContext.apply, "with setup_context"),
    "own hooks": (_hooks, EXACT),
    "checkpoint": (lambda f, x, *_: checkpoint(f, x, use_reentrant=False), INSIDE_CHECKPOINT),
    "reentrant": (lambda f, x, *_: checkpoint(f, x, use_reentrant=True), INSIDE_CHECKPOINT),
    "without gradients": (lambda f, x, *_: torch.no_grad()(f)(x), EXACT),
    "cond": (lambda f, x, *_: torch.cond(x.sum() > -1e9, f, lambda y: y * 1.0, (x,)), EXACT),
    "scan": (_scan, "scan runs a function"),
    "while_loop": (_while, EXACT),
    "map": (lambda f, x, *_: torch._higher_order_ops.map(f, torch.stack([x, x]))[1], EXACT),
}
#: Torch's graphs save other tensors than eager code, so hooks of one's own may mean anything.
IN_GRAPHS = {"checkpoint": EXACT, "reentrant": EXACT, "own hooks": ""}


class Runs(Layer):
    """A layer whose attention is run by another function; ``closure`` hides the method in one."""

    def __init__(self, run: Any, closure: bool, _: object) -> None:
        super().__init__()
        self.run, self.closure = run, closure

    def forward(self, x: Tensor) -> Tensor:
        function = (lambda y: self.mix(y)) if self.closure else self.mix  # noqa: PLW0108 - looked up when called
        out: Tensor = self.run(function, x, *self.parameters())
        return x + out


# Graphs and compiled functions -------------------------------------------------------------------


def _exported() -> torch.export.ExportedProgram:
    shapes = {1: torch.export.Dim("tokens", min=2, max=64)}
    return torch.export.export(
        Layer().double(), (torch.randn(2, T, WIDTH).double(),), dynamic_shapes=(shapes,)
    )


GRAPHS: dict[str, Callable[[object], nn.Module]] = {
    "traced and copied": lambda _: copy.deepcopy(torch.fx.symbolic_trace(Layer())),
    "exported": lambda _: _exported().module(),
    "unflattened": lambda _: torch.export.unflatten(_exported()),
    "compiled inside": lambda _: Layer(torch.compile(plainly_named, backend="aot_eager")),
}
BOTH = ("eager", "compiled")
Make = Callable[[ContextParallel | None], nn.Module]
#: By its name and how it runs: a model, if a layer on the ring is beside it, and what it comes to.
WAYS: dict[str, tuple[Make, bool, str]] = {
    **{f"{x}-{how}": (partial(_layer, attend), True, expected)
       for (x, (attend, expected)), how in product(NAMES.items(), BOTH)},
    **{f"{x}{' beside the ring' * has_own}-{how}": (make, has_own, "UnsupportedError: replace_sdpa: .*writes attention out")
       for (x, make), has_own, how in product(WRITTEN.items(), (False, True), (*BOTH, "inference"))},
    **{f"{x}-{how}": (make, True, EXACT) for (x, make), how in product(EXACT_MODULES.items(), BOTH)},
    **{f"{x}{' in a closure' * closure}-{how}": (partial(Runs, run, closure), True, IN_GRAPHS.get(x, expected) if how == "compiled" else expected)
       for (x, (run, expected)), closure, how in product(RERUNS.items(), (False, True), BOTH)},
    **{f"{x}-eager": (make, True, EXACT) for x, make in GRAPHS.items()},
}  # fmt: skip


@pytest.mark.nightly(unless=[
    "an operator-eager", "an overload-compiled", "a script-eager", "a fused one-eager",
    "matmul-eager", "einsum beside the ring-compiled", "additive beside the ring-eager",
    "router by matmul-eager", "by itself-eager", "by itself, in chunks-eager", "windows-compiled",
    "own checkpoint-eager", "own hooks in a closure-eager", "checkpoint-compiled", "cond-eager",
    *(f"{x}-eager" for x in GRAPHS),
])  # fmt: skip
@pytest.mark.parametrize("case", WAYS)
@on_ranks
def test_every_way_to_attention_is_exact_or_refused(case: str) -> None:
    make, has_own, expected = WAYS[case]
    outcome = _outcome(make, has_own=has_own, how=case.rpartition("-")[2])
    assert re.search(expected, outcome, re.DOTALL) if expected != EXACT else outcome == EXACT


@on_ranks
def test_a_graph_that_is_written_anew_stays_on_the_ring() -> None:
    cp, x = ContextParallel(), torch.randn(BATCH, T, WIDTH)
    graph = torch.fx.symbolic_trace(Layer())
    expected = cp.shard(graph(x).detach())
    replace_sdpa(graph, cp)
    graph.recompile()
    for module in (graph, copy.deepcopy(graph)):
        torch.testing.assert_close(module(cp.shard(x)), expected)
        shard = cp.shard(x).requires_grad_()
        grads = [
            torch.autograd.grad(out.square().sum(), shard)[0]
            for out in (module(shard), checkpoint(module, shard, use_reentrant=False))
        ]
        torch.testing.assert_close(*grads)


# Torch's own layers -----------------------------------------------------------------------------


@on_ranks
def test_masks_of_torchs_own_layers() -> None:
    """``is_causal`` is a hint to torch, which reads the mask in all branches but one."""
    cp, x = ContextParallel(), torch.randn(BATCH, T, WIDTH)
    index = torch.arange(T)
    window = (index[:, None] - index >= 4) | (index > index[:, None])
    causal = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    padding = (index >= 30).expand(BATCH, T)
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    model = copy.deepcopy(whole)
    replace_sdpa(model, cp)
    shard, own = cp.shard(x), causal[:OWN, :OWN]
    numbers = torch.zeros(T, T).masked_fill(window, -torch.inf)
    options: dict[str, Any]
    for training in (True, False):
        whole.train(training)
        model.train(training)
        for mask, need_weights, pad in (
            (window, True, None), (window, False, padding), (window, False, None),
            (causal, True, padding), (causal, False, None), (numbers, True, padding),
        ):  # fmt: skip
            options = {"attn_mask": mask, "need_weights": need_weights, "key_padding_mask": pad}
            with torch.set_grad_enabled(training):
                expected = cp.shard(whole(x, x, x, is_causal=True, **options)[0])
                out = model(shard, shard, shard, is_causal=True, **options)[0]
            torch.testing.assert_close(out, expected)
    # A mask of a rank's own tokens can only be causal, and then is that of the whole sequence.
    options = {"is_causal": True, "key_padding_mask": padding}
    expected = cp.shard(whole(x, x, x, attn_mask=causal, **options)[0])
    options = {"is_causal": True, "key_padding_mask": cp.shard(padding)}
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        torch.testing.assert_close(call(shard, shard, shard, attn_mask=own, **options)[0], expected)
    with pytest.raises(ValueError, match="a row for each"):
        model(shard, shard, shard, attn_mask=window[:OWN, :OWN], **options)
    # Within a rank torch's meaning is kept.
    near = nn.ModuleDict({"local": copy.deepcopy(whole)})
    replace_sdpa(near, cp, local=("local",))
    for mask in (own, window[:OWN, :OWN]):
        outs = [
            f(shard, shard, shard, attn_mask=mask, **options)[0] for f in (whole, near["local"])
        ]
        torch.testing.assert_close(*outs)
    # Torch's encoder looks at the padding before it looks at the mask.
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    expected = encoder(x, mask=causal, src_key_padding_mask=padding)
    replace_sdpa(encoder, cp)
    out = cp.unshard(encoder(shard, mask=causal, src_key_padding_mask=padding).detach())
    torch.testing.assert_close(out[:, :30], expected[:, :30])
