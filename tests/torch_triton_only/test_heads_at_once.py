"""Ulysses exchanges by one kernel, between processes on CPUs.

Triton's interpreter runs the kernel, one thread block per rank, over memory that all processes map.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch
from backends.one_kernel import interpret_one_kernel
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case
from tolerances import assert_close

import ring_torch
from ring_core import Mask
from ring_torch import prepare
from ring_torch.buffers import HeadCarrier
from ring_torch.call import Call
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.prepare import _prepare
from ring_torch.strategies import choose_strategy
from ring_torch.strategies.ulysses import ULYSSES
from ring_torch.transports import SYMM_MEM, exchange_kernel, one_kernel
from ring_torch.transports.one_kernel import HeadTrade
from ring_torch.transports.p2p import P2P

Arrays = dict[str, npt.NDArray[Any]]


def _with_a_head_a_rank(case: Case) -> Case:
    """Return the case with enough query heads for every rank."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-case.cp_size // heads), kv_heads))


def _can_trade(case: Case) -> bool:
    return case.cp_size in {2, 4} and case.dtype == "float32"


TRADED = {case.name: _with_a_head_a_rank(case) for case in CASES.values() if _can_trade(case)}
#: Heads that two ranks do not divide, with all that travels and all per-head options.
_ALL = Case(
    "heads-3-3", Mask(causal=True), "zigzag", 2, 16, None, 2, (3, 3), (8, 6), bias="heads", alibi=2,
    dropout_p=0.2, segments="padded", lse_grad=True,
)  # fmt: skip
for _case in (_ALL, replace(_ALL, name="heads-3-1", heads=(3, 1), bias="shared")):
    TRADED[_case.name] = _case


def on_a_rank(
    rank: int, folder: Path, case: Case, wrong: str | None, checked: bool = False
) -> tuple[Arrays, int]:
    """Return a rank's part of a case, and the number of kernels that ran."""
    ran = []

    def opened(call: Call, ranks: Ranks, signature: CallSignature, size: int) -> HeadCarrier:
        call.agree(ranks, signature)
        digest = signature.for_call(call.number, call.seed) + (rank if wrong == "digest" else 0)
        return HeadTrade(one_kernel.exchange_state_of(ranks).begin_pass(size, digest))

    trade_heads = exchange_kernel.trade_heads

    def noted(*args: Any, **options: Any) -> Any:
        ran.append(1)
        return trade_heads(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        interpret_one_kernel(patched, folder)
        # Checked like a transport over GPUs that reach each other's memory.
        transport = replace(SYMM_MEM if checked else P2P, open_heads=opened)
        chosen, traded = choose_strategy, (ULYSSES, transport)
        patched.setattr(
            prepare,
            "choose_strategy",
            lambda *args, **named: chosen(*args, **named) if args[2].size == 1 else traded,
        )
        _prepare.cache_clear()
        patched.setattr(exchange_kernel, "_MOVED", 64)  # several blocks even for such small tensors
        patched.setattr(exchange_kernel, "trade_heads", noted)
        if wrong == "uncounted":
            patched.setattr(one_kernel, "note_reads", lambda _: None)
        with ring_torch.check(int(checked)):
            return run_rank(rank, case, ("eager", "ulysses", "p2p"), None, cuda=False), len(ran)


@pytest.mark.nightly(
    unless=["causal-zigzag-cp2", "v-dim-zigzag", "batch-0-zigzag", "heads-3-3", "heads-3-1"]
)
@pytest.mark.parametrize("case", TRADED.values(), ids=TRADED)
def test_case(case: Case, pools: dict[int, LocalRanks], tmp_path: Path) -> None:
    parts = pools[case.cp_size].run(on_a_rank, tmp_path, case, None)
    assert all(ran >= 4 for _, ran in parts)  # one kernel each way, in two passes
    assert_close(case, gather(case, case.plan, [part for part, _ in parts]))


def test_a_check_counts_what_the_kernel_reads_from_peers(tmp_path: Path) -> None:
    case = TRADED["causal-zigzag-cp2"]
    with LocalRanks(case.cp_size) as ranks:
        assert all(ran >= 4 for _, ran in ranks.run(on_a_rank, tmp_path, case, None, True))
        with pytest.raises(LocalRankError, match="bytes were read from peers, and the program"):
            ranks.run(on_a_rank, tmp_path, case, "uncounted", True)


def test_ranks_of_unlike_calls_end(tmp_path: Path) -> None:
    case = TRADED["causal-zigzag-cp2"]
    with (
        LocalRanks(case.cp_size) as ranks,
        pytest.raises(LocalRankError, match="ranks of a ring make different calls"),
    ):
        ranks.run(on_a_rank, tmp_path, case, "digest")


def test_what_is_refused() -> None:
    assert not torch.version.hip
    few, many = (Ranks(None, 0, n) for n in (32, 33))
    assert SYMM_MEM.head_refusals(few) == ()
    assert "at most 32 ranks" in SYMM_MEM.head_refusals(many)[0]
