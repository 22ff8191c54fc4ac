"""Command line ``python -m ring_torch``: shows what can run here, tests it, and times it.

``doctor`` shows versions, devices, and the kernels and transports that can run on them or why not,
and compares each kernel with a float64 reference. ``matrix`` shows which options each kernel
supports, ``explain`` what one call would do. ``bench`` times a ring against one device that
computes the whole sequence, and with ``--rates`` each kernel alone. ``preflight`` compares a
training step on shards with the same step whole.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
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
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.options import CallOptions
from ring_torch.tools import bench as _bench_torch, rates
from ring_torch.tools.doctor import diagnose, versions
from ring_torch.transports import transport_names
from ring_torch.verification.by_name import function_of, preflight_by_name


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
            dtype, has_grad = getattr(torch, case.dtype), bool(case.backward)
            q, k, v = (
                torch.empty(shape, dtype=dtype, device=device, requires_grad=has_grad)
                for shape in (query_shape, key_shape, key_shape)
            )
        options = CallOptions(**case.options)
        text = explained_call(Ranks(None, 0, case.ranks), case.layout, q, k, v, options)
    finally:
        ASSUMED_CAPABILITY.reset(assumed)
    return device if capability is None else f"{device} ({args.device})", text


def _preflight(args: argparse.Namespace, _given: set[str]) -> tuple[str, int]:
    """Run a preflight on the ranks of torchrun, or on ranks of this machine."""
    function_of(args.function)  # a wrong name is one line
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if gpus else "gloo")
        try:
            passed, text = preflight_by_name(dist.get_rank(), args.function)
        except Exception:  # noqa: BLE001 - of the user's code, with its lines
            return traceback.format_exc(), 1
        finally:
            dist.destroy_process_group()
        return text, int(not passed)
    if commands.is_refused("ring_torch", "preflight"):
        return "", 2
    size = args.ranks or gpus or 2
    try:
        with LocalRanks(size, cuda=size <= gpus, timeout=1800, patience=None) as ranks:
            passed, text = ranks.run(preflight_by_name, args.function)[0]
    except LocalRankError as error:  # with the user's lines
        return str(error), 1
    return text, int(not passed)


def _bench(args: argparse.Namespace, given: set[str]) -> Result | str:
    """Time a ring, or with ``--rates`` each kernel alone."""
    if args.rates is not None:
        if refused := [f"--{x.replace('_', '-')}" for x in sorted(given - {"rates", "seq_len"})]:
            raise ValueError(f"--rates takes --seq-len alone; leave out {', '.join(refused)}")
        rates.renew(args.rates, args.seq_len)
        return f"written to {args.rates}: {RATES_VARIABLE}={args.rates} uses it"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    case = timed_case(args, gpus or 2, on_cpu=not gpus)
    checks, times = _bench_torch.bench(case, args.seconds)
    where = "GPUs" if gpus else "processes of one thread each"
    return Result(case, where, checks, times, versions())


COMMANDS = (
    *commands.framework_commands(
        diagnose=diagnose, matrix=matrix, explained=_explained, timed=_bench,
        options={
            "explain": {
                "--backward": {
                    "action": argparse.BooleanOptionalAction, "default": True,
                    "help": "a backward follows, which is the default",
                },
                "--device": option(
                    "the device that ranks have, here or not; default: a GPU if there is one",
                    str.lower, choices=("cpu", *CAPABILITIES),
                ),
            },
            "bench": {
                "--transport": option(
                    "how bytes get from rank to rank; default: auto", choices=transport_names(),
                    default="auto",
                ),
                "--rates": option(
                    "time each kernel alone, at --seq-len tokens, and write the table to FILE",
                    Path, "FILE",
                ),
            },
        },
    ),
    commands.Command(
        "preflight", "Compare a training step on shards with the same step on whole sequences.",
        _preflight,
        {
            "function": option(
                "function that returns the arguments of ring_torch.preflight, as a dictionary",
                metavar="MODULE:FUNCTION",
            ),
            "--ranks": option("ranks, unless torchrun starts them; default: all GPUs, or 2", int, "P"),
        },
        "train:for_preflight",
    ),
)  # fmt: skip
