"""Time training steps of a whole model, of the widths of Qwen3-8B, on several GPUs.

Each rank holds a slice of the sequence and, by FSDP2, a shard of the weights, of their gradients
and of AdamW's state, all in float32; the model computes in bfloat16. A small model of the same code
is first compared with itself on one rank with torch's attention. Settings that one GPU can hold are
timed on one, too::

    python -m benchmarks.torch.model --gpus 4 --json model.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from benchmarks.common.report import Report, command
from benchmarks.torch.methods import check_gpus, described, sdpa
from ring_torch import ContextParallel, linear_cross_entropy
from ring_torch.local import LocalRanks

ROPE_BASE, LEARNING_RATE = 1e6, 1e-4
#: Tokens of the first step, which compiles kernels and is not timed.
SHORT = 1 << 14
TOLERANCE = 1e-2  # relative error of the loss in bfloat16; gradients get three times that
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder; those of Qwen3-8B unless they are given (its public config)."""

    layers: int
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 12_288
    vocabulary: int = 151_936


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained; if ``alone``, one GPU can hold it and is timed, too."""

    widths: Widths
    tokens: int
    recompute: bool
    alone: bool = False

    @property
    def name(self) -> str:
        """Name of its row, as ``36 layers 128k recomputed``."""
        layers, length = self.widths.layers, f"{self.tokens // 1024}k"
        return f"{layers} layers {length}{' recomputed' if self.recompute else ''}"

    @property
    def flops(self) -> float:
        """FLOPs of a step, recomputation not counted: 6 per weight and token, and attention's.

        Attention takes 4 per visible pair, head and column of the head dim in the forward, and 2.5
        times as many in the backward.
        """
        w = self.widths
        projections = w.dim * w.head_dim * (2 * w.heads + 2 * w.kv_heads)
        weights = w.layers * (projections + 3 * w.dim * w.mlp) + w.dim * w.vocabulary
        pairs = self.tokens * (self.tokens + 1) / 2
        return 6 * weights * self.tokens + 3.5 * 4 * pairs * w.heads * w.head_dim * w.layers


SETTINGS = (
    Setting(Widths(4), 1 << 17, recompute=False, alone=True),
    Setting(Widths(36), 1 << 17, recompute=True),
    Setting(Widths(4), 1 << 20, recompute=True),
    Setting(Widths(36), 1 << 20, recompute=True),
)
#: A small model for the comparison, which runs the same kernels as the others.
SMALL = Setting(Widths(2, 512, 4, 1, 128, 1024, 4096), 4096, recompute=True)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of columns by the angles of their positions (rotary position embedding)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """A layer: attention with normalized queries and keys, and a gated MLP."""

    def __init__(self, widths: Widths, attend: Attend) -> None:
        super().__init__()
        w, linear = widths, partial(nn.Linear, bias=False)
        self.head_dim, self.attend = w.head_dim, attend
        self.norm, self.mlp_norm = nn.RMSNorm(w.dim, eps=1e-6), nn.RMSNorm(w.dim, eps=1e-6)
        self.q_norm, self.k_norm = (nn.RMSNorm(w.head_dim, eps=1e-6) for _ in range(2))
        self.q = linear(w.dim, w.heads * w.head_dim)
        self.out = linear(w.heads * w.head_dim, w.dim)
        self.k, self.v = (linear(w.dim, w.kv_heads * w.head_dim) for _ in range(2))
        self.gate, self.up = (linear(w.dim, w.mlp) for _ in range(2))
        self.down = linear(w.mlp, w.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run on hidden states, ``[B, T_local, dim]``."""
        hidden = self.norm(x)
        q, k, v = (
            part(hidden).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v)
        )
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        hidden = self.mlp_norm(x)
        after: Tensor = x + self.down(silu(self.gate(hidden)) * self.up(hidden))
        return after


