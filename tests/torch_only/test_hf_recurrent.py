"""Recurrent layers of transformers split over the ranks of a ring."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_models import Wide, whole
from sweep.compare import build
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import mixers
from ring_torch.hf.models.code import forward_of
from ring_torch.hf.models.recurrent import REPLACED
from ring_torch.local import LocalRanks

#: A model of each family whose layers are split.
FAMILIES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Zamba2ForCausalLM": "zamba2",
    "Mamba2ForCausalLM": "mamba2",
    "JambaForCausalLM": "jamba",
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "falcon_mamba",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "MiniMaxForCausalLM": "minimax",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
}
#: Models without attention, which take no positions.
SCANS_ALONE = ("Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM")
LIMIT = 1e-10


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def trained(name: str, kind: str) -> Any:
    """Build a model in training, whose layers then call fused functions first."""
    model = build(name, kind)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "decay_factors"):  # powers of decays, which MiniMax rounds to float32
            powers = part.decay_factors(part.slope_rate)
            part.query_decay, part.key_decay, part.diagonal_decay = powers
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "attention_dropout"):
            config.attention_dropout = 0.0
    return model.train()


def result(model: Any, *batches: dict[str, Any], wide: bool = True) -> dict[str, Tensor]:
    """Return the sum of the losses of batches, and all its gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        with Wide() if wide else nullcontext():
            loss = model(**batch).loss
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    grads = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
    return {"loss": total, **grads}


def alone(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return each document of a packed batch as a batch of its own, with its part of the loss."""
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    count, documents = int((labels != -100).sum()), []
    for row, positions in enumerate(batch["position_ids"]):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(bounds):
            part = {"input_ids": batch["input_ids"][row : row + 1, start:end]}
            own = labels[row : row + 1, start:end]
            documents.append(
                part | {"labels": own, "shift_labels": own, "num_items_in_batch": count, "use_cache": False}
            )  # fmt: skip
    return documents


def check(
    expected: dict[str, Tensor], actual: dict[str, Tensor], what: str = "", limit: float = LIMIT
) -> None:
    for name, x in expected.items():
        own = actual.get(name, torch.zeros_like(x))
        error, size = float((own - x).abs().max()), float(x.abs().max())
        assert error <= limit * size + limit**2, f"{what}: {name} is off by {error} of {size}"


def summed(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum the ranks' parts of gradients."""
    for name in parts.keys() - {"loss"}:
        dist.all_reduce(parts[name])
    return parts


def _family(_: int, name: str, kind: str, layout: Any) -> None:
    quiet()
    model, batch = trained(name, FAMILIES[name]), whole(kind)
    one_process = alone(batch) if kind == "packed" else [batch | {"use_cache": False}]
    assert hf.check_model(model).whole_layers == ()
    expected = result(model, *one_process)
    if name in SCANS_ALONE and kind == "packed":
        batch["seq_idx"] = (batch.pop("position_ids") == 0).cumsum(1)
    handle = hf.parallelize(model, ContextParallel(layout=layout), recurrent="split")
    check(expected, summed(result(model, batch)), f"{name}, {kind}, {layout}")
    handle.remove()
    check(expected, result(model, *one_process), "removed")


@pytest.mark.refused_in("5.14", *(name for name in FAMILIES if "RecurrentGemma" not in name))
@pytest.mark.nightly(
    unless=[
        *(f"Qwen3NextForCausalLM-{kind}-contiguous" for kind in ("right", "left", "packed")),
        *(f"{name}-packed-zigzag" for name in FAMILIES if "Moe" not in name),
    ]
)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(two: LocalRanks, name: str, kind: str, layout: str) -> None:
    """Compare loss and all gradients with one process, those of packed rows with each document."""
    two.run(_family, name, kind, layout)


def _documents(_: int) -> None:
    """State documents in every way that a batch has."""
    quiet()
    model, batch = trained("Qwen3NextForCausalLM", "qwen3_next"), whole("flattened")
    expected = result(model, *alone(batch))
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 43]
    offsets, numbers = torch.tensor(starts), (batch.pop("position_ids") == 0).cumsum(1)
    hf.parallelize(model, ContextParallel(), recurrent="split")
    for stated in (
        {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets},
        {"seq_idx": numbers}, {"attention_mask": numbers},
    ):  # fmt: skip
        check(expected, summed(result(model, {**batch, **stated})), str([*stated]))


