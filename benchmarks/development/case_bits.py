"""Run cases in one source tree and answer with digests: the process that ``same_bits`` starts.

It imports Ring from the tree that is in ``PYTHONPATH``, and of that tree else only how ranks share
a GPU. A case is a line of JSON on stdin. The answer has for each rank digests of its tensors and
the bytes that it sent, or the reason why the call was refused. The tensors are in the folder that
the first argument names.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_core import StrategyConfig
from ring_torch import ring_attention
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies import gather

HEADER = b"RING"  # how a header begins; its fields may differ between trees
PASSES = ("forward", "backward")


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


def inputs_of(case: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return this rank's tensors of a case, equal in every tree: leaves, and gradients of results.

    Shards are random, each rank's its own, so it does not matter which tokens a layout puts where.
    """
    ranks, (heads, kv_heads), (dim, v_dim) = case["ranks"], case["heads"], case["dims"]
    dtype, keys, batch = getattr(torch, case["dtype"]), case["lengths"][1], case.get("batch", 2)
    length, kv_length = (x // ranks for x in case["lengths"])
    own, shared = (
        torch.Generator().manual_seed(zlib.crc32(json.dumps([case["option"], x]).encode()))
        for x in (rank, "all")
    )

    def normal(*shape: int, generator: torch.Generator = own) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = {
        "q": normal(batch, length, heads, dim).to(dtype),
        "k": normal(batch, kv_length, kv_heads, dim).to(dtype),
        "v": normal(batch, kv_length, kv_heads, v_dim).to(dtype),
        "dout": normal(batch, length, heads, v_dim).to(dtype),
        "dlse": normal(batch, heads, length),
    }
    optional = {
        "bias": lambda: normal(batch, heads, length, keys).to(dtype),
        "bias of all heads": lambda: normal(1, 1, length, keys).to(dtype),
        "very negative bias": lambda: normal(1, 1, length, keys).sub(1e10).to(dtype),
        "sinks": lambda: normal(heads, generator=shared).to(dtype),
        "alibi_slopes": lambda: normal(heads, generator=shared).abs(),
        "segment_ids": lambda: torch.randint(
            -1, 3, (batch, length), generator=own, dtype=torch.int32
        ),
        "mask": lambda: torch.rand(length, keys, generator=own) < 0.7,
    }
    for name in case["tensors"]:
        made["bias" if "bias" in name else name] = optional[name]()
    made = {name: x.to(case.get("device", "cpu")) for name, x in made.items()}
    for name in ("q", "k", "v", "bias", "sinks"):
        if name in made and case.get("grad", True):
            made[name].requires_grad_()
    return made


def bits_of(rank: int, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run a case on this rank, keep its tensors in a folder and return digests of them.

    A digest is of bytes, shape and dtype. Calls after the first have tensors of their own and equal
    numbers; names of what they give end in their number. Keys and values of the last lie head by
    head. A call that Ring refuses is an answer: it does so before anything is sent. What a rank
    meets later ends all of them.
    """
    results: dict[str, Tensor] = {}
    with ExitStack() as stack:
        if case.get("head_groups", False):  # heads are cut into groups in long calls alone
            for limit in ("GROUP_FLOPS", "MIN_BYTES_PER_FLOP", "EARLY_RETURN_FLOPS"):
                stack.enter_context(patch.object(gather, limit, 1e-9))
        for n in range(count := case.get("calls", 1)):
            tensors = inputs_of(case, rank)
            for name in "kv" if 0 < n == count - 1 else "":
                x = tensors[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
                tensors[name] = x.requires_grad_(tensors[name].requires_grad)
            dout, dlse = tensors.pop("dout"), tensors.pop("dlse")
            named: dict[str, Any] = {**case["options"], **tensors}
            named |= {name: tuple(x) for name, x in named.items() if isinstance(x, list)}
            counters: list[Any] = [SentBytes() if dout.is_cpu else nullcontext() for _ in PASSES]
            try:
                with counters[0]:
                    outputs: Any = ring_attention(
                        **named, layout=case["layout"], kernel=case["kernel"],
                        strategy=StrategyConfig(**case["strategy"]), return_lse=case.get("returns_lse", True),
                    )  # fmt: skip
            except (ValueError, TypeError) as error:
                return {"refused": f"{type(error).__name__}: {error}"}
            out, *lse = outputs if isinstance(outputs, tuple) else (outputs,)
            leaves = {name: x for name, x in tensors.items() if x.requires_grad}
            ends = {out: dout, **(dict.fromkeys(lse, dlse) if case["lse_grad"] else {})}
            named = dict(zip(("out", "lse"), (x.detach() for x in (out, *lse)), strict=False))
            if leaves:
                with counters[1]:
                    grads = torch.autograd.grad([*ends], [*leaves.values()], [*ends.values()])
                named |= {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
            results |= {f"{name}{n + 1 if n else ''}": x.cpu() for name, x in named.items()}
    torch.save(results, path_of(folder, case["number"], rank))
    digests = {}
    for name, x in results.items():
        contents = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + contents)
        digests[name] = digest.hexdigest()
    sent = {name: getattr(x, "sent", 0) for name, x in zip(PASSES, counters, strict=True)}
    return {"digests": digests, "sent": sent}


def path_of(folder: str | Path, number: int, rank: int) -> Path:
    """Return the file of a rank's tensors of a case."""
    return Path(folder) / f"{number}-{rank}.pt"


def _share(rank: int) -> None:
    """Let ranks share the first GPU, as tests of the tree do."""
    sys.path.insert(0, "tests")
    import_module("backends.on_one_gpu").share(rank)


def main() -> None:
    """Answer cases until stdin ends; start new ranks after a call has failed."""
    ranks: LocalRanks | None = None
    for case in map(json.loads, sys.stdin):
        if ranks is None or len(ranks) != case["ranks"]:
            if ranks is not None:
                ranks.close()
            on_gpu = case.get("device") == "cuda"
            limits: Any = {"patience": 600.0} if on_gpu else {"timeout": 20.0, "patience": 120.0}
            ranks = LocalRanks(case["ranks"], **limits)
            if on_gpu:
                ranks.run(_share)
        try:
            answer: dict[str, Any] = {"ranks": ranks.run(bits_of, case, sys.argv[1])}
        except LocalRankError as error:
            answer = {"failed": str(error).strip().splitlines()[-1]}
            ranks.close()
            ranks = None
        print(f"answer: {json.dumps(answer)}", flush=True)
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    main()
