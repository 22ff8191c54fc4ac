"""Layers of models: recurrent ones, split or whole, and rotary embeddings of every type."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hf_models import LENGTH, WHOLE, Wide, build, run, whole
from hf_rows import FAMILIES, SCANS_ALONE, Row, compared, padded, rows
from on_ranks import on_ranks
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import mixers
from ring_torch.hf.models.code import forward_of
from ring_torch.hf.models.recurrent import REPLACED
from ring_torch.local import LocalRanks


@pytest.mark.refused_in("5.14")
@pytest.mark.parametrize("name", [*FAMILIES.split(), *SCANS_ALONE.split()])
def test_layers_of_a_family_are_split(name: str) -> None:
    assert hf.check_model(build(name)).whole_layers == ()


@pytest.mark.refused_in("5.14")
@on_ranks
def test_short_batches_run_whole() -> None:
    """Run a short batch whole, and a longer one split, whose hidden states have more bytes."""
    model, long = build("Qwen3NextForCausalLM"), whole("plain")
    short = {name: x[:, :8] for name, x in long.items()}
    batches, gather = (short, long, short), mixers.WholeLayer.gather
    with Wide():
        expected = [model(**batch, use_cache=False).loss for batch in batches]
    hf.parallelize(model, ContextParallel())
    layer = model.model.layers[0].linear_attn
    for batch, loss, is_whole in zip(batches, expected, (True, False, True), strict=True):
        spy = patch.object(mixers.WholeLayer, "gather", autospec=True, side_effect=gather)
        with spy as seen, Wide():
            torch.testing.assert_close(model(**batch).loss, loss)
        assert is_whole == any(layer in call.args for call in seen.call_args_list)


@pytest.mark.refused_in("5.14")
@on_ranks
def test_the_choice_draws_no_random_numbers() -> None:
    """With dropout before the scan a first forward draws what later ones do."""
    model, batch = build("Qwen3NextForCausalLM"), whole("plain")
    projection = model.model.layers[0].linear_attn.in_proj_qkvz
    projection.register_forward_hook(lambda _module, _args, x: torch.dropout(x, 0.5, train=True))
    hf.parallelize(model, ContextParallel())
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        with Wide():
            losses.append(model(**batch).loss)
    torch.testing.assert_close(*losses, rtol=0, atol=0)


@pytest.mark.refused_in("5.14")
def test_a_layer_is_given_no_cache() -> None:
    model = build("Lfm2ForCausalLM")
    hf.parallelize(model, ContextParallel())

    def give(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        name = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
        return args, {**kwargs, name: transformers.DynamicCache(config=model.config)}

    model.model.layers[0].conv.register_forward_pre_hook(give, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match=r"Lfm2ShortConv is split .* there is no cache"):
        model(**whole("plain"))


@pytest.mark.refused_in("5.14")
def test_a_function_that_may_mix_tokens() -> None:
    """Let a layer's forward call a function that the table does not know."""
    model = build("Qwen3NextForCausalLM")
    layer = model.model.layers[0].linear_attn
    own = forward_of(type(layer))
    assert own is not None
    code = own.__code__
    names = tuple("mixed" if x == "apply_mask_to_padding_states" else x for x in code.co_names)
    other = FunctionType(
        code.replace(co_names=names), own.__globals__ | {"mixed": lambda x, _: x.flip(1)}, "forward",
        own.__defaults__,
    )  # fmt: skip
    layer.__class__ = type("OtherDeltaNet", (type(layer),), {"forward": other})
    assert hf.check_model(model).whole_layers == (
        "OtherDeltaNet calls mixed, which may mix tokens",
    )
    with pytest.raises(UnsupportedError, match="calls mixed"):
        hf.parallelize(model, ContextParallel(), recurrent="split")


@pytest.mark.refused_in("5.14")
def test_a_forward_that_was_replaced() -> None:
    model = build("Lfm2ForCausalLM")
    layer = model.model.layers[0].conv
    handle = hf.parallelize(model, ContextParallel(), recurrent="split")
    assert hf.check_model(model).whole_layers == ()
    handle.remove()
    assert "forward" not in vars(layer)
    layer.forward = layer.forward
    assert "was replaced" in hf.check_model(model).whole_layers[0]


def test_other_models_keep_their_functions() -> None:
    """Parallelize one model: another of its class, in the same process, computes whole."""
    model, other, batch = build("Lfm2ForCausalLM"), build("Lfm2ForCausalLM"), whole("right") | WHOLE
    expected = run(model, batch)
    hf.parallelize(other, ContextParallel())
    assert all(map(torch.equal, run(model, batch), expected))


