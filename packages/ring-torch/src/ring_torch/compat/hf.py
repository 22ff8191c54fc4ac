"""transformers' flash attention over a ring, through transformers' own registry."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch.attention import ring_attention
from ring_torch.comm.ranks import Group, ranks_of
from ring_torch.compat.call import seed_of
from ring_torch.compat.documents import offsets_of
from ring_torch.compat.llama3 import check_stride

#: What models hand on that does not concern attention.
_IGNORED = frozenset({
    "cache_position", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache",
})  # fmt: skip
_DOCUMENTS = "documents are those of update_ring_flash_attn_params; leave it out of the batch"
_REASONS = {
    "attention_mask": (
        "a row is one stream of documents: drop padding, or make it a document of its own"
    ),
    "cu_seq_lens_q": _DOCUMENTS, "cu_seq_lens_k": _DOCUMENTS, "max_length_q": _DOCUMENTS,
    "max_length_k": _DOCUMENTS, "seq_idx": _DOCUMENTS,
    "output_attentions": "weights are never formed",
    "cache": "keys of earlier calls lie on one rank; generate on one rank",
    "position_bias": "no flash attention has it; use ring_torch.ring_attention(bias=...)",
}  # fmt: skip


@dataclass
class RingFlashAttention:
    """What transformers calls in place of its flash attention.

    It lies in transformers' registry and is the one place that knows the documents of the batch,
    which no model could hand on.
    """

    group: Group
    heads_k_stride: int
    documents: tuple[int, ...] | None = None

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
        """Attention of ``query [1, H, T_local, D]``, ``key`` and ``value [1, K, T_local, D]``.

        Returns:
            ``(out [1, T_local, H, D], None)``.

        Raises:
            ValueError: An argument is malformed; nothing was sent.
            UnsupportedError: An argument that could change the result cannot be honoured.
        """
        from transformers.integrations.flash_attention import get_target_dtype

        if refused := [
            f"{name}: {_REASONS.get(name, 'this argument is not known here')}"
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
        # Models count the query's own key, too.
        window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        target: torch.dtype | None = get_target_dtype(query, module)
        q, k, v = (x.transpose(1, 2).to(target or query.dtype) for x in (query, key, value))
        return ring_attention(
            q, k, v, group=self.group,
            causal=bool(module.is_causal if is_causal is None else is_causal),
            window=window, cu_seqlens=self.documents,
            softmax_scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout,
            dropout_seed=seed_of(dropout), deterministic=deterministic,
        ), None  # fmt: skip


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> None:
    """Let models of transformers with flash attention attend over the ranks of a group.

    Everything that transformers registers as flash attention (``flash_attention_2``, ``_3``, ``_4``
    and kernels from its hub) is replaced for the whole process. Each rank's input is a contiguous
    piece of one row of packed documents, which :func:`update_ring_flash_attn_params` states before
    every forward. Causality, sliding windows, softcap, sinks, scaling and dropout are those the
    model asks for.

    Args:
        process_group: The ranks that hold a sequence; ``None`` is the default group.
        heads_k_stride: A divisor of the model's K/V heads. It changes no result, and nothing else
            here: memory is that of ``strategy="auto"`` in :func:`ring_torch.ring_attention`.

    Raises:
        ValueError: An argument is malformed.
        ImportError: transformers 5 is not installed.
    """
    ranks_of(process_group)
    check_stride(heads_k_stride, heads_k_stride)
    _install(RingFlashAttention(process_group, heads_k_stride))


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """State the documents of the next batch.

    Args:
        cu_seqlens: Integers ``(0, ..., T)``, offsets of the documents in the whole row. From a GPU
            they are copied to the host, which has to wait for them.
        process_group: The group that was substituted.

    Raises:
        ValueError: An argument is malformed, or :func:`substitute_hf_flash_attn` was not called
            with this group before.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ours = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    if not isinstance(ours, RingFlashAttention):
        raise ValueError("call substitute_hf_flash_attn(process_group, heads_k_stride) before")
    ring = ranks_of(process_group)
    if ring != ranks_of(ours.group):
        raise ValueError("process_group is not the one that substitute_hf_flash_attn was given")
    documents = offsets_of("cu_seqlens", cu_seqlens)
    if documents[-1] % ring.size:
        raise ValueError(
            f"cu_seqlens ends at {documents[-1]}, which {ring.size} ranks cannot share equally; add "
            f"a document of {-documents[-1] % ring.size} tokens of padding"
        )
    ours.documents = documents
    _install(ours)  # kernels from the hub are registered when a model is loaded


def _install(ours: RingFlashAttention) -> None:
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in list(ALL_ATTENTION_FUNCTIONS):
        found = ALL_ATTENTION_FUNCTIONS[name]
        if found is flash_attention_forward or isinstance(found, RingFlashAttention):
            ALL_ATTENTION_FUNCTIONS.register(name, ours)
            if ALL_ATTENTION_FUNCTIONS[name] is not ours:  # it was set past the registry
                ALL_ATTENTION_FUNCTIONS[name] = ours
    for name, module in list(sys.modules.items()):  # where models find it past the registry
        if name.startswith(
            ("transformers.models.", "transformers.modeling_flash_attention_utils")
        ) and "_flash_attention_forward" in vars(module):
            module._flash_attention_forward = _refuse_flash  # type: ignore[attr-defined]  # noqa: SLF001


def _refuse_flash(*_: object, **__: object) -> NoReturn:
    raise UnsupportedError(
        "this model calls flash attention past transformers' registry, where it would see the keys "
        "of one rank only; after substitute_hf_flash_attn no model can do so"
    )
