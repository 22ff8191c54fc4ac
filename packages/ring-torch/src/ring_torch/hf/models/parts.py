"""Splitting of the batches of encoder-decoders and of multimodal models.

An encoder-decoder's batch has two sequences, which are split each by its length.

A multimodal model replaces some tokens by features of images or sound. It is called with the whole
batch on every rank, so its towers (vision or audio encoders) see whole inputs. The merged
embeddings of the whole sequence are split where they enter its text model. On each rank, gradients
of a tower come from the embeddings that the rank holds, so their sum over the ranks counts each
embedding once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.models.batch import split_batch, tokens_of
from ring_torch.hf.models.check import ModelReport
from ring_torch.hf.models.code import by_name, parameters_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.models.placeholders import CrossMask, Placeholder, ShardedMask
from ring_torch.sharding import Sharding

#: Entries of an encoder-decoder's batch, mapped to the names of a single sequence's batch: of the
#: encoder's sequence, and of the decoder's.
_SOURCE = {name: name for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")}
_TARGET = {f"decoder_{name}": name for name in _SOURCE} | {
    name: name for name in ("labels", "num_items_in_batch")
}
_MODEL_FLAGS = ("return_dict", "output_hidden_states", "use_cache")

_ROPE_AXES = 3  # dimensions of multimodal RoPE positions, [n, B, T]
_WITH_TEXT_ROW = 4  # n, where the first row holds the plain text positions

#: Entries of a multimodal batch that are split as those of a text batch are.
_TEXT = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels",
    "num_items_in_batch", "use_cache", *STATED,
)  # fmt: skip
_LABELS = ("labels", "shift_labels", "num_items_in_batch")

#: Arguments of a text model that are ``[B, T, ...]``.
_ALONG = ("inputs_embeds", "input_ids", "visual_pos_masks")


def split_pair(
    sharding: Sharding,
    model: Any,
    batch: dict[str, Any],
    report: ModelReport,
    dropout_seed: int | None,
    weight: float,
) -> dict[str, Any]:
    """Return this rank's part of an encoder-decoder's batch: each sequence split by its own length.

    Args:
        sharding: Which rank holds which tokens.
        model: The model, without wrappers.
        batch: The whole batch.
        report: The model's report.
        dropout_seed: Seed of the decoder's attention dropout; the encoder's differs from it.
        weight: Checksum of the weights, which ranks compare.

    Raises:
        ValueError: There are neither decoder inputs nor labels to make them of, the model has no
            known function for that, or there is padding without a mask.
        UnsupportedError: The batch has entries that cannot be split.
    """
    batch = {name: x for name, x in batch.items() if x is not None}
    if not {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys():
        if "labels" not in batch:
            raise ValueError("give decoder_input_ids [B, T] or labels to an encoder-decoder")
        batch["decoder_input_ids"] = _decoder_input_ids(model, batch["labels"])
    report = replace(report, shifts_labels=False)
    supported = {*_SOURCE, *_TARGET, *_MODEL_FLAGS}
    if unsupported := sorted(batch.keys() - supported):
        raise UnsupportedError(
            f"an encoder-decoder's batch is split where it holds {', '.join(sorted(supported))} "
            f"alone, and this one has {', '.join(unsupported)}"
        )
    shards = []
    for names, seed in (
        # Encoder and decoder have layers of the same numbers: with one seed both would drop alike.
        (_SOURCE, None if dropout_seed is None else dropout_seed ^ 1),
        (_TARGET, dropout_seed),
    ):
        sequence = {inner: batch[name] for name, inner in names.items() if name in batch}
        _check_padding(model, sequence)
        shard = split_batch(sharding, sequence, report, seed, weight, with_ids=True)
        shards.append({name: shard[inner] for name, inner in names.items() if inner in shard})
    return {name: batch[name] for name in _MODEL_FLAGS if name in batch} | shards[0] | shards[1]


@untraced
def tell_keys(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Combine both masks before a decoder's forward, so that cross attention knows its keys.

    It is a forward pre-hook. Cross attention needs to know which sequence its queries belong to,
    and which its keys.

    Raises:
        UnsupportedError: The decoder is not given both masks.
    """
    arguments = by_name(module, args, kwargs)
    masks = [arguments.get(name) for name in ("attention_mask", "encoder_attention_mask")]
    queries, keys = masks
    if not isinstance(queries, ShardedMask) or not isinstance(keys, ShardedMask):
        raise UnsupportedError(
            f"{type(module).__name__} is given {' and '.join(type(x).__name__ for x in masks)} for "
            f"the masks of its batch's two sequences: cross attention would not know its keys"
        )
    return (), {**arguments, "encoder_attention_mask": CrossMask(queries, keys)}


