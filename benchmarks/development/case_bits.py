"""Run cases in one source tree and answer with digests: the process that ``same_bits`` starts.

It imports Ring from the tree that is in ``PYTHONPATH``, and nothing else of that tree: older trees
answer, too, from the first with ``StrategyConfig`` on. Cases are a line of JSON each on stdin. The
answer to one is a line on stdout that begins with :data:`ANSWER`: for each rank digests of its
tensors and the bytes that it sent, or the reason why the call was refused. The tensors are in the
folder that the first argument names.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_core import StrategyConfig
from ring_torch import ring_attention
from ring_torch.local import LocalRankError, LocalRanks

ANSWER = "bits: "
HEADER = b"RING"  # how a header begins; its fields may differ between trees


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
            self.sent += sum(x.nbytes for x in args[0] if not _is_header(x))
        elif name == "c10d::alltoall_base_":  # row n goes to rank n, and one row stays here
            sent, sizes, ranks = args[1], args[4], dist.get_world_size()
            own = sizes[dist.get_rank()] if sizes else len(sent) // ranks
            self.sent += sent.nbytes // max(len(sent), 1) * (len(sent) - own)
        return func(*args, **(kwargs or {}))


def _is_header(x: Tensor) -> bool:
    return x.dtype == torch.uint8 and x.numpy()[: len(HEADER)].tobytes() == HEADER


def inputs_of(case: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return this rank's tensors of a case, equal in every tree: leaves, and gradients of results.

    Shards are random, each rank's its own, so it does not matter which tokens a layout puts where.
    """
    ranks, (heads, kv_heads), (dim, v_dim) = case["ranks"], case["heads"], case["dims"]
    dtype, keys, batch = getattr(torch, case["dtype"]), case["lengths"][1], 2
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
    for name in made.keys() & {"q", "k", "v", "bias", "sinks"}:
        made[name].requires_grad_()
    return made


def results_of(rank: int, case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int]] | str:
    """Run a case on this rank; return its tensors and its bytes by pass, or why it is refused."""
    tensors = inputs_of(case, rank)
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse")
    options: dict[str, Any] = {**case["options"], **tensors}
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    forward, backward = SentBytes(), SentBytes()
    try:  # a refusal comes before anything is sent; what a rank meets later ends all of them
        with forward:
            out, lse = ring_attention(
                **options, layout=case["layout"], kernel=case["kernel"],
                strategy=StrategyConfig(**case["strategy"]), return_lse=True,
            )  # fmt: skip
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    ends = {out: dout, **({lse: dlse} if case["lse_grad"] else {})}
    with backward:
        grads = torch.autograd.grad([*ends], [*leaves.values()], [*ends.values()])
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    return results, {"forward": forward.sent, "backward": backward.sent}


def digest_of(x: Tensor) -> str:
    """Return a digest of a tensor's bytes, shape and dtype."""
    contents = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + contents).hexdigest()


def bits_of(rank: int, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run a case on this rank, keep its tensors in a folder and return their digests."""
    found = results_of(rank, case)
    if isinstance(found, str):
        return {"refused": found}
    tensors, sent = found
    torch.save(tensors, path_of(folder, case, rank))
    return {"digests": {name: digest_of(x) for name, x in tensors.items()}, "sent": sent}


def path_of(folder: str, case: dict[str, Any], rank: int) -> Path:
    """Return the file of a rank's tensors."""
    return Path(folder) / f"{case['number']}-{rank}.pt"


def answers(cases: list[dict[str, Any]], folder: str) -> Iterator[dict[str, Any]]:
    """Yield the answer to each case; start new ranks after a call has failed."""
    ranks: LocalRanks | None = None
    for case in cases:
        if ranks is None or len(ranks) != case["ranks"]:
            if ranks is not None:
                ranks.close()
            ranks = LocalRanks(case["ranks"], timeout=20.0, patience=120.0)
        try:
            yield {"ranks": ranks.run(bits_of, case, folder)}
        except LocalRankError as error:
            yield {"failed": str(error).strip().splitlines()[-1]}
            ranks.close()
            ranks = None
    if ranks is not None:
        ranks.close()


def main() -> None:
    """Answer all cases on stdin; the argument is the folder for tensors."""
    cases = [json.loads(line) for line in sys.stdin]
    for answer in answers(cases, sys.argv[1]):
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
