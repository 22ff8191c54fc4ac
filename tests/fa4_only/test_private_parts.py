"""Private parts of flash-attn-4 as `kernels/fa4/library.py` says, in the library itself, on Hopper.

If a version fails `test_the_installed_version_is_known` alone, it may join `library.VERSIONS` once
results have been compared on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from backends.fa4_on_cpu import Kernel, Launches, Recorder, described, loaded
from torch import Tensor

from ring_core import Mask, WorkItem, make_plan
from ring_core.base.arguments import not_none
from ring_core.plan.tile_mask import BlockGeometry
from ring_torch.accumulate import Columns, Rows
from ring_torch.buffers import KeyGradBuffer, KVPayload
from ring_torch.kernels import fa4
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.fa4 import library as fa4_library
from ring_torch.kernels.library import Documents, LaunchOptions
from ring_torch.options import Window
from ring_torch.records import AttentionState, BackwardInputs, KernelParams, KeyBlock, QueryBlock

LENGTH = 256
SCALE = 0.3
HALF = torch.bfloat16
Predicate = Callable[[Any, Any], Any]
FORWARD, BACKWARD = "FlashAttentionForwardSm90", "FlashAttentionBackwardSm90"
PREPROCESS, POSTPROCESS = "FlashAttentionBackwardPreprocess", "FlashAttentionBackwardPostprocess"


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with loaded() as launches, pytest.MonkeyPatch.context() as patch:
        # Treat the installed version as known: the tests check whether it is like those.
        patch.setattr(fa4_library, "is_known", lambda: True)
        yield launches


@pytest.fixture
def library(recorder: Recorder) -> Recorder:
    recorder.clear()
    return recorder


class Call(NamedTuple):
    """A call's tensors, and its options for a forward and for a backward."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dout
    state: AttentionState
    dq: Tensor
    sinks: Tensor | None
    forward: LaunchOptions
    backward: LaunchOptions  # without sinks: the final lse, which it is given, contains them

    @property
    def memory(self) -> list[Tensor]:
        """Everything that a launch may read or write that is the call's own."""
        options = self.forward
        ids, slopes = options.segments or (), options.slopes
        offsets = () if options.documents is None else options.documents[:2]
        own = [*self.tensors, *self.state, self.dq, self.sinks, slopes, *ids, *offsets]
        return [x for x in own if x is not None]


@dataclass(frozen=True)
class Launch:
    """A forward and a backward of the library."""

    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (4, 2)
    window: Window = (None, 0)
    documents: int = 0
    deterministic: bool = False
    softcap: float | None = None
    sinks: bool = False
    slopes: Literal["causal", "counted", "read"] | None = None
    segments: bool = False
    predicate: Predicate | None = None
    needs_lse: bool = True
    dtype: torch.dtype = HALF
    requires_grad: bool = False
    has_gaps: bool = False  # between the heads of q, k, v and dout, which are views
    has_dst: bool = True

    def call(self, length: int = LENGTH) -> Call:
        """Return a new call; none of its memory is another call's."""
        lead, (heads, kv_heads), (dim, v_dim) = [2, length], self.heads, self.dims
        documents = None
        if self.documents:
            lead = [length]
            cu = torch.linspace(0, length, self.documents + 1).int()
            documents = Documents(cu, cu.clone(), length, length)
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)
        q, k, v, dout = (self._numbers(*lead, *shape) for shape in shapes)
        out, lse = torch.empty(dout.shape, dtype=self.dtype), torch.zeros(*lead[:-1], heads, length)
        state = AttentionState(out, lse)
        sinks = torch.zeros(heads) if self.sinks else None
        ids = [torch.zeros(2, length, dtype=torch.int32) for _ in range(2)]
        item, geometry = self.masked()
        # Where an item is masked by block lists, these include its band.
        window = self.window if item is None else (None, None)
        options = LaunchOptions(
            SCALE, self.softcap, window, documents, self.deterministic, self.needs_lse, item,
            (ids[0], ids[1]) if self.segments else None, geometry,
        )  # fmt: skip
        if self.slopes:
            positions = torch.arange(length)
            options = options._replace(
                slopes=torch.ones(1, heads), positions=(positions, positions),
                q_k_offset=None if self.slopes == "read" else 0, is_causal=self.slopes == "causal",
            )  # fmt: skip
        forward, backward = options._replace(sinks=sinks), options
        return Call((q, k, v, dout), state, torch.empty_like(q), sinks, forward, backward)

    def _numbers(self, *shape: int) -> Tensor:
        gap = 8 if self.has_gaps else 0
        x = torch.zeros(*shape[:-1], shape[-1] + gap, dtype=self.dtype)[..., : shape[-1]]
        return x.requires_grad_(self.requires_grad)

    def masked(self) -> tuple[WorkItem | None, BlockGeometry | None]:
        """Return the item of a launch with block lists, and the tiles of its predicate."""
        if self.predicate is not None:
            plan = make_plan(Mask(predicate=self.predicate), seq_len=LENGTH, cp_size=1)
            return plan.items(0, 0)[0], plan.blocks
        item = WorkItem(0, 0, 0, 0, LENGTH, 0, LENGTH, *band(self.window))
        return (item if self.segments else None), None


