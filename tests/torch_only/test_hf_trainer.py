"""Trainers on rings train, evaluate, predict and resume as on one device.

Plain ones and those of TRL, parallelized; those whose weights FSDP2 shards over data x ring; and
those that sample on each ring.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from accelerate import ParallelismConfig
from hf_models import build
from on_ranks import on_two_ranks
from packaging.version import Version
from sharded import MESHES, sharded, trainer_on
from torch import Tensor
from trained import arguments, be_started, collate, documents, session, trained
from transformers import Trainer
from trl_trained import TRAINERS, sampled, trl_trained

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.comm.ranks import ranks_of
from ring_torch.hf import rollouts
from ring_torch.hf.rollouts import check_rollouts
from ring_torch.hf.trainer_settings import TESTED_OF_TRL, untested_of_trl
from ring_torch.local import LocalRanks

TINY = 1e-6  # values are about 5


def alone(pools: dict[int, LocalRanks], dp_size: int, function: Any, *arguments: Any) -> Any:
    """Return what one device of each ring computes without one."""
    return pools[dp_size].run(function, dp_size, None, *arguments)[0]


def on_rings(pools: dict[int, LocalRanks], dp_size: int, function: Any, *arguments: Any) -> Any:
    """Return what each rank of rings of two computes."""
    return pools[2 * dp_size].run(function, 2 * dp_size, 2, *arguments)


def check_twice(ring: Any, plain: Any, exact: Any) -> None:
    """Check that errors against float64 are at most twice those of one device in this dtype."""
    ring, plain, exact = (torch.tensor(x, dtype=torch.float64) for x in (ring, plain, exact))
    assert ring.shape == plain.shape == exact.shape
    for column in range(exact.shape[1]):  # losses and gradient norms
        error, allowed = ((x - exact)[:, column].norm() for x in (ring, plain))
        assert error <= 2 * allowed + TINY * len(exact) ** 0.5


@dataclass(frozen=True)
class Steps:
    """Steps of a Trainer in float64: Adam makes chance of the rounding of float32 in a few of them.

    Attributes:
        options: Options of the Trainer, and ``logits`` of ``hf.parallelize``.
        data: Arguments of :func:`trained.documents`, or ``is_stream``.
        changes: Changes of the model's config.
        unlike: Options and changes of a run with another first loss.
        name: The model.
        dp_size: Number of rings.
    """

    options: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    unlike: tuple[dict[str, Any], dict[str, Any]] | None = None
    name: str = "Llama"
    dp_size: int = 1


def steps() -> Iterator[Any]:
    """Yield steps with their ids, and those of them that run for each change."""
    daily = (
        "matrix-1-True-0.1-1",
        "no labels",
        "token classifier-True-2",
        "whole logits-1",
        "router-True",
        "noise",
        "noise-LoRA",
    )

    def row(key: str, *arguments: Any, **fields: Any) -> Any:
        marks = [] if key in daily else [pytest.mark.nightly]
        return pytest.param(Steps(*arguments, **fields), id=key, marks=marks)

    def averages(x: bool) -> dict[str, Any]:
        return {"average_tokens_across_devices": x}

    def accumulated(steps: int) -> dict[str, Any]:
        return {"gradient_accumulation_steps": steps}

    for count, x, smoothing, dp_size in product((1, 4), (True, False), (0.0, 0.1), (1, 2)):
        options = accumulated(count) | averages(x) | {"label_smoothing_factor": smoothing}
        yield row(f"matrix-{count}-{x}-{smoothing}-{dp_size}", options, dp_size=dp_size)
    yield row("no labels", averages(False), {"masked_tail": True})
    for name in ("Qwen3", "Gemma3", "GptOss", "Mixtral", "DeepseekV3", "LoRA"):
        yield row(f"family-{name}", accumulated(4), name=name)
    yield row("autocast", {"bf16": True})
    few, gather = accumulated(2) | {"max_steps": 3}, {"logits": "gather"}
    for dp_size in (1, 2):
        yield row(f"stream-{dp_size}", few, {"is_stream": True}, dp_size=dp_size)
        yield row(f"whole logits-{dp_size}", few | gather, dp_size=dp_size)
    for x, count in product((True, False), (1, 2)):
        options = averages(x) | accumulated(count) | {"max_steps": 3}
        head = {"head": "ForTokenClassification", "num_labels": 61, "classifier_dropout": 0.0}
        yield row(f"token classifier-{x}-{count}", options, {"rows": 16}, head)
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    for x in (True, False):
        options = averages(x) | {"max_steps": 5}
        yield row(f"router-{x}", options, {"rows": 16}, changes, (options, {}), name="Mixtral")
    # NEFTune's strength is that of the whole odd length, its numbers are those of one device.
    few = {"max_steps": 3}
    for suffix, more, name, dp_size in (
        ("", {}, "Llama", 1), ("-LoRA", {}, "LoRA", 1), ("-gather", gather, "Llama", 1),
        ("-accumulated", accumulated(3), "Qwen3", 1), ("-two rings", {}, "Llama", 2),
    ):  # fmt: skip
        options = {"neftune_noise_alpha": 5.0, **few, **more}
        rest: dict[str, Any] = {"unlike": (few | more, {}), "name": name, "dp_size": dp_size}
        yield row(f"noise{suffix}", options, {"rows": 16}, **rest)


@pytest.mark.refused_in("5.14", "token classifier-True")
@pytest.mark.parametrize("x", [*steps()])
def test_steps_are_those_of_one_device(pools: dict[int, LocalRanks], x: Steps) -> None:
    settings = (x.dp_size, trained, x.name, "float64", x.data)
    expected = alone(pools, *settings, x.options, x.changes)
    assert len(expected) == x.options.get("max_steps", 20)
    if x.unlike is not None:
        assert abs(alone(pools, *settings, *x.unlike)[0][0] - expected[0][0]) > 1e-3
    for rank in on_rings(pools, *settings, x.options, x.changes):
        if x.unlike is None:  # losses of several rings may be logged in float32
            check_twice(rank, expected, expected)
        else:
            torch.testing.assert_close(rank, expected, rtol=1e-9, atol=0)


@pytest.mark.nightly(unless=["1"])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_whole_session(pools: dict[int, LocalRanks], tmp_path: Path, dp_size: int) -> None:
    """Two rings read pairs of batches, like two devices without a ring."""
    # Older versions resume on CPUs in one process only: they look for "cpu:0".
    resumes = Version(transformers.__version__) >= Version("5.20")
    expected = alone(pools, dp_size, session, str(tmp_path / "one"), resumes)
    for results in on_rings(pools, dp_size, session, str(tmp_path / "ring"), resumes):
        assert results["predictions"].shape[0] == results["labels"].shape[0] == 7
        for name, value in expected.items():
            if name in ("tokens", "samples", "keys"):
                assert results[name] == value, name
            elif name == "operations":
                assert results[name] == pytest.approx(value, rel=1e-3)
            else:
                close(results[name], value, name)
        close(results["resumed"], results["history"], "history of what was resumed")


def _negative(outputs: Any) -> Any:
    return -outputs["logits"].mean()


class _LossByFunction(Trainer):
    """Reads logits in a function that its loss calls."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return _negative(model(**inputs))


