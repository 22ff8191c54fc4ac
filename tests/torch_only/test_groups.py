"""The number of groups that heads are cut into, by the work and by the bytes of K/V that travel."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks
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
from ring_torch import ContextParallel, local, ring_attention
from ring_torch.buffers import ONE_GROUP, HeadGroups, KVPayload
from ring_torch.comm import handshake
from ring_torch.comm.ranks import ranks_of
from ring_torch.local import LocalRanks
from ring_torch.strategies.gather import head_groups_of
from ring_torch.transports import symm_buffer

K = 1024
CAUSAL = Mask(causal=True)


WINDOW = Mask(causal=True, window=(4095, 0))


@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "mask", "expected"),
    [
        (8 * K, 32, 8, CAUSAL, None),  # too little work for more launches
        (8 * K, 32, 32, CAUSAL, None),
        (32 * K, 32, 8, CAUSAL, (1, 1)),  # few keys: their transfer is hidden without groups
        (32 * K, 32, 32, CAUSAL, (2, 2)),
        (128 * K, 32, 32, CAUSAL, (4, 4)),
        (128 * K, 32, 8, CAUSAL, (1, 1)),
        (128 * K, 31, 31, CAUSAL, (1, 1)),  # groups divide the heads of keys
        (128 * K, 30, 30, CAUSAL, (3, 3)),
        # Sums of keys in place are of few heads.
        (128 * K, 32, 8, WINDOW, (1, 1)),  # 256 MiB of sums
        (256 * K, 32, 8, WINDOW, (1, 2)),
        (512 * K, 32, 8, WINDOW, (1, 4)),
        (512 * K, 8, 2, WINDOW, (1, 1)),
        (512 * K, 24, 6, WINDOW, (1, 3)),
        (128 * K, 32, 32, WINDOW, (2, 2)),  # too little work for four
    ],
)
def test_groups_of_a_ring_of_four(
    tokens: int, q_heads: int, kv_heads: int, mask: Mask, expected: tuple[int, int] | None
) -> None:
    """Count both for a bfloat16 sequence with head dim 128."""
    program = ring_program(make_plan(mask, seq_len=tokens, cp_size=4, layout="zigzag"))
    keys = KVPayload(1, tokens // 4, kv_heads, 128, 128, torch.bfloat16, segments=False)
    groups = HeadGroups(*expected, before_last_item=True) if expected else ONE_GROUP
    assert head_groups_of(program, keys, q_heads) == groups


@pytest.mark.parametrize(
    ("tokens", "heads", "v_dim", "expected"),
    [
        (8 * K, 8, 128, True),
        (4 * K, 8, 128, False),  # copies of half a MiB
        (8 * K, 9, 128, False),  # an odd number of heads
        (16 * K, 4, 131, False),  # two heads of V are no multiple of 16 bytes
    ],
)
def test_short_keys_come_in_parts(
    tokens: int, heads: int, v_dim: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: symm_buffer)
    plan = make_plan(Mask(causal=True), seq_len=tokens, cp_size=4, layout="zigzag")
    keys = KVPayload(1, tokens // 4, heads, 128, v_dim, torch.bfloat16, segments=False)
    fetches = [fetch for fetch in gather_program(plan, 0).fetches if fetch.rank != 0]
    assert symm_buffer.comes_in_parts(keys, fetches) == expected
    assert not symm_buffer.comes_in_parts(keys, [])
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: None)
    assert not symm_buffer.comes_in_parts(keys, fetches)


def _attend(length: int) -> None:
    x = torch.zeros(1, length, 2, 8)
    ring_attention(x, x, x)


def _shard(length: int) -> None:
    ContextParallel().shard(torch.zeros(1, length))


@pytest.mark.parametrize("use", [_attend, _shard])
def test_processes_that_are_not_joined_are_warned_once(
    use: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # Python's default
        for n in range(3):
            use(74 + 2 * n)
    (warning,) = said
    assert "WORLD_SIZE is 2, but torch.distributed is not initialized" in str(warning.message)
    assert "torch.distributed.init_process_group()" in str(warning.message)


@pytest.mark.parametrize("size", [None, "1", "", "two"])
def test_a_process_of_its_own_is_not_warned(
    size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    for n in range(2):  # warnings are errors here
        _attend(84 + 2 * n)
        _shard(84)


T = 16
OTHER = r"another process group|group was destroyed|graph was compiled for"


def _init(folder: str, name: str, rank: int, size: int) -> None:
    store = f"file://{folder}/{name}"
    patience = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)


def _destroy() -> None:
    dist.destroy_process_group()
    gc.collect()


def _pair() -> Any:
    return dist.new_group([0, 1])


def _qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, T, 2, 8) for _ in range(3)]


def _attended(cp: ContextParallel, attention: Any = None) -> Tensor:
    shards = [cp.shard(x).requires_grad_() for x in _qkv()]
    out = (attention or cp.attention)(*shards, causal=True)
    out.sum().backward()
    return cp.unshard(out.detach())


def _is_exact(cp: ContextParallel, attention: Any = None) -> bool:
    return torch.allclose(_attended(cp, attention), sdpa(*_qkv(), is_causal=True), atol=1e-5)


def _refused(function: Callable[[], Any]) -> bool:
    with pytest.raises((ValueError, RuntimeError), match=OTHER):
        function()
    return True


def _object_first(rank: int, folder: str) -> list[bool]:
    _destroy()
    cp = ContextParallel()
    _init(folder, "first", rank, 2)
    return [_is_exact(cp), cp.cp_size == 2]


def _used_first(rank: int, folder: str) -> list[bool]:
    _destroy()
    cp = ContextParallel()
    alone = _is_exact(cp)
    _init(folder, "used", rank, 2)
    uses = (cp.attention, lambda *_, **__: cp.unshard(_qkv()[0]))
    calls = [lambda f=f: f(*_qkv(), causal=True) for f in uses]
    more = [lambda: cp.shard(_qkv()[0]), lambda: cp.positions(T), lambda: cp.explain(*_qkv())]
    return [alone, *map(_refused, [*calls, *more]), _is_exact(ContextParallel())]


def _destroyed(rank: int, folder: str) -> list[bool]:
    cp, named = ContextParallel(), ContextParallel(_pair())
    before = _is_exact(cp) and _is_exact(named)
    _destroy()
    gone = [_refused(lambda: x.attention(*_qkv())) for x in (cp, named)]  # noqa: B023 - called at once
    _init(folder, "again", rank, 2)
    again = [_refused(lambda: x.shard(_qkv()[0])) for x in (cp, named)]  # noqa: B023 - called at once
    return [before, *gone, *again, _is_exact(ContextParallel())]


def _another_size(rank: int, folder: str) -> list[bool]:
    cp = ContextParallel()
    before = _is_exact(cp)
    _destroy()
    _init(folder, f"alone {rank}", 0, 1)
    return [before, _refused(lambda: cp.shard(_qkv()[0])), _is_exact(ContextParallel())]


def _inference_first(_: int, __: str) -> list[bool]:
    cp = ContextParallel()
    with torch.inference_mode():
        cp.attention(*(cp.shard(x) for x in _qkv()), causal=True)
        ContextParallel().attention(
            *(cp.shard(x) for x in _qkv()), bias=torch.zeros(1, 1, T // 2, T)
        )
    return [_is_exact(cp), _is_exact(ContextParallel())]


def _two_objects(_: int, __: str) -> list[bool]:
    zigzag, striped = ContextParallel(), ContextParallel(layout="striped")
    group = ContextParallel(_pair())
    return [_is_exact(x) for x in (zigzag, striped, group, striped, zigzag, group)]


def _chunks_first(rank: int, folder: str) -> list[bool]:
    _destroy()
    layout = balanced_layout(Mask(causal=True), seq_len=T, cp_size=2)
    cp = ContextParallel(layout=layout)
    _init(folder, "chunks", rank, 2)
    wrong = ContextParallel(layout=balanced_layout(Mask(causal=True), seq_len=T, cp_size=2))
    dist.barrier()  # a rank that leaves now would cut off one that still connects to it
    _destroy()
    return [cp is not wrong, _refused(lambda: wrong.shard(_qkv()[0]))]


def _compiled_first(rank: int, folder: str) -> list[bool]:
    _destroy()
    cp = ContextParallel()

    def function(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return cp.attention(q, k, v, causal=causal)

    attend: Any = torch.compile(function, backend="aot_eager", fullgraph=True)

    alone = _is_exact(cp, attend)
    _init(folder, "compiled", rank, 2)
    same = [x.requires_grad_() for x in _qkv()]
    stale = [_refused(lambda: attend(*x, causal=True)) for x in (same, _qkv())]  # noqa: B023 - called at once
    torch.compiler.reset()
    cp = ContextParallel()
    return [alone, *stale, _is_exact(cp, attend)]


@pytest.mark.parametrize(
    "order",
    [
        _object_first, _used_first, _destroyed, _another_size, _inference_first, _two_objects,
        _chunks_first, _compiled_first,
    ],
)  # fmt: skip
def test_shards_and_attention_are_of_one_group(order: Any, tmp_path: Any) -> None:
    with LocalRanks(2, timeout=20) as pool:
        for result in pool.run(order, str(tmp_path)):
            assert all(result), result


def _join_late(rank: int, folder: str) -> tuple[float, float]:
    """Join again, rank 1 half a second late; return the times of having connected and joined."""
    _destroy()
    connect, connected = dist.init_process_group, []

    def connect_late(*args: Any, **kwargs: Any) -> None:
        connect(*args, **kwargs)
        time.sleep(0.5 * rank)
        connected.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", connect_late)
        local._join(rank, 2, f"file://{folder}/late", 20.0, 1, cuda=False)
    return connected[0], time.monotonic()


def test_no_local_rank_joins_before_all_are_connected(tmp_path: Any) -> None:
    # A rank that destroyed its group earlier would cut off those that still connect to it.
    with LocalRanks(2, timeout=20) as pool:
        connected, joined = zip(*pool.run(_join_late, str(tmp_path)), strict=True)
    assert max(connected) <= min(joined)


LAYOUTS: list[Any] = [
    "zigzag", "striped", "contiguous",
    balanced_layout(Mask(causal=True), seq_len=16, cp_size=2),
]  # fmt: skip


def _is_alike(cp: ContextParallel, copied: ContextParallel) -> bool:
    x = torch.arange(32.0).view(1, 16, 2)
    return (
        cp is not copied
        and (cp.group, cp.layout, cp.cp_size, cp.cp_rank)
        == (copied.group, copied.layout, copied.cp_size, copied.cp_rank)
        and torch.equal(cp.shard(x), copied.shard(x))
        and torch.equal(copied.unshard(copied.shard(x)), x)
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@on_ranks
def test_over_the_default_group_it_round_trips(layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    for read in (pickle.loads(pickle.dumps(cp)), copy.copy(cp), copy.deepcopy(cp)):
        assert _is_alike(cp, read)


class _Model(nn.Module):
    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.weight, self.cp = nn.Linear(2, 2), cp


@on_ranks
def test_over_a_group_it_is_copied_and_not_pickled() -> None:
    groups: list[Any] = [dist.new_group(), init_device_mesh("cpu", (2,))]
    for group in groups:
        cp = ContextParallel(group)
        with pytest.raises(UnsupportedError, match=f"{type(group).__name__} cannot be pickled"):
            pickle.dumps(_Model(cp))
        for copied in (copy.copy(cp), copy.deepcopy(_Model(cp)).cp):
            assert _is_alike(cp, copied)


TOKENS = 12
CALLS = 6
TIMEOUT = timedelta(seconds=10)


@pytest.fixture(scope="module")
def served() -> TCPStore:
    """Start a store that processes of this machine can connect to."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _store(store_at: str | int, size: int) -> Any:
    if isinstance(store_at, int):
        return TCPStore("127.0.0.1", store_at, is_master=False)
    return FileStore(store_at, size)


