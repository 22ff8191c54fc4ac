"""Splitting of a text model's batch over ranks: its tensors, its labels and its mask."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ring_core import RankMismatchError, UnsupportedError, checks, divisor_of
from ring_core.base.arguments import Ints
from ring_torch.comm.exchange import collective
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Ranks
from ring_torch.hf.models.check import ModelReport
from ring_torch.hf.models.documents import STATED, check_positions, stated_documents
from ring_torch.hf.models.placeholders import (
    Placeholder,
    ShardedMask,
    ShiftedLabels,
    UnshiftedLabels,
)
from ring_torch.hf.models.rope import check_last_positions
from ring_torch.sharding import Sharding
from ring_torch.training.part import IGNORED

#: Tensors ``[B, T, ...]`` that are split, and the values they are padded with.
_SPLIT = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
}

#: Arguments that are passed on unchanged: they mean the same for a part of a sequence.
_PASSED_ON = ("num_items_in_batch", "output_hidden_states", "return_dict", "task_ids", "use_cache")

_NO_CACHE = (
    "there is no cache of a split sequence; to generate call remove() of the handle of hf.parallelize "
    "first, or use another attn_implementation"
)
_WHY_REFUSED = {
    "past_key_values": _NO_CACHE,
    "output_attentions": "weights are never held; leave it out",
    "start_positions": "it counts from a sequence's start, and the loss is a softmax over all of it: "
    "compute it on every rank from ContextParallel.unshard(x, grad='slice') of start_logits and "
    "end_logits",
    "end_positions": "as start_positions",
    "logits_to_keep": "it counts from the end of a rank's part; take the logits you need, or give the "
    "model to hf.parallelize with logits='gather'",
}


def split_batch(
    sharding: Sharding,
    batch: Mapping[str, Any],
    report: ModelReport,
    dropout_seed: int | None,
    weight: float = 0.0,
    also_compared: Mapping[str, Any] | None = None,
    *,
    with_ids: bool = False,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch, as :func:`ring_torch.hf.shard_batch` describes it.

    Args:
        sharding: Which rank holds which tokens.
        batch: The whole batch, the same on all ranks.
        report: Report of the model, which says how it counts positions and shifts labels.
        dropout_seed: Seed of attention dropout, if there is any.
        weight: Checksum of the model's weights, which ranks compare.
        also_compared: More entries that ranks compare, which are not split.
        with_ids: True to make segment ids even where ``cu_seqlens`` would do.
        model: The model, if its rotary embeddings have no hooks.

    Raises:
        ValueError: The batch is malformed.
        UnsupportedError: The model is not exact on split sequences, or an entry cannot be split.
        RankMismatchError: Ranks have different batches or weights.
    """
    checks.check_seed(dropout_seed)
    if not report.exact:
        raise UnsupportedError(f"the model cannot be split: {'; '.join(report.reasons)}")
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    entries = {name: value for name, value in batch.items() if value is not None}
    _check_names(entries)
    if report.no_labels and {"labels", "shift_labels"} & entries.keys():
        raise UnsupportedError(report.no_labels)
    # Every rank has the whole batch and works out the same masks and positions: only a digest is
    # sent.
    tokens = tokens_of(entries)
    _check_shapes(entries, tokens)
    size, length = tokens.shape[:2]
    stated = stated_documents(entries, (size, length))
    real = _mask_of_tokens(entries)
    positions = entries.pop("position_ids", None)
    segments = _segments(real, None if "attention_mask" in entries else positions, (size, length))
    if stated is not None:
        segments = stated
        if positions is not None:
            check_positions(stated, _array(positions))
    if positions is None:
        positions = _positions(entries, tokens, real, report)
    elif "attention_mask" in entries:
        _check_one_document(_array(positions), real)
    entries["position_ids"] = positions.expand(size, length)
    entries.pop("attention_mask", None)
    gathers = "recurrent" in report.hooks
    # Recurrent models take a forward of one token for a step of decoding, and give it no mask. So
    # pad to at least two tokens a rank.
    min_length = max(length, sharding.ranks.size + 1) if gathers else length
    padding = min_length - length + -min_length % divisor_of(sharding.layout, sharding.ranks.size)
    # Largest position id on each rank, padding of the layout left out.
    last_positions = tuple(
        int(_array(positions)[:, indices[indices < length]].max(initial=0))
        for indices in (
            sharding.layout_of(length + padding).positions(rank)
            for rank in range(sharding.ranks.size)
        )
    )
    if model is not None:
        check_last_positions(model, last_positions)
    # Shift labels and count them before the split, as both need the whole sequence.
    _set_labels(entries, segments, report)
    _check_same_batch(
        sharding.ranks, {**(also_compared or {}), **entries}, segments, dropout_seed, weight
    )

    # Pad each tensor to a length that the layout can divide, and keep this rank's tokens of it.
    for name in _SPLIT.keys() & entries.keys():
        if isinstance(entries[name], Placeholder):
            continue
        x = pad(entries[name], (*(0, 0) * (entries[name].ndim - 2), 0, padding), value=_SPLIT[name])
        entries[name] = sharding.shard(x, dim=1)
    if not report.shifts_labels and "labels" in entries:
        entries["labels"] = UnshiftedLabels(entries["labels"], entries["num_items_in_batch"])
    is_real = segments >= 0
    segments = np.pad(segments, ((0, 0), (0, padding)), constant_values=-1)
    single, cu_seqlens, needs_ids = _single_and_offsets(segments)
    ids = None
    if needs_ids or with_ids or "chunks" in report.hooks:
        ids = torch.as_tensor(segments, dtype=torch.int32, device=tokens.device)
    entries["attention_mask"] = ShardedMask(
        sharding,
        (size, (length + padding) // sharding.ranks.size),
        length + padding,
        single,
        cu_seqlens,
        None if ids is None else sharding.shard(ids, dim=1),
        max(last_positions),
        dropout_seed,
        length,
        entries["position_ids"],
        has_padding=bool((segments < 0).any()),
        gathers=gathers,
        documents=row_documents(segments) if gathers else (None,),
        whole=torch.from_numpy(is_real).to(tokens.device, torch.int64)
        if {"recurrent", "embeddings"} & {*report.hooks} and not is_real.all()
        else None,
        first=tuple(is_real.argmax(axis=1).tolist()),
        has_holes=bool(
            (np.diff(is_real, axis=1, prepend=False, append=False).sum(axis=1) > 2).any()
        ),
    )
    return entries


def tokens_of(batch: Mapping[str, Any]) -> Any:
    """Return a batch's ``input_ids [B, T]``, else its ``inputs_embeds [B, T, dim]``."""
    ids = batch.get("input_ids")
    return batch.get("inputs_embeds") if ids is None else ids


def _positions(
    entries: Mapping[str, Any],
    tokens: Tensor,
    real: npt.NDArray[np.bool_] | None,
    report: ModelReport,
) -> Tensor:
    """Return position ids as the model makes them itself, int64 ``[1, T]`` or ``[B, T]``.

    Models with a position offset (RoBERTa) give padding the position before the first token's, and
    do not count it. They find padding by token ids, and among embeddings count every token. So do
    other models, but those that count by the attention mask.
    """
    offset = report.position_offset
    if offset and "input_ids" in entries:
        counted = tokens != offset - 1
    elif real is not None and not report.counts_padding:
        counted = torch.from_numpy(real).to(tokens.device)
    else:
        return torch.arange(offset, offset + tokens.shape[1], device=tokens.device)[None]
    return counted.long().cumsum(1) * counted + offset - 1


def _set_labels(entries: dict[str, Any], segments: Ints, report: ModelReport) -> None:
    """Shift labels if the model's loss does, and count the labels of the whole batch.

    Raises:
        ValueError: A label of padding is not -100, or ``shift_labels`` are given to a model that
            does not shift.
    """
    if report.shifts_labels:
        labels = entries.pop("labels", None)
        if labels is not None and "shift_labels" not in entries:
            entries["shift_labels"] = pad(labels[:, 1:], (0, 1), value=IGNORED)
    elif "shift_labels" in entries:
        raise ValueError(
            "shift_labels: the loss of this model is of labels as they are; give labels instead"
        )
    name = "shift_labels" if report.shifts_labels else "labels"
    if name not in entries:
        return
    ignored = _array(entries[name]) == IGNORED
    if not ignored[segments < 0].all():
        detail = ", and of a token that follows padding," if report.shifts_labels else ""
        raise ValueError(
            f"labels of padding{detail} must be {IGNORED}: the loss would hold what is computed of "
            f"padding, which has no meaning"
        )
    if report.shifts_labels:
        entries["labels"] = ShiftedLabels()
    entries.setdefault("num_items_in_batch", int((~ignored).sum()))


def _check_names(entries: Mapping[str, Any]) -> None:
    """Refuse a batch without tokens, or with an entry that cannot be split.

    Raises:
        ValueError: There are not exactly one of ``input_ids`` and ``inputs_embeds``.
        UnsupportedError: An entry cannot be split; the message says why.
    """
    if ("input_ids" in entries) == ("inputs_embeds" in entries):
        raise ValueError("a batch must have one of input_ids [B, T] and inputs_embeds [B, T, dim]")
    supported = {*_SPLIT, *_PASSED_ON, *STATED, "attention_mask"}
    if entries.get("use_cache"):
        raise UnsupportedError(f"use_cache=True: {_NO_CACHE}")
    if reasons := [
        f"{name} ({_WHY_REFUSED.get(name, 'how it lies along the sequence is not known')})"
        for name in entries
        if name not in supported
    ]:
        raise UnsupportedError(
            f"shard_batch cannot split {'; '.join(reasons)}. It takes {', '.join(sorted(supported))}"
        )


def _check_shapes(entries: Mapping[str, Any], tokens: Any) -> None:
    """Refuse entries that are no tensors ``[B, T]``, or ``[B, T, dim]`` for embeddings.

    Raises:
        ValueError: An entry is no tensor, or of other sizes than the tokens.
        UnsupportedError: An entry has another number of dimensions.
    """
    token_name = "input_ids" if "input_ids" in entries else "inputs_embeds"
    for name, value in ({token_name: tokens} | dict(entries)).items():
        if name in _PASSED_ON or name in STATED:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.ndim != (3 if name == "inputs_embeds" else 2):
            raise UnsupportedError(
                f"{name} has shape {tuple(value.shape)}; shard_batch splits "
                f"{'[B, T, dim]' if name == 'inputs_embeds' else '[B, T]'}. Masks of four dimensions "
                f"and positions in several directions are not supported"
            )
        sizes = (1, tokens.shape[0]) if name == "position_ids" else (tokens.shape[0],)
        if value.shape[1] != tokens.shape[1] or value.shape[0] not in sizes:
            raise ValueError(
                f"{name} must be [B, T] = {tuple(tokens.shape[:2])} as the tokens, got "
                f"{tuple(value.shape)}"
            )


def _array(x: Tensor) -> Ints:
    """Copy a tensor to a numpy array on the host."""
    return x.detach().cpu().numpy()


def _mask_of_tokens(entries: Mapping[str, Any]) -> npt.NDArray[np.bool_] | None:
    """Return a mask of tokens that are no padding, bool ``[B, T]``; ``None`` if the batch has none.

    Raises:
        UnsupportedError: ``attention_mask`` has other values than 0 and 1.
    """
    if "attention_mask" not in entries:
        return None
    mask = _array(entries["attention_mask"])
    if not ((mask == 0) | (mask == 1)).all():
        raise UnsupportedError(
            "attention_mask must be 0 for padding and 1 for tokens, or number documents from 1 on"
        )
    return mask.astype(np.bool_)


def _segments(
    real: npt.NDArray[np.bool_] | None, positions: Tensor | None, shape: tuple[int, int]
) -> Ints:
    """Return the segment ids ``[B, T]``: the number of each token's document, -1 for padding.

    As in transformers, a document begins where a position id is not its predecessor plus one, and
    only if there is no attention mask.
    """
    segments = np.zeros(shape, np.int64)
    if positions is not None:
        segments[:, 1:] = np.cumsum(np.diff(_array(positions), axis=1) != 1, axis=1)
    if real is not None:
        segments[~real] = -1
    return segments


def _check_one_document(positions: Ints, real: npt.NDArray[np.bool_] | None) -> None:
    """Refuse position ids that start again within a row that has an attention mask.

    Raises:
        UnsupportedError: transformers takes such a row for one document.
    """
    assert real is not None
    pairs = real[:, 1:] & real[:, :-1]
    if (np.diff(np.broadcast_to(positions, real.shape), axis=1) != 1)[pairs].any():
        raise UnsupportedError(
            "attention_mask and position_ids that start again: transformers takes a row "
            "with padding for one document. For packed documents let attention_mask number them, or "
            "leave it out; padding then is a document of its own"
        )


def _single_and_offsets(segments: Ints) -> tuple[bool, tuple[int, ...] | None, bool]:
    """Return a mask's ``single`` and ``cu_seqlens``, and True if it needs segment ids.

    It needs them if rows differ, and if padding interrupts a document (``1 1 0 0 1 1``), which
    offsets would cut in two.
    """
    length = segments.shape[1]
    real = segments >= 0
    padding_is_last = (real == (np.arange(length) < real.sum(axis=1)[:, None])).all()
    single = bool(padding_is_last and (segments <= 0).all())
    bounds = (np.flatnonzero(np.diff(segments[0])) + 1).tolist()
    runs = segments[0, [0, *bounds]]  # the document of each run of equal ids
    is_interrupted = len(np.unique(runs[runs >= 0])) < (runs >= 0).sum()
    if is_interrupted or not (segments == segments[:1]).all():
        return single, None, True
    return single, (0, *bounds, length) if bounds else None, False


def row_documents(segments: Ints) -> tuple[tuple[int, ...] | None, ...]:
    """Return the offsets of each row's documents; see :attr:`ShardedMask.documents`."""
    length = segments.shape[1]
    # Padding takes the number of the token before it, or of the row's first token.
    last = np.maximum.accumulate(np.where(segments >= 0, np.arange(length), -1), axis=1)
    last = np.maximum(last, (segments >= 0).argmax(axis=1)[:, None])
    filled = np.take_along_axis(segments, last, axis=1)
    bounds = [(np.flatnonzero(np.diff(row)) + 1).tolist() for row in filled]
    documents = tuple((0, *x, length) if x else None for x in bounds)
    return documents[:1] if len({*documents}) == 1 else documents


def _check_same_batch(
    ranks: Ranks,
    entries: Mapping[str, Any],
    segments: Ints,
    dropout_seed: int | None,
    weight: float,
) -> None:
    """Check that all ranks have the same batch and the same weights, by one all-gather of 16 bytes.

    Each rank sends a hash of its batch, and a checksum of its weights. Different ones would
    otherwise give wrong results without an error. Of float tensors only the shapes are compared.

    Raises:
        RankMismatchError: Batches or weights differ.
    """
    if ranks.size == 1:
        return
    # Embeddings may differ in their last digits between ranks: of floats shapes are compared.
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted({**entries, "segments": torch.from_numpy(segments)}.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            if not value.is_floating_point():
                digest.update(np.ascontiguousarray(_array(value)).tobytes())
        elif not isinstance(value, Placeholder):
            digest.update(f"{name} {value!r} ".encode())
    digest.update(f"dropout_seed {dropout_seed}".encode())
    local = torch.frombuffer(
        bytearray(digest.digest() + np.float64(weight).tobytes()), dtype=torch.int64
    ).to(default_device(ranks))
    # Every rank receives the two numbers of all ranks, and compares them with its own.
    by_rank = [torch.empty_like(local) for _ in range(ranks.size)]
    collective(
        ranks, "shard_batch",
        lambda: dist.all_gather(by_rank, local, group=ranks.group, async_op=True),
    )  # fmt: skip
    own_digest, own_weight = local.tolist()
    digests, weights = zip(*(x.tolist() for x in by_rank), strict=True)
    if differing := [rank for rank, x in enumerate(digests) if x != own_digest]:
        raise RankMismatchError(
            f"shard_batch must be given the same whole batch on all ranks of the group, and rank "
            f"{ranks.rank}'s is not that of {', '.join(map(str, differing))}; let the ranks of a group "
            f"draw the same samples"
        )
    if differing := [rank for rank, x in enumerate(weights) if x != own_weight]:
        raise RankMismatchError(
            f"weights of rank {ranks.rank} are not those of {', '.join(map(str, differing))}: they were "
            f"not alike from the start, or gradients were not reduced over the ranks of the ring; "
            f"call ContextParallel.reduce_gradients before each step (reduction='sum'), or train in "
            f"DDP or fully_shard over them (reduction='mean')"
        )
