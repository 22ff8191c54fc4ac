"""Tables of pages, compared with requests that are lists of tokens."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from ring_core import Layout
from ring_core.pages import PageTable, own_positions, to_pages

PAGE = 4


class Requests:
    """A table, and for each page the names of the tokens that it holds."""

    def __init__(self, size: int, seed: int, tokens: int) -> None:
        self.random, self.size = Random(seed), size
        self.table = PageTable(cp_size=size, page_size=PAGE, max_requests=5, max_tokens=tokens)
        self.tokens: dict[int, list[int]] = {}  # names of each request's tokens
        self.memory: dict[tuple[int, int], dict[int, int]] = {}  # (rank, page): rows
        self.names = 0

    def rows(self, request: int, start: int, stop: int) -> list[tuple[tuple[int, int], int]]:
        """Return page and row of each position, by the rule of pages alone."""
        pages = [self.table.pages_of(request, rank) for rank in range(self.size)]
        return [
            ((n % self.size, pages[n % self.size][n // self.size]), t % PAGE)
            for t in range(start, stop)
            for n in [t // PAGE]
        ]

    def extend(self, requests: list[int], n: int) -> None:
        before = self.table.lengths, self.table.state, [[*x] for x in self.table._free]
        lacks = self.table.lacks(requests, n)
        try:
            copies = self.table.extend(requests, n)
        except ValueError:
            assert lacks > 0
            assert before == (self.table.lengths, self.table.state, self.table._free)
            self.table.grow(PAGE * self.size * lacks)
            copies = self.table.extend(requests, n)
        else:
            assert lacks == 0
        for rank, source, target in copies:
            self.memory[rank, target] = dict(self.memory[rank, source])
        for request in requests:
            old = len(self.tokens[request])
            for page, row in self.rows(request, old, old + n):
                self.names += 1
                self.memory.setdefault(page, {})[row] = self.names
                self.tokens[request].append(self.names)

    def step(self) -> None:
        known, table = sorted(self.tokens), self.table
        change = self.random.choice(["extend"] * 4 + ["truncate", "fork", "fork", "add", "evict"])
        if change == "add" and len(known) < 5:
            self.tokens |= {request: [] for request in table.add(1)}
        elif change == "extend" and known:
            requests = self.random.sample(known, self.random.randint(1, len(known)))
            self.extend(requests, self.random.choice([1, 1, 3, 4, 5, 4 * self.size + 1]))
        elif change == "truncate" and known:
            request = self.random.choice(known)
            length = self.random.randint(0, len(self.tokens[request]))
            table.truncate(request, length)
            del self.tokens[request][length:]
        elif change == "fork" and known and len(known) < 5:
            request = self.random.choice(known)
            self.tokens[table.fork(request)] = [*self.tokens[request]]
        elif change == "evict" and known:
            request = self.random.choice(known)
            table.evict(request)
            del self.tokens[request]

    def check(self) -> None:
        assert self.table.lengths == {x: len(tokens) for x, tokens in self.tokens.items()}
        for request, tokens in self.tokens.items():
            rows = self.rows(request, 0, len(tokens))
            assert [self.memory[page][row] for page, row in rows] == tokens
        for rank in range(self.size):
            users = Counter(page for x in self.tokens for page in self.table.pages_of(x, rank))
            assert self.table._shared[rank] == users
            free = self.table._free[rank]
            assert sorted([*free, *users]) == list(range(self.table.num_pages))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_request_changes_what_another_holds(size: int, seed: int) -> None:
    one, other = (Requests(size, seed, 60) for _ in range(2))
    for _ in range(150):
        one.step()
        other.step()
        one.check()
        assert one.table.state == other.table.state  # ranks that make the same changes
    other.table.add(1) if len(other.tokens) < 5 else other.table.evict(min(other.tokens))
    assert one.table.state != other.table.state


@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31])
@pytest.mark.parametrize("start", [0, 3, 4, 13])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_token_goes_to_the_rank_of_its_page(
    size: int, layout: str, start: int, n: int, skipped: int
) -> None:
    rows = Layout.padded(layout, n + skipped, size)  # type: ignore[arg-type]  # a parameter of the test
    movement = to_pages(rows, start, PAGE, skipped)
    held = [rows.positions(rank) for rank in range(size)]  # rows by their number
    parts = [movement.exchange(rank) for rank in range(size)]
    sent = {}
    for rank, part in enumerate(parts):
        buffer = np.full(part.pack.rows, -1)
        for read, written in part.pack.slices():
            buffer[written] = held[rank][read]
        first = 0
        for peer, count in part.sent:
            sent[rank, peer] = buffer[first : first + count]
            first += count
    for rank, part in enumerate(parts):
        got = np.full(movement.rows_of(rank)[1], -1)
        for read, written in part.local.slices():
            got[written] = held[rank][read]
        arrived = [sent[peer, rank] for peer, _ in part.received]
        buffer = np.concatenate([*arrived, np.zeros(0, dtype=np.int64)])
        for read, written in part.unpack.slices():
            got[written] = buffer[read]
        positions = own_positions(start, start + n, PAGE, rank, size)
        assert (got - skipped + start).tolist() == positions.tolist()
        assert all(t // PAGE % size == rank for t in positions)


def test_what_a_table_refuses() -> None:
    with pytest.raises(ValueError, match="page_size must be a power of two, got 24"):
        PageTable(cp_size=1, page_size=24, max_requests=1, max_tokens=1)
    table = PageTable(cp_size=2, page_size=PAGE, max_requests=2, max_tokens=17)
    assert table.num_pages == 3  # rounded up, as many on each rank
    first, _ = table.add(2)
    for call, message in (
        (lambda: table.add(1), "exceed max_requests=2"), (lambda: table.fork(first), "exceed max_requests=2"),
        (lambda: table.extend([first, first], 1), "there once each"), (lambda: table.extend([7], 1), r"got \[7\]"),
        (lambda: table.extend([], 1), r"got \[\]"), (lambda: table.extend([first], 0), "n must be at least 1"),
        (lambda: table.truncate(first, 1), r"length must be in 0\.\.0"),
        (lambda: table.extend([first], 25), "need 4 pages of 4 tokens on rank 0, which has 3 of 3 free"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
