"""Padding may be anywhere, also between tokens: a parallelized model gives the same results."""

from __future__ import annotations

import inspect
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from hf_models import Wide
from sweep import compare
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.models.documents import stated_documents
from ring_torch.local import LocalRanks

LENGTH = 23
#: Models, and the types of those that tests/hf_models.py does not build.
MODELS = {
    "Llama": "",
    "Mistral": "",
    "Llama4": "",
    "BertForMaskedLM": "bert",
    "ModernBertForMaskedLM": "modernbert",
    "RobertaForMaskedLM": "roberta",  # positions are counted without padding
    "OPTForCausalLM": "opt",  # positions are counted in the mask
    "XGLMForCausalLM": "xglm",
    "GPTNeoForCausalLM": "gpt_neo",
    "MptForCausalLM": "mpt",  # ALiBi by position, padding included
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "Lfm2ForCausalLM": "lfm2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "FalconH1ForCausalLM": "falcon_h1",
    "NemotronHForCausalLM": "nemotron_h",
    "BartForConditionalGeneration": "bart",
    "T5ForConditionalGeneration": "t5",
    "M2M100ForConditionalGeneration": "m2m_100",
}
#: Indices of padding tokens.
PADDING = {
    "left": [*range(6)], "right": [*range(17, 23)], "both": [*range(4), *range(20, 23)],
    "hole": [9, 10, 11, 12], "two holes": [5, 12, 13, 14, 22], "every third": [*range(2, 23, 3)],
}  # fmt: skip


def build(name: str) -> Any:
    return compare.build(name, MODELS[name]) if MODELS[name] else hf_models.build(name)


def batch_of(
    padding: list[int], rows: str, *, shifted: bool, token: int | None
) -> dict[str, Tensor]:
    """Make two rows, with padding elsewhere in the second if they are ``unlike``.

    Labels of padding, and those predicted by padding, are ignored.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(4, 40, (2, LENGTH), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, padding] = 0
    if rows == "unlike":
        mask[1] = mask[0].roll(3)
    tokens = tokens.masked_fill(mask == 0, token or 0)
    labels = tokens.masked_fill(mask == 0, -100)
    if shifted:  # label i is predicted by token i - 1
        labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def both_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a batch of two sequences of different lengths out of one."""
    source = {name: batch[name].flip(1)[:, 3:] for name in ("input_ids", "attention_mask")}
    target = {f"decoder_{name}": batch[name] for name in ("input_ids", "attention_mask")}
    return source | target | {"labels": batch["labels"]}


def trained(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with Wide():
        out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach()


def _matches(rank: int, name: str, rows: str) -> None:
    del rank
    model = build(name)
    for side, padding in PADDING.items():
        batch = batch_of(
            padding,
            rows,
            shifted="CausalLM" in type(model).__name__,
            token=model.config.pad_token_id,
        )
        real = batch["attention_mask"] == 1
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            batch = both_of(batch)
        logits, loss = trained(model, batch)
        expected = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
        for layout in ("zigzag", "contiguous"):
            cp = ContextParallel(layout=layout)
            handle = hf.parallelize(model, cp, logits="gather")
            own_logits, own_loss = trained(model, batch)
            cp.reduce_gradients(model)
            handle.remove()
            message = f"{side} {layout}"
            torch.testing.assert_close(own_loss, loss, rtol=1e-12, atol=0, msg=message)
            torch.testing.assert_close(own_logits[real], logits[real], rtol=1e-9, atol=1e-10)
            largest = max(float(x.abs().max()) for x in expected.values())
            for weight, x in model.named_parameters():
                if weight in expected:
                    torch.testing.assert_close(
                        x.grad, expected[weight], rtol=1e-8, atol=1e-11 * largest
                    )


@pytest.mark.nightly(unless=[
    "Llama-equal", "Llama4-unlike", "ModernBertForMaskedLM-unlike", "RobertaForMaskedLM-unlike",
    "OPTForCausalLM-unlike", "RecurrentGemmaForCausalLM-unlike",
    "BartForConditionalGeneration-equal",
])  # fmt: skip
@pytest.mark.parametrize("rows", ["equal", "unlike"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_are_the_whole_models(
    pool: LocalRanks, name: str, rows: str
) -> None:
    pool.run(_matches, name, rows)


def _is_refused(rank: int) -> None:
    del rank
    model = compare.build("BloomForCausalLM", "bloom")
    hf.parallelize(model, ContextParallel())
    with pytest.raises(UnsupportedError, match=r"padding between tokens: .*ALiBi"):
        model(**batch_of(PADDING["hole"], "equal", shifted=True, token=0))


def test_alibi_that_counts_without_padding_is_refused(pool: LocalRanks) -> None:
    pool.run(_is_refused)


def test_a_document_that_is_numbered_goes_on_after_padding() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 2, 0, 0, 2, 3]])
    segments = stated_documents({"attention_mask": mask}, (1, 10))
    assert segments is not None
    assert np.array_equal(segments, [[-1, 1, 1, -1, 1, 2, -1, -1, 2, 3]])
