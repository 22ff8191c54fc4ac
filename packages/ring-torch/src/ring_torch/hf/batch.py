"""Split batches for a transformers model by hand, without hooks on the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ring_core import UnsupportedError
from ring_core.base.arguments import numbers_as_python
from ring_torch.context import ContextParallel, check_context
from ring_torch.hf.models.batch import split_batch
from ring_torch.hf.models.check import ModelReport, check_model
from ring_torch.hf.models.foreign import refuse_noise

#: Cached reports of checked models; an entry goes when its model is freed.
_REPORTS: WeakKeyDictionary[nn.Module, ModelReport] = WeakKeyDictionary()


@numbers_as_python
def shard_batch(
    cp: ContextParallel,
    batch: Mapping[str, Any],
    *,
    model: nn.Module,
    dropout_seed: int | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch, as keyword arguments of the model's forward.

    Every rank passes the same whole batch. Sequences are padded on the right to a length that the
    layout can divide, and then split. The ranks compare a checksum of their batches, of tensors of
    floats (``inputs_embeds``) the shapes and dtypes alone.

    The model is checked the first time (:func:`check_model`), and refused if it would not compute
    on split sequences what it computes on whole ones. It may be wrapped (DDP, FSDP, PEFT,
    ``torch.compile``). A module that does not come from transformers is not checked; it is assumed
    to be a causal language model whose positions start at 0.

    Args:
        cp: The ranks that share a sequence, and the layout.
        batch: ``input_ids`` int ``[B, T]`` or ``inputs_embeds [B, T, dim]``. Optional are
            ``labels`` int ``[B, T]`` (unshifted: label ``i`` belongs to token ``i``; -100 is
            ignored), ``attention_mask`` ``[B, T]`` (1 for a token, 0 for padding, which may be
            anywhere; or the number of each token's document, from 1 on), ``position_ids`` int
            ``[B, T]`` (default: counted as the model counts them; without an attention mask, a
            position that is not its predecessor plus one begins a new document),
            ``token_type_ids``, ``shift_labels`` and ``num_items_in_batch``; and documents stated by
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, or by ``seq_idx``.
        model: The model that will be called with the returned arguments.
        dropout_seed: For models with attention dropout: an integer in ``[0, 2**64)``, equal on all
            ranks and new with every batch.

    Returns:
        Keyword arguments of the model's forward. Tensors of the batch become ``[B, T_local, ...]``.
        ``position_ids`` are counted in the whole sequence, before the split. ``attention_mask`` is
        an object that only ring attention can read. ``labels`` become ``shift_labels`` (entry ``i``
        is the label of token ``i + 1``, shifted before the split), with ``num_items_in_batch``, the
        number of labels of the whole batch that are not ignored. For models whose loss does not
        shift labels (masked language models, token classification), ``labels`` are an object that
        only cross entropy can read, which then divides by that number. The model's loss is this
        rank's part: the sum over ranks is the mean over all tokens.

    Raises:
        ValueError: Shapes do not fit; labels of padding are not -100; ``cp`` is no
            :class:`ring_torch.ContextParallel`, or ``model`` no module.
        UnsupportedError: The model is not exact on split sequences of this length, or only with the
            hooks of :func:`parallelize`; or the batch has an entry that cannot be split. The
            message says what to do.
        RankMismatchError: Ranks were given different batches.

    Example::

        hf.register()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ring")
        loss = model(**hf.shard_batch(cp, batch, model=model)).loss
        loss.backward()
        cp.reduce_gradients(model)
    """
    sharding = check_context(cp)
    report = _REPORTS.get(model) if isinstance(model, nn.Module) else None
    if report is None:
        report = _REPORTS[model] = check_model(model)
    if report.exact and report.hooks:
        raise UnsupportedError(
            f"{type(model).__name__} needs hooks ({', '.join(report.hooks)}): its batches cannot "
            f"be split by hand. Give the model to ring_torch.hf.parallelize, and whole batches to it"
        )
    refuse_noise(model, "of a batch that is split by hand (give the model to hf.parallelize)")
    return split_batch(sharding, batch, report, dropout_seed, model=model)
