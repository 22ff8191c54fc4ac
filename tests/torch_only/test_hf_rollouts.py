"""GRPO and RLOO of TRL on rings: data 2 x ring 2 is data 2 x ring 1, with the same completions."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import Trainer
from trl_trained import sampled

from ring_core import UnsupportedError
from ring_torch.hf.rollouts import check_rollouts
from ring_torch.hf.trainer_settings import TESTED_OF_TRL, untested_of_trl
from ring_torch.local import LocalRanks

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
    "old samples": ("grpo", {"num_iterations": 2, "mask_truncated_completions": True}),
    "random numbers in a rollout function": ("grpo", {"rollout": True, "draws": True}),
    "rloo": ("rloo", {}),
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
