"""Ways to attend over a sequence split over GPUs, ours and others', behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_alone import alone
from torch import Tensor

import ring_core
from ring_torch import ContextParallel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mask:
    """What the settings of the benchmark show."""

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As the options of ``ring_attention``."""
        return {"causal": self.causal, "window": self.window, "cu_seqlens": self.cu_seqlens}


@dataclass(frozen=True)
class Method:
    """How a rank's slice is cut out of a whole sequence, and what attends over the slices.

    Forward and backward both run inside ``around()``.
    """

    shard: Callable[[Tensor], Tensor]  # [B, T, heads, D] -> [B, T_local, heads, D]
    attend: Attend
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def method(name: str, mask: Mask, seq_len: int) -> Method:
    """The method of a name, as ``zigzag/fa4/gather/symm_mem``, ``ulysses`` or ``one``.

    The layout ``chunks`` is balanced for the mask and the length; with ``/alone`` at its end a
    method does without communication, and its results mean nothing.

    Raises:
        ValueError: It cannot show this mask.
    """
    if "/" in name:
        layout, kernel, strategy, transport, *without = name.split("/")
        cp = ContextParallel(layout=_layout(layout, mask, seq_len))
        return Method(
            cp.shard,
            lambda q, k, v: cp.attention(
                q, k, v, kernel=kernel, strategy=strategy, transport=transport, **mask.options
            ),
            alone if without == ["alone"] else nullcontext,
        )
    others = {
        "one": _one_gpu,
        "ulysses": _ulysses,
        "all-gather": _all_gather,
        "ring-flash-attn": _ring_flash_attn,
        "torch-cp": _torch_cp,
    }
    return others[name](mask)


def _layout(name: str, mask: Mask, seq_len: int) -> Any:
    """A layout by its name; ``chunks`` are balanced for the mask."""
    if name != "chunks":
        return name
    rule = ring_core.Mask(**mask.options)
    return ring_core.balance_chunks(rule, seq_len=seq_len, cp_size=dist.get_world_size())


def _plainly_causal(mask: Mask, name: str) -> None:
    if mask.window is not None or mask.cu_seqlens is not None:
        raise ValueError(f"{name}: causal and full masks only")


def _local(mask: Mask) -> Attend:
    """The best kernel on one GPU: FlashAttention-4, called as its users call it."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    window = mask.window or (None, None)
    if mask.cu_seqlens is None:

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flash_attn_func(q, k, v, causal=mask.causal, window_size=window)[0]
            return out

        return plain
    cu = torch.tensor(mask.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = int((cu[1:] - cu[:-1]).max())

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
            max_seqlen_k=longest, causal=mask.causal, window_size=window,
        )[0]  # fmt: skip
        return out[None]

    return packed


def _one_gpu(mask: Mask) -> Method:
    """The whole sequence on every rank."""
    return Method(lambda x: x, _local(mask))


def _contiguous(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


class _AllToAll(torch.autograd.Function):
    """Trade heads for tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _traded(x, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _traded(grad, to_heads=not ctx.to_heads), None


def _traded(x: Tensor, *, to_heads: bool) -> Tensor:
    """``[1, T / P, H, D]`` as ``[1, T, H / P, D]``, or the reverse."""
    world = dist.get_world_size()
    _, length, heads, dim = x.shape
    if to_heads:
        parts = x.view(length, world, heads // world, dim).transpose(0, 1).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received.view(1, world * length, heads // world, dim)
    parts = x.view(world, length // world, heads, dim).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.transpose(0, 1).reshape(1, length // world, world * heads, dim)


def _ulysses(mask: Mask) -> Method:
    """Heads are split instead of the sequence (arXiv 2309.14509)."""
    local = _local(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = local(*(_AllToAll.apply(x, True) for x in (q, k, v)))
        return _AllToAll.apply(out, False)  # type: ignore[no-any-return]

    return Method(_contiguous, attend)


class _AllGather(torch.autograd.Function):
    """All ranks' keys in natural order; the gradient is reduced and scattered."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        world, (_, length, heads, dim) = dist.get_world_size(), x.shape
        whole = x.new_empty(world, 2, length // 2, heads, dim)
        dist.all_gather_into_tensor(whole, x)
        return torch.cat([whole[:, 0], whole[:, 1].flip(0)]).view(1, -1, heads, dim)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        world, (_, length, heads, dim) = dist.get_world_size(), grad.shape
        chunks = grad.view(2, world, -1, heads, dim)
        whole = torch.stack([chunks[0], chunks[1].flip(0)], dim=1).contiguous()
        mine = grad.new_empty(1, length // world, heads, dim)
        dist.reduce_scatter_tensor(mine, whole)
        return mine


def _all_gather(mask: Mask) -> Method:
    """All keys on all ranks (as Llama 3 was trained), queries in zigzag order."""
    _plainly_causal(mask, "all-gather")
    local, rank, world = _local(mask), dist.get_rank(), dist.get_world_size()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _AllGather.apply(k), _AllGather.apply(v)
        if not mask.causal:
            return local(q, k, v)
        chunk = q.shape[1] // 2
        ends = ((rank + 1) * chunk, (2 * world - rank) * chunk)
        parts = [
            local(q[:, n * chunk : (n + 1) * chunk], k[:, :end], v[:, :end])
            for n, end in enumerate(ends)
        ]
        return torch.cat(parts, dim=1)

    return Method(ContextParallel(layout="zigzag").shard, attend)


def _ring_flash_attn(mask: Mask) -> Method:
    """The zigzag ring of ring-flash-attn 0.1.8, over FlashAttention-2."""
    _plainly_causal(mask, "ring-flash-attn")
    if not mask.causal:
        raise ValueError("ring-flash-attn: its zigzag ring is causal only")
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return Method(
        ContextParallel(layout="zigzag").shard,
        lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True),
    )


def _torch_cp(mask: Mask) -> Method:
    """``context_parallel`` of torch, over cuDNN."""
    _plainly_causal(mask, "torch-cp")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    # It wants buffers to split; the shards here are split already.
    rest = [torch.zeros(2 * world, device="cuda")]

    @contextmanager
    def around() -> Iterator[None]:
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            context_parallel(mesh, buffers=rest, buffer_seq_dims=[0]),
        ):
            yield

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    return Method(ContextParallel(layout="zigzag").shard, attend, around)
