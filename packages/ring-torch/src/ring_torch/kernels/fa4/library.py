"""Calls of flash-attn-4: its private parts, repeated launches, a split backward, public functions.

No other module names private parts, or knows the places of their arguments. All of it was read from
the sources of :data:`VERSIONS` and holds for these alone. With any other version the kernel calls
public functions and refuses what they do not offer.

**Repeated.** A forward through the library takes the host 0.09 ms, in which the library works out
which of its compiled functions to call, and with which arguments. On Hopper that is remembered, and
later calls that are alike call the compiled functions directly. Calls are alike if their tensors
have the same dtypes, devices, shapes and strides, begin at multiples of 16 bytes, and have the same
options; the library's own keys distinguish less. Streams are read at each launch. Functions, shapes
and numbers are remembered, but no tensors.

**Split.** A backward whose dK/dV are summed over several launches, and rounded once, calls the
compiled functions one by one, with sums in place of gradients. Keys and values have one head dim,
``D``.

**Public.** Public functions return new tensors, and differentiate only their own forward, while the
backward of an item starts from the final ``out`` and ``lse``. So that backward runs the item's
forward again. The item's weight in the final result is ``exp(item_lse - lse)``, and the derivative
of the weight is passed on as a gradient of ``item_lse``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_torch.accumulate import sizes_of
from ring_torch.buffers import KVPayload
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.library import (
    DOCUMENT_ARGUMENTS,
    Direction,
    Documents,
    ForwardLaunch,
    LaunchOptions,
    capability,
)
from ring_torch.launches.cache import KeptViews
from ring_torch.options import Window
from ring_torch.records import BackwardInputs, KeyBlock

#: Versions of flash-attn-4 whose private parts are as this module says.
VERSIONS = ("4.0.0b36",)
Function = Callable[..., None]
#: Queries of a block in block lists, in both passes.
BLOCK_Q = 128
# One thread at a time records calls: the library's caches of functions are replaced meanwhile.
RECORDING = RLock()


@cache
def is_known() -> bool:
    """Return True if the installed flash-attn-4 is one of :data:`VERSIONS`."""
    try:
        return version("flash-attn-4") in VERSIONS
    except PackageNotFoundError:
        return False


@cache
def interface() -> Any:
    """Import the module that has the library's private functions."""
    return import_module("flash_attn.cute.interface")


@cache
def tile_with_lists(direction: Direction, head_dim: int, v_head_dim: int) -> tuple[int, bool]:
    """Return how many keys a tile has on Hopper if the launch takes block lists.

    Beside them: True if a thread holds columns of scores, not rows, which only backwards do.
    """
    sizes = head_dim, v_head_dim, False, False, BLOCK_Q
    if direction == "forward":
        return int(interface()._tile_size_fwd_sm90(*sizes).n_block_size), False
    tile = interface()._tile_size_bwd_sm90(*sizes)
    return int(tile.n_block_size), bool(tile.SdP_swapAB)


def backward_tile_queries(dim: int, *, is_causal: bool, is_local: bool) -> int:
    """Return how many queries a tile of the backward has on Hopper without block lists."""
    return int(interface()._tile_size_bwd_sm90(dim, dim, is_causal, is_local).m_block_size)


