"""Models of transformers that would be wrong on split sequences are refused before they run."""

from __future__ import annotations

import gc
import re
import warnings
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from hf_models import build
from on_ranks import on_ranks
from sweep.tiny import config_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import batch as batch_by_hand
from ring_torch.hf.batch import _REPORTS
from ring_torch.hf.models.check import report_of
from ring_torch.local import LocalRanks

TOKENS = torch.randint(4, 40, (2, 22), generator=torch.Generator().manual_seed(5))

#: Models by what their report says: they pool, mix tokens by other means, are exact with the hooks
#: of ``hf.parallelize`` only, not with a sharded batch, or with both.
MODELS = {
    "pooled": (
        "LlamaForSequenceClassification BertForSequenceClassification"
        " ModernBertForSequenceClassification BertForMultipleChoice"
        " BertForNextSentencePrediction BertForPreTraining BertModel"
        " RobertaForSequenceClassification CLIPTextModel"
    ),
    "mixing": (
        "RwkvForCausalLM FNetForMaskedLM CpmAntForCausalLM MobileBertForMaskedLM"
        " T5EncoderModel ViTForImageClassification BltForCausalLM"
    ),
    "hooked": (
        "FalconH1ForCausalLM Qwen3NextForCausalLM BloomForCausalLM BartForCausalLM"
        " T5ForConditionalGeneration Llama4ForCausalLM EsmForMaskedLM FalconForCausalLM"
        " GPTNeoForCausalLM XGLMForCausalLM BartForConditionalGeneration"
        " M2M100ForConditionalGeneration"
    ),
    "exact": (
        "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM"
        " Gemma2ForCausalLM Gemma3ForCausalLM GptOssForCausalLM MixtralForCausalLM"
        " DeepseekV3ForCausalLM BertLMHeadModel BertForMaskedLM RobertaForMaskedLM"
        " XLMRobertaForMaskedLM ModernBertForMaskedLM LlamaForQuestionAnswering"
    ),
}  # fmt: skip
NAMES = [f"{name}-{kind}" for kind, names in MODELS.items() for name in names.split()]
REFUSALS = {"pooled": "cannot be split", "mixing": "cannot be split", "hooked": r"hf\.parallelize"}


def on_meta(name: str, **changes: Any) -> Any:
    """Build a model on the meta device, which cannot run."""
    cls = getattr(transformers, name)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # about empty weights
        model = cls._from_config(config_of(cls.config_class.model_type, cls, **changes))
    model.register_forward_pre_hook(_must_not_run)
    return model


def _must_not_run(*_: object) -> None:
    raise AssertionError("a forward was run")


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration", "XGLM")
@pytest.mark.parametrize("case", NAMES)
def test_what_a_report_says(case: str) -> None:
    name, kind = case.split("-")
    model = on_meta(name)
    report = hf.check_model(model)
    assert report.exact is (kind in ("hooked", "exact"))
    assert bool(report.reasons) is not report.exact
    assert report.pooling is not None or kind != "pooled"
    if kind in REFUSALS:
        assert report.hooks or kind != "hooked"
        with pytest.raises(UnsupportedError, match=REFUSALS[kind]):
            hf.shard_batch(ContextParallel(), {"input_ids": TOKENS}, model=model)
        return
    assert report.pooling is None
    assert len(report.layers) >= 2
    assert report.position_offset == (2 if "oberta" in name.lower() else 0)
    assert report.shifts_labels is not name.endswith("MaskedLM")


def test_what_pools_nothing_is_exact() -> None:
    config: Any = config_of("bert", transformers.BertModel)
    model = transformers.BertModel(config, add_pooling_layer=False)
    report = hf.check_model(model)
    assert report.exact and report.pooling is None


class PooledOutput(transformers.LlamaForCausalLM):
    """A user's model with one output per sequence."""

    def forward(self, input_ids: Tensor, **_: Any) -> SequenceClassifierOutputWithPast:
        """Never run; only this code is read."""
        raise NotImplementedError(input_ids)


class OwnAttention(nn.Module):
    """Attention that does not use transformers' registry."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Never run; only this code is read."""
        return torch.nn.functional.scaled_dot_product_attention(
            hidden_states, hidden_states, hidden_states
        )


class AliasedAttention(nn.Module):
    """Attention that uses transformers' registry by another name."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Never run; only this code is read."""
        return _attend(hidden_states)


def _attend(x: Tensor) -> Tensor:
    out: Tensor = REGISTRY["sdpa"](x)
    return out


@pytest.mark.parametrize(
    ("part", "is_exact"),
    [
        (nn.Conv1d(32, 32, 3, padding=1), False), (nn.Conv1d(32, 32, 1), True),
        (nn.LSTM(32, 32), False), (nn.Linear(32, 32), True),
    ],
)  # fmt: skip
def test_parts_that_users_add(part: nn.Module, is_exact: bool) -> None:
    model: Any = build("LlamaForCausalLM")
    model.model.layers[0].mlp.extra = part
    assert hf.check_model(model).exact is is_exact


