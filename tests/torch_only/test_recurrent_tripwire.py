"""The check of running jobs, on recurrent layers: right calls pass it, each fault trips it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

import ring_torch
from ring_core import RankMismatchError, WrongResultError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.recurrent import calls, maps
from ring_torch.recurrent.calls import RecurrentCall
from ring_torch.recurrent.chunks import chunks_of
from ring_torch.recurrent.kernels import LinearAttention
from ring_torch.recurrent.runs import EagerRuns

T, DOCUMENTS = 48, (0, 11, 30, 48)
SHAPES = {"q": (2, 4), "k": (2, 4), "v": (4, 3), "g": (4,), "beta": (4,)}


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


def _scaled(cls: Any, name: str, scale: Callable[[Any], Any]) -> Any:
    """Patch a method so that its result is changed."""
    right = getattr(cls, name)
    return patch.object(cls, name, lambda *args, **kwargs: scale(right(*args, **kwargs)))


def _last_head(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :, :-1], x[:, :, :, -1:] * 1.01], 3)


def _argument(cls: Any, name: str, n: int, change: Callable[[Any], Any]) -> Any:
    """Patch a method so that it gets another argument."""
    right = getattr(cls, name)

    def wrong(*args: Any) -> Any:
        return right(*args[:n], change(args[n]), *args[n + 1 :])

    return patch.object(cls, name, wrong)


def _sent_twice(right: Any = RecurrentCall._gather) -> Any:
    def wrong(self: Any, sent: Tensor) -> Any:
        right(self, sent)
        return right(self, sent)

    return patch.object(RecurrentCall, "_gather", wrong)


def _one_gradient(n: int) -> Any:
    """Patch the gradient of one input."""

    def scale(x: Any) -> Any:
        entries, grads = x
        return entries, tuple(y * 1.01 if m == n else y for m, y in enumerate(grads))

    return _scaled(EagerRuns, "input_grads", scale)


#: Each fault with the pass that must be found wrong, and words of its message.
FAULTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "one head of the outputs": (lambda: _scaled(LinearAttention, "read", _last_head), "forward", "out["),
    "the fold drops transitions": (
        lambda: patch.object(maps, "apply", lambda _, state, **__: state), "forward", "the state before",
    ),
    "the fold adds from another slot": (
        lambda: _argument(RecurrentCall, "_fold", 2, lambda x: x.flip(0)), "forward", "the state before",
    ),
    "states go on through documents": (
        lambda: patch.object(
            calls, "chunks_of", lambda layout, cu, *rest: chunks_of(layout, cu and (0, 0, 0, T), *rest)
        ), "forward", "",
    ),
    "final states": (
        lambda: _scaled(RecurrentCall, "_fold", lambda x: (x[0], x[1] * 1.001)), "forward", "final state",
    ),
    "more is sent": (_sent_twice, "forward", "bytes were sent, and the states that travel have"),
    "gradients of states, back": (
        lambda: patch.object(maps, "apply_adjoint", lambda _, grad, **__: grad * 0.99),
        "backward", "the gradient of",
    ),
    "one rank's gradient of final states": (
        lambda: _argument(RecurrentCall, "_fold_back", 6, lambda x: x / 2), "backward", "of the final state",
    ),
    **{
        f"d{name}": (partial(_one_gradient, n), "backward", f"d{name}[")
        for n, name in enumerate(SHAPES)
    },
}  # fmt: skip


def layer(rank: int, documents: tuple[int, ...] | None, *, compiled: bool = False) -> None:
    """Run both passes of a delta rule with initial and final states."""
    cp, generator = ContextParallel(), torch.Generator().manual_seed(7)
    rows, states = (2, 2) if documents is None else (1, 3)
    x = {name: torch.randn(rows, T, *shape, generator=generator) for name, shape in SHAPES.items()}
    x["g"], x["beta"] = -x["g"].abs() / 8, x["beta"].sigmoid()
    mine = {name: cp.shard(y).requires_grad_() for name, y in x.items()}
    initial = torch.randn(states, 4, 4, 3, generator=generator).requires_grad_()
    call: Any = cp.gated_delta_rule
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, final = call(
        **mine, use_qk_l2norm=True, initial_state=initial, output_final_state=True,
        cu_seqlens=documents,
    )  # fmt: skip
    generator.manual_seed(rank)
    grads = [torch.randn(y.shape, generator=generator) for y in (out, final)]
    torch.autograd.backward([out, final], grads)


def tripped(rank: int, fault: str, compiled: bool) -> list[str]:
    """Return the errors of some calls under a fault, and make right calls after it."""
    messages = []
    with ring_torch.check():
        for documents in (None, DOCUMENTS) * (1 if compiled else 4):
            with FAULTS[fault][0]() if fault else nullcontext():
                try:
                    layer(rank, documents, compiled=compiled)
                except WrongResultError as error:
                    messages.append(str(error))
        layer(rank, None)
    return messages


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_trips(fault: str, two: LocalRanks) -> None:
    by_rank = two.run(tripped, fault, False)
    assert by_rank[0] == by_rank[1], "all ranks raise the same"
    _, order, words = FAULTS[fault]
    assert by_rank[0], "a document, row or head of the eight shows it"
    first = by_rank[0][0]
    assert f"of gated_delta_rule ({order}) is wrong. rank " in first and words in first


@pytest.mark.parametrize("fault", ["", "the fold drops transitions", "dbeta"])
def test_compiled_calls_are_checked(fault: str, two: LocalRanks) -> None:
    messages = two.run(tripped, fault, True)[0]
    assert bool(messages) == bool(fault)


def _alone(_: int) -> list[str]:
    with ContextParallel().whole():
        return tripped(0, "one head of the outputs", False)


def test_one_rank_is_checked(two: LocalRanks) -> None:
    assert "1 ranks" in two.run(_alone)[0][0]


@on_ranks
def test_rounding_is_no_fault(rank: int) -> None:
    """Run right calls of each kind, whose results are rounded."""
    cp, generator = ContextParallel(), torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, 96, 2, 8, generator=generator).bfloat16()
    k = torch.nn.functional.normalize(k, dim=-1)
    g, a = -torch.rand(2, 96, 2, generator=generator), -torch.rand(2, generator=generator)
    layers: dict[str, list[Any]] = {
        "simple_gla": [q, k, v], "kda": [q, k, v, g[..., None].expand(v.shape), g.exp()],
        "ssd": [v, -g, a, q, k], "linear_recurrence": [q.sigmoid(), v],
        "selective_scan": [v[..., 0], -g, a[:, None].expand(2, 8), q[:, :, 0], k[:, :, 0]],
    }  # fmt: skip
    with ring_torch.check():
        for name, inputs in layers.items():
            own = [cp.shard(x) if x.ndim > 2 else x for x in inputs]
            own = [x.detach().clone().requires_grad_() for x in own]
            for _ in range(4):
                out = getattr(cp, name)(*own)
                out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    assert rank < 2


@on_ranks
def test_a_nan_is_no_fault(rank: int) -> None:
    """A NaN spreads among the tokens of its chunk, also to those before it: that is no fault."""
    cp, x = ContextParallel(), torch.randn(1, 64, 2, 4)
    x[:, 13] = torch.nan
    with ring_torch.check():
        for _ in range(4):
            cp.simple_gla(*[cp.shard(x).requires_grad_()] * 3).sum().backward()
    assert rank < 2


def _unlike(rank: int) -> None:
    with ring_torch.check(every=1 + rank), pytest.raises(RankMismatchError, match="check is"):
        layer(rank, None)


def test_ranks_with_unlike_settings_are_told() -> None:
    with LocalRanks(2, timeout=20) as pool:
        pool.run(_unlike)
