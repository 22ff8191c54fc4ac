"""Time each kernel alone, for ``kernel="auto"``: ``python -m ring_torch bench --rates FILE``."""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ring_core import Mask, UnsupportedError
from ring_core.tools.bench import progress
from ring_torch.attention import ring_attention
from ring_torch.kernels import device_name
from ring_torch.kernels.measured import OPTIONS
from ring_torch.tools.bench import seconds_of
from ring_torch.tools.doctor import out_and_grads, working_kernels

ROUNDS, CALLS, HEADS, LENGTHS = 5, 4, (32, 8), {"cuda": 16384, "cpu": 1024}
CASES = (*((x, 128) for x in OPTIONS), *(("causal", x) for x in (64, 96, 192, 256)))


def renew(path: Path, length: int | None, cases: Sequence[tuple[str, int]] = CASES) -> None:
    """Time kernels that pass their test, forward and backward, and write the file.

    ``length`` is that of the sequence; ``None`` is 16,384 tokens on a GPU, and 1,024 on the CPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = LENGTHS[device] if length is None else length
    if length < 1:
        raise ValueError(f"--seq-len must be at least 1, got {length}")
    path.open("a").close()  # fail now, not after minutes, if it cannot be written
    rows, names = [], working_kernels(device)
    with progress(len(cases), "case") as bar:
        for option, dim in cases:
            times = _times(names, _call(option, dim, length, device), device)
            rows.append({"option": option, "head_dim": dim, "milliseconds": times})
            bar.update()
    path.write_text(json.dumps({"device": device_name(device), "rows": rows}, indent=1))


def _times(names: Sequence[str], call: Callable[..., object], device: str) -> dict[str, float]:
    """Return median milliseconds of a call with each kernel that can do it, the fastest first."""
    seconds: dict[str, list[float]] = {}
    for name in names:
        try:
            call(kernel=name)  # compiles
        except Exception as error:  # noqa: BLE001 - whatever it is, this one has no time
            if not isinstance(error, UnsupportedError):
                sys.stderr.write(f"no time of {name}: {str(error).strip().partition('\n')[0]}\n")
        else:
            seconds[name] = []
    for _ in range(ROUNDS):  # in turns, so that a machine that slows down slows all
        for name, samples in seconds.items():
            samples.append(seconds_of(partial(call, kernel=name), CALLS, device))
    medians = {name: float(f"{1e3 * statistics.median(x):.4g}") for name, x in seconds.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _call(option: str, dim: int, length: int, device: str) -> Callable[..., object]:
    """Return a function that runs a call forward and backward, with a ``kernel``."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    draw = partial(torch.randn, device=device, dtype=dtype)
    q, k, v, dout = (draw(1, length, n, dim) for n in (*HEADS, HEADS[1], HEADS[0]))
    document = max(1, min(1500, length // 3))
    ids = (torch.arange(length, device=device) // document).int()[None]
    options: dict[str, dict[str, Any]] = {
        "window": {"window": (length // 4, 0)}, "segment_ids": {"segment_ids": ids},
        "documents": {"cu_seqlens": (*range(0, length, document), length)},
        "predicate": {"mask": Mask(predicate=lambda i, j: (i >= j) & (j % 512 < 64))},
        "softcap": {"softcap": 20.0}, "dropout": {"dropout_p": 0.1, "dropout_seed": 7},
        "alibi": {"alibi_slopes": torch.rand(HEADS[0], device=device)},
    }  # fmt: skip
    if option == "bias":
        options["bias"] = {"bias": draw(1, 1, length, length)}
    kwargs = {"causal": option != "predicate"} | options.get(option, {})
    attend = partial(ring_attention, **kwargs)
    return lambda kernel: out_and_grads(partial(attend, kernel=kernel), q, k, v, dout)
