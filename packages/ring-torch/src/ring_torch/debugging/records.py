"""Records of shards: which tensor is a part of which sequence, by object and view."""

from __future__ import annotations

import inspect
import linecache
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import LayoutSpec
from ring_torch.sharding import Sharding

#: Name of the file of code that asks in the place of a function's own.
ASKING = "<ring_torch.debug>"
_RECORD = "_ring_shard"
_LIVE: dict[int, weakref.ref[Tensor]] = {}


class Block(NamedTuple):
    """A block of ``debug`` under way.

    Attributes:
        every: Interval of the calls that are compared between ranks.
        calls: Number of calls that could have been, by what they are.
    """

    every: int
    calls: Counter[Any]

    def is_due(self, *call: Any) -> bool:
        """Count a call, and return True if it is to be compared."""
        self.calls[call] += 1
        return (self.calls[call] - 1) % self.every == 0


#: Blocks of ``debug`` under way, the innermost last.
BLOCKS: list[Block] = []


@dataclass(frozen=True)
class Record:
    """Facts of a tensor that ``shard`` or a movement has returned.

    Attributes:
        layout: Layout of the tokens.
        seq_len: Tokens of the whole sequence, without padding.
        local_len: Tokens of this rank, with padding.
        dim: Dimension of the tokens.
        ranks: Number of ranks.
        line: The user's line that made it.
    """

    layout: LayoutSpec
    seq_len: int
    local_len: int
    dim: int
    ranks: int
    line: str

    @property
    def is_padded(self) -> bool:
        """True if some of the ranks' tokens are padding."""
        return self.seq_len < self.local_len * self.ranks


def root_of(x: Tensor) -> Tensor:
    """Return the tensor that a view is of, or a tensor itself."""
    base: Tensor | None = x._base  # noqa: SLF001 - its name
    return x if base is None else base


def remember(x: Tensor, record: Record) -> None:
    """Keep a record with a tensor, as long as that lives; results of operations have none."""
    setattr(x, _RECORD, record)
    key = id(x)
    _LIVE[key] = weakref.ref(x, lambda _: _LIVE.pop(key, None) and None)


def record_of(x: Any) -> Record | None:
    """Return the record of a tensor, or of what it is a view of."""
    return getattr(root_of(x), _RECORD, None) if isinstance(x, Tensor) else None


def live_records(sharding: Sharding) -> list[Record]:
    """Return the records of all tensors that live, for as many ranks as these."""
    records = (record_of(x) for ref in [*_LIVE.values()] if (x := ref()) is not None)
    return [x for x in records if x is not None and x.ranks == sharding.ranks.size]


def start_in_whole(x: Tensor, sharding: Sharding) -> int | None:
    """Return where a slice of a whole sequence begins in it, along its last dimension.

    ``None`` for what is no view of a tensor with at least as many tokens as all ranks hold.
    """
    root = root_of(x)
    is_slice = x is not root and x.ndim > 0 and x.ndim == root.ndim and x.stride() == root.stride()
    if not is_slice or x.shape[:-1] != root.shape[:-1] or x.stride(-1) == 0:
        return None
    if root.shape[-1] < x.shape[-1] * sharding.ranks.size or record_of(x) is not None:
        return None
    return int(x.storage_offset() - root.storage_offset()) // x.stride(-1)


def users_line() -> tuple[str, bool]:
    """Return the innermost line outside of torch and Ring, and True if Ring makes the call."""
    frame, is_ours = inspect.currentframe(), False
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        package, is_asking = name.partition(".")[0], frame.f_code.co_filename == ASKING
        is_ours |= package == "ring_torch" and not is_asking and "ring_torch.debugging" not in name
        if package not in ("ring_torch", "ring_core", "torch"):
            path, line = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(path, line).strip()
            return f"{path}:{line}: {code}" if code else f"{path}:{line}", is_ours
        frame = frame.f_back
    return "an unknown line", is_ours


def is_eager() -> bool:
    """Return True outside of graphs that are traced or captured."""
    is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not (torch.compiler.is_compiling() or is_capturing)
