"""Log-probabilities of tokens, and their sums over sequences: those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import LayoutSpec, RankMismatchError, UnsupportedError
from ring_torch import ContextParallel
from ring_torch.sharding import UnshardGrad
from ring_torch.training import sum_by_sequence, token_log_probs

RANKS = 4
VOCAB, DIM, IGNORED = 11, 6, -100


@dataclass(frozen=True)
class Case:
    """A call of both functions, its sequences and how it runs."""

    ranks: int = 2
    layout: LayoutSpec = "zigzag"
    rows: int = 2
    length: int = 16
    documents: str | None = None  # "cu_seqlens" or "segment_ids"; bounds are BOUNDS
    grad: UnshardGrad = "slice"
    options: tuple[tuple[str, Any], ...] = ()  # of token_log_probs
    bias: bool = True
    ignored: str = "few"  # or "all"
    dtype: torch.dtype = torch.float64
    mode: str = "eager"


BOUNDS = (0, 3, 3, 9, 14, 16)  # the second document is empty
CAPPED = (("softcap", 1.5), ("temperature", 0.7))
PACKED = Case(rows=1, documents="cu_seqlens")

CASES = {
    "one rank": Case(ranks=1),
    "one rank, all options": Case(ranks=1, options=CAPPED, documents="segment_ids", rows=1),
    "plain": Case(),
    "without a bias": Case(bias=False),
    "soft cap": Case(options=CAPPED[:1]),
    "temperature, gradients summed": Case(options=CAPPED[1:], grad="sum"),
    "class 3 is ignored": Case(options=(*CAPPED, ("ignore_index", 3))),
    "all labels are ignored": Case(ignored="all"),
    "padded": Case(length=13, options=CAPPED),
    "three ranks": Case(ranks=3, length=18, layout="contiguous"),
    "four ranks, striped": Case(ranks=4, layout="striped", grad="sum"),
    "documents": PACKED,
    "documents, gradients summed": replace(PACKED, grad="sum", ranks=4),
    "documents, padded": replace(PACKED, ranks=3, length=16, layout="zigzag"),
    "documents by ids": replace(PACKED, documents="segment_ids", ranks=4, layout="striped"),
    "documents by ids, padded": replace(PACKED, documents="segment_ids", ranks=3),
    "float32": Case(dtype=torch.float32, options=CAPPED),
    "bfloat16": Case(dtype=torch.bfloat16),
    "autocast": Case(dtype=torch.float32, mode="autocast"),
    "checkpoint": replace(PACKED, mode="checkpoint", options=CAPPED),
    "checkpoint, gradients summed": Case(mode="checkpoint", grad="sum"),
    "compiled": Case(mode="compiled", options=CAPPED),
    "compiled, padded, gradients summed": Case(mode="compiled", length=13, grad="sum"),
    "compiled documents": replace(PACKED, mode="compiled", ranks=4),
    "compiled checkpoint": replace(PACKED, mode="compiled checkpoint"),
}


class Whole:
    """Whole sequences, equal on all ranks, and a head."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=random, dtype=torch.float64)
        shape = case.rows, case.length
        self.hidden, self.head = draw(*shape, DIM).to(case.dtype), draw(VOCAB, DIM).to(case.dtype)
        self.bias = draw(VOCAB).to(case.dtype) if case.bias else None
        wide = torch.promote_types(case.dtype, torch.float32)
        self.of_entropy = draw(*shape).to(wide)
        self.labels = torch.randint(VOCAB, shape, generator=random)
        self.options = dict(case.options)
        drop = self.options.get("ignore_index", IGNORED)
        self.labels[0, 4:6] = drop
        if case.ignored == "all":
            self.labels[:] = drop
        self.kept = self.labels != drop
        self.ids = torch.arange(case.rows)[:, None].expand(shape)
        if case.documents is not None:
            self.ids = torch.searchsorted(
                torch.tensor(BOUNDS), torch.arange(case.length), right=True
            )[None] - 1  # fmt: skip
        self.sequences = len(BOUNDS) - 1 if case.documents else case.rows

    def leaves(self) -> list[Tensor]:
        """Return what has a gradient: hidden, head and, if there is one, the bias."""
        tensors = [self.hidden, self.head, *([] if self.bias is None else [self.bias])]
        return [x.clone().requires_grad_() for x in tensors]

    def expected(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return log-probabilities, entropies, the loss and gradients, of plain torch."""
        leaves = self.leaves()
        z = functional.linear(*leaves)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if (softcap := self.options.get("softcap")) is not None:
            z = softcap * (z / softcap).tanh()
        log_p = (z / self.options.get("temperature", 1.0)).log_softmax(-1)
        own = log_p.gather(-1, self.labels.where(self.kept, 0)[..., None])[..., 0]
        own, entropies = own * self.kept, -(log_p.exp() * log_p).sum(-1) * self.kept
        by_sequence = functional.one_hot(self.ids, self.sequences).to(own.dtype)  # [B, T, S]
        sums = torch.einsum("bt,bts->s", own, by_sequence)
        counts = torch.einsum("bt,bts->s", self.kept.to(own.dtype), by_sequence)
        loss = _of_sequences(sums, counts) + (self.of_entropy * entropies).sum()
        return own.detach(), entropies.detach(), loss.detach(), [*torch.autograd.grad(loss, leaves)]


def _of_sequences(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a loss that takes its sequences unlike, not linear in the sums."""
    weight = torch.arange(1, len(sums) + 1)
    return (weight * (sums / counts.clamp(min=1)).sin()).sum()


def _loss(
    cp: ContextParallel, case: Case, options: dict[str, Any], documents: dict[str, Any],
    seq_len: int | None, hidden: Tensor, labels: Tensor, of_entropy: Tensor, kept: Tensor,
    head: Tensor, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return this rank's log-probabilities and entropies, and its part of the loss."""
    own, entropies = token_log_probs(
        cp, hidden, head, labels, bias=bias, entropy=True, tokens_at_once=3, seq_len=seq_len,
        **options,
    )  # fmt: skip
    sums = sum_by_sequence(cp, own, seq_len=seq_len, grad=case.grad, **documents)
    counts = sum_by_sequence(cp, kept, seq_len=seq_len, **documents)
    total = _of_sequences(sums, counts) / (cp.cp_size if case.grad == "sum" else 1)
    return own, entropies, total + (of_entropy * entropies).sum()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@on_ranks
def test_of_one_process(rank: int, case: Case) -> None:
    group: Any = dist.new_group(range(case.ranks))
    if rank >= case.ranks:
        return
    cp, whole = ContextParallel(group, case.layout), Whole(case)
    own, entropies, value, grads = whole.expected()
    layout = cp.layout_of(case.length, pad=True)
    seq_len = case.length if layout.padded_len > case.length else None
    shard: Callable[..., Tensor] = partial(cp.shard, pad=True)
    documents: dict[str, Any] = {}
    if case.documents == "cu_seqlens":
        documents = {"cu_seqlens": BOUNDS}
    if case.documents == "segment_ids":  # padding is of the first document, unless seq_len tells
        documents = {"segment_ids": shard(whole.ids)}
    hidden, *head = whole.leaves()
    hidden = shard(hidden.detach()).requires_grad_()
    tensors = [hidden, shard(whole.labels), shard(whole.of_entropy), shard(whole.kept), *head]
    function: Any = partial(_loss, cp, case, whole.options, documents, seq_len)
    if "compiled" in case.mode:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    if "checkpoint" in case.mode:
        function = partial(checkpoint, function, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.mode == "autocast"):
        mine, my_entropies, part = function(*tensors)
    part.backward()
    close: Any = torch.testing.assert_close
    if case.dtype == torch.bfloat16 or case.mode == "autocast":
        close = partial(close, rtol=2e-2, atol=5e-2 * max(1.0, float(grads[0].abs().max())))
    assert mine.dtype == torch.promote_types(case.dtype, torch.float32)
    for x, expected in ((mine, own), (my_entropies, entropies)):
        close(cp.unshard(x.detach(), seq_len=seq_len), expected)
    value_of_tokens = (tensors[2] * my_entropies).sum().detach()
    dist.all_reduce(value_of_tokens, group=group)
    of_sequences = part.detach() - (tensors[2] * my_entropies).sum().detach()
    factor = case.ranks if case.grad == "sum" else 1
    close(of_sequences * factor + value_of_tokens, value)
    assert hidden.grad is not None
    close(hidden.grad, shard(grads[0]))
    for x, grad in zip(head, grads[1:], strict=True):
        assert x.grad is not None
        dist.all_reduce(x.grad, group=group)
        close(x.grad, grad)


ENDS = (5, 5, 8, 9)  # of ranks' tokens: the second has none
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {}, "weights": {"weight": torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))},
    "smooth": {"label_smoothing": 0.2}, "sum": {"reduction": "sum"}, "class 3": {"ignore_index": 3},
}  # fmt: skip
DOCUMENTS = (0, 2, 2, 6, 9)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@on_ranks
def test_ranks_with_unlike_numbers_of_tokens(rank: int, mode: str) -> None:
    """Every function has means over the labels of all ranks, and sums, whatever each rank has."""

    def run(function: Any) -> Any:
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        return function if mode == "eager" else compiled

    cp, close, random = (
        ContextParallel(None, "contiguous"),
        torch.testing.assert_close,
        torch.Generator().manual_seed(0),
    )
    hidden, head = (torch.randn(*shape, generator=random) for shape in ((2, 9, DIM), (VOCAB, DIM)))
    labels = torch.randint(VOCAB, (2, 9), generator=random)
    labels[0, 3] = IGNORED
    leaf = head.clone().requires_grad_()
    own = slice(0 if rank == 0 else ENDS[rank - 1], ENDS[rank])
    mine, mine_labels = hidden[:, own], labels[:, own]

    def same(part: Tensor, expected: Tensor, *, is_whole: bool = False) -> None:
        (expected_grad,) = torch.autograd.grad(expected, leaf, retain_graph=True)
        (grad,) = torch.autograd.grad(part, leaf)
        part = part.detach()
        dist.all_reduce(grad)
        if not is_whole:
            dist.all_reduce(part)
        close((part, grad), (expected.detach(), expected_grad))

    for options in LOSSES.values():
        drop = options.get("ignore_index", IGNORED)
        targets, of_rank = (x.where(x >= 0, drop) for x in (labels, mine_labels))
        expected = functional.cross_entropy(
            (hidden @ leaf.T).flatten(0, 1), targets.flatten(), **options
        )
        same(run(ring_torch.linear_cross_entropy)(cp, mine, leaf, of_rank, **options), expected)
        same(run(ring_torch.cross_entropy)(cp, mine @ leaf.T, of_rank, **options), expected)
    log_p = (hidden @ leaf.T).log_softmax(-1)
    own_log_p = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    entropies = -(log_p.exp() * log_p).sum(-1) * (labels >= 0)
    for log_probs in (
        run(token_log_probs)(cp, mine, leaf, mine_labels),
        run(token_log_probs)(cp, mine, leaf, mine_labels, entropy=True)[0],
    ):
        close(log_probs.detach(), own_log_p[:, own].detach())
        same(log_probs.sin().sum(), own_log_p.sin().sum())
    of_entropies = run(token_log_probs)(cp, mine, leaf, mine_labels, entropy=True)[1]
    same(of_entropies.sin().sum(), entropies.sin().sum())
    ids = torch.searchsorted(torch.tensor(DOCUMENTS), torch.arange(9), right=True)[None] - 1
    ways: list[tuple[int, dict[str, Any]]] = [(2, {}), (1, {"cu_seqlens": DOCUMENTS})]
    ways += [(1, {"segment_ids": ids[:, own]})] * (mode == "eager")
    for rows, options in ways:
        names = ids if options else torch.arange(2)[:, None].expand(2, 9)
        by_sequence = functional.one_hot(names, 4 if options else 2).float()
        total = torch.einsum("bt,bts->s", own_log_p[:rows], by_sequence)
        counts = torch.einsum("bt,bts->s", (labels[:rows] >= 0).float(), by_sequence)
        sums = run(sum_by_sequence)
        kept = sums(cp, mine_labels[:rows] >= 0, **options)
        close(kept.float(), counts)
        for grad in ("slice", "sum"):
            mine_log_p = token_log_probs(cp, mine[:rows], leaf, mine_labels[:rows])
            loss = _of_sequences(sums(cp, mine_log_p, grad=grad, **options), kept)
            part = loss / (RANKS if grad == "sum" else 1)
            same(part, _of_sequences(total, counts), is_whole=grad == "slice")
    with pytest.raises(ValueError, match="must end at the sequence length 9, got 8"):
        sum_by_sequence(cp, mine_labels[:1], cu_seqlens=(0, 8))
    with pytest.raises(RankMismatchError, match="unlike numbers take segment_ids"):
        sum_by_sequence(ContextParallel(), mine_labels[:1], cu_seqlens=DOCUMENTS)


