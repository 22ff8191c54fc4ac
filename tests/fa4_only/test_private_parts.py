"""Private parts of flash-attn-4 as `kernels/fa4/private.py` says, in the library itself.

A green run with another version means that it may join `private.VERSIONS`, once results have been
compared on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from typing import Any

import pytest
import torch
from backends.fa4_on_cpu import Recorder, described, loaded
from torch import Tensor

from ring_core import WorkItem
from ring_torch.kernels import fa4
from ring_torch.kernels.fa4 import private, public
from ring_torch.kernels.library import Documents, LaunchOptions, Mods
from ring_torch.options import Window
from ring_torch.records import AttentionState

LENGTH = 256
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with loaded() as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "is_known", lambda: True)  # of any version: that is the question
        yield launches


@pytest.fixture
def library(recorder: Recorder) -> Recorder:
    recorder.launches.clear()
    return recorder


@dataclass(frozen=True)
class Launch:
    """A forward and a backward of the library."""

    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (4, 2)
    window: Window = (None, 0)
    documents: bool = False
    deterministic: bool = False
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    segments: bool = False
    needs_lse: bool = True

    def __str__(self) -> str:
        named = ("documents", "deterministic", "softcap", "sinks", "slopes", "segments")
        names = [name for name in named if getattr(self, name)]
        numbers = [*self.dims, *self.heads, *self.window]
        return "-".join(map(str, [*numbers, *names, *["without-lse"] * (not self.needs_lse)]))

    def options(self, *, sinks: Tensor | None = None) -> LaunchOptions:
        documents = mods = None
        if self.documents:
            cu = torch.tensor([0, 100, 256, 512], dtype=torch.int32)
            documents = Documents(cu, cu.clone(), LENGTH, LENGTH)
        if sinks is not None or self.slopes or self.segments:
            positions, ids = torch.arange(LENGTH), torch.zeros(2, LENGTH, dtype=torch.int32)
            mods = Mods(
                WorkItem(0, 0, 0, 0, LENGTH, 0, LENGTH, 0, None) if self.segments else None,
                (ids, ids.clone()) if self.segments else None, None,
                torch.ones(1, self.heads[0]) if self.slopes else None,
                (positions, positions) if self.slopes else None, 0 if self.slopes else None,
                is_causal=True, sinks=sinks,
            )  # fmt: skip
        return LaunchOptions(
            0.3, self.softcap, self.window, documents, self.deterministic, mods, self.needs_lse
        )

    def tensors(self, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(q, k, v, dout)``."""
        lead, (heads, kv_heads), (dim, v_dim) = (2, length), self.heads, self.dims
        if self.documents:
            lead = (512,)  # type: ignore[assignment]
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)
        q, k, v, dout = (torch.zeros(*lead, *shape, dtype=DTYPE) for shape in shapes)
        return q, k, v, dout


PLAIN = [
    Launch(dims, heads, window, documents, deterministic)
    for dims, heads, window, documents, deterministic in product(
        ((64, 64), (128, 128), (192, 128), (256, 256)), ((4, 4), (4, 2), (8, 1)),
        ((None, 0), (None, None), (63, 0), (31, 31)), (False, True), (False, True),
    )
]  # fmt: skip
LAUNCHES = [
    *PLAIN, Launch(softcap=5.0), Launch(sinks=True), Launch(slopes=True), Launch(segments=True),
    Launch(needs_lse=False), Launch((192, 128), needs_lse=False), Launch(softcap=5.0, sinks=True),
    Launch((64, 64), (8, 1), (127, 0), sinks=True), Launch(slopes=True, segments=True),
    Launch((128, 128), (4, 4), (None, None), segments=True),
    Launch((128, 128), (4, 4), documents=True, sinks=True),
]  # fmt: skip


class Passes:
    """Forwards and backwards by the kernel `fa4`, and the launches that they make."""

    def __init__(self, library: Recorder, launch: Launch) -> None:
        self.library, self.launch, self.flash = library, launch, fa4.Flash4()
        self.sinks = torch.zeros(launch.heads[0]) if launch.sinks else None
        self.forward = launch.options(sinks=self.sinks)
        self.backward = launch.options()  # sinks are in the lse that it is given

    def state(self, q: Tensor, dout: Tensor) -> AttentionState:
        lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
        return AttentionState(torch.empty_like(dout), lse)

    def called(self) -> list[Any]:
        """Return the launches of a forward and a backward on new tensors."""
        q, k, v, dout = self.launch.tensors()
        state = self.state(q, dout)
        self.flash.forward(q, k, v, self.forward, state)
        dq = torch.empty_like(q)
        self.flash.backward(dout, q, k, v, *state, self.backward, dq)
        return self.library.taken()

    def prepared(self) -> list[Any]:
        """Return the launches of a forward and a backward that were prepared with other tensors."""
        q, k, v, dout = self.launch.tensors()
        state, dq = self.state(q, dout), torch.empty_like(q)
        forward = self.flash.prepare_forward(q, k, v, state, self.forward)
        backward = self.flash.prepare_backward(dout, q, k, v, *state, self.backward, dq)
        q, k, v, dout = self.launch.tensors()
        state, dq = self.state(q, dout), torch.empty_like(q)
        if forward is not None:
            forward(q, k, v, *state, self.sinks)
        if backward is not None:
            backward(q, k, v, dout, *state, dq)
        assert (forward is None, backward is None) == self.unprepared()
        return self.library.taken()

    def unprepared(self) -> tuple[bool, bool]:
        """Return whether there is no prepared forward, and no prepared backward."""
        launch = self.launch
        modded = launch.softcap is not None or launch.slopes or launch.segments
        return launch.documents or modded, launch.documents or launch.dims[0] != launch.dims[1]


