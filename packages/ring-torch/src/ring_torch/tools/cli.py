"""Command line ``python -m ring_torch``: shows what can run here, tests it, and times it.

``doctor`` shows versions, devices, and the kernels and transports that can run on them or why not,
and compares each kernel with a float64 reference. ``matrix`` shows which options each kernel
supports, ``explain`` what one call would do. ``bench`` times a ring against one device that
computes the whole sequence, and with ``--rates`` each kernel alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_core.tools import commands
from ring_core.tools.bench import Result
from ring_core.tools.case import Case, option, timed_case
from ring_core.tripwire import CAPABILITIES
from ring_torch.attention import explained_call
from ring_torch.capture import ASSUMED_CAPABILITY
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import matrix
from ring_torch.kernels.measured import RATES_VARIABLE
from ring_torch.local import LocalRankError
from ring_torch.options import CallOptions
from ring_torch.tools import bench as _bench_torch, rates
from ring_torch.tools.doctor import diagnose, ring_checks, versions, working_kernels
from ring_torch.transports import transport_names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code; see :func:`ring_core.tools.commands.main`."""
    purpose = "Exact context-parallel attention for PyTorch."
    return commands.main("ring_torch", purpose, COMMANDS, argv, failures=(LocalRankError,))


def _explained(case: Case, args: argparse.Namespace) -> tuple[str, str]:
    """Return the name of the device, and what rank 0 would do.

    Tensors have shapes alone, so their device need not be here. What is asked of a GPU that is not
    is its compute capability.
    """
    capability = CAPABILITIES.get(args.device)
    if args.device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        device = "cpu" if capability is None else "cuda"
    assumed = ASSUMED_CAPABILITY.set(capability)
    try:
        query_shape, key_shape = case.local_shapes
        with FakeTensorMode():
            q, k, v = (
                torch.empty(
                    shape,
                    dtype=getattr(torch, case.dtype),
                    device=device,
                    requires_grad=bool(case.backward),
                )
                for shape in (query_shape, key_shape, key_shape)
            )
        options = CallOptions(**case.options)
        text = explained_call(Ranks(None, 0, case.ranks), case.layout, q, k, v, options)
    finally:
        ASSUMED_CAPABILITY.reset(assumed)
    return device if capability is None else f"{device} ({args.device})", text


def _bench(args: argparse.Namespace, given: set[str]) -> Result | str:
    """Time a ring, or with ``--rates`` each kernel alone."""
    if args.rates is not None:
        if refused := [f"--{x.replace('_', '-')}" for x in sorted(given - {"rates", "seq_len"})]:
            raise ValueError(f"--rates takes --seq-len alone; leave out {', '.join(refused)}")
        rates.renew(args.rates, args.seq_len, working_kernels)
        return f"written to {args.rates}: {RATES_VARIABLE}={args.rates} uses it"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    case = timed_case(args, gpus or 2, on_cpu=not gpus)
    checks, times = _bench_torch.bench(case, args.seconds, ring_checks)
    where = "GPUs" if gpus else "processes of one thread each"
    return Result(case, where, checks, times, versions())


COMMANDS = commands.framework_commands(
    diagnose=diagnose,
    matrix=matrix,
    explained=_explained,
    timed=_bench,
    options={
        "explain": {
            "--backward": {
                "action": argparse.BooleanOptionalAction,
                "default": True,
                "help": "a backward follows, which is the default",
            },
            "--device": option(
                "the device that ranks have, here or not; default: a GPU if there is one",
                str.lower,
                choices=("cpu", *CAPABILITIES),
            ),
        },
        "bench": {
            "--transport": option(
                "how bytes get from rank to rank; default: auto",
                choices=transport_names(),
                default="auto",
            ),
            "--rates": option(
                "time each kernel alone, at --seq-len tokens, and write the table to FILE",
                Path,
                "FILE",
            ),
        },
    },
)