def _decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    """Return the decoder's input ids that the model would make from labels, shifted by one.

    Raises:
        ValueError: The model has no known function that makes them.
    """
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        shifted: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
    elif shift is not None:
        shifted = shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
    else:
        raise ValueError(f"give decoder_input_ids [B, T] to {type(model).__name__}, beside labels")
    return shifted


def _check_padding(model: Any, batch: Mapping[str, Any]) -> None:
    """Refuse padding tokens without a mask, if the model would derive a mask from the token ids.

    Raises:
        ValueError: There are padding tokens, and no mask.
    """
    makes_mask = "make_default_2d_attention_mask" in vars(sys.modules[type(model).__module__])
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    is_told = not makes_mask or padding is None or "attention_mask" in batch
    if not is_told and "input_ids" in batch and bool((batch["input_ids"] == padding).any()):
        raise ValueError(
            f"tokens of padding and no mask: {type(model).__name__} would make one of them; give "
            f"attention_mask and decoder_attention_mask"
        )


def is_merged(batch: Mapping[str, Any]) -> bool:
    """Return True if a batch has images or sound, or multimodal positions ``[n, B, T]``.

    Any entry that no text batch has counts as images or sound.
    """
    names = {name for name, x in batch.items() if x is not None}
    positions = batch.get("position_ids")
    return bool(names - {*_TEXT, "return_dict", "output_hidden_states", "token_type_ids"}) or (
        isinstance(positions, Tensor) and positions.ndim == _ROPE_AXES
    )


def split_labels(
    sharding: Sharding,
    module: nn.Module,
    batch: Mapping[str, Any],
    report: ModelReport,
    dropout_seed: int | None,
    weight: float,
) -> tuple[dict[str, Any], ShardedMask]:
    """Return the whole batch with this rank's labels, and the mask that the text model is to get.

    Entries that state documents are left out of the batch: the mask has the documents.

    Args:
        sharding: Which rank holds which tokens.
        module: The model, without wrappers.
        batch: The whole batch.
        report: The model's report.
        dropout_seed: Seed of attention dropout, if there is any.
        weight: Checksum of the weights, which ranks compare.

    Raises:
        UnsupportedError: The model's forward has no argument of the name of an entry that text
            batches do not have, or ``attention_mask`` numbers documents.
    """
    batch = {name: x for name, x in batch.items() if x is not None}
    if unknown := sorted(batch.keys() - parameters_of(type(module)) - {*_TEXT}):
        raise UnsupportedError(
            f"{type(module).__name__} takes no {', '.join(unknown)}; leave it out"
        )
    text = {name: batch[name] for name in _TEXT if name in batch}
    positions = text.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == _ROPE_AXES:
        del text["position_ids"]
        if len(positions) == _WITH_TEXT_ROW:
            # Documents begin where these start again; the other rows are places in images.
            text["position_ids"] = positions[0]
    mask = text.get("attention_mask")
    if isinstance(mask, Tensor) and int(mask.max()) > 1:
        raise UnsupportedError(
            "an attention_mask that numbers documents is not supported beside images; give one of 0 and 1"
        )
    # Images are not split, but ranks compare them: every rank must see the same.
    other_entries = {name: x for name, x in batch.items() if name not in text}
    shard = split_batch(sharding, text, report, dropout_seed, weight, other_entries)
    # Towers and the merge of embeddings run on whole tokens; the text model's hook splits what
    # comes out.
    unsplit = {name: x for name, x in batch.items() if name not in (*_LABELS, *STATED)}
    return unsplit | {name: shard[name] for name in _LABELS if name in shard}, shard[
        "attention_mask"
    ]


