"""Groups that share a store: used by threads at the same time, or created one after the other."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from ring_core import RankMismatchError
from ring_torch import ContextParallel, ring_attention
from ring_torch.comm import handshake
from ring_torch.comm.handshake import Header
from ring_torch.comm.ranks import ranks_of
from ring_torch.local import LocalRanks

T = 12
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


def _init(store: Any, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _places(kind: str, served: TCPStore, folder: Any) -> str | int:
    return served.port if kind == "tcp" else f"{folder}/store"


def _attended(group: Any, scale: float) -> tuple[bool, bool]:
    """Return True if a call's results are those of full attention; likewise for its gradients."""
    drawn = torch.Generator().manual_seed(0)  # threads share the default generator
    whole = torch.randn(1, T, 2, 8, dtype=torch.float64, generator=drawn).requires_grad_()
    parts = (whole.transpose(1, 2),) * 3
    expected = torch.nn.functional.scaled_dot_product_attention(
        *parts, is_causal=True, scale=scale
    ).transpose(1, 2)
    (grad,) = torch.autograd.grad(expected.sum(), whole)
    cp = ContextParallel(group, layout="contiguous")
    x = cp.shard(whole.detach()).requires_grad_()
    out = cp.attention(x, x, x, causal=True, softmax_scale=scale)
    out.sum().backward()
    assert x.grad is not None
    return torch.allclose(out, cp.shard(expected)), torch.allclose(x.grad, cp.shard(grad))


def _in_threads(rank: int, size: int, store_at: str | int, count: int) -> list[Any]:
    """Return errors of threads that use a group each, in another order on each rank."""
    dist.destroy_process_group()
    _init(PrefixStore(f"threads {count} {size}", _store(store_at, size)), rank, size)
    groups: list[Any] = [None, *(dist.new_group(timeout=TIMEOUT) for _ in range(count - 1))]
    faults: list[Any] = []

    def work(n: int) -> None:
        try:
            for k in range(CALLS):
                # On each rank another thread is the first to wait.
                time.sleep(0.1 * ((n + rank + k) % count))
                if not all(_attended(groups[n], 0.1 + 0.01 * k)):
                    faults.append((n, k, "wrong"))
        except (RuntimeError, ValueError) as error:
            faults.append((n, k, f"{type(error).__name__}: {error}"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


@pytest.mark.parametrize(("kind", "size", "count"), [("tcp", 2, 2), ("tcp", 3, 3), ("file", 2, 3)])
def test_threads_on_groups_of_their_own(
    kind: str, size: int, count: int, served: TCPStore, tmp_path: Any
) -> None:
    with LocalRanks(size, timeout=20) as pool:
        store_at = _places(kind, served, tmp_path)
        assert pool.run(_in_threads, size, store_at, count) == [[]] * size


def _fail_in_a_group(rank: int, size: int, port: int, how: str) -> str:
    """Return the error of a group's first calls, then destroy the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _init(_store(port, size), rank, size)
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


def _again(rank: int, size: int, port: int) -> list[tuple[bool, bool]]:
    """Return True for each exact result and gradient of calls on a new default group."""
    _init(_store(port, size), rank, size)
    return [_attended(None, 0.3) for _ in range(2)]


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
        assert pool.run(_again, size, store.port) == [exact] * size


def _nonces(_: int) -> list[int | None]:
    """Return the nonces of two groups; the first one's also before the group is used."""
    groups: list[Any] = [dist.new_group() for _ in range(2)]
    before = ranks_of(groups[0]).state.nonce
    for group in groups:
        _attended(group, 0.3)
    return [before, *(ranks_of(group).state.nonce for group in groups)]


def test_each_group_has_a_nonce_of_its_own() -> None:
    with LocalRanks(3, timeout=20) as pool:
        answers = pool.run(_nonces)
    before, first, second = answers[0]
    assert answers == [[before, first, second]] * 3
    assert before is None
    assert first != second


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


def test_a_header_holds_the_nonce() -> None:
    header = Header(1, 2, b"12345678", 3, 2**64 - 1, b"{}")
    assert Header.read(bytes(header.bytes())) == header
