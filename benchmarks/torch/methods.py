"""Ways to attend, ours and others', behind one interface: on one GPU and over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import ring_core
import ring_torch
from benchmarks.torch import fa4_by_hand
from benchmarks.torch.alone import alone
from benchmarks.torch.cases import DROPOUT, OPTIONS, Case
from ring_core import Mask
from ring_torch import ContextParallel

Attend = Callable[..., Tensor]  # of q, k, v and, in rows that have them, sinks
flex: Any = torch.compile(flex_attention, dynamic=False)


class Method(NamedTuple):
    """Attention, forward and forward + backward.

    Attributes:
        forward: Returns ``out`` of q, k, v and, in rows that have them, sinks; without gradients.
        both: Returns ``[out, dq, dk, dv]``, then gradients of sinks and of parameters.
        shard: How a rank's slice ``[B, T_local, heads, D]`` is cut out of ``[B, T, heads, D]``.
        around: Forward and backward both run inside of it.
    """

    forward: Attend
    both: Callable[..., list[Tensor]]
    shard: Callable[[Tensor], Tensor] = lambda x: x
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def through_autograd(attend: Attend, *parameters: Tensor) -> Method:
    """Of a differentiable function."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v, *sinks)

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *sinks: Tensor) -> list[Tensor]:
        out = attend(q, k, v, *sinks)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks, *parameters), dout)]

    return Method(forward, both)


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor,
    score: Callable[[Tensor], Tensor] = lambda scores: scores, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by definition, in float32."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = score(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        columns = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, columns], dim=3)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def exact(case: Case) -> Method:
    """The definition."""
    option = OPTIONS[case.row.option]
    i = torch.arange(case.length, device=case.device)[:, None]
    j, heads = i.T, torch.arange(case.row.heads, device=case.device)[:, None, None]
    definition: Callable[..., Tensor] = partial(dense, visible=option.shown(case)(i, j))
    if score := option.score(case):
        definition = partial(definition, score=lambda scores: score(scores, heads, i, j))
    if case.row.option == "sinks":
        definition = partial(definition, sinks=case.sinks())
    return through_autograd(definition)


def _ring(case: Case) -> Method:
    options = OPTIONS[case.row.option].ours(case)
    attend = partial(ring_torch.ring_attention, **options)
    return through_autograd(attend, *(x for name, x in options.items() if name == "sinks"))


def ring_kernel(case: Case) -> str:
    """The kernel that ours takes."""
    q, k, v, _ = case.inputs(torch.bfloat16)
    options = OPTIONS[case.row.option].ours(case)
    explained = ring_torch.ContextParallel().explain(q, k, v, **options)
    return explained.splitlines()[0].removeprefix("kernel ").partition(":")[0]


def _sdpa(case: Case, backend: SDPBackend, *, padded: bool = False) -> Method:
    """Of torch's own attention, whose mask cannot be causal beside a bias: that hides the rest."""
    bias = None
    if case.row.option == "bias":
        later = torch.ones(case.length, case.length, dtype=torch.bool, device=case.device).triu(1)
        bias = case.bias().masked_fill_(later, -torch.inf)[None, None]
    dropout = DROPOUT if case.row.option == "dropout" else 0.0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padded_v = pad(v, (0, q.shape[3] - v.shape[3])) if padded else v
        heads_first = [x.transpose(1, 2) for x in (q, k, padded_v)]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                heads_first[0], heads_first[1], heads_first[2], attn_mask=bias, dropout_p=dropout,
                is_causal=bias is None, enable_gqa=True,
            )  # fmt: skip
        return out.transpose(1, 2)[..., : v.shape[3]]

    return through_autograd(attend)