@on_ranks
def test_a_graph_serves_other_documents() -> None:
    """Offsets change without a new graph, as does the number of documents once."""
    torch.compiler.reset()
    cp, frames = ContextParallel(), []

    def backend(graph: Any, _: Any) -> Any:
        frames.append(graph)
        return graph.forward

    function = torch.compile(sum_by_sequence, fullgraph=True, backend=backend)
    whole = torch.arange(16.0)[None]
    for bounds in ((0, 2, 16), (0, 7, 16), (0, 1, 16), (0, 3, 16)):
        sums = function(cp, cp.shard(whole), cu_seqlens=bounds)
        torch.testing.assert_close(
            sums, torch.stack([whole[0, : bounds[1]].sum(), whole[0, bounds[1] :].sum()])
        )
    assert len(frames) == 2  # of constants, then of symbols


@pytest.mark.parametrize("name", ["offsets", "kinds", "rows"])
@on_ranks
def test_ranks_that_disagree_are_told(rank: int, name: str) -> None:
    group: Any = dist.new_group()
    cp, x = ContextParallel(group), torch.ones(1, 8)
    options: dict[str, Any] = {
        "offsets": {"cu_seqlens": (0, 3 + (rank == 2), 32)},
        "kinds": {"cu_seqlens": (0, 32)} if rank else {"segment_ids": x.long()},
        "rows": {},
    }[name]
    with pytest.raises(RankMismatchError):
        sum_by_sequence(cp, x.repeat(1 + (rank == 1 and name == "rows"), 1), **options)
    assert sum_by_sequence(cp, x).tolist() == [32.0]  # nothing was sent: it is usable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": (0, 4), "segment_ids": torch.zeros(1, 8).long()}, "give one"),
        ({"cu_seqlens": (0, 4)}, "must end at the sequence length 8, got 4"),
        ({"seq_len": 9}, "without padding"),
    ],
)
def test_wrong_documents_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sum_by_sequence(ContextParallel(), torch.ones(1, 8), **options)


