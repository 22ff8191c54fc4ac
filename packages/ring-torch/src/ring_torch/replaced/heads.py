"""Forward of :class:`torch.nn.MultiheadAttention`, whose attention torch computes out of sight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ring_core import UnsupportedError


def attend_with_heads(
    attend: Callable[..., Tensor],
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    is_causal: bool,
    need_weights: bool,
    is_split: bool,
) -> Tensor:
    """Compute the layer's output from this rank's tokens.

    Arguments but ``attend``, which takes those of SDPA, are the forward's. With ``is_causal``
    ``attn_mask`` is read where torch reads it, and else taken to be causal. If tokens are split
    (``is_split``), one that is causal for a rank's own tokens means that of the whole sequence.

    Raises:
        UnsupportedError: Tensors are nested.
        ValueError: The masks have unlike numbers of keys.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise UnsupportedError(
            "replace_sdpa: a MultiheadAttention was given a nested tensor: give a padded one, and key_padding_mask"
        )
    if is_causal and attn_mask is not None:
        reads_mask = (
            need_weights
            or key_padding_mask is not None
            or _is_fused(layer, query, key, value, attn_mask)
        )
        is_causal = not reads_mask or (is_split and _is_causal(attn_mask, query))
    is_batched = query.ndim == 3
    if not is_batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    elif not layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    weights = (
        (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        if layer.in_proj_weight is None
        else layer.in_proj_weight.chunk(3)
    )
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (
        linear(x, weight, bias).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )  # [B, H, T_local, D]
    mask = _joined(
        None if is_causal else _shown(attn_mask, q.dtype, layer.num_heads),
        None
        if key_padding_mask is None
        else _shown(key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1]), q.dtype, 1),
    )
    dropout_p = layer.dropout if layer.training else 0.0
    heads = attend(q, k, v, mask, dropout_p, is_causal)
    out = linear(heads.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    if not is_batched:
        return out.squeeze(0)
    return out if layer.batch_first else out.transpose(0, 1)


def _is_fused(
    layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> bool:
    """Return True if torch computes the layer by its fused function, which reads the mask."""
    parameters = [*layer.parameters()]
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not layer.training
        and layer.batch_first
        and query.ndim == 3
        and query is key is value
        and layer._qkv_same_embed_dim  # noqa: SLF001 - torch has no public name for it
        and layer.in_proj_bias is not None
        and layer.num_heads % 2 == 0
        and not mask.is_floating_point()
        and query.dtype == layer.in_proj_bias.dtype
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, *parameters)))
    )


def _is_causal(mask: Tensor, query: Tensor) -> bool:
    """Return True if a mask of the layer is causal.

    A graph does not know a mask's numbers: that of a rank's own keys it takes to be causal, as no
    other is possible there, and asserts it when it runs; others it reads.
    """
    rows, columns = mask.shape[-2:]
    if rows != columns or (torch.compiler.is_compiling() and rows not in query.shape[:-1]):
        return False
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool:
        causal = torch.zeros_like(causal, dtype=mask.dtype).masked_fill(causal, -torch.inf)
    is_equal = (mask == causal).all()
    if torch.compiler.is_compiling():
        torch._assert_async(  # noqa: SLF001 - torch has no public name for it
            is_equal,
            "replace_sdpa: a MultiheadAttention with is_causal=True was given an attn_mask of this rank's "
            "keys that is not causal: give a column for each of the keys of all ranks",
        )
        return True
    return bool(is_equal)


def _shown(mask: Tensor | None, dtype: torch.dtype, heads: int) -> Tensor | None:
    """Return a mask of the layer as SDPA takes it: true where a key is seen, or numbers to add.

    The layer's own booleans are true where a key is hidden.
    """
    if mask is None:
        return None
    if mask.ndim == 3:  # [B * H, T, S]
        mask = mask.unflatten(0, (-1, heads))
    return ~mask if mask.dtype == torch.bool else mask.to(dtype)


def _joined(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Return one mask that hides what either of two hides."""
    if mask is None or padding is None:
        return padding if mask is None else mask
    if mask.shape[-1] != padding.shape[-1]:
        raise ValueError(
            f"replace_sdpa: a MultiheadAttention was given attn_mask of {mask.shape[-1]} keys and key_padding_mask of "
            f"{padding.shape[-1]}: beside attn_mask, give key_padding_mask [B, T] of the whole sequence"
        )
    if mask.dtype == padding.dtype == torch.bool:
        return mask & padding
    added = [
        torch.zeros_like(
            x, dtype=mask.dtype if padding.dtype == torch.bool else padding.dtype
        ).masked_fill(~x, -torch.inf)
        if x.dtype == torch.bool
        else x
        for x in (mask, padding)
    ]
    return added[0] + added[1]
