"""Trainers on rings train, evaluate, predict and resume as on one device.

Plain ones and those of TRL, parallelized; those whose weights FSDP2 shards over data x ring; and
those that sample on each ring.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
from on_ranks import be_started, on_two_ranks
from packaging.version import Version
from refused import refused
from trained import arguments, collate, documents
from transformers import Trainer
from trl_trained import MESHES, TRAINERS, Steps, be_fsdp2, learned, trainer_of

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.comm.ranks import ranks_of
from ring_torch.hf import rollouts
from ring_torch.hf.rollouts import check_rollouts
from ring_torch.hf.trainer_settings import TESTED_OF_TRL, untested_of_trl
from ring_torch.local import LocalRanks

PARALLELIZE = r"leave parallelism_config and fsdp out and call hf\.parallelize\(trainer, cp\), which .* Trainer's own DDP"
#: Trainers that no mesh serves, and what is said of another way.
REFUSED = {
    "trl.trainer.grpo_trainer.GRPOTrainer": PARALLELIZE,
    "trl.trainer.rloo_trainer.RLOOTrainer": PARALLELIZE,
    "trl.trainer.distillation_trainer.DistillationTrainer": r"nor does hf\.parallelize take it",
    "trl.experimental.orpo.orpo_trainer.ORPOTrainer": PARALLELIZE,
}

#: Steps that run for each change.
DAILY = {
    "matrix-1-True-0.1-1", "no labels", "token classifier-True-2", "whole logits-1", "router-True", "no logits-sft",
    "noise-LoRA", "session-1", "sft", "orpo", "model first-dpo", "LoRA-dpo", "compiled-sft",
    "precomputed-dpo", "sft on data x ring", "dpo on ring", "bfloat16-trainer", "a reference",
    "random numbers in a rollout function", "rloo with a reference",
}  # fmt: skip


NARROW = {"bf16", "fp16"}
COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
#: Each length is compiled anew.
FEW: dict[str, Any] = {"gradient_accumulation_steps": 1, "eval_strategy": "no"}
EACH: dict[str, Any] = {"average_tokens_across_devices": False}
ONLY_LOSSES: dict[str, Any] = {"prediction_loss_only": True}
NOISE: dict[str, Any] = {"neftune_noise_alpha": 5.0}
SINGLE: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-3}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CLASSIFIER = {"head": "ForTokenClassification", "num_labels": 61, "classifier_dropout": 0.0}
OPTIONS: dict[str, Any] = {"sft": {"packing": True}, "gkd": {"max_new_tokens": 9}}
PARTS = {"state_dict_type": "SHARDED_STATE_DICT"}
plain, ddp = partial(Steps, "trainer"), partial(Steps, "trainer", "DDP")
MESH_OF = {1: "DDP", 2: "DDP of two"}
#: Older versions resume on CPUs in one process only: they look for "cpu:0".
RESUMES = Version(transformers.__version__) >= Version("5.20")


def averaged(across: bool, steps: int) -> dict[str, Any]:
    return {"average_tokens_across_devices": across, "gradient_accumulation_steps": steps}


#: Steps on rings in the Trainer's own DDP.
ON_RINGS: dict[str, Steps] = {
    **{f"matrix-{steps}-{x}-{smooth}-{n}": plain(MESH_OF[n], averaged(x, steps) | {"label_smoothing_factor": smooth})
       for steps, x, smooth, n in product((1, 4), (True, False), (0.0, 0.1), (1, 2))},
    "no labels": ddp(EACH, data={"masked_tail": True}),
    **{f"family-{x}": ddp({"gradient_accumulation_steps": 4}, model=(x, {})) for x in ("Qwen3", "Gemma3", "GptOss", "Mixtral", "DeepseekV3")},
    "family-LoRA": ddp({"gradient_accumulation_steps": 4}, way="LoRA"),
    **{f"stream-{n}": plain(mesh, data={"is_stream": True}) for n, mesh in MESH_OF.items()},
    **{f"whole logits-{n}": plain(mesh, logits="gather") for n, mesh in MESH_OF.items()},
    **{f"session-{n}": plain(mesh, {"label_smoothing_factor": 0.1}, resumed=mesh if RESUMES else None) for n, mesh in MESH_OF.items()},
    **{f"token classifier-{x}-{n}": ddp(averaged(x, n), model=("Llama", CLASSIFIER)) for x, n in product((True, False), (1, 2))},
    **{f"router-{x}": ddp(y := ONLY_LOSSES | {"average_tokens_across_devices": x}, model=("Mixtral", ROUTERS), unlike=(y, {})) for x in (True, False)},
    # NEFTune's strength is that of the whole odd length, its numbers are those of one device.
    "noise-LoRA": ddp(NOISE, unlike=({}, {}), way="LoRA"),
    "noise-gather": ddp(NOISE, unlike=({}, {}), logits="gather"),
    "noise-Qwen3": ddp(NOISE, unlike=({}, {}), model=("Qwen3", {})),
    "noise-two rings": plain("DDP of two", NOISE, unlike=({}, {})),
    # A Trainer is trusted by class, not package: a loss that reads logits needs whole ones.
    **{x: Steps(x, "DDP", OPTIONS.get(x, {})) for x in TRAINERS},
    # TRL replaces the model's forward when a Trainer is made: before the hooks or after them.
    **{f"model first-{x}": Steps(x, "DDP", way="model first") for x in ("dpo", "kto", "sft")},
    **{f"LoRA-{x}": Steps(x, "DDP", way="LoRA") for x in ("dpo", "kto", "sft")},
    **{f"compiled-{x}": Steps(x, "DDP", COMPILED | FEW, model=("Llama", {"num_hidden_layers": 1}), **SINGLE) for x in ("dpo", "kto", "sft")},
    **{f"no logits-{x}": Steps(x, "DDP", logits="none") for x in ("dpo", "kto", "sft")},
    **{f"precomputed-{x}": Steps(x, "DDP", way="precomputed") for x in ("dpo", "kto")},
}  # fmt: skip

grpo, rloo = partial(Steps, "grpo", "DDP of two"), partial(Steps, "rloo", "DDP of two")
LOSSES = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")  # others have "dapo"
#: Steps that sample on each of two rings.
OF_SAMPLERS: dict[str, Steps] = {
    **{f"loss of {x}": grpo({"loss_type": x}) for x in LOSSES},
    "sequences": grpo({"importance_sampling_level": "sequence", "steps_per_generation": 4, "max_steps": 4}),
    "a reference": grpo({"beta": 0.1, "temperature": 0.7, "scale_rewards": "batch"}),
    "entropy": grpo({"entropy_coef": 0.05, "top_entropy_quantile": 0.5}),
    "adaptive entropy": grpo({"use_adaptive_entropy": True, "entropy_target": 2.0, "entropy_coef": 0.01}),
    "grpo with LoRA": grpo({"beta": 0.1}, way="LoRA"), "routers": grpo(model=("Mixtral", {})),
    "grpo compiled": grpo(COMPILED), "grpo without logits": grpo({"beta": 0.1}, logits="none"),
    "grpo model first": grpo(way="model first"),
    "old samples": grpo({"num_iterations": 2, "max_steps": 4, "mask_truncated_completions": True}),
    "random numbers in a rollout function": grpo(way="rollout"),
    "rloo": rloo(COMPILED), "rloo with LoRA": rloo({"beta": 0.1}, way="LoRA", logits="none"),
    "rloo with a reference": rloo({"beta": 0.2, "temperature": 0.7, "num_iterations": 2, "max_steps": 4}),
}  # fmt: skip

KINDS = ("trainer", "sft", "dpo", "kto", "reward")
#: Meshes, and those on which the second half runs again.
OTHERS = {
    "ring": "ring of 3", "TP": "TP", "HSDP": "data of 4 x ring", "data x ring": "data x ring of 3",
}  # fmt: skip
sft, on_ring = partial(Steps, "sft"), partial(Steps, "trainer", "ring")
#: Steps whose weights FSDP2 shards over data x ring.
ON_MESHES: dict[str, Steps] = {
    **{(key := f"{x} on {mesh}"): Steps(x, mesh, resumed=None if key in DAILY else other, split=2 if mesh == "ring" else 4)
       for x, (mesh, other) in product(KINDS, OTHERS.items())},
    "parts in files": sft("data x ring", settings=PARTS, resumed="data x ring of 3", split=4),
    "loaded once": sft("ring", settings={"cpu_ram_efficient_loading": True, "drifts": True}),
    **{f"bfloat16-{x}": Steps(x, "ring", {"bf16": True}, dtype=torch.float32) for x in KINDS},
    **{f"float16-{x}": Steps(x, "ring", {"fp16": True}, dtype=torch.float32) for x in KINDS},
    "checkpointed layers": sft("ring", settings={"activation_checkpointing": True}, resumed="ring of 3", **SINGLE),
    "compiled": sft("ring", COMPILED, **SINGLE),
    "each rank's own mean": sft("data x ring", EACH, split=4),
    "each rank's own mean beside TP": plain("TP", EACH, split=4),
    **{f"LoRA on ring-{x}": Steps(x, "ring", way="LoRA", resumed="ring of 3") for x in ("sft", "dpo")},
    **{f"logits-{x}": on_ring(ONLY_LOSSES, logits=x) for x in ("gather", "none")},
    "smooth labels and noise": plain("data x ring", NOISE | {"label_smoothing_factor": 0.1}, split=4),
    "a router's loss": on_ring(ONLY_LOSSES, model=("Mixtral", {"output_router_logits": True}), resumed="ring of 3"),
    "tied embeddings": on_ring(ONLY_LOSSES, model=("Llama", {"tie_word_embeddings": True}), resumed="ring of 3"),
    "recurrent layers": on_ring(ONLY_LOSSES, model=("Qwen3NextForCausalLM", {}), resumed="ring of 3"),
    "without a mesh": sft("none", {"packing": True}),
}  # fmt: skip


def table() -> Iterator[Any]:
    """Yield all steps, and marks of those that run at night or are refused."""
    for key, x in (ON_RINGS | ON_MESHES | OF_SAMPLERS).items():
        marks = [] if key in DAILY else [pytest.mark.nightly]
        if key.startswith("token classifier-True") or not x.mesh.startswith(("DDP", "none")):
            marks.append(pytest.mark.refused_in("5.14"))
        yield pytest.param(x, id=key, marks=marks)


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
        expected, rel=tolerance, abs=1e-8, nan_ok=True
    )
    assert mine["number"] == theirs["number"] or not theirs["logs"]
    for name, x in theirs["logs"].items():
        assert mine["logs"][name] == (pytest.approx(x, rel=1e-6) if name == "advantages" else x)
    assert mine["tokens"] == theirs["tokens"]
    assert mine["samples"] == theirs["samples"] or theirs["logs"]  # of Trainers that do not sample
    assert mine["operations"] == pytest.approx(theirs["operations"], rel=1e-3)
    for name, x in theirs["weights"].items():
        torch.testing.assert_close(mine["weights"][name], x, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        mine["predictions"], theirs["predictions"], rtol=tolerance, atol=tolerance
    )


def errors(mine: Any, theirs: Any) -> float:
    """Return the norm of relative errors of losses and gradient norms."""
    names = [x for x in theirs["metrics"] if x.endswith(("loss", "grad_norm"))]
    assert len(names) == 6
    return math.hypot(*(mine["metrics"][x] / theirs["metrics"][x] - 1 for x in names))


@pytest.mark.parametrize("x", [*table()])
def test_steps_are_those_of_one_process(
    pools: dict[int, LocalRanks], tmp_path: Path, x: Steps
) -> None:
    sizes = MESHES.get(x.mesh, {})
    data = sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)

    def run(mesh: str | None, name: str, *more: str, x: Steps = x) -> Any:
        ranks = 2 if mesh == "none" else math.prod(MESHES.get(mesh or "", {"ranks": data}).values())
        if mesh is None:
            others = {n: y for n, y in x.options.items() if n not in NARROW | COMPILED.keys()}
            x = replace(x, options=others)
        (folder := tmp_path / name).mkdir()
        return pools[ranks].run(learned, ranks, x, mesh, str(folder), *more)

    of_data = run(None, "one")
    expected = of_data[0]
    if x.unlike is not None:
        options, changes = x.unlike
        once = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
        other = replace(x, options=options | once, model=(x.model[0], changes))
        loss = run(None, "unlike", x=other)[0]["metrics"]["0 loss"]
        assert abs(loss - expected["metrics"]["0 loss"]) > 1e-3
    results = run(x.mesh, "rings")
    allowed = errors(run("one", "narrow")[0], expected) if NARROW & {*x.options} else None
    for rank, mine in enumerate(results):
        if allowed is not None:  # at most twice the error of FSDP2 in one process
            assert 1e-4 < errors(mine, expected) <= 2 * allowed
            continue
        check(mine, of_data[rank * data // len(results)], x.tolerance)
        if mine["split"] and x.way == "" and x.model == ("Llama", {}):
            assert mine["split"]["layers.0.mlp.down_proj.weight"] == x.split
    assert any("fsdp" in name for name in results[0]["files"]) is not x.mesh.startswith("DDP")
    assert bool(results[0]["split"]) is not x.mesh.startswith("DDP")
    if x.resumed:
        for mine in run(x.resumed, "resumed", str(tmp_path / "rings" / "checkpoint-2")):
            check(mine, expected, x.tolerance, resumed=True)


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


def is_split(trainer: Any) -> bool:
    """Return True if a Trainer's model has hooks."""
    return bool(trainer.model._forward_pre_hooks)