class _LossByMethod(_LossByFunction):
    """Reads logits in a method that a class below its own calls."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return self.of(model(**inputs)) + super().compute_loss(model, inputs).detach()

    def of(self, outputs: Any) -> Any:
        return getattr(outputs, "logits").sum()  # noqa: B009 - the name is a string


class _OwnPrediction(Trainer):
    """Reads logits outside of its loss, where they are joined."""

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return None, model(**inputs).logits, None


@on_two_ranks
def test_mistakes_are_named(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    cp = ContextParallel()
    alone: list[Any] = [dist.new_group([n]) for n in range(2)]

    def built(data: Any = None, **options: Any) -> Any:
        return Trainer(
            build("Llama").float(), arguments(tmp_path, **options), collate, data or documents()
        )

    def refused(error: type, message: str, trainer: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            hf.parallelize(trainer, cp, **options)
        assert not trainer.model._forward_pre_hooks and "get_tp_size" not in vars(trainer)

    trainer = built()
    refused(ValueError, "takes the mean", trainer, reduction="sum")
    trainer.compute_loss_func = lambda *_, **__: None
    refused(ValueError, "logits='gather'", trainer)
    for kind in (_LossByFunction, _LossByMethod):
        args = arguments(tmp_path)
        refused(
            ValueError, "reads logits", kind(build("Llama").float(), args, collate, documents())
        )
    trainer = _OwnPrediction(build("Llama").float(), arguments(tmp_path), collate, documents())
    hf.parallelize(trainer, cp).remove()
    refused(UnsupportedError, "batch_rebalance", built(train_sampling_strategy="batch_rebalance"))
    trainer = built()
    trainer.generate_during_eval = True  # as of CPO and ORPO
    refused(UnsupportedError, "generate_during_eval", trainer)
    streams = {"accelerator_config": {"dispatch_batches": True}}
    refused(UnsupportedError, "dispatch_batches", built(**streams))
    cp, ring = ContextParallel(alone[rank] if rank else None), cp  # ranks 0 and 1, and 1 alone
    refused(ValueError, "in one ring", built())
    # A model that was parallelized before stays so: after an error, and after the Trainer's remove.
    trainer = built()
    earlier = hf.parallelize(trainer.model, cp, reduction="mean")
    with pytest.raises(ValueError, match="in one ring"):
        hf.parallelize(trainer, cp)
    assert trainer.model._forward_pre_hooks and "get_tp_size" not in vars(trainer)
    earlier.remove()
    trainer.ref_model = torch.nn.Linear(2, 2)
    refused(ValueError, "must be a model of transformers", trainer)
    del trainer.ref_model
    earlier = hf.parallelize(trainer.model, ring, reduction="mean")
    handle = hf.parallelize(trainer, ring)
    handle.remove()
    assert trainer.model._forward_pre_hooks and "get_tp_size" not in vars(trainer)
    # Removing the model's own handle first undoes the Trainer's changes, which need it split.
    handle = hf.parallelize(trainer, ring)
    earlier.remove()
    assert not trainer.model._forward_pre_hooks and "get_tp_size" not in vars(trainer)
    attributes = {*vars(trainer)}, {*vars(trainer.accelerator)}
    for _time in range(2):
        handle = hf.parallelize(trainer, ring)
        assert hf.parallelize(trainer, ring) is handle
        handle.remove()
        assert attributes == ({*vars(trainer)}, {*vars(trainer.accelerator)})
    rows = documents()
    other = built([*rows[: rank + 5], *rows])
    hf.parallelize(other, ring)
    with pytest.raises(RankMismatchError, match="same samples"):
        other.train()


@on_two_ranks
def test_models_that_are_set_later_are_never_computed_whole(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    ring = ContextParallel()
    trainer: Any = Trainer(build("Llama").float(), arguments(tmp_path), collate, documents())
    handle = hf.parallelize(trainer, ring)
    trainer.ref_model = build("Llama").float()
    batch = collate(documents()[:2])
    for call in (
        trainer.train,
        lambda: handle.verify(batch),
        lambda: hf.verify(trainer, ring, batch),
    ):
        with pytest.raises(ValueError, match="ref_model was set after"):
            call()
    assert hf.parallelize(trainer, ring) is handle and trainer.ref_model._forward_pre_hooks
    trainer.model, model = build("Llama").float(), trainer.model
    with pytest.raises(ValueError, match=r"not the one that hf\.parallelize has split"):
        trainer.train()
    trainer.model = model
    handle.remove()
    assert not trainer.ref_model._forward_pre_hooks
    # A rank that makes another call is named in the error, and nothing stays changed.
    del trainer.ref_model
    if rank == 0:
        with pytest.raises(RankMismatchError, match="different calls"):
            hf.parallelize(trainer, ring)
        assert not trainer.model._forward_pre_hooks and "get_tp_size" not in vars(trainer)
    else:
        with pytest.raises(RankMismatchError, match="different calls"):
            ring.shift(torch.zeros(1, 4), 1)


@pytest.mark.nightly(unless=["sft", "orpo"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_of_trl(pools: dict[int, LocalRanks], tmp_path: Path, kind: str) -> None:
    """A Trainer is trusted by class, not package: a loss that reads logits needs whole ones."""
    expected = alone(pools, 1, trl_trained, kind, str(tmp_path / "one"))
    assert sum(name.endswith(" loss") for name in expected) == 4
    for steps in on_rings(pools, 1, trl_trained, kind, str(tmp_path / "ring")):
        assert steps == pytest.approx(expected, rel=1e-3, abs=1e-4)


WAYS = ("model first", "LoRA", "compiled", "no logits", "precomputed")


@pytest.mark.nightly(unless=["model first-dpo", "LoRA-dpo", "compiled-kto", "precomputed-dpo"])
@pytest.mark.parametrize(
    ("way", "kind"), [x for x in product(WAYS, ("dpo", "kto", "sft")) if x != (WAYS[-1], "sft")]
)
def test_fused_heads_in_other_ways(
    pools: dict[int, LocalRanks], tmp_path: Path, way: str, kind: str
) -> None:
    """TRL replaces the model's forward when a Trainer is made: before the hooks or after them."""
    expected = pools[1].run(trl_trained, 1, None, kind, str(tmp_path / "one"), way)[0]
    for steps in pools[2].run(trl_trained, 2, 2, kind, str(tmp_path / "ring"), way):
        assert steps == pytest.approx(expected, rel=1e-3, abs=1e-4)


