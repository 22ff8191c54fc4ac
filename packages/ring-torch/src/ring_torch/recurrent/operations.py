"""Recurrent layers over sharded sequences: the functions, which are methods of a ContextParallel.

This module checks their arguments and brings them into the form of a kernel's; :mod:`calls
<ring_torch.recurrent.calls>` runs them. Names of arguments are flash-linear-attention's, and for
``ssd`` those of mamba_ssm.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, Unpack, get_args, overload

import torch
from torch import Tensor
from torch.nn import functional

from ring_core import Layout, UnsupportedError
from ring_core.base.arguments import as_python, check_size, is_finite, numbers_as_python
from ring_core.checks import check_choice, check_flag
from ring_core.row_checks import offsets_of
from ring_torch.capture import constant_in_graphs, is_traced
from ring_torch.comm.ranks import ranks_of
from ring_torch.compiled.static import from_json, size_of, to_json
from ring_torch.recurrent.arguments import (
    KernelName,
    LinearOptions,
    SplitsSequences,
    SsdOptions,
    StateOptions,
    check_tensor,
    sharding_of,
    sizes_of,
)
from ring_torch.recurrent.calls import RecurrentCall, run, state_dtype
from ring_torch.recurrent.in_graph import run_in_graph
from ring_torch.recurrent.kernels import LinearAttention, LinearRecurrence
from ring_torch.sharding import Sharding, length_of

_KERNELS: tuple[str, ...] = get_args(KernelName)
_HEADS = ("B", "T_local", "HV")
_KEYS, _VALUES = ("B", "T_local", "H", "K"), (*_HEADS, "V")
_SSD_KEYS, _SSD_VALUES = ("B", "T_local", "G", "N"), ("B", "T_local", "H", "P")


@overload
def gated_delta_rule(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: Literal[False] = ..., **options: Unpack[LinearOptions],
) -> Tensor: ...  # fmt: skip
@overload
def gated_delta_rule(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: Literal[True], **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def gated_delta_rule(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: bool, **options: Unpack[LinearOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def gated_delta_rule(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm: bool = False,
    cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    kernel: KernelName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule of a sequence that the ranks share, as Qwen3-Next has it.

    For each head ``S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T``, the decay
    first, and ``o_t = scale q_t S_t``. The state goes from rank to rank, and begins anew with each
    document. All ranks must call it, and if anything requires a gradient run its backward. The loss
    of a step is the sum of the ranks' losses: gradients of the initial states are parts, whose sum
    over ranks is right, and final states take every rank's gradient.

    Args:
        q: Queries of this rank's tokens, ``[B, T_local, H, K]``.
        k: Keys, likewise. For ``beta`` at most 1 their norms should be at most 1.
        v: Values, ``[B, T_local, HV, V]``; ``H`` divides ``HV``.
        g: Natural logarithm of each token's decay, at most 0, ``[B, T_local, HV]``.
        beta: How much of what the state holds for a key is replaced, ``[B, T_local, HV]``.
        scale: Factor of the outputs; ``None`` for ``K ** -0.5``.
        initial_state: State before each row or document, ``[N, HV, K, V]``, equal on all ranks;
            ``None`` for zeros.
        output_final_state: Return the state behind each row or document, too.
        use_qk_l2norm: Divide each row of q and k by ``sqrt(sum of squares + 1e-6)``.
        cu_seqlens: ``(0, ..., T)``, offsets of documents in the whole sequence. With states there
            is one for each, and ``B`` must be 1.
        seq_len: ``T``, if there is padding behind it (``cp.shard`` with
            ``pad=True``), which may hold anything and gets gradients of zero.
        kernel: ``"eager"``, in torch's operations, or ``"auto"``, which is the same today.

    Returns:
        The outputs, ``[B, T_local, HV, V]`` in the dtype of ``v``, zeros in padding; with
        ``output_final_state`` a pair, of these and the states ``[N, HV, K, V]``, float32 or, if an
        input is float64, float64, equal on all ranks.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: The layout is striped over several ranks; or a second derivative is asked
            for, later.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        o = cp.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=(0, 700, 1024))
    """
    return _delta_rule(
        cp, "gated_delta_rule", (q, k, v, g, beta), scale, initial_state, output_final_state,
        use_qk_l2norm, cu_seqlens, seq_len, kernel,
    )  # fmt: skip


