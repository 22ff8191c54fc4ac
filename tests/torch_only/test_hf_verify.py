"""``verify`` finds and names wrong hooks, and unknown modules that mix tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hf_models import build, whole
from hf_rows import cases_of, wrapped
from on_ranks import on_ranks
from torch import Tensor, nn

from ring_core import UnsupportedError, WrongResultError
from ring_torch import ContextParallel, hf
from ring_torch.hf import mixers, products, wiring
from ring_torch.hf.models import hooks, releases


def verdict(handle: hf.Handle, batch: dict[str, Any]) -> str:
    """Return the error that ``verify`` raises, or an empty string if all is right."""
    try:
        report = handle.verify(batch)
    except WrongResultError as error:
        return str(error)
    assert report.modules > 10
    assert report.gradients is not None
    assert report.logits is not None
    assert all(x is None or x.is_within for x in (report.loss, report.logits, report.gradients))
    return ""


def quietly(model: Any, **options: Any) -> hf.Handle:
    """Parallelize a model, also one that no test has run, without a warning."""
    with warnings.catch_warnings(action="ignore"):
        return hf.parallelize(model, ContextParallel(), **options)


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Return a patch that changes what a function returns."""
    own = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: change(own(*args, **kwargs)))


def argument(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what changes a keyword argument that a hook hands on."""

    def other(result: Any) -> Any:
        args, kwargs = result
        return args, {**kwargs, name: change(kwargs[name])}

    return other


def flipped_positions(result: Any) -> Any:
    args, kwargs = result
    return tuple(x.flip(0) if isinstance(x, Tensor) and x.ndim == 1 else x for x in args), kwargs


def without_padding(mask: Any) -> Any:
    return replace(mask, keys=replace(mask.keys, has_padding=False))


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, dims=1)


def rolled_tokens(result: Any) -> Any:
    shard, *rest = result
    return {**shard, "input_ids": rolled(shard["input_ids"])}, *rest


def scaled_scores() -> Any:
    own, name = products.Products.attend, "attend"
    return patch.object(
        products.Products, name, lambda self, x, v: own(self, replace(x, scale=x.scale * 1.1), v)
    )


FULL = argument("attention_mask", lambda x: dict.fromkeys(x, x["full_attention"]))
IMAGES = argument("inputs_embeds", rolled)  # as if images were placed wrongly
Wrong = tuple[str, str, Callable[[], Any], str]
#: By kind of hook: model, batch, a fault, and the module that the error has to name.
WRONG: dict[str, Wrong] = {
    "attention": ("GPTNeoXJapaneseForCausalLM", "plain", scaled_scores, "gpt_neox_japanese.layers.0.attention (GPTNeoXJapaneseAttention)"),
    "alibi": ("BloomForCausalLM", "right", lambda: changed(wiring, "_slopes_from_pair", lambda slopes: slopes / 2), "transformer.h.0.self_attention (BloomAttention)"),
    "positions": ("BartForCausalLM", "plain", lambda: changed(wiring._Positions, "add", flipped_positions), "model.decoder.embed_positions (BartLearnedPositionalEmbedding)"),
    "chunks": ("Llama4ForCausalLM", "left", lambda: changed(wiring, "_chunk_masks", FULL), "model.layers.0.self_attn (Llama4TextAttention)"),
    "bias": ("T5ForConditionalGeneration", "pair padded", lambda: changed(wiring._PositionBias, "compute", lambda x: x.roll(1, dims=-1) if x.ndim else x), "encoder.block.0.layer.0.SelfAttention (T5Attention)"),
    "encoder-decoder": ("BartForConditionalGeneration", "pair padded", lambda: changed(wiring, "tell_keys", argument("encoder_attention_mask", without_padding)), "model.decoder.layers.0.encoder_attn (BartAttention)"),
    "split recurrence": ("Qwen3NextForCausalLM", "plain", lambda: changed(mixers.SplitLayer, "forward", rolled), "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)"),
    "recurrence": ("RecurrentGemmaForCausalLM", "plain", lambda: changed(mixers.WholeLayer, "gather", argument("input_states", rolled)), "model.layers.0.temporal_block (RecurrentGemmaRecurrentBlock)"),
    "batch split": ("LlamaForCausalLM", "left", lambda: changed(hooks.ModelHooks, "_shard", rolled_tokens), "LlamaForCausalLM"),
    "loss join": ("LlamaForCausalLM", "plain", lambda: patch.object(hooks.ModelHooks, "total_of", lambda _self, part: part), "LlamaForCausalLM"),
    "images of Qwen3VL": ("Qwen3VLForConditionalGeneration", "images plain", lambda: changed(hooks, "split_text", IMAGES), ""),
    "images of Llava": ("LlavaForConditionalGeneration", "images plain", lambda: changed(hooks, "split_text", IMAGES), ""),
}  # fmt: skip
HALF = ("batch split-float16", "batch split-bfloat16", "images of Llava-bfloat16")


@pytest.mark.nightly(only=["images of Qwen3VL-float32", "images of Llava-float32", *HALF])
@pytest.mark.parametrize("case", [*(f"{kind}-float32" for kind in WRONG), *HALF])
@pytest.mark.refused_in("5.14", "alibi", "bias", "split recurrence", "images of Qwen3VL")
@on_ranks
def test_a_wrong_hook_is_found_and_its_module_named(case: str) -> None:
    kind, _, dtype_name = case.rpartition("-")
    dtype = getattr(torch, dtype_name)
    name, batch_name, wrong, where = WRONG[kind]
    model = build(name)
    (batch,) = cases_of(model, batch_name)[0].split
    batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    options: Any = {"recurrent": "whole" if kind == "recurrence" else "auto"}
    if kind == "split recurrence":
        options = {"recurrent": "split"}
    handle = hf.parallelize(model.to(dtype), ContextParallel(), **options)
    assert not verdict(handle, batch)
    handle.remove()
    words = "its modules agree, and" if kind == "loss join" else "output differs is"
    with wrong():
        message = verdict(hf.parallelize(model, ContextParallel(), **options), batch)
    assert f"{words} {where}" in message


class Shift(nn.Module):
    """A module that adds to each token the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(x[:, :-1], (0, 0, 1, 0))


class Unknown(transformers.LlamaForCausalLM):
    """A model class that the model sweep does not list."""


def unknown(*, mixes: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a small model, with a module that mixes tokens before the MLP of its second layer."""
    known = build("Llama")
    model: Any = Unknown(known.config)
    model.load_state_dict(known.state_dict())
    if mixes:
        layer = model.model.layers[1]
        layer.mlp = nn.Sequential(Shift(), layer.mlp)
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixes", [False, True])
@on_ranks
def test_a_module_of_unknown_code_that_mixes_tokens_is_named(
    mixes: bool, dtype: torch.dtype
) -> None:
    model = unknown(mixes=mixes, dtype=dtype)
    words = r"output differs is model.layers.1.mlp.0 \(Shift\)"
    with pytest.raises(WrongResultError, match=words) if mixes else nullcontext():
        hf.verify(model, ContextParallel(), whole("plain"))
    assert hf.check_model(model).exact  # ``check_model`` has not found it


def state(model: nn.Module) -> dict[str, Any]:
    """Return all state that ``verify`` must leave unchanged, bit for bit."""
    parts, weights = dict(model.named_modules()), dict(model.named_parameters())
    grads = {name: x.grad for name, x in weights.items() if x.grad is not None}
    tensors = weights | dict(model.named_buffers())
    return {
        "tensors": {name: x.detach().numpy().tobytes() for name, x in tensors.items()},
        "gradients": {name: (id(x), x.numpy().tobytes()) for name, x in grads.items()},
        "modes": {name: (x.training, getattr(x, "dropout", 0)) for name, x in parts.items()},
        "hooks": {name: [*x._forward_pre_hooks, *x._forward_hooks] for name, x in parts.items()},
        "attention": [x.config._attn_implementation for x in parts.values() if hasattr(x, "config")],
        "rng": torch.get_rng_state().tolist(),
    }  # fmt: skip


def count(module: Any, *_: object) -> None:
    """Count a module's forwards in a buffer, and draw a random number in each."""
    module.calls += 1
    torch.rand(1)


ONES = {"labels": torch.ones(2, 43, dtype=torch.int64)}
REFUSED = {
    "wrong": pytest.raises(WrongResultError, match=r"mlp\.0 \(Shift\)"),
    "short of memory": pytest.raises(UnsupportedError, match=r"a whole run of 2x43 tokens.* give a shorter batch"),
    "malformed": pytest.raises(ValueError, match="labels"),
}  # fmt: skip


@pytest.mark.parametrize("case", ["dropout", *REFUSED])
@on_ranks
def test_all_is_as_before(case: str) -> None:
    if case == "dropout":
        model = build("BartForCausalLM").float()
        counted = model.model.decoder.layers[0].fc1
        counted.register_buffer("calls", torch.zeros(1))
        counted.register_forward_hook(count)
        model.gradient_checkpointing_enable()
    else:
        model = unknown(mixes=case == "wrong")
    model.train()
    batch = whole("right")
    model(**batch, use_cache=False).loss.backward()
    handle = quietly(model)
    model.register_forward_hook(lambda *_: None)  # registered after Ring's
    for weight in model.parameters():  # an optimizer steps as soon as there is a gradient
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda x: x.data.sub_(x.grad))

    def fail(*_: object) -> None:
        if not any(getattr(x, "__self__", None) for x in model._forward_pre_hooks.values()):
            raise torch.OutOfMemoryError("no memory")

    if case == "short of memory":
        model.lm_head.register_forward_hook(fail)
    before = state(model)
    with REFUSED[case] if case in REFUSED else nullcontext():
        report = handle.verify(batch | (ONES if case == "malformed" else {}))
        assert report.gradients is not None and report.gradients.is_within
    after = state(model)
    assert [name for name in before if before[name] != after[name]] == []


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "lora"])
@on_ranks
def test_in_what_wraps_a_model(rank: int, kind: str, is_wrong: bool) -> None:
    model: Any = wrapped(unknown(mixes=is_wrong), kind)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(rank)  # ranks draw different numbers
    handle = quietly(model, reduction="sum" if kind == "lora" else "mean")
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    message = verdict(handle, whole("plain"))
    assert ("model.layers.1.mlp.0 (Shift)" in message) is bool(message) is is_wrong
    for name, x in model.named_parameters():
        assert x.grad is None and torch.equal(x, before[name])
    model(**whole("plain")).loss.backward()  # the model still trains