def test_a_missing_grad_and_documents_of_several_rows_are_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"sum_by_sequence: x requires a gradient"):
        sum_by_sequence(cp, torch.ones(1, 8, requires_grad=True))
    with pytest.raises(ValueError, match="x has 2: give documents of all rows in one"):
        sum_by_sequence(cp, torch.ones(2, 8), cu_seqlens=(0, 8))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: sum_by_sequence(cp, x, grad="slice").sum())(torch.ones(1, 8))
    with pytest.raises(UnsupportedError, match=r"token_log_probs cannot run"):
        torch.func.vmap(partial(token_log_probs, cp, head_weight=torch.ones(5, 3)))(
            torch.ones(2, 4, 3), labels=torch.zeros(2, 4).long()
        )


def test_classes_that_cannot_be_drawn_have_no_entropy() -> None:
    """A bias of -inf forbids a class: torch's product of 0 and log(0) would be NaN."""
    cp, bias = ContextParallel(), torch.tensor([0.0, float("-inf"), 0.5])
    hidden = torch.randn(1, 4, 2, requires_grad=True)
    head, labels = torch.randn(3, 2), torch.tensor([[0, 2, 0, 2]])
    results = token_log_probs(cp, hidden, head, labels, bias=bias, entropy=True)
    (grad,) = torch.autograd.grad(results[0].sum() + results[1].square().sum(), hidden)
    allowed = [0, 2]
    of_two = token_log_probs(
        cp, hidden, head[allowed], labels // 2, bias=bias[allowed], entropy=True
    )
    (expected,) = torch.autograd.grad(of_two[0].sum() + of_two[1].square().sum(), hidden)
    torch.testing.assert_close((*results, grad), (*of_two, expected))


