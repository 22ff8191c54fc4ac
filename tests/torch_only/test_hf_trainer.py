"""A plain Trainer, parallelized, trains, evaluates, predicts and resumes as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_models import build
from packaging.version import Version
from torch import Tensor
from trained import arguments, be_started, collate, documents, session, trained
from transformers import Trainer
from trl_trained import TRAINERS, trl_trained

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf
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


def _mistakes(rank: int, folder: str) -> None:
    be_started(rank, 2)
    cp = ContextParallel()
    alone: list[Any] = [dist.new_group([n]) for n in range(2)]

    def built(data: Any = None, **options: Any) -> Any:
        return Trainer(
            build("Llama").float(), arguments(folder, **options), collate, data or documents()
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
        args = arguments(folder)
        refused(
            ValueError, "reads logits", kind(build("Llama").float(), args, collate, documents())
        )
    trainer = _OwnPrediction(build("Llama").float(), arguments(folder), collate, documents())
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


def test_mistakes_are_named(pools: dict[int, LocalRanks], tmp_path: Path) -> None:
    pools[2].run(_mistakes, str(tmp_path))


def _later_models(rank: int, folder: str) -> None:
    be_started(rank, 2)
    ring = ContextParallel()
    trainer: Any = Trainer(build("Llama").float(), arguments(folder), collate, documents())
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


def test_models_that_are_set_later_are_never_computed_whole(
    pools: dict[int, LocalRanks], tmp_path: Path
) -> None:
    pools[2].run(_later_models, str(tmp_path))


@pytest.mark.nightly(unless=["sft", "orpo"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_of_trl(pools: dict[int, LocalRanks], tmp_path: Path, kind: str) -> None:
    """A Trainer is trusted by class, not package: a loss that reads logits needs whole ones."""
    expected = alone(pools, 1, trl_trained, kind, str(tmp_path / "one"))
    assert sum(name.endswith(" loss") for name in expected) == 4
    for steps in on_rings(pools, 1, trl_trained, kind, str(tmp_path / "ring")):
        assert steps == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.nightly(unless=["model first-dpo", "LoRA-dpo", "compiled-kto"])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("way", ["model first", "LoRA", "compiled"])
def test_preferences_in_other_ways(
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
