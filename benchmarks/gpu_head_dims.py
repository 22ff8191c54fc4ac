"""Head dims on one GPU, beside flash-attn-4 by hand and cuDNN: ``nox -s bench_head_dims``.

Batch 1, causal, bfloat16. First out, dQ, dK and dV of each are compared with float32 attention at
1,024 tokens: what errs more than twice as much as the best of the others prints no time. Times are
CUDA events around calls that are queued, in rounds in which all take turns, another first in each;
a ratio is one of times in one round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ring_torch

GATE_LENGTH, ROUNDS, CALLS = 1024, 20, 6
OURS = "ring"
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


class Setting(NamedTuple):
    """Query and key heads, and head dims of Q and K and of V."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int

    @property
    def name(self) -> str:
        """For a row."""
        return f"{self.dim}/{self.v_dim}, {self.heads}/{self.kv_heads}"


SETTINGS = (
    Setting(32, 8, 128, 128), Setting(16, 16, 128, 128), Setting(16, 16, 192, 128),
    Setting(32, 8, 192, 128), Setting(32, 8, 256, 256), Setting(32, 8, 192, 192),
    Setting(32, 8, 160, 160), Setting(32, 8, 96, 96), Setting(32, 8, 80, 80),
)  # fmt: skip


def _ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_torch.ring_attention(q, k, v, causal=True)


def _fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = import_module("flash_attn.cute.interface").flash_attn_func(q, k, v, causal=True)[
        0
    ]
    return out


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=True
        ).transpose(1, 2)


METHODS: dict[str, Method] = {
    OURS: _ring, "fa4": _fa4, "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
}  # fmt: skip


def inputs(setting: Setting, length: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random q, k, v and the gradient of the output, rounded to bfloat16 in any dtype."""
    made = torch.Generator(device).manual_seed(length)
    heads, kv_heads, dim, v_dim = setting
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)]
    found = [
        torch.randn(1, length, *shape, generator=made, device=device).bfloat16().to(dtype)
        for shape in shapes
    ]
    return [x.requires_grad_(n < 3) for n, x in enumerate(found)]


def both(method: Method, x: Sequence[Tensor]) -> list[Tensor]:
    """``[out, dq, dk, dv]``."""
    out = method(*x[:3])
    return [out.detach(), *torch.autograd.grad(out, x[:3], x[3])]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition."""
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * q.shape[3] ** -0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum(
        "bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
    )


def errors(setting: Setting, device: str) -> dict[str, float | str]:
    """The largest root mean square error of out, dq, dk and dv; or why a method has none."""
    wide = inputs(setting, GATE_LENGTH, device, torch.float32)
    wanted = both(exact, wide)
    found: dict[str, float | str] = {}
    for name, method in METHODS.items():
        try:
            results = both(method, inputs(setting, GATE_LENGTH, device, torch.bfloat16))
        except Exception as error:  # noqa: BLE001 - a library's own; the row says so
            found[name] = str(error).splitlines()[0]
            continue
        pairs = zip(results, wanted, strict=True)
        found[name] = max(float((a.float() - b).square().mean().sqrt() / b.std()) for a, b in pairs)
    return found


def passing(wrong: dict[str, float | str]) -> list[str]:
    """Those that err at most twice as much as the best of the others."""
    numbers = {name: x for name, x in wrong.items() if not isinstance(x, str)}
    return [
        name for name, x in numbers.items()
        if x <= 2 * min((y for other, y in numbers.items() if other != name), default=x)
    ]  # fmt: skip


def rounds(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of a call, a list of all rounds each."""
    names = list(runs)
    took: dict[str, list[float]] = {name: [] for name in names}
    for run in runs.values():
        run()
    for n in range(ROUNDS):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                runs[name]()
            stop.record()
            stop.synchronize()
            took[name].append(start.elapsed_time(stop) / CALLS)
    return took


def measure(
    setting: Setting, length: int, names: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the forward and of both passes, by method."""
    x = inputs(setting, length, "cuda", torch.bfloat16)

    def forward(method: Method) -> Tensor:
        with torch.no_grad():
            return method(*x[:3])

    return {
        "forward": rounds({name: partial(forward, METHODS[name]) for name in names}),
        "both": rounds({name: partial(both, METHODS[name], x) for name in names}),
    }


def summary(times: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(times), statistics.median(times), max(times)]


def row_of(setting: Setting, wrong: dict[str, float | str], took: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a setting."""
    row: dict[str, Any] = {"setting": setting.name, "error": wrong, "milliseconds": {}, "ratio": {}}
    for way, times in took.items():
        row["milliseconds"][way] = {name: summary(x) for name, x in times.items()}
        row["ratio"][way] = {
            name: summary([a / b for a, b in zip(times[OURS], x, strict=True)])
            for name, x in times.items() if name != OURS and OURS in times
        }  # fmt: skip
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Errors first, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(argv)
    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "length": options.length,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        wrong = errors(setting, "cuda")
        took = measure(setting, options.length, passing(wrong))
        rows.append(row_of(setting, wrong, took))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps({"environment": environment, "rows": rows}, indent=1)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
