"""Replacement of transformers' flash attention, by ring_flash_attn's two functions."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ring_core import StrategyConfig, UnsupportedError
from ring_core.base.config import strategy_config
from ring_torch.attention import ring_attention
from ring_torch.comm.ranks import Group, ranks_of
from ring_torch.compat.call import seed_of
from ring_torch.compat.documents import offsets_of
from ring_torch.compat.llama3 import check_stride
from ring_torch.strategies import strategy_names

#: Arguments that models pass on and that do not concern attention.
_IGNORED = frozenset({
    "cache_position", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache",
})  # fmt: skip
_OF_THE_UPDATE = "documents are those of update_ring_flash_attn_params; leave it out of the batch"
_WHY_REFUSED = {
    "attention_mask": (
        "a row is one stream of documents: drop padding, or make it a document of its own"
    ),
    "cu_seq_lens_q": _OF_THE_UPDATE, "cu_seq_lens_k": _OF_THE_UPDATE, "max_length_q": _OF_THE_UPDATE,
    "max_length_k": _OF_THE_UPDATE, "seq_idx": _OF_THE_UPDATE,
    "output_attentions": "weights are never formed",
    "cache": "keys of earlier calls lie on one rank; generate on one rank",
    "position_bias": "no flash attention has it; use ring_torch.ring_attention(bias=...)",
}  # fmt: skip


@dataclass
class RingFlashAttention:
    """Attention function that transformers calls in place of its flash attention.

    It is stored in transformers' registry. It also keeps the documents of the batch, as a model has
    no argument to pass them.

    Attributes:
        group: Ranks that share a sequence.
        heads_k_stride: Number by which each call's K/V heads must be divisible; no other effect.
        documents: Offsets of the documents of all calls until they are stated anew; ``None`` before
            the first batch, when calls are refused.
        strategy: Strategy of each call, as in :func:`ring_torch.ring_attention`.
    """

    group: Group
    heads_k_stride: int
    documents: tuple[int, ...] | None = None
    strategy: str | StrategyConfig = "auto"

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of a layer over the keys of all ranks, as transformers calls it.

        ``query`` is ``[1, H, T_local, D]``; ``key`` and ``value`` are ``[1, K, T_local, D]``.

        Returns:
            ``(out [1, T_local, H, D], None)``.

        Raises:
            ValueError: An argument is malformed, or no documents were stated; nothing was sent.
            UnsupportedError: An argument that could change the result cannot be honoured.
        """
        from transformers.integrations.flash_attention import get_target_dtype

        if refused := [
            f"{name}: {_WHY_REFUSED.get(name, 'this argument is not known here')}"
            for name, value in {"attention_mask": attention_mask, **kwargs}.items()
            if name not in _IGNORED and value is not None and value is not False
        ]:
            raise UnsupportedError("; ".join(refused))
        if getattr(module.config, "attention_chunk_size", None) is not None:
            raise UnsupportedError(
                "attention_chunk_size: transformers does not tell flash attention which layers are "
                "chunked; use ring_torch.ring_attention(chunk_size=...)"
            )
        if self.documents is None:
            raise ValueError(
                "documents of the batch are not known; call update_ring_flash_attn_params(cu_seqlens, "
                "process_group) before the model"
            )
        if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"attention over a ring takes one row of packed documents and no cached keys, got "
                f"query {list(query.shape)} and key {list(key.shape)}; pass use_cache=False"
            )
        check_stride(self.heads_k_stride, key.shape[1])
        if deterministic is None:
            deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
        # transformers' window counts the query's own key too, ring_attention's does not.
        window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        target: torch.dtype | None = get_target_dtype(query, module)
        q, k, v = (x.transpose(1, 2).to(target or query.dtype) for x in (query, key, value))
        return ring_attention(
            q,
            k,
            v,
            group=self.group,
            causal=bool(module.is_causal if is_causal is None else is_causal),
            window=window,
            cu_seqlens=self.documents,
            softmax_scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            dropout_p=dropout,
            dropout_seed=seed_of(dropout),
            deterministic=deterministic,
            strategy=self.strategy,
        ), None


