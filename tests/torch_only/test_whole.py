"""``cp.whole()``: code that is written for shards computes whole sequences, and sends nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers_of as numbers, sdpa
from on_ranks import on_ranks
from refused import refused
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import LayoutSpec, Mask, UnsupportedError, WrongResultError, balanced_layout
from ring_core.layouts.layout import WHOLE_LAYOUT
from ring_torch import ContextParallel
from ring_torch.comm.ranks import Ranks

T, D, V = 24, 8, 11
TOKENS = torch.arange(2 * T).reshape(2, T) * 7 % V


class Layers(nn.Module):
    """A model that calls each method of its ``ContextParallel``, which a test may leave whole."""

    def __init__(self, cp: ContextParallel, plain: ContextParallel, *, halos: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.plain, self.halos = cp, plain, halos
        self.embed, self.qkv, self.head = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, V)
        self.kernel = nn.Parameter(torch.randn(D, 1, 3))
        self.double()

    def mix(self, x: Tensor, seq_len: int | None) -> Tensor:
        """Mix neighbours by shift, halo and relayout, and all tokens by attention and unshard."""
        cp, plain = self.cp, self.plain
        if self.halos:
            rows = cp.halo(x, 2, 0, seq_len=seq_len).rows
            x = x + cp.join(functional.conv1d(rows.mT, self.kernel, groups=D).mT)
        moved = plain.shift(cp.relayout(x, to=plain, seq_len=seq_len), 1, seq_len=seq_len)
        x = x + plain.relayout(moved, to=cp, seq_len=seq_len)
        q, k, v = (y.unflatten(-1, (2, -1)) for y in self.qkv(x).chunk(3, -1))
        x = x + cp.attention(q, k, v, causal=True, seq_len=seq_len).flatten(2)
        whole = cp.unshard(x, grad="sum", seq_len=seq_len)
        return x + cp.shard(whole.cumsum(1), pad=True)

    def forward(self, tokens: Tensor, seq_len: int | None = None, again: str = "") -> Tensor:
        """Return this rank's part of the loss; with ``again`` in a checkpoint, or in two."""
        labels = self.cp.shift(tokens, -1, fill=-100, seq_len=seq_len)
        x = self.embed(tokens) + self.cp.positions(seq_len or T)[:, None].sin()
        if "nested" in again:
            inner = lambda x: checkpoint(self.mix, x, seq_len, use_reentrant="re" in again)  # noqa: E731
            x = checkpoint(inner, x, use_reentrant="re" in again)
        elif again:
            x = checkpoint(self.mix, x, seq_len, use_reentrant=again == "reentrant")
        else:
            x = self.mix(x, seq_len)
        if not self.halos:
            return ring_torch.cross_entropy(self.cp, self.head(x), labels, seq_len=seq_len)
        return ring_torch.linear_cross_entropy(
            self.cp, x, self.head.weight, labels, bias=self.head.bias, seq_len=seq_len
        )


def layers(layout: LayoutSpec = "zigzag") -> tuple[ContextParallel, Layers]:
    cp = ContextParallel(layout=layout)
    return cp, Layers(cp, ContextParallel(layout="contiguous"), halos=layout != "striped")


