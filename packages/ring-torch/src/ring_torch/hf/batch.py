"""Split the batches of a model of transformers by hand, without hooks on the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ring_core import UnsupportedError
from ring_torch.context import ContextParallel, check_context
from ring_torch.hf.models.batch import split_batch
from ring_torch.hf.models.check import ModelReport, check_model

#: Reports of models that were checked, for as long as these live.
_REPORTS: WeakKeyDictionary[nn.Module, ModelReport] = WeakKeyDictionary()


def shard_batch(
    cp: ContextParallel,
    batch: Mapping[str, Any],
    *,
    model: nn.Module,
    dropout_seed: int | None = None,
) -> dict[str, Any]:
    """Return this rank's part of the batch of a language model of transformers.

    Every rank gives the same whole batch. Sequences are padded on the right to a length that the
    layout divides, and split.

    The model is checked the first time (:func:`check_model`): one that would not compute what it
    does on whole sequences is refused. What wraps it (DDP, FSDP, PEFT, ``torch.compile``) may be
    given as well. A module that is none of transformers is not checked, and counts as a causal
    language model with positions from 0.

    Args:
        cp: The ranks, and the layout.
        batch: ``input_ids`` int ``[B, T]`` or ``inputs_embeds [B, T, dim]``, and where wanted
            ``labels`` int ``[B, T]`` (label ``i`` is of token ``i``; -100 is ignored),
            ``attention_mask`` ``[B, T]`` (1, or 0 for padding, anywhere), ``position_ids`` int
            ``[B, T]`` (default: as the model counts; without an attention mask, a document begins
            where they do not go on by one), ``token_type_ids``, ``shift_labels``,
            ``num_items_in_batch``.
        model: The model that is called with what is returned.
        dropout_seed: For models with attention dropout: an integer in ``[0, 2**64)``, equal on all
            ranks and new with every batch.

    Returns:
        Keyword arguments of the model's forward: the tensors given, ``[B, T_local, ...]``, and
        ``position_ids``, global ones; an ``attention_mask`` that ring attention alone can read; for
        ``labels``, ``shift_labels`` (label ``i`` is of token ``i + 1``, shifted before the split)
        and ``num_items_in_batch``, the labels of the whole batch that are not ignored. Where the
        model's loss is of labels as they are (masked language models, classes of tokens),
        ``labels`` that a cross entropy alone can read, and divides by that number. The loss of the
        model then is this rank's part: the sum over ranks is the mean over all tokens.

    Raises:
        ValueError: Shapes do not fit; labels of padding are not -100; ``cp`` is no
            :class:`ring_torch.ContextParallel`, or ``model`` no module.
        UnsupportedError: The model is not exact on split sequences, or the batch holds what cannot
            be split; the message says what to do.
        RankMismatchError: Ranks were given different batches.

    Example::

        hf.register()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ring")
        loss = model(**hf.shard_batch(cp, batch, model=model)).loss
        loss.backward()
        cp.reduce_gradients(model)
    """
    check_context(cp)
    report = _REPORTS.get(model) if isinstance(model, nn.Module) else None
    if report is None:
        report = _REPORTS[model] = check_model(model)
    if report.exact and report.hooks:
        raise UnsupportedError(
            f"{type(model).__name__} needs hooks ({', '.join(report.hooks)}): its batches cannot "
            f"be split by hand. Give the model to ring_torch.hf.parallelize, and whole batches to it"
        )
    return split_batch(cp._sharding, batch, report, dropout_seed)  # noqa: SLF001 - one package
