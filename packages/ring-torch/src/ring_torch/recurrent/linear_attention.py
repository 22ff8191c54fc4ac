"""Linear attention and delta rules over sharded sequences.

Names of arguments are flash-linear-attention's. The formulas, and the papers that they are of, are
in :mod:`ring_torch.recurrent.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

from torch import Tensor

from ring_core.base.arguments import numbers_as_python
from ring_torch.recurrent.arguments import (
    KernelName,
    LinearOptions,
    SplitsSequences,
    checked_flag,
    checked_real,
    sharding_of,
    sizes_of,
)
from ring_torch.recurrent.kernels import LinearAttention
from ring_torch.recurrent.layer import number_of_call, run_layer

_HEADS = ("B", "T_local", "HV")
_KEYS, _VALUES = ("B", "T_local", "H", "K"), (*_HEADS, "V")


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
        kernel: ``"eager"``, in torch's operations, which takes any call; ``"fla"``, by the kernels
            of ``fla-core`` 0.6, which take 16 bits on CUDA, outside of compiled graphs; or
            ``"auto"``, the latter where it is installed and right.

    Returns:
        The outputs, ``[B, T_local, HV, V]`` in the dtype of ``v``, zeros in padding; with
        ``output_final_state`` a pair, of these and the states ``[N, HV, K, V]``, float32 or, if an
        input is float64, float64, equal on all ranks.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: The layout is striped over several ranks; ``kernel="fla"`` cannot take the
            call; or a second derivative is asked for, later.
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
    number = number_of_call(sharding, q)
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
        normalizes=checked_flag("use_qk_l2norm", use_qk_l2norm),
    )  # fmt: skip
    inputs = (q, k, v) if g is None else (q, k, v, g)
    return run_layer(
        sharding, number, attention, inputs, initial_state, output_final_state, cu_seqlens, seq_len,
        kernel,
    )  # fmt: skip


def _delta_rule(
    cp: SplitsSequences, name: str, inputs: tuple[Tensor, ...], scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm: bool,
    cu_seqlens: Sequence[int] | None, seq_len: int | None, kernel: KernelName,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Check the arguments of a delta rule, with a decay for each head or channel, and run it."""
    sharding = sharding_of(cp)
    number = number_of_call(sharding, inputs[0])
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
        normalizes=checked_flag("use_qk_l2norm", use_qk_l2norm),
    )  # fmt: skip
    return run_layer(
        sharding, number, attention, inputs, initial_state, output_final_state, cu_seqlens, seq_len,
        kernel,
    )  # fmt: skip


def _scale(scale: object, keys: int) -> float:
    """Return the factor of the outputs, ``K ** -0.5`` if it is not given."""
    return float(keys**-0.5) if scale is None else checked_real("scale", scale)
