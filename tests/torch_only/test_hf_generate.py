"""``generate`` of transformers over a sharded cache, compared with one device, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import BYTES, build
from on_ranks import of_first_rank, on_ranks
from refused import refused
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf

#: True of releases whose DeepSeek V3 caches latents, and expands them behind the cache.
HAS_LATENTS = hasattr(DeepseekV3Attention, "expand_kv")
NAMES: tuple[str, ...] = ("Llama", "Mistral", "Qwen3", "Gemma3", "GptOss", "Mixtral")
NAMES += () if HAS_LATENTS else ("DeepseekV3",)
#: Of no whole number of pages or parts, and longer than all windows.
PROMPT, NEW = 37, 7
SOME = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}

Way = tuple[dict[str, Any], dict[str, Any]]  # options of `generate`, and what differs of the cache
WAYS: dict[str, Way] = {
    "greedy": ({}, {}),
    "left padding": ({"padding": (0, 5, 36)}, {"chunk": 16}),
    "parts of generate": ({"padding": (3, 0), "prefill_chunk_size": 10}, {}),
    "sampling": ({"do_sample": True, "padding": (0, 2)}, {"chunk": 11}),
    "beams": ({"num_beams": 3, "num_return_sequences": 2, "padding": (0, 4)}, {"chunk": 20}),
    "several of a prompt": ({"do_sample": True, "num_return_sequences": 3}, {}),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3, "repeats": True}, {}),
    "assistant, sampling": ({"assistant": True, "do_sample": True}, {"chunk": 16}),
}


RANKS = 3


def batch_of(padding: tuple[int, ...], *, repeats: bool = False) -> dict[str, Tensor]:
    """Return prompts with padding to their left, which ``repeats`` so that it can be looked up."""
    length, generator = 5 if repeats else PROMPT, torch.Generator().manual_seed(7)
    ids = torch.randint(1, BYTES, (len(padding), length), generator=generator)
    ids = ids.repeat(1, -(-PROMPT // length))[:, :PROMPT]
    mask = torch.arange(PROMPT) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def prompt_of(rows: int) -> Tensor:
    return batch_of((0,) * rows)["input_ids"]


def ready(name: str, **changes: Any) -> Any:
    # (A row of padding alone is NaN in float64 with `eager`.)
    return build(name, "eager" if name == "GptOss" else "sdpa", **changes).eval()


@pytest.mark.nightly(unless=[
    *(f"Llama-{way}" for way in WAYS), *(f"{name}-greedy" for name in NAMES[1:]),
    "Gemma3-beams", "Mistral-prompt lookup",
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
@on_ranks
def test_tokens_are_those_of_one_device(name: str, way: str) -> None:
    options, cache = (dict(x) for x in WAYS[way])
    padding, repeats = options.pop("padding", (0,)), options.pop("repeats", False)
    if name == "GptOss":  # its eager attention has no rows of padding alone
        padding = (0,) * len(padding)
    model, batch = ready(name), batch_of(padding, repeats=repeats)
    if options.pop("assistant", False):
        options["assistant_model"] = ready("Llama", num_hidden_layers=1)

    def run(given: dict[str, Any]) -> Any:
        torch.manual_seed(5)
        output = model.generate(
            **batch, **{**SOME, **options}, **given, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        return output.sequences, output.scores

    (tokens, scores), cp = of_first_rank(lambda: run({})), ContextParallel()
    hf.parallelize(model, cp)
    own, own_scores = run({"past_key_values": hf.ShardedCache(cp, **{"page_size": 4, **cache})})
    assert torch.equal(own, tokens)
    torch.testing.assert_close(own_scores, scores, rtol=1e-4, atol=1e-4)  # logits, in float32


@on_ranks
def test_a_conversation_goes_on_in_its_cache() -> None:
    """Prompts grow, the cache with them, and tokens are taken back in both meanings of ``crop``."""
    model, (cp, more) = ready("Mistral"), (ContextParallel(), prompt_of(2)[:, :20])
    ids = prompt_of(2)

    def tokens(ids: Tensor, **given: Any) -> Any:
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **SOME, **given)

    second = torch.cat([of_first_rank(lambda: tokens(ids)), more], dim=1)
    expected = of_first_rank(lambda: tokens(second))
    hf.parallelize(model, cp)
    cache = hf.ShardedCache(cp, page_size=4, chunk=8)
    assert torch.equal(tokens(ids, past_key_values=cache), second[:, : PROMPT + NEW])
    assert cache.get_seq_length() == PROMPT + NEW - 1
    assert torch.equal(tokens(second, past_key_values=cache), expected)
    # Of what was cached some is forgotten, and computed again.
    for crop in (-15, second.shape[1] - 9):
        cache.crop(crop)
        assert torch.equal(tokens(second, cache=cache), expected)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    swapped = second[[1, 0]]
    cache.crop(-12)
    assert torch.equal(tokens(swapped, past_key_values=cache), expected[[1, 0]])
    assert cache.cache is not None and cache.cache.version > 0  # it has grown
    cache.reset()
    assert torch.equal(tokens(ids[:1], past_key_values=cache), second[:1, : PROMPT + NEW])
    assert set(cache.cache.lengths) == {cache.rows[0]}


@on_ranks
def test_a_forward_that_fails_leaves_the_cache_as_it_was() -> None:
    model, cp, ids = ready("Llama"), ContextParallel(), prompt_of(2)
    options = {**SOME, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
    expected = of_first_rank(lambda: model.generate(input_ids=ids, **options))
    hf.parallelize(model, cp)
    cache = hf.ShardedCache(cp, page_size=4, chunk=16)
    last = model.model.layers[1]

    def fail(*_: Any) -> None:
        if cache.length > 0:  # the second part of the prompt
            raise OverflowError

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(OverflowError):
        model.generate(input_ids=ids, past_key_values=cache, **options)
    hook.remove()
    assert cache.get_seq_length() == 16
    assert torch.equal(model.generate(input_ids=ids, past_key_values=cache, **options), expected)


def generated(name: str = "Llama", model: Any = None, **changes: Any) -> Any:
    """Generate with a sharded cache, by a model of this name or a given one."""
    cp = ContextParallel()
    if model is None:
        hf.parallelize(model := build(name, **changes.pop("config", {})).eval(), cp)
    options = {"input_ids": prompt_of(1), "past_key_values": hf.ShardedCache(cp), **SOME, **changes}
    return model.generate(**{name: x for name, x in options.items() if x is not None})


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
#: What is refused: arguments of :func:`generated`, and the error's words.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": ({"past_key_values": None}, "past_key_values=ring_torch.hf.ShardedCache"),
    "another cache": ({"past_key_values": DynamicCache()}, "past_key_values=ring_torch.hf.ShardedCache"),
    "max_time": ({"max_time": 3.0}, "max_time: ranks would end at unlike tokens"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus: ranks"),
    "a criterion of time": ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(3.0)])}, "max_time: ranks"),
    "padding on the right": ({"attention_mask": torch.arange(PROMPT)[None] < 30}, "padding has to be to the left"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "got output_hidden_states"),
    "another tensor": ({"token_type_ids": torch.zeros(1, PROMPT).long()}, "token_type_ids"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 32).double()}, "takes input_ids alone"),
    # Models, before anything is computed.
    **({"DeepseekV3": ({"name": "DeepseekV3"}, "DeepseekV3Attention caches latents")} if HAS_LATENTS else {}),
    "Lfm2": ({"name": "Lfm2"}, "Lfm2ShortConv is recurrent"),
    "Qwen3Next": ({"name": "Qwen3NextForCausalLM"}, "Qwen3NextGatedDeltaNet is recurrent"),
    "GlmMoeDsa": ({"name": "GlmMoeDsaForCausalLM"}, r"\(DSA\), which reads all keys|cannot be split"),
    "dynamic": ({"config": DYNAMIC}, "turns keys by the length of the sequence"),
    "Llama4": ({"name": "Llama4"}, "layers of type chunked_attention"),
    "Bloom": ({"name": "BloomForCausalLM"}, "BloomAttention writes out its own attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_generate_refuses(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises((ValueError, UnsupportedError), match=message):
        generated(**arguments)


# (Since transformers 5.24 it is called `cache`.)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_only_rings_attention_reads_a_sharded_cache() -> None:
    model, cp = ready("Llama"), ContextParallel()
    refused(r"call hf.parallelize\(model, cp\) first", generated, model=model)
    hf.parallelize(model, cp)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match=r"could be read|only Ring's attention reads"):
        generated(model=model, past_key_values=hf.ShardedCache(cp))
    refused("another ContextParallel", generated, model=model)


UNLIKE: dict[str, tuple[Callable[[int], Any], str]] = {
    "generators": (torch.manual_seed, "random generators"),
    "tokens": (int, "digest of input_ids"),
}


@pytest.mark.parametrize("name", UNLIKE)
@on_ranks
def test_ranks_that_drift_are_told(rank: int, name: str) -> None:
    change, message = UNLIKE[name]
    group: Any = dist.new_group()  # which cannot go on after an error
    cp, model, ids = ContextParallel(group), build("Llama").eval(), prompt_of(1)
    hf.parallelize(model, cp)
    torch.manual_seed(0)
    changed = change(rank)
    ids[0, 3] += changed if name == "tokens" else 0
    with pytest.raises(RankMismatchError, match=message):
        generated(model=model, input_ids=ids, past_key_values=hf.ShardedCache(cp))