def band(window: Window) -> tuple[int | None, int | None]:
    """Return ``(lo, hi)`` of an item with a window."""
    left, right = window
    return None if right is None else -right, left


def formula(q: Any, k: Any) -> Any:
    """Show the keys of a query's block of 64 and of those before, but for every fourth."""
    return (k // 64 <= q // 64) & (k % 4 != 1)


def near(q: Any, k: Any) -> Any:
    """Show keys on both sides, so few that smaller blocks pay."""
    return abs(q - k) < 40


TOKENS = np.random.default_rng(0).integers(0, 4, LENGTH)


def from_table(q: Any, k: Any) -> Any:
    """Show some keys at random: no formula, so the mask is given as bits of tiles."""
    return TOKENS[np.asarray(q)] >= TOKENS[np.asarray(k)]


PLAIN = [
    Launch(dims, heads, window, documents, deterministic)
    for dims, heads, window, documents, deterministic in product(
        ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)), ((4, 4), (4, 2), (8, 1)),
        ((None, 0), (None, None), (63, 0), (31, 31)), (0, 3), (False, True),
    )
]  # fmt: skip
LAUNCHES = [
    *PLAIN, Launch(window=(63, None)), Launch(window=(None, 5)), Launch(window=(100, -36)),
    Launch(softcap=5.0), Launch(softcap=5.0, documents=3), Launch(softcap=5.0, deterministic=True),
    Launch(softcap=5.0, sinks=True), Launch(sinks=True), Launch(sinks=True, documents=3),
    Launch((64, 64), (8, 1), (127, 0), sinks=True), Launch((192, 128), sinks=True),
    Launch(slopes="causal"), Launch(slopes="counted"), Launch(slopes="read"),
    Launch(needs_lse=False), Launch((192, 128), needs_lse=False),
    Launch(dtype=torch.float16), Launch(requires_grad=True), Launch(has_gaps=True),
    Launch(has_gaps=True, requires_grad=True), Launch(has_dst=False),
    Launch((192, 128), has_dst=False),
    Launch(segments=True), Launch(slopes="causal", segments=True),
    Launch((64, 64), (4, 4), (None, None), segments=True), Launch(predicate=formula),
    Launch(predicate=near), Launch(predicate=from_table),
    Launch((64, 64), (8, 1), predicate=from_table),
    Launch((192, 128), (4, 4), predicate=from_table),
    Launch(predicate=formula, segments=True, slopes="read"), Launch(predicate=formula, sinks=True),
]  # fmt: skip