class Modded(NamedTuple):
    """Options of a launch beyond window and documents, in the form that the library takes.

    Attributes:
        score_mod, score_mod_bwd, mask_mod: Functions that it compiles into its kernels.
        lists: Block lists: counts ``[B or 1, 1, outer]`` and blocks ``[B or 1, 1, outer, inner]``
            of partial blocks, then of full ones.
        block_size: Queries and keys of a block.
        numbers: Integers that the functions read (``mods.Numbers``).
        sinks: Float32 ``[H]``.
        keep_alive: Tensors whose addresses are in ``numbers``; they have to live until the launch.
    """

    score_mod: Any = None
    score_mod_bwd: Any = None
    mask_mod: Any = None
    lists: tuple[Tensor, ...] | None = None
    block_size: tuple[int, int] | None = None
    numbers: Any = None
    sinks: Tensor | None = None
    keep_alive: tuple[Tensor, ...] = ()

    @property
    def key(self) -> object:
        """Key of these options: launches with equal keys have the same compiled function."""
        if self is PLAIN:
            return None
        sinks, lists = self.sinks, self.lists
        return (
            self.score_mod, self.score_mod_bwd, self.mask_mod, self.block_size,
            None if lists is None else tuple((x.shape, x.stride()) for x in lists),
            None if self.numbers is None else len(self.numbers),
            None if sinks is None else (sinks.dtype, sinks.stride()),
        )  # fmt: skip

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the library's functions, by name."""
        arguments: dict[str, Any] = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        if self.lists is not None:
            lists = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
            arguments["block_sparse_tensors"] = lists(*self.lists, block_size=self.block_size)
        if self.numbers is not None:
            arguments["aux_scalars"] = self.numbers.as_args()
        return arguments

    def expanded_lists(self, q: Tensor) -> tuple[Tensor | None, ...] | None:
        """Return the lists as compiled functions take them: for each sequence and query head."""
        if self.lists is None:
            return None
        expanded = (x.expand(q.shape[0], q.shape[2], *x.shape[2:]) for x in self.lists)
        # The fields of the library's tuple that follow the lists are not used here.
        return *expanded, None, None, None, None


PLAIN = Modded()


@cache
def scalar_to_ssa() -> Any:
    """Return the library's function that makes a value of its language from a number."""
    return import_module("flash_attn.cute.utils").scalar_to_ssa


def forward_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: LaunchOptions,
    modded: Modded,
    window: Window,
    aux: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of a compiled forward.

    ``aux`` are the values that its mods read, as the library passed them; by default ``modded``'s.
    """
    cu_q, cu_k = offsets(options.documents)
    return (
        *[x.detach() if x.requires_grad else x for x in (q, k, v)], out, lse, options.scale,
        cu_q, cu_k, None, None, None, *window, modded.sinks, modded.expanded_lists(q),
        (None, modded.numbers) if aux is None else aux, None, None,
    )  # fmt: skip


def repeated_forward(
    launch: Function,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: LaunchOptions,
    window: Window,
) -> ForwardLaunch:
    """Return a launch of a compiled forward without documents or mods, for tensors like these."""
    arguments = forward_arguments(q, k, v, out, lse, options, PLAIN, window)
    # A launch takes its tensors anew; these others are the same each time.
    before_sinks, after_sinks, has_lse = arguments[5:13], arguments[14:], lse is not None

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> None:
        launch(q, k, v, out, lse if has_lse else None, *before_sinks, sinks, *after_sinks)

    return run


def main_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    buffers: Sequence[Tensor],
    options: LaunchOptions,
    modded: Modded,
    window: Window,
    semaphores: Sequence[Tensor | None],
    aux: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of the main function of a backward.

    ``buffers`` are lse to base 2, delta, and sums of dQ, dK and dV, or the latter two themselves;
    ``aux`` as in :func:`forward_arguments`.
    """
    cu_q, cu_k = offsets(options.documents)
    return (
        *[x.detach() if x.requires_grad else x for x in (q, k, v)], dout, *buffers, options.scale,
        cu_q, cu_k, None, None, *window, *semaphores,
        (None, modded.numbers) if aux is None else aux, modded.expanded_lists(q), None,
    )  # fmt: skip


def prepare_arguments(
    out: Tensor,
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    lse_log2: Tensor,
    dq_sums: Tensor,
    documents: Documents | None,
) -> tuple[Any, ...]:
    """Return the arguments of the function that writes delta, lse to base 2, and zeros for dQ."""
    return (
        out, dout, delta, lse, lse_log2, dq_sums, None if documents is None else documents.cu_q,
        None, None, None, None, 1.0, None, None,
    )  # fmt: skip


