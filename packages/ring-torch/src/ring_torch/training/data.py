"""Batches for the ranks of rings: packed, padded and sharded, the same on all ranks of a ring.

Every rank reads the same batches from its loader and keeps its own tokens, so nothing is sent but
a digest: ranks whose loaders are in another order, as with another seed, are told so at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from string import hexdigits
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ring_core import Mask, RankMismatchError, balanced_layout
from ring_core.base.arguments import check_flag, check_size, is_integer, numbers_as_python
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Group, ranks_of
from ring_torch.context import ContextParallel, check_context
from ring_torch.sharding import Sharding
from ring_torch.training.part import IGNORED

_COMPARED_EVERY = 32  # batches
_STATE = ("batches", "digest", "loader")


@runtime_checkable
class _Stateful(Protocol):
    """A loader that can go on where it was, as torchdata's ``StatefulDataLoader``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Batch:
    """Part of a batch of token ids that this rank holds.

    Attributes:
        tokens: int64 ``[B, T_local]``; ``B`` is 1 for packed documents.
        labels: int64 ``[B, T_local]``: for each token the next one of its document, or what the
            loader's labels say of that; ``ignore_index`` where there is none.
        positions: int64 ``[T_local]``, place of each token in its document, as for RoPE.
        cu_seqlens: ``(0, ..., T)``, bounds of packed documents; ``None`` for rows of one document.
        seq_len: ``T``, length of the whole sequence without the layout's padding.
        count: Number of labels that are not ignored, in the batches of all rings of this step; with
            ``dp="own"`` of this ring alone, so sum it over the rings.
        cp: The ranks, and the layout in which this batch is sharded.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: tuple[int, ...] | None
    seq_len: int
    count: int
    cp: ContextParallel

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device."""
        tensors = {
            name: getattr(self, name).to(device) for name in ("tokens", "labels", "positions")
        }
        return replace(self, **tensors)