@on_ranks
def test_noise_that_hides_all_is_no_verdict() -> None:
    """A model that reads padding is refused: even two unsplit runs of it would differ."""
    with pytest.raises(ValueError, match="give a batch without padding"):
        hf.verify(unknown(mixes=True), ContextParallel(), whole("left"))


@pytest.mark.parametrize("case", ["known", "unknown"])
@on_ranks
def test_parallelize_warns_once_of_what_no_test_has_run(case: str) -> None:
    model, cp = build("Llama") if case == "known" else unknown(), ContextParallel()
    batch = whole("plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.verify(model, cp, batch)
        handle = hf.parallelize(model, cp)
        assert hf.parallelize(model, cp) is handle
        handle.verify(batch)
    warned = [str(x.message) for x in caught if "no test has run" in str(x.message)]
    assert len(warned) == (case == "unknown")
    assert all("Unknown" in x and "hf.verify(model, cp, batch)" in x for x in warned)


@pytest.mark.parametrize(
    ("release", "warns"), [("5.25.0", True), ("6.0.0.dev0", True), ("5.14.3", False)]
)
def test_a_transformers_is_warned_of_that_is_not_tested(release: str, warns: bool) -> None:
    message = r"transformers is .*hf\.verify"
    with (
        patch.object(releases, "installed_release", lambda: release),
        pytest.warns(UserWarning, match=message) if warns else nullcontext(),
    ):
        handle = hf.parallelize(build("Llama"), ContextParallel())
    handle.remove()
    with pytest.raises(
        ValueError, match=r"remove\(\) was called, so the model is not parallelized"
    ):
        handle.verify(whole("plain"))


@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
@on_ranks
def test_without_labels(head: str) -> None:
    """Check that gradients are compared of a stand-in for the loss if there are no labels."""
    for options in ({}, {"logits": "gather", "reduction": "mean"}):
        handle = quietly(build("Llama", head=head).float(), **options)
        report = handle.verify({"input_ids": whole("plain")["input_ids"]})
        assert report.loss is None and report.logits is not None
        assert report.gradients is not None
        assert 0 < report.gradients.error <= report.gradients.limit
