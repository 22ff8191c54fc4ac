"""The public function ``ring_attention``, which takes this rank's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ring_core import KernelConfig, LayoutSpec, Mask, StrategyConfig, checks
from ring_core.base.arguments import refuse_foreign_options
from ring_torch.autograd import AttentionFunction
from ring_torch.capture import fake_mode, proxy_mode
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.compiled.attention import attend_in_graph
from ring_torch.compiled.static import size_of
from ring_torch.options import AttentionOptions, CallOptions, Window
from ring_torch.prepare import check_call
from ring_torch.records import GIVEN
from ring_torch.strategies import explained


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    layout: LayoutSpec = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    layout: LayoutSpec = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    layout: LayoutSpec = ...,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@refuse_foreign_options
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: LayoutSpec = "contiguous",
    seq_len: int | tuple[int, int] | None = None,
    causal: bool = False,
    window: Window | None = None,
    chunk_size: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Mask | Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | KernelConfig = "auto",
    strategy: str | StrategyConfig = "auto",
    transport: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence whose shards lie on the ranks of a group.

    Every rank calls it with its own shards, of the tokens that the ``layout`` gives it, and gets
    its own slice of the result of dense attention, ``softmax(softmax_scale * q @ k.T + ...) @ v``.
    The same holds for gradients in the backward.

    Args:
        q: ``[B, T_local, H, D]``, float16, bfloat16, float32 or float64. Under autocast q, k and v
            are cast to its dtype, except from float64, as by torch's own attention.
        k: ``[B, T_kv_local, K, D]`` with ``H % K == 0``; query head ``h`` uses K/V head ``h // (H
            // K)``.
        v: ``[B, T_kv_local, K, Dv]``.
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.
        layout: Which rank holds which tokens: ``contiguous``; ``zigzag`` or ``striped``, in which
            causal work is even; or what :func:`ring_core.balanced_layout` returns, in which the
            work of a mask is even.
        seq_len: ``T``, the number of tokens of the sequence, where it is padded at the end to a
            length that the layout can divide, as :meth:`ContextParallel.shard` does with
            ``pad=True``; or a pair ``(T_q, T_kv)``. Positions from ``T`` on are padding: they see
            nothing and are not seen, ``out`` is 0 there and ``lse`` ``-inf``, and gradients are 0.
        causal: If true, the query at position ``i`` sees keys ``j <= i``. With more keys than
            queries, positions are ``i + T_kv - T_q``; fewer keys need ``mask=Mask(causal=True)``.
        window: ``(left, right)``: a query sees keys ``i - left <= j <= i + right``; ``None`` leaves
            a side unbounded.
        chunk_size: Number of positions of a chunk: a query sees only keys of its own chunk.
        cu_seqlens: ``(0, ..., T)``, global offsets of packed documents: a query sees only keys of
            its own document.
        segment_ids: int32 ``[B, T_local]``, or a pair (queries', keys'), in layout order: tokens of
            equal ids see each other; those of negative ids see nothing and are not seen.
        mask: A :class:`ring_core.Mask` in place of ``causal``, ``window``, ``chunk_size`` and
            ``cu_seqlens``, and the way to give a predicate. Or booleans ``[T_local, T_kv]`` or
            ``[B or 1, H or 1, T_local, T_kv]``, true where a query may see a key: rows in layout
            order, columns for all keys in natural order, at most 64 MiB a rank. A query sees a key
            if both they and the other options show it. Blocks hidden from all heads are skipped.
        softmax_scale: Factor of the scores; ``None`` is ``D ** -0.5``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``, before bias and mask.
        sinks: ``[H]`` or ``[H, n]``, logits that join each row's softmax and have no value. Their
            gradient is this rank's part: sum it over ranks, as of all replicated parameters.
        bias: ``[B or 1, H or 1, T_local, T_kv]``, added to the scores: rows in layout order,
            columns for all keys in natural order. It gets a gradient; ``-inf`` masks.
        alibi_slopes: ``[H]`` or ``[B, H]``: ``-slope * abs(i - j)`` is added to the scores. They
            get no gradient.
        dropout_p: Probability to drop a softmax weight. Which weights are dropped depends on
            ``dropout_seed`` and global indices alone, not on ring size, layout, strategy or kernel.
        dropout_seed: An integer in ``[0, 2**64)``, equal on all ranks.
        deterministic: Use only kernels whose backward repeats bit for bit. It is true under
            ``torch.use_deterministic_algorithms(True)`` in any case, unless that only warns.
        return_lse: Return ``lse`` too. If it gets a gradient, the backward may run another kernel
            than the forward; over gathered keys it must get one on all ranks, or on none.
        kernel: ``auto``, ``fa4``, ``fa3``, ``cudnn``, ``fa2``, ``sdpa``, ``triton``, ``eager`` or a
            :class:`KernelConfig`. A kernel that is named never falls back.
        strategy: ``ring``: K/V shards go from rank to rank, a step at a time. ``balanced``: a ring
            over contiguous shards whose idle ranks compute for busy ones, so that causal work is
            even. ``gather``: a rank fetches all the K/V shards that its queries see. ``ulysses``:
            ranks exchange tokens for heads, of which there must be one for each rank. Or a
            :class:`ring_core.StrategyConfig`. ``auto`` is ``gather`` where the transport can be
            ``symm_mem`` and that takes at most three times a ring's memory, else ``ring``.
        transport: How bytes move: ``p2p``, messages of ``torch.distributed``; ``symm_mem``, copies
            out of the peers' memory (GPUs of one host, ``gather`` and ``ulysses``). ``auto`` is
            ``symm_mem`` where that is possible.

    Returns:
        ``out [B, T_local, H, Dv]`` in the inputs' dtype; with ``return_lse`` also ``lse [B, H,
        T_local]``, natural log, float32 (float64 for float64 inputs), differentiable, ``-inf``
        where a row sees nothing (its ``out`` is 0).

    Raises:
        ValueError: An argument is malformed; nothing was sent.
        UnsupportedError: No kernel, strategy or transport, or not the one named, can do this;
            nothing was sent.
        RankMismatchError: Ranks make different calls; no data of the other call was used.
        RuntimeError: A peer failed or did not answer within the group's timeout, or a pass failed
            on this group before.

    Reference: Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers for near-infinite
    context", arXiv 2310.01889.
    """
    q, k, v, deterministic = in_modes_of_torch(q, k, v, deterministic)
    options = CallOptions(
        seq_len,
        causal,
        window,
        chunk_size,
        cu_seqlens,
        segment_ids,
        mask,
        softmax_scale,
        softcap,
        sinks,
        bias,
        alibi_slopes,
        dropout_p,
        dropout_seed,
        deterministic,
        return_lse,
        kernel,
        strategy,
        transport,
    )
    if isinstance(mask, Tensor):
        options = with_dense_mask(q, k, v, options, size_of(group))
    # As `is_traced`, whose frame would cost the host more than the answer.
    traced = torch.compiler.is_compiling() or fake_mode() is not None or proxy_mode() is not None
    if not traced:
        out, lse = _attend(q, k, v, group, layout, options)
    elif isinstance(mask, Mask) and mask.predicate is not None:
        # A graph cannot name a predicate: such a call breaks it, and runs as without a compiler.
        out, lse = _attend_between_graphs(q, k, v, group, layout, options)
    else:
        out, lse = attend_in_graph(q, k, v, group, layout, options)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: Group, layout: LayoutSpec, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """Check a call, and run it as one autograd function; return ``(out, lse)``."""
    segments = options.segment_ids if isinstance(options.segment_ids, tuple) else ()
    tensors = options.segment_ids, options.sinks, options.bias, options.alibi_slopes
    if FakeTensor in map(type, (q, k, v, *tensors, *segments)):
        raise ValueError(
            "an argument is a FakeTensor outside of its FakeTensorMode; call this inside the mode, where "
            "attention computes shapes"
        )
    ranks = ranks_of(group)
    call, inputs = check_call(ranks, ranks.next_call(), layout, q, k, v, options)
    results: tuple[Tensor, Tensor] = AttentionFunction.apply(call, *inputs[:GIVEN])
    return results


