"""Attention methods, ours and others', each called as its users call it, behind one interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from ring_core import LayoutName, Mask, StrategyConfig, balanced_layout
from ring_torch import ContextParallel

Attend = Callable[[Tensor, Tensor, Tensor], Any]  # of q, k and v


class Method(NamedTuple):
    """An attention method: a function that autograd differentiates, and how it runs.

    Attributes:
        attend: Returns ``out`` of q, k and v.
        parameters: Tensors that get gradients beside the arguments, as sinks.
        shard: Cuts a rank's slice ``[B, T_local, heads, D]`` out of ``[B, T, heads, D]``.
        around: Makes the context in which forward and backward both run.
        chosen: Returns what Ring takes of the same arguments, as ``gather/symm_mem``.
        layers: Calls in a row, as a model's layers make: the output of one is the next one's q.
            They read the same numbers for k and v, which get a gradient in each of them.
        in_graph: True if a CUDA graph is captured and replayed.
    """

    attend: Attend
    parameters: tuple[Tensor, ...] = ()
    shard: Callable[[Tensor], Tensor] = lambda x: x
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    chosen: Callable[..., str] = lambda *_: ""
    layers: int = 1
    in_graph: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, without gradients."""
        with torch.no_grad():
            for _ in range(self.layers):
                q = self.attend(q, k, v)
        return q

    def both(self, *x: Tensor) -> list[Tensor]:
        """Return ``[out, dq, dk, dv]`` of q, k, v and dout, then other layers' and parameters'."""
        q, k, v, dout = x
        out, leaves = q, [q]
        for n in range(self.layers):
            of_layer = [x.detach().requires_grad_() if n else x for x in (k, v)]
            out = self.attend(out, *of_layer)
            leaves += of_layer
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *self.parameters], dout)]


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor,
    score: Callable[[Tensor], Tensor] = lambda scores: scores, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention by its definition; inputs are float32."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = score(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        columns = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, columns], dim=3)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def flash(mask: Mask, **options: Any) -> Attend:
    """Return FlashAttention-4, called as its users call it."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    options |= {"causal": mask.causal, "window_size": mask.window or (None, None)}
    if mask.cu_seqlens is None:
        return lambda q, k, v: flash_attn_func(q, k, v, **options)[0]
    cu = torch.tensor(mask.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = int((cu[1:] - cu[:-1]).max())
    options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], **options)[0][None]


def padded(attend: Attend) -> Attend:
    """Return ``attend`` with V zero-padded to the head dim of q and k."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        short = q.shape[3] - v.shape[3]
        return attend(q, k, pad(v, (0, short)))[..., : v.shape[3]] if short else attend(q, k, v)

    return run


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run torch's SDPA on tensors whose heads come after tokens."""
    options["enable_gqa"] = q.shape[2] != k.shape[2]
    # By its full name: context_parallel may replace this function.
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options
    )
    return out.transpose(1, 2)


def _over(layout: LayoutName, attend: Attend) -> Method:
    """Return the method of a function that takes shards in a layout."""
    return Method(attend, shard=ContextParallel(layout=layout).shard)


