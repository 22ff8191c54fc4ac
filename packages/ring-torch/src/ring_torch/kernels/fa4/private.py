"""Private parts of flash-attn-4: its compiled functions, their arguments, and its tile sizes.

All of it was read from the sources of :data:`VERSIONS` and holds for these alone. With any other
version the kernel calls public functions (:mod:`ring_torch.kernels.fa4.public`) and refuses what
they do not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from threading import RLock, get_ident
from typing import Any, NamedTuple

from torch import Tensor

from ring_torch.kernels.library import DOCUMENT_ARGUMENTS, Direction, Documents, LaunchOptions
from ring_torch.options import Window

#: Versions of flash-attn-4 whose private parts are as this module says.
VERSIONS = ("4.0.0b36",)
Function = Callable[..., None]
Calls = list[tuple[Function, tuple[Any, ...]]]
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


def tile(direction: Direction, head_dim: int, v_head_dim: int) -> Any:
    """Return the tile of the library's kernels on Hopper for blocks of 128 queries."""
    module = interface()
    tiles = module._tile_size_fwd_sm90 if direction == "forward" else module._tile_size_bwd_sm90
    return tiles(head_dim, v_head_dim, False, False, BLOCK_Q)


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
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
    modded: Modded, window: Window, aux: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of a compiled forward; ``aux`` are the values that its mods read."""
    cu_q, cu_k = offsets(options.documents)
    return (
        *[x.detach() if x.requires_grad else x for x in (q, k, v)], out, lse, options.scale,
        cu_q, cu_k, None, None, None, *window, modded.sinks, modded.expanded_lists(q), aux,
        None, None,
    )  # fmt: skip


def around_sinks(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments of a compiled forward between ``lse`` and its sinks, and after them."""
    return arguments[5:13], arguments[14:]


def recorded_window_and_aux(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the window and the values for mods that the library passed to a compiled forward."""
    return arguments[11:13], arguments[15] if len(arguments) > 15 else ()


class MainArguments(NamedTuple):
    """Arguments that the library passed to the main function of a backward.

    Attributes:
        buffers: lse to base 2, delta, and sums of dQ, dK and dV, or the latter two themselves.
        window: ``(left, right)`` in the form that the function takes.
        semaphores: Semaphores of dQ, dK and dV; ``None`` where unused.
        aux: Values that its mods read.
        after_window: All after the window.
    """

    buffers: tuple[Tensor, ...]
    window: Window
    semaphores: tuple[Tensor | None, ...]
    aux: tuple[Any, ...]
    after_window: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> MainArguments | None:
        """Take recorded arguments apart; ``None`` if they are not as many as expected here."""
        if len(arguments) != 22:
            return None
        return cls(
            arguments[4:9], arguments[14:16], arguments[16:19], arguments[19], tuple(arguments[16:])
        )


def main_arguments(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, buffers: Sequence[Tensor], options: LaunchOptions,
    modded: Modded, window: Window, semaphores: Sequence[Tensor | None], aux: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of the main function; ``buffers`` as in :class:`MainArguments`."""
    cu_q, cu_k = offsets(options.documents)
    return (
        *[x.detach() if x.requires_grad else x for x in (q, k, v)], dout, *buffers, options.scale,
        cu_q, cu_k, None, None, *window, *semaphores, aux, modded.expanded_lists(q), None,
    )  # fmt: skip


def plain_main_arguments(
    q: Tensor, kv: tuple[Tensor, Tensor], dout: Tensor, buffers: Sequence[Tensor], scale: float,
    window: Window, after_window: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Return :func:`main_arguments` without documents; those after the window as recorded."""
    return q, *kv, dout, *buffers, scale, None, None, None, None, *window, *after_window


def prepare_arguments(
    out: Tensor, dout: Tensor, delta: Tensor, lse: Tensor, lse_log2: Tensor, dq_sums: Tensor,
    documents: Documents | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of the function that writes delta, lse to base 2, and zeros for dQ."""
    cu_q = None if documents is None else documents.cu_q
    return out, dout, delta, lse, lse_log2, dq_sums, cu_q, None, None, None, None, 1.0, None, None


def round_arguments(sums: Tensor, grad: Tensor, scale: float, cu: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of a function that rounds sums, times ``scale``, into a gradient."""
    return sums, grad, scale, cu, None, None, None


def offsets(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the offsets of documents among queries and among keys, ``None`` without documents."""
    return (None, None) if documents is None else (documents.cu_q, documents.cu_k)


@contextmanager
def calls_of(*functions: Any) -> Iterator[tuple[Calls, ...]]:
    """Record the compiled functions that functions of the library call inside, with arguments.

    It yields a list for each function. Calls of other threads are not recorded.
    """
    calls: tuple[Calls, ...] = tuple([] for _ in functions)
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
    calls: Calls
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
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions, modded: Modded
) -> None:  # fmt: skip
    """Call the library's forward, which looks up, or compiles, its function.

    Results are written into ``out`` and, unless it is ``None``, into ``lse``.
    """
    interface()._flash_attn_fwd(
        q.detach(), k.detach(), v.detach(), out=out, lse=lse, return_lse=lse is not None,
        learnable_sink=modded.sinks, **modded.arguments, **_arguments(options),
    )  # fmt: skip


def library_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions,
    modded: Modded, dst: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Call the library's backward, which looks up, or compiles, its functions.

    Return ``(dq, dk, dv)``; ``dq`` is written into ``dst`` if that is given.
    """
    dq, dk, dv = interface()._flash_attn_bwd(
        q, k, v, out, dout, lse, dq=dst, score_mod_bwd=modded.score_mod_bwd,
        deterministic=options.deterministic, **modded.arguments, **_arguments(options),
    )  # fmt: skip
    return dq, dk, dv


def _arguments(options: LaunchOptions) -> dict[str, Any]:
    """Return the arguments of the library's functions for scale, window and documents, by name."""
    left, right = options.window
    return {
        "softmax_scale": options.scale, "window_size_left": left, "window_size_right": right,
        **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
    }  # fmt: skip
