"""The Triton kernels on torch tensors, in Triton's interpreter: whole calls on CPU ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import pytest
import torch
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case, diagonals, prefix
from patched import chosen
from tolerances import assert_close

from ring_core import KernelConfig, Mask
from ring_torch import ContextParallel, autograd
from ring_torch.kernels.block_index import block_index, in_blocks
from ring_torch.kernels.triton import TritonKernel, launch
from ring_torch.local import LocalRanks

Arrays = dict[str, npt.NDArray[Any]]
CAUSAL = Mask(causal=True)
SMALL = KernelConfig("triton", block_q=32, block_k=32)

#: Several blocks on one device, and lengths that are no multiple of a block.
ALONE = [
    Case("causal", CAUSAL, seq_len=80),
    Case("window", Mask(window=(50, 33)), seq_len=80, lse_grad=True),
    Case("documents", Mask(cu_seqlens=(0, 1, 40, 42, 70, 80)), seq_len=80, batch=2),
    Case("predicate", Mask(causal=True, predicate=diagonals), seq_len=150),
    Case("predicate-documents", Mask(predicate=prefix, cu_seqlens=(0, 43, 80)), seq_len=80),
    Case("keys", CAUSAL, seq_len=80, kv_seq_len=150),
    Case("gqa", CAUSAL, seq_len=80, heads=(4, 2), dims=(24, 8), batch=2),
    Case("float16", Mask(), seq_len=80, dtype="float16", dims=(16, 32)),
    Case("segments-chunks", Mask(chunk_size=100), seq_len=150, segments="padded"),
    Case("segments-documents", Mask(cu_seqlens=(0, 50, 150)), seq_len=150, segments="pair"),
    Case("dropout", CAUSAL, seq_len=80, dropout_p=0.3, batch=2),
    Case("bias-shared", CAUSAL, seq_len=80, bias="shared", batch=2),
    Case("very-negative-bias", CAUSAL, seq_len=80, bias="very-negative", batch=2),
    Case("bias-large", CAUSAL, seq_len=80, bias="masked", numbers="large", dims=(16, 16)),
    Case("poison-k", CAUSAL, seq_len=80, poison="k"),
    Case("v-inf", CAUSAL, seq_len=80, poison="v-inf"),
    Case("bias-nan", CAUSAL, seq_len=80, bias="shared", poison="bias"),
    Case(
        "everything", CAUSAL, seq_len=80, softcap=2.0, sinks=0, bias="masked", alibi=1,
        dropout_p=0.1, segments="padded", softmax_scale=0.4, heads=(4, 2), dims=(8, 6),
        lse_grad=True,
    ),
]  # fmt: skip
#: Cases of the shared table, and the strategy.
RING = [
    ("causal-zigzag-cp2", "ring"), ("window-small-striped-cp2", "ring"), ("everything-zigzag", "ring"),
    ("everything-contiguous", "gather"), ("documents-window-zigzag-cp4", "gather"),
    ("predicate-zigzag-cp2", "ring"), ("predicate-balanced-cp4", "ring"),
    ("bias-masked-balanced", "ring"), ("alibi-batch-striped", "ring"), ("mqa-zigzag", "gather"),
    ("causal-balanced-cp4", "ring"), ("options-random-cp2", "ring"), ("batch-0-contiguous", "ring"),
    ("bias-very-negative-segments-balanced", "ring"), ("bias-very-negative-zigzag", "gather"),
    ("shown-bias-balanced", "ring"), ("shown-sinks-striped", "ring"),
    ("shown-documents-zigzag", "gather"), ("shown-contiguous", "gather"),
    ("keys64-predicate-contiguous", "ring"), ("shortest-zigzag-cp2", "ring"), ("poison-v-contiguous", "ring"), ("large-contiguous", "ring"), ("sinks-large-contiguous", "ring"),
    *((f"views{n}-contiguous", ("ring", "gather", "ulysses")[n % 3]) for n in range(1, 8)),
    *((f"views{n}-balanced", "ring") for n in range(1, 8)),
]  # fmt: skip


def run(
    pools: dict[int, LocalRanks], case: Case, config: KernelConfig, strategy: str = "ring"
) -> Arrays:
    """Return a case's results."""
    parts = pools[case.cp_size].run(_on_a_rank, replace(case), config, strategy)
    return gather(case, case.plan, parts)


