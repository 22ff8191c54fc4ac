"""Register ring attention as an ``attn_implementation`` of transformers, and set it on models.

The registered function refuses, by name, every argument that it cannot honour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ring_core import KernelConfig, StrategyConfig, UnsupportedError, checks
from ring_core.base.arguments import numbers_as_python
from ring_core.base.config import kernel_config, strategy_config
from ring_torch.attention import ring_attention
from ring_torch.hf.cached import CachedKeys, ServedMask
from ring_torch.hf.masks import LayerMask, check_mask_functions, ring_mask, sharded
from ring_torch.hf.models.check import text_modules, towers
from ring_torch.hf.models.classes import has_attention, has_eager_attention, name_of
from ring_torch.hf.models.implementation import (
    attention_of,
    attention_of_parts,
    set_attention,
    whole_attention,
)
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.hf.models.releases import lacks
from ring_torch.kernels import kernel_names
from ring_torch.strategies import strategy_names
from ring_torch.transports import transport_names

#: Substrings of an implementation's name to which transformers gives a meaning.
_READ_BY_TRANSFORMERS = ("flash", "flex", "paged", "sdpa", "/", ":", "|", "@")
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: its multiples lie far apart

#: Arguments that models pass to attention functions and that do not change their result.
_IGNORED = frozenset({
    "cache_position", "labels", "num_items_in_batch", "output_hidden_states", "position_embeddings",
    "position_ids", "return_dict", "shift_labels", "use_cache",
})  # fmt: skip

_WHY_REFUSED = {
    "output_attentions": "the weights are never held; use eager attention on a short sequence",
    "output_router_logits": "the router's loss is no sum over ranks; hf.parallelize computes it of "
    "the whole sequence",
    "past_key_values": "a split sequence has no cache; generate with another implementation",
    "cache": "a split sequence has no cache; generate with another implementation",
    "cu_seq_lens_q": "documents are those that shard_batch is given",
    "cu_seq_lens_k": "documents are those that shard_batch is given",
}


@numbers_as_python
def register(
    name: str = "ring",
    *,
    kernel: str | KernelConfig = "auto",
    strategy: str | StrategyConfig = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> str:
    """Register ring attention with transformers as an ``attn_implementation``, and return its name.

    Args:
        name: Name to register under; each set of options needs its own.
        kernel: Kernel of each call, as in :func:`ring_torch.ring_attention`.
        strategy: Strategy of each call, as in :func:`ring_torch.ring_attention`.
        transport: Transport of each call, as in :func:`ring_torch.ring_attention`.
        deterministic: True for gradients that are equal bit by bit in every run, as in
            :func:`ring_torch.ring_attention`.

    Returns:
        ``name``, to be given as ``attn_implementation``.

    Raises:
        ValueError: The name is registered as something else or with other options, or has a meaning
            in transformers; or an option is unknown.
        UnsupportedError: The installed transformers has no mask functions of the expected names.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=hf.register())
        loss = model(**hf.shard_batch(cp, batch, model=model)).loss  # this rank's part
    """
    config = kernel_config(kernel, kernel_names())
    strategy = strategy_config(strategy, strategy_names())
    checks.check_choice("transport", transport, transport_names())
    checks.check_flag("deterministic", deterministic)
    if name in ("", "eager") or any(word in name for word in _READ_BY_TRANSFORMERS):
        raise ValueError(
            f"name must not be eager nor hold any of {', '.join(_READ_BY_TRANSFORMERS)}, which mean "
            f"something to transformers, got {name!r}"
        )
    check_mask_functions()
    function = HFAttention(config, strategy, transport, deterministic)
    if AttentionInterface().get(name, function) != function:
        raise ValueError(
            f"attention of the name {name!r} is registered already, as something else or with other "
            f"options; choose another name"
        )
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ring_mask)
    return name


def is_ring(name: str) -> bool:
    """Return True if :func:`register` registered an ``attn_implementation`` of this name."""
    return isinstance(AttentionInterface().get(name, None), HFAttention)


def strategy_of(name: str) -> StrategyConfig:
    """Return the strategy with which ring attention of this name was registered."""
    attention = AttentionInterface()[name]
    assert isinstance(attention, HFAttention)
    return attention.strategy


@dataclass(frozen=True)
class HFAttention:
    """Attention function for transformers, with the options that it passes to ``ring_attention``.

    Attributes:
        kernel: Kernel of each call.
        strategy: Strategy of each call.
        transport: Transport of each call.
        deterministic: True for gradients that are equal bit by bit in every run.
    """

    kernel: KernelConfig
    strategy: StrategyConfig
    transport: str
    deterministic: bool

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of a layer over the keys of all ranks, as transformers calls it.

        Args:
            module: The layer, read for its config and ``layer_idx``.
            query: ``[B, H, T_local, D]``.
            key: ``[B, Hkv, T_kv_local, D]``.
            value: ``[B, Hkv, T_kv_local, Dv]``.
            attention_mask: The layer's :class:`~ring_torch.hf.masks.LayerMask`.
            dropout: Dropout probability.
            scaling: Softmax scale; ``None`` for ``1 / sqrt(D)``.
            sliding_window: Checked against a causal mask; the mask decides.
            softcap: Scores become ``softcap * tanh(scores / softcap)``.
            is_causal: Checked against the mask, which decides.
            s_aux: Attention sinks, ``[H]``.
            position_bias: ``[1 or B, 1 or H, T_local, T_kv]``, added to the scores of all ranks'
                keys.
            **kwargs: Refused, unless known not to change the result.

        Returns:
            The output ``[B, T_local, H, Dv]``, and ``None`` for the attention weights.

        Raises:
            ValueError: The batch does not come from ``shard_batch``.
            UnsupportedError: An argument would change the result and cannot be honoured.
        """
        served = attention_mask if isinstance(attention_mask, ServedMask) else None
        mask = served or _layer_mask(attention_mask)
        if served is not None or mask.batch.joins_router:
            kwargs.pop("output_router_logits", None)
        if reasons := [
            f"{name} ({_WHY_REFUSED.get(name, 'what it would do to the result is not known')})"
            for name, value in kwargs.items()
            if name not in _IGNORED
            and value is not None
            and value is not False
            and (name, value) != ("logits_to_keep", 0)  # 0 keeps all
        ]:
            raise UnsupportedError(f"ring attention cannot honour {'; '.join(reasons)}")
        _check_pattern(mask, sliding_window, is_causal)
        if isinstance(mask, ServedMask):
            return _serve(mask, query, key, dropout, scaling, softcap, s_aux, position_bias), None
        return self.attend(
            module, query, key, value, mask,
            dropout=dropout, scaling=scaling, softcap=softcap, sinks=s_aux,
            bias=_whole_bias(position_bias, mask),
        ), None  # fmt: skip

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: LayerMask,
        *,
        scaling: float | None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Compute attention under a known mask; arguments not named here are those of ``__call__``.

        Args:
            module: The layer, read for its ``layer_idx``.
            query: ``[B, H, T_local, D]``.
            key: ``[B, Hkv, T_kv_local, D]``.
            value: ``[B, Hkv, T_kv_local, Dv]``.
            mask: The batch and the pattern.
            sinks: Attention sinks, ``[H]``.
            bias: ``[1 or B, 1 or H, T_local, T_kv]``, of this rank's queries and all ranks' keys.
            alibi_slopes: ALiBi slopes, ``[H]``.

        Returns:
            The output ``[B, T_local, H, Dv]``.

        Raises:
            UnsupportedError: Queries or keys have other lengths than the batch's part on this rank.
        """
        batch, keys = mask.batch, mask.keys or mask.batch
        if (query.shape[0], query.shape[2], key.shape[2]) != (*batch.shape, keys.shape[1]):
            raise UnsupportedError(
                f"queries {tuple(query.shape)} and keys {tuple(key.shape)}, where the batch holds "
                f"[B, T_local] = {batch.shape}: a split sequence has no KV cache, prefix or cross "
                f"attention"
            )
        q, k, v = (_as_autocast(x).transpose(1, 2) for x in (query, key, value))
        # Causal attention hides padding at the end of a row by itself, so it needs no documents.
        is_plain_causal = mask.causal and batch.single and not batch.padding_sees
        cu_seqlens, ids = (None, None) if is_plain_causal else mask.documents(query.device)
        batch.sharding.check_group()
        return ring_attention(
            q, k, v, group=batch.sharding.group, layout=batch.sharding.layout,
            causal=mask.causal, window=mask.window, chunk_size=mask.chunk_size,
            cu_seqlens=cu_seqlens, segment_ids=ids, softmax_scale=scaling, softcap=softcap,
            sinks=sinks, bias=bias, alibi_slopes=alibi_slopes, dropout_p=dropout,
            dropout_seed=_layer_seed(module, batch, mask) if dropout else None,
            deterministic=self.deterministic, kernel=self.kernel, strategy=self.strategy,
            transport=self.transport,
        )  # fmt: skip


def _layer_mask(attention_mask: object) -> LayerMask:
    """Return a layer's mask if it is a :class:`LayerMask`; raise an error for any other mask."""
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    if isinstance(attention_mask, Tensor):
        raise UnsupportedError(
            f"ring attention takes no mask of shape {tuple(attention_mask.shape)}, only the batch of "
            f"hf.shard_batch, whose attention_mask names padding and documents"
        )
    sharded(attention_mask)
    raise UnsupportedError(
        "the model makes its masks itself, not through transformers.masking_utils, so that its "
        "pattern is not known; it is not supported"
    )


