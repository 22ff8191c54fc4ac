"""Losses of tokens and of sequences: the ranks' parts add up to torch's, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import largest_allocation
from on_ranks import on_ranks, on_two_ranks
from refused import refused
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from ring_core import ChunkLayout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel, cross_entropy, linear_cross_entropy
from ring_torch.sharding import UnshardGrad
from ring_torch.training import sum_by_sequence, token_log_probs

RANKS = 4
VOCAB, DIM, IGNORED = 11, 6, -100


@dataclass(frozen=True)
class Case:
    """A function of the tokens of some sequences, and how it runs."""

    of: str = "sequences"  # or a loss, of "logits" or "hidden"
    ranks: int = 2
    layout: LayoutSpec = "zigzag"
    rows: int = 2
    length: int = 16
    documents: str | None = None  # "cu_seqlens" or "segment_ids"
    bounds: tuple[int, ...] = (0, 3, 3, 9, 14, 16)  # of documents; the second is empty
    ends: tuple[int, ...] = ()  # of ranks' tokens, where they are not alike
    grad: UnshardGrad = "slice"
    options: dict[str, Any] = field(default_factory=dict)  # as torch's, or of token_log_probs
    bias: bool = True
    ignored: str = "few"  # or "rank 0": all labels that it has; or "all"
    dtype: torch.dtype = torch.float64
    mode: str = "eager"


CAPPED: dict[str, Any] = {"softcap": 1.5, "temperature": 0.7}
PACKED = Case(rows=1, documents="cu_seqlens")
UNLIKE = Case(ranks=4, length=9, ends=(0, 5, 5, 8, 9), layout="contiguous", bounds=(0, 2, 2, 6, 9))

CASES = {
    "one rank, all options": Case(ranks=1, options=CAPPED, documents="segment_ids", rows=1),
    "plain": Case(),
    "without a bias": Case(bias=False),
    "class 3 is ignored": Case(options={**CAPPED, "ignore_index": 3}),
    "all labels are ignored": Case(ignored="all"),
    "padded": Case(length=13, options=CAPPED),
    "three ranks": Case(ranks=3, length=18, layout="contiguous"),
    "four ranks, striped": Case(ranks=4, layout="striped", grad="sum"),
    "documents": PACKED,
    "documents, gradients summed": replace(PACKED, grad="sum", ranks=4),
    "documents by ids": replace(PACKED, documents="segment_ids", ranks=4, layout="striped"),
    "documents by ids, padded": replace(PACKED, documents="segment_ids", ranks=3),
    "float32": Case(dtype=torch.float32, options=CAPPED),
    "bfloat16": Case(dtype=torch.bfloat16),
    "autocast": Case(dtype=torch.float32, mode="autocast"),
    "checkpoint": replace(PACKED, mode="checkpoint", options=CAPPED),
    "compiled, padded, gradients summed": Case(mode="compiled", length=13, grad="sum", options=CAPPED),
    "compiled checkpoint": replace(PACKED, mode="compiled checkpoint"),
    "unlike numbers, gradients summed": replace(UNLIKE, grad="sum"),
    "unlike numbers, documents": replace(UNLIKE, rows=1, documents="cu_seqlens"),
    "unlike numbers, documents by ids": replace(UNLIKE, rows=1, documents="segment_ids", grad="sum"),
    "unlike numbers, compiled documents": replace(UNLIKE, rows=1, documents="cu_seqlens", mode="compiled"),
}  # fmt: skip
#: Options of losses with the same meaning as in torch.
OPTIONS: list[dict[str, Any]] = [
    {}, {"label_smoothing": 0.2}, {"weight": True}, {"weight": True, "label_smoothing": 0.3},
    {"ignore_index": 3, "label_smoothing": 0.1}, {"reduction": "sum", "weight": True},
]  # fmt: skip
MODES = ("eager", "compiled", "autocast", "checkpoint", "compiled checkpoint")
LOSSES = ("logits", "hidden")


def losses(mode: str, of: Any) -> list[Case]:
    """Return cases of a loss."""
    plain = Case(of=of, mode=mode)
    unlike = replace(plain, length=9, layout="contiguous")
    ignores, ends = ("few", "rank 0", "all"), ((0, 5, 9), (0, 9, 9), (0, 0, 9)) * 2
    if mode == "autocast":
        return [replace(plain, dtype=torch.float32, options=options) for options in OPTIONS[:4]]
    cases = [replace(plain, length=7, options=options) for options in OPTIONS]
    cases += [replace(unlike, options=x, ends=end) for x, end in zip(OPTIONS, ends, strict=True)]
    if "compiled" in mode:
        return [replace(plain, options=OPTIONS[3]), *cases[4:6], cases[9]]
    cases += [replace(plain, ignored=x, options=options) for x in ignores for options in OPTIONS]
    return cases + [replace(plain, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]


class Whole:
    """Whole sequences, equal on all ranks, and a head."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=random, dtype=torch.float64)
        self.case, self.options, shape = case, dict(case.options), (case.rows, case.length)
        self.hidden, self.head = draw(*shape, DIM).to(case.dtype), draw(VOCAB, DIM).to(case.dtype)
        self.bias = draw(VOCAB).to(case.dtype) if case.bias else None
        self.wide = torch.promote_types(case.dtype, torch.float32)
        self.of_entropy = draw(*shape).to(self.wide)
        if "weight" in self.options:
            self.options["weight"] = torch.rand(VOCAB, generator=random).to(self.wide)
        self.labels = torch.randint(VOCAB, shape, generator=random)
        drop = self.options.get("ignore_index", IGNORED)
        self.labels[0, :5] = drop
        if case.ignored == "rank 0":  # in zigzag it holds the first and the last quarter
            self.labels[:, : case.length // 4] = self.labels[:, -(case.length // 4) :] = drop
        if case.ignored == "all":
            self.labels[:] = drop
        self.kept = self.labels != drop
        self.ids = torch.arange(case.rows)[:, None].expand(shape)
        if case.documents is not None:
            bounds, positions = torch.tensor(case.bounds), torch.arange(case.length)
            self.ids = torch.searchsorted(bounds, positions, right=True)[None] - 1
        self.sequences = len(case.bounds) - 1 if case.documents else case.rows

    def leaves(self) -> list[Tensor]:
        """Return what has a gradient: hidden, head and, if there is one, the bias."""
        tensors = [self.hidden, self.head, *([] if self.bias is None else [self.bias])]
        return [x.clone().requires_grad_() for x in tensors]

    def expected(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return plain torch's loss, gradients, and log-probabilities and entropies if wanted."""
        leaves = self.leaves()
        z = functional.linear(*leaves).to(self.wide)
        of_tokens: list[Tensor] = []
        if self.case.of == "sequences":
            if (softcap := self.options.get("softcap")) is not None:
                z = softcap * (z / softcap).tanh()
            log_p = (z / self.options.get("temperature", 1.0)).log_softmax(-1)
            own = log_p.gather(-1, self.labels.where(self.kept, 0)[..., None])[..., 0] * self.kept
            of_tokens = [own, -(log_p.exp() * log_p).sum(-1) * self.kept]
            of_ids = functional.one_hot(self.ids, self.sequences).double()
            sums = (torch.einsum("bt,bts->s", x.double(), of_ids) for x in (own, self.kept))
            loss = _of_sequences(*sums) + (self.of_entropy * of_tokens[1]).sum()
        else:
            loss = functional.cross_entropy(z.flatten(0, 1), self.labels.flatten(), **self.options)
        return loss.detach(), [*torch.autograd.grad(loss, leaves)], [x.detach() for x in of_tokens]


def _of_sequences(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a loss that takes its sequences unlike, not linear in the sums."""
    weight = torch.arange(1, len(sums) + 1)
    return (weight * (sums / counts.clamp(min=1)).sin()).sum()


def _loss(
    of: str, cp: ContextParallel, hidden: Tensor, labels: Tensor, head: Tensor,
    bias: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    if of == "logits":
        return cross_entropy(cp, functional.linear(hidden, head, bias), labels, **options)
    return linear_cross_entropy(cp, hidden, head, labels, bias=bias, tokens_at_once=3, **options)


def _run(
    cp: ContextParallel, case: Case, options: dict[str, Any], documents: dict[str, Any],
    hidden: Tensor, labels: Tensor, of_entropy: Tensor, kept: Tensor, *head: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return a loss to differentiate, this rank's part of its value, and results of tokens."""
    if case.of != "sequences":
        part = _loss(case.of, cp, hidden, labels, *head, **options)
        return part, part
    bias, seq_len = (*head[1:], None)[0], options["seq_len"]
    own, entropies = token_log_probs(
        cp, hidden, head[0], labels, bias=bias, entropy=True, tokens_at_once=3, **options
    )
    sums = sum_by_sequence(cp, own, seq_len=seq_len, grad=case.grad, **documents)
    total = _of_sequences(sums, sum_by_sequence(cp, kept, seq_len=seq_len, **documents))
    of_tokens, share = (of_entropy * entropies).sum(), total / cp.cp_size
    return (share if case.grad == "sum" else total) + of_tokens, share + of_tokens, own, entropies


def _compare(case: Case) -> None:
    """Compare the sum of the ranks' losses, and the gradients of all tensors, with torch's."""
    is_all = case.ranks == dist.get_world_size()
    group: Any = None if is_all else dist.new_group(range(case.ranks))
    if dist.get_rank() >= case.ranks:
        return
    cp, whole = ContextParallel(group, case.layout), Whole(case)
    value, grads, of_tokens = whole.expected()
    is_padded = cp.layout_of(case.length, pad=True).padded_len > case.length
    seq_len = case.length if is_padded else None
    shard: Callable[..., Tensor] = partial(cp.shard, pad=True)
    if case.ends:
        own, seq_len = slice(*case.ends[cp.cp_rank : cp.cp_rank + 2]), None
        shard = lambda x: x[:, own].clone()  # noqa: E731 - of any tokens
    # Padding is of the first document, unless seq_len tells.
    given = {"cu_seqlens": case.bounds, "segment_ids": shard(whole.ids)}
    documents = {name: x for name, x in given.items() if name == case.documents}
    hidden, *head = whole.leaves()
    hidden = shard(hidden.detach()).requires_grad_()
    # Padding of labels is class 0, which is not ignored.
    tensors = [hidden, *(shard(x) for x in (whole.labels, whole.of_entropy, whole.kept)), *head]
    function: Any = partial(_run, cp, case, {**whole.options, "seq_len": seq_len}, documents)
    if "compiled" in case.mode:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    if "checkpoint" in case.mode:
        function = partial(checkpoint, function, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.mode == "autocast"):
        part, share, *mine = function(*tensors)
    part.backward()
    said = lambda text: f"{case}: {text}"  # noqa: E731 - one line
    close: Any = partial(torch.testing.assert_close, equal_nan=True, check_dtype=False, msg=said)
    if case.dtype == torch.bfloat16 or case.mode == "autocast":
        coarse = 5e-2 if mine else 2e-2
        close = partial(close, rtol=2e-2, atol=coarse * max(1.0, float(grads[0].abs().max())))
    elif case.dtype == torch.float64:
        close = partial(close, rtol=1e-10, atol=1e-12)  # no factor is rounded to float32
    for x, expected in zip(mine, of_tokens, strict=True):
        assert x.dtype == whole.wide
        tokens = cp.positions(case.length) < case.length if not case.ends else slice(None)
        close(x.detach()[:, tokens], shard(expected)[:, tokens])
    total = share.detach().clone()
    for x in (total, *(y.grad for y in head)):
        dist.all_reduce(x, group=group)
    close(total, value)
    close(hidden.grad, shard(grads[0]))
    close([x.grad for x in head], grads[1:])


@pytest.mark.nightly(only=[
    "compiled-logits", "compiled-hidden", "autocast-logits", "checkpoint-hidden",
    "compiled checkpoint-logits",
])  # fmt: skip
@pytest.mark.parametrize("name", [*CASES, *(f"{mode}-{of}" for mode in MODES for of in LOSSES)])
@on_ranks
def test_of_one_process(name: str) -> None:
    for case in [CASES[name]] if name in CASES else losses(*name.split("-")):
        _compare(case)


@on_two_ranks
def test_with_a_count_nothing_is_sent(rank: int) -> None:
    """And a loss is float32 whatever the dtype of the count, and may be transformed."""
    cp, hidden, head = ContextParallel(), torch.randn(1, 8, DIM), torch.randn(VOCAB, DIM)
    labels = torch.zeros(1, 8, dtype=torch.int64)

    def whole(x: Tensor) -> Tensor:
        return functional.cross_entropy((x @ head.T)[0], labels[0]) * 2

    for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.int32) if rank == 0 else ():
        options: Any = {"labels": labels, "head": head, "count": torch.tensor(4, dtype=dtype)}
        for of in LOSSES:
            torch.testing.assert_close(_loss(of, cp, hidden, **options), whole(hidden))
        grads = [
            torch.func.grad(x)(hidden) for x in (partial(_loss, "logits", cp, **options), whole)
        ]
        torch.testing.assert_close(*grads)


def test_logits_of_many_tokens_are_never_whole() -> None:
    tokens, classes, dim = 32_768, 256, 8
    cp, labels = ContextParallel(), torch.full((1, tokens), 3)
    hidden = torch.randn(1, tokens, dim, requires_grad=True)
    head = torch.randn(classes, dim, requires_grad=True)
    whole, of_hidden = 4 * tokens * classes, 4 * tokens * dim
    largest = largest_allocation(lambda: linear_cross_entropy(cp, hidden, head, labels).backward())
    assert of_hidden <= largest <= 2 * of_hidden < whole / 8  # hidden's, labels'
    # A loss of logits does hold them.
    assert (
        largest_allocation(lambda: cross_entropy(cp, hidden @ head.T, labels).backward()) >= whole
    )

    def step() -> None:
        options: Any = {"softcap": 9.0, "temperature": 0.5, "entropy": True}
        results = token_log_probs(cp, hidden, head, labels, **options)
        (results[0].sum() + results[1].sum()).backward()

    assert of_hidden <= largest_allocation(step) <= 2 * of_hidden
    head.requires_grad_(False).grad = None
    assert of_hidden <= largest_allocation(step) <= 2 * of_hidden and head.grad is None


def _products(function: Any) -> int:
    """Return the number of matrix products."""
    with profile(acc_events=True) as profiled:  # torch 2.11 warns without it
        function()
    products = ("aten::mm", "aten::addmm")
    return sum(event.count for event in profiled.key_averages() if event.key in products)


@pytest.mark.parametrize(
    ("trains", "forward", "both"), [("hidden", 2, 3), ("head", 2, 4), ("hidden, head", 3, 4)]
)
def test_the_backward_of_a_loss_computes_no_logits(trains: str, forward: int, both: int) -> None:
    """Token by token the backward computes them again."""
    hidden = torch.randn(6, 3, requires_grad="hidden" in trains)
    head = torch.randn(5, 3, requires_grad="head" in trains)
    arguments: Any = ContextParallel(), hidden, head, torch.zeros(6, dtype=torch.int64)
    pieces, losses = 3, []

    def loss() -> None:
        losses.append(linear_cross_entropy(*arguments, tokens_at_once=2))

    assert _products(loss) == pieces * forward
    assert _products(losses[0].backward) == 0
    with torch.no_grad():
        assert _products(loss) == pieces
    log_probs = partial(token_log_probs, *arguments, tokens_at_once=2)
    assert _products(lambda: log_probs().sum().backward()) == pieces * both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_loss_are_as_exact_as_those_of_tokens(dtype: torch.dtype) -> None:
    """The factor of a loss is not rounded to 16 bits, and a second backward adds the same."""
    whole = Whole(Case(length=512))

    def of(in_dtype: torch.dtype, function: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().to(dtype).to(in_dtype).requires_grad_() for x in whole.leaves()]
        hidden, head, bias = leaves
        loss = function(
            ContextParallel(), hidden, head, whole.labels, bias=bias, tokens_at_once=100
        )
        (loss * 0.37).backward(retain_graph=True)
        once = [x.grad.clone() for x in leaves if x.grad is not None]
        (loss * 0.37).backward()
        torch.testing.assert_close([x.grad for x in leaves], [2 * grad for grad in once])
        return loss.detach(), once

    def by_tokens(*arguments: Any, **options: Any) -> Tensor:
        log_probs: Tensor = -token_log_probs(*arguments, **options).sum() / whole.kept.sum()
        return log_probs

    _, exact = of(torch.float64, linear_cross_entropy)
    (loss, grads), (same, others) = of(dtype, linear_cross_entropy), of(dtype, by_tokens)
    assert torch.equal(loss, same)
    for grad, other, x in zip(grads, others, exact, strict=True):
        assert (grad - x).norm() <= 1.5 * (other - x).norm() + 1e-7 * x.norm()
        factor = float((grad.double() * other).sum() / other.double().square().sum())
        assert abs(factor - 1) < 8e-4, factor  # 1.7e-3 if bfloat16 held what multiplies it


@pytest.mark.parametrize("of", ["logits", "hidden"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "uint64"])
def test_labels_of_every_integer_dtype(kind: str, weights: bool, of: str) -> None:
    """A class that equals ``ignore_index`` only after wrapping to the labels' dtype is counted."""
    ignored, classes = (300, 44) if kind == "int8" else (IGNORED, 157)  # 300 is 44 in 8 bits
    random = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, DIM, generator=random) for n in (8, classes + 1))
    whole = torch.randint(classes, (8,), generator=random)
    whole[2:5] = classes - (kind != "int8")  # 156 is -100 in 8 bits
    options: dict[str, Any] = {"ignore_index": ignored}
    if weights:
        options["weight"] = torch.rand(classes + 1, generator=random)
    cp, labels = ContextParallel(layout=ChunkLayout(((0, 1),))), whole.to(getattr(torch, kind))
    torch.testing.assert_close(
        _loss(of, cp, hidden, labels, head, seq_len=7, **options),
        functional.cross_entropy((hidden @ head.T)[:7], whole[:7], **options),
    )