def test_every_function_has_an_operation() -> None:
    assert mixers._OPERATIONS.keys() == REPLACED


@pytest.mark.parametrize(
    "states",
    [{"initial_state": torch.zeros(1)}, {"output_final_state": True}],
    ids=["one", "wanted"],
)
def test_a_scan_is_given_no_states(states: dict[str, Any]) -> None:
    rows = mixers.SplitLayer(torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="state of a cache"):
        mixers._OPERATIONS["torch_chunk_gated_delta_rule"](rows, *[torch.zeros(1)] * 5, **states)


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

#: Models whose rotary embeddings return angles of other shapes, or look at positions themselves:
#: the type of the config within theirs, its parameters, and a batch.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **_LONG}
MODELS: dict[str, tuple[str, Any, str]] = {
    "Phi3ForCausalLM": ("phi3", _LONGROPE, "row and packed"),
    "PhimoeForCausalLM": (
        "phimoe", {**_LONGROPE, "short_mscale": 1.2, "long_mscale": 1.7}, "row and packed",
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text", {"full_attention": _LONGROPE, "sliding_attention": _DYNAMIC}, "row",
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4_text", {"full_attention": _DYNAMIC, "sliding_attention": _DEFAULT}, "row",
    ),
    "ModernBertForMaskedLM": (
        "modernbert", {"full_attention": _DYNAMIC, "sliding_attention": _LONGROPE}, "row",
    ),
    "Llama4ForCausalLM": ("llama4_text", _DYNAMIC, "row"),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl_text", {**_DYNAMIC, "mrope_section": [2, 1, 1]}, "row and images",
    ),
    "T5GemmaForConditionalGeneration": ("t5_gemma_module", _DYNAMIC, "row and pair"),
}  # fmt: skip


def changes(kind: str, rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return changes of a config of this type with other rotary embeddings."""
    values = {"rope_parameters": rope, "max_position_embeddings": LIMIT}
    if kind != "llama" and "original_max_position_embeddings" in rope:
        values["original_max_position_embeddings"] = MIDDLE
    if kind == "phi3":  # its config checks the number of factors
        values |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"kind": kind, "values": values | more}


def llama(rope_type: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return changes of a small Llama; those of other types have the same weights."""
    rope = {"rope_theta": 1e4, **parameters, "rope_type": rope_type}
    return changes("llama", rope, head_dim=8)


def table() -> Iterator[Any]:
    """Yield a row for each field, which has to have an effect, and for each of the models."""
    for rope_type, (needed, others) in TYPES.items():
        for name, value in others.items():
            before = {**needed, **BESIDE.get((rope_type, name), {})}
            own: dict[str, Any] = {
                "changes": llama(rope_type, {**before, name: value}),
                "unlike": llama(rope_type, before),
            }
            yield from rows("LlamaForCausalLM", "row", suffix=f"{rope_type}-{name}", **own)
    for model, (kind, rope, batch) in MODELS.items():
        yield from rows(model, batch, changes=changes(kind, rope))
    for rope_type in ("dynamic", "longrope"):
        given: dict[str, Any] = {
            "changes": llama(rope_type, TYPES[rope_type][0]),
            "suffix": rope_type,
        }
        # Scaling of a longer sequence stays until a short one comes, on all ranks alike.
        yield from rows("LlamaForCausalLM", "lengths", **given)
        # Below the limit, or with equal last positions, ranks choose alike without hooks, too.
        yield from rows("LlamaForCausalLM", "short rows", by="shard_batch", **given)


@pytest.mark.parametrize("row", [*table()])
def test_whole_and_split_are_alike(pool: LocalRanks, row: Row) -> None:
    pool.run(compared, row)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@on_ranks
def test_a_batch_is_refused_without_hooks_where_ranks_would_differ(rope_type: str) -> None:
    """It is refused before anything is sent."""
    model = build("LlamaForCausalLM", hf.register(), **llama(rope_type, TYPES[rope_type][0]))
    with pytest.raises(UnsupportedError, match=r"hf\.parallelize, and whole batches"):
        hf.shard_batch(ContextParallel(), padded(LENGTH, count=1), model=model)


def test_every_type_and_field_is_tried() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == TYPES.keys()
    tried = {name for _, others in TYPES.values() for name in others}
    known = {*RopeParameters.__annotations__} - {"rope_type", "mrope_section"}  # of Qwen2-VL above
    assert known <= tried
