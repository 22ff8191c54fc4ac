"""Causal convolutions of transformers' models receive neighbouring tokens, not whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hf_models import SIZES, Wide
from torch import Tensor, nn

from ring_core import ChunkLayout, LayoutSpec, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

LAYOUTS: dict[str, LayoutSpec] = {
    "zigzag": "zigzag", "contiguous": "contiguous", "striped": "striped",
    "chunks": ChunkLayout(((0, 3, 5), (1, 2, 4))),
}  # fmt: skip
KERNELS = (3, 6)  # 6 reaches across a whole chunk


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout=30) as ranks:
        yield ranks


def model_of(kernel: int) -> Any:
    """Build a model of a convolution, attention and a convolution, with biases.

    With biases the output for padding is not zero.
    """
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**{
        **SIZES, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True, "conv_L_cache": kernel, "block_auto_adjust_ff_dim": False,
        "use_cache": False,
    })  # fmt: skip
    model = transformers.Lfm2ForCausalLM(config).double().train()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    return model


def batch_of(length: int, padding: slice) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, padding] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


#: No padding, padding on the left, on the right and within; and a sequence of 3 tokens on 2 ranks.
BATCHES = {
    "none": batch_of(22, slice(0)), "left": batch_of(19, slice(0, 5)),
    "right": batch_of(23, slice(11, 23)), "holes": batch_of(24, slice(7, 12)),
    "short": batch_of(3, slice(0)),
}  # fmt: skip


def _matches(_: int, layout: str, kernel: int) -> None:
    model, cp = model_of(kernel), ContextParallel(layout=LAYOUTS[layout])
    for name, batch in BATCHES.items():
        results = []
        for is_split in (False, True):
            handle = hf.parallelize(model, cp) if is_split else None
            model.zero_grad()
            with Wide():
                loss = model(**batch).loss
                loss.backward()
            if handle is not None:
                cp.reduce_gradients(model)
                handle.remove()
            results.append([loss.detach(), *(x.grad.clone() for x in model.parameters())])
        for ring, whole in zip(*reversed(results), strict=True):
            torch.testing.assert_close(ring, whole, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.nightly(unless=["zigzag-6", "striped-3", "chunks-6"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_has_the_loss_and_gradients_of_one_process(
    layout: str, kernel: int, two: LocalRanks
) -> None:
    two.run(_matches, layout, kernel)


def _rows_given(_: int, layout: str) -> list[tuple[int, ...]]:
    """Return the shapes that the convolutions receive."""
    model, shapes, right = model_of(3), [], nn.functional.conv1d
    hf.parallelize(model, ContextParallel(layout=LAYOUTS[layout]))

    def conv1d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return right(x, *args, **kwargs)

    with patch.object(nn.functional, "conv1d", conv1d):
        model(**batch_of(24, slice(0)))
    return sorted({(x[0], x[-1]) for x in shapes})


@pytest.mark.parametrize(("layout", "rows"), [("zigzag", (4, 8)), ("striped", (2, 14))])
def test_a_convolution_is_given_a_ranks_runs_alone(
    layout: str, rows: tuple[int, int], two: LocalRanks
) -> None:
    assert two.run(_rows_given, layout) == [[rows], [rows]]


def test_a_convolution_that_returns_other_rows_is_refused() -> None:
    model = model_of(3)
    hf.parallelize(model, ContextParallel())
    layer = model.get_submodule("model.layers.0.conv")
    layer.register_forward_hook(lambda _module, _args, output: output[:, 1:], prepend=True)
    with pytest.raises(UnsupportedError, match="Lfm2ShortConv must return"):
        model(**batch_of(12, slice(0)))
