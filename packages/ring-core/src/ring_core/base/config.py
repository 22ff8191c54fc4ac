"""Records of kernels and strategies: their capabilities, a call's request, and its choices.

Capabilities drive refusals, their tests, the doctor and the support matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ring_core.base.arguments import check_choice, check_flag, check_size, numbers_as_python

Band = Literal["full", "causal", "any"]


@dataclass(frozen=True)
class Capabilities:
    """The masks, options, dtypes and devices that a kernel supports.

    >>> from ring_core import Capabilities
    >>> mine = Capabilities("mine", devices=("cpu",), bands="any", softcap=True)

    Attributes:
        name: The kernel's name, as in ``kernel=``.
        devices: Device types, e.g. ``("cpu", "cuda")``; empty means any.
        dtypes: Names of input dtypes, e.g. ``("float32", "bfloat16")``; empty means any.
        max_head_dim: Largest head dim of Q, K or V; ``None`` is unlimited.
        mixed_head_dims: The head dim of V may differ from that of Q and K.
        bands: The bands ``lo <= i - j <= hi`` of a launch that it takes: ``full`` rectangles only,
            also square ``causal`` ones, or ``any``.
        documents: One launch may span several documents (``cu_seqlens``, ``chunk_size``).
        segment_ids, predicate, softcap, bias, alibi, dropout, deterministic: The options of the
            same names.
        deterministic_head_dim: Largest head dim with ``deterministic``; ``None`` is unlimited.
        any_scale: ``softmax_scale`` may be 0 or less; a kernel that scales what it has masked, or
            the maximum of a row, cannot do that.
        lse_grad: The gradient of ``lse`` reaches Q and K.
        backward: The kernel has a backward.
        exact_nan: A NaN or infinity reaches only rows that see it; without, also others of its
            tile, up to 255 positions away.
        block_sizes: ``KernelConfig.block_q`` and ``block_k`` may be chosen.
        fused_backward: ``KernelConfig.fused_backward`` may be chosen.
    """

    name: str
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_head_dim: int | None = None
    mixed_head_dims: bool = False
    bands: Band = "full"
    documents: bool = False
    segment_ids: bool = False
    predicate: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    dropout: bool = False
    deterministic: bool = False
    deterministic_head_dim: int | None = None
    any_scale: bool = False
    lse_grad: bool = False
    backward: bool = True
    exact_nan: bool = True
    block_sizes: bool = False
    fused_backward: bool = False


#: Every mask and option, on any device, in any dtype: what a kernel of our own starts from.
EVERYTHING = Capabilities(
    "everything", mixed_head_dims=True, bands="any", documents=True, segment_ids=True,
    predicate=True, softcap=True, bias=True, alibi=True, dropout=True, deterministic=True,
    any_scale=True, lse_grad=True, block_sizes=True, fused_backward=True,
)  # fmt: skip


@numbers_as_python
@dataclass(frozen=True)
class KernelConfig:
    """A kernel and its settings, for ``kernel=``; ``None`` leaves a setting to the kernel.

    >>> from ring_core import KernelConfig
    >>> KernelConfig("triton", block_q=64, block_k=64)
    KernelConfig(name='triton', block_q=64, block_k=64, fused_backward=None)

    Attributes:
        name: As in ``kernel=``; ``auto`` lets the call choose among kernels that take the settings.
        block_q, block_k: Query rows and key columns per block.
        fused_backward: One backward kernel for dQ, dK and dV rather than two.

    Raises:
        ValueError: A name that is empty, a block size that is no positive integer, or a
            ``fused_backward`` that is no bool.
    """

    name: str = "auto"
    block_q: int | None = None
    block_k: int | None = None
    fused_backward: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be that of a kernel, or 'auto', got {self.name!r}")
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if size is not None and (
                not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31
            ):
                raise ValueError(
                    f"{name} must be an integer >= 1 and < 2**31, or None, got {size!r}"
                )
        if self.fused_backward is not None:
            check_flag("fused_backward", self.fused_backward)


def kernel_config(kernel: str | KernelConfig, names: Sequence[str]) -> KernelConfig:
    """Return a call's ``kernel=`` as a :class:`KernelConfig`.

    Args:
        kernel: The argument, a name or a :class:`KernelConfig`.
        names: The names that the backend knows, ``auto`` among them.

    Raises:
        ValueError: None of these names, or neither a name nor a :class:`KernelConfig`.
    """
    config = KernelConfig(kernel) if isinstance(kernel, str) else kernel
    if not isinstance(config, KernelConfig):
        raise ValueError(f"kernel must be a name or a KernelConfig, got {type(kernel).__name__}")
    check_choice("kernel", config.name, names)
    return config


@dataclass(frozen=True)
class Request:
    """The requirements of one call on a kernel: static values only, equal on every rank.

    Flags are named as in :class:`Capabilities`, but for ``grad``, which asks for a ``backward``,
    and compared with those by :func:`ring_core.refusals`. ``batch``, ``q_heads`` and ``kv_heads``
    are sizes of the call on one device.
    ``shared_bias_bytes`` are the bytes that a device holds of a bias with one head for all query
    heads, or 0.
    """

    device: str
    dtype: str
    head_dim: int
    v_head_dim: int
    segment_ids: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    dropout: bool = False
    deterministic: bool = False
    any_scale: bool = False
    grad: bool = False
    lse_grad: bool = False
    block_sizes: bool = False
    fused_backward: bool = False
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    shared_bias_bytes: int = 0


OPTION_WORDS = {
    "segment_ids": "segment_ids",
    "softcap": "softcap",
    "bias": "bias",
    "alibi": "alibi_slopes",
    "dropout": "dropout_p",
    "deterministic": "deterministic=True",
    "any_scale": "softmax_scale <= 0",
    "lse_grad": "gradient through lse",
    "block_sizes": "choice of block_q and block_k",
    "fused_backward": "choice of fused_backward",
}


StrategyName = Literal["ring", "balanced", "gather", "ulysses", "hybrid"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)

RingStrategy = Literal["ring", "balanced"]  # strategies in which K/V go round in steps
RING_STRATEGIES: tuple[RingStrategy, ...] = get_args(RingStrategy)

OuterName = Literal["ring", "gather"]  # strategies between groups of ranks that split heads
OUTER_NAMES: tuple[OuterName, ...] = get_args(OuterName)


@dataclass(frozen=True)
class StrategyTraits:
    """Facts about a strategy that calls need before it is looked up in a framework's table.

    Attributes:
        name: The name that ``strategy=`` takes.
        settings: Fields of :class:`StrategyConfig` that it has.
        ring: Ring strategy whose steps stand for it when a kernel or its time is chosen: its own,
            or for strategies that have no steps of a ring the plain ring.
    """

    name: str
    settings: tuple[str, ...] = ()
    ring: RingStrategy = "ring"


#: Strategies with other traits than the defaults, which any other strategy has.
STRATEGY_TRAITS = (
    StrategyTraits("balanced", ring="balanced"),
    StrategyTraits("hybrid", settings=("ulysses_size", "outer")),
)


@numbers_as_python
@dataclass(frozen=True)
class StrategyConfig:
    """A strategy and its parameters, for ``strategy=`` where a name alone does not say enough.

    >>> from ring_core import StrategyConfig
    >>> StrategyConfig("hybrid", ulysses_size=8, outer="gather").outer
    'gather'

    Args:
        name: ``auto``, ``ring`` (K/V go round the ranks, a step at a time), ``balanced`` (a ring
            over contiguous shards whose idle ranks compute for busy ones), ``gather`` (a rank
            fetches all the K/V shards that its queries see), ``ulysses`` (ranks exchange tokens
            for heads) or ``hybrid`` (groups of consecutive ranks exchange tokens for heads, and the
            ranks with the same heads go on by another strategy).
        ulysses_size: Of ``hybrid``: number of ranks of a group. ``None`` takes the most that divide
            the ranks of a host, and are no more than query heads.
        outer: Of ``hybrid``: the strategy between groups, ``ring`` or ``gather``.

    Raises:
        ValueError: A name that is empty, a field that means nothing for it, or a value that a field
            cannot have. Whether there is such a strategy is checked by the call.
    """

    name: str
    ulysses_size: int | None = None
    outer: OuterName = "ring"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be that of a strategy, or 'auto', got {self.name!r}")
        for setting in fields(self)[1:]:
            value, default = getattr(self, setting.name), setting.default
            is_given = type(value) is not type(default) or value != default
            if is_given and setting.name not in self._traits.settings:
                raise ValueError(f"strategy {self.name!r} has no {setting.name}; leave it out")
        if self.ulysses_size is not None:
            size = check_size("ulysses_size", self.ulysses_size)
            object.__setattr__(self, "ulysses_size", size)  # the dataclass is frozen
        check_choice("outer", self.outer, OUTER_NAMES)

    @property
    def ring_strategy(self) -> RingStrategy:
        """Ring strategy whose steps stand for this one when a kernel or its time is chosen.

        Strategies that have no steps of a ring are judged by those of a plain ring.
        """
        return self._traits.ring

    @property
    def _traits(self) -> StrategyTraits:
        """The strategy's traits; the defaults if it is not listed."""
        listed = (x for x in STRATEGY_TRAITS if x.name == self.name)
        return next(listed, StrategyTraits(self.name))


def strategy_config(
    strategy: str | StrategyConfig, names: Sequence[str] = ("auto", *STRATEGIES)
) -> StrategyConfig:
    """Return a call's ``strategy=`` as a :class:`StrategyConfig`.

    Args:
        strategy: As given.
        names: Those that a backend takes: it may have strategies of its own.

    Raises:
        ValueError: None of these names, or neither a name nor a :class:`StrategyConfig`.
    """
    config = StrategyConfig(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(config, StrategyConfig):
        raise ValueError(
            f"strategy must be a name or a StrategyConfig, got {type(strategy).__name__}"
        )
    check_choice("strategy name", config.name, names)
    return config