class ShardedLoader:
    """Iterable over this rank's part of a loader's batches; see :func:`ring_torch.dataloader`."""

    def __init__(
        self,
        cp: ContextParallel,
        loader: Iterable[Any],
        dp: Group,
        ignore_index: int,
        *,
        balanced: bool,
    ) -> None:
        self._cp, self._loader, self._dp = cp, loader, dp
        self._ignore_index, self._balanced = ignore_index, balanced
        self._batches = 0  # of this rank, in this pass over the loader
        self._digest = b""  # of all batches of all rings that were read in this pass
        self._resumes = False
        self._pass = 0  # number of the pass that runs; another pass or state ends it

    def __len__(self) -> int:
        """Return the number of batches of a pass: the loader's, divided by the rings in turn."""
        return len(cast("Sized", self._loader)) // self._rings

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches; after :meth:`load_state_dict` those that are left.

        Raises:
            RankMismatchError: Ranks read different batches. They compare those so far at the first,
                at every 32nd after it and at the end.
            ValueError: A batch is malformed; or the loader yields others than before the state was
                saved.
            RuntimeError: Another pass began meanwhile, or a state was loaded.
        """
        self._pass += 1
        own_pass = self._pass
        items = iter(self._loader)
        if self._resumes and not isinstance(self._loader, _Stateful):
            self._skip(items)
        elif not self._resumes:
            self._batches, self._digest = 0, b""
        self._resumes = False
        # Each ring takes one batch of as many as there are rings; a rest of fewer is left out.
        for number in count():
            if self._pass != own_pass:
                raise RuntimeError(
                    "this pass over the loader has ended: another one began, or a state was loaded. "
                    "Iterate over the loader anew"
                )
            step = [_read(item) for item in islice(items, self._rings)]
            self._digest = chained(self._digest, step)
            # A GPU's host waits here for the step before, so not every batch is compared; a digest
            # is that of all batches before.
            if number % _COMPARED_EVERY == 0 or len(step) < self._rings:
                self._compare()
            if len(step) < self._rings:
                break
            self._batches += 1
            yield self._sharded(step)
        self._batches, self._digest = 0, b""

    def state_dict(self) -> dict[str, Any]:
        """Return what a new run needs to go on behind the last batch; equal on all ranks.

        It holds the loader's own state, if the loader has any. Else a new run reads the batches
        before once more, so the loader has to yield them in the same order: seed its generator for
        each pass, or call the sampler's ``set_epoch``.
        """
        loader = self._loader.state_dict() if isinstance(self._loader, _Stateful) else None
        return {"batches": self._batches, "digest": self._digest.hex(), "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch at which :meth:`state_dict` was called, when next iterated.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: It is of something else, or of a loader with another kind of state.
        """
        if not isinstance(state, Mapping) or sorted(state) != sorted(_STATE):
            raise ValueError(
                f"state must be what state_dict returned, with {', '.join(_STATE)}; got {state!r}"
            )
        batches, digest = check_size("state['batches']", state["batches"], low=0), state["digest"]
        if (state["loader"] is not None) != isinstance(self._loader, _Stateful):
            raise ValueError(
                "state was saved with a loader that has a state_dict, and this one has none, or the "
                "other way round: give the same kind of loader"
            )
        if not isinstance(digest, str) or len(digest) % 2 or not {*digest} <= {*hexdigits}:
            raise ValueError(f"state['digest'] must be hexadecimal digits, got {digest!r}")
        if isinstance(self._loader, _Stateful):
            self._loader.load_state_dict(state["loader"])
        self._pass += 1
        self._batches, self._digest, self._resumes = batches, bytes.fromhex(digest), True

    @property
    def _rings(self) -> int:
        """Number of rings that read this loader together."""
        return 1 if self._dp is None else ranks_of(self._dp).size

    def _skip(self, items: Iterator[Any]) -> None:
        """Read the batches before the state again, and check that they are the same."""
        digest = b""
        for _ in range(self._batches):
            digest = chained(digest, [_read(item) for item in islice(items, self._rings)])
        if digest != self._digest:
            raise ValueError(
                f"the loader yields other batches than when this state was saved, behind "
                f"{self._batches} of them: give it the same data, and the same order. A "
                f"torch.utils.data.DataLoader that shuffles needs generator=, seeded for each pass"
            )

    def _compare(self) -> None:
        """Compare the digest of what was read with other ranks'; all of them raise, or none.

        Raises:
            RankMismatchError: It differs.
        """
        if not is_same(self._cp, self._dp, self._digest, self._batches):
            raise RankMismatchError(
                f"ranks read different batches until batch {self._batches} of this pass. All ranks "
                f"need the same data in the same order, and go on from the same state: seed the "
                f"loader's generator alike on all of them. If each ring's loader has batches of its "
                f"own, pass dp='own'"
            )

    def _sharded(self, step: Sequence[Item]) -> Batch:
        """Return this rank's part of its ring's batch."""
        ignored, cp = self._ignore_index, self._cp
        count = sum(int((item.shifted_labels(ignored) != ignored).sum()) for item in step)
        item = step[0 if self._dp is None else ranks_of(self._dp).rank]
        if self._balanced:
            item, cp = balanced_context(cp, item, ignored)
        labels = item.shifted_labels(ignored)
        return Batch(
            cp.shard(item.tokens, pad=True), cp.shard(labels, pad=True, fill=ignored),
            cp.shard(item.positions(), dim=0, pad=True), item.cu_seqlens, item.tokens.shape[1],
            count, cp,
        )  # fmt: skip


