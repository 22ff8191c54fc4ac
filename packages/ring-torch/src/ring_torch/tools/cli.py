"""Command line ``python -m ring_torch``: shows what can run here, tests it, and times it.

``doctor`` shows versions, devices, and the kernels and transports that can run on them or why not,
and compares each kernel with a float64 reference. ``matrix`` shows which options each kernel
supports, ``explain`` what one call would do. ``bench`` times a ring against one device that
computes the whole sequence, and with ``--rates`` each kernel alone, for the table from which
``kernel="auto"`` chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_core.tools import bench, doctor, explain
from ring_core.tools.commands import framework_commands, is_refused
from ring_core.tools.sizes import add_each
from ring_core.tripwire import CAPABILITIES
from ring_torch.attention import explained_call
from ring_torch.capture import ASSUMED_CAPABILITY
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import matrix
from ring_torch.kernels.measured import RATES_VARIABLE
from ring_torch.local import LocalRankError
from ring_torch.options import CallOptions
from ring_torch.tools import bench as _bench_torch, rates
from ring_torch.tools.doctor import diagnose, ring_checks, shown, versions, working_kernels
from ring_torch.transports import transport_names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    It is 0 on success, 1 if something fails or nothing can run, and 2 for a user's mistake.

    Args:
        argv: Arguments without the program's name; ``None`` for those of the process.
    """
    parser, explain_parser, bench_parser = framework_commands("ring_torch", "PyTorch")
    explain_parser.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, default=True,
        help="a backward follows, which is the default",
    )  # fmt: skip
    explain_parser.add_argument(
        "--device", choices=("cpu", *CAPABILITIES), type=str.lower,
        help="the device that ranks have, here or not; default: a GPU if there is one",
    )  # fmt: skip
    add_each(bench_parser, {
        "--transport": {
            "choices": transport_names(), "default": "auto",
            "help": "how bytes get from rank to rank; default: auto",
        },
        "--check-rounds": {
            "type": int, "metavar": "N",
            "help": "rounds of 100 calls with RING_CHECK=every:100, and as many without, in turns; "
            f"default: {_bench_torch.CHECK_ROUNDS} if these take no longer than --seconds, on a CPU 0",
        },
        "--rates": {
            "type": Path, "metavar": "FILE",
            "help": "time each kernel alone, at --seq-len tokens, and write the table to FILE",
        },
    })  # fmt: skip
    args = parser.parse_args(argv)
    if args.command == "explain":
        return _explain(args)
    if args.command != "matrix" and is_refused("ring_torch", args.command):
        return 2
    if args.command == "bench":
        if args.rates is None:
            return _bench(args)
        if refused := [
            f"--{name.replace('_', '-')}" for name, value in vars(args).items()
            if name not in ("command", "rates", "seq_len") and value != bench_parser.get_default(name)
        ]:  # fmt: skip
            bench_parser.error(f"--rates takes --seq-len alone; leave out {', '.join(refused)}")
        return _time_kernels(args.rates, args.seq_len)
    if args.command == "matrix":
        print(matrix())
        return 0
    diagnosis = diagnose()
    print(doctor.report(diagnosis, shown, as_json=args.json))
    return 0 if diagnosis.healthy else 1


def _explain(args: argparse.Namespace) -> int:
    """Run ``explain``: print what rank 0 would do; return the exit code.

    Tensors have shapes alone, so their device need not be here. What is asked of a GPU that is not
    is its compute capability.
    """
    capability = CAPABILITIES.get(args.device)
    if args.device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        device = "cpu" if capability is None else "cuda"
    named = "" if capability is None else f" ({args.device})"
    assumed = ASSUMED_CAPABILITY.set(capability)
    try:
        case = explain.case_of(args)
        dtype, needs_grad = getattr(torch, case.dtype), case.backward
        query_shape, key_shape = case.local_shapes
        with FakeTensorMode():
            q, k, v = (
                torch.empty(shape, dtype=dtype, device=device, requires_grad=needs_grad)
                for shape in (query_shape, key_shape, key_shape)
            )
        ranks = Ranks(None, 0, case.cp_size)
        options = CallOptions(**case.options)
        text = explained_call(ranks, case.layout, q, k, v, options)
    except (ValueError, RuntimeError) as error:
        print(f"ring_torch: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        ASSUMED_CAPABILITY.reset(assumed)
    print(f"{case.describe(device + named)}\n{text}")
    return 0


def _time_kernels(path: Path, length: int | None) -> int:
    """Run ``bench --rates``: time each kernel alone, and write the table; return the exit code.

    ``length`` is the number of tokens that kernels are timed on, ``None`` for the default.
    """
    try:
        rates.renew(path, length, working_kernels)
    except (ValueError, OSError) as error:
        print(f"ring_torch: error: {error}", file=sys.stderr)
        return 2
    print(f"written to {path}: {RATES_VARIABLE}={path} uses it")
    return 0


def _bench(args: argparse.Namespace) -> int:
    """Run ``bench`` without ``--rates``: time a ring, and return the exit code."""
    try:
        setting = bench.setting_of(args, _bench_torch.defaults())
        checks, results, sparse = _bench_torch.bench(
            setting, args.transport, args.seconds, args.check_rounds, ring_checks
        )
    except (ValueError, ImportError, LocalRankError) as error:
        print(f"ring_torch: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, LocalRankError) else 2
    if not results:
        print("\n".join(doctor.shown_checks("the ring to be timed", checks, healthy=False)))
        return 1
    hardware = "GPUs" if torch.cuda.is_available() else "processes of one thread each"
    print(bench.report(setting, hardware, results, versions(), as_json=args.json, sparse=sparse))
    if failed := [check for check in checks if not check.passed]:
        shown = doctor.shown_checks("the ring to be timed", failed, healthy=False)
        print("\n".join(shown), file=sys.stderr)
        return 1
    return 0
