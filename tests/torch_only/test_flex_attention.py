"""``flex_attention`` in replaced models: what its functions are taken for, and that it is exact.

Masks and scores of the kinds that models are published with, and next to each one that differs from
it at one place: both are computed exactly or refused by name.
"""

# ruff: noqa: ARG001, ARG005 - flex_attention gives its functions all arguments

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from refused import refused
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)
from torch.utils.checkpoint import checkpoint

from ring_core import Mask, UnsupportedError
from ring_torch import ContextParallel, replace_sdpa
from ring_torch.replaced import flex as flex_of_ring, flex_graph
from ring_torch.replaced.mods import ModError, Scores, Trace, mask_of, options_of

Mod = Callable[..., Tensor]
T, BATCH, HEADS, DIM, BLOCK = 48, 2, 4, 8, 8
CPU = torch.device("cpu")
BOUNDS = torch.tensor([0, 10, 17, 40])
DOCUMENT = torch.bucketize(torch.arange(T), BOUNDS[1:], right=True)
PREFIXES = torch.tensor([2, 0, 11, 3])
GRID = 7  # width of an image, of which the last row is not full


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(table: Tensor) -> Mod:
    return lambda b, h, q, k: table[q] == table[k]


same_document = documents(DOCUMENT)


LEARNED = nn.Parameter(torch.rand(HEADS, T, dtype=torch.float64))
HOLDER, TABLES = SimpleNamespace(bias=LEARNED), {"bias": LEARNED}


def learned(h: Any, i: Any) -> Any:
    return LEARNED[h, i]


def scaled(bias: Callable[..., Any]) -> Mod:
    return lambda s, b, h, i, j: s + bias(h, i) / 2


def within_document(inner: Mod) -> Mod:
    """Return a rule over places in a document, for tokens of one."""

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_place, k_place = q - BOUNDS[DOCUMENT[q]], k - BOUNDS[DOCUMENT[k]]
        return (DOCUMENT[q] == DOCUMENT[k]) & inner(b, h, q_place, k_place)

    return rule


def window(size: int) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k < size)


def prefix(length: Any) -> Mod:
    return lambda b, h, q, k: (k < length) | (q >= k)