@on_ranks
def test_unlike_numbers_of_tokens_and_offsets(rank: int) -> None:
    own = torch.ones(1, 3)[:, : 3 * (rank != 1)]
    summed = partial(sum_by_sequence, ContextParallel(None, "contiguous"), cu_seqlens=(0, 8))
    refused("must end at the sequence length 9, got 8", summed, own)
    summed = partial(sum_by_sequence, ContextParallel(), cu_seqlens=(0, 9))
    refused("unlike numbers take segment_ids", summed, own, error=RankMismatchError)


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
    for cut in (2, 7, 1, 3):
        sums = function(cp, cp.shard(whole), cu_seqlens=(0, cut, 16))
        assert sums.tolist() == [whole[0, :cut].sum(), whole[0, cut:].sum()]
    assert len(frames) == 2  # of constants, then of symbols


def _second_derivative(follows: Callable[[Tensor], Tensor], n: int) -> None:
    hidden, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    labels = torch.zeros(4, dtype=torch.int64)
    loss = follows(linear_cross_entropy(ContextParallel(), hidden, head, labels))
    grads = torch.autograd.grad(loss, (hidden, head), create_graph=True)
    torch.autograd.grad(grads[n].sum(), hidden)


def _dual(function: Callable[[Tensor], Any]) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(TOKENS, TOKENS))


