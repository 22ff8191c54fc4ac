"""Ring attention as one more kernel of MaxText's ``AttentionOp``; MaxText is not imported.

MaxText picks the kernel that its setting ``attention`` names in ``AttentionOp.apply_attention``,
and has no registry for others. :func:`with_ring` wraps that method. In the script that starts a
run, before the model is made::

    from maxtext.layers.attention_op import AttentionOp

    AttentionOp.apply_attention = with_ring(AttentionOp.apply_attention)

Then ``attention=ring`` is this package, and every other value is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from jax.sharding import Mesh

from ring_core import KernelConfig, LayoutSpec, StrategyConfig
from ring_jax.adapt import check_first_aligned, refuse
from ring_jax.context import ContextParallel
from ring_jax.records import Array

#: Mask options of each of MaxText's attention types.
RULES = {
    "global": ("causal",),
    "mla": ("causal",),
    "local_sliding": ("causal", "window"),
    "chunk": ("causal", "chunk_size"),
    "full": (),
}
#: Layouts by MaxText's names of reorder strategies.
LAYOUTS: dict[str, LayoutSpec] = {"dual_chunk_swap": "zigzag", "striped": "striped"}
#: Advice for masks that are made while the model runs.
MADE_MASK = "a mask that a model makes; run such layers with another attention of MaxText"


def with_ring(
    apply_attention: Callable[..., Any],
    *,
    kernel: str | KernelConfig = "auto",
    strategy: str | StrategyConfig = "auto",
) -> Callable[..., Any]:
    """Wrap ``AttentionOp.apply_attention`` so that the setting ``attention=ring`` works.

    It reads from MaxText:

    * the mesh: sequences are split along ``context_sharding``, batch and heads along the axes that
      the logical axis rules say;
    * ``context_parallel_load_balance``, ``context_parallel_reorder_strategy``: the order that
      MaxText has put its tokens in; layers of the kind ``full`` need none;
    * the kind of each layer, ``global``, ``mla``, ``local_sliding``, ``chunk`` or ``full``, with
      ``sliding_window_size`` and ``chunk_attn_window_size``, which count buffer positions;
    * ``attn_logits_soft_cap``, sinks, and segment ids, of keys too.

    Queries come scaled, so ``softmax_scale`` is 1. The argument ``strategy`` chooses how K/V move
    between devices; MaxText's ``context_parallel_strategy`` chooses among its own ways.

    Args:
        apply_attention: ``AttentionOp.apply_attention``, which runs for every other ``attention``.
        kernel, strategy: See :func:`ring_jax.ring_attention`.

    The method raises :class:`ring_core.UnsupportedError`, while a program is traced, for what has
    no counterpart: other kinds of layers, prefill and decoding, dropout in attention, quantised
    keys, masks that a model makes, MoBA, recorded logits, and MaxText's own ``ulysses`` and
    ``usp``. A query that sees nothing gets zeros, where MaxText averages all values. The method
    returns ``(out, None, None)``, and does not read ``segment_positions``, ``lengths``,
    ``use_ragged_attention``, ``pad_kv_total``, ``compress_ratio`` and the two einsums.
    """

    @wraps(apply_attention)
    def apply(
        self: Any,
        query: Array,
        key: Array,
        value: Array,
        decoder_segment_ids: Array | None,
        segment_positions: Array | None,
        lengths: Array | None,
        model_mode: str,
        use_ragged_attention: bool = False,
        previous_chunk: object = None,
        bidirectional_mask: object = None,
        sinks: Array | None = None,
        indexer_mask: Array | None = None,
        compressed_mask: Array | None = None,
        record_max_logits: bool = False,
        decoder_segment_ids_kv: Array | None = None,
        pad_kv_total: int = 0,
        compress_ratio: int = 0,
        *,
        qk_product_einsum: Callable[..., Array],
        wv_product_einsum: Callable[..., Array],
    ) -> Any:
        if self.attention_kernel != "ring":
            return apply_attention(
                self, query, key, value, decoder_segment_ids, segment_positions, lengths,
                model_mode, use_ragged_attention=use_ragged_attention,
                previous_chunk=previous_chunk, bidirectional_mask=bidirectional_mask, sinks=sinks,
                indexer_mask=indexer_mask, compressed_mask=compressed_mask,
                record_max_logits=record_max_logits,
                decoder_segment_ids_kv=decoder_segment_ids_kv, pad_kv_total=pad_kv_total,
                compress_ratio=compress_ratio, qk_product_einsum=qk_product_einsum,
                wv_product_einsum=wv_product_einsum,
            )  # fmt: skip
        refuse(
            model_mode=(None if model_mode == "train" else model_mode, "decode with dot_product"),
            previous_chunk=(previous_chunk, "prefill with dot_product"),
            bidirectional_mask=(bidirectional_mask, MADE_MASK),
            indexer_mask=(indexer_mask, MADE_MASK),
            compressed_mask=(compressed_mask, MADE_MASK),
            record_max_logits=(record_max_logits or None, "scores are never formed; leave it out"),
        )
        _check_settings(self)
        rules = RULES[self.attention_type.value]
        check_first_aligned(query.shape[1], key.shape[1], "MaxText", **dict.fromkeys(rules, True))
        pair: Any = (decoder_segment_ids, decoder_segment_ids_kv)
        out = _context_parallel(self).attention(
            query, key, value,
            causal="causal" in rules,
            window=(self.sliding_window_size - 1, 0) if "window" in rules else None,
            chunk_size=self.chunk_attn_window_size if "chunk_size" in rules else None,
            segment_ids=decoder_segment_ids if decoder_segment_ids_kv is None else pair,
            softmax_scale=1.0,
            softcap=self.attn_logits_soft_cap or None,
            sinks=None if sinks is None else sinks[...],  # the array of an nnx.Param
            kernel=kernel,
            strategy=strategy,
        )  # fmt: skip
        return out, None, None

    return apply


def _check_settings(operation: Any) -> None:
    """Refuse settings of an ``AttentionOp`` that have no counterpart."""
    config, kind = operation.config, operation.attention_type.value
    strategy = config.context_parallel_strategy
    refuse(
        attention_type=(None if kind in RULES else kind, f"known here: {', '.join(RULES)}"),
        context_parallel_strategy=(
            strategy if strategy in ("ulysses", "usp") else None,
            "leave it at all_gather, and say strategy='ulysses' here",
        ),
        moba=(config.moba or None, "its gates need all scores; use dot_product"),
        kv_quant=(operation.kv_quant, "keys and values have to be arrays; leave it out"),
        dropout_rate=(
            (config.enable_dropout and operation.dropout_rate) or None,
            "most of MaxText's own kernels drop nothing; set enable_dropout=false",
        ),
    )  # fmt: skip


def _context_parallel(operation: Any) -> ContextParallel:
    """Make a ``ContextParallel`` from the mesh, axes and token order of an ``AttentionOp``."""
    mesh: Mesh = operation.mesh
    axis = operation.config.context_sharding
    batch, heads, *_ = operation._logical_to_mesh_axes(operation.flash_axis_names_q)  # noqa: SLF001 - MaxText has no public way
    return ContextParallel(mesh, axis, batch, heads, layout=_layout(operation, mesh.shape[axis]))


def _layout(operation: Any, size: int) -> LayoutSpec:
    """Return the layout in which MaxText's input pipeline has put the tokens."""
    config = operation.config
    natural = not config.context_parallel_load_balance or operation.attention_type.value == "full"
    if size == 1 or natural:
        return "contiguous"
    order: str = config.context_parallel_reorder_strategy.value
    if order == "auto":
        on_gpu = config.hardware in ("gpu", "gpu_multiprocess")
        striped = on_gpu and config.packing and config.context_parallel_strategy == "ring"
        order = "striped" if striped else "dual_chunk_swap"
    return LAYOUTS[order]
