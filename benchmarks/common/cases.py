"""Settings and rows to time, in bfloat16: masks and lengths over GPUs, options on one GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ring_core import Mask, make_plan, ring_program

K = 1024
HEADS, KV_HEADS, DIM = 32, 8, 128
# Over GPUs: tokens of the comparison with float32, and the largest error of a right method.
SCALING_GATE, WRONG = 2048, 0.1
# For rows on one GPU: tokens of the comparison with float32, tokens that are timed, rounds.
OPTIONS_GATE, OPTIONS_LENGTH, ROUNDS = 1024, 16 * K, 20
OURS = "ring"
PASSES = {"forward": 1.0, "both": 3.5}  # FLOPs, in units of the forward's
CAUSAL, FULL = Mask(causal=True), Mask()
Shapes = tuple[tuple[int, int], ...]
PADDED = {40: 64, 72: 96, 100: 128, 136: 160, 176: 192, 200: 256, 250: 256}  # head dims, padded


def _shapes(heads: int, kv_heads: int, dim: int, v_dim: int) -> Shapes:
    return (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)


@dataclass(frozen=True)
class Setting:
    """A sequence to attend over, split over several GPUs.

    ``dim`` is the head dim of q and k; that of v is ``v_dim``, or the same if ``None``.
    """

    seq_len: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    mask: str = "causal"
    dim: int = DIM
    batch: int = 1
    sinks: bool = False
    v_dim: int | None = None

    @property
    def name(self) -> str:
        """Name of its rows: ``causal 16k 24/24 of 64 x2`` is 2 sequences, 24 heads, head dim 64."""
        dims = f"{self.dim}/{self.v_dim}" if self.v_dim else f"{self.dim}"
        return (
            f"{self.mask} {self.seq_len // K}k {self.heads}/{self.kv_heads}"
            f"{f' of {dims}' if dims != f'{DIM}' else ''}"
            f"{f' x{self.batch}' if self.batch > 1 else ''}{' sinks' if self.sinks else ''}"
        )

    @property
    def shapes(self) -> Shapes:
        """Heads and head dim of q, k, v and the gradient of the output."""
        return _shapes(self.heads, self.kv_heads, self.dim, self.v_dim or self.dim)

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of the forward (two matrix products), and of forward + backward (five more).

        Scores (computed twice), dQ and dK cost the head dim of q; out, dV and dP that of v.
        """
        plan = make_plan(mask_of(self.mask, self.seq_len), seq_len=self.seq_len, cp_size=1)
        pairs = int(ring_program(plan).work().sum())  # visible ones
        dim, v_dim = self.dim, self.v_dim or self.dim
        multiplied = {"forward": dim + v_dim, "both": 4 * dim + 3 * v_dim}
        return {key: 2 * pairs * self.batch * self.heads * n for key, n in multiplied.items()}

    def rates(self, times: dict[str, Any], shares: int) -> dict[str, Any]:
        """Return times of both passes with the TFLOP/s of each of the ``shares`` GPUs."""
        return {
            key: times[key] | {"tflops": flops / shares / times[key]["ms"] / 1e9}
            for key, flops in self.flops.items()
        }


SETTINGS = (
    *(Setting(n * K) for n in (8, 32, 128, 512, 1024)),
    *(Setting(n * K, kv_heads=32) for n in (32, 128)),
    Setting(128 * K, mask="full"),
    Setting(512 * K, mask="window"),
    Setting(128 * K, mask="documents"),
)
#: Settings of the JAX benchmark over several GPUs.
JAX_SETTINGS = (
    *(Setting(n * K) for n in (8, 32, 128, 256, 512)),
    *(Setting(n * K, kv_heads=32) for n in (32, 128)),
    Setting(128 * K, mask="window"),
    Setting(128 * K, mask="documents"),
)
#: Settings so short that the host's time shows: a causal one and a layer of gpt-oss with a window;
#: the last two have as many tokens a GPU on two GPUs as the first two have on four.
SHORT_SETTINGS = tuple(
    setting
    for n in (8, 4)
    for setting in (
        Setting(n * K),
        Setting(4 * n * K, 64, 8, mask="window 128", dim=64, sinks=True),
    )
)
#: Settings of the table of every strategy. Those with the same kernels are neighbours, as a process
#: compiles a kernel once; those that a run may miss stand last.
STRATEGY_SETTINGS = (
    *(Setting(n * K) for n in (32, 8, 128)), *(Setting(n * K, kv_heads=32) for n in (32, 128)),
    Setting(16 * K, 24, 24, dim=64, batch=2), Setting(128 * K, mask="documents"),
    Setting(128 * K, mask="window"), Setting(32 * K, 40, 8), Setting(32 * K, 16, 1),
    Setting(32 * K, 16, 16, dim=192, v_dim=128),
)  # fmt: skip


def windowed(keys: int) -> Mask:
    """Return a causal mask in which a query sees the last ``keys`` keys, its own included."""
    return Mask(causal=True, window=(keys - 1, 0))