def _documents_between_padding(_: int) -> None:
    """Pad between numbered documents, each of which is compared with itself alone."""
    quiet()
    model, batch = trained("BambaForCausalLM", "bamba"), whole("packed")
    mask = torch.zeros_like(batch["input_ids"])
    for row, (start, end, number) in (
        (0, (3, 9, 1)),
        (0, (12, 30, 2)),
        (1, (0, 20, 1)),
        (1, (20, 43, 2)),
    ):
        mask[row, start:end] = number
    first = torch.nn.functional.pad(mask.diff(dim=1), (1, 0), value=1) != 0
    positions = torch.arange(43).expand(2, -1)
    begun = torch.where(first, positions, 0).cummax(1).values
    labels = batch["labels"].masked_fill((mask == 0) | first, -100)
    packed = {"input_ids": batch["input_ids"], "position_ids": positions - begun, "labels": labels}
    # What is padding has no label, and is a document of its own to the whole model.
    expected = result(model, *alone(packed))
    hf.parallelize(model, ContextParallel(), recurrent="split")
    own = {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}
    check(expected, summed(result(model, own)))


def _checkpointed(_: int, name: str, is_reentrant: bool) -> None:
    quiet()
    model, batch = trained(name, FAMILIES[name]).float(), whole("packed")
    hf.parallelize(model, ContextParallel(), recurrent="split")
    expected = result(model, batch, wide=False)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    check(expected, result(model, batch, wide=False), limit=1e-6)


def _copied(_: int) -> None:
    """Change the copy's weights: it computes with its own, also between its original's calls."""
    quiet()
    model, batch = build("JambaForCausalLM", "jamba"), whole("right")
    hf.parallelize(model, ContextParallel(), recurrent="split")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    unsplit = build("JambaForCausalLM", "jamba")
    expected = result(unsplit, batch | {"use_cache": False})
    unsplit.load_state_dict(other.state_dict())
    changed = result(unsplit, batch | {"use_cache": False})
    for each, whole_result in ((other, changed), (model, expected), (other, changed)):
        check(whole_result, summed(result(each, batch)))


def _compiled(_: int) -> None:
    quiet()
    model, batch = build("Qwen3NextForCausalLM", "qwen3_next"), whole("right")
    expected = result(model, batch | {"use_cache": False})
    hf.parallelize(model, ContextParallel(), recurrent="split")
    compiled = torch.compile(model, backend="eager")
    for _time in range(2):
        actual = summed(result(compiled, batch))
        check(expected, {n.removeprefix("_orig_mod."): x for n, x in actual.items()})


def _reduced(_: int) -> None:
    """Sum gradients by cp.reduce_gradients, those of the layers' own weights too."""
    quiet()
    model, batch = build("FalconH1ForCausalLM", "falcon_h1"), whole("left")
    expected, cp = result(model, batch | {"use_cache": False}), ContextParallel()
    hf.parallelize(model, cp, recurrent="split")
    loss = result(model, batch)["loss"]
    cp.reduce_gradients(model)
    grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
    assert {"A_log", "D", "dt_bias"} <= {n.rpartition(".")[2] for n in grads}
    check(expected, {"loss": loss, **grads})


def _wrapped(_: int) -> None:
    """Train in DDP and in FSDP, which gathers the weights that a layer's own forward reads."""
    quiet()
    for wrapper in ("ddp", "fsdp"):
        model, batch = trained("Qwen3NextForCausalLM", "qwen3_next"), whole("packed")
        expected = result(model, *alone(batch))
        outer: Any = model
        if wrapper == "ddp":
            outer = DistributedDataParallel(model)
        else:
            for layer in (*model.model.layers, model):
                fully_shard(layer)
        hf.parallelize(outer, ContextParallel(), reduction="mean", recurrent="split")
        outer.zero_grad()
        with Wide():
            loss = outer(**batch).loss
        loss.backward()
        grads = {
            n: x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
            for n, x in model.named_parameters()
            if x.grad is not None
        }
        check(expected, {"loss": loss.detach(), **grads}, wrapper)


def _whole_on_request(_: int) -> None:
    quiet()
    model, batch = build("Zamba2ForCausalLM", "zamba2"), whole("right")
    expected = result(model, batch | {"use_cache": False})
    ways: list[tuple[Any, Any]] = [("zigzag", "whole"), ("striped", "auto")]
    for layout, way in ways:
        handle = hf.parallelize(model, ContextParallel(layout=layout), recurrent=way)
        check(expected, summed(result(model, batch)), layout)
        handle.remove()


