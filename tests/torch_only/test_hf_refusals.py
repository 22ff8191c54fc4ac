"""The contents of a batch after ``shard_batch``, and batches and calls that are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hf_models import LENGTH, build, whole
from torch.nn.functional import pad
from transformers import masking_utils

from ring_core import ChunkLayout, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.masks import ring_mask

ANY = torch.nn.Identity()  # for batches of no particular model
EVEN = ChunkLayout(((0, 1),))  # a layout that pads odd lengths, on one rank


def test_labels_are_shifted_before_the_split() -> None:
    batch, cp = whole("right"), ContextParallel(layout=EVEN)
    shard = hf.shard_batch(cp, batch, model=ANY)
    expected = pad(batch["labels"][:, 1:], (0, 2), value=-100)  # with one token of padding
    assert torch.equal(shard["shift_labels"], expected)
    assert shard["num_items_in_batch"] == int((expected != -100).sum())
    assert torch.equal(shard["position_ids"][:, :LENGTH], torch.arange(LENGTH).expand(2, -1))
    for misuse in (lambda x: x[:, 1:], lambda x: pad(x, (0, 1)), lambda x: x.view(-1), torch.ravel):
        with pytest.raises(UnsupportedError, match="shift_labels"):
            misuse(shard["labels"])
    model_inputs = {"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}
    assert torch.equal(
        hf.shard_batch(cp, model_inputs, model=ANY)["shift_labels"][:, :LENGTH], batch["labels"]
    )
    embeddings = torch.ones(2, LENGTH, 32, requires_grad=True)
    model_inputs = {"inputs_embeds": embeddings, "token_type_ids": batch["input_ids"]}
    shard = hf.shard_batch(cp, model_inputs, model=ANY)
    assert (
        shard["inputs_embeds"].shape == (2, LENGTH + 1, 32) and shard["inputs_embeds"].requires_grad
    )
    assert "labels" not in shard and shard["token_type_ids"].shape == (2, LENGTH + 1)


def test_documents_cost_nothing_where_they_say_nothing() -> None:
    cp = ContextParallel(layout=EVEN)
    masks = {kind: hf.shard_batch(cp, whole(kind), model=ANY)["attention_mask"] for kind in
             ("contiguous", "right", "left", "packed", "flattened")}  # fmt: skip
    assert masks["contiguous"].single and masks["contiguous"].segment_ids is None
    assert masks["contiguous"].cu_seqlens == (0, LENGTH, LENGTH + 1)
    assert masks["right"].single and not masks["left"].single
    assert masks["flattened"].cu_seqlens == (0, 5, 6, 23, 43, 44)
    assert masks["flattened"].segment_ids is None
    assert masks["packed"].cu_seqlens is None and masks["packed"].segment_ids is not None
    assert (masks["packed"].segment_ids[:, -1] == -1).all()


_ALL: Any = lambda *_: torch.tensor(True)  # noqa: E731 - as models write it
_NEAR: Any = lambda size: lambda _b, _h, q, k: abs(q - k) < size  # noqa: E731
_CAUSAL = masking_utils.causal_mask_function
_BLOCKS = torch.full((2, LENGTH), -1)
_overlay: Any = masking_utils.blockwise_overlay  # without types


_OWN_MASKS: list[tuple[Any, Any]] = [
    (masking_utils.or_masks(_CAUSAL, _ALL), (False, None)),
    (masking_utils.and_masks(_CAUSAL, _ALL), (True, None)),
    (masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(5), _NEAR(5)),
     (False, (4, 4))),
    (masking_utils.and_masks(_NEAR(7), _CAUSAL), (True, (6, 0))),
    (masking_utils.or_masks(_CAUSAL, _overlay(_BLOCKS)), (True, None)),
    (masking_utils.or_masks(_CAUSAL, _overlay(_BLOCKS + 1)), None),
    (masking_utils.or_masks(_CAUSAL, lambda _b, _h, _q, k: k < 9), None),  # a prefix
    (lambda _b, _h, q, k: q // 8 == k // 8, None),  # chunks
    (lambda _b, _h, q, k: (q - k) % 2 == 0, None),
    (lambda _b, _h, q, k, _hidden=_BLOCKS: k < q, None),  # encloses a tensor
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(_OWN_MASKS)))
def test_masks_of_a_models_own(case: int) -> None:
    """A mask function of positions alone is taken where it is a band, and refused elsewhere.

    Class: masks that models make themselves, and pass to transformers' mask functions.
    """
    function, pattern = _OWN_MASKS[case]
    shard = hf.shard_batch(ContextParallel(), {"input_ids": TOKENS.repeat(1, 6)}, model=ANY)
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 48, "kv_length": 48}
    mask_of = partial(
        ring_mask, **sizes, mask_function=function, attention_mask=shard["attention_mask"]
    )
    if pattern is None:
        with pytest.raises(UnsupportedError, match="other than causal, bidirectional or sliding"):
            mask_of()
        return
    mask: Any = mask_of()
    assert (mask.causal, mask.window) == pattern
    # A model round this one has made it; an index that cuts nothing off changes nothing.
    assert ring_mask(**sizes, attention_mask=mask) is mask
    assert mask[:, :, slice(-0, None), :] is mask is mask[:, :, :, :48]
    for cut in ((..., slice(1, None)), (slice(None), 0), (slice(None),) * 3 + (slice(0, 47),)):
        with pytest.raises(UnsupportedError, match="read or changed"):
            mask[cut]


TOKENS = torch.ones(2, 8, dtype=torch.int64)
PADDED = torch.nn.functional.pad(torch.ones(2, 7, dtype=torch.int64), (0, 1))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({}, ValueError, "one of input_ids"),
        ({"input_ids": TOKENS, "inputs_embeds": TOKENS}, ValueError, "one of input_ids"),
        ({"labels": TOKENS, "input_ids": [1, 2]}, ValueError, "must be a torch.Tensor, got list"),
        ({"labels": TOKENS, "input_ids": TOKENS[0]}, UnsupportedError, "input_ids has shape"),
        ({"input_ids": TOKENS, "labels": TOKENS[:, 1:]}, ValueError, "labels must be"),
        ({"input_ids": TOKENS, "labels": TOKENS[:, 0]}, UnsupportedError, "labels has shape"),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 8, 8)}, UnsupportedError, "four dimensions"),
        ({"input_ids": TOKENS, "attention_mask": -TOKENS}, UnsupportedError, "number documents"),
        ({"input_ids": TOKENS, "attention_mask": PADDED, "position_ids": TOKENS}, UnsupportedError, "start again"),
        ({"input_ids": TOKENS, "attention_mask": PADDED, "seq_idx": TOKENS}, UnsupportedError, "beside seq_idx"),
        ({"input_ids": TOKENS, "attention_mask": 2 * PADDED, "seq_idx": TOKENS}, ValueError, "different documents"),
        ({"input_ids": TOKENS, "attention_mask": 2 * PADDED, "position_ids": TOKENS}, ValueError, "no stated document begins"),
        ({"input_ids": TOKENS, "position_ids": torch.ones(3, 2, 8)}, UnsupportedError, "several directions"),
        ({"input_ids": TOKENS, "attention_mask": 0 * TOKENS, "labels": TOKENS}, ValueError, "follows padding"),
        ({"input_ids": TOKENS, "pixel_values": TOKENS}, UnsupportedError, "pixel_values"),
        ({"input_ids": TOKENS, "cu_seq_lens_q": TOKENS}, ValueError, "given both"),
        ({"input_ids": TOKENS, "cu_seq_lens_q": (0, 8), "cu_seq_lens_k": (0, 8)}, UnsupportedError, "2 rows"),
        ({"input_ids": TOKENS[:1], "cu_seq_lens_q": (0, 8), "cu_seq_lens_k": (0, 7, 8)}, ValueError, "must be equal"),
        ({"input_ids": TOKENS[:1], "cu_seq_lens_q": (0, 7), "cu_seq_lens_k": (0, 7)}, ValueError, r"0, \.\.\., 8"),
        ({"input_ids": TOKENS, "seq_idx": TOKENS[0]}, ValueError, "seq_idx must be"),
        ({"input_ids": TOKENS, "use_cache": True}, UnsupportedError, "no cache"),
        ({"input_ids": TOKENS, "output_attentions": True}, UnsupportedError, "never held"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_split(batch: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        hf.shard_batch(ContextParallel(), batch, model=ANY)


def refused(message: str, call: Callable[[], Any], error: type = UnsupportedError) -> None:
    with pytest.raises(error, match=message):
        call()


def test_half_of_the_change_is_an_error() -> None:
    """A sharded batch without ring attention, and ring attention without one, raise errors."""
    batch = whole("right")
    shard = hf.shard_batch(ContextParallel(None, "contiguous"), batch, model=ANY)
    for implementation in ("eager", "sdpa", "flex_attention"):
        with pytest.raises(UnsupportedError, match=r"hf\.register"):
            build("Llama", implementation)(**shard)
    model = build("Llama", hf.register())
    del batch["labels"]
    refused("shard_batch", lambda: model(**batch), ValueError)
    refused("shard_batch", lambda: model(input_ids=batch["input_ids"]), ValueError)
    four = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    refused("no mask of shape", lambda: model(input_ids=batch["input_ids"], attention_mask=four))
    generate = {"max_new_tokens": 2, "do_sample": False}
    refused("shard_batch", lambda: model.generate(**batch, **generate), ValueError)


def test_models_that_would_answer_wrong() -> None:
    cp = ContextParallel()
    shard = hf.shard_batch(cp, whole("contiguous"), model=ANY)
    name = hf.register()
    model = build("Llama", name)
    refused("output_attentions", lambda: model(**shard, output_attentions=True))
    refused("head_mask", lambda: model(**shard, head_mask=TOKENS))
    takes = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    (argument,) = {"cache", "past_key_values"} & takes.keys()  # transformers 5.24 renamed it
    cache = {argument: transformers.DynamicCache(config=model.config)}
    model(**shard, **cache)
    refused("KV cache", lambda: model(**shard, **cache))
    refused("chunked", lambda: build("Llama4", name)(**shard))
    refused("router", lambda: build("GptOss", name)(**shard, output_router_logits=True))
    blocks = torch.zeros(2, LENGTH + 1, dtype=torch.int64)
    embeddings = model.get_input_embeddings()(shard["input_ids"])
    arguments = (model.config, embeddings, shard["attention_mask"], None)
    refused(
        "images", lambda: masking_utils.create_causal_mask(*arguments, block_sequence_ids=blocks)
    )
    mask: Any = masking_utils.create_causal_mask(*arguments)
    refused("read or changed", lambda: mask[:, :, :4])
    model.config.layer_types = ["full_attention", "linear_attention"]
    refused("linear_attention", lambda: masking_utils.create_causal_mask(*arguments))
    refused("recurrent", lambda: masking_utils.create_recurrent_attention_mask(*arguments))
    function = transformers.AttentionInterface()[name]
    heads = torch.zeros(2, 1, LENGTH + 1, 8)
    layer = torch.nn.Module()
    refused(
        "sliding_window=4", lambda: function(layer, heads, heads, heads, mask, sliding_window=4)
    )
    refused("is_causal", lambda: function(layer, heads, heads, heads, mask, is_causal=False))
    refused(
        "position_bias", lambda: function(layer, heads, heads, heads, mask, position_bias=heads)
    )
    refused("cross", lambda: function(layer, heads, heads[:, :, :4], heads[:, :, :4], mask))
    refused("no attention_mask", lambda: function(layer, heads, heads, heads, None), ValueError)
    refused("itself", lambda: function(layer, heads, heads, heads, shard["attention_mask"]))


def test_names_are_not_taken_twice() -> None:
    assert hf.register() == hf.register() == "ring"
    refused("choose another name", lambda: hf.register(kernel="eager"), ValueError)
    refused("mean something", lambda: hf.register("my_flash"), ValueError)
    refused("kernel", lambda: hf.register("ring-none", kernel="none"), ValueError)
    assert "ring-none" not in transformers.AttentionInterface()