def neighbours(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Show a square of an image round a pixel, moved inside at its borders."""
    row, column = (q // GRID).clamp(1, T // GRID - 1), (q % GRID).clamp(1, GRID - 2)
    return ((row - k // GRID).abs() <= 1) & ((column - k % GRID).abs() <= 1)


def prefix_of_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    document = DOCUMENT[k]
    return (DOCUMENT[q] == document) & ((q >= k) | (k - BOUNDS[document] < PREFIXES[document]))


def by_rows(table: Tensor) -> Mod:
    return lambda b, h, q, k: (table[b, q] == table[b, k]) & (q >= k)


#: Masks, and the mask of ring_core that they are; ``...`` stands for a predicate.
MASKS: dict[str, tuple[Mod, str]] = {
    "full": (lambda b, h, q, k: q >= 0, "full"),
    "causal": (causal, "causal"),
    "documents": (same_document, "4 documents"),
    "causal documents": (and_masks(same_document, causal), "causal, 4 documents"),
    "places in documents": (within_document(causal), "causal, 4 documents"),
    "window in documents": (within_document(window(5)), "causal, window=(4, None), 4 documents"),
    "window": (window(6), "causal, window=(5, None)"),
    "window on both sides": (lambda b, h, q, k: (q - k).abs() <= 5, "window=(5, 5)"),
    "uneven window": (lambda b, h, q, k: (k - q <= 2) & (q - k < 9), "window=(8, 2)"),
    "chunks": (lambda b, h, q, k: (q // 16 == k // 16) & causal(b, h, q, k), "causal, chunk_size=16"),
    "diagonal": (lambda b, h, q, k: q == k, "causal, window=(0, None)"),
    "one document, by rows": (by_rows(torch.zeros(BATCH, T).long()), "causal, 1 documents"),
    "documents, rows alike": (by_rows(DOCUMENT.expand(BATCH, T)), "causal, 4 documents"),
    "prefix": (prefix(12), "..."),
    "prefix of a tensor": (prefix(torch.tensor(12)), "..."),
    "or_masks": (or_masks(window(4), lambda b, h, q, k: k < 2), "..."),
    "sliding chunks": (lambda b, h, q, k: (q // 16 - k // 16 <= 1) & (q >= k), "causal, ..."),
    "dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), "causal, ..."),
    "dilated window": (lambda b, h, q, k: (q >= k) & (q - k <= 20) & ((q - k) % 3 == 0), "causal, window=(20, None), ..."),
    "image": (neighbours, "..."),
    "prefix of each document": (prefix_of_document, "4 documents, ..."),
    "a document twice": (lambda b, h, q, k: (DOCUMENT % 2)[q] == (DOCUMENT % 2)[k], "..."),
    "padding": (lambda b, h, q, k: (k < 41) & (q >= k), "causal, ..."),
    "fractions": (lambda b, h, q, k: (k >= 0.6 * q) & (q >= k), "causal, ..."),
    "strictly before": (lambda b, h, q, k: (q > k) | (q == 0), "..."),
    "looked up": (lambda b, h, q, k: torch.ones(T, T, dtype=torch.bool).tril()[q, k], "..."),
}  # fmt: skip


def recognised(mod: Mod) -> Mask:
    """Return the mask of a rule, and check that it shows what broadcasting does."""
    trace = Trace.of(mod, CPU)
    mask = mask_of([(trace, trace.root)], T, BATCH, HEADS)
    zero, at = torch.zeros((), dtype=torch.long), torch.arange(T)
    shown = mod(zero, zero, at[:, None], at).expand(T, T)
    np.testing.assert_array_equal(mask.dense(at.numpy(), at.numpy()), shown.numpy())
    return mask


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_recognised_and_one_that_differs_is_not(name: str) -> None:
    mod, expected = MASKS[name]
    mask = recognised(mod)
    described = mask.describe().replace("predicate=function", "...")
    assert described == expected.replace("1 documents", "").rstrip(", ")
    for row, column in ((5, 30), (30, 5), (17, 17)):  # shown, or hidden
        assert mask != recognised(
            lambda b, h, q, k, row=row, column=column: (
                mod(b, h, q, k) ^ ((q == row) & (k == column))
            )
        )


def test_tables_that_differ_at_one_entry_and_random_rules_are_exact() -> None:
    table = DOCUMENT.clone()
    for entry in (0, 9, 10, 39, 47):
        other = DOCUMENT.clone()
        other[entry] = 9
        recognised(documents(other))
        recognised(lambda b, h, q, k, other=other: table[q] == other[k])
        recognised(
            lambda b, h, q, k, other=other: (
                same_document(b, h, q, k) & (q - other[q] >= k - table[k])
            )
        )
    draw = np.random.default_rng(0)
    parts = [mod for mod, _ in MASKS.values()]
    for _ in range(12):
        a, b, c = (parts[n] for n in draw.integers(len(parts), size=3))
        recognised(and_masks((and_masks, or_masks)[draw.integers(2)](a, b), c))


# Scores ------------------------------------------------------------------------------------------

SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
TABLE = torch.randn(HEADS, T, T, generator=torch.Generator().manual_seed(0))
SHORT = torch.randn(40)  # its end concerns the last queries alone, which one rank has
CAP, BIAS, ALIBI = {"softcap"}, {"bias"}, {"alibi_slopes"}

#: Scores, the options that they are under a causal mask, and what else a causal one is not.
SCORES: dict[str, tuple[Mod, set[str]]] = {
    "itself": (lambda s, b, h, q, k: s, set()),
    "cap": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), CAP),
    "cap by a factor": (lambda s, b, h, q, k: (s * (1 / 4)).tanh() * 4, CAP),
    "cap of a tensor": (lambda s, b, h, q, k: torch.tensor(5.0) * (s / torch.tensor(5.0)).tanh(), CAP),
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), ALIBI),
    "alibi, signed": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-(h + 1.0)), ALIBI),
    "alibi, negative": (lambda s, b, h, q, k: s + -(SLOPES[h] * (q - k)), ALIBI),
    "one slope": (lambda s, b, h, q, k: s + (k - q) * 0.25, ALIBI),
    "table": (lambda s, b, h, q, k: s + TABLE[h, q, k], BIAS),
    "distances": (lambda s, b, h, q, k: s + TABLE[h, 0, (q - k).abs()], BIAS),
    "relative": (lambda s, b, h, q, k: s + (q - k), BIAS),
    "cap and alibi": (lambda s, b, h, q, k: 3 * torch.tanh(s / 3) - (q - k) * SLOPES[h], CAP | ALIBI),
    "two terms": (lambda s, b, h, q, k: TABLE[h, k, q] + (s - SLOPES[h] * (q - k)) - 1, ALIBI | BIAS),
    "one place": (lambda s, b, h, q, k: s + torch.where((q == 5) & (k == 3), 1.0, 0.0), BIAS),
    "hidden": (lambda s, b, h, q, k: torch.where(q - k < 9, s + TABLE[h, q, k], -float("inf")), BIAS),
    "almost alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k + (q == 7).int()), BIAS),
}  # fmt: skip
#: Scores that are none of these, and what the error says.
OTHER_SCORES: dict[str, tuple[Mod, str]] = {
    "two caps": (lambda s, b, h, q, k: 5 * torch.tanh(s / 4), "no soft cap"),
    "two factors": (lambda s, b, h, q, k: 5 * torch.tanh(s * 0.25), "no soft cap"),
    "cap of a head": (lambda s, b, h, q, k: SLOPES[h] * torch.tanh(s / SLOPES[h]), "no soft cap"),
    "cap of a sum": (lambda s, b, h, q, k: 5 * torch.tanh((s + SLOPES[h]) / 5), "no soft cap"),
    "sigmoid": (lambda s, b, h, q, k: torch.sigmoid(s), "no soft cap"),
    "factor": (lambda s, b, h, q, k: s * SLOPES[h], "no soft cap"),
    "negative": (lambda s, b, h, q, k: SLOPES[h] - s, "no soft cap"),
    "one place": (lambda s, b, h, q, k: torch.where(q == 5, s * 2, s), "no soft cap"),
    "a finite number": (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), "no soft cap"),
    "reads beyond": (lambda s, b, h, q, k: s + TABLE[h, q + 1, k], "reads places 1 to 48"),
    "several numbers": (lambda s, b, h, q, k: s + TABLE[h, q].sum(), "of a part of a tensor"),
    "looks": (lambda s, b, h, q, k: s if q > 3 else s + 1, "cannot be traced"),
}  # fmt: skip


#: Scores whose distance has a sign: without a causal mask they are a bias.
SIGNED = ("alibi, signed", "alibi, negative", "one slope", "cap and alibi", "two terms")


def options_with(mod: Mod, mask: Mask) -> set[str]:
    trace = Trace.of(mod, CPU, torch.float32)
    return {*options_of(trace, Scores.of(trace), mask, BATCH, HEADS, torch.arange(T), T)}


@pytest.mark.parametrize("name", SCORES)
def test_scores_become_options(name: str) -> None:
    mod, expected = SCORES[name]
    assert options_with(mod, Mask(causal=True)) == expected
    assert options_with(mod, Mask()) == ((expected - ALIBI) | BIAS if name in SIGNED else expected)


@pytest.mark.parametrize("name", OTHER_SCORES)
def test_other_scores_are_refused(name: str) -> None:
    mod, message = OTHER_SCORES[name]
    refused(message, options_with, mod, Mask(), error=ModError)


# On ranks ----------------------------------------------------------------------------------------

compiled = torch.compile(flex_attention, backend="aot_eager")
unbroken = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)


class Attend(nn.Module):
    """A module that calls a function in the place of attention."""

    def __init__(self, function: Any = flex_attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return self.function(q, k, v, **options)


class Making(Attend):
    """One that makes the block mask of the tokens that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        mask = block_mask(options["block_mask"].mask_mod, q.shape[2])
        return self.function(q, k, v, **options | {"block_mask": mask})


def block_mask(
    mod: Mod, length: int = T, keys: int | None = None, rows: int | None = None, heads: int | None = None
) -> BlockMask:  # fmt: skip
    made: BlockMask = create_block_mask(
        mod, rows, heads, length, keys or length, device="cpu", BLOCK_SIZE=BLOCK
    )
    return made


def qkv(kv_heads: int = HEADS, length: int = T) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(BATCH, heads, length, DIM, generator=draw, dtype=torch.float64)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def expected_of(
    tensors: list[Tensor], mask_mod: Any, score_mod: Any, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, its ``lse`` and the largest scores, written out in float64."""
    q, *keys = tensors
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in keys)
    scores = q @ k.mT * (DIM**-0.5 if scale is None else scale)
    b, h, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse, scores.amax(-1)


#: How a model calls it: the module's class, the function, and what compiles the module.
WAYS: dict[str, tuple[type[Attend], Any, Any]] = {
    "eager": (Attend, flex_attention, None),
    "partial": (Attend, functools.partial(flex_attention, kernel_options={"BLOCK_M": 16}), None),
    "compiled": (Attend, compiled, None),
    "in a compiled model": (Attend, flex_attention, "aot_eager"),
    "unbroken": (Attend, unbroken, None),
    "in an unbroken model": (Attend, flex_attention, "fullgraph"),
    "made in the forward": (Making, flex_attention, None),
    "made in the forward, compiled": (Making, compiled, None),
}
#: Mask, score, way, and options: strategy, layout, GQA.
RUNS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("causal", "itself", "eager", {}),
    ("causal documents", "cap", "compiled", {"strategy": "gather"}),
    ("places in documents", "alibi", "eager", {"strategy": "ulysses"}),
    ("window in documents", "two terms", "in a compiled model", {"kv_heads": 2}),
    ("window", "cap and alibi", "made in the forward", {"layout": "striped"}),
    ("window on both sides", "alibi", "partial", {"strategy": "balanced", "layout": "contiguous"}),
    ("chunks", "table", "compiled", {"kv_heads": 1}),
    ("prefix", "hidden", "made in the forward, compiled", {}),
    ("image", "distances", "eager", {"strategy": "ring", "layout": "contiguous"}),
    ("dilated", "one place", "compiled", {}),
    ("padding", "cap", "unbroken", {"length": T - 7}),
    ("or_masks", "hidden", "in an unbroken model", {"scale": 0.3}),
    ("window in documents", "cap and alibi", "in an unbroken model", {"layout": "striped"}),
    ("causal documents", "two terms", "unbroken", {"kv_heads": 2}),
    ("documents, rows alike", "alibi, signed", "in a compiled model", {"strategy": "ulysses"}),
    ("full", "distances", "in an unbroken model", {}),
    ("prefix of each document", "cap", "eager", {"strategy": "ulysses", "layout": "contiguous"}),
]  # fmt: skip
IDS = [" ".join(run[:3]) for run in RUNS]


@pytest.mark.nightly(only=IDS[3::2])
@pytest.mark.parametrize(("mask", "score", "way", "options"), RUNS, ids=IDS)
@on_ranks
def test_it_is_exact(mask: str, score: str, way: str, options: dict[str, Any]) -> None:
    """Outputs, ``lse`` and gradients are those of attention that is written out."""
    cp = ContextParallel(layout=options.get("layout", "zigzag"))
    length, scale = options.get("length", T), options.get("scale")
    kind, function, backend = WAYS[way]
    torch._dynamo.reset()  # graphs of other cases count, too
    model: Any = kind(function)
    handle = replace_sdpa(model, cp, strategy=options.get("strategy", "auto"))
    call = model
    if backend:
        call = torch.compile(model, backend="aot_eager", fullgraph=backend == "fullgraph")
    mods = MASKS[mask][0], SCORES[score][0] if score != "itself" else None
    wholes = [x.requires_grad_() for x in qkv(options.get("kv_heads", HEADS), length)]
    shards = [cp.shard(x.detach(), dim=2, pad=True).requires_grad_() for x in wholes]
    arguments = {
        "block_mask": block_mask(mods[0], length), "score_mod": mods[1], "scale": scale,
        "enable_gqa": len({x.shape[1] for x in wholes}) > 1, "return_aux": AuxRequest(lse=True, max_scores=True),
    }  # fmt: skip
    expected, lse, most = expected_of(wholes, *mods, scale)
    out, aux = call(*shards, arguments)
    whole_length = None if length == T else length
    for a, b in ((out, expected), (aux.lse, lse), (aux.max_scores, most)):
        torch.testing.assert_close(cp.unshard(a.detach(), dim=2, seq_len=whole_length), b.detach())
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    # ``lse`` has a gradient, too, as where a model's sinks scale the output by it.
    ((expected * weights).sum() + (lse * weights[..., 0]).sum()).backward()
    own = cp.shard(weights, dim=2, pad=True)
    ((out * own).sum() + (aux.lse * own[..., 0]).sum()).backward()
    for a, b in zip(shards, wholes, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(cp.unshard(a.grad, dim=2, seq_len=whole_length), b.grad)
    del arguments["return_aux"]
    with torch.no_grad():
        torch.testing.assert_close(call(*shards, arguments), out)
        pair = call(*shards, arguments | {"return_lse": True})
    torch.testing.assert_close(pair, (out, aux.lse))
    assert "block_mask" in str(handle) or "unbroken" in way
    handle.remove()


class Biased(nn.Module):
    """Calls with a trained bias, in a function that is made outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = bias = nn.Parameter(TABLE[:, 0].double())
        self.score = lambda s, b, h, i, j: s + bias[h, (i - j).abs()]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masks: list[BlockMask]) -> Tensor:
        for mask in masks:
            q = flex_attention(q.sin(), k, v, self.score, mask)
        return q


@pytest.mark.nightly(only=["inductor"])
@pytest.mark.parametrize("how", ["eager", "checkpointed", "aot_eager", "inductor"])
@on_ranks
def test_a_learned_bias_with_other_documents_in_each_step(how: str) -> None:
    cp, model = ContextParallel(), Biased()
    handle = replace_sdpa(model, cp)
    call: Any = model
    if how == "checkpointed":
        call = functools.partial(checkpoint, model, use_reentrant=False)
    elif how != "eager":
        call = torch.compile(model, backend=how, fullgraph=True)
    wholes, graphs = [x.requires_grad_() for x in qkv()], []
    shards = [cp.shard(x.detach(), dim=2).requires_grad_() for x in wholes]
    for step in range(3):
        document = torch.bucketize(torch.arange(T), torch.tensor([3 + 5 * step, 30]), right=True)
        packed = and_masks(causal, documents(document))
        masks = [block_mask(packed), block_mask(and_masks(packed, window(5)))]
        with cp.whole():
            out = model(*wholes, masks)
            expected = [out, *torch.autograd.grad(out.square().sum(), [*wholes, model.bias])]
        out = call(*shards, masks)
        *grads, model.bias.grad = torch.autograd.grad(out.square().sum(), [*shards, model.bias])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        cp.reduce_gradients(model)
        parts = [cp.unshard(x.detach(), dim=2) for x in (out, *grads)]
        torch.testing.assert_close([*parts, model.bias.grad], [x.detach() for x in expected])
    assert graphs[-1] == graphs[0]
    del out, grads
    gc.collect()
    assert not flex_graph._runs  # nothing is kept for a backward that is past
    if how == "eager":
        handle.documents = (0, 5, T)
        batch = dict(zip("qkv", wholes, strict=True)) | {"masks": masks}
        handle.verify(batch, dims=dict.fromkeys("qkv", 2))
    handle.remove()


@on_ranks
def test_what_cannot_be_exact_is_refused_by_name() -> None:
    """All refusals are raised before anything is sent, from compiled functions, too."""
    cp = ContextParallel()
    q, k, v = (cp.shard(x, dim=2) for x in qkv())
    own = T // 2
    offsets, rows = torch.arange(own) // 5, torch.stack([DOCUMENT, DOCUMENT.flip(0)])
    long = torch.zeros(2 * T, dtype=torch.long)
    hand = block_mask(window(6))
    hand.mask_mod = causal
    sliced = block_mask(causal, rows=BATCH)[0]
    keep = block_mask(causal)

    def mask(mod: Mod, *sizes: int, **more: int) -> dict[str, Any]:
        return {"block_mask": block_mask(mod, *sizes, **more)}

    unsupported, wrong = "UnsupportedError replace_sdpa: Attend: ", "ValueError replace_sdpa: "
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{unsupported}the mask_mod <lambda> depends on the batch: it differs between b = 0 and b = 1",
         mask(lambda b, h, q, k: q >= k + b)),
        (f"{unsupported}the mask_mod <lambda> depends on the batch", mask(by_rows(rows))),
        (f"{unsupported}the mask_mod <lambda> depends on the head: it differs between h = 0 and h = 1",
         mask(lambda b, h, q, k: q >= k + h, heads=HEADS)),
        (f"{unsupported}the mask_mod causal does not show what the block mask's blocks show", {"block_mask": hand}),
        (f"{unsupported}the mask_mod _sliced_mask_mod_error is that of a part", {"block_mask": sliced}),
        (f"{unsupported}the mask_mod <lambda> reads a tensor of (24,)",
         mask(lambda b, h, q, k: offsets[q] == offsets[k], own)),
        (f"{unsupported}the mask_mod <lambda> reads a tensor of (96,)",
         mask(lambda b, h, q, k: (q >= k) & (long[q] == long[k]), own)),
        (f"{unsupported}the mask_mod <lambda> reads the number 24", mask(lambda b, h, q, k: q - k < own, own)),
        (f"{unsupported}the mask_mod <lambda> computes aten.pow", mask(lambda b, h, q, k: (q - k) ** 2 < 9)),
        (f"{wrong}Attend: a block mask over 24 queries and 48 keys", mask(causal, own, T)),
        (f"{unsupported}the score_mod <lambda> ends in aten.sigmoid", {"score_mod": OTHER_SCORES["sigmoid"][0]}),
        (f"{unsupported}the score_mod <lambda> reads the number 24",
         {"score_mod": lambda s, b, h, q, k: s + (q - k) / own}),
        (f"{unsupported}the score_mod <lambda> reads places 0 to 47 of a tensor of (40,)",
         {"score_mod": lambda s, b, h, q, k: s + SHORT[(q - k).abs()]}),
        (f"{wrong}flex_attention takes return_lse=True or return_aux",
         {"return_aux": AuxRequest(lse=True, max_scores=True), "return_lse": True}),
    ]  # fmt: skip
    for function in (flex_attention, compiled):
        attend = Attend(function)
        replace_sdpa(attend, cp)
        for start, options in cases[:: 1 if function is flex_attention else 4]:
            with pytest.raises(ValueError, match="replace_sdpa") as error:
                attend(q, k, v, options)
            message = f"{type(error.value).__name__} {error.value}"
            assert message.startswith(start), (message, start)
        attend(q, k, v, {"block_mask": keep})  # nothing was sent: the group is usable
    whole: Any = torch.compile(Attend(), backend="aot_eager", fullgraph=True)
    replace_sdpa(whole._orig_mod, cp)
    holder = Biased()
    for read, score in (
        ("Biased", lambda s, b, h, i, j: s + holder.bias[h, i]),
        ("trained tensor", lambda s, b, h, i, j: s + learned(h, i)), ("trained tensor", scaled(learned)),
        ("trained tensor", lambda s, b, h, i, j: s + HOLDER.bias[h, i]),
        ("trained tensor", lambda s, b, h, i, j: s + TABLES["bias"][h, i]),
    ):  # fmt: skip
        said = rf"reads a {read}, .* compile without fullgraph=True"
        refused(said, whole, q, k, v, {"score_mod": score}, error=RuntimeError)
    roles = nn.ModuleDict({"text": Attend(), "other": Attend(), "near": Attend()})
    replace_sdpa(roles, cp, whole_keys=("text",), sharded_keys=("other",), local=("near",))
    for role, said in (
        ("text", "with keys that every rank holds whole"),
        ("other", "over keys of another"),
    ):
        refused(said, roles[role], q, k, v, {"block_mask": keep}, error=UnsupportedError)
    near = block_mask(causal, own)
    expected, *_ = expected_of([q, k, v], causal, None, None)
    torch.testing.assert_close(roles["near"](q, k, v, {"block_mask": near}), expected)
    full, *_ = expected_of(qkv(), None, None, None)
    torch.testing.assert_close(cp.unshard(roles["other"](q, k, v, {}), dim=2), full)
    handle = replace_sdpa(long_model := Attend(), cp)
    handle.documents = (0, T + 4)
    refused("documents end at 52", long_model, q, k, v, {"block_mask": keep})