def close(actual: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, x in expected.items():
            close(actual[name], x, f"{what} {name}")
        return
    actual, expected = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
        for x in (actual, expected)
    )
    torch.testing.assert_close(
        actual, expected, rtol=1e-3, atol=1e-4, msg=lambda text: f"{what}: {text}"
    )


KINDS = ("trainer", "sft", "dpo", "kto", "reward")
PARALLELIZE = r"leave parallelism_config and fsdp out and call hf\.parallelize\(trainer, cp\), which .* Trainer's own DDP"
#: Trainers that no mesh serves, and what is said of another way.
REFUSED = {
    "trl.trainer.grpo_trainer.GRPOTrainer": PARALLELIZE,
    "trl.trainer.rloo_trainer.RLOOTrainer": PARALLELIZE,
    "trl.trainer.distillation_trainer.DistillationTrainer": r"nor does hf\.parallelize take it",
    "trl.experimental.orpo.orpo_trainer.ORPOTrainer": PARALLELIZE,
}


@dataclass(frozen=True)
class ShardedSteps:
    """Steps of a Trainer: with accumulation, clipped gradients, evaluations and a checkpoint.

    Attributes:
        kind: "trainer", or a Trainer of TRL.
        mesh: Key of :data:`sharded.MESHES`, or "none".
        options: Options of the arguments.
        settings: Settings of FSDP2.
        resumed: Mesh on which the second half runs again, from the checkpoint.
        split: Ranks that hold different parts of ``layers.0.mlp.down_proj.weight``.
        tolerance: Relative error.
    """

    kind: str
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    resumed: str | None = None
    split: int = 2
    tolerance: float = 1e-6


