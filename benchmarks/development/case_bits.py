"""Run cases in one source tree on request: the process that ``same_bits`` starts.

It imports Ring from the tree that is in ``PYTHONPATH``. Cases are those of the tests beside this
file, and a rank runs them as it does there. A request is the name of a case, and whether ranks
share a GPU. The answer has for each rank the bytes that it sent, or why the call was refused. Its
results are in the folder that the first argument names.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ring_torch
from ring_core import Mask, StrategyConfig
from ring_torch.local import LocalRankError
from ring_torch.strategies import gather

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from backends.torch_ranks import Pools, run_rank
from cases import CASES, RINGS, Case

HEADER = b"RING"  # how a header begins; its fields may differ between trees
STRATEGIES: dict[str, str | StrategyConfig] = {
    "ring": "ring", "gather": "gather", "ulysses": "ulysses",
    "hybrid-ring": StrategyConfig("hybrid", ulysses_size=2, outer="ring"),
    "hybrid-gather": StrategyConfig("hybrid", ulysses_size=2, outer="gather"),
}  # fmt: skip
CAUSAL = Mask(causal=True)
LONG = Case("long", CAUSAL, "zigzag", 2, 4096)
#: What kernels of GPUs bind in the first call, and repeat.
ON_GPU: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"mask": Mask()}, "equal-heads": {"heads": (8, 8)},
    "two-sequences": {"batch": 2}, "padding": {"seq_len": 1900}, "sinks": {"sinks": 0},
    "segments": {"segments": "documents"}, "head-groups": {},
    "window": {"mask": Mask(causal=True, window=(300, 0))},
    "documents": {"mask": Mask(causal=True, cu_seqlens=(0, 400, 1100, 2048))},
}  # fmt: skip


class Run(NamedTuple):
    """A case with a kernel and a strategy, on CPUs or on a GPU that ranks share."""

    case: Case
    kernel: str
    strategy: str | StrategyConfig
    one_gpu: bool


@cache
def all_runs(*, one_gpu: bool) -> dict[str, Run]:
    """Return the runs by name: on 2 and 4 ranks or, with ``one_gpu``, on two that share it.

    There are no hybrids on one GPU: the inner call of one is another case.
    """
    # More heads than in tests, as some strategies split them.
    more = (replace(x, heads=(4 * x.heads[0], 4 * x.heads[1])) for x in (*CASES.values(), LONG))
    cases, strategies = [x for x in more if x.cp_size in (2, 4)], [*STRATEGIES]
    kernels: tuple[str, ...] = ("auto", "eager")
    if one_gpu:
        strategies, kernels, cases = strategies[:3], ("fa4", "cudnn", "triton"), []
        for (name, fields), ring in product(ON_GPU.items(), ("zigzag", "balanced")):
            layout, strategy = RINGS[ring]
            sizes = {"cp_size": 2, "seq_len": 2048, "heads": (8, 2), "dims": (64, 64)}
            usual: Any = {"mask": CAUSAL, "dtype": "bfloat16", "strategy": strategy, **sizes}
            cases.append(Case(f"{name}-{ring}", layout=layout, **usual | fields))
    return {
        f"{case.moved(strategy)}/{case.name}/{kernel}": Run(
            case, kernel, case.moved(STRATEGIES[strategy]), one_gpu
        )
        for case, strategy, kernel in product(cases, strategies, kernels)
    }


class SentBytes(TorchDispatchMode):
    """Counter of bytes that this rank sends by ``send`` and ``all_to_all_single``, without headers.

    They are counted at torch's operations, which every tree calls: its own counters may have
    changed, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the base has no types
        self.sent = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name  # noqa: SLF001 - an operator has no public name
        if name == "c10d::send":
            size, is_bytes = len(HEADER), torch.uint8
            headers = (
                x.dtype == is_bytes and x.numpy()[:size].tobytes() == HEADER for x in args[0]
            )
            self.sent += sum(x.nbytes * (not y) for x, y in zip(args[0], headers, strict=True))
        elif name == "c10d::alltoall_base_":  # row n goes to rank n, and one row stays here
            sent, sizes, ranks = args[1], args[4], dist.get_world_size()
            own = sizes[dist.get_rank()] if sizes else len(sent) // ranks
            self.sent += sent.nbytes // max(len(sent), 1) * (len(sent) - own)
        return func(*args, **(kwargs or {}))


def answer_of(rank: int, run: Run, folder: str) -> dict[str, Any]:
    """Run a case on this rank, keep its results in a folder, and return the bytes that it sent.

    On a GPU it runs three times, on tensors of its own with equal numbers; names of results end in
    the number. A call that Ring refuses is an answer: it does so before anything is sent. What a
    rank meets later ends all of them.
    """
    case, kernel, strategy, one_gpu = run
    # Some gradients are added up in any order: there the forwards alone are compared.
    is_loose = one_gpu and (kernel == "cudnn" or (kernel == "fa4" and case.segments is not None))
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        if case.name.startswith("head-groups"):  # heads are cut into groups in long calls alone
            for limit in ("GROUP_FLOPS", "MIN_BYTES_PER_FLOP", "EARLY_RETURN_FLOPS"):
                stack.enter_context(patch.object(gather, limit, 1e-9))
        if one_gpu and kernel == "fa4" and not is_loose:
            exact = partial(ring_torch.ring_attention, deterministic=True)
            stack.enter_context(patch.object(ring_torch, "ring_attention", exact))
        counter = SentBytes()
        if not one_gpu:
            stack.enter_context(counter)
        for n in range(3 if one_gpu else 1):
            try:
                arrays = run_rank(rank, case, (kernel, strategy, "auto"), None, one_gpu)
            except (ValueError, TypeError) as error:
                return {"refused": f"{type(error).__name__}: {error}"}
            kept = {name: x for name, x in arrays.items() if not (is_loose and name[0] == "d")}
            results |= {f"{name}{n + 1 if n else ''}": x for name, x in kept.items()}
    np.savez(path_of(folder, rank), **results)
    return {"sent": counter.sent}


def path_of(folder: str | Path, rank: int) -> Path:
    """Return the file of a rank's results of the case that has run last."""
    return Path(folder) / f"{rank}.npz"


def _share(rank: int) -> None:
    """Let ranks share the first GPU, as tests do."""
    import_module("backends.on_one_gpu").share(rank)


def main() -> None:
    """Answer requests until stdin ends; a call that fails ends its ranks."""
    pools = Pools()
    for name, one_gpu in map(json.loads, sys.stdin):
        run = all_runs(one_gpu=one_gpu)[name]
        size = run.case.cp_size
        try:
            if one_gpu and size not in pools:
                pools[size].run(_share)
            answer: dict[str, Any] = {"ranks": pools[size].run(answer_of, run, sys.argv[1])}
        except LocalRankError as error:
            answer = {"failed": str(error).strip().splitlines()[-1]}
            pools.pop(size).close()
        print(f"answer: {json.dumps(answer)}", flush=True)
    pools.close()


if __name__ == "__main__":
    main()
