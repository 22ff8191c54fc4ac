"""Cross entropy of a rank's tokens: the ranks' parts add up to torch's, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_four_ranks, on_ranks
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from ring_core import ChunkLayout, UnsupportedError
from ring_torch import ContextParallel, cross_entropy, linear_cross_entropy
from ring_torch.training import token_log_probs

RANKS, VOCAB, DIM, LENGTH = 2, 11, 6, 16
IGNORED = -100

#: Options with the same meaning as in torch.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "weights": {"weight": True},
    "weights, smooth": {"weight": True, "label_smoothing": 0.3},
    "class 3 is ignored": {"ignore_index": 3, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "weight": True},
}
#: Labels that are ignored: none on any rank, some, all of rank 0, or all.
IGNORES = ("few", "rank 0", "all")
MODES = ("eager", "compiled", "autocast", "checkpoint", "compiled checkpoint")


class Whole:
    """Whole sequences, equal on all ranks, and a head."""

    def __init__(
        self, dtype: torch.dtype, ignored: str, length: int, options: dict[str, Any]
    ) -> None:
        random = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=random, dtype=torch.float64)
        self.hidden = draw(2, length, DIM).to(dtype)
        self.head, self.bias = draw(VOCAB, DIM).to(dtype), draw(VOCAB).to(dtype)
        self.labels = torch.randint(VOCAB, (2, length), generator=random)
        self.options = dict(options)
        if self.options.get("weight"):
            wide = torch.promote_types(dtype, torch.float32)
            self.options["weight"] = torch.rand(VOCAB, generator=random).to(wide)
        drop = self.options.get("ignore_index", IGNORED)
        self.labels[0, :5] = drop
        if ignored == "rank 0":  # in zigzag rank 0 holds the first and the last quarter
            self.labels[:, : length // 4] = self.labels[:, -(length // 4) :] = drop
        if ignored == "all":
            self.labels[:] = drop

    def expected(self) -> tuple[Tensor, list[Tensor]]:
        """Return torch's loss on one process, and the gradients of hidden, head and bias."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.head, self.bias)]
        logits = functional.linear(*leaves)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = functional.cross_entropy(wide.flatten(0, 1), self.labels.flatten(), **self.options)
        return loss.detach(), list(torch.autograd.grad(loss, leaves))


def _loss(
    cp: ContextParallel, is_linear: bool, seq_len: int | None, options: dict[str, Any],
    hidden: Tensor, labels: Tensor, head: Tensor, bias: Tensor,
) -> Tensor:  # fmt: skip
    if is_linear:
        return linear_cross_entropy(
            cp, hidden, head, labels, bias=bias, seq_len=seq_len, tokens_at_once=3, **options
        )
    return cross_entropy(
        cp, functional.linear(hidden, head, bias), labels, seq_len=seq_len, **options
    )


