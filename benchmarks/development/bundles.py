"""Count the instruction bundles of a TPU kernel's loop, in the machine code that XLA dumps.

A kernel's loop walks over blocks. Code outside all branches runs for each of them, and so does a
branch that starts copies. A branch with matrix products runs for the blocks of its kind: the first
for full blocks, the second for partly masked ones. Any other branch runs once for each row of
blocks. Not counted are the branch for NaN and infinity, and what a branch jumps over inside:
waiting for the first block of dQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
DIRECTIONS: tuple[Pass, Pass] = ("forward", "backward")


class Blocks(NamedTuple):
    """Numbers of blocks that a kernel visits: full, partly masked and empty; and of rows."""

    full: int
    partial: int
    empty: int  # visited all the same
    rows: int


@dataclass(frozen=True)
class StepRunner:
    """Bundles of a kernel's loop: of every visit, of a row, of a full and a partial block."""

    always: int
    rare: int
    full: int
    partial: int

    def total(self, blocks: Blocks) -> int:
        """Return how many bundles are issued for these blocks."""
        visits = blocks.full + blocks.partial + blocks.empty
        products = self.full * blocks.full + self.partial * blocks.partial
        return self.always * visits + self.rare * blocks.rows + products


def kernels_in(folder: Path, direction: Pass) -> dict[str, StepRunner]:
    """Return the loops of a pass's kernels in a folder of dumps, by kernel name."""
    return {
        match[1]: parse(path.read_text())
        for path in folder.glob("*-final_bundles.txt")
        if "analysis" not in path.name
        and is_of(direction, path.name)
        and (match := re.match(r"\d+-(\w*(?:ring|splash)_\w+)[.\d]*-\d+-final", path.name))
    }


def is_of(direction: str, name: str) -> bool:
    """Return True if a dump is of a kernel of this pass; backward programs run the forward, too."""
    return (direction == "forward") == bool(re.search("fwd", name))


class Branch(NamedTuple):
    """A branch over the bundles between two addresses."""

    start: int
    stop: int

    def holds(self, addresses: list[int]) -> bool:
        """Return True if one of the addresses lies inside."""
        return any(self.start < address < self.stop for address in addresses)

    def covers(self, other: Branch) -> bool:
        """Return True if another branch lies inside."""
        return self.start <= other.start and other.stop <= self.stop


def parse(text: str) -> StepRunner:
    """Count the bundles of a kernel's loop by what they run for."""
    lines = re.findall(r"^ *(0x[0-9a-f]+|0) +(?:\w\w)?: +(>*)(.*)$", text, re.MULTILINE)
    body = [(int(address, 16), rest) for address, depth, rest in lines if depth]
    ends = {
        number: address
        for address, rest in body
        for number in re.findall(r"Start/End empty region (\d+)", rest)
    }
    jumps = [
        Branch(address, ends[number])
        for address, rest in body
        for number in re.findall(r"sbr\.rel.*?target = \$region(\d+)", rest)
        if ends.get(number, -1) > address
    ]
    products = [address for address, rest in body if re.search(r"vmatmul|vmxu|vmatpush", rest)]
    computing = branches_of_kinds([b for b in jumps if b.holds(products)], products)
    chosen = [length_of(b, jumps) for b in sorted(computing)]
    copies = [address for address, rest in body if re.search(r"dma\.\w+_to_", rest)]
    skipped = [
        b
        for b in jumps
        if not any(c.start <= b.start < c.stop or b.start <= c.start < b.stop for c in computing)
    ]
    always = [b for b in skipped if b.holds(copies)]
    once = [b for b in skipped if not any(c.covers(b) for c in always)]
    rare = sum(b.stop - b.start for b in once if not any(o != b and o.covers(b) for o in once))
    within = sum(b.stop - b.start for b in computing)
    return StepRunner(len(body) - rare - within, rare, chosen[0], chosen[min(1, len(chosen) - 1)])


def length_of(branch: Branch, jumps: list[Branch]) -> int:
    """Return the number of bundles of a branch, without those that branches inside jump over."""
    inside = [b for b in jumps if b != branch and branch.covers(b)]
    largest = [b for b in inside if not any(o != b and o.covers(b) for o in inside)]
    return branch.stop - branch.start - sum(b.stop - b.start for b in largest)


def branches_of_kinds(heavy: list[Branch], products: list[int]) -> list[Branch]:
    """Return the branches that compute, without those that only wrap them."""
    largest = [b for b in heavy if not any(o != b and o.covers(b) for o in heavy)]
    inside = [b for b in heavy if b not in largest]
    wraps = all(
        any(b.holds([address]) for b in inside)
        for address in products
        if any(b.holds([address]) for b in largest)
    )
    return branches_of_kinds(inside, products) if inside and wraps else largest