def sharded_steps() -> Iterator[Any]:
    """Yield steps with their ids, and those of them that run for each change."""
    daily = ("sft on data x ring", "dpo on ring", "bfloat16-trainer")

    def row(key: str, *arguments: Any, **fields: Any) -> Any:
        marks = [] if key in daily else [pytest.mark.nightly]
        if key != "without a mesh":
            marks.append(pytest.mark.refused_in("5.14"))
        return pytest.param(ShardedSteps(*arguments, **fields), id=key, marks=marks)

    others = {
        "ring": "ring of 3",
        "TP": "TP",
        "HSDP": "data of 4 x ring",
        "data x ring": "data x ring of 3",
    }
    for kind, (mesh, other) in product(KINDS, others.items()):
        resumed = None if f"{kind} on {mesh}" == daily[0] else other
        yield row(
            f"{kind} on {mesh}", kind, mesh, resumed=resumed, split=2 if mesh == "ring" else 4
        )
    parts = {"state_dict_type": "SHARDED_STATE_DICT"}
    yield row("parts in files", "sft", "data x ring", {}, parts, "data x ring of 3", 4)
    once = {"cpu_ram_efficient_loading": True, "drifts": True}
    yield row("loaded once", "sft", "ring", {}, once)
    single = {"dtype": torch.float32}
    for kind in KINDS:
        yield row(f"bfloat16-{kind}", kind, "ring", single | {"bf16": True})
        yield row(f"float16-{kind}", kind, "ring", single | {"fp16": True})
    layers = {"activation_checkpointing": True}
    yield row("checkpointed layers", "sft", "ring", single, layers, "ring of 3", tolerance=1e-3)
    compiled = single | {"torch_compile": True, "torch_compile_backend": "eager"}
    yield row("compiled", "sft", "ring", compiled, tolerance=1e-3)
    each = {"average_tokens_across_devices": False}
    yield row("each rank's own mean", "sft", "data x ring", each, split=4)
    yield row("each rank's own mean beside TP", "trainer", "TP", each, split=4)
    for kind in ("sft", "dpo"):
        yield row(f"LoRA-{kind}", kind, "ring", {"LoRA": True}, resumed="ring of 3")
    for logits in ("gather", "none"):
        options = {"logits": logits, "prediction_loss_only": True}
        yield row(f"logits-{logits}", "trainer", "ring", options)
    smooth = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    yield row("smooth labels and noise", "trainer", "data x ring", smooth, split=4)
    models: dict[str, Any] = {
        "a router's loss": ("Mixtral", {"output_router_logits": True}),
        "tied embeddings": ("Llama", {"tie_word_embeddings": True}),
        "recurrent layers": ("Qwen3NextForCausalLM", {}),
    }
    for name, model in models.items():
        options = {"model": model, "prediction_loss_only": True}
        yield row(name, "trainer", "ring", options, resumed="ring of 3")
    yield row("without a mesh", "sft", "none", {"packing": True})


