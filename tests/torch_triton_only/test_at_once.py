"""Exchanges by one kernel, between processes on CPUs: of short passes' K/V, and of Ulysses' heads.

Triton's interpreter runs the kernels, one thread block per rank, over memory that all processes
map.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy.typing as npt
import pytest
import torch
from backends.peer_memory import Now, interpret_one_kernel
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case
from refused import refused
from tolerances import assert_close
from triton.runtime.errors import InterpreterError

import ring_torch
from ring_core import Mask, gather_refusals
from ring_torch import prepare
from ring_torch.buffers import HeadCarrier, KVPayload
from ring_torch.call import Call, GatherSession, SessionSpec
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies import choose_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ulysses import ULYSSES
from ring_torch.transports import (
    SYMM_MEM,
    exchange_kernel as kernels,
    one_kernel,
    peer_copies,
    symm_buffer,
)
from ring_torch.transports.api import counted_by, note_reads
from ring_torch.transports.one_kernel import HeadTrade
from ring_torch.transports.p2p import P2P

Arrays = dict[str, npt.NDArray[Any]]


def _is_short(case: Case) -> bool:
    if case.cp_size not in {2, 3, 4} or case.dtype != "float32" or gather_refusals(case.plan):
        return False
    tokens = case.plan.k_layout.local_len
    segments = case.segments is not None
    keys = KVPayload(case.batch, tokens, case.heads[1], *case.dims, torch.float32, segments)
    return peer_copies.fits_one_kernel(case.plan, keys, 1, False)


SHORT = {name: case for name, case in CASES.items() if _is_short(case)}


@contextmanager
def by_one_kernel(
    folder: Path, strategy: Any, *names: str, wrong: str | None, **opened: Any
) -> Iterator[tuple[pytest.MonkeyPatch, list[str]]]:
    """Let calls exchange by kernels of these names; yield a list of those that ran.

    Calls are checked if ``wrong`` is the function whose reads from peers are not counted, or none.
    """
    ran, is_checked = list[str](), wrong not in {None, "digest"}

    def noted(name: str, kernel: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return kernel(*args, **options)

        return run

    def count(reads: Any) -> None:
        if sys._getframe(1).f_code.co_name != wrong:
            note_reads(reads)

    with pytest.MonkeyPatch.context() as patched:
        interpret_one_kernel(patched, folder)
        # Checked like a transport over GPUs that reach each other's memory.
        chosen = strategy, replace(SYMM_MEM if is_checked else P2P, **opened)

        def choose(*args: Any, **named: Any) -> Any:
            return choose_strategy(*args, **named) if args[2].size == 1 else chosen

        patched.setattr(prepare, "choose_strategy", choose)
        prepare._prepare.cache_clear()
        patched.setattr(one_kernel, "note_reads", count)
        for name in names:
            patched.setattr(kernels, name, noted(name, getattr(kernels, name)))
        with ring_torch.check(int(is_checked)):
            yield patched, ran


def gathered(
    rank: int, folder: Path, case: Case, wrong: str | None = None, captured: bool | None = None
) -> tuple[Arrays, list[str]]:
    """Return a rank's part of a case, and the names of the kernels that ran."""

    def opened(call: Call, spec: SessionSpec, signature: CallSignature) -> GatherSession:
        call.agree(call.ranks, signature)
        options = spec.gather.splits, spec.gather.tile
        assert peer_copies.fits_one_kernel(call.plan, spec.keys, spec.groups, *options)
        digest = signature.for_call(call.number, call.seed) + rank * (wrong == "digest")
        size = peer_copies.grad_bytes_of(call.plan, spec.keys, call.acc_dtype, *options)
        size += spec.keys.message.size
        exchange = one_kernel.exchange_state_of(call.ranks).begin_pass(size, digest)
        return one_kernel.OneKernel(call, spec._replace(by_parts=captured is not None), exchange)

    names = "exchange_keys", "finish_reading", "wait_reusable", "reduce_from_peers"
    with by_one_kernel(folder, GATHER, *names, wrong=wrong, open=opened) as (patched, ran):
        # Split even these small tensors into several pieces.
        patched.setattr(one_kernel, "CHUNK", 64)
        for module in (one_kernel, kernels):
            patched.setattr(module, "NUMBERS", 32)
        if captured is not None:  # by blocks; in a graph, copies run at once, row by row
            patched.setattr(one_kernel, "comes_in_parts", lambda *_: True)
            patched.setattr(one_kernel, "is_capturing", lambda: captured)
            patched.setattr(symm_buffer, "_cuda", lambda: None)
            patched.setattr(one_kernel.ExchangeState, "side_streams", lambda _, n: [Now()] * n)
            patched.setattr(torch.cuda, "current_stream", Now)
            patched.setattr(torch.cuda, "stream", lambda _: nullcontext())
        return run_rank(rank, case, ("eager", "gather", "p2p"), None, cuda=False), ran