def _compare(
    is_linear: bool, mode: str, dtype: torch.dtype, ignored: str, length: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Compare the sum of the ranks' losses, and the gradients of all tensors, with torch's."""
    cp = ContextParallel()
    whole = Whole(dtype, ignored, length, options)
    value, grads = whole.expected()
    padded = length % 4 != 0
    hidden = cp.shard(whole.hidden, pad=padded).requires_grad_()
    labels = cp.shard(whole.labels, pad=padded)  # its padding is class 0, which is not ignored
    head, bias = whole.head.clone().requires_grad_(), whole.bias.clone().requires_grad_()
    function: Any = partial(_loss, cp, is_linear, length if padded else None, whole.options)
    if "compiled" in mode:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    if "checkpoint" in mode:
        function = partial(checkpoint, function, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        part = function(hidden, labels, head, bias)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    assert hidden.grad is not None and head.grad is not None and bias.grad is not None
    for x in (head, bias):
        assert x.grad is not None
        dist.all_reduce(x.grad)
    coarse = dtype == torch.bfloat16 or mode == "autocast"
    close: Any = partial(torch.testing.assert_close, equal_nan=True, check_dtype=False)
    if coarse:
        close = partial(close, rtol=2e-2, atol=2e-2 * max(1.0, float(grads[0].abs().max())))
    elif dtype == torch.float64:
        close = partial(close, rtol=1e-10, atol=1e-12)  # no factor is rounded to float32
    close(total, value)
    close(hidden.grad, cp.shard(grads[0], pad=padded))
    close(head.grad, grads[1])
    close(bias.grad, grads[2])


@pytest.mark.nightly(unless=[
    "eager-logits", "eager-hidden", "checkpoint-logits", "autocast-hidden",
    "compiled checkpoint-hidden",
])  # fmt: skip
@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks
def test_parts_add_up_to_the_loss_of_one_process(mode: str, is_linear: bool) -> None:
    cases: list[tuple[Any, ...]] = [
        (torch.float64, ignored, LENGTH, options)
        for ignored in IGNORES for options in OPTIONS.values()
    ]  # fmt: skip
    cases += [(torch.float64, "few", 7, options) for options in OPTIONS.values()]
    cases += [(dtype, "few", LENGTH, {}) for dtype in (torch.float32, torch.bfloat16)]
    if "compiled" in mode:
        cases = [*cases[3:5], *cases[-4:]]
    if mode == "autocast":
        cases = [(torch.float32, ignored, LENGTH, x) for _, ignored, _, x in cases[:4]]
    for case in cases:
        try:
            _compare(is_linear, mode, *case)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


@on_ranks
def test_with_a_count_nothing_is_sent(rank: int) -> None:
    cp = ContextParallel()
    logits, labels = torch.randn(1, 8, VOCAB), torch.zeros(1, 8, dtype=torch.int64)
    if rank == 0:
        part = cross_entropy(cp, logits, labels, count=torch.tensor(4))
        torch.testing.assert_close(part, functional.cross_entropy(logits[0], labels[0]) * 2)


def test_logits_of_many_tokens_are_never_whole() -> None:
    tokens, classes, dim = 131_072, 256, 8
    cp = ContextParallel()
    hidden = torch.randn(1, tokens, dim, requires_grad=True)
    head = nn.Linear(dim, classes, bias=False)
    labels = torch.full((1, tokens), 3)
    with profile(profile_memory=True, acc_events=True) as profiled:
        linear_cross_entropy(cp, hidden, head.weight, labels).backward()
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    whole = 4 * tokens * classes
    assert 4 * tokens * dim <= largest <= 8 * tokens * dim < whole / 8  # hidden's, labels'
    with profile(
        profile_memory=True, acc_events=True
    ) as profiled:  # a loss of logits does hold them
        cross_entropy(cp, head(hidden), labels).backward()
    assert max(event.self_cpu_memory_usage for event in profiled.events()) >= whole


@pytest.mark.parametrize("follows", [lambda x: x, torch.square], ids=["alone", "squared"])
def test_second_derivatives_of_a_loss_in_pieces_are_refused(follows: Any) -> None:
    cp = ContextParallel()
    hidden, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = follows(linear_cross_entropy(cp, hidden, head, torch.zeros(4, dtype=torch.int64)))
    grads = torch.autograd.grad(loss, (hidden, head), create_graph=True)
    for grad in grads:
        with pytest.raises(UnsupportedError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), hidden, retain_graph=True)


def _products(function: Any) -> int:
    """Return the number of matrix products."""
    with profile() as profiled:
        function()
    return sum(
        event.count for event in profiled.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )


@pytest.mark.parametrize(
    ("trains", "forward", "token_by_token"),
    [((), 1, 1), (("hidden",), 2, 3), (("head",), 2, 4), (("hidden", "head"), 3, 4)],
    ids=str,
)
def test_the_backward_of_a_loss_computes_no_logits(
    trains: tuple[str, ...], forward: int, token_by_token: int
) -> None:
    cp, labels = ContextParallel(), torch.zeros(6, dtype=torch.int64)
    hidden = torch.randn(6, 3, requires_grad="hidden" in trains)
    head = torch.randn(5, 3, requires_grad="head" in trains)
    pieces, losses = 3, []
    assert pieces * forward == _products(
        lambda: losses.append(linear_cross_entropy(cp, hidden, head, labels, tokens_at_once=2))
    )
    with torch.no_grad():
        assert pieces == _products(
            lambda: linear_cross_entropy(cp, hidden, head, labels, tokens_at_once=2)
        )

    def log_probs() -> None:
        total = token_log_probs(cp, hidden, head, labels, tokens_at_once=2).sum()
        if trains:
            total.backward()

    assert _products(log_probs) == pieces * token_by_token
    if trains:
        assert _products(losses[0].backward) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_loss_are_as_exact_as_those_of_tokens(dtype: torch.dtype) -> None:
    """The factor of a loss is not rounded to 16 bits, and a second backward adds the same."""
    cp, whole = ContextParallel(), Whole(torch.float64, "few", 512, {})
    labels, kept = whole.labels, whole.labels != IGNORED

    def of(in_dtype: torch.dtype, function: Any) -> tuple[Tensor, list[Tensor]]:
        rounded = [x.to(dtype) for x in (whole.hidden, whole.head, whole.bias)]
        leaves = [x.to(in_dtype, copy=True).requires_grad_() for x in rounded]
        hidden, head, bias = leaves
        loss = function(cp, hidden, head, labels, bias=bias, tokens_at_once=100)
        (loss * 0.37).backward(retain_graph=True)
        once = [x.grad.clone() for x in leaves if x.grad is not None]
        (loss * 0.37).backward()
        for x, grad in zip(leaves, once, strict=True):
            torch.testing.assert_close(x.grad, 2 * grad)
        return loss.detach(), once

    def by_tokens(*arguments: Any, **options: Any) -> Tensor:
        log_probs: Tensor = token_log_probs(*arguments, **options)
        return -log_probs.sum() / kept.sum()

    _, exact = of(torch.float64, linear_cross_entropy)
    loss, grads = of(dtype, linear_cross_entropy)
    same, others = of(dtype, by_tokens)
    assert torch.equal(loss, same)
    for grad, other, x in zip(grads, others, exact, strict=True):
        assert (grad - x).norm() <= 1.5 * (other - x).norm() + 1e-7 * x.norm()
        factor = float((grad.double() * other).sum() / other.double().square().sum())
        assert abs(factor - 1) < 8e-4, factor  # 1.7e-3 if bfloat16 held what multiplies it


@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "uint64"])
def test_labels_of_every_integer_dtype(kind: str, weights: bool, is_linear: bool) -> None:
    """A class that equals ``ignore_index`` only after wrapping to the labels' dtype is counted."""
    dtype = getattr(torch, kind)
    ignored, classes = (300, 44) if kind == "int8" else (IGNORED, 157)  # 300 is 44 in 8 bits
    random = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, DIM, generator=random) for n in (8, classes + 1))
    whole = torch.randint(classes, (8,), generator=random)
    whole[2:5] = classes - (kind != "int8")  # 156 is -100 in 8 bits
    options: dict[str, Any] = {"ignore_index": ignored}
    if weights:
        options["weight"] = torch.rand(classes + 1, generator=random)
    value = _loss(
        ContextParallel(layout=ChunkLayout(((0, 1),))), is_linear, 7, options, hidden, whole.to(dtype), head,
        torch.zeros(classes + 1),
    )  # fmt: skip
    torch.testing.assert_close(
        value, functional.cross_entropy((hidden @ head.T)[:7], whole[:7], **options)
    )


