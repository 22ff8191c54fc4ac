"""Time training steps of a whole model, of the widths of Qwen3-8B, on several GPUs.

Each rank holds a slice of the sequence and, by FSDP2, a shard of the weights, of their gradients
and of AdamW's state, all in float32; the model computes in bfloat16. A small model of the same code
is first compared with itself on one rank with torch's attention. Settings that one GPU can hold are
timed on one, too::

    python -m benchmarks.torch.model --gpus 4 --json model.json
"""

from __future__ import annotations

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

from benchmarks.common.harness import Report, command, selected
from benchmarks.torch import check_gpus, described
from benchmarks.torch.methods import sdpa
from ring_torch import ContextParallel, linear_cross_entropy
from ring_torch.local import LocalRanks

ROPE_BASE, LEARNING_RATE = 1e6, 1e-4
#: Tokens of the first step, which compiles kernels and is not timed.
SHORT = 1 << 14
TOLERANCE = 1e-2  # relative error of the loss in bfloat16; gradients get three times that
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """A decoder and how it is trained; if ``alone``, one GPU can hold it and is timed, too.

    Its widths are those of Qwen3-8B unless they are given (its public config).
    """

    layers: int
    tokens: int
    recompute: bool = True
    alone: bool = False
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 12_288
    vocabulary: int = 151_936

    @property
    def name(self) -> str:
        """Name of its row, as ``36 layers 128k recomputed``."""
        recomputed = " recomputed" if self.recompute else ""
        return f"{self.layers} layers {self.tokens // 1024}k{recomputed}"

    @property
    def flops(self) -> float:
        """FLOPs of a step, recomputation not counted: 6 per weight and token, and attention's.

        Attention takes 4 per visible pair, head and column of the head dim in the forward, and 2.5
        times as many in the backward.
        """
        projections = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        of_layer = projections + 3 * self.dim * self.mlp
        weights = self.layers * of_layer + self.dim * self.vocabulary
        pairs = self.tokens * (self.tokens + 1) / 2
        products = 4 * pairs * self.heads * self.head_dim * self.layers
        return 6 * weights * self.tokens + 3.5 * products


SETTINGS = (
    Setting(4, 1 << 17, recompute=False, alone=True),
    Setting(36, 1 << 17),
    Setting(4, 1 << 20),
    Setting(36, 1 << 20),
)
#: A small model for the comparison, which runs the same kernels as the others.
SMALL = Setting(2, 4096, dim=512, heads=4, kv_heads=1, mlp=1024, vocabulary=4096)


class Block(nn.Module):
    """A layer: attention with normalized queries and keys, and a gated MLP."""

    def __init__(self, w: Setting, attend: Attend) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
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
        # Pairs of columns turn by the angles of their positions (rotary position embedding).
        halves = (x.chunk(2, dim=-1) for x in (self.q_norm(q), self.k_norm(k)))
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1) for a, b in halves)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        hidden = self.mlp_norm(x)
        after: Tensor = x + self.down(silu(self.gate(hidden)) * self.up(hidden))
        return after


class Decoder(nn.Module):
    """A language model whose loss is that of this rank's tokens."""

    def __init__(self, w: Setting, cp: ContextParallel, attend: Attend) -> None:
        super().__init__()
        self.cp, self.recompute, self.half_dim = cp, w.recompute, w.head_dim // 2
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
            run = partial(checkpoint, block, use_reentrant=False) if self.recompute else block
            x = run(x, cos, sin)
        return linear_cross_entropy(self.cp, self.norm(x), self.head.weight, labels)


def batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of the whole sequence, int64 ``[1, T]``, equal on all ranks."""
    generator = torch.Generator().manual_seed(1)  # the CPU's
    size = (1, setting.tokens + 1)
    tokens = torch.randint(setting.vocabulary, size, generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def sharded(setting: Setting, device: torch.device) -> Decoder:
    """Return a model in FSDP2's shards."""
    cp = ContextParallel(layout="zigzag")
    with torch.device("meta"):
        model = Decoder(setting, cp, partial(cp.attention, causal=True))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.blocks, model):
        fully_shard(block, mp_policy=mixed)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():  # shards draw their part of the same numbers
        for name, weight in model.named_parameters():
            weight.fill_(1) if "norm" in name else weight.normal_(std=0.02)
    return model


def backward(model: Decoder, setting: Setting, device: torch.device) -> Callable[[], Tensor]:
    """Return a run of both passes on this rank's tokens, and of the whole sequence's loss.

    FSDP divides gradients by the number of ranks, so the loss is multiplied by it.
    """
    tokens, labels = (model.cp.shard(x, dim=1) for x in batch(setting, device))
    positions = model.cp.positions(setting.tokens, device=device)

    def run() -> Tensor:
        loss: Tensor = model(tokens, labels, positions)
        (loss * dist.get_world_size()).backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole

    return run


def check(_: int, setting: Setting, device_type: str) -> None:
    """Compare a model on all ranks with itself on one, in float32 with torch's attention.

    Raises:
        AssertionError: Loss or gradients differ.
    """
    device = torch.device(device_type)
    model = sharded(setting, device)
    loss = backward(model, setting, device)()
    weights: dict[str, Any] = dict(model.named_parameters())
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with torch.device(device):
        whole = Decoder(setting, ContextParallel(group=alone), partial(sdpa, is_causal=True))
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            weight.copy_(weights[name].full_tensor())
    expected: Tensor = whole(*batch(setting, device), torch.arange(setting.tokens, device=device))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=0)
    for name, weight in whole.named_parameters():
        assert weight.grad is not None
        error = (weights[name].grad.full_tensor() - weight.grad).norm() / weight.grad.norm()
        assert error < 3 * TOLERANCE, (name, float(error))


def timed(_: int, setting: Setting, steps: int) -> dict[str, Any]:
    """Train some steps; return a row with the seconds of each and the most memory of all ranks."""
    device, size = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
    model = sharded(setting, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses: list[float] = []

    def step(run: Callable[[], Tensor]) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = run()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss), 4))  # waits for the GPU
        dist.barrier()
        return time.perf_counter() - start

    # This compiles kernels.
    step(backward(model, replace(setting, tokens=min(setting.tokens, SHORT)), device))
    losses.clear()
    run = backward(model, setting, device)
    torch.cuda.reset_peak_memory_stats()
    taken = [step(run) for _ in range(steps)]
    most = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    rate = setting.flops / size / median(taken) / 1e12
    return {
        "setting": setting.name, "gpus": size, "seconds": round(median(taken), 3),
        "each": [round(x, 3) for x in taken], "tflops_per_gpu": round(rate, 1),
        "gib": round(float(most), 1), "losses": losses,
    }  # fmt: skip


@command(
    __doc__,
    {
        "--gpus": torch.cuda.device_count(),
        "--steps": 3,  # timed, after a short one
        "--settings": {"nargs": "+", "metavar": "NAME"},
    },
)
def main(options: Any) -> int:
    """Time each setting, and write its row; return the exit code."""
    check_gpus(options.gpus)
    report = Report(options, described(), keep=True)
    chosen = selected(SETTINGS, options.settings)
    runs = [(options.gpus, chosen), (1, [x for x in chosen if x.alone and options.gpus > 1])]
    for size, settings in runs:
        left = [x for x in settings if not report.has(gpus=size, setting=x.name)]
        if left:
            with LocalRanks(size, cuda=True, patience=1800.0) as ranks:
                ranks.run(check, SMALL, "cuda")
                for setting in left:
                    report.add(ranks.run(timed, setting, options.steps)[0])
    return 0
