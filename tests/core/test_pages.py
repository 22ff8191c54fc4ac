"""Tables of pages, compared with requests that are lists of tokens."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ring_core.pages import PageTable

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
        request = self.random.choice(known or [-1])
        if change == "add" and len(known) < 5:
            self.tokens |= {new: [] for new in table.add(1)}
        elif change == "extend" and known:
            requests = self.random.sample(known, self.random.randint(1, len(known)))
            self.extend(requests, self.random.choice([1, 1, 3, 4, 5, 4 * self.size + 1]))
        elif change == "truncate" and known:
            length = self.random.randint(0, len(self.tokens[request]))
            table.truncate(request, length)
            del self.tokens[request][length:]
        elif change == "fork" and known and len(known) < 5:
            self.tokens[table.fork(request)] = [*self.tokens[request]]
        elif change == "evict" and known:
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
