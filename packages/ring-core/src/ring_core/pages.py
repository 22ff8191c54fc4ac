"""Pages of a K/V cache that is sharded over ranks: which rank holds which token of which request.

Position ``t`` of a request is in its page ``t // page_size``, and page ``n`` is on rank ``n % P``.
So a request grows on all ranks evenly, and a rank knows the position of every row that it holds.
Tables are numbers on the host, equal on all ranks, which all make the same changes: a change that
one rank could not make is refused on all of them, before anything has happened.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ring_core.base.arguments import Ints, check_size, describe_value, is_integer
from ring_core.layouts.layout import Layout
from ring_core.layouts.run_table import RunTable, ranges_of, runs_of
from ring_core.movement import Movement


class PageCopy(NamedTuple):
    """Copy of a page of a rank, before a request writes to what it shared with another.

    Attributes:
        rank: Rank whose page it is.
        source: Number of the page among the rank's.
        target: Number of the copy.
    """

    rank: int
    source: int
    target: int


@dataclass
class _Request:
    """A request: its length, and the number of each of its pages among those of the page's rank."""

    length: int = 0
    pages: list[int] = field(default_factory=list)


class PageTable:
    """Tables of the pages of all requests on all ranks, with pages that requests share.

    >>> from ring_core.pages import PageTable
    >>> table = PageTable(cp_size=2, page_size=4, max_requests=2, max_tokens=32)
    >>> (first,) = table.add(1)
    >>> table.extend([first], 10)  # three pages, the last of which is half full
    ()
    >>> second = table.fork(first)  # the same pages
    >>> table.extend([second], 1)  # its last page becomes its own
    (PageCopy(rank=0, source=1, target=2),)
    >>> table.pages_of(second, rank=0), table.pages_of(second, rank=1)
    ([0, 2], [0])

    Args:
        cp_size: Number of ranks, ``P``.
        page_size: Tokens of a page, a power of two.
        max_requests: Most requests at a time.
        max_tokens: Tokens of all requests on all ranks, rounded up to pages, as many on each rank.

    Attributes:
        state: Digest of all changes so far, 64 bits: equal on ranks that made the same ones.

    Raises:
        ValueError: An argument is malformed.
    """

    def __init__(self, *, cp_size: int, page_size: int, max_requests: int, max_tokens: int) -> None:
        self.cp_size = check_size("cp_size", cp_size)
        self.page_size = check_size("page_size", page_size)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        self.max_requests = check_size("max_requests", max_requests)
        self.max_tokens = check_size("max_tokens", max_tokens)
        self.state = 0
        self._requests: dict[int, _Request] = {}
        self._shared: list[Counter[int]] = [Counter() for _ in range(self.cp_size)]  # users by page
        # What was freed last is taken first, of requests and of a rank's pages.
        self._free_requests = list(reversed(range(self.max_requests)))
        self._free = [list(reversed(range(self.num_pages))) for _ in range(self.cp_size)]

    @property
    def num_pages(self) -> int:
        """Number of pages that each rank has."""
        return -(-self.max_tokens // (self.page_size * self.cp_size))

    @property
    def lengths(self) -> dict[int, int]:
        """Number of tokens of each request."""
        return {request: x.length for request, x in self._requests.items()}

    def pages_of(self, request: int, rank: int) -> list[int]:
        """Return the numbers of a rank's pages of a request, in the order of their positions."""
        return self._requests[request].pages[rank :: self.cp_size]

    def add(self, n: int) -> tuple[int, ...]:
        """Add empty requests, and return their numbers.

        Raises:
            ValueError: ``n`` is no positive integer, or there are too many requests.
        """
        check_size("n", n)
        self._check_requests(n)
        added = tuple(self._free_requests.pop() for _ in range(n))
        self._requests |= {request: _Request() for request in added}
        self._note("add", n)
        return added

    def extend(self, requests: Sequence[int], n: int) -> tuple[PageCopy, ...]:
        """Reserve ``n`` positions behind each of some requests, and make them that much longer.

        Returns:
            Pages that have to be copied before anything is written, as others share them.

        Raises:
            ValueError: A request is unknown or there twice, ``n`` is no positive integer, or a rank
                has too few free pages: then nothing has changed.
        """
        check_size("n", n)
        self.check_known(requests)
        copied, added = self._needs(requests, n)
        for rank, (count, free) in enumerate(self._counts(copied, added)):
            if count > free:
                raise ValueError(
                    f"{n} more tokens for each of {len(requests)} requests need {count} pages of "
                    f"{self.page_size} tokens on rank {rank}, which has {free} of {self.num_pages} free; "
                    f"nothing was reserved. Evict or truncate requests, call grow, or make the cache with "
                    f"a larger max_tokens"
                )
        copies = []
        for request, number in copied:
            rank, pages = number % self.cp_size, self._requests[request].pages
            source = pages[number]
            pages[number] = self._take(rank)
            self._shared[rank][source] -= 1
            copies.append(PageCopy(rank, source, pages[number]))
        for request, number in added:
            self._requests[request].pages.append(self._take(number % self.cp_size))
        for request in requests:
            self._requests[request].length += n
        self._note("extend", *requests, n)
        return tuple(copies)

    def lacks(self, requests: Sequence[int], n: int) -> int:
        """Return how many pages a rank lacks, at most, to extend requests by ``n`` tokens each."""
        counts = self._counts(*self._needs(requests, n))
        return max(max(count - free, 0) for count, free in counts)

    def truncate(self, request: int, length: int) -> None:
        """Forget the tokens of a request from position ``length`` on, and free their pages.

        Raises:
            ValueError: The request is unknown, or not that long.
        """
        self.check_known([request], "request")
        known = self._requests[request]
        if not is_integer(length) or not 0 <= length <= known.length:
            raise ValueError(
                f"length must be in 0..{known.length}, the length of request {request}, got "
                f"{describe_value(length)}"
            )
        keep = -(-int(length) // self.page_size)
        for number in reversed(range(keep, len(known.pages))):
            self._drop(number % self.cp_size, known.pages.pop())
        known.length = int(length)
        self._note("truncate", request, length)

    def fork(self, request: int) -> int:
        """Return a new request with the tokens of another, whose pages they share.

        Raises:
            ValueError: The request is unknown, or there are too many.
        """
        self.check_known([request], "request")
        self._check_requests(1)
        known, forked = self._requests[request], self._free_requests.pop()
        self._requests[forked] = _Request(known.length, [*known.pages])
        for number, page in enumerate(known.pages):
            self._shared[number % self.cp_size][page] += 1
        self._note("fork", request)
        return forked

    def evict(self, request: int) -> None:
        """Forget a request: its number and pages that no other shares are free again.

        Raises:
            ValueError: The request is unknown.
        """
        self.truncate(request, 0)
        del self._requests[request]
        self._free_requests.append(request)
        self._note("evict", request)

    def grow(self, tokens: int) -> None:
        """Add pages for ``tokens`` more tokens; numbers of pages stay.

        Raises:
            ValueError: ``tokens`` is no positive integer.
        """
        before = self.num_pages
        self.max_tokens = before * self.page_size * self.cp_size + check_size("tokens", tokens)
        for free in self._free:
            free[:0] = reversed(range(before, self.num_pages))  # taken last
        self._note("grow", tokens)

    def check_known(self, requests: Sequence[int], name: str = "requests") -> None:
        """Check that requests, an argument's ``name``, are there, each once.

        Raises:
            ValueError: They are not.
        """
        unknown = [x for x in requests if not is_integer(x) or x not in self._requests]
        if unknown or not requests:
            raise ValueError(
                f"{name} must be what add or fork returned, got {unknown or list(requests)}; "
                f"there are {sorted(self._requests) or 'none'}"
            )
        if len(set(requests)) < len(requests):
            raise ValueError(f"{name} must be there once each, got {list(requests)}")

    def _counts(
        self, copied: list[tuple[int, int]], added: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return for each rank how many pages are needed, and how many are free."""
        need = Counter(number % self.cp_size for _, number in (*copied, *added))
        return [(need[rank], len(self._free[rank])) for rank in range(self.cp_size)]

    def _needs(
        self, requests: Sequence[int], n: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the pages that ``n`` more tokens copy, and those that they add.

        A page is a request and the page's number in it.
        """
        copied, added = [], []
        given_up: Counter[tuple[int, int]] = Counter()
        for request in requests:
            known = self._requests[request]
            number = known.length // self.page_size
            if number < len(known.pages):  # the last page has room
                page = number % self.cp_size, known.pages[number]
                # Of requests that share a page the last one to write keeps it.
                if self._shared[page[0]][page[1]] - given_up[page] > 1:
                    given_up[page] += 1
                    copied.append((request, number))
            stop = -(-(known.length + n) // self.page_size)
            added += [(request, number) for number in range(len(known.pages), stop)]
        return copied, added

    def _take(self, rank: int) -> int:
        page = self._free[rank].pop()
        self._shared[rank][page] = 1
        return page

    def _drop(self, rank: int, page: int) -> None:
        self._shared[rank][page] -= 1
        if self._shared[rank][page] == 0:
            del self._shared[rank][page]
            self._free[rank].append(page)

    def _check_requests(self, n: int) -> None:
        if n > len(self._free_requests):
            raise ValueError(
                f"{n} more requests than the {len(self._requests)} that there are exceed "
                f"max_requests={self.max_requests}: evict some, or make the cache for more"
            )

    def _note(self, *change: Any) -> None:
        """Let a change go into the digest, which is quick however many there were."""
        text = f"{self.state:x} {' '.join(map(str, change))}".encode()
        self.state = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def own_positions(start: int, stop: int, page_size: int, rank: int, cp_size: int) -> Ints:
    """Return the positions from ``start`` to ``stop`` whose pages are a rank's, ascending, int64.

    >>> own_positions(3, 14, page_size=4, rank=0, cp_size=2)
    array([ 3,  8,  9, 10, 11])
    """
    positions: Ints = np.arange(start, stop, dtype=np.int64)
    own: Ints = positions[positions // page_size % cp_size == rank]
    return own


def to_pages(layout: Layout, start: int, page_size: int, skipped: int = 0) -> PagesMovement:
    """Return the movement of new tokens from their layout to the ranks of their pages.

    A rank gets the rows of :func:`own_positions`, in this order, and none for padding.

    Args:
        layout: The layout of the new tokens, with its padding.
        start: Position of the first new token.
        page_size: Tokens of a page.
        skipped: Number of rows before the first new token, which move nowhere.

    >>> part = to_pages(Layout("contiguous", seq_len=8, cp_size=2), 2, page_size=4).exchange(0)
    >>> part.sent, part.received  # positions 4 and 5 leave rank 0, 8 and 9 arrive
    (((1, 2),), ((1, 2),))
    """
    size, stop = layout.cp_size, start + layout.seq_len - skipped
    first = np.arange(start // page_size, -(-stop // page_size), dtype=np.int64)
    rank = first % size
    begin = np.maximum(first * page_size, start)
    length = np.minimum((first + 1) * page_size, stop) - begin
    # Rows of a rank's pages lie behind each other, whatever other ranks hold between them.
    local = np.empty_like(begin)
    rows = np.zeros(size, dtype=np.int64)
    for r in range(size):
        own = rank == r
        local[own] = np.cumsum(length[own]) - length[own]
        rows[r] = length[own].sum()
    target = RunTable(rank, local, length, begin - start + skipped, 1)
    tokens = ranges_of(np.array([skipped]), np.array([layout.seq_len]))
    return PagesMovement(
        runs_of(layout), target, layout.local_len, 0, tokens if layout.pad_to or skipped else None,
        rows_by_rank=tuple(rows.tolist()),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PagesMovement(Movement):
    """A movement to ranks that get unlike numbers of rows, maybe none.

    Attributes:
        rows_by_rank: Number of rows that each rank gets.
    """

    rows_by_rank: tuple[int, ...] = ()

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return how many rows a rank holds, and how many it gets."""
        return self.source_rows, self.rows_by_rank[rank]