def _whole_bias(bias: Tensor | None, mask: LayerMask) -> Tensor | None:
    """Check that a bias has columns for all ranks' keys and return it; ``None`` for a scalar.

    A scalar, which models give as 0 for no bias, would change no weight.

    Raises:
        UnsupportedError: Its columns are not all ranks' keys.
    """
    if bias is None or bias.ndim == 0:
        return None
    if bias.shape[-1] != (mask.keys or mask.batch).seq_len:
        raise UnsupportedError(
            f"position_bias {tuple(bias.shape)} is of a rank's own keys, and there are "
            f"{(mask.keys or mask.batch).seq_len}: hf.parallelize makes it of all, for T5 and its kin"
        )
    return bias


def _check_pattern(
    mask: LayerMask | ServedMask, sliding_window: int | None, is_causal: bool | None
) -> None:
    """Refuse a layer whose arguments contradict its mask."""
    left = None if mask.window is None else mask.window[0]
    if sliding_window is not None and mask.causal and left != sliding_window - 1:
        raise UnsupportedError(
            f"the layer asks for sliding_window={sliding_window}, and its mask for "
            f"{'no window' if left is None else left + 1}; a model that contradicts itself is not supported"
        )
    if is_causal is not None and is_causal is not mask.causal:
        raise UnsupportedError(
            f"the layer asks for is_causal={is_causal}, and its mask for causal={mask.causal}; "
            f"a model that contradicts itself is not supported"
        )