def _init_with(store: Any, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _places(kind: str, served: TCPStore, folder: Any) -> str | int:
    return served.port if kind == "tcp" else f"{folder}/store"


def _is_right(group: Any, scale: float, strategy: Any = "auto") -> tuple[bool, bool]:
    """Return True if a call's results are those of full attention; likewise for its gradients."""
    drawn = torch.Generator().manual_seed(0)  # threads share the default generator
    whole = torch.randn(1, TOKENS, 2, 8, dtype=torch.float64, generator=drawn).requires_grad_()
    expected = sdpa(whole, whole, whole, is_causal=True, scale=scale)
    (grad,) = torch.autograd.grad(expected.sum(), whole)
    cp = ContextParallel(group, layout="contiguous")
    x = cp.shard(whole.detach()).requires_grad_()
    out = cp.attention(x, x, x, causal=True, softmax_scale=scale, strategy=strategy)
    out.sum().backward()
    assert x.grad is not None
    return torch.allclose(out, cp.shard(expected)), torch.allclose(x.grad, cp.shard(grad))


def _in_threads(rank: int, size: int, store_at: str | int, count: int, strategy: Any) -> list[Any]:
    """Return errors of threads that use a group each, in another order on each rank."""
    dist.destroy_process_group()
    _init_with(PrefixStore(f"threads {count} {size}", _store(store_at, size)), rank, size)
    groups: list[Any] = [None, *(dist.new_group(timeout=TIMEOUT) for _ in range(count - 1))]
    faults: list[Any] = []

    def work(n: int) -> None:
        try:
            for k in range(CALLS):
                # On each rank another thread is the first to wait.
                time.sleep(0.1 * ((n + rank + k) % count))
                if not all(_is_right(groups[n], 0.1 + 0.01 * k, strategy)):
                    faults.append((n, k, "wrong"))
        except (RuntimeError, ValueError) as error:
            faults.append((n, k, f"{type(error).__name__}: {error}"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


@pytest.mark.parametrize(
    ("kind", "size", "count", "strategy"),
    [
        ("tcp", 2, 2, "auto"), ("tcp", 3, 3, "auto"), ("file", 2, 3, "auto"),
        ("tcp", 4, 2, StrategyConfig("hybrid", ulysses_size=2)),
    ],
    ids=["tcp-2-2", "tcp-3-3", "file-2-3", "hybrid"],
)  # fmt: skip
def test_threads_on_groups_of_their_own(
    kind: str, size: int, count: int, strategy: Any, served: TCPStore, tmp_path: Any
) -> None:
    with LocalRanks(size, timeout=20) as pool:
        store_at = _places(kind, served, tmp_path)
        assert pool.run(_in_threads, size, store_at, count, strategy) == [[]] * size


def _fail_in_a_group(rank: int, size: int, port: int, how: str) -> str:
    """Return the error of a group's first calls, then destroy the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _init_with(_store(port, size), rank, size)
    x = torch.ones(1, 4, 2, 8)
    patch = pytest.MonkeyPatch()
    if how == "failure":
        ring_attention(x, x, x)
        if rank == size - 1:
            patch.setattr(handshake.Header, "of", _broken)
    message = "no error"
    try:
        ring_attention(x, x, x, causal=how == "mismatch" and rank == 0)
    except RuntimeError as error:
        message = str(error)
    patch.undo()
    dist.destroy_process_group()
    return message


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("played")


def _call_again(rank: int, size: int, port: int) -> list[tuple[bool, bool]]:
    """Return True for each exact result and gradient of calls on a new default group."""
    _init_with(_store(port, size), rank, size)
    return [_is_right(None, 0.3) for _ in range(2)]


@pytest.mark.parametrize("how", ["mismatch", "failure"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_new_group_reads_nothing_of_the_last(size: int, how: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(size, timeout=60) as pool:
        said = pool.run(_fail_in_a_group, size, store.port, how)
        message = "different calls" if how == "mismatch" else "played|waited in vain"
        assert all(re.search(message, x) for x in said), said
        left = [key for key in store.list_keys() if "ring/" in key]
        assert left, "notes of the first group"
        for key in store.list_keys():
            if key not in left:  # gloo's old addresses, which the next group may take for new
                store.delete_key(key)
        exact = [(True, True)] * 2
        assert pool.run(_call_again, size, store.port) == [exact] * size


def _told(rank: int) -> str:
    """Return a rank's error after a stray message arrives before the nonce."""
    ring = ranks_of(None)
    if rank == 0:
        ring.start([(torch.zeros(2048, dtype=torch.uint8), 1)], []).wait()
        return ""
    x: Tensor = torch.ones(1, 4, 2, 8)
    with pytest.raises(RankMismatchError) as error:
        ring_attention(x, x, x)
    return str(error.value)


def test_a_stray_message_is_no_nonce() -> None:
    with LocalRanks(3, timeout=2) as pool:
        for message in pool.run(_told)[1:]:
            assert "is no header" in message
