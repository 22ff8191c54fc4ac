"""Rotary embeddings of every type of transformers, each field of it, on a ring as on one device.

Class: what depends on the largest position of its input. A rank sees its own positions alone; the
types ``longrope`` and ``dynamic``, and PhiMoE's own code, then turn its tokens by other angles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import Wide
from sweep.compare import batch_of, build
from sweep.images import image_batch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

LENGTH = 43
MIDDLE = 38  # a limit between the two ranks' last positions in zigzag: 42 and 32
LIMIT = 16  # positions of the whole model, beyond which `dynamic` changes its angles

_LONG: dict[str, Any] = {
    "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": MIDDLE,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
_LLAMA3: dict[str, Any] = {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

#: Fields that each type needs, and a value of each of its fields that is not the one before. The
#: verdict is the same for all: exact, by ``hf.parallelize``.
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"rope_theta": 50.0}),
    "linear": ({"factor": 2.0}, {"factor": 4.0}),
    "dynamic": ({"factor": 2.0}, {"factor": 4.0}),
    "yarn": (_YARN, {
        "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.5,
        "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 2.0, "mscale_all_dim": 0.25, "truncate": False,
    }),
    "longrope": (_LONG, {
        "long_factor": [3.0] * 4, "short_factor": [3.0] * 4, "attention_factor": 0.5, "factor": 8.0,
        "original_max_position_embeddings": LENGTH + 1,
    }),
    "llama3": (_LLAMA3, {
        "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
        "original_max_position_embeddings": 32,
    }),
    "proportional": ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0, "factor": 2.0}),
}  # fmt: skip

#: Fields that other fields hide: the short factors in a long sequence.
BESIDE = {("longrope", "short_factor"): {"original_max_position_embeddings": LENGTH + 1}}

#: Models whose rotary embeddings return angles of other shapes, or look at positions themselves.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **_LONG}
MODELS: dict[str, tuple[str, str, Any]] = {
    "Phi3ForCausalLM": ("phi3", "phi3", _LONGROPE),
    "PhimoeForCausalLM": (
        "phimoe", "phimoe", {**_LONGROPE, "short_mscale": 1.2, "long_mscale": 1.7},
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text", "gemma3_text",
        {"full_attention": _LONGROPE, "sliding_attention": _DYNAMIC},
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4", "gemma4_text", {"full_attention": _DYNAMIC, "sliding_attention": _DEFAULT},
    ),
    "ModernBertForMaskedLM": (
        "modernbert", "modernbert", {"full_attention": _DYNAMIC, "sliding_attention": _LONGROPE},
    ),
    "Llama4ForCausalLM": ("llama4", "llama4_text", _DYNAMIC),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl", "qwen2_vl_text", {**_DYNAMIC, "mrope_section": [2, 1, 1]},
    ),
    "T5GemmaForConditionalGeneration": ("t5gemma", "t5_gemma_module", _DYNAMIC),
}  # fmt: skip


def llama(rope_type: str, parameters: dict[str, Any]) -> Any:
    """Build a small Llama with rotary embeddings of a type; other types have the same weights."""
    rope = {"rope_theta": 1e4, **parameters, "rope_type": rope_type}
    return build(
        "LlamaForCausalLM", "llama", kind="llama",
        values={"rope_parameters": rope, "max_position_embeddings": LIMIT, "head_dim": 8},
    )  # fmt: skip


def batch(length: int = LENGTH, **more: Tensor) -> dict[str, Tensor]:
    """Return one row of tokens, with labels."""
    tokens = torch.randint(4, 40, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "labels": tokens, **more}


def result(model: Any, inputs: dict[str, Any], cp: ContextParallel | None = None) -> dict[str, Any]:
    """Return the loss and all gradients, of all ranks where there are several."""
    model.zero_grad()
    with Wide():
        loss = model(**inputs, use_cache=False).loss
    loss.backward()
    if cp is not None:
        cp.reduce_gradients(model)
    grads = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **grads}


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare losses and gradients, relative to the largest gradient."""
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        local = actual.get(name, torch.zeros_like(x))
        off = float((local - x).abs().max())
        torch.testing.assert_close(
            local, x, rtol=1e-7, atol=1e-9 * largest, msg=f"{name}: off by {off}"
        )


