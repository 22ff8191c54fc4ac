"""Tensors that are views: a call reads the right elements in every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from patched import replaced
from plain_flash import FLASH, PlainFlash
from torch import Tensor
from views import OPERANDS, VIEWS, Entry, Given, Known, differences, entries, made, strided

from ring_torch import prepare, ring_attention
from ring_torch.kernels.api import Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import aligned, has_unit_stride

#: Number of ranks, and options of strategy and layout.
WAYS = {
    "alone": (1, {}), "ring": (2, {"strategy": "ring", "layout": "zigzag"}),
    "balanced": (2, {"strategy": "balanced"}), "gather": (2, {"strategy": "gather", "layout": "zigzag"}),
    "ulysses": (2, {"strategy": "ulysses", "layout": "zigzag"}),
}  # fmt: skip
#: Options tested with each kernel.
CAN = {
    "eager": ("sinks", "lse", "segments", "bias", "alibi"),
    "sdpa": ("sinks",),
    "flash": ("sinks",),
}
PARTS, COMPILED_PARTS = 4, 24


@contextmanager
def chosen(kernel: str) -> Iterator[dict[str, Any]]:
    """Yield the options with which calls inside run a kernel."""
    if kernel != "flash":
        yield {"kernel": kernel}
        return
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(FLASH, ())):
        yield {}
    prepare._prepare.cache_clear()


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def _wrong(
    rank: int, size: int, kernel: str, options: dict[str, Any], some: list[Entry], compiled: bool
) -> list[str]:
    """Return the differences for each tensor and view."""
    errors, known = list[str](), Known()
    with chosen(kernel) as named:
        for entry in some:
            call = Given.of(entry, made(rank, size), {"causal": True, **named, **options})
            wrong = differences(
                call, _compiled if compiled else None, known=known, rtol=1e-9, atol=1e-9
            )
            errors += [f"{entry.operand} {entry.view}: {message}" for message in wrong]
    return errors


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", CAN)
def test_a_view_is_what_it_shows(kernel: str, way: str, part: int, backend: Any) -> None:
    size, options = WAYS[way]
    some = entries(CAN[kernel], part, PARTS, turn=list(WAYS).index(way))
    errors = backend.pool(size).run(_wrong, size, kernel, options, some, False)
    assert errors == [[]] * size


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 4))]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", CAN)
def test_compiled(kernel: str, way: str, part: int, backend: Any) -> None:
    """Compiled calls accept views, and return tensors with the strides that their graphs expect."""
    size, options = WAYS[way]
    turn = list(WAYS).index(way) + 5 * list(CAN).index(kernel)
    some = entries(CAN[kernel], part, COMPILED_PARTS, turn)
    assert backend.pool(size).run(_wrong, size, kernel, options, some, True) == [[]] * size


def test_each_part_has_every_tensor_and_every_view() -> None:
    for part in range(PARTS):
        some = [
            entry
            for kernel in CAN
            for turn, way in enumerate(WAYS)
            for entry in entries(CAN[kernel], part, PARTS, turn)
        ]
        for names, which in ((OPERANDS, 0), (VIEWS, 1)):
            shares = [entry[which] for entry in some]
            assert all(shares.count(name) >= 2 for name in names)


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


def _run(qkv: list[Tensor], dout: Tensor) -> None:
    q, k, v = qkv
    ring_attention(q, k, v, causal=True).backward(dout)


def _narrowed(x: Tensor) -> Tensor:
    """Return the first half of a tensor that is twice as wide."""
    return torch.cat([x, -x], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("view", [VIEWS["heads_first"], _narrowed])
def test_what_kernels_can_read_is_not_copied(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the caller's tensors without a copy, and so does the backward."""
    monkeypatch.setattr(prepare, "choose", lambda *_: Selection(FLASH, ()))
    prepare._prepare.cache_clear()
    read: list[tuple[int, ...]] = []
    for name, tensors in (("forward", 3), ("backward", 4)):
        method = getattr(PlainFlash, name)

        def spy(self: Any, *args: Any, method: Any = method, tensors: int = tensors) -> Any:
            read.append(tuple(x.data_ptr() for x in args[:tensors]))
            return method(self, *args)

        monkeypatch.setattr(PlainFlash, name, spy)
    x = made(0, 1)
    leaves = [view(x[name]).detach().requires_grad_() for name in ("q", "k", "v")]
    _run(leaves, x["dout"])
    prepare._prepare.cache_clear()
    places = tuple(leaf.data_ptr() for leaf in leaves)
    assert read == [places, (x["dout"].data_ptr(), *places)]


def test_saved_tensors_are_the_callers_own() -> None:
    """A copy that a kernel needs lives only as long as the pass; the caller's tensors are saved."""
    x = made(0, 1)
    q, k, v = (strided(x[name]).requires_grad_() for name in ("q", "k", "v"))
    packed: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved.data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        _run([q, k, v], x["dout"])
    assert {y.data_ptr() for y in (q, k, v)} <= set(packed)


def test_kernels_refuse_what_they_cannot_read() -> None:
    """A kernel asserts strides that it cannot read; calls make copies before."""
    x = made(0, 1)
    with pytest.raises(AssertionError):
        aligned(strided(x["q"]))


def test_accumulators_are_contiguous() -> None:
    """Accumulators are contiguous for any strides of the tensors whose gradients they hold."""
    recorded: list[Tensor] = []
    differentiate = EagerKernel.differentiate

    def spy(self: Any, *args: Any) -> None:
        recorded.extend(x for grads in args[-2:] for x in grads if x is not None)
        differentiate(self, *args)

    x = made(0, 1)
    leaves = [VIEWS["permuted"](x[name]).detach().requires_grad_() for name in ("q", "k", "v")]
    with replaced(EagerKernel, differentiate=spy):
        ring_attention(*leaves, causal=True, kernel="eager").backward(x["dout"])
    assert len(recorded) == 3 and all(y.is_contiguous() for y in recorded)