class Decoder(nn.Module):
    """A language model whose loss is that of this rank's tokens."""

    def __init__(self, setting: Setting, cp: ContextParallel, attend: Attend) -> None:
        super().__init__()
        w = setting.widths
        self.cp, self.recompute, self.half_dim = cp, setting.recompute, w.head_dim // 2
        self.embedding = nn.Embedding(w.vocabulary, w.dim)
        self.blocks = nn.ModuleList(Block(w, attend) for _ in range(w.layers))
        self.norm = nn.RMSNorm(w.dim, eps=1e-6)
        self.head = nn.Linear(w.dim, w.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Return this rank's part of the mean loss, from int64 ``[B, T_local]``."""
        x = self.embedding(tokens)
        places = torch.arange(self.half_dim, device=x.device, dtype=torch.float32)
        angles = positions[:, None, None] * ROPE_BASE ** (-places / self.half_dim)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return linear_cross_entropy(self.cp, self.norm(x), self.head.weight, labels)


def batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of the whole sequence, int64 ``[1, T]``, equal on all ranks.

    They are drawn by the CPU's generator.
    """
    generator = torch.Generator().manual_seed(1)
    size = (1, setting.tokens + 1)
    tokens = torch.randint(setting.widths.vocabulary, size, generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def sharded(setting: Setting, device: torch.device) -> tuple[Decoder, tuple[Tensor, ...]]:
    """Return a model in FSDP2's shards, and this rank's tokens, labels and positions."""
    cp = ContextParallel(layout="zigzag")
    with torch.device("meta"):
        model = Decoder(setting, cp, partial(cp.attention, causal=True))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():  # shards draw their part of the same numbers
        for name, weight in model.named_parameters():
            weight.fill_(1) if "norm" in name else weight.normal_(std=0.02)
    tokens, labels = (cp.shard(x, dim=1) for x in batch(setting, device))
    return model, (tokens, labels, cp.positions(setting.tokens, device=device))


def backward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run both passes, and return the loss of the whole sequence.

    FSDP divides gradients by the number of ranks, so the loss is multiplied by it.
    """
    loss: Tensor = model(*inputs)
    (loss * dist.get_world_size()).backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole


def check(_: int, setting: Setting, device_type: str) -> None:
    """Compare a model on all ranks with itself on one, in float32 with torch's attention.

    Raises:
        AssertionError: Loss or gradients differ.
    """
    device = torch.device(device_type)
    model, inputs = sharded(setting, device)
    loss = backward(model, inputs)
    shards: dict[str, Any] = dict(model.named_parameters())

    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with torch.device(device):
        whole = Decoder(setting, ContextParallel(group=alone), partial(sdpa, is_causal=True))
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            weight.copy_(shards[name].full_tensor())
    tokens, labels = batch(setting, device)
    expected: Tensor = whole(tokens, labels, torch.arange(setting.tokens, device=device))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=0)
    for name, weight in whole.named_parameters():
        assert weight.grad is not None
        error = (shards[name].grad.full_tensor() - weight.grad).norm() / weight.grad.norm()
        assert error < 3 * TOLERANCE, (name, float(error))


def timed(_: int, setting: Setting, steps: int) -> dict[str, Any]:
    """Train some steps; return a row with the seconds of each and the most memory of all ranks."""
    device, size = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
    model, inputs = sharded(setting, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    losses: list[float] = []

    def step(inputs: tuple[Tensor, ...]) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = backward(model, inputs)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss), 4))  # waits for the GPU
        dist.barrier()
        return time.perf_counter() - start

    short = replace(setting, tokens=min(setting.tokens, SHORT))
    cp = ContextParallel(layout="zigzag")
    tokens, labels = (cp.shard(x, dim=1) for x in batch(short, device))
    step((tokens, labels, cp.positions(short.tokens, device=device)))  # compiles kernels
    losses.clear()
    torch.cuda.reset_peak_memory_stats()
    taken = [step(inputs) for _ in range(steps)]
    most = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    rate = setting.flops / size / median(taken) / 1e12
    return {
        "setting": setting.name, "gpus": size, "seconds": round(median(taken), 3),
        "each": [round(x, 3) for x in taken], "tflops_per_gpu": round(rate, 1),
        "gib": round(float(most), 1), "losses": losses,
    }  # fmt: skip


def body(options: Any) -> int:
    """Time each setting, and write its row; return the exit code."""
    check_gpus(options.gpus)
    report = Report(options.json, described, keep=True)
    chosen = [setting for setting in SETTINGS if setting.name in options.settings]
    runs = [(options.gpus, chosen), (1, [x for x in chosen if x.alone and options.gpus > 1])]
    for size, settings in runs:
        left = [x for x in settings if not report.has(gpus=size, setting=x.name)]
        if left:
            with LocalRanks(size, cuda=True, patience=1800.0) as ranks:
                ranks.run(check, SMALL, "cuda")
                for setting in left:
                    report.add(ranks.run(timed, setting, options.steps)[0])
    return 0


def main(argv: list[str] | None = None) -> int:
    """Time the settings asked for; return the exit code."""
    names = [setting.name for setting in SETTINGS]
    arguments: dict[str, dict[str, Any]] = {
        "--gpus": {"type": int, "default": torch.cuda.device_count(), "help": "ranks"},
        "--steps": {"type": int, "default": 3, "help": "timed, after a short one"},
        "--settings": {"nargs": "+", "choices": names, "default": names, "metavar": "NAME"},
    }
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())