def explained_call(
    ranks: Ranks, layout: LayoutSpec, q: Tensor, k: Tensor, v: Tensor, options: CallOptions
) -> str:
    """Return the text of :meth:`ContextParallel.explain`, for ranks that need not be there."""
    q, k, v, deterministic = in_modes_of_torch(q, k, v, options.deterministic)
    options = with_dense_mask(q, k, v, options._replace(deterministic=deterministic), ranks.size)
    return explained(*check_call(ranks, 0, layout, q, k, v, options, keep=False))


_attend_between_graphs = torch.compiler.disable(_attend)


def with_dense_mask(
    q: Tensor, k: Tensor, v: Tensor, options: CallOptions, ranks: int
) -> CallOptions:
    """Return options whose boolean mask, if there is one, has become a bias: ``-inf`` where false.

    Kernels skip the blocks in which the bias is ``-inf`` throughout.

    Args:
        q: The call's queries.
        k: Its keys.
        v: Its values.
        options: The call's options; ``mask`` may be booleans ``[T_local, T_kv]`` or ``[B or 1, H or
            1, T_local, T_kv]``, rows in layout order, columns for all keys in natural order. A bias
            that is given beside it is kept where it is true.
        ranks: Number of ranks that hold a sequence.

    Raises:
        ValueError: The mask is malformed or too large, or a tensor beside it is malformed.
    """
    mask, bias = options.mask, options.bias
    if not isinstance(mask, Tensor):
        return options
    if not all(isinstance(x, Tensor) for x in (q, k, v, mask if bias is None else bias)):
        return options._replace(mask=None)  # the call is refused for its arguments later
    sizes, device = checks.check_qkv(*map(_described, (q, k, v))), str(q.device)
    keys = checks.keys_without_padding(options.seq_len, sizes.k_len * ranks)
    checks.check_dense_mask(_described(mask), tuple(q.shape), keys, device)
    if bias is not None:  # it is broadcast below, where any shape would do
        checks.check_bias(_described(bias), sizes, keys, device)
    visible = mask if mask.ndim == 4 else mask[None, None]
    zero = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    hidden = torch.full((), -torch.inf, dtype=zero.dtype, device=q.device)
    return options._replace(
        mask=None,
        bias=torch.where(visible, zero, hidden),
        bias_role="mask" if bias is None else "both",
    )


def _described(x: Tensor) -> checks.Tensor:
    """Return a tensor's properties as checks take them; while traced, sizes may be symbols."""
    return checks.Tensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device))


def in_modes_of_torch(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return q, k, v and ``deterministic`` as autocast and torch's deterministic mode make them.

    Autocast casts q, k and v as for torch's own attention, except from float64.
    ``torch.use_deterministic_algorithms`` sets the option, unless it only warns.
    """
    if deterministic is False and torch.are_deterministic_algorithms_enabled():
        deterministic = not torch.is_deterministic_algorithms_warn_only_enabled()
    device_type = q.device.type if isinstance(q, Tensor) else "none"
    if device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return q, k, v, deterministic
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in (q, k, v)
    )
    return q, k, v, deterministic