X, TOKENS, HEAD = torch.ones(1, 8), torch.ones(1, 4, 3), torch.ones(5, 3)
LABELS = torch.tensor([[0, -100, 3, 1]])
REFUSED: tuple[tuple[Callable[[ContextParallel], Any], str], ...] = (
    (lambda cp: sum_by_sequence(cp, X, cu_seqlens=(0, 4), segment_ids=torch.zeros(1, 8).long()), "give one"),
    (lambda cp: sum_by_sequence(cp, X, cu_seqlens=(0, 4)), "must end at the sequence length 16, got 4"),
    (lambda cp: sum_by_sequence(cp, X, seq_len=17), "without padding"),
    (lambda cp: sum_by_sequence(cp, X.clone().requires_grad_()), "sum_by_sequence: x requires a gradient"),
    (lambda cp: sum_by_sequence(cp, torch.ones(2, 8), cu_seqlens=(0, 16)), "x has 2: give documents of all rows in one"),
    (lambda cp: torch.func.grad(lambda x: sum_by_sequence(cp, x, grad="slice").sum())(X), r"torch\.func"),
    (lambda cp: torch.func.vmap(partial(token_log_probs, cp, head_weight=HEAD))(TOKENS[None], labels=LABELS[None]), "token_log_probs cannot run"),
    (lambda cp: torch.func.grad(lambda x: cross_entropy(cp, x @ HEAD.T, LABELS))(TOKENS), r"torch\.func.* pass count="),
    (lambda cp: torch.func.grad(lambda x: linear_cross_entropy(cp, x, HEAD, LABELS, count=6))(TOKENS), r"torch\.func.* cross_entropy with count="),
    (lambda cp: _dual(partial(linear_cross_entropy, cp, head_weight=HEAD, labels=LABELS, count=6)), "a dual_level"),
    (lambda cp: _dual(partial(token_log_probs, cp, head_weight=HEAD, labels=LABELS)), "a dual_level"),
    (lambda cp: linear_cross_entropy(cp, TOKENS, distribute_tensor(HEAD, init_device_mesh("cpu", (2,))), LABELS), "head_weight is a DTensor"),
    *((lambda _, n=n, f=f: _second_derivative(f, n), "no second derivative") for n in (0, 1) for f in (lambda x: x, torch.square)),
)  # fmt: skip