def round_arguments(sums: Tensor, grad: Tensor, scale: float, cu: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of a function that rounds sums, times ``scale``, into a gradient."""
    return sums, grad, scale, cu, None, None, None


def offsets(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the offsets of documents among queries and among keys, ``None`` without documents."""
    return (None, None) if documents is None else (documents.cu_q, documents.cu_k)


#: q, k, v, out, lse and options of a forward, in the order of :func:`library_forward`.
ForwardArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, LaunchOptions, Modded]
#: dout, q, k, v, out, lse, options and dst of a backward, in that of :func:`library_backward`.
BackwardArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, LaunchOptions, Modded, Tensor | None
]


RecordedCall = tuple[Function, tuple[Any, ...]]  # a compiled function that was called, and how


class CompiledForward(NamedTuple):
    """A compiled forward, with the arguments that a call does not say.

    Attributes:
        function: The function.
        window: ``(left, right)`` in the form that it takes.
    """

    function: Function
    window: Window


class CompiledBackward(NamedTuple):
    """Compiled functions of a backward, and shapes of the buffers between them.

    Attributes:
        prepare: Writes delta, lse to base 2, and zeros into the sums of dQ.
        main: Adds to sums of dQ, dK and dV; where each query head has its own K/V head, dK and dV
            take the place of their sums.
        round_dq: Rounds the sums of dQ.
        round_dkv: Round those of dK and of dV, with grouped heads.
        window: ``(left, right)`` in the form that ``main`` takes.
        after_window: Arguments of ``main`` after the window.
        rows: Shape of delta, and of lse to base 2.
        dq_sums: Shape of the sums of dQ.
        dkv_sums: Shapes of the sums of dK and dV, with grouped heads.
        semaphores: Shapes of semaphores of dQ, dK and dV; ``None`` where unused.
    """

    prepare: Function
    main: Function
    round_dq: Function
    round_dkv: tuple[Function, Function] | None
    window: Window
    after_window: tuple[Any, ...]
    rows: tuple[int, ...]
    dq_sums: tuple[int, ...]
    dkv_sums: tuple[tuple[int, ...], tuple[int, ...]] | None
    semaphores: tuple[tuple[int, ...] | None, ...]


def recorded_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: LaunchOptions,
    modded: Modded,
) -> CompiledForward | None:
    """Call :func:`library_forward`, and return its compiled function, to be called from now on.

    It is ``None`` if there was not one call, with the arguments that are expected here.
    """
    with _calls_of(interface()._flash_attn_fwd) as (calls,):
        library_forward(q, k, v, out, lse, options, modded)
    if len(calls) != 1:
        return None
    function, arguments = calls[0]
    window, aux = arguments[11:13], arguments[15] if len(arguments) > 15 else ()
    # Built as later calls will build it: if that is what the library has passed, it may be left
    # out.
    expected = forward_arguments(q, k, v, out, lse, options, modded, window, aux)
    return CompiledForward(function, window) if _alike(arguments, expected) else None