def check(mine: Any, theirs: Any, tolerance: float, *, resumed: bool = False) -> None:
    """Compare what a rank returned with what one process did."""
    # TRL counts tokens anew where it resumes, and the Trainer means over the steps that it ran.
    names = [
        x for x in theirs["metrics"]
        if not (resumed and (x.endswith(("num_tokens", "train_loss")) or x[0] in "012"))
    ]  # fmt: skip
    assert len(names) > 10
    expected = {x: theirs["metrics"][x] for x in names}
    assert {x: mine["metrics"][x] for x in names} == pytest.approx(
        expected, rel=tolerance, abs=1e-8
    )
    assert (mine["tokens"], mine["samples"]) == (theirs["tokens"], theirs["samples"])
    assert mine["operations"] == pytest.approx(theirs["operations"], rel=1e-3)
    for name, x in theirs["weights"].items():
        torch.testing.assert_close(mine["weights"][name], x, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        mine["predictions"], theirs["predictions"], rtol=tolerance, atol=tolerance
    )


def errors(mine: Any, theirs: Any) -> float:
    """Return the norm of relative errors of losses and gradient norms."""
    names = [x for x in theirs["metrics"] if x.endswith(("loss", "grad_norm"))]
    assert len(names) == 11
    return math.hypot(*(mine["metrics"][x] / theirs["metrics"][x] - 1 for x in names))


