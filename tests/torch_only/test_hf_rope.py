"""Rotary embeddings of every type of transformers, each field of it, on a ring as on one device.

Class: what depends on the largest position of its input. A rank sees its own positions alone; the
types ``longrope`` and ``dynamic``, and PhiMoE's own code, then turn its tokens by other angles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hf_models import LENGTH, build
from hf_rows import Row, compared, padded, rows
from on_ranks import on_ranks
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

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
