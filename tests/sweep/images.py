"""Makes batches of text and images for small models that turn images into tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_BEFORE = (3, 5)  # tokens before the image, in each of the two rows


def image_batch(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the batch with an image in each row, or None if the kind of images is unknown."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    vision = getattr(config, "vision_config", None)
    token = getattr(config, "image_token_id", None)
    token = getattr(config, "image_token_index", None) if token is None else token
    if vision is None or not isinstance(token, int) or "pixel_values" not in takes:
        return None
    generator = torch.Generator().manual_seed(11)
    images = (_patches if "image_grid_thw" in takes else _squares)(vision, generator)
    if images is None:
        return None
    kind = config.model_type
    if kind.startswith(("mistral3", "lighton")):
        images["image_sizes"] = torch.tensor([images["pixel_values"].shape[-2:]] * 2)
    if kind.startswith(("idefics", "smolvlm")):
        images["pixel_values"] = images["pixel_values"][:, None]
    images = {name: x for name, x in images.items() if name in takes}
    count = _tokens_of_image(model, images, len(batch["input_ids"]))
    tokens = batch["input_ids"].clone()
    if not 0 < count <= tokens.shape[1] - max(_BEFORE):
        return None
    for row, start in enumerate(_BEFORE):
        tokens[row, start : start + count] = token
    is_image = (tokens == token).long()
    if "mm_token_type_ids" in takes:
        images["mm_token_type_ids"] = is_image
    return {**batch, **images, "input_ids": tokens}


def _patches(vision: Any, generator: torch.Generator) -> dict[str, Tensor] | None:
    """Return patches of two images, as Qwen's processors make them."""
    size = getattr(vision, "patch_size", None)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    if not isinstance(size, int):
        return None
    merge = getattr(vision, "spatial_merge_size", 1)
    side = 2 * merge
    width = channels * getattr(vision, "temporal_patch_size", 1) * size**2
    return {
        "pixel_values": torch.randn(2 * side**2, width, generator=generator).double(),
        "image_grid_thw": torch.tensor([[1, side, side]] * 2),
    }


def _squares(vision: Any, generator: torch.Generator) -> dict[str, Tensor] | None:
    """Return two square images."""
    size = getattr(vision, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    channels = getattr(vision, "num_channels", 3)
    if not isinstance(size, int):
        return None
    return {"pixel_values": torch.randn(2, channels, size, size, generator=generator).double()}


def _tokens_of_image(model: Any, images: dict[str, Tensor], rows: int) -> int:
    """Return the number of tokens per image."""
    with torch.no_grad():
        features = model.get_image_features(**images)
    for name in ("pooler_output", "last_hidden_state"):
        if not isinstance(features, Tensor | list | tuple):
            features = getattr(features, name) if getattr(features, name) is not None else features
    if isinstance(features, list | tuple):
        features = torch.cat([x.flatten(0, -2) for x in features])
    assert isinstance(features, Tensor)
    return features.shape[:-1].numel() // rows
