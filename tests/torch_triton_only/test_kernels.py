"""The Triton kernels on torch tensors, in Triton's interpreter: whole calls on CPU ranks.

They compile for GPUs that are not installed, within their limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from backends.torch_compiler import compiled
from backends.torch_ranks import gather, run_rank
from blocks import several_blocks
from cases import CASES, Case, diagonals
from patched import chosen
from refused import refused
from tolerances import assert_close

from ring_core import (
    KernelConfig,
    Mask,
    Request,
    UnsupportedError,
    WorkItem,
    make_plan,
    ring_program,
)
from ring_core.base.arguments import FULL, PARTIAL
from ring_core.plan.tile_mask import BlockGeometry
from ring_torch import ContextParallel, autograd
from ring_torch.kernels import choose, triton as adapter
from ring_torch.kernels.block_index import Grid, block_index, kinds_on
from ring_torch.kernels.fa4.block_lists import block_lists
from ring_torch.kernels.triton import TritonKernel, launch
from ring_torch.local import LocalRanks

SMALL = KernelConfig("triton", block_q=32, block_k=32)
CONFIGS = {
    "small": SMALL, "fused": replace(SMALL, fused_backward=True),
    "64x16": KernelConfig("triton", 64, 16), "16x256": KernelConfig("triton", 16, 256),
}  # fmt: skip
BLOCKS = several_blocks(80, 150)
#: Cases of several blocks on one device; the others run in JAX, which has the same kernels.
ALONE = [
    *((name, "small") for name in (
        "causal", "window", "documents", "predicate", "predicate-documents", "keys", "gqa", "float16",
        "segments-chunks", "segments-documents", "dropout", "bias-shared", "bias-very-negative",
        "bias-large", "poison-k", "v-inf", "bias-nan",
    )),
    *((name, "fused") for name in ("causal", "gqa", "poison-k", "everything", "bias-very-negative")),
    *product(("window-both", "predicate", "segments-documents"), ("64x16", "16x256")),
]  # fmt: skip
#: Cases of the shared table, and the strategy.
RING = [
    *((name, "ring") for name in (
        "causal-zigzag-cp2", "window-small-striped-cp2", "everything-zigzag", "predicate-zigzag-cp2",
        "predicate-balanced-cp4", "bias-masked-balanced", "alibi-batch-striped", "options-random-cp2",
        "batch-0-contiguous", "bias-very-negative-segments-balanced",
        "shown-bias-balanced", "shown-sinks-striped", "keys64-predicate-contiguous",
        "shortest-zigzag-cp2", "poison-v-contiguous", "sinks-large-contiguous",
    )),
    *((name, "gather") for name in (
        "everything-contiguous", "documents-window-zigzag-cp4", "mqa-zigzag",
        "bias-very-negative-zigzag", "shown-documents-zigzag", "shown-contiguous",
    )),
    *((f"views{n}-contiguous", ("ring", "gather", "ulysses")[n % 3]) for n in range(1, 8)),
]  # fmt: skip


def run(pools: dict[int, LocalRanks], case: Case, config: KernelConfig, strategy: str) -> None:
    """Compare a case's results with the oracle's."""
    parts = pools[case.cp_size].run(_on_a_rank, replace(case), config, strategy)
    assert_close(case, gather(case, case.plan, parts))


def _on_a_rank(rank: int, case: Case, config: Any, strategy: str) -> Any:
    elementwise = patch.object(autograd, "_can_use_triton", lambda _, dtype: dtype == torch.float32)
    with chosen(TritonKernel(), elementwise):
        return run_rank(rank, case, (config, case.moved(strategy), "auto"), None, cuda=False)


@pytest.mark.nightly(unless=[
    *(f"{name}-small" for name in ("predicate-documents", "keys", "dropout")),
    *(f"{name}-fused" for name in ("causal", "everything", "bias-very-negative")), "window-both-64x16",
])  # fmt: skip
@pytest.mark.parametrize(("name", "config"), ALONE)
def test_several_blocks(name: str, config: str, pools: dict[int, LocalRanks]) -> None:
    run(pools, BLOCKS[name], CONFIGS[config], "ring")


@pytest.mark.nightly(only=[
    "everything-contiguous-gather", "documents-window-zigzag-cp4-gather",
    "bias-masked-balanced-ring", "alibi-batch-striped-ring", "mqa-zigzag-gather",
    "options-random-cp2-ring", "keys64-predicate-contiguous-ring", "shown-bias-balanced-ring",
    "shown-sinks-striped-ring",
    *(f"views{n}-contiguous-{way}" for n, way in ((2, "ulysses"), (3, "ring"), (5, "ulysses"), (6, "ring"), (7, "gather"))),
])  # fmt: skip
@pytest.mark.parametrize(("name", "strategy"), RING)
def test_in_the_ring(name: str, strategy: str, pools: dict[int, LocalRanks]) -> None:
    run(pools, CASES[name], KernelConfig("triton"), strategy)


T, BLOCK = 64, 16


def _visited(_: int, layout: Any) -> tuple[int, int]:
    """Return the number of blocks that the forward visits, and of those with visible pairs."""
    cp, counts = ContextParallel(layout=layout), list[int]()
    kernel = KernelConfig("triton", block_q=BLOCK, block_k=BLOCK)
    torch.manual_seed(0)
    chunk = torch.arange(T) // 24  # squares on the diagonal that are no multiple of a block
    mask = (chunk[:, None] == chunk) & (torch.rand(2, 1, T, T) < 0.7)
    qkv = [torch.randn(2, T, 2, 16) for _ in range(3)]

    def counting(*args: Any) -> Any:
        listed = block_index(*args)
        counts.append(int(listed.counts.sum()))
        return listed

    with chosen(TritonKernel(), patch.object(launch, "block_index", counting)):
        cp.attention(*map(cp.shard, qkv), mask=cp.shard(mask, dim=-2), kernel=kernel)
    rows, live = cp.shard(mask, dim=-2)[:, 0], 0
    for rank in range(cp.cp_size):
        keys = torch.as_tensor(cp.layout_of(T).positions(rank))
        blocks = rows[..., keys].unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
        live += int(blocks.any(dim=4).any(dim=2).sum())
    return sum(counts), live


@pytest.mark.nightly(only=["striped"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_hidden_blocks_are_on_no_list(layout: Any, pool: LocalRanks) -> None:
    for visited, live in pool.run(_visited, layout):
        assert visited == live
        assert live < 2 * (T // 2 // BLOCK) * (T // BLOCK) or layout == "striped"


REQUEST = Request("cuda", "bfloat16", 128, 128, bias=True, grad=True)
CAUSAL, PREDICATE = Mask(causal=True), Mask(predicate=diagonals)


@pytest.fixture
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPU is a Hopper; libraries that need a real one report it missing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def chosen_for(config: KernelConfig, mask: Mask = CAUSAL, **changes: Any) -> str:
    program = ring_program(make_plan(mask, seq_len=256, cp_size=2, layout="contiguous"))
    return choose(config, replace(REQUEST, **changes), program).kernel.capabilities.name


#: Settings, options, what is found of the machine, and the error.
CANNOT: tuple[tuple[dict[str, Any], dict[str, Any], Any, str], ...] = (
    ({"block_q": 96}, {}, None, "block_q must be a power of two from 16 to 256, got 96"),
    ({"block_q": 256, "block_k": 256}, {"head_dim": 256}, None, "227 KiB of shared memory"),
    ({"fused_backward": True}, {"deterministic": True}, None, "deterministic=True rules out"),
    ({}, {"head_dim": 512}, None, "head dims up to 256, not 512"),
    ({}, {"mask": PREDICATE}, (BlockGeometry, "tiles", None), "more than 64 MiB"),
    ({}, {}, (adapter, "has_triton", lambda: False), "triton is not installed"),
    ({}, {}, (torch.cuda, "get_device_capability", lambda *_: (7, 5)), "compute capability 8.0 or newer"),
    ({}, {}, (torch.version, "cuda", None), "for NVIDIA GPUs"),
)  # fmt: skip


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(("settings", "changes", "found", "message"), CANNOT)
def test_settings_and_machines_that_it_refuses(
    settings: dict[str, Any], changes: dict[str, Any], found: Any, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if found:
        monkeypatch.setattr(*found)
    config = KernelConfig("triton", **settings)
    refused(message, chosen_for, config, **changes, error=UnsupportedError)
    if settings.keys() <= {"block_q"}:  # no other kernel has the other settings
        assert chosen_for(KernelConfig(**settings), **changes) == "eager"


Q_LEN, K_LEN = 420, 650
SIZES = [(128, 128), (128, 96), (128, 80), (128, 112), (128, 64)]
BANDS = {"full": (None, None), "causal": (-200, None), "window": (-30, 90)}
IDS: dict[str, Callable[[Any, int], Any]] = {
    "sorted": lambda rng, n: np.sort(rng.integers(0, 5, (2, n)), axis=1),
    "scattered": lambda rng, n: rng.integers(-1, 3, (2, n)),
    "padded": lambda _, n: np.where(np.arange(n) < n // 2, 3, -1)[None].repeat(2, axis=0),
    "alike": lambda _, n: np.full((2, n), 7),
}


def check(item: WorkItem, size: tuple[int, int], visible: Any, ids: Any, blocks: Any) -> Any:
    """Check that each visible pair is in a block listed once, and that full blocks are full.

    Return the lists of key blocks by queries.
    """
    for by_columns in (True, False):
        grid = Grid(*size, False, by_columns, torch.device("cpu"), blocks)
        lists = block_lists(item, grid, ids)
        down, across = -(-Q_LEN // size[0]), -(-K_LEN // size[1])
        outer, inner = (across, down) if by_columns else (down, across)
        for b, o in product(range(len(visible)), range(outer)):
            listed: dict[int, bool] = {}
            for full in (False, True):
                counts, numbers = lists[2:] if full else lists[:2]
                found = numbers[b, o, : int(counts[b, o])].tolist()
                assert found == sorted(found)
                assert not listed.keys() & set(found)
                listed |= dict.fromkeys(found, full)
            for i in range(inner):
                (row, column), (q, k) = ((i, o) if by_columns else (o, i)), size
                cells = visible[b, row * q : row * q + q, column * k : column * k + k]
                assert i in listed or not cells.any(), (b, o, i)
                assert not listed.get(i) or (cells.all() and cells.shape == size), (b, o, i)
    return lists, grid


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("kind", IDS)
def test_segments(kind: str, band: Any, size: tuple[int, int]) -> None:
    """Lists from segment ids are made on the device, from each block's least and largest id."""
    rng = np.random.default_rng(1)
    q_ids, k_ids = (IDS[kind](rng, n).astype(np.int32) for n in (Q_LEN, K_LEN))
    item = WorkItem(0, 0, 0, 0, Q_LEN, 0, K_LEN, *band)
    apart = np.arange(Q_LEN)[:, None] - np.arange(K_LEN)
    inside = (apart >= (band[0] or -9999)) & (apart <= (band[1] or 9999))
    same = (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids[:, :, None] >= 0)
    ids = torch.as_tensor(q_ids), torch.as_tensor(k_ids)
    (partial, _, full, _), grid = check(item, size, inside & same, ids, None)
    if kind == "alike":  # as good as those of the band
        kinds = kinds_on(item, grid)
        for counts, expected in ((full, FULL), (partial, PARTIAL)):
            assert int(counts[0].sum()) == int((kinds == expected).sum())