class _Exchange(torch.autograd.Function):
    """Send part ``n`` of ``[P, ...]`` to rank ``n``; gradients go back the same way."""

    @staticmethod
    def forward(_: Any, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchange.forward(ctx, grad)


def _ulysses(mask: Mask) -> Method:
    """Return Ulysses (arXiv 2309.14509), which splits heads; too few K/V heads are repeated."""
    local = flash(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        world = dist.get_world_size()
        copies = max(1, world // k.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        # [B, T / P, H, D] becomes [B, T, H / P, D] ...
        parts = (x.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v))
        out = local(*(_Exchange.apply(x).transpose(0, 1).flatten(1, 2) for x in parts))
        # ... and back.
        received: Tensor = _Exchange.apply(out.unflatten(1, (world, -1)).transpose(0, 1))
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    return _over("contiguous", attend)


def _ring_flash_attn(mask: Mask) -> Method:
    """Return ring-flash-attn 0.1.8 over FlashAttention-2: its zigzag ring, or Llama 3's all-gather.

    The zigzag ring is for causal masks alone; the all-gather takes documents, and windows, over
    contiguous shards, and gathers a few heads' keys at a time.
    """
    if not mask.causal:
        raise ValueError("ring-flash-attn: its zigzag ring is causal only")
    if mask.window is None and mask.cu_seqlens is None:
        from ring_flash_attn import zigzag_ring_flash_attn_func

        return _over("zigzag", padded(partial(zigzag_ring_flash_attn_func, causal=True)))
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    rank, world = dist.get_rank(), dist.get_world_size()
    left = -1 if mask.window is None or mask.window[0] is None else mask.window[0]

    @cache
    def slices(length: int, device: torch.device) -> Any:
        documents = torch.tensor(mask.cu_seqlens or (0, length), dtype=torch.int32, device=device)
        return llama3_flash_attn_prepare_cu_seqlens(documents, True, rank, world)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        cu_q, cu_k, longest_q, longest_k, keys = slices(world * q.shape[1], q.device)
        return llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, longest_q, longest_k,
            heads_k_stride=min(4, k.shape[2]),  # as in its own benchmark
            local_k_slice=keys, causal=True, window_size=(left, -1 if left < 0 else 0),
        )[None]  # fmt: skip

    return _over("contiguous", padded(attend))


@cache
def _yunchang_groups(world: int) -> None:
    """Make yunchang's global process groups: two consecutive ranks split heads."""
    from yunchang import set_seq_parallel_pg

    set_seq_parallel_pg(2, world // 2, dist.get_rank(), world)


def _yunchang(mask: Mask) -> Method:
    """Return yunchang 0.6.4 over FlashAttention-2: Ulysses in rank pairs, a zigzag ring of pairs.

    Its ring does not support windows; these take its Ulysses over all ranks.
    """
    if mask.cu_seqlens is not None or not mask.causal:
        raise ValueError("yunchang: it takes no documents, and its zigzag ring is causal only")
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, UlyssesAttention

    rank, world = dist.get_rank(), dist.get_world_size()
    if mask.window is not None:
        attention, ulysses = UlyssesAttention(), world
        window, shard = (mask.window[0], 0), ContextParallel(layout="contiguous").shard
    else:
        _yunchang_groups(world)
        attention, ulysses = LongContextAttention(ring_impl_type="zigzag"), 2
        extract = partial(EXTRACT_FUNC_DICT["zigzag"], rank=rank, world_size=world)
        window, shard = (-1, -1), partial(extract, rd=world // 2, ud=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if k.shape[2] % ulysses:
            raise ValueError(f"yunchang: {k.shape[2]} K/V heads do not split over {ulysses} ranks")
        return attention(q, k, v, causal=True, window_size=window)

    return Method(padded(attend), shard=shard)


def _torch_cp(mask: Mask) -> Method:
    """Return torch's ``context_parallel``, over cuDNN."""
    if mask.window is not None or mask.cu_seqlens is not None:
        raise ValueError("torch-cp: causal and full masks only")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    # A dummy: it needs buffers to split, and the shards are split already.
    rest = [torch.zeros(2 * world, device="cuda")]

    @contextmanager
    def around() -> Iterator[None]:
        parallel = context_parallel(mesh, buffers=rest, buffer_seq_dims=[0])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), parallel:
            yield

    return _over("zigzag", partial(sdpa, is_causal=mask.causal))._replace(around=around)


#: Methods over several GPUs beside ours, by name.
OTHERS: dict[str, Callable[[Mask], Method]] = {
    "one": lambda mask: Method(flash(mask)), "ulysses": _ulysses,
    "ring-flash-attn": _ring_flash_attn, "yunchang": _yunchang, "torch-cp": _torch_cp,
}  # fmt: skip
OVER_GPUS = (
    "one", "zigzag/fa4/gather/symm_mem", "zigzag/fa4/gather/symm_mem/graph", "zigzag/fa4/ring/p2p",
    "contiguous/fa4/gather/symm_mem", "ulysses", "ring-flash-attn", "torch-cp",
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


#: What may stand at the end of a method's name, and how it then runs.
ENDS: dict[str, dict[str, Any]] = {
    "graph": {"in_graph": True},
    "layers": {"layers": 8},
    "one-thread": {"around": partial(torch.autograd.set_multithreading_enabled, False)},
}


def method(name: str, mask: Mask, seq_len: int, *sinks: Tensor) -> Method:
    """Return a method by its name, as ``zigzag/fa4/gather/symm_mem/graph``, ``ulysses`` or ``one``.

    The layout ``chunks`` is balanced for the mask and the length; strategies are those of
    ``STRATEGIES``.

    Raises:
        ValueError: It does not support this mask, or sinks, or there is no such method.
    """
    *parts, end = name.split("/")
    if parts and end in ENDS:
        return method("/".join(parts), mask, seq_len, *sinks)._replace(**ENDS[end])
    if "/" not in name:
        if sinks:
            raise ValueError(f"{name} takes no sinks")
        return OTHERS[name](mask)
    if len(parts) != 3:
        ends = f"behind these one of {[*ENDS]}"
        raise ValueError(f"{name}: a method is layout/kernel/strategy/transport, and {ends}")
    layout: Any = parts[0]
    if layout == "chunks":
        layout = balanced_layout(mask, seq_len=seq_len, cp_size=dist.get_world_size())
    cp = ContextParallel(layout=layout)
    options: dict[str, Any] = {
        "kernel": parts[1], "strategy": STRATEGIES[parts[2]], "transport": end,
        "causal": mask.causal, "window": mask.window, "cu_seqlens": mask.cu_seqlens,
        "sinks": sinks[0] if sinks else None,
    }  # fmt: skip

    def chosen(*qkv: Tensor) -> str:
        text = cp.explain(*qkv, **options)
        (choice,) = re.findall(r"^strategy (\w+), transport (\w+)", text, re.MULTILINE)
        return "/".join(choice)

    return Method(partial(cp.attention, **options), sinks, cp.shard, chosen=chosen)