def expected(halos: bool = True, tokens: Tensor = TOKENS) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and gradients of one process, whose attention and layers are torch's."""
    model = Layers(ContextParallel(), ContextParallel(), halos=halos)
    x = model.embed(tokens) + torch.arange(tokens.shape[1])[:, None].sin()
    if halos:
        padded = functional.pad(x, (0, 0, 2, 0))
        x = x + functional.conv1d(padded.mT, model.kernel, groups=D).mT
    x = x + functional.pad(x, (0, 0, 1, 0))[:, :-1]
    qkv = (y.unflatten(-1, (2, -1)) for y in model.qkv(x).chunk(3, -1))
    x = x + sdpa(*qkv, is_causal=True).flatten(2)
    labels = functional.pad(tokens[:, 1:], (0, 1), value=-100)
    loss = functional.cross_entropy(model.head(x + x.cumsum(1)).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@contextmanager
def silent() -> Iterator[None]:
    """Let every collective and message of a group be an error."""
    start = Ranks.start

    def refuse(*args: Any, **_: Any) -> Any:
        if isinstance(args[0], Ranks) and not any(args[1:]):  # no messages
            return start(*args)
        raise AssertionError("something was sent")

    collectives = "all_reduce all_gather reduce_scatter_tensor broadcast send recv"
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((dist, collectives), (Ranks, "start _all_to_all")):
            for name in names.split():
                patch.setattr(owner, name, refuse)
        yield


def check(
    loss: Tensor, model: Layers, want: tuple[Tensor, list[Tensor | None]], *, is_part: bool = False
) -> None:
    """Compare a loss, of all ranks together if it is a part, and gradients, which are cleared."""
    total = loss.detach().clone()
    if is_part:
        model.cp.reduce_gradients(model)
        dist.all_reduce(total)
    torch.testing.assert_close(total, want[0])
    for p, grad in zip(model.parameters(), want[1], strict=True):
        torch.testing.assert_close(p.grad, grad)
    model.zero_grad()


@on_ranks
def test_every_method_acts_on_whole_sequences() -> None:
    chunks = balanced_layout(Mask(causal=True), seq_len=768, cp_size=2)
    for layout in ("zigzag", "contiguous", "striped", chunks):
        cp, model = layers(layout)
        want = expected(model.halos)
        with silent(), cp.whole():
            assert (cp.cp_size, cp.cp_rank, cp.layout) == (1, 0, WHOLE_LAYOUT)
            x = numbers(2, 13, 3)
            assert cp.shard(x, pad=True) is x and cp.unshard(x, seq_len=13) is x
            assert cp.layout_of(13).positions(0).tolist() == [*range(13)]
            loss = model(TOKENS)
            loss.backward()
            cp.reduce_gradients(model)
            batch = next(iter(ring_torch.dataloader(cp, [TOKENS])))
            assert torch.equal(batch.tokens, TOKENS)
            assert "kernel" in cp.explain(*(numbers(1, T, 2, 4),) * 3)
        check(loss, model, want)
        if T % cp.layout_of(768).divisor == 0:  # behind the block all ranks agree again
            part = model(cp.shard(TOKENS))
            part.backward()
            check(part, model, want, is_part=True)


@on_ranks
def test_padding_that_tensors_have_is_padding_still() -> None:
    """Compare sequences with padding that callers added themselves, which ``seq_len`` names."""
    cp, model = layers()
    tokens = torch.arange(2 * 13).reshape(2, 13) * 7 % V
    with silent(), cp.whole():
        for padded in (tokens, functional.pad(tokens, (0, 3))):
            labels = cp.shift(padded, -1, fill=-100, seq_len=13)
            assert (labels[:, 12:] == -100).all()
            assert cp.unshard(padded, seq_len=13).shape == (2, 13)
            q = numbers(2, padded.shape[1], 2, 4)
            out = cp.attention(q, q, q, seq_len=13)[:, :13]
            torch.testing.assert_close(out, cp.attention(*(q[:, :13],) * 3))
        loss = model(tokens, seq_len=13)
        loss.backward()
    check(loss, model, expected(tokens=tokens))


@pytest.mark.parametrize("again", ["", "reentrant", "checkpoint", "nested", "nested re"])
@on_ranks
def test_a_backward_follows_its_forward(again: str) -> None:
    """Whatever block it is in, and in another thread, which has no history of blocks."""
    (cp, model), want = layers(), expected()
    for is_in_thread in (False, True):
        with cp.whole(), silent():
            whole = model(TOKENS, again=again)
        part = model(cp.shard(TOKENS), again=again)
        with silent():
            if is_in_thread:
                thread = threading.Thread(target=whole.backward)
                thread.start()
                thread.join()
            else:
                whole.backward()
        check(whole, model, want)
        with cp.whole():
            part.backward()
        check(part, model, want, is_part=True)


@pytest.mark.nightly(unless=["zigzag-autocast", "zigzag-fsdp", "zigzag-ddp"])
@pytest.mark.parametrize(
    "way", ["compiled", "compiled checkpoint", "compiled autograd", "autocast", "fsdp", "ddp"]
)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_ranks
def test_in_what_torch_wraps_around_models(way: str, layout: LayoutSpec) -> None:
    """Split, each method has the results and gradients of one process."""
    (cp, model), want = layers(layout), expected()
    run: Any = model.float() if way == "autocast" else model
    if way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp":
        run = fully_shard(model)
    elif way in ("compiled", "compiled checkpoint"):
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    again = "checkpoint" if "checkpoint" in way else ""
    by = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        part = run(cp.shard(TOKENS), again=again)
    with by if way == "compiled autograd" else nullcontext():
        part.backward()
    if way not in ("fsdp", "ddp"):
        cp.reduce_gradients(model)
    total, near = part.detach().clone(), 0.05 if way == "autocast" else 1e-7
    dist.all_reduce(total)
    results = [total]
    for p in model.parameters():
        assert p.grad is not None
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        results.append(whole * (cp.cp_size if way in ("fsdp", "ddp") else 1))  # they take the mean
    torch.testing.assert_close(
        results, [want[0], *want[1]], rtol=near, atol=near, check_dtype=False
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks
def test_the_graph_of_a_backward_follows_its_forward(use_reentrant: bool) -> None:
    cp, x = ContextParallel(), numbers(1, T, 3).requires_grad_()
    moved = functional.pad(x.sin(), (0, 0, 1, 0))[:, :-1].sin()
    (want,) = torch.autograd.grad(moved.sum(), x)
    with silent(), cp.whole():
        y = checkpoint(lambda x: cp.shift(x.sin(), 1).sin(), x, use_reentrant=use_reentrant).sum()
    with silent(), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        if use_reentrant:  # its function is compiled, for the side that the backward is on
            refused("other side of whole", y.backward, error=Exception)
        else:
            y.backward()
            torch.testing.assert_close(x.grad, want)


@on_ranks
def test_a_backward_behind_a_failed_one_follows_its_own_forward() -> None:
    cp = ContextParallel()
    x, other = numbers(1, T, 3).requires_grad_(), numbers(1, T, 3).requires_grad_()
    moved = functional.pad(x.sin(), (0, 0, 1, 0))[:, :-1].sin().square().sum()
    (want,) = torch.autograd.grad(moved, x)

    def shifts(x: Tensor) -> Tensor:
        return cp.shift(x.sin(), 1).sin().square()

    def fails(x: Tensor) -> Tensor:
        y = cp.shift(x, 1)
        if torch._C._current_graph_task_id() >= 0:
            raise RuntimeError("on purpose")
        return y.sin()

    for good, bad, reentrant in (
        (cp.whole, nullcontext, False), (nullcontext, cp.whole, False), (nullcontext, cp.whole, True),
    ):  # fmt: skip
        with bad():
            failing = checkpoint(fails, cp.shard(other), use_reentrant=reentrant).sum()
        with good():
            loss = checkpoint(shifts, cp.shard(x), use_reentrant=reentrant).sum()
            is_whole = cp.cp_size == 1
        refused("on purpose", failing.backward, error=RuntimeError)
        x.grad = torch.zeros_like(x)
        loss.backward()
        if not is_whole:
            dist.all_reduce(x.grad)
        torch.testing.assert_close(x.grad, want)


@on_ranks
def test_hooks_of_gradients_sum_nothing(rank: int) -> None:
    cp = ContextParallel()
    model = nn.Linear(3, 3).double()
    cp.reduce_each_gradient(model)
    if rank:  # alone, as nothing is sent
        with cp.whole(), silent():
            model(numbers(1, T, 3)).sum().backward()
        expected = numbers(1, T, 3).sum((0, 1)).expand(3, 3)
        torch.testing.assert_close(model.weight.grad, expected)
    model.zero_grad()
    model(cp.shard(numbers(1, T, 3))).sum().backward()
    torch.testing.assert_close(model.weight.grad, numbers(1, T, 3).sum((0, 1)).expand(3, 3))


@on_ranks
def test_a_block_belongs_to_its_thread() -> None:
    """Compute whole in one thread while another one splits."""
    (cp, model), other = layers(), layers()[1]
    entered, done = threading.Event(), threading.Event()
    losses: list[Tensor] = []

    def alone() -> None:
        with cp.whole(), cp.whole():
            assert cp.cp_size == 1
            entered.set()
            assert done.wait(60)
            losses.append(model(TOKENS, again="checkpoint"))
        losses[0].backward()

    thread = threading.Thread(target=alone)
    thread.start()
    assert entered.wait(60)
    part = other(cp.shard(TOKENS), again="checkpoint")
    part.backward()
    check(part, other, expected(), is_part=True)
    done.set()
    thread.join()
    check(losses[0], model, expected())


@on_ranks
def test_a_compiled_function_is_compiled_anew(rank: int) -> None:
    own: Any = dist.new_group([rank], use_local_synchronization=True)
    cp, other = ContextParallel(), ContextParallel(own)
    x = numbers(1, T, 2, 4)

    def step(x: Tensor) -> Tensor:
        y = cp.shift(cp.attention(x, x, x, causal=True), 1)
        return cp.unshard(y, grad="slice")

    call = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for block in (nullcontext(), cp.whole(), other.whole(), cp.whole(), nullcontext()):
        with block:
            mine = cp.shard(x).requires_grad_()
            y = call(mine)
            (grad,) = torch.autograd.grad(y.square().sum() / 2, mine)
            results.append((y.detach(), grad))
            is_whole = cp.cp_size == 1
        assert y.shape[1] == T and mine.shape[1] == (T if is_whole else T // 2)
        torch.testing.assert_close(y, results[0][0])
    torch.testing.assert_close(results[1][1], results[3][1])
    with pytest.raises(Exception, match="cannot begin in a function"):
        torch.compile(lambda: cp.whole().__enter__(), backend="eager", fullgraph=True)()


@on_ranks
def test_compiled_functions_that_are_computed_again_follow_or_are_refused() -> None:
    """Compute compiled functions again, whose graph is of the block that ``backward`` is in."""
    cp = ContextParallel()
    x = {cp.whole: numbers(1, T, 2, 4), nullcontext: numbers(1, 2 * T, 2, 4)}
    refusals: list[str] = []
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda y: cp.shift(y.sin(), 1).sin(),
        lambda y: cp.attention(y.sin(), y, y, causal=True).sin(),
        lambda y: cp.unshard(y.sin(), grad="sum")[:, :T].sin(),
    ]
    for function in functions:
        call = torch.compile(function, backend="aot_eager")
        torch._dynamo.reset()
        sides = (cp.whole, nullcontext)
        # Backward on the forward's own side, with one graph there and then two; on the other side.
        for there, here in [(side, side) for side in sides * 2] + [sides, sides[::-1]]:
            with there():
                leaf = cp.shard(x[there]).requires_grad_()
                (want,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
                y = checkpoint(call, leaf, use_reentrant=False).square().sum()
            try:
                with here():
                    (grad,) = torch.autograd.grad(y, leaf)
            except Exception as error:  # noqa: BLE001 - the compiler may wrap it
                refusals.append(str(error))
            else:
                torch.testing.assert_close(grad, want)
    assert refusals and all("other side of whole()" in error for error in refusals), refusals


@on_ranks
def test_plain_models_are_verified() -> None:
    """A right model is, and one that asks which rank it is on is found."""
    (cp, model), batch = layers(), {"tokens": TOKENS}
    report = cp.verify(model, batch)
    assert report.loss is not None and report.gradients is not None and report.logits is None
    assert report.modules == 2 and report.loss.is_within and report.gradients.is_within
    assert all(x.grad is None for x in model.parameters())
    model.embed.register_forward_hook(lambda _module, _args, x: x + cp.positions(T)[0])
    words = r"(?s)whose output differs is embed \(Embedding\).*counts positions itself \(arange\)"
    refused(words, cp.verify, model, batch, dims={"tokens": 1}, error=WrongResultError)


@on_ranks
def test_a_block_in_a_backward_is_refused() -> None:
    cp = ContextParallel()

    def within(x: Tensor) -> Tensor:
        with cp.whole():
            return cp.shift(x, 1) * 2

    x = numbers(1, T, 3).requires_grad_()
    y = checkpoint(within, x, use_reentrant=True)
    refused("nor in a backward", y.sum().backward, error=UnsupportedError)


@on_ranks
def test_relayout_to_ranks_that_do_not_act_alone_is_refused(rank: int) -> None:
    """And an object that is made inside acts alone."""
    own: Any = dist.new_group([rank], use_local_synchronization=True)
    cp, alone = ContextParallel(), ContextParallel(own)
    x = numbers(1, T, 3)
    with alone.whole():
        assert cp.cp_size == 2
        said = "relayout between ranks that act alone"
        refused(said, cp.relayout, x, to=alone, error=UnsupportedError)
    with cp.whole():
        assert cp.relayout(x, to=alone) is x
        inside = ContextParallel(cp.group, "striped")
        assert ring_torch.ring_attention(*(numbers(1, T, 2, 4),) * 3, group=cp.group).shape[1] == T
    assert (inside.cp_size, cp.cp_size) == (1, 2)
