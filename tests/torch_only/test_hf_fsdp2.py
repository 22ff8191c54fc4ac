"""Trainers whose weights FSDP2 shards over data x ring do as one process does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from accelerate import ParallelismConfig
from sharded import MESHES, sharded, trainer_on
from trained import be_started
from transformers import Trainer

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

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
class Steps:
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


def steps() -> Iterator[Any]:
    """Yield steps with their ids, and those of them that run for each change."""
    daily = ("sft on data x ring", "dpo on ring", "bfloat16-trainer")

    def row(key: str, *arguments: Any, **fields: Any) -> Any:
        marks = [] if key in daily else [pytest.mark.nightly]
        if key != "without a mesh":
            marks.append(pytest.mark.refused_in("5.14"))
        return pytest.param(Steps(*arguments, **fields), id=key, marks=marks)

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


@pytest.mark.parametrize("x", [*steps()])
def test_steps_are_those_of_one_process(
    pools: dict[int, LocalRanks], tmp_path: Path, x: Steps
) -> None:
    def run(mesh: str | None, data: int, name: str, *more: Any) -> Any:
        sizes = MESHES.get(mesh or "", {"ranks": 2 if mesh == "none" else data})
        ranks, folder = math.prod(sizes.values()), str(tmp_path / name)
        options = x.options | ({} if mesh else {"bf16": False})
        return pools[ranks].run(sharded, ranks, mesh, x.kind, folder, options, x.settings, *more)

    sizes = MESHES.get(x.mesh, {})
    data = sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
    (expected, *_) = run(None, data, "one")
    results = run(x.mesh, data, "rings")
    allowed = errors(run("one", 1, "bf16")[0], expected) if x.options.get("bf16") else None
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


def _mistakes(rank: int, folder: str) -> None:
    be_started(rank, 2)
    options = {"use_cpu": True, "bf16": False, "parallelism_config": ParallelismConfig(cp_size=2)}
    for name in ("GRPO", "RLOO", "Distillation"):  # of TRL's own Trainers
        with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
            getattr(trl, f"{name}Config")(folder, **options)
    trainer = trainer_on("trainer", MESHES["ring"], folder, {}, torch.float32)
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


@pytest.mark.refused_in("5.14")
def test_mistakes_are_named(pools: dict[int, LocalRanks], tmp_path: Path) -> None:
    pools[2].run(_mistakes, str(tmp_path))