def mask_of(name: str, seq_len: int) -> Mask:
    """Return the mask of a setting at a length."""
    if name == "documents":
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(4096) - 0.5, 1.0, 4 * seq_len // 4096).astype(int) + 1
        ends = np.cumsum(lengths)
        return Mask(causal=True, cu_seqlens=(0, *ends[ends < seq_len].tolist(), seq_len))
    window = windowed(4097 if seq_len > SCALING_GATE else 301)
    return {"causal": CAUSAL, "full": FULL, "window": window, "window 128": windowed(128)}[name]


class Rival(NamedTuple):
    """A method to compare ours with, at another head dim or with another option if given."""

    name: str
    method: str
    dim: int | None = None
    option: str | None = None


FA4, CUDNN, FLEX, TRITON = (Rival(name, name) for name in ("fa4", "cudnn", "flex", "triton"))
WITHOUT = Rival("ring, causal", "ring", option="causal")  # ours without the option
PLAIN = (FA4, CUDNN)
MASKED = (FA4, FLEX)
CUDNN_PADDED = Rival("cudnn, padded", "cudnn padded")


@dataclass(frozen=True)
class Row:
    """A row of the table of options: causal attention on one GPU with a head dim, mask or option.

    Attributes:
        goal: Our time over that of the best other should be at most this; ``None`` for no goal.
        sharpness: Factor on queries where results are compared, so that scores are large enough for
            the option to matter.
    """

    name: str
    rivals: tuple[Rival, ...]
    option: str = "causal"
    dim: int = DIM
    v_dim: int = DIM
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    goal: float | None = None
    sharpness: float = 1.0

    @property
    def entrants(self) -> tuple[Rival, ...]:
        """Methods of the row: ours, then the rivals."""
        return (Rival(OURS, "ring"), *self.rivals)

    @property
    def shapes(self) -> Shapes:
        """Heads and head dim of q, k, v and the gradient of the output."""
        return _shapes(self.heads, self.kv_heads, self.dim, self.v_dim)

    def of(self, rival: Rival) -> Row:
        """Return this row with the head dim and option that a rival runs it with."""
        return replace(
            self, option=rival.option or self.option, dim=rival.dim or self.dim,
            v_dim=rival.dim or self.v_dim,
        )  # fmt: skip


ROWS = (
    Row("causal 32/8", (*PLAIN, FLEX), goal=1.02),
    Row("causal 16/16", PLAIN, heads=16, kv_heads=16, goal=1.02),
    Row("192/128, 16/16", (*PLAIN, CUDNN_PADDED), dim=192, heads=16, kv_heads=16, goal=1.03),
    Row("192/128, 32/8", (*PLAIN, CUDNN_PADDED), dim=192, goal=1.03),
    Row("256", PLAIN, dim=256, v_dim=256, goal=1.03),
    Row("192", PLAIN, dim=192, v_dim=192, goal=1.03),
    Row("160", PLAIN, dim=160, v_dim=160, goal=1.03),
    Row("112", (*PLAIN, Rival("fa4 at 128", "fa4", dim=128)), dim=112, v_dim=112),
    Row("96", PLAIN, dim=96, v_dim=96),
    Row("80", (*PLAIN, Rival("fa4 at 96", "fa4", dim=96)), dim=80, v_dim=80, goal=1.1),
    Row("64", PLAIN, dim=64, v_dim=64),
    Row("softcap", MASKED, "softcap", sharpness=3.0, goal=1.1),
    Row("alibi", (FLEX,), "alibi", goal=1.03),
    Row("segment_ids", (FLEX,), "segment_ids", goal=1.1),
    Row("cu_seqlens", MASKED, "cu_seqlens"),
    Row("predicate", (FLEX,), "predicate", goal=1.05),
    Row("sinks", (FA4, Rival("ring without sinks", "ring", option="causal")), "sinks", goal=1.05),
    Row("window", MASKED, "window"),
    Row("bias", (CUDNN, FLEX), "bias"),
    Row("dropout", (CUDNN, Rival("flash", "flash")), "dropout"),
    *(
        Row(f"{dim}, zeros added", (Rival(f"ring at {more}", "ring", dim=more),), dim=dim, v_dim=dim,
            goal=1.3)
        for dim, more in PADDED.items()
    ),
)  # fmt: skip

#: Options that change scores or hide them: the JAX benchmark has them beside ours without them.
_SCORED = ("softcap", "alibi", "cu_seqlens", "segment_ids", "dropout")
#: Options and head dims that the JAX benchmark has not.
_NOT_IN_JAX = ("causal 16/16", "192", "112", "predicate", "sinks", "176, zeros added")


def _in_jax(row: Row) -> Row:
    rivals = (
        (WITHOUT,) if row.name in _SCORED else (CUDNN,) if row.dim in PADDED else (TRITON, CUDNN)
    )
    return replace(row, rivals=rivals, goal=None)


JAX_ROWS = tuple(_in_jax(row) for row in ROWS if row.name not in _NOT_IN_JAX)
