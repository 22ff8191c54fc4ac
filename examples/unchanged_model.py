"""Train an unchanged model of torch's own layers on a ring: the losses are those of one process.

:func:`ring_torch.replace_sdpa` runs the attention of a ``torch.nn.TransformerEncoder`` on the ring.
The model denoises patches of pictures. It is verified before the first step; a model that counts
positions itself would fail there::

    python examples/unchanged_model.py
    python examples/unchanged_model.py --cp 4 --strategy ulysses

The exit code is 0, 1 if a loss differs, or 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_torch import ContextParallel, replace_sdpa
from ring_torch.local import LocalRanks

WIDTH, PATCH, LIMIT = 32, 12, 1e-4
STRATEGIES = ("auto", "ring", "gather", "ulysses")


class Denoiser(nn.Module):
    """A transformer over patches whose code knows nothing of rings."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights in all processes
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.body = nn.TransformerEncoder(layer, num_layers=2)
        self.patches, self.places = nn.Linear(PATCH, WIDTH), nn.Embedding(length, WIDTH)
        self.head = nn.Linear(WIDTH, PATCH)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Return the noise in patches ``[B, T, 12]`` at positions ``[T]``."""
        x: Tensor = self.head(self.body(self.patches(patches) + self.places(positions)))
        return x


def train(_: int, length: int, steps: int, strategy: str) -> tuple[list[float], str]:
    """Train on this rank's patches; return the losses, and the report of verification."""
    cp, model = ContextParallel(), Denoiser(length)
    handle = replace_sdpa(model, cp, strategy=strategy)
    data = torch.Generator().manual_seed(1)  # the same pictures in all processes
    clean = torch.randn(2, length, PATCH, generator=data).cumsum(1) / length**0.5
    report = handle.verify(
        {"patches": clean, "positions": torch.arange(length)}, dims={"patches": 1, "positions": 0}
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _step in range(steps):
        noise = torch.randn(clean.shape, generator=data)
        found = model(cp.shard(clean + noise), cp.positions(length))
        # This rank's part of the mean over all patches.
        loss = (found - cp.shard(noise)).square().sum() / noise.numel()
        optimizer.zero_grad()
        loss.backward()
        cp.reduce_gradients(model)
        optimizer.step()
        total = loss.detach().clone()
        if cp.cp_size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses, f"{handle}\nverified: {report}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on a ring and on one process, and compare; returns the exit code."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="processes that share a picture")
    parser.add_argument("--seq-len", type=int, default=256, help="patches of a picture")
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    parser.add_argument("--strategy", default="auto", choices=STRATEGIES)
    options = parser.parse_args(argv)
    if options.cp < 1 or options.steps < 1:
        parser.error("--cp and --steps must be 1 or more")
    if options.seq_len < 1 or options.seq_len % (2 * options.cp):
        parser.error(f"--seq-len must be a multiple of {2 * options.cp}, got {options.seq_len}")
    with LocalRanks(options.cp) as ranks:
        losses, report = ranks.run(train, options.seq_len, options.steps, options.strategy)[0]
    print(report)
    expected, _ = train(0, options.seq_len, options.steps, "auto")
    for step, pair in enumerate(zip(losses, expected, strict=True), 1):
        print(f"step {step}: loss {pair[0]:.5f} on {options.cp} ranks, {pair[1]:.5f} on one")
    return int(any(abs(a - b) > LIMIT * abs(b) for a, b in zip(losses, expected, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