@pytest.mark.parametrize(("kind", "is_exact"), [(OwnAttention, False), (AliasedAttention, True)])
@pytest.mark.parametrize("all_layers", [False, True])
def test_attention_that_users_write(
    kind: type[nn.Module], is_exact: bool, all_layers: bool
) -> None:
    model: Any = build("LlamaForCausalLM")
    for layer in model.model.layers if all_layers else model.model.layers[:1]:
        layer.self_attn = kind()
    assert hf.check_model(model).exact is is_exact


def test_heads_that_users_write() -> None:
    model = PooledOutput(config_of("llama", transformers.LlamaForCausalLM))  # type: ignore[arg-type]
    assert hf.check_model(model).pooling == "SequenceClassifierOutputWithPast"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("MvpForConditionalGeneration", {"use_prompt": True}, "use_prompt.*set it to"),
        (
            "ModernBertForMaskedLM", {"sparse_prediction": True, "sparse_pred_ignore_index": -1},
            "sparse_pred_ignore_index.*set it to",
        ),
        ("MixtralForCausalLM", {"output_router_logits": True}, "output_router_logits"),
    ],
)  # fmt: skip
def test_switches_that_a_call_would_refuse(
    name: str, changes: dict[str, Any], message: str
) -> None:
    """A switch of the config that makes splitting impossible is a reason of ``check_model``.

    Class: ``check_model`` calls a model exact, and its forward is refused. ``tests/sweep`` tries
    the switches of every class.
    """
    assert hf.check_model(on_meta(name)).exact
    (reason,) = hf.check_model(on_meta(name, **changes)).reasons
    assert re.search(message, reason)


def test_the_routers_loss_within_a_users_module() -> None:
    """A model in a user's module is judged like the model itself, and gets no router loss hook."""
    model = on_meta("MixtralForCausalLM", output_router_logits=True)
    wrapped = nn.ModuleDict({"inner": model})
    assert hf.check_model(wrapped).reasons == hf.check_model(model).reasons != ()
    assert report_of(wrapped, joins_router=True).exact
    with pytest.raises(ValueError, match="must be a model of transformers"):
        hf.parallelize(wrapped, ContextParallel())
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        hf.shard_batch(ContextParallel(), {"input_ids": TOKENS}, model=wrapped)


def test_modules_that_are_none_of_transformers() -> None:
    assert hf.check_model(nn.Linear(2, 2)) == hf.ModelReport()
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        hf.check_model("llama")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="model"):
        hf.shard_batch(ContextParallel(), {"input_ids": TOKENS})  # type: ignore[call-arg]  # wrong on purpose


class Peft(nn.Module):
    """A wrapper like PEFT's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> Any:
        """Return the model that has the adapters."""
        return self.base_model


def test_prompts_that_peft_puts_before_a_sequence_are_refused() -> None:
    model: Any = Peft(build("LlamaForCausalLM"))
    assert hf.check_model(model).exact
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    assert not hf.check_model(model).exact


class Task(nn.Module):
    """A user's module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "RobertaForSequenceClassification"])
@pytest.mark.parametrize("wrap", [Peft, Task, torch.compile, lambda x: torch.compile(Peft(x))])
def test_wrapped_models_count_as_what_is_wrapped(name: str, wrap: Any) -> None:
    model = build(name)
    expected = hf.check_model(model)
    assert expected.position_offset == 2
    assert hf.check_model(wrap(model)) == expected


@on_ranks
def test_models_wrapped_for_data_parallelism() -> None:
    for name in ("RobertaForMaskedLM", "RobertaForSequenceClassification"):
        expected = hf.check_model(build(name))
        assert hf.check_model(DistributedDataParallel(build(name))) == expected
        model = build(name)
        fully_shard(model)
        assert hf.check_model(model) == expected


def test_a_model_is_checked_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []

    def counted(model: nn.Module) -> hf.ModelReport:
        calls.append(model)
        return hf.check_model(model)

    monkeypatch.setattr(batch_by_hand, "check_model", counted)
    cp, model = ContextParallel(), build("BertForMaskedLM")
    for _ in range(3):
        hf.shard_batch(cp, {"input_ids": TOKENS}, model=model)
    assert calls == [model] and model in _REPORTS
    kept = ref(model)
    del model
    calls.clear()
    gc.collect()
    assert kept() is None


def _refused_alone(rank: int, name: str, message: str) -> None:
    """Refuse a batch on one rank alone: if it sent anything, it would wait for the other."""
    model = build(name)
    report, labels = hf.check_model(model), {} if message == "pools" else {"labels": TOKENS}
    assert message in (report.no_labels or "; ".join(report.reasons))
    assert report.exact == bool(labels)
    if rank == 0:
        with pytest.raises(UnsupportedError, match=message):
            hf.shard_batch(ContextParallel(), {"input_ids": TOKENS, **labels}, model=model)
    if labels:  # the model itself is exact
        hf.shard_batch(ContextParallel(), {"input_ids": TOKENS}, model=model)


#: Losses that read the mask.
NO_LABELS = (
    "BioGptForTokenClassification", "XLMRobertaXLForTokenClassification", "ElectraForPreTraining",
    "GraniteSpeechForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", *NO_LABELS])
def test_it_is_refused_before_anything_is_sent(pool: LocalRanks, name: str) -> None:
    """A report says what a call refuses: models, and losses."""
    pool.run(_refused_alone, name, "leave labels out" if name in NO_LABELS else "pools")