def _refuse(*_: Any) -> None:
    raise AssertionError("the library was asked, though it was called like this before")


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_repeated_call_launches_what_the_library_launched(
    launch: Launch, library: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(library, launch)
    first = passes.called()  # of the library's functions
    for name in ("library_forward", "library_backward", "recorded_forward", "recorded_backward"):
        monkeypatch.setattr(fa4.compiled, name, _refuse)
    assert described(passes.called()) == described(first)
    if launch.softcap is None and not launch.slopes and not launch.segments:
        forward, backward = passes.unprepared()
        left = first[forward : len(first) if not backward else 1]
        assert described(passes.prepared()) == described(left)


@pytest.mark.parametrize("window", [(None, 0), (None, None), (63, 0), (31, 31)])
@pytest.mark.parametrize(("dim", "heads"), [*product((64, 128), ((4, 2), (8, 1)))])
def test_a_split_backward_launches_what_the_library_launches(
    dim: int, heads: tuple[int, int], window: Window, library: Recorder
) -> None:
    launch = Launch((dim, dim), heads, window)
    passes = Passes(library, launch)
    q, k, v, dout = launch.tensors(512)
    out, lse = passes.state(q, dout)
    grads = private.library_backward(
        dout, q, k, v, out, lse, passes.backward, private.PLAIN, torch.empty_like(q)
    )
    wanted = library.taken()
    item = WorkItem(0, 0, 0, 0, 512, 0, 512, *_band(window))
    functions, sides = fa4._split_functions(q, k, item)
    library.taken()  # those of the call that compiled them
    dq, *dkv = (torch.empty_like(x) for x in grads)
    sums = torch.zeros(2, heads[1], 512, dim), torch.zeros(2, heads[1], 512, dim)
    functions.accumulate(q, k, v, dout, out, lse, dq, sums, 0.3, sides)
    for x, grad, scale in zip(sums, dkv, (0.3, 1.0), strict=True):
        functions.round(x, grad, scale)
    assert described(library.taken()) == described(wanted)


def _band(window: Window) -> tuple[int | None, int | None]:
    """Return ``(lo, hi)`` of an item with a window."""
    left, right = window
    return None if right is None else -right, left


@pytest.mark.parametrize("window", [(None, 0), (None, None), (63, 0)])
@pytest.mark.parametrize(("dim", "length"), [*product((64, 128), (256, 320, 500))])
def test_tiles_of_queries_are_as_long_as_the_library_pads_its_sums_of_dq(
    dim: int, length: int, window: Window, library: Recorder
) -> None:
    launch = Launch((dim, dim), window=window)
    q, k, v, dout = launch.tensors(length)
    out, lse = Passes(library, launch).state(q, dout)
    _, calls = private.recorded_backward(
        dout, q, k, v, out, lse, launch.options(), private.PLAIN, None
    )
    rows = private.backward_tile_queries(
        dim, is_causal=window == (None, 0), is_local=window == (63, 0)
    )
    assert calls is not None
    assert calls.main.dq_sums.shape[2] == -(-length // rows) * rows * dim


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_tiles_with_block_lists_are_those_of_the_kernels(
    dims: tuple[int, int], library: Recorder
) -> None:
    launches = Passes(library, Launch(dims, (4, 4), (None, None), segments=True)).called()
    kernels = {kernel.name: kernel.source for kernel, _ in launches}
    forward, backward = (kernels[f"FlashAttention{name}Sm90"] for name in ("Forward", "Backward"))
    assert forward.tile_m == private.BLOCK_Q
    assert forward.tile_n == private.tile_keys("forward", *dims)
    assert backward.tile_n == private.tile_keys("backward", *dims)
    assert private.BLOCK_Q % backward.tile_m == 0  # blocks of queries are of several tiles there
    assert backward.SdP_swapAB == private.backward_is_transposed(*dims)


@pytest.mark.parametrize("launch", [x for x in PLAIN if x.dims[0] == x.dims[1]], ids=str)
def test_public_functions_launch_the_same_kernels(launch: Launch, library: Recorder) -> None:
    """The functions for versions whose private parts are not known."""
    options, (q, k, v, dout) = launch.options(), launch.tensors()
    private_kernels = {kernel.name for kernel, _ in Passes(library, launch).called()}
    out, lse = public.forward(q, k, v, options)
    grads = public.backward(dout, q, k, v, out, lse, options)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert {kernel.name for kernel, _ in library.taken()} == private_kernels


def test_the_installed_version_is_known() -> None:
    assert version("flash-attn-4") in private.VERSIONS
