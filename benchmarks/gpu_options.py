"""Masks and options on one GPU, beside FlexAttention: ``nox -s bench_options``.

Batch 1, 32 query heads, 8 key heads, head dim 128, bfloat16. First out, dQ, dK and dV of both are
compared with float32 attention at 1,024 tokens: what errs more than twice as much as FlexAttention
prints no time. Times are CUDA events, medians of rounds in which all take turns; a ratio is a
kernel's time over FlexAttention's for the same mask (dropout: over that of the causal mask, as
FlexAttention has none).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ring_torch
from ring_core import Mask

HEADS, KV_HEADS, DIM = 32, 8, 128
GATE_LENGTH = 1024
DOCUMENT = 1500
CAP = 20.0
STRIPE = 512
ROUNDS = 7
flex: Any = torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Setting:
    """A mask or option as both take it.

    Attributes:
        ours: Options of ``ring_attention``, made for a length.
        mask: FlexAttention's rule over positions; ``None`` shows all.
        score: What it does to a score, made for a length.
        can_gate: Whether results can be compared.
    """

    name: str
    ours: Callable[[int], dict[str, Any]]
    mask: Callable[[Any, Any, Any, Any], Any] | None
    score: Callable[[int], Callable[..., Any] | None] = field(default=lambda _: None)
    can_gate: bool = True


def _causal(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _documents(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i // DOCUMENT == j // DOCUMENT)


def _striped(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    return _rule(i, j)


def _rule(i: Any, j: Any) -> Any:
    return (i >= j) & ((i - j < STRIPE) | (j % STRIPE < 64))


def _slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") / 4)


def _alibi(_length: int) -> Callable[..., Any]:
    slopes = _slopes()
    return lambda score, _b, h, i, j: score - slopes[h] * (i - j).abs()


def _table(length: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(5)
    size = 1, 1, length, length
    return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)


def _biased(length: int) -> Callable[..., Any]:
    bias = _table(length)
    return lambda score, _b, _h, i, j: score + bias[0, 0, i, j]


def _capped(_length: int) -> Callable[..., Any]:
    return lambda score, _b, _h, _i, _j: CAP * torch.tanh(score / CAP)


def _ids(length: int) -> Tensor:
    return (torch.arange(length, device="cuda") // DOCUMENT).int()[None]


SETTINGS = (
    Setting("causal", lambda _: {"causal": True}, _causal),
    Setting("softcap", lambda _: {"causal": True, "softcap": CAP}, _causal, _capped),
    Setting("alibi", lambda _: {"causal": True, "alibi_slopes": _slopes()}, _causal, _alibi),
    Setting("segment_ids", lambda n: {"causal": True, "segment_ids": _ids(n)}, _documents),
    Setting("predicate", lambda _: {"mask": Mask(predicate=_rule)}, _striped),
    Setting("bias", lambda n: {"causal": True, "bias": _table(n)}, _causal, _biased),
    Setting(
        "dropout", lambda _: {"causal": True, "dropout_p": 0.1, "dropout_seed": 7}, _causal,
        can_gate=False,
    ),
)  # fmt: skip


def inputs(length: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random q, k, v and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(length)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = [
        torch.randn(1, length, h, DIM, generator=generator, device="cuda").to(torch.bfloat16)
        for h in heads
    ]
    *leaves, dout = (x.to(dtype) for x in made)
    return [*(x.requires_grad_() for x in leaves), dout]


def method_of(
    setting: Setting, length: int, kernel: str
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A kernel's attention of a setting, or FlexAttention's."""
    if kernel != "flex":
        options = setting.ours(length)
        return lambda q, k, v: ring_torch.ring_attention(q, k, v, kernel=kernel, **options)
    score = setting.score(length)
    blocks = None
    if setting.mask is not None:
        blocks = create_block_mask(setting.mask, None, None, length, length, device="cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
        out = flex(*heads_first, score_mod=score, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def both(run: Callable[..., Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """``[out, dq, dk, dv]``."""
    out = run(*x[:3])
    return [out, *torch.autograd.grad(out, x[:3], x[3])]


def errors(setting: Setting, kernels: Sequence[str]) -> dict[str, float]:
    """The largest root mean square error of out, dq, dk and dv, over FlexAttention's."""
    wide = inputs(GATE_LENGTH, torch.float32)
    exact = both(method_of(setting, GATE_LENGTH, "eager"), wide)
    found: dict[str, list[float]] = {}
    for kernel in ("flex", *kernels):
        results = both(method_of(setting, GATE_LENGTH, kernel), inputs(GATE_LENGTH))
        found[kernel] = [
            float((x.float() - y).square().mean().sqrt())
            for x, y in zip(results, exact, strict=True)
        ]
    flex_errors = found.pop("flex")
    return {
        kernel: max(x / y for x, y in zip(mine, flex_errors, strict=True))
        for kernel, mine in found.items()
    }


def milliseconds(runs: dict[Any, Callable[[], Any]], target: float = 40.0) -> dict[Any, float]:
    """Medians over rounds in which all take turns."""
    took: dict[Any, list[float]] = {key: [] for key in runs}
    calls = {}
    for key, run in runs.items():
        run()
        calls[key] = max(1, min(50, int(target / _once(run, 1))))
    for _ in range(ROUNDS):
        for key, run in runs.items():
            took[key].append(_once(run, calls[key]))
    return {key: statistics.median(times) for key, times in took.items()}


def _once(run: Callable[[], Any], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    took: float = start.elapsed_time(stop)
    return max(took / calls, 1e-3)


def measure(setting: Setting, length: int, kernels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Milliseconds of the forward and of both passes, by method."""
    x = inputs(length)
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for kernel in ("flex", *kernels):
        run = method_of(setting, length, kernel)

        def forward(run: Callable[..., Tensor] = run) -> Tensor:
            with torch.no_grad():
                return run(*x[:3])

        runs[kernel, "forward"] = forward
        runs[kernel, "both"] = partial(both, run, x)
    took = milliseconds(runs)
    return {
        kernel: {way: took[kernel, way] for way in ("forward", "both")}
        for kernel in ("flex", *kernels)
    }


def keep(path: Path, length: int, rows: list[dict[str, Any]]) -> None:
    """Write what was found so far."""
    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "length": length,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


def table(rows: Sequence[dict[str, Any]], kernel: str = "triton") -> str:
    """Milliseconds of a kernel and of FlexAttention, and their ratio, as Markdown."""
    lines = [
        "| | forward | FlexAttention | | both passes | FlexAttention | | rms error |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        took, wrong = row["milliseconds"], row["error over flex"].get(kernel)
        cells = [row["setting"]]
        for way in ("forward", "both"):
            ours, theirs = took[kernel][way], took["flex"][way]
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {'' if wrong is None else f'{wrong:.3f}'} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Errors first, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--kernels", nargs="+", default=["triton"])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--table", type=Path, help="print the rows of a JSON as Markdown and stop")
    options = parser.parse_args(argv)
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return 0
    rows: list[dict[str, Any]] = []
    for setting in (one for one in SETTINGS if one.name in options.settings):
        torch.compiler.reset()  # after a few masks it would stop compiling
        wrong = errors(setting, options.kernels) if setting.can_gate else {}
        kernels = [name for name in options.kernels if wrong.get(name, 0.0) <= 2.0]
        took = measure(setting, options.length, kernels)
        rows.append({"setting": setting.name, "error over flex": wrong, "milliseconds": took})
        if options.json:
            keep(options.json, options.length, rows)
        cells = "  ".join(
            f"{name} {took[name][way] / took['flex'][way]:5.2f} {way}"
            for name in kernels
            for way in ("forward", "both")
        )
        print(f"{setting.name:12} {cells}  {wrong}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