@overload
def kda(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: Literal[False] = ..., **options: Unpack[LinearOptions],
) -> Tensor: ...  # fmt: skip
@overload
def kda(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: Literal[True], **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def kda(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: bool, **options: Unpack[LinearOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def kda(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm: bool = False,
    cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    kernel: KernelName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute Kimi Delta Attention: ``gated_delta_rule`` with a decay for each key channel.

    For each head ``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T``, and
    ``o_t = scale q_t S_t``.

    Args:
        q: Queries of this rank's tokens, ``[B, T_local, H, K]``.
        k: Keys, likewise.
        v: Values, ``[B, T_local, HV, V]``; ``H`` divides ``HV``.
        g: Natural logarithm of each channel's decay, at most 0, ``[B, T_local, HV, K]``.
        beta: As of ``gated_delta_rule``, as all that follow.
        scale: Factor of the outputs.
        initial_state: State before each row or document, ``[N, HV, K, V]``.
        output_final_state: Return the state behind each, too.
        use_qk_l2norm: Divide each row of q and k by its norm.
        cu_seqlens: Offsets of documents.
        seq_len: ``T``, if there is padding behind it.
        kernel: The kernel.

    Returns:
        As ``gated_delta_rule``.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of ``gated_delta_rule``.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        o, states = cp.kda(q, k, v, g, beta, output_final_state=True)
    """
    return _delta_rule(
        cp, "kda", (q, k, v, g, beta), scale, initial_state, output_final_state, use_qk_l2norm,
        cu_seqlens, seq_len, kernel,
    )  # fmt: skip


@overload
def simple_gla(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *,
    g_gamma: Tensor | None = ..., output_final_state: Literal[False] = ..., **options: Unpack[LinearOptions],
) -> Tensor: ...  # fmt: skip
@overload
def simple_gla(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *,
    g_gamma: Tensor | None = ..., output_final_state: Literal[True], **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def simple_gla(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *,
    g_gamma: Tensor | None = ..., output_final_state: bool, **options: Unpack[LinearOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def simple_gla(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *,
    g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm: bool = False, cu_seqlens: Sequence[int] | None = None,
    seq_len: int | None = None, kernel: KernelName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute linear attention with a decay for each head, as Mamba-2 and lightning attention do.

    For each head ``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, and ``o_t = scale q_t S_t``.

    Args:
        q: Queries of this rank's tokens, ``[B, T_local, H, K]``.
        k: Keys, likewise.
        v: Values, ``[B, T_local, HV, V]``; ``H`` divides ``HV``.
        g: Natural logarithm of each token's decay, at most 0, ``[B, T_local, HV]``; ``None`` for
            none.
        g_gamma: Natural logarithm of a decay that all tokens of a head have, ``[HV]``, as of
            lightning attention; beside ``g`` it is added. Its gradient is a part, as of
            ``initial_state``.
        scale: As of ``gated_delta_rule``, as all that follow.
        initial_state: State before each row or document, ``[N, HV, K, V]``.
        output_final_state: Return the state behind each, too.
        use_qk_l2norm: Divide each row of q and k by its norm.
        cu_seqlens: Offsets of documents.
        seq_len: ``T``, if there is padding behind it.
        kernel: The kernel.

    Returns:
        As ``gated_delta_rule``.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of ``gated_delta_rule``.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        o = cp.simple_gla(q, k, v, g_gamma=-slopes)
    """
    sharding = sharding_of(cp)
    number = _number(sharding, q)
    sizes = sizes_of(
        {"q": q, "k": k, "v": v},
        {"q": _KEYS, "k": _KEYS, "v": _VALUES, "g": _HEADS, "g_gamma": ("HV",)},
        g=g,
        g_gamma=g_gamma,
    )
    if g_gamma is not None:
        rows = g_gamma.expand(*v.shape[:3])
        g = rows if g is None else g + rows
    attention = LinearAttention(
        "simple_gla", _scale(scale, sizes["K"]), has_decay=g is not None,
        normalizes=_flag("use_qk_l2norm", use_qk_l2norm),
    )  # fmt: skip
    inputs = (q, k, v) if g is None else (q, k, v, g)
    return _run(
        sharding, number, attention, inputs, initial_state, output_final_state, cu_seqlens, seq_len,
        kernel,
    )  # fmt: skip


@overload
def ssd(
    cp: SplitsSequences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,  # noqa: N803 - mamba_ssm's names
    output_final_state: Literal[False] = ..., **options: Unpack[SsdOptions],
) -> Tensor: ...  # fmt: skip
@overload
def ssd(
    cp: SplitsSequences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,  # noqa: N803 - mamba_ssm's names
    output_final_state: Literal[True], **options: Unpack[SsdOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ssd(
    cp: SplitsSequences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,  # noqa: N803 - mamba_ssm's names
    output_final_state: bool, **options: Unpack[SsdOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def ssd(
    cp: SplitsSequences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,  # noqa: N803 - mamba_ssm's names
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, inf),
    initial_states: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    kernel: KernelName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the state space model of Mamba-2, whose dual is linear attention with decay.

    For each head ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``, and ``y_t = S_t C_t``: that is
    ``simple_gla`` with ``q = C``, ``k = B``, ``v = dt x``, ``g = dt A`` (Dao and Gu, arXiv
    2405.21060).

    Args:
        x: Inputs of this rank's tokens, ``[B, T_local, H, P]``.
        dt: Steps, ``[B, T_local, H]``.
        A: Rates of decay, at most 0, ``[H]``. Its gradient is a part, whose sum over ranks is
            right, as those of ``D`` and ``dt_bias``.
        B: Input projections, ``[B, T_local, G, N]``; ``G`` divides ``H``.
        C: Output projections, likewise.
        D: Skip connection, ``[H]`` or ``[H, P]``: outputs are ``y + D x``.
        z: Gate, like ``x``: outputs are multiplied by ``silu(z)``.
        dt_bias: Added to ``dt``, ``[H]``.
        dt_softplus: Replace ``dt`` by its softplus, after the bias.
        dt_limit: Least and largest step; ``dt`` is clamped to it last.
        initial_states: State before each row or document, ``[rows or documents, H, P, N]``, equal
            on all ranks; ``None`` for zeros.
        output_final_state: Return the state behind each row or document, too.
        cu_seqlens: As of ``gated_delta_rule``, as all that follow.
        seq_len: ``T``, if there is padding behind it.
        kernel: The kernel.

    Returns:
        The outputs, ``[B, T_local, H, P]`` in the dtype of ``x``, zeros in padding; with
        ``output_final_state`` a pair, of these and the states.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of ``gated_delta_rule``.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        y = cp.ssd(x, dt, -torch.exp(A_log), B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
    """
    sharding = sharding_of(cp)
    number = _number(sharding, x)
    sizes_of(
        {"x": x, "dt": dt, "A": A, "B": B, "C": C},
        {
            "x": _SSD_VALUES, "dt": ("B", "T_local", "H"), "A": ("H",), "B": _SSD_KEYS, "C": _SSD_KEYS,
            "D": ("H", "P") if getattr(D, "ndim", 1) == 2 else ("H",), "z": _SSD_VALUES,
            "dt_bias": ("H",),
        },
        D=D, z=z, dt_bias=dt_bias,
    )  # fmt: skip
    low, high = _limit(dt_limit)
    dtype = state_dtype([y for y in (x, dt, A, B, C, D, z, dt_bias) if y is not None])
    # Gradients of A, D and dt_bias are sums over all rows, and NaN in padding times 0 is NaN.
    tokens = _tokens(sharding, x, seq_len)
    values, step = _without_padding(x.to(dtype), tokens), _without_padding(dt.to(dtype), tokens)
    if dt_bias is not None:
        step = step + dt_bias
    if _flag("dt_softplus", dt_softplus):
        step = functional.softplus(step)
    step = step.clamp(low, high)
    if initial_states is not None:
        check_tensor("initial_states", initial_states)
        initial_states = initial_states.mT if initial_states.ndim > 1 else initial_states
    results = _run(
        sharding, number, LinearAttention("ssd", 1.0), (C, B, values * step.unsqueeze(-1), step * A),
        initial_states, output_final_state, cu_seqlens, seq_len, kernel, "initial_states",
    )  # fmt: skip
    y, states = results if isinstance(results, tuple) else (results, None)
    if D is not None:
        y = y + (D if D.ndim == 2 else D.unsqueeze(-1)) * values
    if z is not None:
        y = y * functional.silu(_without_padding(z.to(dtype), tokens))
    y = _without_padding(y.to(x.dtype), tokens)  # as above: gradients of padding may be anything
    return y if states is None else (y, states.mT)


@overload
def linear_recurrence(
    cp: SplitsSequences, a: Tensor, b: Tensor, *,
    output_final_state: Literal[False] = ..., **options: Unpack[StateOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_recurrence(
    cp: SplitsSequences, a: Tensor, b: Tensor, *,
    output_final_state: Literal[True], **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_recurrence(
    cp: SplitsSequences, a: Tensor, b: Tensor, *,
    output_final_state: bool, **options: Unpack[StateOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def linear_recurrence(
    cp: SplitsSequences, a: Tensor, b: Tensor, *, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Sequence[int] | None = None,
    seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``h_t = a_t h_{t-1} + b_t``, number by number, as the RG-LRU of RecurrentGemma does.

    Args:
        a: Factors of this rank's tokens, ``[B, T_local, ...]``.
        b: What is added, likewise.
        initial_state: State before each row or document, ``[N, ...]``, equal on all ranks; ``None``
            for zeros.
        output_final_state: Return the state behind each row or document, too.
        cu_seqlens: As of ``gated_delta_rule``.
        seq_len: ``T``, if there is padding behind it.

    Returns:
        ``h``, like ``b``, zeros in padding; with ``output_final_state`` a pair, of it and the
        states ``[N, ...]``, float32 or, if an input is float64, float64, equal on all ranks.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of ``gated_delta_rule``.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        h, last = cp.linear_recurrence(a, b, output_final_state=True)
    """
    sharding = sharding_of(cp)
    number = _number(sharding, a)
    check_tensor("a", a)
    axes = ("B", "T_local", *(f"axis {n}" for n in range(2, a.ndim)))
    sizes_of({"a": a, "b": b}, {"a": axes, "b": axes})
    return _run(
        sharding, number, LinearRecurrence(), (a, b), initial_state, output_final_state, cu_seqlens,
        seq_len, "auto",
    )  # fmt: skip


def _delta_rule(
    cp: SplitsSequences, name: str, inputs: tuple[Tensor, ...], scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm: bool,
    cu_seqlens: Sequence[int] | None, seq_len: int | None, kernel: KernelName,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Check the arguments of a delta rule, with a decay for each head or channel, and run it."""
    sharding = sharding_of(cp)
    number = _number(sharding, inputs[0])
    by_channel = name == "kda"
    sizes = sizes_of(
        dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True)),
        {
            "q": _KEYS, "k": _KEYS, "v": _VALUES, "beta": _HEADS,
            "g": (*_HEADS, "K") if by_channel else _HEADS,
        },
    )  # fmt: skip
    attention = LinearAttention(
        name, _scale(scale, sizes["K"]), is_delta=True, by_channel=by_channel,
        normalizes=_flag("use_qk_l2norm", use_qk_l2norm),
    )  # fmt: skip
    return _run(
        sharding, number, attention, inputs, initial_state, output_final_state, cu_seqlens, seq_len,
        kernel,
    )  # fmt: skip


def _run(
    sharding: Sharding, number: int, kernel: LinearAttention | LinearRecurrence, inputs: tuple[Tensor, ...],
    initial: Tensor | None, wants_final: bool, cu_seqlens: Sequence[int] | None,
    seq_len: int | None, kernel_name: str, state_name: str = "initial_state",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Check the options that all layers have, and run one as one autograd function."""
    check_choice("kernel", kernel_name, _KERNELS)
    wants_final = _flag("output_final_state", wants_final)
    size, layout, x = size_of(sharding.group), sharding.layout, inputs[0]
    if layout == "striped" and size > 1:
        raise UnsupportedError(
            f"{kernel.name} takes a state through runs of consecutive tokens, and in the striped "
            f"layout over {size} ranks no two neighbours are on one rank. Instead: relayout to "
            f"'zigzag' around the layer, as in cp.relayout(x, to='zigzag')"
        )
    length = length_of(x, 1, seq_len, size)
    traced, rows = is_traced(x), x.shape[0]
    # While a graph is traced nobody looks at the numbers of documents.
    offsets = cu_seqlens if traced else offsets_of(cu_seqlens)
    if offsets is not None and rows > 1 and (initial is not None or wants_final):
        raise ValueError(
            f"with cu_seqlens there is one state a document, so B must be 1, got {rows} rows"
        )
    dtype = state_dtype(inputs)
    if initial is not None:
        check_tensor(state_name, initial)
        count = rows if offsets is None else len(offsets) - 1
        shape = (count, *kernel.state_shape(*inputs))
        if initial.shape != shape or initial.device != x.device:
            raise ValueError(
                f"{state_name} must be {list(shape)} on {x.device}, a state for each "
                f"{'row' if offsets is None else 'document'}, got {list(initial.shape)} on "
                f"{initial.device}"
            )
        dtype = torch.promote_types(dtype, initial.dtype)
        initial = initial.to(dtype)
        # Documents first: without cu_seqlens each row is one, and all rows are alike.
        initial = initial.unsqueeze(0 if offsets is None else 1)
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in (initial, *inputs)
    )
    if traced:
        out, final = run_in_graph(
            sharding, kernel, offsets, length, dtype, initial, inputs, wants_final=wants_final,
            needs_grad=needs_grad,
        )  # fmt: skip
    else:
        call = RecurrentCall(
            sharding.ranks, layout, kernel, offsets_of(offsets),
            None if length is None else check_size("seq_len", length), dtype,
            initial is not None, wants_final, needs_grad, number,
        )  # fmt: skip
        out, final = run(call, initial, *inputs)
    return (out, final.squeeze(0 if offsets is None else 1)) if wants_final else out


def _number(sharding: Sharding, x: object) -> int:
    """Return the number of a new call; 0 in a graph, where it is counted when the graph runs."""
    if is_traced(x):
        sharding.check_group()
        return 0
    return sharding.ranks.next_call()


def _scale(scale: object, keys: int) -> float:
    """Return the factor of the outputs, ``K ** -0.5`` if it is not given."""
    return float(keys**-0.5) if scale is None else _real("scale", scale)


def _limit(limit: object) -> tuple[float, float]:
    """Return the least and the largest step of ssd."""
    if not isinstance(limit, tuple | list) or len(limit) != 2:
        raise ValueError(f"dt_limit must be a pair of numbers (least, largest), got {limit!r}")
    low, high = (_real("dt_limit", x, infinite=True) for x in limit)
    if low > high:
        raise ValueError(f"dt_limit must be a pair (least, largest), got {limit!r}")
    return low, high


def _real(name: str, value: object, *, infinite: bool = False) -> float:
    """Return an option that is a number as Python's ``float``.

    Raises:
        ValueError: It is none, NaN, or infinite where that is not allowed.
    """
    number = as_python(value)
    if isinstance(number, int | float) and not isinstance(number, bool):
        if is_finite(number):
            return float(number)
        if infinite and number in (inf, -inf):
            return float(number)
    raise ValueError(f"{name} must be a finite number, got {value!r}")


def _flag(name: str, value: bool) -> bool:
    """Return an option that switches something, as Python's ``bool``."""
    check_flag(name, value)
    return bool(value)


def _tokens(sharding: Sharding, x: Tensor, seq_len: int | None) -> int | None:
    """Return how many of this rank's rows are tokens; ``None`` if there is no padding."""
    length = length_of(x, 1, seq_len, size_of(sharding.group))
    if length is None:
        return None
    return _tokens_of(sharding.group, to_json(sharding.layout), int(check_size("seq_len", length)))


@constant_in_graphs
def _tokens_of(group: Any, layout: Any, seq_len: int) -> int:
    """Return how many tokens this rank holds; a constant to the compiler."""
    ranks = ranks_of(group)
    return int(Layout.padded(from_json(layout), seq_len, ranks.size).num_tokens(ranks.rank))


def _without_padding(x: Tensor, tokens: int | None) -> Tensor:
    """Return rows ``[B, T_local, ...]`` with zeros in padding, which gets no gradient."""
    if tokens is None or tokens >= x.shape[1]:
        return x
    return functional.pad(x[:, :tokens], (*(0, 0) * (x.ndim - 2), 0, x.shape[1] - tokens))
