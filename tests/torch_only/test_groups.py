"""Groups of heads, by the work and the bytes that travel; process groups, which come and go."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from dense import is_exact, numbers
from on_ranks import on_ranks, on_three_ranks
from refused import refused
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from ring_core import (
    Mask,
    RankMismatchError,
    StrategyConfig,
    UnsupportedError,
    balanced_layout,
    gather_program,
    make_plan,
    ring_program,
)
from ring_torch import ContextParallel, ring_attention
from ring_torch.buffers import ONE_GROUP, HeadGroups, KVPayload
from ring_torch.comm import handshake
from ring_torch.comm.ranks import ranks_of
from ring_torch.local import LocalRanks
from ring_torch.strategies.gather import head_groups_of
from ring_torch.transports import symm_buffer

K = 1024
CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=(4095, 0))


@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads", "mask", "expected"), [
    (8 * K, 32, 32, CAUSAL, None),  # too little work for more launches
    (32 * K, 32, 8, CAUSAL, (1, 1)),  # few keys: their transfer is hidden without groups
    (128 * K, 32, 32, CAUSAL, (4, 4)),
    (128 * K, 31, 31, CAUSAL, (1, 1)),  # groups divide the heads of keys
    (128 * K, 30, 30, CAUSAL, (3, 3)),
    # Sums of keys in place are of few heads.
    (128 * K, 32, 8, WINDOW, (1, 1)),  # 256 MiB of sums
    (512 * K, 32, 8, WINDOW, (1, 4)),
    (128 * K, 32, 32, WINDOW, (2, 2)),  # too little work for four
])  # fmt: skip
def test_groups_of_a_ring_of_four(
    tokens: int, q_heads: int, kv_heads: int, mask: Mask, expected: tuple[int, int] | None
) -> None:
    """Count both for a bfloat16 sequence with head dim 128."""
    program = ring_program(make_plan(mask, seq_len=tokens, cp_size=4, layout="zigzag"))
    keys = KVPayload(1, tokens // 4, kv_heads, 128, 128, torch.bfloat16, segments=False)
    groups = HeadGroups(*expected, before_last_item=True) if expected else ONE_GROUP
    assert head_groups_of(program, keys, q_heads) == groups


@pytest.mark.parametrize(("tokens", "heads", "v_dim", "expected"), [
    (8 * K, 8, 128, True),
    (4 * K, 8, 128, False),  # copies of half a MiB
    (8 * K, 9, 128, False),  # an odd number of heads
    (16 * K, 4, 131, False),  # two heads of V are no multiple of 16 bytes
])  # fmt: skip
def test_short_keys_come_in_parts(
    tokens: int, heads: int, v_dim: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: symm_buffer)
    plan = make_plan(CAUSAL, seq_len=tokens, cp_size=4, layout="zigzag")
    keys = KVPayload(1, tokens // 4, heads, 128, v_dim, torch.bfloat16, segments=False)
    fetches = [fetch for fetch in gather_program(plan, 0).fetches if fetch.rank != 0]
    assert symm_buffer.comes_in_parts(keys, fetches) == expected
    assert not symm_buffer.comes_in_parts(keys, [])
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: None)
    assert not symm_buffer.comes_in_parts(keys, fetches)


@pytest.mark.parametrize("name", ["attend", "shard"])
@pytest.mark.parametrize("size", ["2", None, "1", "", "two"])
def test_processes_that_are_not_joined_are_warned_once(
    name: str, size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a process of its own is not warned."""
    monkeypatch.setenv("WORLD_SIZE", size or "")
    if size is None:
        monkeypatch.delenv("WORLD_SIZE")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # Python's default
        for n in range(3):
            x = torch.zeros(1, 74 + 2 * n, 2, 8)
            ring_attention(x, x, x) if name == "attend" else ContextParallel().shard(x)
    assert len(said) == (size == "2")
    for warning in said:
        assert "WORLD_SIZE is 2, but torch.distributed is not initialized" in str(warning.message)
        assert "torch.distributed.init_process_group()" in str(warning.message)


