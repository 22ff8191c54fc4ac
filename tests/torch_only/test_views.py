"""Views: compiled calls, libraries that read by strides, and what is copied; others: the table."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backends.torch_ranks import Arrays, gather, run_rank
from cases import CASES, Case
from patched import chosen, replaced
from plain_flash import FLASH, PlainFlash
from tolerances import assert_close
from torch import Tensor
from views import VIEWS, strided

import ring_torch
from ring_core.base.config import RingStrategy
from ring_torch import ring_attention
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import aligned, has_unit_stride

#: Number of ranks, layout and strategy.
WAYS: dict[str, tuple[int, Any, Any]] = {
    "alone": (1, "zigzag", "ring"), "ring": (2, "zigzag", "ring"),
    "balanced": (2, "contiguous", "balanced"), "gather": (2, "zigzag", "gather"),
    "ulysses": (2, "zigzag", "ulysses"),
}  # fmt: skip
#: A kernel, which inputs it takes, and whether calls are compiled; the table has `auto` in eager.
HOW = {
    "flash": ("flash", "-few", False), "flash compiled": ("flash", "-few", True),
    "sdpa compiled": ("sdpa", "-few", True), "eager compiled": ("eager", "", True),
}  # fmt: skip


def _on_a_rank(rank: int, case: Case, strategy: str, how: str) -> Arrays:
    kernel, _, is_compiled = HOW[how]
    attention: Any = ring_torch.ring_attention

    def attend(*qkv: Tensor, **options: Any) -> Any:
        outputs: Any = attention(*qkv, **options)
        out, *lse = outputs if isinstance(outputs, tuple) else (outputs,)
        # A model's output projection flattens the heads like this.
        out = out.flatten(2).unflatten(2, out.shape[2:])
        return (out, *lse) if lse else out

    torch._dynamo.reset()
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if is_compiled else attend
    is_flash = kernel == "flash"
    with (
        chosen(FLASH) if is_flash else nullcontext(),
        patch.object(ring_torch, "ring_attention", call),
    ):
        ways = "auto" if is_flash else kernel, strategy, "auto"
        return run_rank(rank, case, ways, None, cuda=False)


@pytest.mark.nightly(
    unless=[f"{how}-{way}-{1 + (n + m) % 7}" for n, how in enumerate(HOW) for m, way in enumerate(WAYS)]
)  # fmt: skip
@pytest.mark.parametrize("turn", range(1, 8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
def test_a_view_is_what_it_shows(how: str, way: str, turn: int, backend: Any) -> None:
    """Also in graphs, which expect strides of what a call returns."""
    (size, layout, strategy), inputs = WAYS[way], HOW[how][1]
    ring: RingStrategy = "balanced" if strategy == "balanced" else "ring"
    case = CASES[f"views{turn}{inputs}-zigzag"]
    case = replace(case, layout=layout, cp_size=size, strategy=ring)
    if how.startswith("flash"):
        case = replace(case, sinks=None)
    parts = backend.pool(size).run(_on_a_rank, replace(case), strategy, how)
    assert_close(case, gather(case, case.plan, parts))


@pytest.mark.parametrize("name", VIEWS)
def test_views_hold_what_they_are_made_of(name: str) -> None:
    for x in (torch.randn(2, 5, 4, 8), torch.arange(6).int(), torch.randn(3, 7)):
        view, source = VIEWS[name](x), x
        if name == "expanded":
            source = x[..., :1].expand(x.shape)
        elif name == "broadcast":
            source = x[(slice(0, 1),) * (x.ndim - 1)].expand(x.shape)
        torch.testing.assert_close(view, source, rtol=0, atol=0)
    x = torch.randn(2, 5, 4, 8)
    assert has_unit_stride(VIEWS[name](x)) == (name not in {"strided", "permuted", "expanded"})


def _inputs(view: Any = lambda x: x) -> tuple[list[Tensor], Tensor]:
    """Return views of q, k and v that are leaves, and the output's gradient."""
    qkv = [view(torch.randn(2, 24, heads, 8, dtype=torch.float64)) for heads in (4, 2, 2)]
    return [x.requires_grad_() for x in qkv], torch.randn(2, 24, 4, 8, dtype=torch.float64)


def _run(qkv: list[Tensor], dout: Tensor, **options: Any) -> None:
    q, k, v = qkv
    ring_attention(q, k, v, causal=True, **options).backward(dout)


def _narrowed(x: Tensor) -> Tensor:
    """Return the first half of a tensor that is twice as wide."""
    return torch.cat([x, -x], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("view", [VIEWS["heads_first"], _narrowed])
def test_what_kernels_can_read_is_not_copied(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the caller's tensors without a copy, and so does the backward."""
    read: list[tuple[int, ...]] = []
    for name, tensors in (("forward", 3), ("backward", 4)):
        method = getattr(PlainFlash, name)

        def spy(self: Any, *args: Any, method: Any = method, tensors: int = tensors) -> Any:
            read.append(tuple(x.data_ptr() for x in args[:tensors]))
            return method(self, *args)

        monkeypatch.setattr(PlainFlash, name, spy)
    leaves, dout = _inputs(view)
    with chosen(FLASH):
        _run(leaves, dout)
    places = tuple(leaf.data_ptr() for leaf in leaves)
    assert read == [places, (dout.data_ptr(), *places)]


def test_saved_tensors_are_the_callers_own() -> None:
    """A copy that a kernel needs lives only as long as the pass; the caller's tensors are saved."""
    qkv, dout = _inputs(strided)
    packed: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved.data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        _run(qkv, dout)
    assert {x.data_ptr() for x in qkv} <= set(packed)


def test_kernels_refuse_what_they_cannot_read() -> None:
    """A kernel asserts strides that it cannot read; calls make copies before."""
    with pytest.raises(AssertionError):
        aligned(strided(torch.zeros(2, 24, 4, 8)))


def test_accumulators_are_contiguous() -> None:
    """Accumulators are contiguous for any strides of the tensors whose gradients they hold."""
    recorded: list[Tensor] = []
    differentiate = EagerKernel.differentiate

    def spy(self: Any, *args: Any) -> None:
        recorded.extend(x for grads in args[-2:] for x in grads if x is not None)
        differentiate(self, *args)

    with replaced(EagerKernel, differentiate=spy):
        _run(*_inputs(VIEWS["permuted"]), kernel="eager")
    assert len(recorded) == 3 and all(y.is_contiguous() for y in recorded)