def recorded_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: LaunchOptions,
    modded: Modded,
    dst: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], CompiledBackward | None]:
    """Call :func:`library_backward`; return its gradients, and its compiled functions.

    The latter are ``None`` if their calls, or the arguments, are not as expected here.
    """
    module = interface()
    functions = module._bwd_preprocess, module._flash_attn_bwd, module._bwd_postprocess_convert
    with _calls_of(*functions) as (prepares, mains, rounds):
        grads = library_backward(dout, q, k, v, out, lse, options, modded, dst)
    if (len(prepares), len(mains)) != (1, 1) or len(rounds) not in (1, 3):
        return grads, None
    main, arguments = mains[0]
    if len(arguments) != 22:
        return grads, None
    lse_log2, delta, *sums = arguments[4:9]
    window, semaphores, aux = arguments[14:16], arguments[16:19], arguments[19]
    # Without grouped heads `main` writes dK and dV themselves, and only dQ is rounded.
    written = sums if len(rounds) == 3 else [sums[0], *grads[1:]]
    cu_q, cu_k = offsets(options.documents)
    rounding = zip(
        sums, grads, (options.scale, options.scale, 1.0), (cu_q, cu_k, cu_k), strict=True
    )
    expected = [
        prepare_arguments(out, dout, delta, lse, lse_log2, sums[0], options.documents),
        main_arguments(
            q, k, v, dout, (lse_log2, delta, *written), options, modded, window, semaphores, aux
        ),
        *[round_arguments(*x) for x in rounding][: len(rounds)],
    ]
    if not _alike(tuple(x for _, x in (*prepares, *mains, *rounds)), tuple(expected)):
        return grads, None
    round_dq, *round_dkv = (function for function, _ in rounds)
    dkv = (round_dkv[0], round_dkv[1]) if round_dkv else None
    return grads, CompiledBackward(
        prepares[0][0],
        main,
        round_dq,
        dkv,
        window,
        arguments[16:],
        tuple(delta.shape),
        tuple(sums[0].shape),
        None if dkv is None else (tuple(sums[1].shape), tuple(sums[2].shape)),
        tuple(None if x is None else tuple(x.shape) for x in semaphores),
    )


def _alike(actual: Any, expected: Any) -> bool:
    """Return True if two arguments are the same memory, or the same numbers."""
    if actual is expected:
        return True
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return (
            actual.data_ptr() == expected.data_ptr()
            and actual.dtype == expected.dtype
            and actual.shape == expected.shape
            and actual.stride() == expected.stride()
        )
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(_alike, actual, expected))
    return type(actual) is type(expected) and bool(actual == expected)


@contextmanager
def _calls_of(*functions: Any) -> Iterator[tuple[list[RecordedCall], ...]]:
    """Record the compiled functions that functions of the library call inside, with arguments.

    It yields a list for each function. Calls of other threads are not recorded.
    """
    calls: tuple[list[RecordedCall], ...] = tuple([] for _ in functions)
    with RECORDING:
        # While the block runs, the library looks its compiled functions up in recording caches. A
        # call of another thread passes through them unrecorded.
        caches = [function.compile_cache for function in functions]
        for function, compiled, recorded in zip(functions, caches, calls, strict=True):
            # The library looks functions up here before each launch, and launches what it finds.
            function.compile_cache = _RecordingCache(compiled, recorded, get_ident())
        try:
            yield calls
        finally:
            for function, compiled in zip(functions, caches, strict=True):
                function.compile_cache = compiled


@dataclass(frozen=True)
class _RecordingCache:
    """A cache of compiled functions that records which of them a thread calls."""

    cache: Any
    calls: list[RecordedCall]
    thread: int

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Any) -> Function:
        function: Function = self.cache[key]

        def call(*arguments: Any) -> None:
            function(*arguments)
            # A launch of another thread is none of the call that is recorded.
            if get_ident() == self.thread:
                self.calls.append((function, arguments))

        return call


def library_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: LaunchOptions,
    modded: Modded,
) -> None:
    """Call the library's forward, which looks up, or compiles, its function.

    Results are written into ``out`` and, unless it is ``None``, into ``lse``.
    """
    interface()._flash_attn_fwd(
        q.detach(),
        k.detach(),
        v.detach(),
        out=out,
        lse=lse,
        return_lse=lse is not None,
        learnable_sink=modded.sinks,
        **modded.arguments,
        **_arguments(options),
    )


def library_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: LaunchOptions,
    modded: Modded,
    dst: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the library's backward, which looks up, or compiles, its functions.

    Return ``(dq, dk, dv)``; ``dq`` is written into ``dst`` if that is given.
    """
    dq, dk, dv = interface()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        dq=dst,
        score_mod_bwd=modded.score_mod_bwd,
        deterministic=options.deterministic,
        **modded.arguments,
        **_arguments(options),
    )
    return dq, dk, dv


def _arguments(options: LaunchOptions) -> dict[str, Any]:
    """Return the arguments of the library's functions for scale, window and documents, by name."""
    left, right = options.window
    return {
        "softmax_scale": options.scale, "window_size_left": left, "window_size_right": right,
        **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
    }  # fmt: skip