def test_heads_arrive_in_parts(pools: dict[int, LocalRanks], tmp_path: Path) -> None:
    """The kernel moves all parts, or in a graph half of them, and copies after it the rest."""
    case = replace(CASES["v-dim-zigzag"], seq_len=16)
    for captured in (False, True):
        parts = pools[case.cp_size].run(gathered, tmp_path, case, None, captured)
        assert all(ran.count("finish_reading") >= 1 for _, ran in parts)
        assert_close(case, gather(case, case.plan, [part for part, _ in parts]))


def test_nothing_is_written_before_peers_have_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the given part of the buffer is cleared, once all ranks have read what was there."""
    interpret_one_kernel(monkeypatch, tmp_path)
    monkeypatch.setattr(kernels, "NUMBERS", 8)
    header = torch.zeros(200, dtype=torch.int64)
    header[2] = 1  # the number of the next exchange
    address = header.data_ptr()
    setup = kernels.ExchangeSetup(torch.tensor([address]), address, 0, 1, 1, 10**9)
    hurried, memory = setup._replace(patience=10**6), torch.ones(40)
    several = setup._replace(programs=3)
    kernels.wait_reusable(several, memory[:30], zero=False)
    assert memory.eq(1).all()
    kernels.wait_reusable(several, memory[:30], zero=True)
    assert memory[:30].eq(0).all() and memory[30:].eq(1).all()
    k, v = torch.ones(2, 1, 1, 1, 8).unbind()
    own, target = torch.zeros(2, 1, 1, 16).unbind()
    rest = own, torch.tensor([[0]]), target, torch.zeros(0, 4, dtype=torch.int64)
    header[2] = 2  # the reader of the first exchange has not finished
    for wait in (
        partial(kernels.exchange_keys, hurried, 0, k, v, *rest),
        partial(kernels.wait_reusable, hurried, memory, zero=True),
    ):
        refused("did not come in time", wait, error=InterpreterError)
    assert memory[30:].eq(1).all() and not own.any()
    header[8 + 2] = 1  # now it has
    kernels.exchange_keys(setup, 0, k, v, *rest)
    assert own.eq(1).all() and target.eq(1).all()


def test_tables_of_a_pass_live_as_long_as_its_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pass keeps its own tables, whose addresses its cached launches hold."""
    interpret_one_kernel(monkeypatch, tmp_path)
    monkeypatch.setattr(one_kernel, "_MOST", 1)
    memory: Any = SimpleNamespace(reserve=lambda _: False, ranks=Ranks(None, 0, 2))
    setup = kernels.ExchangeSetup(torch.zeros(1, dtype=torch.int64), 0, 0, 1, 1, 1)
    state, cpu = one_kernel.ExchangeState(memory, setup), torch.device("cpu")
    launches = state.begin_pass(0, 0).launches
    tables: Any = [state.table(key, 1, lambda: [(1,)], cpu) for key in range(3)]
    state.launches["launch"] = tables
    assert all(state.table(key, 1, list, cpu) is x for key, x in enumerate(tables))
    assert launches["launch"] is tables
    state.begin_pass(0, 0)  # the next pass begins
    assert not launches
    state.launches["launch"] = tables
    assert state.begin_pass(0, 0).launches
    with counted_by(lambda _: None):
        assert not state.begin_pass(0, 0).launches
    assert state.table(0, 1, lambda: [(2,)], cpu).item() == 2
    monkeypatch.setattr(one_kernel, "is_capturing", lambda: True)
    assert not state.begin_pass(0, 0).launches
    refused("once more outside of a graph", state.table, 1, 1, lambda: [(2,)], cpu)