def substitute_hf_flash_attn(
    process_group: Group, heads_k_stride: int, *, strategy: str | StrategyConfig = "auto"
) -> None:
    """Replace transformers' flash attention by ring attention over a group, in the whole process.

    All implementations that transformers registers as flash attention (``flash_attention_2``,
    ``_3``, ``_4`` and kernels from its hub) are replaced. Each rank's input must be a contiguous
    piece of one row of packed documents, which :func:`update_ring_flash_attn_params` states before
    every forward. The model decides on causality, sliding windows, softcap, sinks, scaling and
    dropout, whose seeds are drawn from torch's default CPU generator: its state must be the same on
    all ranks. A model that imports transformers' flash attention function itself raises an
    ``UnsupportedError`` from then on.

    Args:
        process_group: The ranks that share a sequence; ``None`` is the default group.
        heads_k_stride: A divisor of the number of the model's K/V heads, which is checked. It has
            no other effect: memory is that of the strategy.
        strategy: Strategy of each call, as in :func:`ring_torch.ring_attention`; ring_flash_attn
            has no such argument.

    Raises:
        ValueError: An argument is malformed.
        ImportError: transformers 5 is not installed.

    Example::

        substitute_hf_flash_attn(group, heads_k_stride=1)
        update_ring_flash_attn_params(cu_seqlens, group)
        model(input_ids=local_ids, position_ids=local_positions, use_cache=False)
    """
    ranks_of(process_group)
    check_stride(heads_k_stride, heads_k_stride)
    config = strategy_config(strategy, strategy_names())
    _install(RingFlashAttention(process_group, heads_k_stride, strategy=config))


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """State the documents of the next batch, before the model's forward.

    Args:
        cu_seqlens: Integers ``(0, ..., T)``, offsets of the documents in the whole row; the number
            of ranks must divide ``T``. From a GPU they are copied to the host, which has to wait.
        process_group: The group that :func:`substitute_hf_flash_attn` was given.

    Raises:
        ValueError: An argument is malformed, or :func:`substitute_hf_flash_attn` was not called
            with this group before.

    Example::

        update_ring_flash_attn_params(torch.tensor([0, 4096, 16384]), group)
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    if not isinstance(attention, RingFlashAttention):
        raise ValueError("call substitute_hf_flash_attn(process_group, heads_k_stride) first")
    ranks = ranks_of(process_group)
    if ranks != ranks_of(attention.group):
        raise ValueError("process_group must be the one that substitute_hf_flash_attn was given")
    documents = offsets_of("cu_seqlens", cu_seqlens)
    if documents[-1] % ranks.size:
        raise ValueError(
            f"cu_seqlens ends at {documents[-1]}, which {ranks.size} ranks cannot share equally; add "
            f"a document of {-documents[-1] % ranks.size} tokens of padding"
        )
    attention.documents = documents
    # Again, as kernels from the hub are registered when a model is loaded.
    _install(attention)


def _install(attention: RingFlashAttention) -> None:
    """Register ring attention under every name that transformers has for flash attention."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in list(ALL_ATTENTION_FUNCTIONS):
        registered = ALL_ATTENTION_FUNCTIONS[name]
        if registered is flash_attention_forward or isinstance(registered, RingFlashAttention):
            ALL_ATTENTION_FUNCTIONS.register(name, attention)
            # An entry that was set on the instance hides the registered one.
            if ALL_ATTENTION_FUNCTIONS[name] is not attention:
                ALL_ATTENTION_FUNCTIONS[name] = attention
    # Some models import the flash attention function itself. Ring attention cannot stand in for
    # that, so it is replaced by an error.
    for name, module in list(sys.modules.items()):
        if name.startswith(
            ("transformers.models.", "transformers.modeling_flash_attention_utils")
        ) and "_flash_attention_forward" in vars(module):
            module._flash_attention_forward = _refuse_flash  # type: ignore[attr-defined]  # noqa: SLF001 - the name by which models call it


def _refuse_flash(*_: object, **__: object) -> NoReturn:
    """Raise an error in place of flash attention that is called past transformers' registry."""
    raise UnsupportedError(
        "this model calls flash attention past transformers' registry, where it would see the keys "
        "of one rank only; after substitute_hf_flash_attn no model can do so"
    )
