"""Comparison of objects between ranks, bit for bit: what has to be the same, and is not."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ring_core import RankMismatchError, UnsupportedError
from ring_core.base.arguments import check_size, numbers_as_python
from ring_torch.capture import as_stored, untraced
from ring_torch.checking.watch import shared_findings
from ring_torch.comm.groups import default_device
from ring_torch.comm.handshake import GuardedPass
from ring_torch.comm.ranks import Ranks, run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.recurrent.arguments import SplitsSequences, sharding_of
from ring_torch.sharding import agree_on_call

#: Values that are equal if their texts are.
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, np.generic)
_WORDS = 1 << 20  # words of a tensor that are hashed at a time
#: Odd numbers, of more than 32 bits, by which words and their places are multiplied.
_PLACE, _WORD, _LAST = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Entry(NamedTuple):
    """Tensor or value of an object, with where it is.

    Attributes:
        facts: Where it is, its dtype and shape; of a value itself.
        tensor: The tensor, of a ``DTensor`` this rank's shard; ``None`` if other ranks of the
            group have other shards, or it is no tensor.
    """

    facts: str
    tensor: Tensor | None


@untraced
@numbers_as_python
def check_equal(cp: SplitsSequences, x: Any, *, what: str, every: int = 1) -> None:
    """Check that an object is the same on all ranks of the group, bit for bit.

    Weights that differ between the ranks of a ring, or batches, make wrong results without any
    sign. One digest of 24 bytes is exchanged, and nothing else if all is equal. NaN is equal to
    itself; 0 and -0 differ. Dtypes, shapes, names and structure have to be equal, too. Shards of
    ``fully_shard`` and of tensor parallelism are compared with the same shards on the other ranks
    of this group; those of a mesh that contains this group differ by themselves, and only their
    facts are compared.

    Args:
        cp: A ``ContextParallel``.
        x: A tensor, a module (parameters and buffers), an optimizer (its ``state_dict()``), a NumPy
            array, a number or text; or a mapping, list, tuple or dataclass of these.
        what: Name of it, for messages; equal on all ranks.
        every: Compare in each ``every``-th call with this name, the first one included.

    Raises:
        RankMismatchError: On all ranks: which entry differs first, and how.
        ValueError: It has parts that cannot be compared.

    Example::

        cp.check_equal(model, what="weights")
        for batch in loader:
            cp.check_equal(batch, what="batch", every=100)
    """
    if not isinstance(what, str):
        raise ValueError(f"what must be a text, got {type(what).__name__}")
    check_size("every", every)
    ranks = sharding_of(cp).ranks
    number, state = ranks.next_call(), ranks.state
    entries = list(_entries(x, what, ranks))
    state.equal_calls[what] = calls = state.equal_calls.get(what, -1) + 1
    if ranks.size == 1 or calls % every:
        return
    device = default_device(ranks)
    signature = CallSignature.of({"what": what, "every": every}, "check_equal")
    agree_on_call(ranks, number, signature, device)
    with GuardedPass(ranks, number, signature, device), torch.no_grad():
        facts = torch.tensor([_digest(x.facts) for x in entries], dtype=torch.int64, device=device)
        words = facts.new_zeros(len(entries))
        for n, entry in enumerate(entries):
            if entry.tensor is not None:
                words[n] = digest_of(entry.tensor).to(device)
        total = torch.stack([facts.new_tensor(len(entries)), digest_of(facts), digest_of(words)])
        by_rank = _gathered(ranks, total)
        if bool((by_rank == by_rank[0]).all()):
            return
        finding = _finding(ranks, entries, facts, words, by_rank)
        text = shared_findings(ranks, [finding] if finding else [], device)
    raise RankMismatchError(
        f"check_equal: {what} differs between ranks. {text}. All ranks of a group need the same: load "
        f"or seed it alike, or broadcast rank 0's (torch.distributed.broadcast)"
    )


def digest_of(x: Tensor) -> Tensor:
    """Return a digest of a tensor's bits, int64: each word counts by its place."""
    words = as_stored(x.detach()).contiguous().view(-1).view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -len(words) % 8)).view(torch.int64)
    total = words.new_zeros(())
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        # Products wrap around, so the sum is the same in any order.
        place = torch.arange(start + 1, start + 1 + len(part), device=x.device) * _PLACE
        mixed = (part ^ place) * _WORD
        mixed = (mixed ^ (mixed >> 29)) * _LAST
        total = total + (mixed ^ (mixed >> 32)).sum()
    return total


def _entries(x: Any, path: str, ranks: Ranks) -> Iterator[Entry]:
    """Yield the tensors and values of an object, in one order on all ranks."""
    if isinstance(x, Tensor | np.ndarray):
        tensor = x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
        yield _tensor_entry(tensor, path, ranks)
    elif isinstance(x, _VALUES):
        yield Entry(f"{path} = {x!r}", None)
    elif (parts := _parts(x)) is not None:
        yield Entry(f"{path}, a {type(x).__name__} of {len(parts)}", None)
        for name, part in parts.items():
            yield from _entries(part, f"{path}{name}", ranks)
    else:
        raise ValueError(
            f"{path} is a {type(x).__name__}, which has no bits to compare. Instead: give tensors, "
            f"modules, optimizers, arrays, numbers and texts, or mappings and lists of them"
        )


