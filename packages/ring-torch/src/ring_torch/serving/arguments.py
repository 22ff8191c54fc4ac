"""A call of ``decode`` or ``prefill``: its options, checked before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from ring_core import UnsupportedError, checks
from ring_torch.call import add_sinks
from ring_torch.checking.settings import check_of
from ring_torch.comm.handshake import GuardedPass
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.options import Window
from ring_torch.recurrent.arguments import (
    SplitsSequences,
    check_tensor,
    checked_flag,
    explains,
    sharding_of,
)
from ring_torch.serving.cache import KVCache, state_of
from ring_torch.serving.kernels import chosen
from ring_torch.serving.merging import refuse_grad
from ring_torch.serving.paged import Rules
from ring_torch.serving.state import CacheState
from ring_torch.sharding import Sharding, agree_on_call
from ring_torch.tensor_specs import TensorSpec

KernelName = Literal["auto", "eager", "triton", "fa4"]
TransportName = Literal["auto", "p2p", "symm_mem"]


class ServingOptions(TypedDict, total=False):
    """Options of :func:`decode` and :func:`prefill`, for type checkers."""

    window: Window | None
    chunk_size: int | None
    softmax_scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    kernel: KernelName
    transport: TransportName


@dataclass(frozen=True)
class ServingCall:
    """Checked call of ``decode`` or ``prefill`` on a cache.

    Attributes:
        sharding: Ranks and layout.
        ranks: Ranks of the group.
        cache: What the cache holds.
        layer: Number of the layer.
        known: Requests, a row of the batch each; behind them may be padding.
        rules: Options that make scores.
        kernel: The kernel, which is not ``"auto"``.
        reason: Why it is not the fastest.
        sinks: Logits that join the softmax, or ``None``.
        return_lse: True to return ``lse``, too.
        number: Number of the call on its group.
        signature: What must be equal on all ranks, but for the state of the cache.
        digest: Digest of the changes of the cache and of the requests, 64 bits.
        checked: Not 0 if the tripwire checks this call.
    """

    sharding: Sharding
    ranks: Ranks
    cache: CacheState
    layer: int
    known: tuple[int, ...]
    rules: Rules
    kernel: str
    reason: str
    sinks: Tensor | None
    return_lse: bool
    number: int
    signature: CallSignature
    digest: int
    checked: int

    @contextmanager
    def agreed(self, device: torch.device) -> Iterator[None]:
        """Run a block after all ranks have found their calls, and caches, to be equal."""
        ranks = self.ranks
        agree_on_call(ranks, self.number, self.signature, device, self.digest)
        with (
            GuardedPass(ranks, self.number, self.signature, device),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield

    def finished(self, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the results of the call: sinks join the softmax, ``out`` is rounded once."""
        if self.sinks is not None:
            out, lse = add_sinks(out.to(lse.dtype), lse, self.sinks)
        return out.to(dtype), lse


def checked_call(
    name: str, cp: SplitsSequences, q: Tensor, cache: KVCache, layer: int,
    requests: Sequence[int] | None, options: ServingOptions, return_lse: bool,
) -> ServingCall:  # fmt: skip
    """Check a call, and return it.

    Raises:
        ValueError: An argument is malformed, or the layer was not written.
        UnsupportedError: No kernel or transport can do it.
    """
    sharding = sharding_of(cp)
    ranks = sharding.ranks
    number = 0 if explains() else ranks.next_call()
    state = state_of(cache)
    state.check_layer(layer)
    check_tensor("q", q)
    kv_heads, head_dim = state.key_shape
    if q.ndim != 4 or q.shape[3] != head_dim or 0 in q.shape or q.shape[2] % kv_heads:
        raise ValueError(
            f"q must be [B, n, H, {head_dim}], H a multiple of the cache's {kv_heads} heads, got "
            f"{list(q.shape)}"
        )
    state.check_dtype("q", q)
    sinks, slopes = options.get("sinks"), options.get("alibi_slopes")
    device, batch, n, heads = str(q.device), *q.shape[:3]
    sizes = checks.Sizes(batch, n, n, heads, kv_heads, head_dim, state.value_dim)
    for option, x, check in (
        ("sinks", sinks, checks.check_sinks), ("alibi_slopes", slopes, checks.check_alibi_slopes),
    ):  # fmt: skip
        if x is not None:
            check_tensor(option, x)
            spec = TensorSpec(tuple(x.shape), x.dtype, x.device, requires_grad=False)
            check(spec.described(), sizes, device)
    refuse_grad(name, q=q, sinks=sinks, alibi_slopes=slopes)
    kernel, transport = options.get("kernel", "auto"), options.get("transport", "auto")
    checks.check_choice("kernel", kernel, get_args(KernelName))
    checks.check_choice("transport", transport, get_args(TransportName))
    if transport == "symm_mem":
        raise UnsupportedError(
            f"{name}: transport 'symm_mem' has no exchange of partial results. Instead: use "
            f"transport='auto'"
        )
    window, chunk_size = options.get("window"), options.get("chunk_size")
    mask = checks.check_mask(
        None, causal=True, window=window, chunk_size=chunk_size, cu_seqlens=None
    )
    softmax_scale, softcap = options.get("softmax_scale"), options.get("softcap")
    rules = Rules(
        mask, checks.check_scale(softmax_scale, head_dim), checks.check_softcap(softcap),
        None if slopes is None else slopes.view(-1, heads),
    )  # fmt: skip
    library, reason = chosen(kernel, name, q, state.value_dim, rules)
    known = state.batch_of(requests, "request" if name == "prefill" else "requests")
    check_every, checked = check_of(number) if number else (0, 0)
    # One rank has nobody to compare them with.
    signature = CallSignature.of({} if ranks.size == 1 else {
        "q": [*q.shape, str(q.dtype)], "layer": layer, "layout": str(sharding.layout) if name == "prefill" else None,
        **state.facts, "mask": mask.describe(), "scale": rules.scale, "softcap": rules.softcap,
        "sinks": sinks is not None, "alibi_slopes": slopes is not None, "kernel": library,
        "check": check_every, "seed_is": "state of the cache",
    }, name)  # fmt: skip
    text = f"{state.changes:x} {requests and known}".encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return ServingCall(
        sharding, ranks, state, layer, known, rules, library, reason, sinks,
        checked_flag("return_lse", return_lse), number, signature, digest,
        checked if ranks.size > 1 else 0,
    )  # fmt: skip