def is_changed(trainer: Any) -> bool:
    """Return True if methods of a Trainer are others."""
    return "get_tp_size" in vars(trainer)


@on_two_ranks
def test_mistakes_are_named(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    ring, rows = ContextParallel(), documents()
    alone: list[Any] = [dist.new_group([n]) for n in range(2)]
    part = ContextParallel(alone[rank] if rank else None)  # ranks 0 and 1, and 1 alone

    def built(cls: Any = Trainer, data: Any = rows, *, own: Any = (), **options: Any) -> Any:
        trainer = cls(build("Llama").float(), arguments(tmp_path, **options), collate, data)
        vars(trainer).update(own)
        return trainer

    def refused(
        message: str, trainer: Any, error: type = ValueError, cp: Any = ring, **options: Any
    ) -> None:
        before = is_split(trainer)
        with pytest.raises(error, match=message):
            hf.parallelize(trainer, cp, **options)
        assert is_split(trainer) is before and not is_changed(trainer)

    refused("takes the mean", built(), reduction="sum")
    refused("logits='gather'", built(own={"compute_loss_func": print}))
    for kind in (_LossByFunction, _LossByMethod):
        refused("reads logits", built(kind))
    hf.parallelize(built(_OwnPrediction), ring).remove()
    options: dict[str, Any] = {"train_sampling_strategy": "batch_rebalance"}
    refused("batch_rebalance", built(**options), UnsupportedError)
    generates = built(own={"generate_during_eval": True})  # as of CPO and ORPO
    refused("generate_during_eval", generates, UnsupportedError)
    streams = {"accelerator_config": {"dispatch_batches": True}}
    refused("dispatch_batches", built(**streams), UnsupportedError)
    refused("in one ring", built(), cp=part)
    # A model that was parallelized before stays so: after an error, and after the Trainer's remove.
    trainer = built()
    earlier = hf.parallelize(trainer.model, part, reduction="mean")
    refused("in one ring", trainer, cp=part)
    earlier.remove()
    trainer.ref_model = torch.nn.Linear(2, 2)
    refused("must be a model of transformers", trainer)
    del trainer.ref_model
    earlier = hf.parallelize(trainer.model, ring, reduction="mean")
    hf.parallelize(trainer, ring).remove()
    assert is_split(trainer) and not is_changed(trainer)
    # Removing the model's own handle first undoes the Trainer's changes, which need it split.
    hf.parallelize(trainer, ring)
    earlier.remove()
    assert not is_split(trainer) and not is_changed(trainer)
    attributes = {*vars(trainer)}, {*vars(trainer.accelerator)}
    for _time in range(2):
        handle = hf.parallelize(trainer, ring)
        assert hf.parallelize(trainer, ring) is handle
        handle.remove()
        assert attributes == ({*vars(trainer)}, {*vars(trainer.accelerator)})
    other = built(data=[*rows[: rank + 5], *rows])
    hf.parallelize(other, ring)
    with pytest.raises(RankMismatchError, match="same samples"):
        other.train()


@on_two_ranks
def test_models_that_are_set_later_are_never_computed_whole(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    ring, batch = ContextParallel(), collate(documents()[:2])
    trainer: Any = Trainer(build("Llama").float(), arguments(tmp_path), collate, documents())
    handle = hf.parallelize(trainer, ring)
    trainer.ref_model = build("Llama").float()
    verify = partial(handle.verify, batch), partial(hf.verify, trainer, ring, batch)
    for call in (trainer.train, *verify):
        refused("ref_model was set after", call)
    assert hf.parallelize(trainer, ring) is handle and trainer.ref_model._forward_pre_hooks
    trainer.model, model = build("Llama").float(), trainer.model
    refused(r"not the one that hf\.parallelize has split", trainer.train)
    trainer.model = model
    handle.remove()
    assert not trainer.ref_model._forward_pre_hooks
    # A rank that makes another call is named in the error, and nothing stays changed.
    del trainer.ref_model
    with pytest.raises(RankMismatchError, match="different calls"):
        ring.shift(torch.zeros(1, 4), 1) if rank else hf.parallelize(trainer, ring)
    assert not is_split(trainer) and not is_changed(trainer)


@pytest.mark.refused_in("5.14")
@on_two_ranks
def test_mistakes_of_fsdp2_are_named(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    options = {"use_cpu": True, "bf16": False, "parallelism_config": ParallelismConfig(cp_size=2)}
    for name in ("GRPO", "RLOO", "Distillation"):  # of TRL's own Trainers
        with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
            getattr(trl, f"{name}Config")(str(tmp_path), **options)
    trainer = trainer_of(
        "trainer", {"output_dir": str(tmp_path)}, ready=partial(be_fsdp2, sizes=MESHES["ring"])
    )
    accelerator, state, own = trainer.accelerator, trainer.accelerator.state, type(trainer)
    cp = ContextParallel(accelerator.torch_device_mesh["cp"])
    alone: list[Any] = [dist.new_group([n]) for n in range(2)]
    attributes = {*vars(trainer)}, {*vars(accelerator)}

    def refused(
        message: str, error: type = UnsupportedError, ring: Any = cp, call: Any = hf.fsdp2
    ) -> None:
        with pytest.raises(error, match=message):
            call(trainer, ring)
        assert not is_split(trainer)
        assert attributes == ({*vars(trainer)}, {*vars(accelerator)})

    with pytest.raises(ValueError, match="takes a Trainer, got LlamaForCausalLM"):
        hf.fsdp2(trainer.model, cp)
    of_one = ContextParallel(alone[rank])
    refused(r"cp is a ring of the ranks \[\d\], .*\[0, 1\]", ValueError, of_one)
    refused(r"parallelism_config \(cp_enabled\).* or call hf.fsdp2", call=hf.parallelize)
    for path, other in REFUSED.items():
        module, _, name = path.rpartition(".")
        trainer.__class__ = type(name, (Trainer,), {"__module__": module, "__qualname__": name})
        refused(f"{name} does not train on a cp mesh of accelerate: {other}")
    trainer.__class__ = own
    changes = {
        f"Trainer with packing does not .*{PARALLELIZE}": (trainer.args, "packing", True),
        "set to precompute_ref_log_probs .* each rank of a ring": (trainer.args, "precompute_ref_log_probs", True),
        "set to deepspeed": (trainer, "is_deepspeed_enabled", True),
        "set to a model of transformers' DistributedConfig": (trainer, "is_distributed_loading_by_transformers", True),
        "set to FSDP1": (state.fsdp_plugin, "fsdp_version", 1),
        r"set to parallelism_config \(sp_enabled\)": (state.parallelism_config, "sp_size", 2),
        "has no FSDP2": (state, "distributed_type", "MULTI_CPU"),
        "has no cp mesh": (state, "parallelism_config", None),
    }  # fmt: skip
    for message, (owner, name, value) in changes.items():
        with patch.object(owner, name, value, create=not hasattr(owner, name)):
            refused(message, ValueError)
    state.parallelism_config.tp_size = 2
    state.fsdp_plugin.cpu_ram_efficient_loading = True
    refused("cpu_ram_efficient_loading beside tensor parallelism")
    state.parallelism_config.tp_size = 1
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(Trainer, "get_cp_size")
        refused("Trainer of transformers .* has no get_cp_size")
    handle = hf.fsdp2(trainer, cp)
    x = torch.arange(6).reshape(1, 6)
    with accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[1]):
        assert x.shape == (1, 6)  # whole
    handle.remove()
    assert attributes == ({*vars(trainer)}, {*vars(accelerator)})


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_ring_samples_once(pools: dict[int, LocalRanks], tmp_path: Path, kind: str) -> None:
    """The first step's completions are those of one device, and all ranks go on with the same."""
    options = {"per_device_train_batch_size": 4, "temperature": 1.0, "max_steps": 1}
    x = Steps(kind, "DDP", options, way="samples")
    expected = pools[1].run(learned, 1, x, None, str(tmp_path / "device"))[0]
    first, second = pools[2].run(learned, 2, x, "DDP", str(tmp_path / "ring"))
    assert first["logs"] == second["logs"]
    assert first["logs"]["completion"] == expected["logs"]["completion"]


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


def test_one_rank_gathers_numbers_as_they_are(tmp_path: Path) -> None:
    """TRL's trainers gather metrics without a dimension, which stay so in a single process."""
    trainer: Any = Trainer(build("Llama").float(), arguments(tmp_path), collate, documents())
    hf.parallelize(trainer, ContextParallel())
    gathered = trainer.accelerator.gather({"loss": torch.tensor(3.0), "rows": torch.ones(2)})
    assert gathered["loss"].item() == 3 and gathered["rows"].shape == (2,)


def test_a_trainer_of_trl_is_tested_or_refused_by_name() -> None:
    """Each class of the installed TRL's sources is, and what derives from it."""
    (folder,), tested, count = trl.__path__, set(), 0
    for path in Path(folder).rglob("*.py"):
        module = ".".join(("trl", *path.relative_to(folder).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.ClassDef) and node.name.endswith("Trainer")):
                continue
            name, count = node.name, count + 1
            cls = type(name, (Trainer,), {"__module__": module, "__qualname__": name})
            refused = untested_of_trl(type("Own", (cls,), {}))
            assert refused in (None, f"{module}.{name}")
            if refused is None and name != "_BaseTrainer":
                tested.add(f"{module}.{name}")
    assert tested == {*TESTED_OF_TRL}
    assert count > len(tested) + 5


def test_settings_that_sample_on_each_rank_are_refused() -> None:
    methods = "_generate_and_score_completions", "_compute_loss", "_generate_single_turn", "_logs"
    parts: dict[str, Any] = {"is_fsdp_enabled": False, "tools": (), **dict.fromkeys(methods)}
    settings = {
        "use_vllm": False, "use_transformers_continuous_batching": False,
        "per_device_train_batch_size": 2, "steps_per_generation": 2, "num_generations": 4,
        "num_generations_eval": None, "eval_strategy": "no", "per_device_eval_batch_size": 2,
    }  # fmt: skip

    def check(cp_size: int = 2, **options: Any) -> None:
        trainer: Any = SimpleNamespace(args=SimpleNamespace(**settings | options), **parts)
        check_rollouts(trainer, 1, cp_size)

    check()
    refused("use_vllm, which samples on each rank", check, use_vllm=True, error=UnsupportedError)
    refused("generation_batch_size: 1 rings of 4 ranks take 2", check, 4, steps_per_generation=1)
    refused("per_device_eval_batch_size: 1 rings of 2 ranks take 2", check, eval_strategy="steps")
