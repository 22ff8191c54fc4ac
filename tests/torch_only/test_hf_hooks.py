"""Models that need hooks: their own attention code, two sequences, images, recurrent layers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_models import LENGTH, SIZES, Wide, whole
from sweep.compare import batch_of, build
from sweep.images import image_batch
from torch import Tensor, nn

from ring_core import ChunkLayout, LayoutSpec, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks
from ring_torch.recurrent import convolution

#: One model for each kind of hook; True if it tells packed documents by their positions on one
#: process, too.
DECODERS = {
    "FalconForCausalLM": ("falcon", False),  # its own attention code
    "GPTNeoForCausalLM": ("gpt_neo", True),  # its own attention code, with windows and masks
    "BloomForCausalLM": ("bloom", False),  # its own attention code, with ALiBi slopes
    "XGLMForCausalLM": ("xglm", False),
    "BartForCausalLM": ("bart", False),  # positions computed from the length
    "Llama4ForCausalLM": ("llama4", True),  # chunked attention
    "Qwen3NextForCausalLM": ("qwen3_next", False),  # recurrent layers
}
PAIRS = {
    "BartForConditionalGeneration": "bart",
    "T5ForConditionalGeneration": "t5",
    "M2M100ForConditionalGeneration": "m2m_100",
}
IMAGES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",  # three-dimensional positions
    "Qwen3VLForConditionalGeneration": "qwen3_vl",  # with deepstack
    "LlavaForConditionalGeneration": "llava",
}
LIMITS = {torch.float64: 1e-7, torch.float32: 1e-4}


def result(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the loss and all gradients."""
    model.zero_grad()
    with Wide() if model.dtype == torch.float64 else nullcontext():
        loss = model(**batch).loss
    loss.backward()
    grads = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **grads}


