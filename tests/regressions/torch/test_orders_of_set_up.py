"""A ``ContextParallel`` shards and attends over one group, in any order of setting things up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Mask, balanced_layout
from ring_torch import ContextParallel, local
from ring_torch.local import LocalRanks

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
    q, k, v = (x.transpose(1, 2) for x in _qkv())
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.allclose(_attended(cp, attention), whole.transpose(1, 2), atol=1e-5)


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


def _compiled_for_another(rank: int, folder: str) -> list[bool]:
    """Call one graph with its object, then with a stale one; return what was as it should be."""
    _destroy()
    stale = ContextParallel()
    alone = _is_exact(stale)
    _init(folder, "another", rank, 2)
    cp = ContextParallel()

    def function(cp: ContextParallel, *qkv: Tensor) -> Tensor:
        return cp.attention(*qkv, causal=True)

    attend: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    exact = _is_exact(cp, lambda *qkv, **_: attend(cp, *qkv))
    shards = [cp.shard(x).requires_grad_() for x in _qkv()]
    return [alone, exact, _refused(lambda: attend(stale, *shards))]


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
        pytest.param(_compiled_for_another, marks=pytest.mark.nightly),
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


@pytest.mark.parametrize("dim", [-3, -1, 0, 2])
def test_unshard_takes_every_dimension(dim: int) -> None:
    cp = ContextParallel()
    x = torch.randn(4, 6, 8)
    assert torch.equal(cp.unshard(cp.shard(x, dim=dim), dim=dim), x)