def _serve(
    mask: ServedMask, query: Tensor, key: object, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the attention of a layer of ``generate`` to a sharded cache, ``[B, n, H, Dv]``.

    Raises:
        UnsupportedError: The keys are not in the cache, or there is dropout or a bias.
    """
    if not isinstance(key, CachedKeys):
        raise UnsupportedError(
            "generate() with a ShardedCache: a layer attends to keys that it has not put into the cache "
            "(layers that share keys, or change them behind past_key_values.update())"
        )
    if dropout or (bias is not None and bias.ndim):
        raise UnsupportedError(
            "generate() with a ShardedCache has no attention dropout (call model.eval()) and no "
            "position_bias"
        )
    return mask.step.attend(query, key, {
        "window": mask.window, "softmax_scale": scaling, "softcap": softcap, "sinks": sinks,
    })  # fmt: skip


def _layer_seed(module: nn.Module, batch: ShardedMask, mask: LayerMask | None = None) -> int:
    """Return the dropout seed of a layer, equal on all ranks.

    It differs by batch and layer, and between self-attention and cross attention of one layer.

    Raises:
        UnsupportedError: The batch has no seed, or the layer no ``layer_idx``.
    """
    layer = getattr(module, "layer_idx", None)
    if batch.dropout_seed is None or layer is None:
        raise UnsupportedError(
            "attention dropout needs a seed that all ranks share and a layer_idx in each layer: give "
            "shard_batch a new dropout_seed with every batch, or set attention_dropout to 0"
        )
    is_cross = mask is not None and mask.keys is not None
    return (batch.dropout_seed + (int(layer) + 1) * _SEED_STEP + 2 * is_cross) % (1 << 64)


def _as_autocast(x: Tensor) -> Tensor:
    """Cast float32 to the dtype of autocast where it is on, as torch's own attention does."""
    is_cast = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast else x


def registered_name(strategy: StrategyConfig) -> str:
    """Return the name under which attention of a strategy is registered, as ``ring-hybrid-2``."""
    pairs = zip(astuple(strategy), astuple(StrategyConfig("auto")), strict=True)
    return "-".join(["ring", *(str(value) for value, default in pairs if value != default)])


def set_ring_attention(model: Any, strategy: StrategyConfig) -> Callable[[], object]:
    """Set ring attention on the model, unless it has it; return a function that sets its own back.

    Towers for images or sound get whole inputs on every rank. They keep their attention, or get
    that of :func:`whole_attention` if it is a ring's.

    Raises:
        ValueError: It has ring attention that was registered with another strategy.
        UnsupportedError: ``set_attn_implementation`` does not reach the model's attention.
    """
    if is_ring(attention_of(model)):
        own = strategy_of(attention_of(model))
        if strategy not in (own, StrategyConfig("auto")):
            raise ValueError(
                f"strategy={strategy.name!r}: the model's attention {attention_of(model)!r} was "
                f"registered with strategy={own.name!r}. Instead: leave strategy out here, or "
                f"register the attention with this one, under a name of its own"
            )
        # Loaded with ring attention everywhere: towers get whole inputs, which it cannot attend to.
        with_ring = [
            x for x in towers(model)
            if is_ring(attention_of(x)) and x.config is not model.config
        ]  # fmt: skip
        tower_attention = [(x.config, attention_of(x)) for x in with_ring]
        set_attention((x.config, whole_attention(x)) for x in with_ring)
        return partial(set_attention, tower_attention)
    attention_before = attention_of_parts(model)
    tower_attention = [(module.config, attention_of(module)) for module in towers(model)]
    set_implementation = model.set_attn_implementation
    # transformers refuses to set attention on a model that writes out its own: set the field.
    if has_eager_attention(model):
        set_implementation = partial(setattr, model.config, "_attn_implementation")
    set_implementation(register(registered_name(strategy), strategy=strategy))
    # In some models, set_attn_implementation changes the text part only. So look at all text
    # modules that attend, not at the model's own config.
    attending = [x for _, x in text_modules(model) if has_attention(x) and hasattr(x, "config")]
    if not all(is_ring(attention_of(x)) for x in attending or [model]):
        set_attention(attention_before)
        raise UnsupportedError(lacks(name_of(model), "attention that set_attn_implementation sets"))
    set_attention(
        [(config, name) for config, name in tower_attention if config is not model.config]
    )
    return partial(set_attention, attention_before)
