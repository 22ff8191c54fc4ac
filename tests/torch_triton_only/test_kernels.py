"""The Triton kernels on torch tensors, in Triton's interpreter: whole calls on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from backends.torch_ranks import gather, run_rank
from blocks import several_blocks
from cases import CASES, Case, diagonals
from patched import chosen
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
from ring_torch.kernels.block_index import Grid, block_index, in_blocks, kinds_on
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
        "bias-large", "poison-k", "v-inf", "bias-nan", "everything",
    )),
    *((name, "fused") for name in ("causal", "gqa", "poison-k", "everything", "bias-very-negative")),
    *product(("window-both", "predicate", "segments-documents"), ("64x16", "16x256")),
]  # fmt: skip
#: Cases of the shared table, and the strategy.
RING = [
    *((name, "ring") for name in (
        "causal-zigzag-cp2", "window-small-striped-cp2", "everything-zigzag", "predicate-zigzag-cp2",
        "predicate-balanced-cp4", "bias-masked-balanced", "alibi-batch-striped", "causal-balanced-cp4",
        "options-random-cp2", "batch-0-contiguous", "bias-very-negative-segments-balanced",
        "shown-bias-balanced", "shown-sinks-striped", "keys64-predicate-contiguous",
        "shortest-zigzag-cp2", "poison-v-contiguous", "large-contiguous", "sinks-large-contiguous",
    )),
    *((name, "gather") for name in (
        "everything-contiguous", "documents-window-zigzag-cp4", "mqa-zigzag",
        "bias-very-negative-zigzag", "shown-documents-zigzag", "shown-contiguous",
    )),
    *((f"views{n}-contiguous", ("ring", "gather", "ulysses")[n % 3]) for n in range(1, 8)),
    *((f"views{n}-balanced", "ring") for n in range(1, 8)),
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
    *(f"{name}-small" for name in ("predicate-documents", "keys", "dropout", "everything")),
    *(f"{name}-fused" for name in ("causal", "everything", "bias-very-negative")), "window-both-64x16",
])  # fmt: skip
@pytest.mark.parametrize(("name", "config"), ALONE)
def test_several_blocks(name: str, config: str, pools: dict[int, LocalRanks]) -> None:
    run(pools, BLOCKS[name], CONFIGS[config], "ring")


@pytest.mark.nightly(only=[
    "everything-contiguous-gather", "documents-window-zigzag-cp4-gather",
    "bias-masked-balanced-ring", "alibi-batch-striped-ring", "mqa-zigzag-gather",
    "options-random-cp2-ring", "keys64-predicate-contiguous-ring", "shown-bias-balanced-ring",
    "shown-sinks-striped-ring", *(f"views{n}-balanced-ring" for n in range(2, 8)),
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
        live += int(in_blocks(rows[..., keys], BLOCK, BLOCK).sum())
    return sum(counts), live


@pytest.mark.nightly(only=["striped"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_hidden_blocks_are_on_no_list(layout: Any, pool: LocalRanks) -> None:
    for visited, live in pool.run(_visited, layout):
        assert visited == live
        assert live < 2 * (T // 2 // BLOCK) * (T // BLOCK) or layout == "striped"


@pytest.mark.parametrize("sizes", [(16, 16), (32, 7)])
def test_blocks_that_it_hides(sizes: tuple[int, int]) -> None:
    torch.manual_seed(1)
    mask = torch.rand(2, 70, 50) < 0.01
    kinds = in_blocks(mask, *sizes)
    expected = torch.stack([x.any(dim=1) for x in mask.split(sizes[0], dim=1)], dim=1)
    expected = torch.stack([x.any(dim=2) for x in expected.split(sizes[1], dim=2)], dim=2)
    assert torch.equal(kinds, expected)
    assert not expected.all()


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


@pytest.mark.usefixtures("_on_hopper")
def test_options_go_to_triton() -> None:
    assert chosen_for(KernelConfig()) == chosen_for(KernelConfig(block_q=64)) == "triton"
    assert chosen_for(KernelConfig(), dtype="float64") == "eager"


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"block_q": 96}, {}, "block_q must be a power of two from 16 to 256, got 96"),
        ({"block_q": 256, "block_k": 256}, {"head_dim": 256}, "227 KiB of shared memory"),
        ({"fused_backward": True}, {"deterministic": True}, "deterministic=True rules out"),
        ({}, {"head_dim": 512}, "head dims up to 256, not 512"),
        ({}, {"mask": PREDICATE}, "more than 64 MiB"),
    ],
)
def test_settings_it_cannot_do(
    settings: dict[str, Any], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockGeometry, "tiles", None)  # as where there are too many
    with pytest.raises(UnsupportedError, match=message):
        chosen_for(KernelConfig("triton", **settings), **changes)
    if settings.keys() <= {"block_q"}:  # no other kernel has the other settings
        assert chosen_for(KernelConfig(**settings), **changes) == "eager"


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (adapter, "has_triton", lambda: False, "triton is not installed"),
        (torch.cuda, "get_device_capability", lambda *_: (7, 5), "compute capability 8.0 or newer"),
        (torch.version, "cuda", None, "for NVIDIA GPUs"),
    ],
)
def test_machines_it_does_not_run_on(
    where: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(UnsupportedError, match=message):
        chosen_for(KernelConfig("triton"))
    assert chosen_for(KernelConfig()) == "eager"


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


@pytest.mark.parametrize("size", SIZES[:3])
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
