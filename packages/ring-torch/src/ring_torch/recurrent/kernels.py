"""Kernels of recurrent layers in torch's operations, chunk by chunk: any option, any dtype.

A kernel sees chunks of ``C`` tokens side by side, ``[n, B, C, ...]``. Of each it makes the affine
map of the state (:mod:`ring_torch.recurrent.maps`) and the outputs, which are affine in the state
that comes before the chunk: ``o_i = R_i S + r_i``. Nothing here knows of runs and ranks.

**Decays.** Between tokens ``j <= i`` a state decays by ``D_ij = exp(g_{j+1} + ... + g_i)``. Each
sum is made of its own terms, as in Mamba-2 (Dao and Gu, arXiv 2405.21060, listing 1): a difference
of two running sums would lose digits, and a quotient of two decays would be 0 / 0.

**Linear attention with decay**, ``S_t = exp(g_t) S_{t-1} + k_t v_t^T`` (Yang et al., arXiv
2312.06635). Over a chunk that begins with the state ``S``::

    o_i = scale (exp(g_1 + ... + g_i) q_i S + sum_{j <= i} D_ij (q_i . k_j) v_j)
    S'  = exp(g_1 + ... + g_C) S + sum_j D_Cj k_j v_j^T

**The delta rule** writes ``v_t`` in place of what the state holds for ``k_t`` already, by a share
``beta_t`` (Yang et al., arXiv 2406.06484; with decays 2412.06464, of each channel 2510.26692)::

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T

Each token adds ``k_t u_t^T``, with ``u_t = beta_t (v_t - k_t^T Diag(exp g_t) S_{t-1})``. What the
state holds there is of ``S`` and of earlier ``u_j``, so that all ``u`` of a chunk solve one system
with a unit lower triangular matrix::

    u_i + beta_i sum_{j < i} D_ij (k_i . k_j) u_j = beta_i (v_i - exp(g_1 + ... + g_i) k_i S)

Its solution is ``u = U - W S``, and the two formulas above hold with ``u`` in place of ``v``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Parts(NamedTuple):
    """A kernel's results of all chunks; ``S`` stands for the shape of a state.

    Attributes:
        transition: What each chunk multiplies a state by, ``[n, B, ...]``.
        state: What it leaves of a state of zeros, ``[n, B, *S]``.
        readout: What its tokens' outputs multiply the state before it by.
        own: Their outputs where that state is zeros, ``[n, B, C, ...]``.
    """

    transition: Tensor
    state: Tensor
    readout: Tensor
    own: Tensor


class Kernel(Hashable, Protocol):
    """Kernel with its options, which are fields; equal kernels are equal keys."""

    @property
    def name(self) -> str:
        """Name of the layer, in messages."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""

    @property
    def fills(self) -> tuple[float | None, ...]:
        """Number in rows of each input that hold no token, by which they change no state.

        ``None`` for an input that all tokens share; the first input is none of these.
        """

    @property
    def values(self) -> int:
        """Number of the input whose dtype the outputs have."""

    @property
    def is_matrix(self) -> bool:
        """True if transitions are matrices."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of a chunk."""

    def state_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return the shape of a state of one row, of inputs ``[B, T, ...]``."""

    def transition_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return the shape of a transition of one row, likewise."""

    def parts(self, *inputs: Tensor) -> Parts:
        """Return the results of chunks of inputs, ``[n, B, C, ...]``."""

    def read(self, readout: Tensor, own: Tensor, state: Tensor) -> Tensor:
        """Return the outputs ``[n, B, C, ...]``, of the state before each chunk."""