@pytest.mark.parametrize("x", [*sharded_steps()])
def test_steps_are_those_of_one_process(
    pools: dict[int, LocalRanks], tmp_path: Path, x: ShardedSteps
) -> None:
    def run(mesh: str | None, data: int, name: str, *more: Any) -> Any:
        sizes = MESHES.get(mesh or "", {"ranks": 2 if mesh == "none" else data})
        ranks, folder = math.prod(sizes.values()), str(tmp_path / name)
        options = x.options | ({} if mesh else {"bf16": False, "fp16": False})
        return pools[ranks].run(sharded, ranks, mesh, x.kind, folder, options, x.settings, *more)

    sizes = MESHES.get(x.mesh, {})
    data = sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
    (expected, *_) = run(None, data, "one")
    results = run(x.mesh, data, "rings")
    is_narrow = {"bf16", "fp16"} & {*x.options}
    allowed = errors(run("one", 1, "narrow")[0], expected) if is_narrow else None
    for mine in results:
        if allowed is not None:  # at most twice the error of FSDP2 in one process
            assert 1e-4 < errors(mine, expected) <= 2 * allowed
            continue
        check(mine, expected, x.tolerance)
        if not {"LoRA", "model"} & {*x.options}:
            assert mine["split"]["layers.0.mlp.down_proj.weight"] == x.split
    assert any("fsdp" in name for name in results[0]["files"])
    if x.resumed:
        checkpoint = str(tmp_path / "rings" / "checkpoint-2")
        for mine in run(x.resumed, data, "resumed", checkpoint):
            check(mine, expected, x.tolerance, resumed=True)


