"""Private parts of flash-attn-4: its compiled functions, their arguments, and its tile sizes.

No other module names them, or knows the places of their arguments; in which order they are called,
:mod:`ring_torch.kernels.fa4.compiled` and :mod:`ring_torch.kernels.fa4.split` know. All of it was
read from the sources of :data:`VERSIONS` and holds for these alone. With any other version the
kernel calls public functions (:mod:`ring_torch.kernels.fa4.public`) and refuses what they do not
offer.
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

from ring_torch.kernels.library import (
    DOCUMENT_ARGUMENTS,
    Direction,
    Documents,
    ForwardLaunch,
    LaunchOptions,
)
from ring_torch.options import Window

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


def tile_keys(direction: Direction, head_dim: int, v_head_dim: int) -> int:
    """Return how many keys a tile has on Hopper if the launch takes block lists."""
    module = interface()
    tiles = module._tile_size_fwd_sm90 if direction == "forward" else module._tile_size_bwd_sm90
    return int(tiles(head_dim, v_head_dim, False, False, BLOCK_Q).n_block_size)


def backward_is_transposed(head_dim: int, v_head_dim: int) -> bool:
    """Return True if a thread of the backward on Hopper holds columns of scores, not rows."""
    tiles = interface()._tile_size_bwd_sm90
    return bool(tiles(head_dim, v_head_dim, False, False, BLOCK_Q).SdP_swapAB)


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
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
    modded: Modded, window: Window, aux: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
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
    launch: Function, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    options: LaunchOptions, window: Window,
) -> ForwardLaunch:  # fmt: skip
    """Return a launch of a compiled forward without documents or mods, for tensors like these."""
    arguments = forward_arguments(q, k, v, out, lse, options, PLAIN, window)
    # A launch takes its tensors anew; these others are the same each time.
    before_sinks, after_sinks, has_lse = arguments[5:13], arguments[14:], lse is not None

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> None:
        launch(
            *[x.detach() if x.requires_grad else x for x in (q, k, v)], out,
            lse if has_lse else None, *before_sinks, sinks, *after_sinks,
        )  # fmt: skip

    return run


def main_arguments(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, buffers: Sequence[Tensor], options: LaunchOptions,
    modded: Modded, window: Window, semaphores: Sequence[Tensor | None], aux: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
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


class RecordedCall(NamedTuple):
    """A call of a compiled function by the library."""

    function: Function
    arguments: tuple[Any, ...]


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
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions, modded: Modded
) -> CompiledForward | None:  # fmt: skip
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions,
    modded: Modded, dst: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], CompiledBackward | None]:  # fmt: skip
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
    ]  # fmt: skip
    if not _alike(tuple(x.arguments for x in (*prepares, *mains, *rounds)), tuple(expected)):
        return grads, None
    round_dq, *round_dkv = (x.function for x in rounds)
    dkv = (round_dkv[0], round_dkv[1]) if round_dkv else None
    return grads, CompiledBackward(
        prepares[0].function, main, round_dq, dkv, window, arguments[16:], tuple(delta.shape),
        tuple(sums[0].shape), None if dkv is None else (tuple(sums[1].shape), tuple(sums[2].shape)),
        tuple(None if x is None else tuple(x.shape) for x in semaphores),
    )  # fmt: skip


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
                self.calls.append(RecordedCall(function, arguments))

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