def split_text(
    mask: ShardedMask, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Return a text model's arguments with this rank's part of embeddings and positions.

    After ``mask`` its arguments are those of a forward pre-hook. ``mask`` replaces
    ``attention_mask``, and its positions those that are ``[B, T]`` or not given.

    Raises:
        UnsupportedError: Its tokens are not the batch's, or an argument cannot be split.
    """
    arguments = by_name(module, args, kwargs)
    tokens = tokens_of(arguments)
    shape = (mask.shape[0], mask.length)
    if not isinstance(tokens, Tensor) or tuple(tokens.shape[:2]) != shape:
        raise UnsupportedError(
            f"{type(module).__name__} is given other tokens than the batch's [B, T] = {shape}"
        )
    split_arguments = {
        name: _split(mask, module, name, x, arguments.get("visual_pos_masks"))
        for name, x in arguments.items()
    }
    if split_arguments.get("position_ids") is None:
        # The text model would count a rank's tokens from 0.
        split_arguments["position_ids"] = mask.position_ids
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == _ROPE_AXES:
        # A fourth row, of places in the text, does not turn tokens.
        mask = replace(mask, last_position=positions[-_ROPE_AXES:].max())
    split_arguments["attention_mask"] = mask
    return (), split_arguments


def _split(mask: ShardedMask, module: nn.Module, name: str, x: Any, visual: Tensor | None) -> Any:
    """Return this rank's part of one argument of a text model.

    Args:
        mask: The batch.
        module: The text model.
        name: Name of the argument.
        x: Its value.
        visual: bool ``[B, T]``, True at tokens that hold image features.

    Raises:
        UnsupportedError: It is not known which dimension of it is the sequence.
    """
    if x is None or name in _LABELS or isinstance(x, bool | int | float | str | Placeholder):
        return x
    if name == "attention_mask" and isinstance(x, Tensor) and x.ndim == 2:
        return None  # replaced by the split batch's mask
    if name == "position_ids" and isinstance(x, Tensor):
        return mask.shard(x, dim=2) if x.ndim == _ROPE_AXES else mask.position_ids
    if name in _ALONG and isinstance(x, Tensor):
        return mask.shard(x)
    if name == "deepstack_visual_embeds" and visual is not None:
        return [_rows(mask, rows, visual) for rows in x]
    raise UnsupportedError(
        f"{type(module).__name__} is given {name}, and how it lies along the sequence is not "
        f"known; masks in which tokens of images see each other are not supported"
    )


def _rows(mask: ShardedMask, rows: Tensor, visual: Tensor) -> Tensor:
    """Return the rows of this rank's image tokens, given ``[n, dim]`` rows of all image tokens."""
    # Write the index of its row at each image token, split these indices, and look the rows up.
    numbers = torch.zeros(visual.shape, dtype=torch.int64, device=visual.device)
    numbers[visual] = torch.arange(len(rows), device=visual.device)
    return rows[mask.shard(numbers)[mask.shard(visual)].to(rows.device)]


def text_model(model: Any) -> nn.Module | None:
    """Return the text model within a multimodal model, or ``None`` if a model is for text alone."""
    if not getattr(model.config, "sub_configs", None) or not hasattr(model, "get_decoder"):
        return None
    decoder = model.get_decoder()
    is_part = isinstance(decoder, nn.Module) and decoder not in (model, model.base_model)
    return decoder if is_part and "inputs_embeds" in parameters_of(type(decoder)) else None


def take_logit_rows(
    model: nn.Module, batch: dict[str, Any], *, gathers_logits: bool
) -> slice | Tensor | None:
    """Remove ``logits_to_keep`` from a batch, and return the rows of logits that it names.

    It is ``None`` where it names none or all. The entry stays if the model's forward has no such
    argument.

    Raises:
        UnsupportedError: Logits are not joined, or there are labels, whose loss needs all logits.
    """
    if "logits_to_keep" not in parameters_of(type(model)):
        return None  # `split_batch` refuses it then
    logits_to_keep = batch.pop("logits_to_keep", None)
    if logits_to_keep is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        return None
    if not gathers_logits:
        raise UnsupportedError(
            f"logits_to_keep={logits_to_keep!r} asks for logits of the whole sequence, and each rank has a "
            f"part of them: give logits='gather' to hf.parallelize, or leave it out"
        )
    if batch.get("labels") is not None:
        raise UnsupportedError(
            "logits_to_keep beside labels: the loss is of all tokens; leave one of them out"
        )
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
