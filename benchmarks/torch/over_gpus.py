"""Attention methods over several GPUs, ours and others', each called as its users call it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

import ring_core
from benchmarks.torch.alone import alone
from benchmarks.torch.methods import Attend, Method, through_autograd
from ring_core import Mask, StrategyConfig
from ring_torch import ContextParallel


def _layout(name: str, mask: Mask, seq_len: int) -> Any:
    """Return a layout by its name; ``chunks`` are balanced for the mask."""
    if name != "chunks":
        return name
    return ring_core.balanced_layout(mask, seq_len=seq_len, cp_size=dist.get_world_size())


def _no_window_or_documents(mask: Mask, name: str) -> None:
    if mask.window is not None or mask.cu_seqlens is not None:
        raise ValueError(f"{name}: causal and full masks only")


def _local(mask: Mask) -> Attend:
    """Return the best kernel on one GPU: FlashAttention-4, called as its users call it."""
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


def _over_zigzag(attend: Attend) -> Method:
    """Return the method of a function that takes shards in the zigzag layout."""
    return through_autograd(attend)._replace(shard=ContextParallel(layout="zigzag").shard)


def _one_gpu(mask: Mask) -> Method:
    """Return attention over the whole sequence, which every rank computes by itself."""
    return through_autograd(_local(mask))


def _contiguous(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


class _AllToAll(torch.autograd.Function):
    """Autograd function of an all-to-all that trades heads for tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _traded(x, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _traded(grad, to_heads=not ctx.to_heads), None


def _traded(x: Tensor, *, to_heads: bool) -> Tensor:
    """Return ``[B, T / P, H, D]`` as ``[B, T, H / P, D]``, or the reverse."""
    world = dist.get_world_size()
    batch, length, heads, dim = x.shape
    if to_heads:
        parts = x.view(batch, length, world, heads // world, dim).permute(2, 0, 1, 3, 4)
        shape = batch, world * length, heads // world, dim
        return _exchanged(parts).transpose(0, 1).reshape(shape)
    parts = x.view(batch, world, length // world, heads, dim).transpose(0, 1)
    shape = batch, length // world, world * heads, dim
    return _exchanged(parts).permute(1, 2, 0, 3, 4).reshape(shape)


def _exchanged(parts: Tensor) -> Tensor:
    """Send part ``n`` of ``[P, ...]`` to rank ``n``; return the parts received."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def _ulysses(mask: Mask) -> Method:
    """Return Ulysses (arXiv 2309.14509), which splits heads; too few K/V heads are repeated."""
    local = _local(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = max(1, dist.get_world_size() // k.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        out = local(*(_AllToAll.apply(x, True) for x in (q, k, v)))
        return _AllToAll.apply(out, False)  # type: ignore[no-any-return]  # apply has no types

    return through_autograd(attend)._replace(shard=_contiguous)


class _AllGather(torch.autograd.Function):
    """Autograd function of an all-gather of zigzag shards into natural order.

    The gradient is reduce-scattered.
    """

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
        local = grad.new_empty(1, length // world, heads, dim)
        dist.reduce_scatter_tensor(local, whole)
        return local


def _all_gather(mask: Mask) -> Method:
    """Return attention to all gathered K/V (as in Llama 3's training), queries in zigzag."""
    _no_window_or_documents(mask, "all-gather")
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

    return _over_zigzag(attend)


def _padded(attend: Attend) -> Attend:
    """Return ``attend`` with V zero-padded: FlashAttention-2 has one head dim for q, k and v."""

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        short = q.shape[3] - v.shape[3]
        return attend(q, k, pad(v, (0, short)))[..., : v.shape[3]] if short else attend(q, k, v)

    return padded


def _ring_flash_attn(mask: Mask) -> Method:
    """Return ring-flash-attn 0.1.8 over FlashAttention-2: its zigzag ring, or Llama 3's all-gather.

    The zigzag ring is for causal masks alone; the all-gather takes documents, and windows.
    """
    if not mask.causal:
        raise ValueError("ring-flash-attn: its zigzag ring is causal only")
    if mask.window is not None or mask.cu_seqlens is not None:
        return _llama3(mask)
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return _over_zigzag(_padded(partial(zigzag_ring_flash_attn_func, causal=True)))


def _llama3(mask: Mask) -> Method:
    """Return ring-flash-attn's ``llama3_flash_attn_varlen_func``, over contiguous shards.

    It gathers a few heads' keys at a time.
    """
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    rank, world = dist.get_rank(), dist.get_world_size()
    slices: dict[int, tuple[Any, ...]] = {}  # by sequence length

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = world * q.shape[1]
        if length not in slices:
            ends = mask.cu_seqlens or (0, length)
            documents = torch.tensor(ends, dtype=torch.int32, device=q.device)
            slices[length] = llama3_flash_attn_prepare_cu_seqlens(documents, True, rank, world)
        cu_q, cu_k, longest_q, longest_k, keys = slices[length]
        left = -1 if mask.window is None or mask.window[0] is None else mask.window[0]
        out: Tensor = llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, longest_q, longest_k,
            heads_k_stride=min(4, k.shape[2]),  # as in its own benchmark
            local_k_slice=keys, causal=True, window_size=(left, -1 if left < 0 else 0),
        )  # fmt: skip
        return out[None]

    return through_autograd(_padded(attend))._replace(shard=_contiguous)


@cache
def _yunchang_groups() -> None:
    """Make yunchang's global process groups: two consecutive ranks split heads."""
    from yunchang import set_seq_parallel_pg

    world = dist.get_world_size()
    set_seq_parallel_pg(2, world // 2, dist.get_rank(), world)


def _yunchang(mask: Mask) -> Method:
    """Return yunchang 0.6.4 over FlashAttention-2: Ulysses in rank pairs, a zigzag ring of pairs.

    Its ring does not support windows; these take its Ulysses over all ranks.
    """
    if mask.cu_seqlens is not None or not mask.causal:
        raise ValueError("yunchang: it takes no documents, and its zigzag ring is causal only")
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, UlyssesAttention

    shard: Callable[[Tensor], Tensor] = _contiguous
    window: tuple[int | None, int] = (-1, -1)
    world = ulysses = dist.get_world_size()
    attention = UlyssesAttention()
    if mask.window is not None:
        window = (mask.window[0], 0)
    else:
        _yunchang_groups()
        ulysses, attention = 2, LongContextAttention(ring_impl_type="zigzag")
        shard = partial(
            EXTRACT_FUNC_DICT["zigzag"], rank=dist.get_rank(), world_size=world, rd=world // 2, ud=2
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] % ulysses:
            raise ValueError(f"yunchang: {k.shape[2]} K/V heads do not split over {ulysses} ranks")
        out: Tensor = attention(q, k, v, causal=True, window_size=window)
        return out

    return through_autograd(_padded(attend))._replace(shard=shard)


def _torch_cp(mask: Mask) -> Method:
    """Return torch's ``context_parallel``, over cuDNN."""
    _no_window_or_documents(mask, "torch-cp")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    # A dummy: it needs buffers to split, and the shards are split already.
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
        # By its full name: context_parallel may replace this function.
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    return _over_zigzag(attend)._replace(around=around)


#: Methods over several GPUs beside ours, by name.
OTHERS: dict[str, Callable[[Mask], Method]] = {
    "one": _one_gpu, "ulysses": _ulysses, "all-gather": _all_gather,
    "ring-flash-attn": _ring_flash_attn, "yunchang": _yunchang, "torch-cp": _torch_cp,
}  # fmt: skip
OVER_GPUS = (
    "one", "zigzag/fa4/gather/symm_mem", "zigzag/fa4/gather/symm_mem/alone",
    "zigzag/fa4/gather/symm_mem/graph", "zigzag/fa4/gather/symm_mem/alone/graph",
    "zigzag/fa4/ring/p2p", "contiguous/fa4/gather/symm_mem", "ulysses", "all-gather",
    "ring-flash-attn", "torch-cp",
)  # fmt: skip
#: Strategies by their names in the table of all; ``hybrid`` has Ulysses in groups of two ranks.
STRATEGIES: dict[str, str | StrategyConfig] = {
    **{name: name for name in ("auto", "gather", "ring", "ulysses")},
    "hybrid-gather": StrategyConfig("hybrid", ulysses_size=2, outer="gather"),
    "hybrid-ring": StrategyConfig("hybrid", ulysses_size=2, outer="ring"),
}
EVERY_STRATEGY = (
    "one", *(f"zigzag/auto/{name}/auto" for name in STRATEGIES), "chunks/auto/gather/auto",
    "ulysses", "ring-flash-attn", "torch-cp", "yunchang",
)  # fmt: skip


def method(name: str, mask: Mask, seq_len: int) -> Method:
    """Return a method by its name, as ``zigzag/fa4/gather/symm_mem``, ``ulysses`` or ``one``.

    The layout ``chunks`` is balanced for the mask and the length; strategies are those of
    ``STRATEGIES``; with ``/alone`` at its end a method does without communication, and its results
    mean nothing.

    Raises:
        ValueError: It does not support this mask, or there is no such method.
    """
    if "/" not in name:
        return OTHERS[name](mask)
    layout, kernel, strategy, transport, *without = name.split("/")
    if without not in ([], ["alone"]):
        raise ValueError(
            f"{'/'.join(without)} at the end of {name}: behind a transport only 'alone' can follow, "
            f"and then one of 'graph', 'layers' and 'one-thread'"
        )
    cp = ContextParallel(layout=_layout(layout, mask, seq_len))
    options: dict[str, Any] = {
        "kernel": kernel, "strategy": STRATEGIES[strategy], "transport": transport,
        "causal": mask.causal, "window": mask.window, "cu_seqlens": mask.cu_seqlens,
    }  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = cp.attention(q, k, v, sinks=sinks, **options)
        return out

    def chosen(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> str:
        text = cp.explain(q, k, v, sinks=sinks, **options)
        (choice,) = re.findall(r"^strategy (\w+), transport (\w+)", text, re.MULTILINE)
        return "/".join(choice)

    around = alone if without == ["alone"] else nullcontext
    return through_autograd(attend)._replace(shard=cp.shard, around=around, chosen=chosen)