def _largest(function: Callable[[], object]) -> int:
    """Return the bytes of the largest allocation."""
    with profile(profile_memory=True, acc_events=True) as profiled:
        function()
    return max(int(event.self_cpu_memory_usage) for event in profiled.events())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_logits_are_never_whole_and_a_frozen_head_has_no_gradient(is_frozen: bool) -> None:
    tokens, classes, dim = 4096, 2048, 64
    cp, labels = ContextParallel(), torch.full((1, tokens), 3)
    hidden = torch.randn(1, tokens, dim, requires_grad=True)
    head = nn.Linear(dim, classes, bias=False).requires_grad_(not is_frozen)

    def step() -> None:
        results = token_log_probs(
            cp, hidden, head.weight, labels, softcap=9.0, temperature=0.5, entropy=True,
            tokens_at_once=16,
        )  # fmt: skip
        (results[0].sum() + results[1].sum()).backward()

    largest = _largest(step)
    of_hidden, of_head, of_piece = 4 * tokens * dim, 4 * classes * dim, 4 * 16 * classes
    assert largest == of_hidden > of_head > of_piece
    hidden.requires_grad_(False)
    if is_frozen:
        assert head.weight.grad is None
    else:
        assert _largest(step) == of_hidden


def test_sums_of_long_documents_are_exact() -> None:
    x, length = -3 * torch.rand(1, 1 << 16, generator=torch.Generator().manual_seed(0)), 1 << 16
    for options in (
        {},
        {"cu_seqlens": (0, length)},
        {"segment_ids": torch.zeros(1, length, dtype=torch.int32)},
    ):
        total = sum_by_sequence(ContextParallel(), x, **options)
        torch.testing.assert_close(total.double(), x.double().sum(1), rtol=1e-6, atol=0)