def _flex(case: Case) -> Method:
    """Of compiled FlexAttention; its blocks are made once."""
    option = OPTIONS[case.row.option]
    shown, score = option.shown(case), option.score(case)
    blocks = create_block_mask(
        lambda _b, _h, i, j: shown(i, j), None, None, case.length, case.length, device=case.device
    )
    modified = None
    if score is not None:
        modified = lambda s, _b, h, i, j: score(s, h, i, j)  # noqa: E731 - FlexAttention takes a function

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
        out = flex(*heads_first, score_mod=modified, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return through_autograd(attend)


def _fa4(case: Case, *, pack_gqa: bool | None = None, keys: int = 128) -> Method:
    return Method(*fa4_by_hand.passes(case, pack_gqa=pack_gqa, keys=keys))


#: On one GPU.
METHODS: dict[str, Callable[[Case], Method]] = {
    "ring": _ring,
    "fa4": _fa4,
    "fa4 apart": partial(_fa4, pack_gqa=False),
    "fa4 64 keys": partial(_fa4, keys=64),
    "cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn padded": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION, padded=True),
    "flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "flex": _flex,
}


def _layout(name: str, mask: Mask, seq_len: int) -> Any:
    """A layout by its name; ``chunks`` are balanced for the mask."""
    if name != "chunks":
        return name
    return ring_core.balanced_layout(mask, seq_len=seq_len, cp_size=dist.get_world_size())


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


def _over_zigzag(attend: Attend) -> Method:
    """Of a function of slices in the zigzag layout."""
    return through_autograd(attend)._replace(shard=ContextParallel(layout="zigzag").shard)


def _one_gpu(mask: Mask) -> Method:
    """The whole sequence on every rank."""
    return through_autograd(_local(mask))


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
    """Send part ``n`` of ``[P, ...]`` to rank ``n``; return the parts that came."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def _ulysses(mask: Mask) -> Method:
    """Heads are split instead of the sequence (arXiv 2309.14509)."""
    local = _local(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = local(*(_AllToAll.apply(x, True) for x in (q, k, v)))
        return _AllToAll.apply(out, False)  # type: ignore[no-any-return]  # apply has no types

    return through_autograd(attend)._replace(shard=_contiguous)


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
        local = grad.new_empty(1, length // world, heads, dim)
        dist.reduce_scatter_tensor(local, whole)
        return local


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

    return _over_zigzag(attend)


def _ring_flash_attn(mask: Mask) -> Method:
    """The zigzag ring of ring-flash-attn 0.1.8, over FlashAttention-2."""
    _plainly_causal(mask, "ring-flash-attn")
    if not mask.causal:
        raise ValueError("ring-flash-attn: its zigzag ring is causal only")
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return _over_zigzag(lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True))


def _torch_cp(mask: Mask) -> Method:
    """``context_parallel`` of torch, over cuDNN."""
    _plainly_causal(mask, "torch-cp")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

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
        # By its full name: context_parallel may put its own in this place.
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    return _over_zigzag(attend)._replace(around=around)


#: Over several GPUs, beside ours.
OTHERS: dict[str, Callable[[Mask], Method]] = {
    "one": _one_gpu,
    "ulysses": _ulysses,
    "all-gather": _all_gather,
    "ring-flash-attn": _ring_flash_attn,
    "torch-cp": _torch_cp,
}
OVER_GPUS = (
    "one", "zigzag/fa4/gather/symm_mem", "zigzag/fa4/gather/symm_mem/alone",
    "zigzag/fa4/gather/symm_mem/graph", "zigzag/fa4/gather/symm_mem/alone/graph",
    "zigzag/fa4/ring/p2p", "contiguous/fa4/gather/symm_mem", "ulysses", "all-gather",
    "ring-flash-attn", "torch-cp",
)  # fmt: skip


def method(name: str, mask: Mask, seq_len: int) -> Method:
    """The method of a name, as ``zigzag/fa4/gather/symm_mem``, ``ulysses`` or ``one``.

    The layout ``chunks`` is balanced for the mask and the length; with ``/alone`` at its end a
    method does without communication, and its results mean nothing.

    Raises:
        ValueError: It cannot show this mask.
    """
    if "/" not in name:
        return OTHERS[name](mask)
    layout, kernel, strategy, transport, *without = name.split("/")
    cp = ContextParallel(layout=_layout(layout, mask, seq_len))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return cp.attention(
            q, k, v, kernel=kernel, strategy=strategy, transport=transport, causal=mask.causal,
            window=mask.window, cu_seqlens=mask.cu_seqlens, sinks=sinks,
        )  # fmt: skip

    around = alone if without == ["alone"] else nullcontext
    return through_autograd(attend)._replace(shard=cp.shard, around=around)