T = 24
TIMEOUT = timedelta(seconds=20)


def _init(folder: str, name: str, rank: int, size: int) -> None:
    _init_with(FileStore(f"{folder}/{name}", size), rank, size)


def _init_with(store: Any, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _destroy() -> None:
    dist.destroy_process_group()
    gc.collect()


def _qkv() -> list[Tensor]:
    return [numbers(seed, 1, T, 2, 8) for seed in range(3)]


_refused = partial(
    refused, "another process group|group was destroyed|graph was compiled for", error=(ValueError, RuntimeError)
)  # fmt: skip


def _before(rank: int, folder: str) -> None:
    """Make objects before the group, and use one of them."""
    _destroy()
    unused, cp = ContextParallel(), ContextParallel()
    assert is_exact(cp)
    _init(folder, "first", rank, 2)
    assert is_exact(unused) and unused.cp_size == 2
    for use in (cp.unshard, cp.shard, lambda _: cp.positions(T)):
        _refused(use, _qkv()[0])
    for call in (cp.attention, cp.explain):
        _refused(call, *_qkv(), causal=True)


def _destroyed(rank: int, folder: str) -> None:
    contexts = ContextParallel(), ContextParallel(cast("Any", dist.new_group([0, 1])))
    assert all(map(is_exact, contexts))
    _destroy()
    for cp in contexts:
        _refused(cp.attention, *_qkv())
    for size, name in ((2, "again"), (1, f"alone {rank}")):
        _init(folder, name, rank % size, size)
        for cp in contexts:
            _refused(cp.shard, _qkv()[0])
        assert is_exact(ContextParallel())
        dist.barrier()  # a rank that leaves now would cut off one that still connects to it
        _destroy()


def _chunks_first(rank: int, folder: str) -> None:
    _destroy()
    layout = balanced_layout(CAUSAL, seq_len=T, cp_size=2)
    ContextParallel(layout=layout)
    _init(folder, "chunks", rank, 2)
    wrong = ContextParallel(layout=layout)
    dist.barrier()  # a rank that leaves now would cut off one that still connects to it
    _destroy()
    _refused(wrong.shard, _qkv()[0])


def _compiled_first(rank: int, folder: str) -> None:
    _destroy()
    cp = ContextParallel()

    def function(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return cp.attention(q, k, v, causal=causal)

    attend: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert is_exact(cp, attend)
    _init(folder, "compiled", rank, 2)
    for x in ([y.requires_grad_() for y in _qkv()], _qkv()):
        _refused(attend, *x, causal=True)
    torch.compiler.reset()
    cp = ContextParallel()
    assert is_exact(cp, attend)


@pytest.mark.parametrize("order", [_before, _destroyed, _chunks_first, _compiled_first])
def test_shards_and_attention_are_of_one_group(order: Any, tmp_path: Any) -> None:
    """Also where a rank destroys its first group at once: all were connected before."""
    with LocalRanks(2, timeout=20) as pool:
        pool.run(order, str(tmp_path))


@on_ranks
def test_it_is_copied_and_over_the_default_group_pickled() -> None:
    layouts: list[Any] = ["zigzag", "striped", balanced_layout(CAUSAL, seq_len=T, cp_size=2)]
    groups: list[Any] = [dist.new_group(), init_device_mesh("cpu", (2,))]
    contexts = [ContextParallel(layout=x) for x in layouts] + [ContextParallel(x) for x in groups]
    x = torch.arange(2.0 * T).view(1, T, 2)
    for cp in contexts:
        model: Any = nn.Linear(2, 2)
        model.cp = cp
        copies = [copy.copy(cp), copy.deepcopy(model).cp]
        if cp.group is None:
            copies.append(pickle.loads(pickle.dumps(cp)))
        else:
            kind = type(cp.group).__name__
            refused(f"{kind} cannot be pickled", pickle.dumps, model, error=UnsupportedError)
        for copied in copies:
            assert cp is not copied
            for name in ("group", "layout", "cp_size", "cp_rank"):
                assert getattr(cp, name) == getattr(copied, name)
            assert torch.equal(cp.shard(x), copied.shard(x))
            assert torch.equal(copied.unshard(copied.shard(x)), x)


def _in_threads(rank: int, size: int, port: int, folder: str, count: int, strategy: Any) -> None:
    """Use a group in each of some threads, in another order on each rank."""
    dist.destroy_process_group()
    store = TCPStore("127.0.0.1", port, is_master=False) if port else FileStore(folder, size)
    _init_with(PrefixStore(f"threads {count} {size}", store), rank, size)
    groups: list[Any] = [None, *(dist.new_group(timeout=TIMEOUT) for _ in range(count - 1))]

    def work(n: int) -> None:
        cp = ContextParallel(groups[n], layout="contiguous")
        for k in range(4):
            # On each rank another thread is the first to wait.
            time.sleep(0.05 * ((n + rank + k) % count))
            assert is_exact(cp, softmax_scale=0.1 + 0.01 * k, strategy=strategy), (n, k)

    with ThreadPoolExecutor(count) as threads:
        assert len([*threads.map(work, range(count))]) == count


#: Stores, ranks, threads and strategies.
THREADS: dict[str, tuple[str, int, int, Any]] = {
    "tcp-2-2": ("tcp", 2, 2, "auto"), "tcp-3-3": ("tcp", 3, 3, "auto"), "file-2-3": ("file", 2, 3, "auto"),
    "hybrid": ("tcp", 4, 2, StrategyConfig("hybrid", ulysses_size=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADS)
def test_threads_on_groups_of_their_own(name: str, tmp_path: Any) -> None:
    kind, size, count, strategy = THREADS[name]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, folder = store.port * (kind == "tcp"), f"{tmp_path}/store"
    with LocalRanks(size, timeout=20) as pool:
        pool.run(_in_threads, size, port, folder, count, strategy)


def _fail_in_a_group(rank: int, size: int, port: int, how: str) -> None:
    """Expect the error of a group's first calls, then destroy the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _init_with(TCPStore("127.0.0.1", port, is_master=False), rank, size)
    x, differs = torch.ones(1, 4, 2, 8), how == "mismatch"
    with pytest.MonkeyPatch.context() as patch:
        if how == "failure":
            ring_attention(x, x, x)
            if rank == size - 1:
                patch.setattr(handshake.Header, "of", Mock(side_effect=RuntimeError("played")))
        message = "different calls" if differs else "played|waited in vain"
        call = partial(ring_attention, causal=differs and rank == 0)
        refused(message, call, x, x, x, error=RuntimeError)
    dist.destroy_process_group()


def _call_again(rank: int, size: int, port: int) -> None:
    """Make calls on a new default group."""
    _init_with(TCPStore("127.0.0.1", port, is_master=False), rank, size)
    for _ in range(2):
        assert is_exact(ContextParallel(layout="contiguous"))


@pytest.mark.parametrize("how", ["mismatch", "failure"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_new_group_reads_nothing_of_the_last(size: int, how: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(size, timeout=60) as pool:
        pool.run(_fail_in_a_group, size, store.port, how)
        left = [key for key in store.list_keys() if "ring/" in key]
        assert left, "notes of the first group"
        for key in store.list_keys():
            if key not in left:  # gloo's old addresses, which the next group may take for new
                store.delete_key(key)
        pool.run(_call_again, size, store.port)


@on_three_ranks
def test_a_stray_message_is_no_nonce(rank: int) -> None:
    group, x = cast("Any", dist.new_group(timeout=timedelta(seconds=2))), torch.ones(1, 4, 2, 8)
    if rank == 0:
        ranks_of(group).start([(torch.zeros(2048, dtype=torch.uint8), 1)], []).wait()
    else:
        refused("is no header", ring_attention, x, x, x, group=group, error=RankMismatchError)