def launched_backward(
    compiled: CompiledBackward,
    options: LaunchOptions,
    modded: Modded,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dst: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the functions of a backward, and return ``(dq, dk, dv)``."""
    dq = torch.empty_like(q) if dst is None else dst
    grads = dq, torch.empty_like(k), torch.empty_like(v)
    floats: Any = {"dtype": torch.float32, "device": q.device}
    delta, lse_log2 = torch.empty((2, *compiled.rows), **floats).unbind()
    sums: Sequence[Tensor] = grads[1:]
    if compiled.dkv_sums is not None:
        # Sums of equal shapes are one tensor, filled by one kernel.
        k_sums, v_sums = compiled.dkv_sums
        sums = (
            [torch.zeros(x, **floats) for x in compiled.dkv_sums]
            if k_sums != v_sums
            else (torch.zeros((2, *k_sums), **floats).unbind())
        )
    sums = torch.empty(compiled.dq_sums, **floats), *sums
    semaphores = [
        None if shape is None else torch.zeros(shape, dtype=torch.int32, device=q.device)
        for shape in compiled.semaphores
    ]
    cu_q, cu_k = offsets(options.documents)
    compiled.prepare(
        *prepare_arguments(out, dout, delta, lse, lse_log2, sums[0], options.documents)
    )
    compiled.main(
        *main_arguments(
            q, k, v, dout, (lse_log2, delta, *sums), options, modded, compiled.window, semaphores
        )
    )
    compiled.round_dq(*round_arguments(sums[0], dq, options.scale, cu_q))
    if compiled.round_dkv is not None:
        round_dk, round_dv = compiled.round_dkv
        round_dk(*round_arguments(sums[1], grads[1], options.scale, cu_k))
        round_dv(*round_arguments(sums[2], grads[2], 1.0, cu_k))
    return grads


def launch_key(
    options: LaunchOptions, modded: Modded, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
) -> object:
    """Return a key of a pass: calls with equal keys have the same compiled functions."""
    documents = options.documents
    return (
        q.dtype, q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        *[None if x is None else x.stride() for x in others], options.scale, options.window,
        options.deterministic, modded.key,
        None if documents is None else (len(documents.cu_q), documents.max_q, documents.max_k),
    )  # fmt: skip


def can_record(first: Tensor, *others: Tensor | None) -> bool:
    """Return True on Hopper, if all tensors begin at multiples of 16 bytes."""
    offsets = [x.data_ptr() % 16 for x in (first, *others) if x is not None]
    return not any(offsets) and capability(first.device.index)[0] == 9


class SplitLaunch(NamedTuple):
    """A launch of a split backward over some columns of the gathered keys.

    Attributes:
        k_start: First column.
        keys: Number of columns.
        scale: Factor of the scores; ``round_dq`` applies it to dQ, :class:`RoundAll` to dK.
        window: ``(left, right)`` in the form that ``main`` takes.
        functions: Compiled functions of the launch; those of all launches have one tile.
    """

    k_start: int
    keys: int
    scale: float
    window: Window
    functions: SplitFunctions


class SplitFunctions(NamedTuple):
    """Compiled functions of a split backward, which sums dK/dV over several launches.

    ``prepare`` computes delta and clears the sum of dQ; ``main`` adds to the sums of dQ, dK and dV;
    the other two scale a float32 sum and round it into a gradient.
    """

    prepare: Function
    main: Function
    after_window: tuple[Any, ...]  # arguments of ``main`` after the window
    round_dq: Function
    round_dkv: Function
    tile: int  # queries of a tile
    dim: int  # padded head dim of the sum of dQ


class AllLaunches:
    """Runs several launches over their rows together.

    Of R launches the n-th has rows ``n * L / R`` to ``(n + 1) * L / R`` of ``q [B, L, H, D]``, with
    B = 1 if there are several. What does not depend on keys runs once for all rows, as a batch of
    R: ``main`` alone is launched for each.

    Attributes:
        rows: The rows of all launches.
    """

    def __init__(
        self, rows: slice, launches: Sequence[SplitLaunch], k_shape: tuple[int, ...]
    ) -> None:
        """Take the rows, the launches, and the shape of k of all gathered columns."""
        self.rows, self._launches, self._k_shape = rows, launches, k_shape
        self._sums, count, keys = KeptViews(self._sums_of_launches), len(launches), k_shape[1]
        # What each launch has of the rows, of the batch of all, and of the columns: sizes, if
        # several have all of them in their order, and spans.
        spans = [slice(x.k_start, x.k_start + x.keys) for x in launches]
        self._cuts = (
            [(rows.stop - rows.start) // count] * count,
            [k_shape[0]] * count,
            sizes_of(spans, keys) if count > 1 else None,
            [None if x.keys == keys else (x.k_start, x.keys) for x in launches],
        )
        # The last launch goes first, as in the forward in reverse. The arguments after its tensors
        # are those of `main_arguments`, without documents.
        self._mains = [
            (n, x.functions.main, (x.scale, *[None] * 4, *x.window, *x.functions.after_window))
            for n, x in enumerate(launches)
        ][::-1]

    def _sums_of_launches(self, sums: Tensor) -> list[Tensor]:
        """Return the sums of dK and dV of each launch's columns, as the library lays them out.

        ``sums`` is one flat buffer: dK of all sequences ``[B, K, columns, D]``, then dV.
        """
        batch, columns, kv_heads, dim = self._k_shape
        head_stride, start = columns * dim, sums.storage_offset()
        sequence_stride = kv_heads * head_stride
        return [
            sums.as_strided(
                (batch, kv_heads, launch.keys * dim),
                (sequence_stride, head_stride, 1),
                start + launch.k_start * dim + first,
            )
            for launch in self._launches
            for first in (0, batch * sequence_stride)
        ]

    def __call__(
        self,
        q: Tensor,
        held: list[KeyBlock],
        upstream: BackwardInputs,
        sums: Tensor,
        new_dq: Callable[[], Tensor],
        *,
        is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add to the sums of dK and dV, write dQ, and return ``(lse, delta)``.

        The latter are ``[B * R, H, L / R]``. With ``is_last`` the columns that are held are dropped
        when all launches are queued.
        """
        (dout, out, lse, _), columns, (sizes, batches, widths, spans) = (
            upstream,
            held[0],
            self._cuts,
        )
        batch, length, heads, dim = q.shape
        rows, runs, functions, lse = (
            sizes[0],
            len(sizes),
            self._launches[0].functions,
            lse.contiguous(),
        )
        run_batch, shape = batch * runs, (batch * runs, rows, heads, dim)
        padded = -(-rows // functions.tile) * functions.tile
        # In float32, as lse is. `new_empty(*sizes)` takes the host half the time of `torch.empty`.
        dq_sums = lse.new_empty(run_batch, heads, padded * functions.dim)
        delta, lse_log2 = lse.new_empty(2, run_batch, heads, padded).unbind()
        tensors: Any = [[x] for x in (q, dout, lse_log2, delta, dq_sums)]
        if runs > 1:
            # Rows of a launch become a batch row of their own, as in the views of q and dout.
            # `prepare` takes any strides of lse but the last, which is 1.
            lse = lse.as_strided((runs, heads, rows), (rows, length, 1))
            tensors = [
                *[x.unsafe_split_with_sizes(sizes, 1) for x in (q, dout)],
                *[x.unsafe_split_with_sizes(batches) for x in (lse_log2, delta, dq_sums)],
            ]
        functions.prepare(
            *prepare_arguments(
                out.view(shape), dout.view(shape), delta, lse, lse_log2, dq_sums, None
            )
        )
        qs, douts, lses, deltas, dqs = tensors
        ks, vs = [
            [x if span is None else x.narrow(1, *span) for span in spans]
            if widths is None
            else x.unsafe_split_with_sizes(widths, 1)
            for x in columns[:2]
        ]
        kv_sums = self._sums(sums)
        # `main` adds to whatever is in `sums`: they are not cleared between launches.
        for n, main, others in self._mains:
            main(
                qs[n],
                ks[n],
                vs[n],
                douts[n],
                lses[n],
                deltas[n],
                dqs[n],
                kv_sums[2 * n],
                kv_sums[2 * n + 1],
                *others,
            )
        # dQ is complete when all launches have run: one rounding for all rows, into what may be
        # memory of the K/V. Launches on one stream keep their order.
        del columns, ks, vs
        if is_last:
            held.clear()
        dq = new_dq().view(shape)
        functions.round_dq(*round_arguments(dq_sums, dq, self._launches[0].scale, None))
        return lse, delta if padded == rows else delta.narrow(2, 0, rows)


class RoundAll:
    """Rounds the sums of own keys, head-major in a flat buffer, into ``dk`` and ``dv``.

    The spans become the batch of one launch; with several sequences each span has its own.
    """

    def __init__(self, spans: OwnSpans, scale: float, keys: KVPayload) -> None:
        """Take the spans, the factor of the scores, which dK gets, and the shape of own K/V."""
        self._spans, self._keys = spans, keys
        self._sums = KeptViews(self._sums_of_spans)
        # Sums and gradients do not overlap, so the launches may run in any order.
        self._launches = 1 if keys.batch == 1 else spans.number
        # Of each gradient of each launch: is it dv, its factor, its first key.
        self._grads = [
            (is_dv, factor, spans.source + n * spans.source_step)
            for n in range(self._launches)
            for is_dv, factor in ((0, scale), (1, 1.0))
        ]
        self._shape = (
            spans.number if keys.batch == 1 else keys.batch,
            spans.keys,
            keys.heads,
            keys.dim,
        )

    @cached_property
    def _functions(self) -> SplitFunctions:
        # Not before the first launch: a call may be prepared, or traced, without its GPU. Rounding
        # is the same for any number of query heads, and taken from a compilation for two.
        return split_functions(self._keys.dtype, self._keys.dim, 2, True, (False, False))

    def _sums_of_spans(self, sums: Tensor) -> list[Tensor]:
        """Return the sums of dK and of dV of each launch's spans."""
        batch, heads, dim = self._keys.batch, self._keys.heads, self._keys.dim
        spans = self._spans
        head = spans.length * dim
        first, whole = sums.storage_offset() + spans.target * dim, batch * heads * head
        # With one sequence spans are the batch; otherwise the sequences, which lie that far apart.
        count, step = batch, heads * head
        if batch == 1:
            count, step = spans.number, spans.target_step * dim
        return [
            sums.as_strided(
                (count, heads, spans.keys * dim),
                (step, head, 1),
                first + n * spans.target_step * dim + start,
            )
            for n in range(self._launches)
            for start in (0, whole)
        ]

    def __call__(self, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the spans of ``dk`` and ``dv``, gradients of all own keys."""
        is_alone, step, grads = self._keys.batch == 1, self._spans.source_step, (dk, dv)
        for own_sums, (is_dv, factor, first) in zip(self._sums(sums), self._grads, strict=True):
            grad = grads[is_dv]
            sequence, token, head, _ = grad.stride()
            target = grad.as_strided(
                self._shape,
                (step * token if is_alone else sequence, token, head, 1),
                grad.storage_offset() + first * token,
            )
            self._functions.round_dkv(*round_arguments(own_sums, target, factor, None))


@lru_cache(maxsize=32)
def split_functions(
    dtype: torch.dtype, dim: int, group: int, is_causal: bool, bounded: tuple[bool, ...]
) -> SplitFunctions:
    """Run the library's backward once on small tensors, and return the functions that it compiled.

    It is only for versions of the library that :data:`VERSIONS` names: of
    others the calls would be taken apart wrongly.

    Args:
        dtype: The dtype of q, k and v.
        dim: The head dim.
        group: Query heads of a K/V head.
        is_causal: True if the band is causal, which compiled functions are told besides a window.
        bounded: True for each side of the window, left and right, that is bounded.
    """
    left, right = (64 if side else None for side in bounded)
    options = LaunchOptions(1.0, None, (None, 0) if is_causal else (left, right), None, False)
    # Any numbers will do: only the functions are kept, which depend on dtypes, dims and the band.
    q, out, dout = (
        torch.zeros(2, 512, 2 * group, dim, dtype=dtype, device="cuda") for _ in range(3)
    )
    k, v = (torch.zeros(2, 512, 2, dim, dtype=dtype, device="cuda") for _ in range(2))
    lse = torch.zeros(2, 2 * group, 512, dtype=torch.float32, device="cuda")
    compiled = not_none(recorded_backward(dout, q, k, v, out, lse, options, PLAIN, None)[1])
    rows = backward_tile_queries(dim, is_causal=is_causal, is_local=not is_causal and any(bounded))
    # Read off the library's own sums of dQ: it pads head dims by rules of its own.
    padded = compiled.dq_sums[2] // (-(-512 // rows) * rows)
    return SplitFunctions(
        compiled.prepare,
        compiled.main,
        compiled.after_window,
        compiled.round_dq,
        not_none(compiled.round_dkv)[0],
        rows,
        padded,
    )


def is_overwritten() -> bool:
    """Return True if flash-attn 2.8 has put its older ``flash_attn/cute`` over flash-attn-4's."""
    return "return_lse" not in signature(public_module().flash_attn_func).parameters


def public_forward(
    q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of an item, in new tensors."""
    with torch.no_grad():
        out, lse = _function_of_launch(options)(q, k, v, learnable_sink=options.sinks)[:2]
    return out, lse


def public_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an item's ``(dq, dk, dv)`` from the final ``out`` and ``lse``, in new tensors."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # Without sinks: they are in the final lse, so the item weighs less, as beside another item.
    with torch.enable_grad():
        item_out, item_lse = _function_of_launch(options)(*leaves)[:2]
    # The final out is the sum of weight * item_out over the items. A row that sees nothing, in this
    # item or at all, has weight 0.
    weight = (item_lse.detach() - lse).exp().masked_fill(lse == -torch.inf, 0.0)
    rows = weight.transpose(-1, -2).unsqueeze(-1)
    # More weight for this item is less for the others: d out / d item_lse = weight * difference.
    difference = torch.where(rows > 0, item_out.detach().float() - out, 0.0)
    dlse = weight * (dout * difference).sum(-1).transpose(-1, -2)
    dq, dk, dv = torch.autograd.grad(
        (item_out, item_lse), leaves, ((rows * dout).to(item_out.dtype), dlse.contiguous())
    )
    return dq, dk, dv


def _function_of_launch(options: LaunchOptions) -> Callable[..., Any]:
    """Return the library's function with the options of a launch."""
    module, documents = public_module(), options.documents
    function = module.flash_attn_func if documents is None else module.flash_attn_varlen_func
    return partial(
        function,
        softmax_scale=options.scale,
        window_size=options.window,
        softcap=options.softcap or 0.0,
        deterministic=options.deterministic,
        return_lse=True,
        **dict(zip(DOCUMENT_ARGUMENTS, documents or (), strict=False)),
    )


@cache
def public_module() -> Any:
    """Import the module that has flash-attn-4's public functions."""
    return import_module("flash_attn.cute")
