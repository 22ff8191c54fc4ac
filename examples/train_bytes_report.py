"""Report the runs of ``train_bytes.py``: losses, differences, speed, memory, a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ring_core import LayoutName, Mask, StrategyConfig, make_plan, ring_program

EARLY = 20  # steps in which float32 has to agree
LIMITS = {"float32": 1e-5, "float64": 1e-10}  # largest relative differences of losses
MIB = 2**20
LONG, LEARNED = 24, 1.0  # in this many steps the loss has to fall by this much


@dataclass(frozen=True)
class Config:
    """Settings of a training run; ``cp`` is how many processes share its sequences."""

    cp: int
    layout: LayoutName
    strategy: str
    seq_len: int
    window: int | None
    packed: bool
    steps: int
    dtype: str
    device: str
    layers: int
    dim: int
    lr: float
    seed: int
    checkpoint: str | None = None  # a folder that all processes share
    save_every: int = 10

    def __str__(self) -> str:
        return f"{self.cp} process{'es' if self.cp > 1 else ''}"


@dataclass(frozen=True)
class Run:
    """Results of a training run; memory, in bytes, is that of the process that used most."""

    losses: tuple[float, ...]
    seconds: float  # of its steps
    tokens: int  # read in them
    grown: int  # since before the model was built
    peak: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all processes together."""
        return self.tokens / self.seconds


def differences(ring: Run, single: Run) -> Tensor:
    """Return relative differences of the losses in the steps that both have, float64."""
    steps = min(len(ring.losses), len(single.losses))
    a, b = (torch.tensor(run.losses[:steps], dtype=torch.float64) for run in (ring, single))
    return (a / b - 1).abs()


def failures(config: Config, ring: Run, single: Run | None) -> Iterator[str]:
    """Yield what is wrong with the losses; a dtype without a limit is not checked."""
    if config.dtype in LIMITS and single is not None:
        checked = differences(ring, single)[: EARLY if config.dtype == "float32" else None]
        if not checked.max() <= LIMITS[config.dtype]:  # NaN is wrong too
            yield (f"{config.dtype}: losses of {config} and of one differ by {checked.max():.1e} in "
                   f"the first {len(checked)} steps, by more than {LIMITS[config.dtype]:.0e}")  # fmt: skip
    fall = ring.losses[0] - ring.losses[-1]
    if config.dtype in LIMITS and config.steps >= LONG and not fall >= LEARNED:
        yield f"{config.dtype}: the loss fell by {fall:.3f}, not by {LEARNED:g} or more"


def report(config: Config, ring: Run, single: Run | None) -> None:
    """Print the losses of the ring, its speed and memory, beside those of one process if it ran."""
    print(f"step  {config!s:>12}" + ("    1 process   difference" if single else ""))
    for step, loss in enumerate(ring.losses):
        other = f"{single.losses[step]:13.9f}{loss - single.losses[step]:13.1e}" if single else ""
        print(f"{step + 1:4}  {loss:12.9f}{other}")
    print(f"\nloss: from {ring.losses[0]:.3f} to {ring.losses[-1]:.3f} nats a byte\n")
    print(f"{'':13}  tokens/s  memory a process: training      in all")
    for name, run in ((config, ring), (replace(config, cp=1), single)):
        if run is not None:
            print(f"{name!s:13}{run.tokens_per_second:10,.0f}{run.grown / MIB:26,.0f} MiB"
                  f"{run.peak / MIB:8,.0f} MiB")  # fmt: skip
    if config.device == "cpu" and config.cp > 1:
        print(f"All processes share {os.cpu_count()} cores here, so a ring saves memory, not time.")
    if single is not None:
        by_step, early = differences(ring, single), min(EARLY, config.steps)
        print(f"largest relative difference: {by_step[:early].max():.1e} in the first {early} steps, "
              f"{by_step.max():.1e} in all {config.steps}")  # fmt: skip
    if config.dtype not in LIMITS:
        print(f"{config.dtype} is coarse: neither the difference nor the loss was checked")


def explain(ring: Sequence[Run], single: Sequence[Run]) -> None:
    """Print in numbers why float32 losses differ; runs are in float32, then in float64."""
    exact, rounding = differences(ring[1], single[1]), differences(single[0], single[1])
    by_step = differences(ring[0], single[0])[: len(exact)]
    print(f"In float64 ring and single process agree to {exact.max():.1e} over {len(exact)} steps: "
          f"what separates\nthem in float32, {by_step.max():.1e}, is rounding alone, which also separates "
          f"float32 from float64\non one process, by {rounding.max():.1e}.")  # fmt: skip


def draw(
    config: Config, mask: Mask, ring: Sequence[Run], single: Sequence[Run], path: Path
) -> None:
    """Draw losses and their differences on the left, memory and who works when on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    ways = {"c": ("contiguous", "ring"), "r": (config.layout, config.strategy)}
    own = "c" if config.layout == "contiguous" and config.strategy != "balanced" else "r"
    cells = f"lm;lc;{'d' if single else 'l'}{own}"  # l: loss, m: memory, d: difference, c, r: work
    axes = figure.subplot_mosaic(cells, width_ratios=(1.5, 1), height_ratios=(0.5, 1, 1))
    steps, loss = range(1, config.steps + 1), axes["l"]
    if single:
        loss.plot(steps, single[0].losses, "C1", linewidth=6, alpha=0.5, label="1 process")
    loss.plot(steps, ring[0].losses, "C0", label=f"{config}, {config.layout}")
    loss.set(title=f"loss in nats a byte, {config.dtype}", xlabel="training step")
    loss.legend(frameon=False)
    for ours, theirs, dtype in zip(ring, single, (config.dtype, "float64"), strict=False):
        by_step = differences(ours, theirs).clamp(min=1e-17)  # equal losses have no logarithm
        axes["d"].semilogy(steps[: len(by_step)], by_step, ".", label=dtype)
        axes["d"].set(title="relative difference; at the bottom: none", xlabel="training step")
        axes["d"].legend(frameon=False, loc="center right")
    shown = {str(config): ring[0]} | ({"1 process": single[0]} if single else {})
    bars = axes["m"].barh(
        list(shown), [run.grown / MIB for run in shown.values()], color=["C0", "C1"]
    )
    labels = [f"{run.grown / MIB:,.0f}" for run in shown.values()]
    axes["m"].bar_label(bars, labels, padding=3)
    axes["m"].margins(x=0.15)
    axes["m"].invert_yaxis()
    axes["m"].set(title="memory a process for training, MiB")
    for cell in {"c", own}:
        layout, strategy = ways[cell]
        plan = make_plan(mask, seq_len=config.seq_len, cp_size=config.cp, layout=layout)
        program = ring_program(plan, StrategyConfig(strategy).ring_strategy)
        work, share = axes[cell], program.work().T * (100 / program.work().mean())  # [rank, step]
        work.imshow(share, cmap="Blues", vmin=0, vmax=300, aspect="auto")
        for (rank, step), value in np.ndenumerate(share if share.size <= 256 else share[:0]):
            work.text(step, rank, f"{value:.0f}" if value else "idle", ha="center", va="center")
        work.set(xlabel="step of the ring", ylabel="rank")
        work.set(title=f"work with {layout}, {strategy}; 100 is the mean")
        work.locator_params(integer=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
