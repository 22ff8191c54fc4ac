"""Recurrent layers of transformers: which are split, and what of them is refused."""

from __future__ import annotations

from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hf_models import WHOLE, Wide, build, run, whole
from hf_rows import FAMILIES, SCANS_ALONE
from on_ranks import on_ranks

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import mixers
from ring_torch.hf.models.code import forward_of
from ring_torch.hf.models.recurrent import REPLACED


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