@numbers_as_python
def dataloader(
    cp: ContextParallel, loader: Iterable[Any], *, dp: Group | str = None,
    ignore_index: int = IGNORED, balanced: bool = False,
) -> ShardedLoader:  # fmt: skip
    """Return this rank's part of each batch of token ids: the same batches on the ranks of a ring.

    A batch of the loader is int64 ``[B, T]``, rows of one document each; or a sequence of int64
    ``[length]``, documents, which are packed into one row; or a mapping of either as ``input_ids``
    and, if not the same, ``labels`` (not shifted). Batches are padded to what the layout takes.

    Every rank reads the whole loader, and ranks compare digests of what they read, so another seed
    on one of them is an error. ``state_dict`` and ``load_state_dict`` of the result resume a run.

    Args:
        cp: The ranks that share a sequence, and its layout.
        loader: Iterable over batches in the same order on all ranks, as a
            :class:`torch.utils.data.DataLoader` with a seeded generator, and ``collate_fn=list``
            for documents.
        dp: Ranks that hold the same part of different sequences, as ``mesh["dp"]``: their rings
            take turns. ``"own"`` if each ring's loader has batches of its own, as with a
            ``DistributedSampler``, whose ``count`` you sum over the rings; ``None`` if there is one
            ring.
        ignore_index: Label of tokens that have nothing to predict.
        balanced: Shard each batch of documents in a layout of its own, in which causal attention
            gives every rank equally much work, whatever the documents' lengths: use the batch's
            ``cp``. Their last document is padding, if any is needed. A compiled model is compiled
            for each layout.

    Raises:
        ValueError: An argument is malformed, or there are more ranks than those of one ring and no
            ``dp`` says who reads what.

    Example::

        loader = DataLoader(documents, 8, shuffle=True, generator=generator, collate_fn=list)
        for batch in ring_torch.dataloader(cp, loader, dp=mesh["dp"]):
            logits = model(batch.tokens, batch.positions, batch.cu_seqlens)
            loss = ring_torch.cross_entropy(batch.cp, logits, batch.labels, count=batch.count)
    """
    check_context(cp)
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping):
        raise ValueError(f"loader must be an iterable over batches, got {type(loader).__name__}")
    if not is_integer(ignore_index):
        raise ValueError(f"ignore_index must be an integer, got {ignore_index!r}")
    check_flag("balanced", balanced)
    rings = rings_of(cp, dp, takes_own=True)
    return ShardedLoader(cp, loader, rings, ignore_index, balanced=balanced)


def rings_of(cp: ContextParallel, dp: Group | str, *, takes_own: bool = False) -> Group:
    """Return the ranks that hold the same part of different sequences; ``None`` of one ring.

    Args:
        cp: The ranks of a ring.
        dp: These ranks, or ``"own"``.
        takes_own: True if ``"own"`` is allowed, which is none.

    Raises:
        ValueError: They are missing, malformed, or not beside the ring.
    """
    own = ("own",) if takes_own else ()
    if not (dp is None or dp in own or isinstance(dp, dist.ProcessGroup | DeviceMesh)):
        kinds = ", ".join(("a process group", "a DeviceMesh", *map(repr, own)))
        raise ValueError(f"dp must be {kinds} or None, got {dp!r}")
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = check_context(cp, acting=False).ranks.size
    if dp is None and world > size:
        raise ValueError(
            f"dp is missing: the ring has {size} of {world} ranks. Pass the group of ranks that "
            f"hold the same part of different sequences, as dp=mesh['dp'] (also of size 1, as beside "
            f"tensor parallelism)"
            + (", or dp='own' if each ring's loader has batches of its own" if takes_own else "")
        )
    rings = None if isinstance(dp, str) else dp
    if rings is not None and ranks_of(rings).size * size > world:
        raise ValueError(
            f"dp has {ranks_of(rings).size} ranks and cp {size}, of {world}: they must have no other "
            f"rank than this one in common"
        )
    return rings


def is_same(cp: ContextParallel, dp: Group, digest: bytes, number: int) -> bool:
    """Return True if a digest and a number are equal on all ranks; all of them get one answer."""
    device = default_device(check_context(cp).ranks)
    own = [int.from_bytes(digest[:8], "little", signed=True), number, 1]
    # First the ranks of a ring exchange digests; then each with its like of other rings, which
    # hear from the third number whether they differed.
    for group in (cp.group, *([] if dp is None else [dp])):
        row = torch.tensor([own], device=device)
        rows = Sharding(group, "contiguous").unshard(row, dim=0).tolist()
        if rows != [own] * len(rows):
            own[-1] = 0
    return bool(own[-1])


def balanced_context(cp: ContextParallel, item: Item, ignored: int) -> tuple[Item, ContextParallel]:
    """Return documents padded to what a balanced layout takes, and ranks with that layout.

    The layout is made for the padded length, so that no other padding moves it.
    """
    item = item.padded(128 * cp.cp_size, ignored)
    length = item.tokens.shape[1]
    mask = Mask(causal=True, cu_seqlens=item.cu_seqlens)
    layout = balanced_layout(mask, seq_len=length, cp_size=cp.cp_size)
    return item, ContextParallel(cp.group, layout)