@pytest.mark.refused_in("5.14")
@on_two_ranks
def test_mistakes_of_fsdp2_are_named(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    options = {"use_cpu": True, "bf16": False, "parallelism_config": ParallelismConfig(cp_size=2)}
    for name in ("GRPO", "RLOO", "Distillation"):  # of TRL's own Trainers
        with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
            getattr(trl, f"{name}Config")(str(tmp_path), **options)
    trainer = trainer_on("trainer", MESHES["ring"], str(tmp_path), {}, torch.float32)
    accelerator, state, own = trainer.accelerator, trainer.accelerator.state, type(trainer)
    cp = ContextParallel(accelerator.torch_device_mesh["cp"])
    alone: list[Any] = [dist.new_group([n]) for n in range(2)]
    attributes = {*vars(trainer)}, {*vars(accelerator)}

    def refused(
        error: type, message: str, ring: ContextParallel = cp, call: Any = hf.fsdp2
    ) -> None:
        with pytest.raises(error, match=message):
            call(trainer, ring)
        assert not trainer.model._forward_pre_hooks
        assert attributes == ({*vars(trainer)}, {*vars(accelerator)})

    with pytest.raises(ValueError, match="takes a Trainer, got LlamaForCausalLM"):
        hf.fsdp2(trainer.model, cp)
    refused(
        ValueError, r"cp is a ring of the ranks \[\d\], .*\[0, 1\]", ContextParallel(alone[rank])
    )
    refused(
        UnsupportedError,
        r"parallelism_config \(cp_enabled\).* or call hf.fsdp2",
        cp,
        hf.parallelize,
    )
    for path, other in REFUSED.items():
        module, _, name = path.rpartition(".")
        trainer.__class__ = type(name, (Trainer,), {"__module__": module, "__qualname__": name})
        refused(UnsupportedError, f"{name} does not train on a cp mesh of accelerate: {other}")
    trainer.__class__ = own
    changes = {
        f"Trainer with packing does not .*{PARALLELIZE}": (trainer.args, "packing", True),
        "set to precompute_ref_log_probs .* each rank of a ring": (
            trainer.args, "precompute_ref_log_probs", True,
        ),
        "set to deepspeed": (trainer, "is_deepspeed_enabled", True),
        "set to a model of transformers' DistributedConfig": (
            trainer, "is_distributed_loading_by_transformers", True,
        ),
        "set to FSDP1": (state.fsdp_plugin, "fsdp_version", 1),
        r"set to parallelism_config \(sp_enabled\)": (state.parallelism_config, "sp_size", 2),
        "has no FSDP2": (state, "distributed_type", "MULTI_CPU"),
        "has no cp mesh": (state, "parallelism_config", None),
    }  # fmt: skip
    for message, (owner, name, value) in changes.items():
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        refused(ValueError, message)
        setattr(owner, name, before)
    state.parallelism_config.tp_size = 2
    state.fsdp_plugin.cpu_ram_efficient_loading = True
    refused(UnsupportedError, "cpu_ram_efficient_loading beside tensor parallelism")
    state.parallelism_config.tp_size = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Trainer, "get_cp_size")
        refused(UnsupportedError, "Trainer of transformers .* has no get_cp_size")
    handle = hf.fsdp2(trainer, cp)
    x = torch.arange(6).reshape(1, 6)
    with accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[1]):
        assert x.shape == (1, 6)  # whole
    handle.remove()
    assert attributes == ({*vars(trainer)}, {*vars(accelerator)})


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"loss of {name}": ("grpo", {"loss_type": name}) for name in LOSSES},
    "sequences": ("grpo", {"importance_sampling_level": "sequence", "steps_per_generation": 4}),
    "a reference": ("grpo", {"beta": 0.1, "temperature": 0.7, "scale_rewards": "batch"}),
    "entropy": ("grpo", {"entropy_coef": 0.05, "top_entropy_quantile": 0.5}),
    "adaptive entropy": (
        "grpo",
        {"use_adaptive_entropy": True, "entropy_target": 2.0, "entropy_coef": 0.01},
    ),
    "LoRA": ("grpo", {"LoRA": True, "beta": 0.1}),
    "routers": ("grpo", {"model": "Mixtral"}),
    "compiled": ("grpo", {"torch_compile": True, "torch_compile_backend": "eager"}),
    "no logits": ("grpo", {"logits": "none", "beta": 0.1}),
    "model first": ("grpo", {"model first": True}),
    "old samples": ("grpo", {"num_iterations": 2, "mask_truncated_completions": True}),
    "random numbers in a rollout function": ("grpo", {"rollout": True, "draws": True}),
    "rloo": ("rloo", {"torch_compile": True, "torch_compile_backend": "eager"}),
    "rloo with LoRA": ("rloo", {"LoRA": True, "beta": 0.1, "logits": "none"}),
    "rloo with a reference": ("rloo", {"beta": 0.2, "temperature": 0.7, "num_iterations": 2}),
}