@on_ranks
def test_masks_that_change_are_seen() -> None:
    """Check tensors that change in place between calls, new block masks, and padded shards."""
    cp, attend = ContextParallel(), Attend()
    replace_sdpa(attend, cp)
    whole = qkv()
    q, k, v = (cp.shard(x, dim=2) for x in whole)
    table, state = DOCUMENT.clone(), {"width": 9}

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (table[i] == table[j]) & ((i - j).abs() < state["width"])

    for change in (dict, lambda: table.fill_(0), lambda: state.update(width=5)):
        made = block_mask(mod)
        attend(q, k, v, {"block_mask": made})
        change()
        made = block_mask(mod)
        for _ in range(2):
            out = attend(q, k, v, {"block_mask": made})
            expected, *_ = expected_of(whole, mod, None, None)
            torch.testing.assert_close(cp.unshard(out, dim=2), expected)
    state["width"] = 30
    refused(
        "does not show what the block mask's blocks show", attend, q, k, v, {"block_mask": made}
    )

    class Root(nn.Sequential):
        def forward(self, x: Tensor, mod: Mod) -> Tensor:  # type: ignore[override]
            heads = x.unflatten(-1, (1, DIM)).transpose(1, 2)
            out: Tensor = self[0](heads, heads, heads, {"block_mask": block_mask(mod)})
            return out

    root = Root(Making())
    replace_sdpa(root, cp)
    x = cp.shard(torch.randn(1, T - 5, DIM), pad=True)
    assert root(x, causal).isfinite().all()
    refused("would see the padding", root, x, MASKS["window on both sides"][0])


@on_ranks
def test_torchs_function_is_its_own_again() -> None:
    """Check its code while modules are replaced and after, and a call outside of them."""
    cp, others = ContextParallel(), {*flex_of_ring._replacements}
    flex_of_ring._replacements.clear()  # of tests that have not removed theirs
    first, second = replace_sdpa(Attend(), cp), replace_sdpa(Attend(), cp)
    asking = flex_attention.__code__
    first.remove()
    first.remove()
    assert flex_attention.__code__ is asking
    q, k, v = qkv()
    expected, *_ = expected_of([q, k, v], causal, None, None)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask(causal)), expected)
    second.remove()
    assert flex_attention.__code__ is not asking
    assert "_validate_sdpa_input" in flex_attention.__code__.co_names
    for state in others:
        flex_of_ring.intercept(state)