@on_two_ranks
def test_refusals() -> None:
    cp = ContextParallel()
    for call, message in REFUSED:
        refused(message, call, cp)


def test_classes_that_cannot_be_drawn_have_no_entropy() -> None:
    """A bias of -inf forbids a class: torch's product of 0 and log(0) would be NaN."""
    hidden, head = torch.randn(1, 4, 2, requires_grad=True), torch.randn(3, 2)
    bias, labels = torch.tensor([0.0, float("-inf"), 0.5]), torch.tensor([[0, 2, 0, 2]])
    results = []
    for classes, of_classes in (([0, 1, 2], labels), ([0, 2], labels // 2)):
        own, entropies = token_log_probs(
            ContextParallel(), hidden, head[classes], of_classes, bias=bias[classes], entropy=True
        )
        grad = torch.autograd.grad(own.sum() + entropies.square().sum(), hidden)
        results.append((own, entropies, *grad))
    torch.testing.assert_close(*results)


def test_sums_of_long_documents_are_exact() -> None:
    x, length = -3 * torch.rand(1, 1 << 16, generator=torch.Generator().manual_seed(0)), 1 << 16
    for options in (
        {}, {"cu_seqlens": (0, length)}, {"segment_ids": torch.zeros(1, length, dtype=torch.int32)},
    ):  # fmt: skip
        total = sum_by_sequence(ContextParallel(), x, **options)
        torch.testing.assert_close(total.double(), x.double().sum(1), rtol=1e-6, atol=0)