@dataclass(frozen=True)
class LinearRecurrence:
    """Kernel of ``h_t = a_t h_{t-1} + b_t``, number by number.

    Its chunks are composed by :func:`prefixes`.
    """

    name: ClassVar[str] = "linear_recurrence"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b")
    fills: ClassVar[tuple[float | None, ...]] = (1, 0)
    values: ClassVar[int] = 1
    is_matrix: ClassVar[bool] = False
    most_tokens: ClassVar[int] = 32

    def state_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return the shape of a token."""
        return tuple(inputs[0].shape[2:])

    transition_shape = state_shape

    def parts(self, *inputs: Tensor) -> Parts:
        """Return the map of each chunk, and of each token the map of what leads to it."""
        a, b = prefixes(*inputs)
        return Parts(a[:, :, -1], b[:, :, -1], a, b)

    def read(self, readout: Tensor, own: Tensor, state: Tensor) -> Tensor:
        """Return the state behind each token."""
        return readout * state.unsqueeze(2) + own


@dataclass(frozen=True)
class LinearAttention:
    """Kernel of linear attention with decay, and of the delta rule.

    Attributes:
        name: Name of the layer.
        scale: Factor of the outputs.
        has_decay: True if there is an input ``g``, ``[n, B, C, HV]``, or for each channel
            ``[n, B, C, HV, K]``.
        is_delta: True if there is an input ``beta``, and the rule is the delta rule.
        by_channel: True if each key channel has a decay.
        normalizes: True to divide each row of q and k by its norm.
        rounds_values: True if values are products in float32 of what has the dtype of q, to which a
            library may round them.
    """

    values: ClassVar[int] = 2
    name: str
    scale: float
    has_decay: bool = True
    is_delta: bool = False
    by_channel: bool = False
    normalizes: bool = False
    rounds_values: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return ("q", "k", "v", *("g",) * self.has_decay, *("beta",) * self.is_delta)

    @property
    def fills(self) -> tuple[float | None, ...]:
        """Zeros: a token without key, logarithm of a decay and ``beta`` changes no state."""
        return (0,) * len(self.inputs)

    @property
    def is_matrix(self) -> bool:
        """True for the delta rule."""
        return self.is_delta

    @property
    def most_tokens(self) -> int:
        """Few with a decay for each channel, which takes ``C * C * K`` numbers."""
        return 16 if self.by_channel else 64

    def state_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return ``(HV, K, V)``."""
        _, k, v = inputs[:3]
        return v.shape[2], k.shape[3], v.shape[3]

    def transition_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return ``(HV, K, K)`` of matrices; ``(HV, K, 1)`` or ``(HV, 1, 1)`` of decays."""
        heads, keys, _ = self.state_shape(*inputs)
        return (
            heads,
            keys if self.is_matrix or self.by_channel else 1,
            keys if self.is_matrix else 1,
        )

    def parts(self, *inputs: Tensor) -> Parts:
        """Return the map and the readout of each chunk, by head."""
        q, k, v, *others = inputs
        copies = v.shape[3] // k.shape[3]
        q, k = (self._rows(x).transpose(2, 3).repeat_interleave(copies, 2) for x in (q, k))
        v = v.transpose(2, 3)  # [n, B, HV, C, V]
        # `decay` is D, `since` the decay since the chunk began, `until` that until it ends.
        if self.has_decay:
            g = others[0].transpose(2, 3)  # [n, B, HV, C] or [n, B, HV, C, K]
            decay, since = decays(g if self.by_channel else g.unsqueeze(-1))
        else:
            # Ones where j <= i; tokens meet what precedes them undiminished.
            decay = k.new_ones(k.shape[-2], k.shape[-2]).tril().unsqueeze(-1)
            since = torch.ones_like(v[..., :1])
        until = decay[..., -1, :, :]
        scores = self._decayed(q, k, decay) * self.scale  # [n, B, HV, C, C], j <= i
        last = since[..., -1, :, None]  # the whole chunk's decay: [n, B, HV, 1 or K, 1]
        kept_keys = (k * until).mT
        if not self.is_delta:
            return Parts(last, kept_keys @ v, q * since * self.scale, scores @ v)
        beta = others[-1].transpose(2, 3).unsqueeze(-1)
        within = (self._decayed(k, k, decay) * beta).tril(-1)
        # Two right-hand sides of one triangular system: what is written, and what is taken away.
        solved = torch.linalg.solve_triangular(
            within, torch.cat([v * beta, k * since * beta], -1), upper=False, unitriangular=True
        )
        written, taken = solved.split([v.shape[-1], k.shape[-1]], -1)
        transition = torch.diag_embed(last.squeeze(-1).expand(*k.shape[:3], k.shape[-1]))
        return Parts(
            transition - kept_keys @ taken, kept_keys @ written,
            q * since * self.scale - scores @ taken, scores @ written,
        )  # fmt: skip

    def read(self, readout: Tensor, own: Tensor, state: Tensor) -> Tensor:
        """Return ``R S + r``, heads behind tokens again."""
        return (readout @ state + own).transpose(2, 3)

    def _rows(self, x: Tensor) -> Tensor:
        """Return rows of q or k, divided by their norms if that is asked for."""
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if self.normalizes else x

    def _decayed(self, x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
        """Return ``sum_c D_ijc x_ic y_jc``."""
        if self.by_channel:
            return torch.einsum("...ic,...jc,...ijc->...ij", x, y, decay)
        return (x @ y.mT) * decay.squeeze(-1)


@dataclass(frozen=True)
class SelectiveScan:
    """Kernel of Mamba's state space model (Gu and Dao, arXiv 2312.00752).

    For each channel ``h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t``, with ``N`` numbers, and
    ``y_t = C_t . h_t``. Channels of a group share ``B`` and ``C``, ``[n, B, C, G, N]``; all tokens
    share ``A``, ``[D, N]``.
    """

    name: ClassVar[str] = "selective_scan"
    inputs: ClassVar[tuple[str, ...]] = ("u", "delta", "B", "C", "A")
    fills: ClassVar[tuple[float | None, ...]] = (0, 0, 0, 0, None)
    values: ClassVar[int] = 0
    is_matrix: ClassVar[bool] = False
    most_tokens: ClassVar[int] = 16

    def state_shape(self, *inputs: Tensor) -> tuple[int, ...]:
        """Return ``(D, N)``."""
        return tuple(inputs[-1].shape)

    transition_shape = state_shape

    def parts(self, *inputs: Tensor) -> Parts:
        """Return the map of each chunk, and what each token reads of the state before it."""
        u, delta, projected, read, rates = inputs
        copies = u.shape[3] // read.shape[3]
        projected, read = (x.repeat_interleave(copies, 3) for x in (projected, read))
        step = delta.unsqueeze(-1)
        a, b = prefixes((step * rates).exp(), step * u.unsqueeze(-1) * projected)
        return Parts(a[:, :, -1], b[:, :, -1], a * read, (b * read).sum(-1))

    def read(self, readout: Tensor, own: Tensor, state: Tensor) -> Tensor:
        """Return ``C_t . h_t``."""
        return (readout * state.unsqueeze(2)).sum(-1) + own


#: The kernels there are, which graphs name.
AnyKernel = LinearAttention | LinearRecurrence | SelectiveScan


def prefixes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token of a chunk the map ``h -> a h + b`` of all that lead to it.

    Maps are composed by doubling: after step ``s`` each token has that of the ``2^s`` tokens that
    end with it (Hillis and Steele, "Data Parallel Algorithms", 1986).

    Args:
        a: Factors, ``[n, B, C, ...]``.
        b: What is added, likewise.
    """
    distance = 1
    while distance < a.shape[2]:
        (first_a, late_a), (first_b, late_b) = (
            x.split([distance, x.shape[2] - distance], 2) for x in (a, b)
        )
        early_a, early_b = a[:, :, :-distance], b[:, :, :-distance]
        # The first tokens have the maps of all that precedes them in the chunk already.
        a, b = (
            torch.cat([first_a, late_a * early_a], 2),
            torch.cat([first_b, late_a * early_b + late_b], 2),
        )
        distance *= 2
    return a, b


def decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays between the tokens of a chunk, and since it began.

    Args:
        g: Logarithms of the tokens' decays, ``[..., C, c]``.

    Returns:
        ``D [..., C, C, c]``, zeros where ``j > i``; and ``exp(g_1 + ... + g_i)``, ``[..., C, c]``.
    """
    size = g.shape[-2]
    i = torch.arange(size, device=g.device)
    is_later = (i[:, None] > i)[..., None]
    # Row i of column j sums g from j + 1 to i: a decay of 0, whose logarithm is -inf, is exact.
    sums = torch.where(is_later, g.unsqueeze(-2), 0).cumsum(-3)
    decay = torch.where((i[:, None] >= i)[..., None], sums, -torch.inf).exp()
    return decay, g.cumsum(-2).exp()
