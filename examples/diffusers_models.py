"""Run diffusers' video and image transformers on a ring, and compare them with one process.

:func:`ring_torch.replace_sdpa` runs their attention; their ``native`` backend is torch's SDPA.
Every rank gets the whole latents, because the models count positions of patches in them. Hooks
split the inputs of the blocks: tokens, rotary angles and masks. The models are tiny, with random
weights; a loaded model is split in the same way::

    pip install diffusers
    python examples/diffusers_models.py --strategy ulysses

The exit code is 0, or 1 if outputs or gradients differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

from ring_torch import ContextParallel, replace_sdpa
from ring_torch.local import LocalRanks

Batch = dict[str, Any]
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12}


def wan() -> nn.Module:
    """Return a tiny Wan: video tokens attend to themselves, and to the whole prompt."""
    torch.manual_seed(0)
    model: nn.Module = WanTransformer3DModel(
        in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, **HEADS
    )
    return model


def hunyuan_video() -> nn.Module:
    """Return a tiny HunyuanVideo: joint attention of video and padded text tokens."""
    torch.manual_seed(0)
    model: nn.Module = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, num_refiner_layers=1,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 4), **HEADS,
    )  # fmt: skip
    return model


def flux() -> nn.Module:
    """Return a tiny Flux: joint attention of image and text, at positions it is given."""
    torch.manual_seed(0)
    model: nn.Module = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=16,
        pooled_projection_dim=8, axes_dims_rope=(4, 4, 4), **HEADS,
    )  # fmt: skip
    return model


def split_wan(model: Any, cp: ContextParallel, strategy: str) -> None:
    """Split a Wan's tokens over ranks, from its first block to its last projection."""
    handle = replace_sdpa(model, cp, whole_keys=("blocks.*.attn2",), strategy=strategy)

    def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        handle.documents = (0, args[0].shape[1])  # one document; padding follows it
        return cp.shard(args[0], pad=True), *args[1:]

    model.rope.register_forward_hook(_sharding(cp, 1))  # angles [1, T, 1, D]
    model.blocks[0].register_forward_pre_hook(split)
    model.proj_out.register_forward_hook(_joining(cp, lambda: (handle.documents or (0,))[-1]))


def split_hunyuan_video(model: Any, cp: ContextParallel, strategy: str) -> None:
    """Split a HunyuanVideo's tokens over ranks, from its first block to its last projection.

    Every rank refines the whole text first, and then keeps its shard of it.
    """
    replace_sdpa(model, cp, local=("context_embedder",), strategy=strategy)
    lengths = [0, 0]  # of video and text

    def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        lengths[:] = (x.shape[1] for x in args[:2])
        return *(cp.shard(x, pad=True) for x in args[:2]), *args[2:]

    def split_mask(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = args[3].split(lengths, dim=-1)  # padded with False, which hides
        mask = torch.cat([cp.shard(x, dim=3, pad=True) for x in parts], dim=3)
        return *args[:3], mask, *args[4:]

    model.rope.register_forward_hook(_sharding(cp, 0))  # angles [T, D]
    model.transformer_blocks[0].register_forward_pre_hook(split)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.register_forward_pre_hook(split_mask)
    model.proj_out.register_forward_hook(_joining(cp, lambda: lengths[0]))


def split_flux(model: Any, cp: ContextParallel, strategy: str) -> None:
    """Split a Flux's inputs over ranks, position ids included, and join its output."""
    replace_sdpa(model, cp, strategy=strategy)
    dims = {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}
    length = 0  # of the image

    def split(_: nn.Module, args: tuple[()], kwargs: Batch) -> tuple[tuple[()], Batch]:
        nonlocal length
        length = kwargs["hidden_states"].shape[1]
        shards = {name: cp.shard(kwargs[name], dim=dim, pad=True) for name, dim in dims.items()}
        # Its attention has text before the image. Padding is hidden from all queries.
        are_keys = [
            cp.shard(torch.ones(1, 1, 1, kwargs[name].shape[1], dtype=torch.bool), dim=3, pad=True)
            for name in ("encoder_hidden_states", "hidden_states")
        ]
        options = {"attention_mask": torch.cat(are_keys, dim=3).to(kwargs["hidden_states"].device)}
        return args, kwargs | shards | {"joint_attention_kwargs": options}

    model.register_forward_pre_hook(split, with_kwargs=True)
    model.proj_out.register_forward_hook(_joining(cp, lambda: length))


def _sharding(cp: ContextParallel, dim: int) -> Callable[..., Any]:
    """Return a hook that keeps this rank's shard of the angles that a module returns."""
    return lambda _module, _args, angles: tuple(cp.shard(x, dim=dim, pad=True) for x in angles)


def _joining(cp: ContextParallel, length: Callable[[], int]) -> Callable[..., Tensor]:
    """Return a hook that joins the tokens of all ranks, so that every rank computes the whole loss.

    No parameter follows, so each rank takes its slice of the gradient: ``grad="slice"``. Padding
    after the ``length()`` tokens is dropped.
    """
    return lambda _module, _args, x: cp.unshard(x, grad="slice", seq_len=length())


def batch_of(name: str) -> Batch:
    """Return a batch; two ranks do not divide its lengths of text, video and image."""
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    text = {"encoder_hidden_states": random(2, 13, 16), "return_dict": False}
    video = {"hidden_states": random(2, 4, 3, 6, 10), "timestep": torch.tensor([500, 20])}
    pooled = {"pooled_projections": random(2, 8)}
    if name == "wan":
        return text | video
    if name == "hunyuan_video":
        is_text = (torch.arange(13) < torch.tensor([[5], [13]])).long()
        guidance = torch.full((2,), 1000.0)
        return text | video | pooled | {"encoder_attention_mask": is_text, "guidance": guidance}
    ids = {"img_ids": random(21, 3).round(), "txt_ids": torch.zeros(13, 3)}
    return text | pooled | ids | {"hidden_states": random(2, 21, 4), "timestep": torch.rand(2)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "wan": (wan, split_wan),
    "hunyuan_video": (hunyuan_video, split_hunyuan_video),
    "flux": (flux, split_flux),
}


def compare(_: int, name: str, strategy: str, layout: Any) -> tuple[float, float]:
    """Return the largest differences from one process: output, and gradients (relative)."""
    make, split = MODELS[name]
    cp, batch = ContextParallel(layout=layout), batch_of(name)
    whole, model = make(), make()
    split(model, cp, strategy)
    with torch.inference_mode():
        error = (model(**batch)[0] - whole(**batch)[0]).abs().max().item()
    for each in (model, whole):
        each(**batch)[0].square().mean().backward()
    cp.reduce_gradients(model)
    gradients = [
        (a.grad - b.grad).norm().item() / (1e-6 + b.grad.norm().item())
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ]
    return error, max(gradients)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare each model on a ring with one process; returns the exit code."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="what travels between ranks")
    options = parser.parse_args(argv)
    worst = 0.0
    with LocalRanks(2) as ranks:
        for name in MODELS:
            output, gradients = ranks.run(compare, name, options.strategy, "zigzag")[0]
            print(f"{name:14} output differs by {output:.1e}, gradients by {gradients:.1e}")
            worst = max(worst, output, gradients)
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