def _parts(x: Any) -> dict[str, Any] | None:
    """Return the parts of an object that has some, by how they are reached from it."""
    parts: dict[str, Any] | None = None
    match x:
        case nn.Module():
            parts = {f".{name}": y for name, y in (*x.named_parameters(), *x.named_buffers())}
        case torch.optim.Optimizer():
            parts = {f"[{key!r}]": part for key, part in x.state_dict().items()}
        case torch.Generator():
            parts = {".get_state()": x.get_state()}
        case torch.device():
            parts = {".type": x.type}  # numbers of devices differ by rank
        case Mapping():
            parts = {f"[{key!r}]": x[key] for key in sorted(x, key=repr)}
        case list() | tuple():
            parts = {f"[{n}]": part for n, part in enumerate(x)}
        case _ if dataclasses.is_dataclass(x) and not isinstance(x, type):
            parts = {f".{field.name}": getattr(x, field.name) for field in dataclasses.fields(x)}
    return parts


def _tensor_entry(x: Tensor, path: str, ranks: Ranks) -> Entry:
    """Return the entry of a tensor."""
    facts = f"{path}: {str(x.dtype).removeprefix('torch.')} {[*x.shape]}"
    if isinstance(x, DTensor):
        mesh, members = x.device_mesh, {*dist.get_process_group_ranks(ranks.group)}
        facts = f"{facts}, placed {x.placements}"
        for dim, placement in enumerate(x.placements):
            # Ranks that differ in this dimension of the mesh alone: other shards, if any is of cp.
            beside = {*dist.get_process_group_ranks(mesh.get_group(dim))}
            if isinstance(placement, Shard) and len(beside & members) > 1:
                return Entry(facts, None)
        x = x.to_local()
        facts = f"{facts}, here {[*x.shape]}"
    if x.is_meta or x.layout != torch.strided or x.is_quantized:
        raise UnsupportedError(
            f"{path} is a {x.layout} tensor on {x.device.type}, whose bits cannot be compared. Instead: "
            f"give a dense tensor that has been allocated"
        )
    return Entry(facts, x)


def _finding(
    ranks: Ranks, entries: list[Entry], facts: Tensor, words: Tensor, totals: Tensor
) -> str | None:
    """Return how this rank's first entry that differs is unlike the others'; ``None`` on rank 0.

    Where facts differ every rank says its own.
    """
    most = int(totals[:, 0].max())
    padded = torch.stack([torch.nn.functional.pad(x, (0, most - len(x))) for x in (facts, words)])
    # The same on every rank: where two differ, each differs from one of them.
    differs = (_gathered(ranks, padded) != padded).any(dim=0).int()  # [2, entries]
    if bool(differs[0].any()):
        first = int(differs[0].argmax())
        return entries[first].facts if first < len(entries) else f"{len(entries)} entries alone"
    first = int(differs[1].argmax())
    name, x = entries[first]
    assert x is not None, "values have no words"
    reference = x.detach().clone(memory_format=torch.contiguous_format).to(default_device(ranks))
    source = dist.get_global_rank(ranks.group, 0) if ranks.group is not None else 0
    # Bits, as not every backend sends every dtype.
    bits = reference.view(-1).view(torch.uint8)
    run_collective(ranks, lambda: dist.broadcast(bits, source, group=ranks.group, async_op=True))
    return None if ranks.rank == 0 else f"{name}, {_described(x, reference.to(x.device))}"


def _described(x: Tensor, reference: Tensor) -> str:
    """Return how a tensor differs from rank 0's."""
    width = x.element_size()
    unlike = (
        (x.contiguous().view(-1).view(torch.uint8) != reference.view(-1).view(torch.uint8))
        .view(-1, width)
        .any(dim=1)
    )
    count = int(unlike.sum())
    if not count:
        return "is rank 0's"
    place = np.unravel_index(int(unlike.int().argmax()), x.shape)
    index = [int(n) for n in place]
    here, there = (y.reshape(-1)[unlike.int().argmax()].item() for y in (x, reference))
    return f"{count} of {x.numel()} numbers differ from rank 0's, the first at {index}: {here} for {there}"


def _digest(text: str) -> int:
    """Return 63 bits of a text's digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _gathered(ranks: Ranks, x: Tensor) -> Tensor:
    """Return a tensor of all ranks, ``[P, ...]``."""
    gathered = x.new_empty(ranks.size, *x.shape)
    run_collective(
        ranks,
        lambda: dist.all_gather_into_tensor(
            gathered.view(-1), x.contiguous().view(-1), group=ranks.group, async_op=True
        ),
    )
    return gathered
