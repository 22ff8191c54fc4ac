"""Estimate the cost of TPU kernels from their machine code, without a TPU: ``nox -s tpu_static``.

Each kernel is compiled for each generation of chips. A TPU core issues one bundle of instructions
per cycle, so the bundles of a kernel's loop, each times how often it runs, over the visible (query,
key) pairs, are the cycles per pair when no fetch is waited for. They are printed, and written as
JSON where ``--json`` says, for our kernels at the block sizes that they choose themselves, and for
jax's splash attention at those that are best for it, with the ratio. The forward is that of
training, which keeps ``lse``.

A kernel's loop walks over blocks. Code outside all branches runs for each of them, and so does a
branch that starts copies. A branch with matrix products runs for the blocks of its kind: the first
for full blocks, the second for partly masked ones. Any other branch runs once for each row of
blocks. Not counted are the branch for NaN and infinity, and what a branch jumps over inside:
waiting for the first block of dQ.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.common.harness import Report, command
from ring_core.tools.bench import watched

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
LENGTH, HEADS, KV_HEADS, DIM = 8192, 8, 2, 128
WINDOW = 1024
SPLASH_SIZES = ((512, 512), (512, 1024), (1024, 1024), (1024, 2048))

#: Bands ``low <= i - j <= high`` of masks, and steps of a plain ring as ``(mask, offset of the
#: queries)``; all shards but the first run these.
BANDS = {"full": (-LENGTH, LENGTH), "causal": (0, LENGTH), "window": (0, WINDOW - 1)}
MASKS: dict[str, tuple[tuple[str, int], ...]] = {
    "full": (("full", 0),),
    "causal": (("causal", 0),),
    "window over a ring": (("window", 0), ("window", LENGTH)),
}

Pass = Literal["forward", "backward"]
DIRECTIONS: tuple[Pass, Pass] = ("forward", "backward")
#: Four numbers: bundles of a kernel's loop for every visit, for a row of blocks, for a full block
#: and for a partly masked one; or how many of these a kernel has.
Loop = tuple[int, int, int, int]


class Program(NamedTuple):
    """A program to compile: a pass for a mask, with block sizes of queries and of keys."""

    direction: Pass
    mask: str
    q: int
    k: int


def measure(topology: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one generation, of code that is dumped in a folder."""
    from ring_jax_tpu.block_sizes import GENERATIONS, Shape, default_sizes

    generation = next(x for x in GENERATIONS.values() if x.name == topology.partition(":")[0])
    shape = Shape(DIM, DIM, 2, has_bias=False, has_dropout=False)
    own: dict[tuple[str, str], Program] = {}
    for (name, steps), direction in product(MASKS.items(), DIRECTIONS):
        is_window = steps[0][0] == "window"
        sizes = default_sizes(direction, shape, WINDOW if is_window else math.inf, generation)
        # Blocks without a mask are a branch of every program.
        own[direction, name] = Program(direction, "window" if is_window else "causal", *sizes)
    splash = [Program(x, "causal", *sizes) for x, sizes in product(DIRECTIONS, SPLASH_SIZES)]
    code = {
        "ours": loops(topology, folder, "ours", list(dict.fromkeys(own.values()))),
        "splash": loops(topology, folder, "splash", splash),
    }
    for name, steps in MASKS.items():
        row: dict[str, Any] = {"topology": topology, "mask": name}
        pairs = 0  # visible ones
        for mask, offset in steps:
            (low, high), rows = BANDS[mask], np.arange(LENGTH) + offset
            seen = np.minimum(rows - low, LENGTH - 1) - np.maximum(0, rows - high) + 1
            pairs += HEADS * int(np.maximum(0, seen).sum())
        for direction in DIRECTIONS:
            for who, candidates in (("ours", [own[direction, name]]), ("splash", splash)):
                costs = {
                    program: sum(
                        math.sumprod(loop, visited(who, kernel, (program.q, program.k), *step))
                        for (kernel, loop), step in product(code[who][program].items(), steps)
                    )
                    for program in candidates
                    if program.direction == direction and program in code[who]
                }
                best = min(costs, key=lambda program: costs[program])
                row[f"{direction} {who}"] = round(1000 * costs[best] / pairs, 2)
                row[f"{direction} {who} blocks"] = best[2:]
            ratio = row[f"{direction} ours"] / row[f"{direction} splash"]
            row[f"{direction} ratio"] = round(ratio, 3)
        yield row


def visited(who: str, kernel: str, sizes: tuple[int, int], mask: str, offset: int) -> Loop:
    """Return how many blocks a kernel visits in a step, rows of them, full and partly masked ones.

    Ours visits live blocks alone; splash visits as many in each row as in the fullest.
    """
    (q, k), (low, high) = sizes, BANDS[mask]
    top, key = np.arange(0, LENGTH, q)[:, None] + offset, np.arange(0, LENGTH, k)
    nearest, furthest = top - (key + k - 1), top + q - 1 - key
    shown = (furthest >= low) & (nearest <= high)
    full = int((shown & (nearest >= low) & (furthest <= high)).sum())
    # The outer loop of these kernels runs over blocks of keys.
    by_row = shown.sum(0 if "dkv" in kernel or "fused" in kernel else 1)
    rows, live = int((by_row > 0).sum()), int(shown.sum())
    visits = live
    if who == "splash":
        rows, visits = by_row.size, by_row.size * int(by_row.max())
    return HEADS * visits, HEADS * rows, HEADS * full, HEADS * (live - full)