@pytest.mark.parametrize("size", SIZES)
def test_predicate(size: tuple[int, int]) -> None:
    """Lists of a predicate come from the plan's tiles, also if block sizes do not divide them."""

    def rule(i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j < 150) | (j % 256 < 32))

    plan = make_plan(Mask(predicate=rule), seq_len=Q_LEN, cp_size=1, kv_seq_len=K_LEN)
    (item,) = ring_program(plan).items(0, 0)
    rows, columns = plan.q_positions(0)[item.q_slice], plan.k_positions(0)[item.k_slice]
    assert (len(rows), len(columns)) == (Q_LEN, K_LEN)
    check(item, size, rule(rows[:, None], columns)[None], None, plan.blocks)


#: Bytes of shared memory per thread block, by compute capability.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CALL = ["fwd", "bwd_dq", "bwd_dkv"]
#: Kernels of a call, or of passes, by the names of calls.
KERNELS = {
    "causal": CALL, "fused": ["fwd", "bwd_dkv"], **dict.fromkeys(("wide", "odd", "predicate"), CALL),
    **dict.fromkeys(("segments", "dropout"), CALL), "bias": [*CALL, "bwd_dbias"],
    "passes": ["_list_blocks", "_row_dots", "_sum_sinks"], "merges": ["_merge_results"] * 7,
    "exchanges": [
        *["_exchange_keys"] * 2, "_finish_reading", "_wait_reusable", "_add_peers", "_assert_words",
    ],
}  # fmt: skip


@pytest.mark.nightly(unless=[
    f"{name}-90" for name in ("causal", "exchanges", "passes", "merges")
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "arch"), [("causal", 80), ("causal", 100), *((name, 90) for name in KERNELS)]
)
def test_they_compile(name: str, arch: int) -> None:
    kernels = compiled([name], arch)
    assert [x["kernel"] for x in kernels] == KERNELS[name]
    for x in kernels:
        assert x["shared"] <= SHARED[arch], x
        if name == "causal" and arch == 90:
            assert x["ptx"] == "wgmma"
            assert x["stack"] <= 256, x  # bytes: addresses, not tiles
        if name == "passes":
            assert x["stack"] == 0, x
        # A barrier lets all warps read a row's lse before one of them writes it.
        assert name != "merges" or x["barriers"] > 0, x
