"""State of a K/V cache: tables of pages on the host and on the device, and the pages of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ring_core import Layout, LayoutSpec
from ring_core.base.arguments import Ints, check_index, check_size, is_integer
from ring_core.checks import FLOATS
from ring_core.layouts.layout import check_layout
from ring_core.pages import PagesMovement, PageTable, own_positions, to_pages
from ring_torch.capture import is_capturing
from ring_torch.checking.settings import check_of
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Ranks
from ring_torch.movement.rows import MoveCall, move
from ring_torch.positions import on_device
from ring_torch.recurrent.arguments import check_tensor
from ring_torch.serving.kernels import step_kernels
from ring_torch.serving.merging import refuse_grad
from ring_torch.serving.paged import PagedKeys

#: Stands for a request of the last ``extend`` that was evicted.
_NONE = -1


class CacheState:
    """State of a :class:`ring_torch.KVCache`: tables, pages, and what is reserved and written.

    Args:
        ranks: The ranks that share it.
        num_layers: Number of layers of attention.
        num_kv_heads: Heads of keys and values, ``K``.
        head_dim: Numbers of a key, ``D``.
        v_head_dim: Numbers of a value, ``Dv``.
        max_requests: Most requests at a time.
        max_tokens: Tokens of all requests on all ranks.
        page_size: Tokens of a page.
        dtype: Of keys, values and queries.
        device: Device of the pages; ``None`` is that on which the group communicates.

    Raises:
        ValueError: An argument is malformed.
    """

    def __init__(
        self, ranks: Ranks, num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int,
        max_requests: int, max_tokens: int, page_size: int, dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._num_layers = check_size("num_layers", num_layers)
        heads = check_size("num_kv_heads", num_kv_heads)
        k_dim = check_size("head_dim", head_dim)
        v_dim = check_size("v_head_dim", v_head_dim)
        if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in FLOATS:
            raise ValueError(f"dtype must be torch's {', '.join(FLOATS)}, got {dtype!r}")
        self._table = PageTable(
            cp_size=self._ranks.size, page_size=page_size, max_requests=max_requests,
            max_tokens=max_tokens,
        )  # fmt: skip
        self._k_shape, self._v_shape, self._dtype = (heads, k_dim), (heads, v_dim), dtype
        self._version = 0
        try:
            self._device = torch.empty(0, device=device or default_device(self._ranks)).device
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {device!r} cannot be used: {error}") from error
        #: For each layer its pages, and one more behind them for rows that belong to other ranks.
        self._k = self._pools(self._k_shape)
        #: Made by the first write: of latents there are no values beside the keys.
        self._v: list[Tensor] | None = None
        self._is_latent = False
        self._batch: tuple[int, ...] = ()  # requests of the last `extend`
        self._reserved: dict[int, int] = {}  # for each request how many positions may be written
        self._unwritten: dict[int, set[int]] = {}  # for each request the layers to be written yet
        self._is_captured = False  # True once a CUDA graph writes, of which the host knows nothing
        self._make_tables()

    def _pools(self, row: tuple[int, int]) -> list[Tensor]:
        """Allocate the pages of all layers."""
        with torch.inference_mode(mode=False):  # they are written in training mode, too
            return [
                torch.zeros(
                    self._table.num_pages + 1, self._table.page_size, *row, dtype=self._dtype,
                    device=self._device,
                )
                for _ in range(self._num_layers)
            ]  # fmt: skip

    def _make_tables(self) -> None:
        """Allocate the tables on the device: a row for each request, and an empty one behind."""
        table = self._table
        with torch.inference_mode(mode=False):
            self._tables = torch.zeros(
                table.max_requests + 1, table.num_pages, dtype=torch.int32, device=self._device
            )
            self._device_lengths = torch.zeros(
                table.max_requests + 1, dtype=torch.int32, device=self._device
            )
            # Those of the last `extend`, in its order, and empty ones behind: graphs read them.
            self._batch_tables = torch.zeros_like(self._tables[1:])
            self._batch_lengths = torch.zeros_like(self._device_lengths[1:])
        self._update(dict.fromkeys(table.lengths, 0))

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self._table.page_size

    @property
    def lengths(self) -> dict[int, int]:
        """Number of tokens of each request."""
        return self._table.lengths

    @property
    def bytes(self) -> int:
        """Bytes of keys and values on this rank, free pages included."""
        return sum(x.nbytes for x in (*self._k, *(self._v or ())))

    @property
    def version(self) -> int:
        """Number of times that it has grown."""
        return self._version

    @property
    def block_table(self) -> Tensor:
        """Numbers of this rank's pages of the last requests, int32 ``[B, width]``."""
        return self._batch_tables[: len(self._batch)].clone()

    @property
    def seqused_k(self) -> Tensor:
        """Number of their tokens on this rank, int32 ``[B]``."""
        lengths, size = self._batch_lengths[: len(self._batch)], self.page_size
        rounds = lengths // (size * self._ranks.size)  # of a page on each rank
        rest = lengths - rounds * (size * self._ranks.size) - self._ranks.rank * size
        return rounds * size + rest.clamp(0, size)

    def add(self, n: int) -> tuple[int, ...]:
        """Add ``n`` empty requests; see :meth:`KVCache.add`, as of the methods below."""
        return self._table.add(n)

    def extend(self, requests: Sequence[int], n: int) -> None:
        """Reserve positions, and copy pages that forks share."""
        requests = checked_requests(requests)
        first = {x: length // self.page_size for x, length in self.lengths.items() if x in requests}
        for copy in self._table.extend(requests, n):
            if copy.rank == self._ranks.rank:
                with torch.no_grad():
                    for pool in (*self._k, *(self._v or ())):
                        pool[copy.target].copy_(pool[copy.source])
        self._batch = requests
        for request in requests:
            self._reserved[request] = n
            self._unwritten[request] = set(range(self._num_layers))
        self._update(first)

    def truncate(self, request: int, length: int) -> None:
        """Forget the tokens of a request from a position on."""
        self._table.truncate(request, length)
        self._reserved.pop(request, None)
        self._update({})

    def fork(self, request: int) -> int:
        """Return a new request with the tokens of another."""
        forked = self._table.fork(request)
        self._reserved.pop(request, None)
        self._unwritten[forked] = set(self._unwritten.get(request, ()))
        self._update({forked: 0})
        return forked

    def evict(self, request: int) -> None:
        """Forget a request."""
        self._table.evict(request)
        # Its number may be another's soon: its row of the last `extend` is padding from now on.
        self._batch = tuple(_NONE if x == request else x for x in self._batch)
        self._reserved.pop(request, None)
        self._unwritten.pop(request, None)
        self._update({})

    def grow(self, tokens: int) -> None:
        """Make room for more tokens."""
        self._table.grow(tokens)
        self._version += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            for pools in (self._k, self._v or []):
                for layer, old in enumerate(pools):
                    pools[layer] = old.new_zeros(self._table.num_pages + 1, *old.shape[1:])
                    pools[layer][: len(old) - 1].copy_(old[:-1])
        self._make_tables()

    def write(
        self, k: Tensor, v: Tensor | None, layer: int, requests: Sequence[int] | None,
        layout: LayoutSpec | None,
    ) -> None:  # fmt: skip
        """Write keys and values of the positions that are reserved."""
        self.check_layer(layer)
        known = self.batch_of(requests)
        tokens = self.reserved(known)
        if layout is not None:
            rows = Layout.padded(check_layout(layout), tokens, self._ranks.size).local_len
            self.check_new(k, v, rows)
            self.check_rows("k", k, known, is_exact=True)
            for row, request in enumerate(known):
                pair = (k[row : row + 1], None if v is None else v[row : row + 1])
                self.write_shards(*pair, layer, request, tokens, layout)
        else:
            self.check_new(k, v, tokens)
            self.check_rows("k", k, known, is_exact=requests is not None)
            self._write_rows(k, v, layer, known, requests is None)
        self.note_written(layer, known)

    def _write_rows(
        self, k: Tensor, v: Tensor | None, layer: int, known: Sequence[int], is_last: bool
    ) -> None:
        """Write rows that all ranks have; each keeps those of its pages."""
        self._write_last(k, v, layer, *self._rows(known, len(k), is_last=is_last))

    def _write_last(
        self, k: Tensor, v: Tensor | None, layer: int, table: Tensor, lengths: Tensor
    ) -> None:
        """Write the last rows of requests with these pages and lengths."""
        ranks, n = self._ranks, k.shape[1]
        self._note_put(v)
        if (step := step_kernels(k.device)) is not None:
            pools = self._k[layer], (self._v or self._k)[layer]
            step.write(k, v, *pools, lengths, table, ranks.rank, ranks.size)
            return
        positions = positions_of(lengths, n).long()
        numbers = positions // self.page_size
        is_own = (numbers % ranks.size == ranks.rank) & (positions >= 0)
        columns = (numbers // ranks.size).clamp_(0, table.shape[1] - 1)
        pages = table.gather(1, columns).long()
        # Rows of other ranks go to the page behind all: a graph has no rows more or less.
        pages = pages.masked_fill(~is_own, self._table.num_pages)
        self._put(k, v, layer, (pages * self.page_size + positions % self.page_size).view(-1))

    def write_shards(
        self, k: Tensor, v: Tensor | None, layer: int, request: int, n: int, layout: LayoutSpec,
        skipped: int = 0,
    ) -> None:  # fmt: skip
        """Write one request's shards ``[1, T_local, K, D]``, which move to their pages' ranks.

        Before the ``n`` tokens are ``skipped`` rows that are padding.

        Raises:
            RankMismatchError: Ranks make different calls.
        """
        ranks, table = self._ranks, self._table
        if ranks.size == 1:
            own_k, own_v = k[:, skipped:], None if v is None else v[:, skipped:]
            self._write_last(own_k, own_v, layer, *self._rows((request,), 1, is_last=False))
            return
        stop = table.lengths[request]
        number = ranks.next_call()
        kind = PagesMove(layout, stop - n, table.page_size, skipped)
        # One all-to-all carries keys and values.
        rows = k.flatten(2) if v is None else torch.cat([k.flatten(2), v.flatten(2)], dim=-1)
        checks = check_of(number) if ranks.size > 1 else (0, 0)
        call = MoveCall(ranks, kind, 1, needs_grad=False, number=number, order=0, check_every=checks[0], checked=checks[1])  # fmt: skip
        with torch.no_grad():
            own = move(rows, call, n + skipped)
        k_size = self._k_shape[0] * self._k_shape[1]
        self._note_put(v)
        self._put(
            own[..., :k_size], None if v is None else own[..., k_size:], layer,
            on_device(self._rows_of(request, stop - n, stop), self._device),
        )  # fmt: skip

    def _rows_of(self, request: int, start: int, stop: int) -> Ints:
        """Return where this rank's tokens of a request are among the rows of its pages."""
        table, rank = self._table, self._ranks.rank
        positions = own_positions(start, stop, table.page_size, rank, table.cp_size)
        pages = np.asarray(table.pages_of(request, rank), dtype=np.int64)
        columns = positions // (table.page_size * table.cp_size)
        return pages[columns] * table.page_size + positions % table.page_size

    def _note_put(self, v: Tensor | None) -> None:
        """Make pages of values where these are the first, and note what the host cannot know."""
        if v is not None and self._v is None:
            self._v = self._pools(self._v_shape)
        self._is_latent = v is None
        self._is_captured |= is_capturing()

    def _put(self, k: Tensor, v: Tensor | None, layer: int, rows: Tensor) -> None:
        """Write rows of keys and values to rows of the pages."""
        with torch.no_grad():
            for x, pools in ((k, self._k), (v, self._v)):
                if x is not None and pools is not None:
                    pool = pools[layer]
                    pool.view(-1, *pool.shape[2:]).index_copy_(
                        0, rows, x.reshape(-1, *pool.shape[2:])
                    )

    def keys_of(
        self, layer: int, known: Sequence[int], batch: int, *, is_last: bool
    ) -> tuple[PagedKeys, Tensor]:
        """Return this rank's pages of a layer, and lengths ``[B]``, for a batch of requests."""
        k = self._k[layer]
        v = k[..., : self._v_shape[1]] if self._v is None else self._v[layer]
        table, lengths = self._rows(known, batch, is_last=is_last)
        return PagedKeys(k, v, table, self._ranks.rank, self._ranks.size), lengths

    def _rows(self, known: Sequence[int], batch: int, *, is_last: bool) -> tuple[Tensor, Tensor]:
        """Return tables ``[B, width]`` and lengths ``[B]`` for a batch, int32.

        Those of the last ``extend`` are where graphs read them; behind them is padding.
        """
        if is_last:
            return self._batch_tables[:batch], self._batch_lengths[:batch]
        first = known[0]
        if tuple(known) == tuple(range(first, first + len(known))):
            rows: slice | Tensor = slice(first, first + len(known))
        else:
            rows = on_device(np.asarray(known, dtype=np.int64), self._device)
        return self._tables[rows], self._device_lengths[rows]

    def pages_of(self, layer: int, request: int, start: int, stop: int, width: int) -> Tensor:
        """Return this rank's pages of the positions from ``start`` to ``stop``, to be sent.

        They are ``[width, page_size, K * (D + Dv)]``, keys and values beside each other, of latents
        keys alone; behind the last page there may be others'.
        """
        keys, _ = self.keys_of(layer, (request,), 1, is_last=False)
        columns = keys.columns(start, stop)
        pages = torch.zeros(width, dtype=torch.int64, device=self._device)
        pages[: len(columns)] = keys.table[0, columns.start : columns.stop]
        pools = (self._k,) if self._v is None else (self._k, self._v)
        return torch.cat([pool[layer][pages].flatten(2) for pool in pools], dim=-1)

    def page_numbers(self, request: int) -> Sequence[int]:
        """Return the numbers of a request's pages on this rank, by column of its table."""
        return self._table.pages_of(request, self._ranks.rank)

    def largest_value(self, layer: int) -> Tensor:
        """Return the largest absolute value of a layer on this rank, in float64; 0 for NaN."""
        values = self._k[layer] if self._v is None else self._v[layer]
        return values.abs().nan_to_num(nan=0.0, posinf=0.0).amax().double()

    def as_keys(self, pages: Tensor, owner: int, start: int) -> PagedKeys:
        """Return what :meth:`pages_of` has returned on the rank ``owner`` as keys and values."""
        k_size = self._k_shape[0] * self._k_shape[1]
        k = pages[..., :k_size].unflatten(-1, self._k_shape)
        v = k[..., : self._v_shape[1]]
        if self._v is not None:
            v = pages[..., k_size:].unflatten(-1, self._v_shape)
        numbers = torch.arange(len(pages), dtype=torch.int32, device=self._device)
        keys = PagedKeys(k, v, numbers[None], owner, self._ranks.size)
        # Columns count from the request's first page.
        first = keys.columns(start, start + 1).start
        return keys._replace(table=torch.nn.functional.pad(numbers, (first, 0))[None])

    @property
    def row_numbers(self) -> int:
        """Numbers of a token's keys and values in a layer."""
        k, v = (heads * dim for heads, dim in (self._k_shape, self._v_shape))
        return k if self._is_latent else k + v

    def reserved(self, requests: Sequence[int]) -> int:
        """Return how many positions of each of these requests may be written.

        Raises:
            ValueError: There are none, or unlike many.
        """
        n = {self._reserved.get(request, 0) for request in requests}
        if len(n) != 1 or 0 in n:
            raise ValueError(
                f"requests {list(requests)} have {sorted(n)} reserved positions: write what one extend "
                f"has reserved, before the request is truncated or forked"
            )
        return n.pop()

    def note_written(self, layer: int, requests: Sequence[int]) -> None:
        """Remember that a layer's reserved positions of requests are written."""
        for request in requests:
            self._unwritten[request].discard(layer)

    def lacks(self, requests: Sequence[int], n: int) -> int:
        """Return how many pages a rank lacks, at most, to extend requests by ``n`` tokens each."""
        return self._table.lacks(requests, n)

    def batch_of(self, requests: Sequence[int] | None, name: str = "requests") -> tuple[int, ...]:
        """Return the requests of a call: those of the last ``extend`` for ``None``.

        Raises:
            ValueError: A request is unknown or there twice, or nothing was extended.
        """
        if requests is None and not self._batch:
            raise ValueError("requests=None are those of the last extend, and there was none")
        if requests is None and _NONE in self._batch:
            raise ValueError(
                "requests=None are those of the last extend, of which one was evicted: name the requests"
            )
        known = self._batch if requests is None else checked_requests(requests)
        self._table.check_known(known, name)
        return known

    def check_rows(self, name: str, x: Tensor, known: Sequence[int], *, is_exact: bool) -> None:
        """Check that there is a row for each request.

        Raises:
            ValueError: There are fewer, or more where that is no padding.
        """
        most = len(known) if is_exact else self._table.max_requests
        if not len(known) <= len(x) <= most:
            raise ValueError(
                f"{name} must have a row for each of {len(known)} requests"
                f"{'' if is_exact else f', and up to {most} with padding'}, got {len(x)} rows"
            )

    def check_new(self, k: Tensor, v: Tensor | None, tokens: int) -> None:
        """Check keys and values of some tokens.

        Raises:
            ValueError: They do not fit the cache, or require a gradient.
        """
        pairs = [("k", k, self._k_shape)] + ([] if v is None else [("v", v, self._v_shape)])
        for name, x, row in pairs:
            check_tensor(name, x)
            if x.ndim != 4 or x.shape[1:] != (tokens, *row) or len(x) != len(k):
                raise ValueError(
                    f"{name} must be [{len(k)}, {tokens}, {row[0]}, {row[1]}], a row for each reserved "
                    f"position, got {list(x.shape)}"
                )
            self.check_dtype(name, x)
        refuse_grad("write", k=k, v=v)
        if v is None and (self._v is not None or self._v_shape[1] > self._k_shape[1]):
            raise ValueError(
                f"v=None says that values are the first {self._v_shape[1]} of {self._k_shape[1]} numbers "
                f"of the keys in all layers; this cache has values of their own: give v"
            )
        if v is not None and self._is_latent:
            raise ValueError("this cache holds latents, as earlier writes had v=None: leave v out")

    def check_dtype(self, name: str, x: Tensor) -> None:
        """Check that a tensor is of the cache's dtype and device.

        Raises:
            ValueError: It is not.
        """
        if x.dtype != self._dtype or x.device != self._device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, and the cache {self._dtype} on {self._device}: "
                f"convert {name}, or make the cache like it"
            )

    def check_layer(self, layer: int) -> None:
        """Refuse a layer that there is not."""
        check_index("layer", layer, self._num_layers)

    def check_call(self, ranks: Ranks, layer: int, known: Sequence[int], n: int) -> None:
        """Check that a layer's last ``n`` tokens of some requests can be attended to.

        Raises:
            ValueError: The cache is of other ranks, or the layer was not written.
        """
        if ranks is not self._ranks:
            raise ValueError(
                f"the cache is of {self._ranks.size} ranks, and cp of another group of {ranks.size} (one "
                f"inside of cp.whole()): use the ContextParallel that the cache was made with"
            )
        lengths = self.lengths
        for request in known:
            if lengths[request] < n:
                raise ValueError(
                    f"q has {n} tokens, and request {request} only {lengths[request]}: extend it and "
                    f"write their keys first"
                )
            if layer in self._unwritten.get(request, ()) and not self._is_captured:
                raise ValueError(
                    f"layer {layer} of request {request} was not written since the last extend: call "
                    f"cache.write(k, v, layer={layer}) first"
                )

    @property
    def facts(self) -> dict[str, object]:
        """Facts that must be equal on all ranks: sizes of the cache."""
        table = self._table
        return {
            "cache": [self._num_layers, *self._k_shape, self._v_shape[1], str(self._dtype), self._is_latent],
            "pages": [table.num_pages, table.page_size], "version": self._version,
        }  # fmt: skip

    @property
    def changes(self) -> int:
        """Digest of all changes so far, 64 bits."""
        return self._table.state

    @property
    def value_dim(self) -> int:
        """Numbers of a value, ``Dv``."""
        return self._v_shape[1]

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and numbers of a key, ``(K, D)``."""
        return self._k_shape

    def _update(self, changed: Mapping[int, int]) -> None:
        """Bring tables on the device: pages of requests from some on, lengths, the last ``extend``.

        Nothing waits for the device, and no tensor is replaced: graphs read what stands there.
        """
        table, rank, size = self._table, self._ranks.rank, self._ranks.size
        lengths = table.lengths
        entries: list[tuple[int, int, int]] = []
        for request, number in changed.items():
            pages = table.pages_of(request, rank)
            first = max(0, -(-(number - rank) // size))
            entries += [(request, n, pages[n]) for n in range(first, len(pages))]
        numbers = np.zeros(table.max_requests + 1, dtype=np.int64)
        numbers[list(lengths)] = list(lengths.values())
        slots = np.full(table.max_requests, table.max_requests, dtype=np.int64)
        for row, request in enumerate(self._batch):
            slots[row] = table.max_requests if request == _NONE else request
        with torch.no_grad():
            if entries:
                columns = on_device(np.asarray(entries, dtype=np.int64).T, self._device)
                self._tables[columns[0], columns[1]] = columns[2].int()
            self._device_lengths.copy_(on_device(numbers, self._device))
            rows = on_device(slots, self._device)
            torch.index_select(self._tables, 0, rows, out=self._batch_tables)
            torch.index_select(self._device_lengths, 0, rows, out=self._batch_lengths)


@dataclass(frozen=True)
class PagesMove:
    """Movement of new tokens of a request to the ranks of their pages.

    Attributes:
        layout: Layout of the new tokens, with padding as it needs.
        start: Position of the first of them.
        page_size: Tokens of a page.
        skipped: Number of rows of padding before it.
    """

    name: ClassVar[str] = "write"
    fill: ClassVar[float] = 0
    layout: LayoutSpec
    start: int
    page_size: int
    skipped: int

    def movement(self, tokens: int, size: int) -> PagesMovement:
        """Return the plan for so many rows over ``size`` ranks."""
        layout = Layout.padded(self.layout, tokens, size)
        return to_pages(layout, self.start, self.page_size, self.skipped)


def positions_of(lengths: Tensor, n: int, first: int | None = None) -> Tensor:
    """Return the positions of ``n`` of requests' last tokens, int32 ``[B, n]``; below 0 in padding.

    ``first`` is the distance of the first from the end, by default ``n``.
    """
    start = -n if first is None else -first
    steps = torch.arange(start, start + n, dtype=torch.int32, device=lengths.device)
    return lengths[:, None] + steps


def checked_requests(requests: Sequence[int]) -> tuple[int, ...]:
    """Return requests as a tuple of Python's integers.

    Raises:
        ValueError: They are no sequence.
    """
    if not isinstance(requests, list | tuple | range):
        raise ValueError(f"requests must be a list or tuple of numbers, got {requests!r}")
    return tuple(int(x) if is_integer(x) else x for x in requests)
