"""Attention methods on one GPU, ours and others', behind the interface that all methods have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import ring_torch
from benchmarks.torch import fa4_by_hand
from benchmarks.torch.cases import DROPOUT, OPTIONS, Case

Attend = Callable[..., Tensor]  # of q, k, v and, in rows that have them, sinks
flex: Any = torch.compile(flex_attention, dynamic=False)


class Method(NamedTuple):
    """An attention method: its forward, and its forward + backward.

    Attributes:
        forward: Returns ``out`` of q, k, v and, in rows that have them, sinks; without gradients.
        both: Returns ``[out, dq, dk, dv]``, then gradients of sinks and of parameters.
        shard: Cuts a rank's slice ``[B, T_local, heads, D]`` out of ``[B, T, heads, D]``.
        around: Makes the context in which forward and backward both run.
        chosen: Returns the strategy and transport that Ring takes, as ``gather/symm_mem``; an empty
            string for others.
        attend: The function of both passes, if autograd differentiates it.
    """

    forward: Attend
    both: Callable[..., list[Tensor]]
    shard: Callable[[Tensor], Tensor] = lambda x: x
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    chosen: Callable[..., str] = lambda *_: ""
    attend: Attend | None = None


def through_autograd(attend: Attend, *parameters: Tensor) -> Method:
    """Return the method of a function that autograd differentiates."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v, *sinks)

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *sinks: Tensor) -> list[Tensor]:
        out = attend(q, k, v, *sinks)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks, *parameters), dout)]

    return Method(forward, both, attend=attend)


def in_layers(way: Method, number: int) -> Method:
    """Return a method as ``number`` layers of a model: the output of one is the next one's q.

    The layers read the same numbers for k and v, which get a gradient in each of them.
    """
    attend = way.attend
    assert attend is not None

    def forward(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(number):
                q = attend(q, k, v, *sinks)
        return q

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *sinks: Tensor) -> list[Tensor]:
        out, leaves = q, [q]
        for _ in range(number):
            of_layer = [x.detach().requires_grad_() for x in (k, v, *sinks)]
            out = attend(out, *of_layer)
            leaves += of_layer
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return way._replace(forward=forward, both=both)


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


def exact(case: Case) -> Method:
    """Return a case's method by definition, with which others are compared."""
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
    """Return the name of the kernel that ours takes."""
    q, k, v, _ = case.inputs(torch.bfloat16)
    options = OPTIONS[case.row.option].ours(case)
    explained = ring_torch.ContextParallel().explain(q, k, v, **options)
    return explained.splitlines()[0].removeprefix("kernel ").partition(":")[0]


def _sdpa(case: Case, backend: SDPBackend, *, padded: bool = False) -> Method:
    """Return torch's SDPA on one backend.

    Its mask cannot be causal beside a bias, so the bias is ``-inf`` for later keys.
    """
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
    """Return compiled FlexAttention; its block mask is made once."""
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


#: Methods on one GPU, by name.
METHODS: dict[str, Callable[[Case], Method]] = {
    "ring": _ring, "fa4": _fa4, "fa4 apart": partial(_fa4, pack_gqa=False),
    "fa4 64 keys": partial(_fa4, keys=64),
    "cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn padded": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION, padded=True),
    "flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION), "flex": _flex,
}  # fmt: skip