def _on_a_rank(rank: int, case: Case, config: KernelConfig, strategy: str) -> Arrays:
    kernel: Any = config
    elementwise = patch.object(autograd, "_can_use_triton", lambda _, dtype: dtype == torch.float32)
    with chosen(TritonKernel(), elementwise):
        return run_rank(rank, case, (kernel, case.moved(strategy), "auto"), None, cuda=False)


@pytest.mark.nightly(unless=["predicate-documents", "keys", "dropout", "everything"])
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_several_blocks(case: Case, pools: dict[int, LocalRanks]) -> None:
    assert_close(case, run(pools, case, SMALL))


@pytest.mark.nightly(unless=["causal", "everything", "very-negative-bias"])
@pytest.mark.parametrize("name", ["causal", "gqa", "poison-k", "everything", "very-negative-bias"])
def test_fused_backward(name: str, pools: dict[int, LocalRanks]) -> None:
    (case,) = (case for case in ALONE if case.name == name)
    assert_close(case, run(pools, case, replace(SMALL, fused_backward=True)))


@pytest.mark.nightly(unless=["window-sizes0"])
@pytest.mark.parametrize("sizes", [(64, 16), (16, 256)])
@pytest.mark.parametrize("name", ["window", "predicate", "segments-documents"])
def test_oblong_blocks(name: str, sizes: tuple[int, int], pools: dict[int, LocalRanks]) -> None:
    (case,) = (case for case in ALONE if case.name == name)
    assert_close(case, run(pools, case, KernelConfig("triton", *sizes)))


@pytest.mark.nightly(only=[
    "everything-contiguous-gather", "documents-window-zigzag-cp4-gather",
    "bias-masked-balanced-ring", "alibi-batch-striped-ring", "mqa-zigzag-gather",
    "options-random-cp2-ring", "keys64-predicate-contiguous-ring", "shown-bias-balanced-ring",
    "shown-sinks-striped-ring", *(f"views{n}-balanced-ring" for n in range(2, 8)),
    *(f"views{n}-contiguous-{way}" for n, way in ((2, "ulysses"), (3, "ring"), (5, "ulysses"), (6, "ring"), (7, "gather"))),
])  # fmt: skip
@pytest.mark.parametrize(("name", "strategy"), RING, ids=[f"{n}-{t}" for n, t in RING])
def test_in_the_ring(name: str, strategy: str, pools: dict[int, LocalRanks]) -> None:
    assert_close(CASES[name], run(pools, CASES[name], KernelConfig("triton"), strategy))


T, HEADS, BLOCK = 64, 2, 16
KERNEL = KernelConfig("triton", block_q=BLOCK, block_k=BLOCK)


def _visited(_: int, layout: Any) -> tuple[int, int]:
    """Return the number of blocks that the forward visits, and of those with visible pairs."""
    cp, counts = ContextParallel(layout=layout), list[int]()
    torch.manual_seed(0)
    chunk = torch.arange(T) // 24  # squares on the diagonal that are no multiple of a block
    mask = (chunk[:, None] == chunk) & (torch.rand(2, 1, T, T) < 0.7)
    qkv = [torch.randn(2, T, HEADS, 16) for _ in range(3)]

    def counting(*args: Any) -> Any:
        listed = block_index(*args)
        counts.append(int(listed.counts.sum()))
        return listed

    with chosen(TritonKernel(), patch.object(launch, "block_index", counting)):
        cp.attention(*map(cp.shard, qkv), mask=cp.shard(mask, dim=-2), kernel=KERNEL)
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
    rows = [x.any(dim=1) for x in mask.split(sizes[0], dim=1)]
    expected = torch.stack(
        [torch.stack([x.any(dim=1) for x in row.split(sizes[1], dim=1)], dim=1) for row in rows],
        dim=1,
    )
    assert torch.equal(kinds, expected)
    assert not expected.all()