@dataclass(frozen=True)
class Passes:
    """Forwards and backwards by the kernel `fa4`, and what they launch."""

    library: Recorder
    launch: Launch
    flash: fa4.Flash4 = field(default_factory=fa4.Flash4)

    def called(self) -> tuple[Launches, list[Any]]:
        """Return the launches of a new call, and their description with that of its results."""
        call = self.launch.call()
        (q, k, v, _), dst, dq = call.tensors, call.state, call.dq
        out, lse = self.flash.forward(q, k, v, call.forward, dst if self.launch.has_dst else None)
        q, k, v, dout = (x.detach() for x in call.tensors)
        dq_dst = dq if self.launch.has_dst else None
        grads = self.flash.backward(dout, q, k, v, out, lse, call.backward, dq_dst)
        launches = self.library.taken()
        return launches, described(launches, call.memory, (out, lse, *grads))

    def repeated(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Return descriptions of a repeated forward and a repeated backward, if there are any."""
        call = self.launch.call()
        (q, k, v, _), state = call.tensors, call.state
        forward = self.flash.repeated_forward(q, k, v, state, call.forward)
        q, k, v, dout = (x.detach() for x in call.tensors)
        backward = self.flash.repeated_backward(dout, q, k, v, *state, call.backward, call.dq)
        call = self.launch.call()
        (q, k, v, dout), state = [x.detach() for x in call.tensors], call.state
        launched: list[list[Any] | None] = [None, None]
        if forward is not None:
            forward(q, k, v, *state, call.sinks)
            launched[0] = described(self.library.taken(), call.memory)
        if backward is not None:
            assert backward(dout, q, k, v, *state, call.dq)[0] is call.dq
            launched[1] = described(self.library.taken(), call.memory)
        return launched[0], launched[1]

    def alone(self) -> tuple[list[Any], list[Any]]:
        """Return descriptions of a forward and of a backward, each of a new call."""
        call = self.launch.call()
        (q, k, v, dout), state = [x.detach() for x in call.tensors], call.state
        self.flash.forward(q, k, v, call.forward, state)
        forward = described(self.library.taken(), call.memory)
        self.flash.backward(dout, q, k, v, *state, call.backward, call.dq)
        return forward, described(self.library.taken(), call.memory)


def refuse(*_: Any) -> None:
    raise AssertionError("the library was asked, though it was called like this before")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_repeated_call_launches_what_the_library_launched(
    launch: Launch, library: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(library, launch)
    launches, first = passes.called()  # by the library's functions
    assert {kernel.name for kernel, _ in launches} == {FORWARD, PREPROCESS, BACKWARD, POSTPROCESS}
    for name in ("library_forward", "library_backward", "recorded_forward", "recorded_backward"):
        monkeypatch.setattr(fa4.library, name, refuse)
    assert passes.called()[1] == first


@pytest.mark.parametrize("launch", [x for x in LAUNCHES if x.has_dst])
def test_what_is_repeated_launches_what_the_library_launched(
    launch: Launch, library: Recorder
) -> None:
    passes = Passes(library, launch)
    assert passes.repeated() == (None, None), "nothing was called like this before"
    if launch.predicate is not None or launch.segments or launch.slopes:
        # What is repeated is without these: a plain call of the same shapes must not be taken.
        Passes(library, Launch(launch.dims, launch.heads, (None, None)), passes.flash).called()
    forward, backward = passes.alone()
    is_plain = not (launch.softcap or launch.slopes or launch.segments or launch.predicate)
    expected_backward = backward if is_plain and launch.dims[0] == launch.dims[1] else None
    expected = (forward if is_plain else None), expected_backward
    assert passes.repeated() == ((None, None) if launch.documents else expected)


def test_a_call_that_takes_more_arguments_is_the_librarys_each_time(library: Recorder) -> None:
    """Beyond 256 documents the library passes sums over them, which it computes itself."""
    passes = Passes(library, Launch((64, 64), documents=300))
    (first, _), (second, _) = passes.called(), passes.called()
    assert [kernel for kernel, _ in first] == [kernel for kernel, _ in second]
    flash = passes.flash
    assert [*flash._forwards.values(), *flash._backwards.values()] == [None, None]


WINDOWS = [(None, 0), (None, None), (63, 0), (31, 31), (63, None), (None, 5), (100, -36)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [*product((64, 128), ((4, 2), (8, 1)))])
def test_a_split_backward_launches_what_the_library_launches(
    dim: int, heads: tuple[int, int], window: Window, library: Recorder
) -> None:
    call = Launch((dim, dim), heads, window).call(512)
    q, k, v, dout, out, lse, dq = *call.tensors, *call.state, call.dq
    _, dk, dv = fa4_library.library_backward(
        dout, q, k, v, out, lse, call.backward, fa4_library.PLAIN, dq
    )
    main, *rounds = library.taken()[1:]
    given = q, k, v, dout, out, lse, dq, dk, dv
    # The last are the library's own sums of dK and dV, in float32.
    wanted = described([main, *rounds], [*given, *main[1][7:9]])
    item = WorkItem(0, 0, 0, 0, 512, 0, 512, *band(window))
    keys = KVPayload.of(2, 512, heads[1], dim, dim, HALF, False)
    layout, spans = KeyGradBuffer(keys, head_major=True), OwnSpans(1, 512, 0, 0, 0, 0, 512)
    params, split_backward = KernelParams(Mask(), SCALE), not_none(fa4.FA4.split_backward)
    backward = split_backward.backward([item], params)
    rounding = split_backward.rounding(spans, keys, params)
    rows, upstream = QueryBlock(q), BackwardInputs(dout, out, lse, None)
    for _ in range(2):  # the first call asks the library for its functions
        library.taken()
        flat = torch.zeros(2 * 2 * heads[1] * 512 * dim)
        held, sums = [KeyBlock(k, v)], Columns(layout, flat, 512, {})
        row_stats = backward.run(rows, held, upstream, Rows(lambda: dq, "write"), sums)
        assert row_stats is not None and not held
        rounding(flat, dk, dv)
    prepare, main, *rounds = library.taken()
    assert prepare[0].name == PREPROCESS
    dk_sums, dv_sums = flat.view(2, 2, heads[1], 512, dim).unbind()
    assert described([main, *rounds], [*given, dk_sums, dv_sums]) == wanted


@pytest.mark.parametrize("window", [(None, 0), (None, None), (63, 0)])
@pytest.mark.parametrize(("dim", "length"), [*product((64, 128), (256, 320, 500))])
def test_tiles_of_queries_are_as_long_as_the_library_pads_its_sums_of_dq(
    dim: int, length: int, window: Window, library: Recorder
) -> None:
    call = Launch((dim, dim), window=window).call(length)
    q, k, v, dout = call.tensors
    _, compiled = fa4_library.recorded_backward(
        dout, q, k, v, *call.state, call.backward, fa4_library.PLAIN, None
    )
    rows = fa4_library.backward_tile_queries(
        dim, is_causal=window == (None, 0), is_local=window == (63, 0)
    )
    assert compiled is not None
    assert library.taken()
    assert compiled.dq_sums[2] == -(-length // rows) * rows * dim


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_tiles_are_those_of_the_kernels(dims: tuple[int, int], library: Recorder) -> None:
    def kernels(launch: Launch) -> dict[str, Any]:
        launches, _ = Passes(library, launch).called()
        return {kernel.name: kernel.source for kernel, _ in launches}

    with_lists = kernels(Launch(dims, (4, 4), segments=True))
    forward, backward = with_lists[FORWARD], with_lists[BACKWARD]
    assert forward.tile_m == fa4_library.BLOCK_Q
    assert (forward.tile_n, False) == fa4_library.tile_with_lists("forward", *dims)
    assert fa4_library.BLOCK_Q % backward.tile_m == 0  # a block of queries consists of whole tiles
    of_backward = backward.tile_n, backward.SdP_swapAB
    assert of_backward == fa4_library.tile_with_lists("backward", *dims)
    if dims in ((64, 64), (128, 128)):  # where backwards are split
        assert kernels(Launch(dims))[BACKWARD].tile_n == fa4.KEYS
    if dims == (128, 128):  # a forward takes smaller blocks than its tile
        assert kernels(Launch(predicate=near))[FORWARD].tile_n == 64


def numbers(launches: Launches, *, left_out: str) -> list[tuple[Kernel, list[Any]]]:
    """Return the kernels of launches and their arguments that are no tensors, without repeats."""
    found: list[tuple[Kernel, list[Any]]] = []
    for kernel, arguments in launches:
        entry = kernel, [x for x in arguments if not isinstance(x, Tensor)]
        if kernel.name != left_out and entry not in found:
            found.append(entry)
    return found


IN_PUBLIC = [
    *[x for x in PLAIN if x.dims[0] == x.dims[1] or x.heads[0] == x.heads[1]],
    Launch(sinks=True), Launch(sinks=True, documents=3),
]  # fmt: skip


@pytest.mark.parametrize("launch", IN_PUBLIC)
def test_public_functions_launch_the_same_kernels(launch: Launch, library: Recorder) -> None:
    """These are for versions whose private parts are not known."""
    launches, _ = Passes(library, launch).called()
    call = launch.call()
    q, k, v, dout = call.tensors
    out, lse = fa4_library.public_forward(q, k, v, call.forward)
    forward = library.taken()
    grads = fa4_library.public_backward(dout, q, k, v, out, lse, call.backward)
    backward = [x for x in library.taken() if x[0].name != FORWARD]
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    in_public = numbers([*forward, *backward], left_out=PREPROCESS)
    assert in_public == numbers(launches, left_out=PREPROCESS)


def test_the_installed_version_is_known() -> None:
    assert version("flash-attn-4") in fa4_library.VERSIONS