def mean_over_ranks(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average gradients over the ranks, as DDP does; the loss is already that of the batch."""
    for name in grads.keys() - {"loss"}:
        dist.all_reduce(grads[name])
        grads[name] /= dist.get_world_size()
    return grads


def compare(model: Any, batch: dict[str, Any], what: str, **options: Any) -> None:
    """Compare a model with one process: two calls on the ring, and one with hooks removed."""
    more = {"use_cache": False}
    expected = result(model, batch | more)
    keys = list(model.state_dict())
    handle = hf.parallelize(model, ContextParallel(**options), reduction="mean")
    assert list(model.state_dict()) == keys
    calls = [mean_over_ranks(result(model, batch)) for _ in range(2)]
    handle.remove()
    for actual in (*calls, result(model, batch | more)):
        for name, x in expected.items():
            local, limit = actual.get(name, torch.zeros_like(x)), LIMITS[x.dtype]
            message = f"{name} {what}: off by {float((local - x).abs().max())}"
            atol = limit * float(x.abs().max()) + limit**2
            torch.testing.assert_close(local, x, rtol=limit, atol=atol, msg=message)


def checkpoint(model: Any) -> None:
    """Train with gradient checkpointing, without dropout, in float32.

    Recomputed layers do not run under ``Wide``, so the model is float32 throughout.
    """
    model.float().train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    model.gradient_checkpointing_enable()


def _decoder(_: int, name: str, kind: str, is_checkpointed: bool) -> None:
    model = build(name, DECODERS[name][0])
    if is_checkpointed:
        checkpoint(model)
    layout = "striped" if kind == "right" else "zigzag"
    compare(model, whole(kind), f"of {name}, {kind}", layout=layout)


@pytest.mark.refused_in("5.14", "XGLM", "Bloom")
@pytest.mark.nightly(unless=[
    "FalconForCausalLM-plain-", "XGLMForCausalLM-left-checkpointed",
    "BartForCausalLM-right-checkpointed", "BartForCausalLM-left-",
    "Llama4ForCausalLM-plain-checkpointed", "Llama4ForCausalLM-right-",
    "Qwen3NextForCausalLM-plain-",
])  # fmt: skip
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, (_, tells_documents) in DECODERS.items()
        for kind in ("plain", "right", "left", *(("packed",) if tells_documents else ()))
    ],
)
def test_a_decoder(pool: LocalRanks, name: str, kind: str, is_checkpointed: bool) -> None:
    pool.run(_decoder, name, kind, is_checkpointed)


def pair_batch(kind: str) -> dict[str, Tensor]:
    """Return a batch with an encoder's and a decoder's sequence of different lengths."""
    batch = whole("plain")
    tokens = batch["input_ids"].clamp(min=4)
    source = tokens[:, : LENGTH - 12]
    out = {"input_ids": source, "labels": batch["labels"].where(batch["labels"] < 0, tokens)}
    if kind == "padded":
        real = (torch.arange(source.shape[1]) < torch.tensor([[9], [source.shape[1]]])).long()
        out["attention_mask"] = real
    return out


def _pair(_: int, name: str, kind: str, is_checkpointed: bool) -> None:
    model = build(name, PAIRS[name])
    if is_checkpointed:
        checkpoint(model)
    compare(model, pair_batch(kind), f"of {name}, {kind}")


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration")
@pytest.mark.nightly(unless=[
    "BartForConditionalGeneration-plain-", "M2M100ForConditionalGeneration-padded-checkpointed",
])  # fmt: skip
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_and_a_decoder(
    pool: LocalRanks, name: str, kind: str, is_checkpointed: bool
) -> None:
    pool.run(_pair, name, kind, is_checkpointed)


def _images(_: int, name: str, kind: str) -> None:
    model = build(name, IMAGES[name])
    with Wide():
        batch = image_batch(model, batch_of(model))
    assert batch is not None
    tokens = batch["input_ids"]
    batch["labels"] = tokens.where(tokens < 48, -100)
    if kind == "left":
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][0, :2] = 0
        batch["labels"][0, :3] = -100
    if kind == "packed":  # text positions of two documents, in three dimensions
        positions = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1)
        directions = torch.stack([positions, positions // 2, positions % 3])
        batch["position_ids"] = torch.cat([positions[None], directions])
    compare(model, batch, f"of {name}, {kind}")
    moved = [
        n for n, x in model.named_parameters() if "vis" in n and x.grad is not None and x.grad.any()
    ]
    assert moved, "images reach no weight"


@pytest.mark.refused_in("5.14", "Qwen3VL")
@pytest.mark.nightly(unless=[
    "Qwen2_5_VLForConditionalGeneration-plain", "Qwen3VLForConditionalGeneration-left",
    "LlavaForConditionalGeneration-plain", "Qwen2_5_VLForConditionalGeneration-packed",
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in IMAGES for kind in ("plain", "left")),
        ("Qwen2_5_VLForConditionalGeneration", "packed"),
        ("Qwen3VLForConditionalGeneration", "packed"),
    ],
)
def test_images_among_tokens(pool: LocalRanks, name: str, kind: str) -> None:
    pool.run(_images, name, kind)


def _dropout(rank: int, name: str, kind: str, rates: dict[str, Any]) -> None:
    model = build(name, kind, **rates)
    for part in model.modules():  # dropout in attention only
        if isinstance(part, torch.nn.Dropout) and "attn_pdrop" not in rates:
            part.p = 0.0
    model.train()
    batch = pair_batch("plain") if name in PAIRS else whole("plain")
    alone: Any = [dist.new_group([r]) for r in range(2)][rank]
    outputs = []
    for group in (alone, None):
        handle = hf.parallelize(model, ContextParallel(group), reduction="mean")
        torch.manual_seed(3)
        outputs.append(mean_over_ranks(result(model, batch)))
        handle.remove()
    for weight, x in outputs[0].items():
        torch.testing.assert_close(outputs[1][weight], x, rtol=1e-7, atol=1e-9)
    assert float(outputs[0]["loss"]) != float(result(model.eval(), batch)["loss"])


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration")
@pytest.mark.parametrize(
    ("name", "kind", "rates"),
    [
        ("GPTJForCausalLM", "gptj", {"attn_pdrop": 0.3, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("T5ForConditionalGeneration", "t5", {"dropout_rate": 0.3}),
    ],
)
def test_dropout_of_attention(
    pool: LocalRanks, name: str, kind: str, rates: dict[str, Any]
) -> None:
    pool.run(_dropout, name, kind, rates)


def _copied(_: int, name: str, kind: str) -> None:
    model = build(name, kind)
    batch = pair_batch("padded") if name in PAIRS else whole("right")
    expected = result(model, batch)
    hf.parallelize(model, ContextParallel(), reduction="mean")
    result(model, pair_batch("plain") if name in PAIRS else whole("plain"))
    actual = mean_over_ranks(result(copy.deepcopy(model), batch))
    for weight, x in expected.items():
        atol = 1e-8 * float(x.abs().max()) + 1e-12
        torch.testing.assert_close(actual[weight], x, rtol=1e-7, atol=atol)


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration", "Bloom")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("T5ForConditionalGeneration", "t5"), ("BloomForCausalLM", "bloom"), ("Qwen3NextForCausalLM", "qwen3_next")],
)  # fmt: skip
def test_a_copy_of_a_model(pool: LocalRanks, name: str, kind: str) -> None:
    pool.run(_copied, name, kind)


def _compiled(_: int, name: str, kind: str) -> None:
    model = build(name, kind)
    expected = result(model, whole("right"))
    hf.parallelize(model, ContextParallel(), reduction="mean")
    compiled = torch.compile(model, backend="eager")
    for _time in range(2):
        actual = mean_over_ranks(result(compiled, whole("right")))
        for key, x in expected.items():
            local = actual["loss"] if key == "loss" else actual[f"_orig_mod.{key}"]
            torch.testing.assert_close(local, x, rtol=1e-7, atol=1e-8 * float(x.abs().max()))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind"), [("LlamaForCausalLM", "llama"), ("GPTJForCausalLM", "gptj")]
)
def test_a_compiled_model(pool: LocalRanks, name: str, kind: str) -> None:
    pool.run(_compiled, name, kind)


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration")
@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_batches_cannot_be_split_by_hand(name: str) -> None:
    kind = PAIRS[name] if name in PAIRS else DECODERS[name][0]
    model = build(name, kind)
    assert hf.check_model(model).exact
    assert hf.check_model(model).hooks
    with pytest.raises(UnsupportedError, match=r"needs hooks .*hf\.parallelize"):
        hf.shard_batch(ContextParallel(), whole("plain"), model=model)


TOKENS = torch.full((1, 8), 5)


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration")
@pytest.mark.parametrize(
    ("name", "kind", "batch", "message"),
    [
        ("T5ForConditionalGeneration", "t5", {}, "decoder_input_ids .* or labels"),
        ("T5ForConditionalGeneration", "t5", {"labels": TOKENS, "encoder_outputs": (TOKENS,)}, "encoder_outputs"),
        ("T5GemmaForConditionalGeneration", "t5gemma", {"labels": TOKENS - 105}, "give attention_mask"),
        ("BloomForCausalLM", "bloom", {"position_ids": TOKENS.cumsum(1)}, "takes none"),
        ("LlavaForConditionalGeneration", "llava", {"sound": TOKENS}, "takes no sound"),
    ],
)  # fmt: skip
def test_what_is_refused(name: str, kind: str, batch: dict[str, Any], message: str) -> None:
    model = build(name, kind)
    hf.parallelize(model, ContextParallel())
    with pytest.raises(ValueError, match=message):
        model(input_ids=TOKENS, **batch)


@pytest.mark.refused_in("5.14", "EncoderDecoderModel")
@pytest.mark.parametrize(
    ("name", "kind", "changes", "message"),
    [
        ("FalconForCausalLM", "falcon", {"alibi": True}, "alibi"),
        ("BigBirdPegasusForCausalLM", "bigbird_pegasus", {"attention_type": "block_sparse"}, "sparse"),
        ("LongT5ForConditionalGeneration", "longt5", {}, "LongT5LocalAttention"),
        ("SwitchTransformersForConditionalGeneration", "switch_transformers", {}, "as many tokens as fit"),
        ("EncoderDecoderModel", "encoder-decoder", {}, "takes no position_ids"),
    ],
)  # fmt: skip
def test_which_models_are_refused(
    name: str, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hf.parallelize(build(name, kind, **changes), ContextParallel())


def test_scores_that_are_read_are_refused() -> None:
    model = build("GPTNeoForCausalLM", "gpt_neo")
    hf.parallelize(model, ContextParallel())
    attention = model.transformer.h[0].attn.attention
    attention.attn_dropout = torch.nn.GELU()  # an unknown operation on the attention weights
    with pytest.raises(UnsupportedError, match="does more with its scores"):
        model(input_ids=TOKENS)
    attention.attn_dropout = torch.nn.Identity()
    assert model(input_ids=TOKENS).logits.shape[:2] == TOKENS.shape


def test_scores_that_are_scaled_by_what_is_learned_are_refused() -> None:
    """A learned score scale is refused: a ring takes a number, and would lose the gradient."""
    model = build("BloomForCausalLM", "bloom")
    hf.parallelize(model, ContextParallel())
    attention = model.transformer.h[0].self_attention
    attention.inv_norm_factor = torch.tensor(0.25, requires_grad=True)
    with pytest.raises(UnsupportedError, match="does more with its scores"):
        model(input_ids=TOKENS)


LAYOUTS: dict[str, LayoutSpec] = {
    "zigzag": "zigzag", "contiguous": "contiguous", "striped": "striped",
    "chunks": ChunkLayout(((0, 3, 5), (1, 2, 4))),
}  # fmt: skip
CONV_KERNELS = (3, 6)  # 6 reaches across a whole chunk


def convolutional(kernel: int) -> Any:
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


def padded_batch(length: int, padding: slice) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, padding] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


#: No padding, padding on the left, on the right and within; and a sequence of 3 tokens on 2 ranks.
PADDED = {
    "none": padded_batch(22, slice(0)), "left": padded_batch(19, slice(0, 5)),
    "right": padded_batch(23, slice(11, 23)), "holes": padded_batch(24, slice(7, 12)),
    "short": padded_batch(3, slice(0)),
}  # fmt: skip


def _conv_matches(_: int, layout: str, kernel: int) -> None:
    model, cp = convolutional(kernel), ContextParallel(layout=LAYOUTS[layout])
    for name, batch in PADDED.items():
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
        for ring, alone in zip(*reversed(results), strict=True):
            torch.testing.assert_close(ring, alone, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.nightly(unless=["zigzag-6", "striped-3", "chunks-6"])
@pytest.mark.parametrize("kernel", CONV_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_have_the_loss_and_gradients_of_one_process(
    layout: str, kernel: int, pool: LocalRanks
) -> None:
    pool.run(_conv_matches, layout, kernel)


def _rows_given(_: int, layout: str) -> list[tuple[int, ...]]:
    """Return the shapes that the convolutions receive."""
    model, shapes, right = convolutional(3), [], convolution._convolve
    hf.parallelize(model, ContextParallel(layout=LAYOUTS[layout]))

    def convolve(x: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x.shape[:2]))
        return right(x, *args)

    with patch.object(convolution, "_convolve", convolve):
        model(**padded_batch(24, slice(0)))
    return sorted({*shapes})


@pytest.mark.refused_in("5.14")
@pytest.mark.parametrize(("layout", "rows"), [("zigzag", (4, 8)), ("striped", (2, 14))])
def test_a_convolution_is_given_a_ranks_runs_alone(
    layout: str, rows: tuple[int, int], pool: LocalRanks
) -> None:
    assert pool.run(_rows_given, layout) == [[rows], [rows]]