@pytest.mark.nightly(
    unless=[
        "loss of dapo",
        "a reference",
        "random numbers in a rollout function",
        "rloo with a reference",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_devices(
    pools: dict[int, LocalRanks], tmp_path: Path, name: str
) -> None:
    kind, options = CASES[name]
    expected = pools[2].run(sampled, 2, None, kind, str(tmp_path / "devices"), options)
    rings = pools[4].run(sampled, 4, 2, kind, str(tmp_path / "rings"), options)
    for rank, mine in enumerate(rings):
        theirs = expected[rank // 2]
        assert mine["completions"] == theirs["completions"]
        assert mine["numbers"] == theirs["numbers"]
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-6, abs=1e-8, nan_ok=True)
        assert mine["logs"]["prompt"] == theirs["logs"]["prompt"]
        assert mine["logs"]["completion"] == theirs["logs"]["completion"]
        advantages = mine["logs"]["advantages"]
        assert advantages == pytest.approx(theirs["logs"]["advantages"], rel=1e-6, abs=1e-8)
    weights = rings[0]["weights"]
    assert weights and weights == pytest.approx(expected[0]["weights"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_ring_samples_once(pools: dict[int, LocalRanks], tmp_path: Path, kind: str) -> None:
    """The first step's completions are those of one device, and all ranks go on with the same."""
    options = {"samples": True, "per_device_train_batch_size": 4, "temperature": 1.0}
    expected = pools[1].run(sampled, 1, None, kind, str(tmp_path / "device"), options)[0]
    first, second = pools[2].run(sampled, 2, 2, kind, str(tmp_path / "ring"), options)
    assert first["completions"] == second["completions"]
    assert first["completions"][0] == expected["completions"][0]


@on_two_ranks
@patch.object(rollouts, "unhooked", lambda _: nullcontext())
def test_what_fails_on_the_first_rank_fails_on_all(rank: int) -> None:
    """A function raises, waits for its ring, or returns what cannot be sent; then all goes on."""
    be_started(rank, 2)
    ring = object.__new__(rollouts.Rollouts)
    vars(ring).update(ranks=ranks_of(ContextParallel().group), target=None, _samples=False)
    ring.accelerator = SimpleNamespace(device=torch.device("cpu", 0))  # type: ignore[assignment]

    errors = (ZeroDivisionError, ValueError, AttributeError)
    functions: list[Any] = [lambda: 1 / 0, dist.barrier, lambda: lambda: 0]
    for function, error in zip(functions, errors, strict=True):
        told = f"failed to generate: {error.__name__}"
        with pytest.raises(error if rank == 0 else RuntimeError, match="" if rank == 0 else told):
            ring._on_first_rank(function)()
    numbers, names = ring._on_first_rank(lambda: ([torch.arange(3)], {"b": None}))()
    assert numbers[0].tolist() == [0, 1, 2] and names == {"b": None}
    dist.barrier()


def _trainers_of_trl() -> set[tuple[str, str]]:
    """Return modules and names of the installed TRL's Trainers, from its sources."""
    (folder,) = trl.__path__
    found = set()
    for path in Path(folder).rglob("*.py"):
        module = ".".join(("trl", *path.relative_to(folder).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer"):
                found.add((module, node.name))
    return found


def test_a_trainer_of_trl_is_tested_or_refused_by_name() -> None:
    tested = set()
    for module, name in _trainers_of_trl():
        cls = type(name, (Trainer,), {"__module__": module, "__qualname__": name})
        refused = untested_of_trl(type("Own", (cls,), {}))  # also one that derives from it
        assert refused in (None, f"{module}.{name}")
        if refused is None and name != "_BaseTrainer":
            tested.add(f"{module}.{name}")
    assert tested == {*TESTED_OF_TRL}
    assert len(_trainers_of_trl()) > len(tested) + 5


class _Arguments:
    """Arguments of a Trainer that samples."""

    use_vllm = use_transformers_continuous_batching = False
    per_device_train_batch_size = steps_per_generation = 2
    num_generations, num_generations_eval = 4, None
    eval_strategy, per_device_eval_batch_size = "no", 2


class _Sampler:
    """Parts of a Trainer that are checked."""

    is_fsdp_enabled, tools = False, ()
    _generate_and_score_completions = _compute_loss = _generate_single_turn = _logs = None

    def __init__(self, **options: Any) -> None:
        self.args = _Arguments()
        vars(self.args).update(options)


def test_settings_that_sample_on_each_rank_are_refused() -> None:
    check_rollouts(_Sampler(), 1, 2)
    with pytest.raises(UnsupportedError, match="use_vllm, which samples on each rank"):
        check_rollouts(_Sampler(use_vllm=True), 1, 2)
    with pytest.raises(ValueError, match="generation_batch_size: 1 rings of 4 ranks take 2"):
        check_rollouts(_Sampler(steps_per_generation=1), 1, 4)
    with pytest.raises(ValueError, match="per_device_eval_batch_size: 1 rings of 2 ranks take 2"):
        check_rollouts(_Sampler(eval_strategy="steps"), 1, 2)