@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "hidden"])
def test_a_loss_is_float32_whatever_the_dtype_of_count(is_linear: bool) -> None:
    hidden, head, labels = torch.randn(4, DIM), torch.randn(5, DIM), torch.zeros(4).long()
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        options = {"count": torch.tensor(4, dtype=dtype)}
        value = _loss(
            ContextParallel(), is_linear, None, options, hidden, labels, head, torch.zeros(5)
        )
        assert value.dtype == torch.float32


@on_ranks
def test_transforms_of_a_loss_need_a_count() -> None:
    cp, head, labels = ContextParallel(), torch.randn(5, 3), torch.tensor([[0, -100, 3, 1]])
    x = torch.randn(1, 4, 3, requires_grad=True)

    def loss(x: Tensor, **count: Any) -> Tensor:
        return cross_entropy(cp, x @ head.T, labels, **count)

    with pytest.raises(UnsupportedError, match=r"torch\.func.* pass count="):
        torch.func.grad(loss)(x.detach())
    with pytest.raises(UnsupportedError, match=r"torch\.func.* cross_entropy with count="):
        torch.func.grad(lambda x: linear_cross_entropy(cp, x, head, labels, count=6))(x.detach())
    functions: list[Callable[..., Any]] = [partial(linear_cross_entropy, count=6), token_log_probs]
    for function in functions:
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="a dual_level"):
            function(cp, forward_ad.make_dual(x.detach(), x.detach()), head, labels)
    (expected,) = torch.autograd.grad(loss(x), x)  # two ranks with three labels each
    torch.testing.assert_close(torch.func.grad(loss)(x.detach(), count=6), expected)


class Head(nn.Module):
    """A module whose loss never holds all logits."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp, self.body, self.head = cp, nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=generator)

    def forward(self, hidden: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return linear_cross_entropy(
            self.cp, self.body(hidden), self.head.weight, labels, bias=self.head.bias, count=count,
            tokens_at_once=3,
        )  # fmt: skip


@on_four_ranks
def test_a_loss_in_pieces_under_fully_shard(rank: int) -> None:
    """Check FSDP2 over two rings of two ranks, with the head's weight split over all four."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, whole = ContextParallel(mesh["cp"]), Whole(torch.float32, "few", LENGTH, {})
    model, like = Head(cp), Head(cp)
    logits = like.head(like.body(whole.hidden))
    functional.cross_entropy(logits.flatten(0, 1), whole.labels.flatten()).backward()
    fully_shard(model.head)
    with pytest.raises(UnsupportedError, match="head_weight is a DTensor"):
        model(whole.hidden, whole.labels, torch.tensor(1))  # the head's own forward does not run
    model = Head(cp)
    fully_shard(model.body)
    fully_shard(model)  # gathers the head's weight for the model's forward
    row = slice(rank // 2, rank // 2 + 1)
    shards = cp.shard(whole.hidden[row]), cp.shard(whole.labels[row])
    count = (whole.labels != IGNORED).sum()
    (model(*shards, count) * 4).backward()  # FSDP takes the mean over 4 ranks
    for weight, expected in zip(model.parameters(), like.parameters(), strict=True):
        assert isinstance(weight.grad, DTensor)
        torch.testing.assert_close(weight.grad.full_tensor(), expected.grad)
