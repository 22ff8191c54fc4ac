"""State space models and linear recurrences over sharded sequences.

Names of arguments are mamba_ssm's. The formulas are in :mod:`ring_torch.recurrent.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, Unpack, overload

from torch import Tensor
from torch.nn import functional

from ring_core import Layout
from ring_core.base.arguments import check_size, numbers_as_python
from ring_torch.capture import constant_in_graphs
from ring_torch.comm.ranks import ranks_of
from ring_torch.compiled.static import from_json, size_of, to_json
from ring_torch.recurrent.arguments import (
    KernelName,
    SplitsSequences,
    SsdOptions,
    StateOptions,
    check_tensor,
    checked_flag,
    checked_real,
    sharding_of,
    sizes_of,
)
from ring_torch.recurrent.calls import state_dtype
from ring_torch.recurrent.kernels import LinearAttention, LinearRecurrence, SelectiveScan
from ring_torch.recurrent.layer import number_of_call, run_layer
from ring_torch.sharding import Sharding, length_of

_SSD_KEYS, _SSD_VALUES = ("B", "T_local", "G", "N"), ("B", "T_local", "H", "P")


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
    number = number_of_call(sharding, x)
    sizes_of(
        {"x": x, "dt": dt, "A": A, "B": B, "C": C},
        {
            "x": _SSD_VALUES, "dt": ("B", "T_local", "H"), "A": ("H",), "B": _SSD_KEYS, "C": _SSD_KEYS,
            "D": ("H", "P") if getattr(D, "ndim", 1) == 2 else ("H",), "z": _SSD_VALUES,
            "dt_bias": ("H",),
        },
        groups=("G", "H"), D=D, z=z, dt_bias=dt_bias,
    )  # fmt: skip
    low, high = _limit(dt_limit)
    dtype = state_dtype([y for y in (x, dt, A, B, C, D, z, dt_bias) if y is not None])
    seq_len = length_of(x, 1, seq_len, size_of(sharding.group))
    tokens = _tokens(sharding, seq_len)
    values = _without_padding(x.to(dtype), tokens)
    step = _steps(_without_padding(dt.to(dtype), tokens), dt_bias, dt_softplus).clamp(low, high)
    if initial_states is not None:
        check_tensor("initial_states", initial_states)
        initial_states = initial_states.mT if initial_states.ndim > 1 else initial_states
    attention = LinearAttention("ssd", 1.0, rounds_values=x.dtype == C.dtype)
    results = run_layer(
        sharding, number, attention, (C, B, values * step.unsqueeze(-1), step * A),
        initial_states, output_final_state, cu_seqlens, seq_len, kernel, "initial_states",
    )  # fmt: skip
    y, states = results if isinstance(results, tuple) else (results, None)
    skip = D.unsqueeze(-1) if D is not None and D.ndim == 1 else D
    y = _finished(y, values, skip, z, tokens).to(x.dtype)
    return y if states is None else (y, states.mT)


@numbers_as_python
def selective_scan(
    cp: SplitsSequences, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *,  # noqa: N803 - mamba_ssm's names
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    kernel: KernelName = "auto",
) -> Tensor:  # fmt: skip
    """Compute the selective state space model of Mamba.

    For each channel ``h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t``, with ``N`` numbers, and
    ``y_t = C_t . h_t``. Tokens are the second axis, not the last, as they are in mamba_ssm.

    Args:
        u: Inputs of this rank's tokens, ``[B, T_local, D]``.
        delta: Steps, likewise.
        A: Rates of decay, at most 0, ``[D, N]``. Its gradient is a part, whose sum over ranks is
            right, as those of ``D`` and ``delta_bias``.
        B: Input projections, ``[B, T_local, N]`` or ``[B, T_local, G, N]``; ``G`` divides ``D``.
        C: Output projections, likewise.
        D: Skip connection, ``[D]``: outputs are ``y + D u``.
        z: Gate, like ``u``: outputs are multiplied by ``silu(z)``.
        delta_bias: Added to ``delta``, ``[D]``.
        delta_softplus: Replace ``delta`` by its softplus, after the bias.
        cu_seqlens: As of ``gated_delta_rule``, as all that follow.
        seq_len: ``T``, if there is padding behind it.
        kernel: ``"eager"``, in torch's operations; ``"triton"``, by Ring's own kernels, which
            compute in float32 on CUDA, outside of compiled graphs; or ``"auto"``, the latter where
            it can be.

    Returns:
        The outputs, ``[B, T_local, D]`` in the dtype of ``u``, zeros in padding.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of ``gated_delta_rule``.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        y = cp.selective_scan(u, delta, -torch.exp(A_log), B, C, D=D, delta_softplus=True)
    """
    sharding = sharding_of(cp)
    number = number_of_call(sharding, u)
    rows = ("B", "T_local", "D")
    keys = ("B", "T_local", *("G",) * (getattr(B, "ndim", 3) == 4), "N")
    sizes_of(
        {"u": u, "delta": delta, "A": A, "B": B, "C": C},
        {
            "u": rows, "delta": rows, "A": ("D", "N"), "B": keys, "C": keys, "D": ("D",), "z": rows,
            "delta_bias": ("D",),
        },
        groups=("G", "D"), D=D, z=z, delta_bias=delta_bias,
    )  # fmt: skip
    dtype = state_dtype([y for y in (u, delta, A, B, C, D, z, delta_bias) if y is not None])
    seq_len = length_of(u, 1, seq_len, size_of(sharding.group))
    tokens = _tokens(sharding, seq_len)
    values = _without_padding(u.to(dtype), tokens)
    step = _steps(
        _without_padding(delta.to(dtype), tokens), delta_bias, delta_softplus, "delta_softplus"
    )
    if B.ndim == 3:
        B, C = B.unsqueeze(2), C.unsqueeze(2)  # noqa: N806 - one group
    y = run_layer(
        sharding, number, SelectiveScan(), (values, step, B, C, A), None, False, cu_seqlens, seq_len,
        kernel,
    )  # fmt: skip
    assert isinstance(y, Tensor)
    return _finished(y, values, D, z, tokens).to(u.dtype)


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
    number = number_of_call(sharding, a)
    check_tensor("a", a)
    axes = ("B", "T_local", *(f"axis {n}" for n in range(2, a.ndim)))
    sizes_of({"a": a, "b": b}, {"a": axes, "b": axes})
    return run_layer(
        sharding, number, LinearRecurrence(), (a, b), initial_state, output_final_state, cu_seqlens,
        seq_len, "auto",
    )  # fmt: skip


def _steps(step: Tensor, bias: Tensor | None, softplus: bool, name: str = "dt_softplus") -> Tensor:
    """Return the steps of tokens, with their bias and after softplus."""
    if bias is not None:
        step = step + bias
    return functional.softplus(step) if checked_flag(name, softplus) else step


def _finished(
    y: Tensor, values: Tensor, skip: Tensor | None, z: Tensor | None, tokens: int | None
) -> Tensor:
    """Return outputs with their skip connection and gate, zeros in padding."""
    if skip is not None:
        y = y + skip * values
    if z is not None:
        y = y * functional.silu(_without_padding(z.to(y.dtype), tokens))
    return _without_padding(y, tokens)


def _limit(limit: object) -> tuple[float, float]:
    """Return the least and the largest step of ssd."""
    if not isinstance(limit, tuple | list) or len(limit) != 2:
        raise ValueError(f"dt_limit must be a pair of numbers (least, largest), got {limit!r}")
    low, high = (checked_real("dt_limit", x, infinite=True) for x in limit)
    if low > high:
        raise ValueError(f"dt_limit must be a pair (least, largest), got {limit!r}")
    return low, high


def _tokens(sharding: Sharding, seq_len: int | None) -> int | None:
    """Return how many of this rank's rows are tokens; ``None`` if there is no padding."""
    if seq_len is None:
        return None
    return _tokens_of(sharding.group, to_json(sharding.layout), int(check_size("seq_len", seq_len)))


@constant_in_graphs
def _tokens_of(group: Any, layout: Any, seq_len: int) -> int:
    """Return how many tokens this rank holds; a constant to the compiler."""
    ranks = ranks_of(group)
    return int(Layout.padded(from_json(layout), seq_len, ranks.size).num_tokens(ranks.rank))


def _without_padding(x: Tensor, tokens: int | None) -> Tensor:
    """Return rows ``[B, T_local, ...]`` with zeros in padding, which gets no gradient.

    Gradients of what tokens share are sums over all rows, and NaN in padding times 0 is NaN.
    """
    if tokens is None or tokens >= x.shape[1]:
        return x
    return functional.pad(x[:, :tokens], (*(0, 0) * (x.ndim - 2), 0, x.shape[1] - tokens))
