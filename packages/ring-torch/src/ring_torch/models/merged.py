"""Sequences that are split within a model: after images have taken their places among the tokens.

The model is called with whole batches, and its towers see all there is. What it hands to its text
model, embeddings of the whole sequence, is split there. A rank's gradients of a tower are those of
the embeddings that it holds, so that their sum over ranks counts each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ring_core import UnsupportedError
from ring_torch.models.batch import shard_batch, tokens_of
from ring_torch.models.check import ModelReport, takes_embeddings
from ring_torch.models.code import by_name, parameters_of
from ring_torch.models.documents import STATED
from ring_torch.models.labels import Sealed
from ring_torch.models.parts import Part
from ring_torch.sharding import Sharding

_ROWS = 3  # dimensions of positions in several directions, [n, B, T]
_WITH_TEXT_ROW = 4

#: What is split as text is, of the batch.
_TEXT = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels",
    "num_items_in_batch", "use_cache", *STATED,
)  # fmt: skip
_LABELS = ("labels", "shift_labels", "num_items_in_batch")

#: What a text model is given ``[B, T, ...]``.
_ALONG = ("inputs_embeds", "input_ids", "visual_pos_masks")


def is_merged(given: Mapping[str, Any]) -> bool:
    """Whether a batch holds more than text: images, sound, positions in several directions."""
    names = {name for name, x in given.items() if x is not None}
    positions = given.get("position_ids")
    return bool(names - {*_TEXT, "return_dict", "output_hidden_states", "token_type_ids"}) or (
        isinstance(positions, Tensor) and positions.ndim == _ROWS
    )


@dataclass(frozen=True)
class Merged:
    """The sequence of a model whose text model is given embeddings."""

    part: Part

    def split_labels(
        self,
        sharding: Sharding,
        module: nn.Module,
        given: Mapping[str, Any],
        report: ModelReport,
        dropout_seed: int | None,
        weight: float,
    ) -> dict[str, Any]:
        """The whole batch, with this rank's labels; the text model's part is kept for it.

        Raises:
            UnsupportedError: The model's forward has no such argument, or a mask numbers documents.
        """
        given = {name: x for name, x in given.items() if x is not None}
        if more := sorted(given.keys() - parameters_of(type(module)) - {*_TEXT}):
            raise UnsupportedError(f"{type(module).__name__} takes no {', '.join(more)}")
        text = {name: given[name] for name in _TEXT if name in given}
        positions = text.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim == _ROWS:
            del text["position_ids"]
            if len(positions) == _WITH_TEXT_ROW:
                text["position_ids"] = positions[0]
        mask = text.get("attention_mask")
        if isinstance(mask, Tensor) and int(mask.max()) > 1:
            raise UnsupportedError("attention_mask that numbers documents, beside images")
        others = {name: x for name, x in given.items() if name not in text}
        shard = shard_batch(sharding, text, report, dropout_seed, weight, others)
        self.part.take(shard, given)
        self.part.is_whole = True
        kept = {name: x for name, x in given.items() if name not in (*_LABELS, *STATED)}
        return kept | {name: shard[name] for name in _LABELS if name in shard}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def split(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the text model: this rank's part of embeddings and positions.

        Raises:
            UnsupportedError: It is given what cannot be split.
        """
        part = self.part
        if not part.is_whole:
            return args, kwargs
        part.is_whole = False
        given = by_name(module, args, kwargs)
        tokens = tokens_of(given)
        shape = (part.mask.shape[0], part.length)
        if not isinstance(tokens, Tensor) or tuple(tokens.shape[:2]) != shape:
            raise UnsupportedError(
                f"{type(module).__name__} is given other tokens than the batch's [B, T] = {shape}"
            )
        whole_mask = given.get("visual_pos_masks")
        out = {name: self._split(module, name, x, whole_mask) for name, x in given.items()}
        if out.get("position_ids") is None:
            out["position_ids"] = part.position_ids
        out["attention_mask"] = part.mask
        return (), out

    def _split(self, module: nn.Module, name: str, x: Any, visual: Tensor | None) -> Any:
        """This rank's part of one argument."""
        if x is None or name in _LABELS or isinstance(x, bool | int | float | str | Sealed):
            return x
        if name == "attention_mask" and isinstance(x, Tensor) and x.ndim == 2:
            return None  # the part's own
        if name == "position_ids" and isinstance(x, Tensor):
            return self._along(x, 2) if x.ndim == _ROWS else self.part.position_ids
        if name in _ALONG and isinstance(x, Tensor):
            return self._along(x, 1)
        if name == "deepstack_visual_embeds" and visual is not None:
            return [self._rows(rows, visual) for rows in x]
        raise UnsupportedError(
            f"{type(module).__name__} is given {name}, and how it lies along the sequence is not "
            f"known; masks in which tokens of images see each other are not supported"
        )

    def _along(self, x: Tensor, dim: int) -> Tensor:
        mask = self.part.mask
        padded = pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, mask.seq_len - x.shape[dim]))
        return mask.sharding.shard(padded, dim=dim)

    def _rows(self, rows: Tensor, visual: Tensor) -> Tensor:
        """Of rows ``[n, dim]``, one of each token of an image, those of this rank's tokens."""
        numbers = torch.zeros(visual.shape, dtype=torch.int64, device=visual.device)
        numbers[visual] = torch.arange(len(rows), device=visual.device)
        return rows[self._along(numbers, 1)[self._along(visual, 1)].to(rows.device)]


def text_model(model: Any) -> nn.Module | None:
    """The part that is given embeddings, of a model of more than text."""
    if not getattr(model.config, "sub_configs", None) or not hasattr(model, "get_decoder"):
        return None
    decoder = model.get_decoder()
    is_part = isinstance(decoder, nn.Module) and decoder not in (model, model.base_model)
    return decoder if is_part and takes_embeddings(decoder) else None