def devices_of(topology: str) -> Any:
    """Return the devices of a topology, of which there need be none on this machine."""
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def loops(
    topology: str, folder: Path, who: str, programs: list[Program]
) -> dict[Program, dict[str, Loop]]:
    """Compile programs for one device of a topology; return the loops of each, by kernel.

    Programs that do not fit into the chip's memory are left out.
    """
    sharding = NamedSharding(Mesh(np.array(devices_of(topology)[:1]), ("x",)), PartitionSpec())
    q, k = (
        jax.ShapeDtypeStruct((1, heads, LENGTH, DIM), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS)
    )

    def one_pass(attend: Any, q: Any, k: Any, v: Any, *dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return pull(*dout) if dout else out

    code: dict[Program, dict[str, Loop]] = {}
    for program in programs:
        direction, mask, *sizes = program
        run = partial(one_pass, _ours(mask) if who == "ours" else _splash(*sizes))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            jax.jit(run).lower(q, k, k, *[q] * (direction == "backward")).compile()
        except jax.errors.JaxRuntimeError as error:
            if who == "ours" or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        code[program] = {
            match[1]: parse(path.read_text())
            for path in folder.glob("*-final_bundles.txt")
            if "analysis" not in path.name
            # Programs of a backward run the forward, too.
            and (direction == "forward") == ("fwd" in path.name)
            and (match := re.match(r"\d+-(\w*(?:ring|splash)_\w+)[.\d]*-\d+-final", path.name))
        }
        assert code[program], f"no kernel was dumped for {topology}, {program}"
    return code


class Branch(NamedTuple):
    """A branch over the bundles between two addresses."""

    start: int
    stop: int

    def holds(self, addresses: list[int]) -> bool:
        """Return True if one of the addresses lies inside."""
        return any(self.start < address < self.stop for address in addresses)

    def covers(self, other: Branch) -> bool:
        """Return True if another branch lies inside."""
        return self != other and self.start <= other.start and other.stop <= self.stop


def largest(branches: list[Branch]) -> list[Branch]:
    """Return the branches that lie in no other."""
    return [b for b in branches if not any(other.covers(b) for other in branches)]


def bundles(branches: list[Branch]) -> int:
    """Return the number of bundles in branches, of which those inside others count once."""
    return sum(branch.stop - branch.start for branch in largest(branches))


def parse(text: str) -> Loop:
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
    copies = [address for address, rest in body if re.search(r"dma\.\w+_to_", rest)]
    computing = of_kinds([b for b in jumps if b.holds(products)], products)
    # Of a kind of block, what branches inside jump over is not counted.
    kinds = [bundles([b]) - bundles([x for x in jumps if b.covers(x)]) for b in sorted(computing)]
    beside = [
        b for b in jumps
        if not any(c.start <= b.start < c.stop or b.start <= c.start < b.stop for c in computing)
    ]  # fmt: skip
    always = [b for b in beside if b.holds(copies)]
    rare = bundles([b for b in beside if b not in always and not any(c.covers(b) for c in always)])
    rest = len(body) - rare - bundles(computing)
    return rest, rare, kinds[0], kinds[min(1, len(kinds) - 1)]


def of_kinds(heavy: list[Branch], products: list[int]) -> list[Branch]:
    """Return the branches that compute, without those that only wrap them."""
    outer = largest(heavy)
    inside = [b for b in heavy if b not in outer]
    in_outer = [x for x in products if any(b.holds([x]) for b in outer)]
    wraps = all(any(b.holds([x]) for b in inside) for x in in_outer)
    return of_kinds(inside, products) if inside and wraps else outer


def _ours(mask: str) -> Any:
    from ring_jax_tpu import ring_attention

    options: Any = {"window": (WINDOW - 1, 0)} if mask == "window" else {}

    def attend(*inputs: Any) -> Any:
        tokens = (x.swapaxes(1, 2) for x in inputs)
        out = ring_attention(*tokens, axis_name=None, causal=True, kernel="pallas", **options)
        return out.swapaxes(1, 2)

    return attend


def _splash(q: int, k: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    blocks = splash.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=min(k, 512), block_q_dkv=q, block_kv_dkv=k,
        block_kv_dkv_compute=min(k, 512), use_fused_bwd_kernel=True,
    )  # fmt: skip
    heads = HEADS // KV_HEADS
    mask = splash.MultiHeadMask([splash.CausalMask((LENGTH, LENGTH))] * heads)
    kernel = splash.make_splash_mqa_single_device(mask, block_sizes=blocks)

    def attend(q: Any, k: Any, v: Any) -> Any:
        grouped = q.reshape(1, KV_HEADS, heads, LENGTH, DIM)
        return jax.vmap(jax.vmap(kernel))(grouped, k, v).reshape(q.shape)

    return attend


@command(__doc__, {"--topology": {"nargs": "*", "default": TOPOLOGIES, "help": "of these alone"}})
def main(options: Any) -> int:
    """Compile everything and print the figures."""
    print(
        f"bundles per thousand visible pairs and heads, T = {LENGTH} per device, H = {HEADS}, "
        f"K = {KV_HEADS}, D = {DIM}, bfloat16"
    )
    report = Report(options, {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "dumped")
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{dump} --xla_jf_dump_llo_pass_label_regex=final_bundles"
        for topology in watched(options.topology, len(options.topology), "topology"):
            report.add(*measure(topology, folder))
    return 0