def _whole_where_states_are_larger(_: int) -> None:
    """Run a short batch whole, and a longer one split, whose hidden states have more bytes."""
    quiet()
    model, long = build("Qwen3NextForCausalLM", "qwen3_next"), whole("plain")
    short = {name: x[:, :8] for name, x in long.items()}
    batches = [short, long, short]
    expected = [result(model, batch | {"use_cache": False}) for batch in batches]
    hf.parallelize(model, ContextParallel())
    layer = model.model.layers[0].linear_attn
    for batch, right, is_whole in zip(batches, expected, (True, False, True), strict=True):
        with patch.object(
            mixers.WholeLayer, "gather", autospec=True, side_effect=mixers.WholeLayer.gather
        ) as gather:
            check(right, summed(result(model, batch)), f"whole: {is_whole}")
        assert is_whole == any(layer in call.args for call in gather.call_args_list)


def _convolution_of_striped_tokens(_: int) -> None:
    quiet()
    model, batch = build("Lfm2ForCausalLM", "lfm2"), whole("packed")
    expected = result(model, *alone(batch))
    hf.parallelize(model, ContextParallel(layout="striped"), recurrent="split")
    check(expected, summed(result(model, batch)))


def _other_activation(_: int) -> None:
    """Activate the convolution by a function that the operation does not have."""
    quiet()
    model, batch = build("Qwen3NextForCausalLM", "qwen3_next", hidden_act="gelu"), whole("plain")
    assert model.model.layers[0].linear_attn.activation == "gelu"
    expected = result(model, batch | {"use_cache": False})
    hf.parallelize(model, ContextParallel(), recurrent="split")
    check(expected, summed(result(model, batch)))


@pytest.mark.refused_in("5.14", "documents", "convolution", "wrapped")
@pytest.mark.parametrize(
    "job",
    [
        _documents, _documents_between_padding, _whole_where_states_are_larger, _copied, _compiled, _reduced, _wrapped, _whole_on_request,
        _convolution_of_striped_tokens,
        _other_activation,
    ],
    ids=lambda job: job.__name__.strip("_"),
)  # fmt: skip
def test_a_split_model(two: LocalRanks, job: Callable[[int], None]) -> None:
    two.run(job)


@pytest.mark.refused_in("5.14")
@pytest.mark.nightly(
    unless=["Qwen3NextForCausalLM-reentrant", "NemotronHForCausalLM-not-reentrant"]
)
@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize(
    "name",
    ["Qwen3NextForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM"],
)
def test_checkpointing(two: LocalRanks, name: str, is_reentrant: bool) -> None:
    two.run(_checkpointed, name, is_reentrant)


def parallelized(name: str = "Qwen3NextForCausalLM", **options: Any) -> Any:
    quiet()
    model = build(name, FAMILIES[name])
    layout = options.pop("layout", "zigzag")
    return model, hf.parallelize(model, ContextParallel(layout=layout), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: parallelized(recurrent="split", layout="striped"),
            "recurrent='split': striped layout", id="striped",
        ),
        pytest.param(
            lambda: parallelized(recurrent="whole")[0](**whole("packed")),
            r"packed documents: .*\(recurrent='whole'\)", id="packed-and-whole",
        ),
        pytest.param(
            lambda: parallelized()[1].verify(whole("packed")), "start again.*give one document",
            id="packed-and-verified",
        ),
        pytest.param(lambda: parallelized(recurrent="halves"), "unknown recurrent 'halves'", id="unknown"),
    ],
)  # fmt: skip
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.refused_in("5.14")
def test_a_layer_is_given_no_cache() -> None:
    model, _ = parallelized("Lfm2ForCausalLM")
    assert hf.check_model(model).whole_layers == ()

    def give(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        name = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
        return args, {**kwargs, name: transformers.DynamicCache(config=model.config)}

    model.model.layers[0].conv.register_forward_pre_hook(give, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match=r"Lfm2ShortConv is split .* there is no cache"):
        model(**whole("plain"))


@pytest.mark.refused_in("5.14")
def test_a_function_that_may_mix_tokens() -> None:
    """Let a layer's forward call a function that the table does not know."""
    model = build("Qwen3NextForCausalLM", "qwen3_next")
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
    model = build("Lfm2ForCausalLM", "lfm2")
    layer = model.model.layers[0].conv
    handle = hf.parallelize(model, ContextParallel(), recurrent="split")
    assert hf.check_model(model).whole_layers == ()
    handle.remove()
    assert "forward" not in vars(layer)
    layer.forward = layer.forward
    assert "was replaced" in hf.check_model(model).whole_layers[0]


def test_other_models_keep_their_functions() -> None:
    """Parallelize one model: another of its class, in the same process, computes whole."""
    model, batch = build("Lfm2ForCausalLM", "lfm2"), whole("right") | {"use_cache": False}
    expected = result(model, batch)
    parallelized("Lfm2ForCausalLM")
    check(expected, result(model, batch))


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