def _with_a_head_a_rank(case: Case) -> Case:
    """Return the case with enough query heads for every rank."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-case.cp_size // heads), kv_heads))


TRADED = {
    case.name: _with_a_head_a_rank(case)
    for case in CASES.values()
    if case.cp_size in {2, 4} and case.dtype == "float32"
}
#: Heads that two ranks do not divide, with all that travels and all per-head options.
_ALL = Case(
    "heads-3-3", Mask(causal=True), "zigzag", 2, 16, None, 2, (3, 3), (8, 6), bias="heads", alibi=2,
    dropout_p=0.2, segments="padded", lse_grad=True,
)  # fmt: skip
TRADED |= {x.name: x for x in (_ALL, replace(_ALL, name="heads-3-1", heads=(3, 1), bias="shared"))}


def traded(
    rank: int, folder: Path, case: Case, wrong: str | None = None
) -> tuple[Arrays, list[str]]:
    """Return a rank's part of a case, and the names of the kernels that ran."""

    def opened(call: Call, ranks: Ranks, signature: CallSignature, size: int) -> HeadCarrier:
        call.agree(ranks, signature)
        digest = signature.for_call(call.number, call.seed) + rank * (wrong == "digest")
        return HeadTrade(one_kernel.exchange_state_of(ranks).begin_pass(size, digest))

    with by_one_kernel(
        folder, ULYSSES, "trade_heads", wrong=wrong, open_heads=opened
    ) as (patched, ran):  # fmt: skip
        patched.setattr(kernels, "_MOVED", 64)  # several blocks even for such small tensors
        return run_rank(rank, case, ("eager", "ulysses", "p2p"), None, cuda=False), ran


@pytest.mark.nightly(unless=[
    *(f"{name}-gathered" for name in (
        "causal-zigzag-cp2", "window-both-zigzag-cp3", "mqa-zigzag", "v-dim-zigzag",
        "keys80-causal-zigzag", "causal-random-cp4",
    )),
    *(f"{name}-traded" for name in (
        "causal-zigzag-cp2", "v-dim-zigzag", "batch-0-zigzag", "heads-3-3", "heads-3-1",
    )),
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "run"), [*product(SHORT, [gathered]), *product(TRADED, [traded])]
)  # fmt: skip
def test_case(name: str, run: Any, pools: dict[int, LocalRanks], tmp_path: Path) -> None:
    case, least = (SHORT[name], 3) if run is gathered else (TRADED[name], 4)  # twice each way
    parts = pools[case.cp_size].run(run, tmp_path, case)
    assert all(len(ran) >= least for _, ran in parts)
    assert_close(case, gather(case, case.plan, [part for part, _ in parts]))


@pytest.mark.parametrize(
    ("run", "name", "kinds"),
    [
        (gathered, "causal-zigzag-cp2", ("fetch", "_add")),
        (gathered, "causal-random-cp4", ("fetch", "_add")), (traded, "causal-zigzag-cp2", ("__call__",)),
    ],
)  # fmt: skip
def test_a_check_counts_what_kernels_read_from_peers(
    run: Any, name: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    case = replace(CASES[name], seq_len=24)
    with LocalRanks(case.cp_size) as ranks:
        for _, ran in ranks.run(run, tmp_path, case, "nothing"):
            assert len(ran) >= 3
        for wrong in kinds:
            with pytest.raises(LocalRankError, match="bytes were read from peers, and the program"):
                ranks.run(run, tmp_path, case, wrong)


@pytest.mark.parametrize("run", [gathered, traded])
def test_ranks_of_unlike_calls_end(run: Any, tmp_path: Path) -> None:
    case, match = SHORT["causal-zigzag-cp2"], "ranks of a ring make different calls"
    with LocalRanks(2, timeout=5) as ranks, pytest.raises(LocalRankError, match=match):
        ranks.run(run, tmp_path, case, "digest")


def test_what_is_refused() -> None:
    assert not torch.version.hip
    few, many = (Ranks(None, 0, n) for n in (32, 33))
    assert SYMM_MEM.head_refusals(few) == ()
    assert "at most 32 ranks" in SYMM_MEM.head_refusals(many)[0]