def test_every_type_and_field_is_tried() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == TYPES.keys()
    tried = {name for _, others in TYPES.values() for name in others}
    known = {*RopeParameters.__annotations__} - {"rope_type", "mrope_section"}  # of Qwen2-VL below
    assert known <= tried


def _field(_: int, rope_type: str, name: str) -> None:
    needed, others = TYPES[rope_type]
    before = {**needed, **BESIDE.get((rope_type, name), {})}
    model = llama(rope_type, {**before, name: others[name]})
    inputs = batch()
    expected, default = result(model, inputs), result(llama(rope_type, before), inputs)
    assert not torch.equal(expected["loss"], default["loss"]), f"{name} has no effect"
    hf.parallelize(model, cp := ContextParallel())
    same(result(model, inputs, cp), expected)


@pytest.mark.filterwarnings("ignore")  # about fields that a type does not read
@pytest.mark.parametrize(
    ("rope_type", "name"), [(kind, name) for kind, (_, names) in TYPES.items() for name in names]
)
def test_a_field_is_exact_and_has_an_effect(pool: LocalRanks, rope_type: str, name: str) -> None:
    pool.run(_field, rope_type, name)


def _model(_: int, name: str) -> None:
    model_type, kind, rope = MODELS[name]
    values = {"rope_parameters": rope, "max_position_embeddings": LIMIT}
    if "original_max_position_embeddings" in rope:
        values["original_max_position_embeddings"] = MIDDLE
    if name == "Phi3ForCausalLM":  # its config checks the number of factors
        values |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build(name, model_type, kind=kind, values=values)
    batches = [batch()]
    if kind.startswith("phi"):  # others do not separate documents, whole, or not in each release
        batches.append(batch(position_ids=torch.arange(LENGTH)[None] % MIDDLE))
    if kind == "qwen2_vl_text":
        batches = [batch(), image_batch(model, batch_of(model)) or {}]
        batches[1]["labels"] = batches[1]["input_ids"].clamp(max=40)
    if kind == "t5_gemma_module":
        batches = [{**batch(), "decoder_input_ids": batch(31)["input_ids"]}]
        batches[0]["labels"] = batches[0]["decoder_input_ids"]
    for inputs in batches:
        # One model for each: in transformers 5.14 `longrope` of a kind of layers runs once only.
        whole, model = (build(name, model_type, kind=kind, values=values) for _ in range(2))
        hf.parallelize(model, cp := ContextParallel())
        same(result(model, inputs, cp), result(whole, inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_whose_angles_have_other_shapes(pool: LocalRanks, name: str) -> None:
    pool.run(_model, name)


def _lengths(_: int, rope_type: str) -> None:
    needed = {**TYPES[rope_type][0]}
    model, whole = llama(rope_type, needed), llama(rope_type, needed)
    hf.parallelize(model, cp := ContextParallel())
    for length in (LENGTH, 9, LIMIT, 30, MIDDLE, MIDDLE + 1):
        same(result(model, batch(length), cp), result(whole, batch(length)))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_angles_that_a_model_keeps_from_one_batch_to_the_next(
    pool: LocalRanks, rope_type: str
) -> None:
    """Scaling of a longer sequence stays until a short one comes, on all ranks alike."""
    pool.run(_lengths, rope_type)


def _by_hand(_: int, rope_type: str) -> None:
    model = llama(rope_type, {**TYPES[rope_type][0]})
    model.set_attn_implementation(hf.register())
    cp = ContextParallel()
    with pytest.raises(UnsupportedError, match=r"hf\.parallelize, and whole batches"):
        hf.shard_batch(cp, batch(), model=model)
    # Below the limit, or with equal last positions, ranks choose alike.
    packed = torch.arange(LENGTH)[None] % 11
    for inputs in (batch(15), batch(position_ids=packed)):
        part = hf.shard_batch(cp, inputs, model=model)
        actual = result(model, part, cp)
        model.set_attn_implementation("eager")
        expected = result(model, inputs)
        model.set_attn_implementation(hf.register())
        del actual["loss"], expected["loss"]
        same(actual, expected)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_batch_that_is_split_by_hand(pool: LocalRanks, rope_type: str) -> None:
    """It is refused where ranks would differ, before anything is sent, and exact elsewhere."""
    pool.run(_by_hand, rope_type)