@dataclass(frozen=True)
class Item:
    """A batch as it was read, whole.

    Attributes:
        tokens: int64 ``[B, T]``.
        labels: int64 ``[B, T]``, not shifted.
        cu_seqlens: Bounds of packed documents; ``None`` for rows of one document.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: tuple[int, ...] | None

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds of documents, also of rows of one."""
        return self.cu_seqlens or (0, self.tokens.shape[1])

    def shifted_labels(self, ignored: int) -> Tensor:
        """Return for each token the label of the next; the last of a document has none."""
        labels = pad(self.labels[:, 1:], (0, 1), value=ignored)
        labels[:, torch.tensor(self.bounds[1:], device=labels.device) - 1] = ignored
        return labels

    def padded(self, unit: int, ignored: int) -> Item:
        """Return documents with a further one of padding, so that ``unit`` divides their length.

        Raises:
            ValueError: They are rows of one document.
        """
        if self.cu_seqlens is None:
            raise ValueError(
                "balanced=True is for batches of documents, a list of int64 [length], and this one "
                "is [B, T]: the zigzag layout balances that; leave balanced out"
            )
        more = -self.cu_seqlens[-1] % unit if self.cu_seqlens[-1] else unit
        bounds = tuple(sorted({*self.cu_seqlens, self.cu_seqlens[-1] + more}))
        return Item(pad(self.tokens, (0, more)), pad(self.labels, (0, more), value=ignored), bounds)

    def positions(self) -> Tensor:
        """Return the place of each token in its document, int64 ``[T]``."""
        bounds = torch.tensor(self.bounds, device=self.tokens.device)
        starts = bounds[:-1].repeat_interleave(bounds.diff())
        return torch.arange(len(starts), device=starts.device) - starts


def _read(item: Any) -> Item:
    """Read a batch of the loader: rows, or documents, which are packed."""
    labels = item
    if isinstance(item, Mapping):
        if not {"input_ids"} <= set(item) <= {"input_ids", "labels"}:
            raise ValueError(
                f"a batch of the loader has input_ids and may have labels, and nothing else, got "
                f"{sorted(map(str, item))}"
            )
        item, labels = item["input_ids"], item.get("labels", item["input_ids"])
    tokens, cu_seqlens = _packed("input_ids", item)
    joined, label_bounds = _packed("labels", labels)
    if joined.shape != tokens.shape or label_bounds != cu_seqlens:
        raise ValueError(
            f"labels of a batch must be of the lengths of its input_ids, not shifted, got "
            f"{tuple(joined.shape)} for {tuple(tokens.shape)}"
        )
    return Item(tokens, joined, cu_seqlens)


def _packed(name: str, x: object) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return token ids ``[B, T]``, and the bounds of the documents that were packed."""
    if isinstance(x, Tensor):
        if x.dtype != torch.int64 or x.ndim != 2 or not x.numel():
            raise ValueError(
                f"{name} of a batch must be int64 [B, T], or a sequence of documents, int64 "
                f"[length]; got {x.dtype} {tuple(x.shape)}"
            )
        return x, None
    documents = list(x) if isinstance(x, list | tuple) else []
    if not documents or not all(
        isinstance(d, Tensor) and d.dtype == torch.int64 and d.ndim == 1 and len(d)
        for d in documents
    ):
        raise ValueError(
            f"{name} of a batch must be int64 [B, T], or a list of documents, int64 [length] with a "
            f"token or more; got {type(x).__name__}"
        )
    return torch.cat(documents)[None], (0, *accumulate(map(len, documents)))


def chained(digest: bytes, step: Sequence[Item]) -> bytes:
    """Return the digest of all batches so far and those of one more step."""
    state = hashlib.blake2b(digest, digest_size=16)
    for item in step:
        state.update(repr((tuple(item.tokens.shape), item.cu_seqlens)).encode())
        for x in (item.tokens, item.labels):
            state.update(x.detach().cpu().contiguous().numpy())
    state.update(bytes([len(step) & 255]))
    return state.digest()
