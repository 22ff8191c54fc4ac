"""Time a repeated call on the host: Ring beside flash-attention's own function, on several GPUs.

Each rank holds 512 tokens: the GPU has nearly nothing to do, and what is timed is how long the host
takes until it has queued a call. All ways take turns; a row's ratio is to the function called by
hand on one rank's tokens. Results are compared with dense attention first::

    python -m benchmarks.development.host_time --gpus 4 --json host.json
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import report
from benchmarks.torch.processors import bind, cpu_name
from ring_core import Layout
from ring_torch import ring_attention
from ring_torch.local import LocalRanks

TOKENS, HEADS, KV_HEADS, DIM = 512, 16, 8, 128
LAYOUT: Final = "zigzag"
#: How each way calls :func:`ring_torch.ring_attention`.
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ulysses": {"strategy": "ulysses"},
    "ring": {"strategy": "ring", "transport": "p2p"},
}
WARM_UP, ROUNDS, AT_ONCE = 30, 15, 8  # calls, rounds, calls of a round
TOLERANCE = 2e-2  # of bfloat16 results, against float32 attention
Call = Callable[[], object]


def _fa4() -> Callable[..., Tensor]:
    """Return flash-attn-4's public function.

    Raises:
        ValueError: It is not installed, or does not load.
    """
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        raise ValueError(
            f"the column 'by hand' is flash-attn-4's own function, and it does not load: {error}. "
            f"Instead: pip install flash-attn-4, or name another one by --by-hand sdpa"
        ) from error

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=True)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return attend


def _sdpa() -> Callable[..., Tensor]:
    """Return torch's SDPA, with whichever kernel it takes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


#: Functions that are called by hand, beside Ring.
BY_HAND = {"fa4": _fa4, "sdpa": _sdpa}


def check(rank: int, size: int) -> None:
    """Compare every way with dense attention over the whole sequence.

    Raises:
        AssertionError: Results differ.
    """
    torch.manual_seed(0)
    length = size * TOKENS
    whole = [
        torch.randn(1, length, heads, DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    q, k, v = (x.float().transpose(1, 2) for x in whole)
    dense = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    positions = torch.as_tensor(Layout(LAYOUT, length, size).positions(rank), device="cuda")
    own_q, own_k, own_v = (x[:, positions] for x in whole)
    for name, options in WAYS.items():
        out: Tensor = ring_attention(own_q, own_k, own_v, causal=True, layout=LAYOUT, **options)
        torch.testing.assert_close(
            out.float(), dense[:, positions], atol=TOLERANCE, rtol=TOLERANCE, msg=name
        )


def microseconds(call: Call) -> float:
    """Return the host's microseconds per call, over a few calls that the GPU can queue."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(AT_ONCE):
        call()
    taken = (time.perf_counter() - start) / AT_ONCE
    torch.cuda.synchronize()
    return taken * 1e6


def python_calls(call: Call) -> int:
    """Return how many Python functions a call runs in this thread."""
    count = 0

    def note(_frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    call()
    sys.setprofile(None)
    return count


def rows(rank: int, size: int, by_hand: str) -> list[dict[str, Any]]:
    """Time all ways in turns; return a row for each, of this rank."""
    attend = BY_HAND[by_hand]()
    check(rank, size)
    q, k, v = (
        torch.randn(1, TOKENS, heads, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout = torch.randn_like(q)
    forwards: dict[str, Callable[[], Tensor]] = {"by hand": partial(attend, q, k, v)}
    for name, options in WAYS.items():
        forwards[name] = partial(
            ring_attention, q, k, v, causal=True, layout=LAYOUT, return_lse=False, **options
        )

    def both(forward: Callable[[], Tensor]) -> object:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    calls: dict[tuple[str, str], Call] = {}
    for name, forward in forwards.items():
        calls[name, "forward"] = forward
        calls[name, "forward + backward"] = partial(both, forward)
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    gc.disable()
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            taken[key].append(microseconds(call))
    gc.enable()
    return [
        {
            "way": name, "pass": passes, "us": round(median(times)),
            "least_us": round(min(times)), "most_us": round(max(times)),
            "ratio": round(median(times) / median(taken["by hand", passes]), 2),
            "python_calls": python_calls(calls[name, passes]),
        }
        for (name, passes), times in taken.items()
    ]  # fmt: skip


def described(gpus: int, processors: int) -> dict[str, Any]:
    """Return the environment: GPUs, libraries, and the processors that queue the calls."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return report.environment(
        gpu, "flash-attn-4", "triton", torch=torch.__version__, cuda=torch.version.cuda, gpus=gpus,
        cpu=cpu_name(), processors=processors or "not bound",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Time all ways, and write their rows; return the exit code."""
    parser = report.parser_of((__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="ranks")
    parser.add_argument("--bind", action="store_true", help="each process on its own processors")
    parser.add_argument("--by-hand", choices=BY_HAND, default="fa4", help="called beside Ring")
    options = parser.parse_args(argv)
    if options.table:
        return report.show(options.table)
    if not 2 <= options.gpus <= torch.cuda.device_count():
        parser.error(f"--gpus {options.gpus}: there are {torch.cuda.device_count()}, 2 are needed")
    try:
        BY_HAND[options.by_hand]()
    except ValueError as error:
        parser.error(str(error))
    with LocalRanks(options.gpus, cuda=True, patience=300.0) as ranks:
        processors = ranks.run(bind)[0] if options.bind else 0
        measured = ranks.run(rows, options.gpus, options.by_hand)[0]
    for row in measured:
        print(row)
    if options.json:
        environment = described(options.gpus, processors) | {"by_hand": options.by_hand}
        report.write(options.json, {"environment": environment, "rows": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
