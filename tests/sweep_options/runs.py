"""Runs of a small model with one option: a Trainer's session, or an adapter's gradients."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import torch
import transformers
from hf_models import BYTES, LENGTH, Wide, build, gradients
from on_ranks import be_started
from sweep.compare import is_refusal, words
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from trained import SETTINGS, collate, documents, logged
from transformers import Trainer, TrainingArguments
from trl_trained import SAMPLERS, recorded, rows_of, sampler_of, trainer_of

from ring_torch import ContextParallel, hf
from ring_torch.hf.models.hooks import hooks_of

Results = dict[str, Any]

#: Options without which a class of PEFT makes no adapter of a small model, or one too large for it.
NEEDED: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10, "init_r": 4, "target_r": 2},
    "AdamssConfig": {"r": 4, "num_subspaces": 2},
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1, "target_modules": "self_attn"},
    "C3AConfig": {"block_size": 8}, "FourierFTConfig": {"n_frequency": 20},
    "CPTConfig": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FrodConfig": {"progressbar": False},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "MultitaskPromptTuningConfig": {"num_tasks": 2}, "PolyConfig": {"n_tasks": 2},
    "OFTConfig": {"r": 0, "oft_block_size": 8}, "RoadConfig": {"group_size": 8},
    "ShadowConfig": {"target_modules": None, "shadow_dropout": 0.0},
    "TrainableTokensConfig": {"token_indices": [1, 2, 9], "target_modules": ["embed_tokens"]},
    "VBLoRAConfig": {"vector_length": 8, "num_vectors": 6}, "WaveFTConfig": {"n_frequency": 20},
    "XLoraConfig": {"hidden_size": 32, "xlora_dropout_p": 0.0, "xlora_depth": 2, "xlora_size": 8},
}  # fmt: skip
#: Adapters whose calls are told the task of each row.
_PAIR = ("PolyConfig", "MultitaskPromptTuningConfig")
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def run(
    rank: int, ranks: int, kind: str, owner: str, options: dict[str, Any], limit: float, folder: str
) -> Results:  # fmt: skip
    """Run with options; return numbers by name, or ``error`` and ``is refusal`` (by name)."""
    if ranks > 1:
        be_started(rank, ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    # A data loader's workers are children, which daemons may not have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.manual_seed(5)
    cp = ContextParallel() if ranks > 1 else None
    dtypes = Wide() if limit < 1e-5 else nullcontext()
    try:
        draws = Draws()
        with dtypes, draws if limit < 1e-5 else nullcontext():
            results = RUNS[kind](draws, owner, options, cp, folder, limit < 1e-5)
    except Exception as error:  # noqa: BLE001 - whatever an option may raise
        return {"error": words(error), "is refusal": is_refusal(error)}
    finally:
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
    return results | {"draws": draws.calls}


class Draws(TorchFunctionMode):
    """Context in which random numbers of tokens are drawn for the whole sequence on every rank.

    Outside of it each rank draws for its own tokens, and no rank draws what one device does.
    """

    FUNCTIONS = (functional.dropout, torch.randn, torch.randn_like, torch.rand_like)

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        shape: Any = x if isinstance(x, torch.Size) else getattr(x, "shape", ())
        if self.model is None or func not in self.FUNCTIONS or len(shape) < 2:
            return func(*args, **kwargs)
        if func is functional.dropout and not (
            kwargs.get("p", 0.5) and kwargs.get("training", True)
        ):
            return x
        state: Any = getattr(hooks_of(self.model), "state", None)
        is_split = state is not None and shape[:2] == state.mask.shape
        if is_split:
            shape = torch.Size((shape[0], state.mask.length, *shape[2:]))
        drawn = func(x.new_ones(shape) if isinstance(x, Tensor) else shape, *args[1:], **kwargs)
        drawn = state.mask.shard(drawn) if is_split else drawn
        if func is functional.dropout:
            self.calls += bool((drawn != 1).any())
            return x * drawn
        self.calls += 1
        return drawn


def _trainer(
    draws: Draws, owner: str, options: dict[str, Any], cp: Any, folder: str, is_wide: bool
) -> Results:  # fmt: skip
    """Train, evaluate and, with a plain Trainer, predict; return logs, weights and predictions."""
    common = {"output_dir": folder, "max_steps": 3, "lr_scheduler_type": "linear"}
    options = {**common, "learning_rate": 1e-2, **options}
    name, data = options.pop("_model", "Llama"), options.pop("_data", "text")
    dtype, sizes = torch.float64 if is_wide else torch.float32, BIASES if name == "Llama" else {}
    kind = owner.removesuffix("Config").lower()
    if owner == "TrainingArguments":
        trainer: Any = Trainer(
            build(name, **sizes).to(dtype), TrainingArguments(**SETTINGS | options), collate,
            documents(13), documents(7), compute_metrics=_metrics,
        )  # fmt: skip
    elif kind in SAMPLERS:  # completions are recorded, as sampling flips on rounding
        options = {"num_generations": 2} | options
        trainer = sampler_of(kind, options, model=name, dtype=dtype, sizes=sizes)
        trainer._generate_single_turn = recorded(kind, 0)
    else:
        options = ({"max_new_tokens": 7} if kind == "gkd" else {}) | options
        rows = rows_of(kind, 13, data)
        trainer = trainer_of(kind, options, model=(name, sizes), dtype=dtype, rows=rows)
    draws.model = trainer.model
    if cp is not None:
        hf.parallelize(trainer, cp)
    trainer.train()
    trainer.evaluate()
    results: Results = {n: float(x) for n, x in logged(trainer).items()}
    if owner == "TrainingArguments":
        predicted = trainer.predict(documents(5))
        if predicted.predictions is not None:
            results["predictions"] = torch.from_numpy(np.concatenate([*predicted.predictions]))
    results["tokens"] = float(trainer.state.num_input_tokens_seen)
    inner = trainer.accelerator.unwrap_model(trainer.model)
    return results | {n: x.detach().double().clone() for n, x in inner.state_dict().items()}


def _metrics(result: Any, compute_result: bool = True) -> dict[str, float]:
    """Return what metrics can see of a result: sizes, accuracy and losses."""
    del compute_result
    predictions, labels = (
        np.concatenate([np.asarray(y) for y in x]) for x in (result.predictions, result.label_ids)
    )
    return {
        "right": float((predictions.argmax(-1) == labels).mean()),
        "shape": float(np.ndim(result.predictions[0])),
        "inputs": 0.0 if result.inputs is None else float(np.asarray(result.inputs[0]).mean()),
        "losses": 0.0 if result.losses is None else float(np.mean(result.losses)),
    }


def _adapted(owner: str, base: Any, options: dict[str, Any], folder: str) -> Any:
    """Return a model with an adapter, its weights random."""
    cls = peft.LoraConfig if owner == "PeftConfig" else getattr(peft, owner)
    fields = {x.name for x in dataclasses.fields(cls)}
    needed = {
        "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4,
        "num_virtual_tokens": 3, **NEEDED.get(owner, {}), **options,
    }  # fmt: skip
    base = base.float()
    base.config.use_cache = False
    torch.manual_seed(0)
    if owner == "XLoraConfig":
        needed["adapters"] = {name: str(Path(folder) / name) for name in ("0", "1")}
        lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        for path in needed["adapters"].values():  # as PEFT numbers them
            one = peft.get_peft_model(base, lora)
            one.save_pretrained(path)
            base = one.unload()
    config = cls(**{n: x for n, x in needed.items() if n in fields})
    model = peft.get_peft_model(base, config).train()
    with torch.no_grad():  # adapters begin as nothing, which would hide that they are unused
        for weight in model.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.05)
    return model


def _adapter(
    draws: Draws, owner: str, options: dict[str, Any], cp: Any, folder: str, is_wide: bool
) -> Results:  # fmt: skip
    """Return the loss, logits and gradients of an adapted model in training."""
    with torch._C.DisableTorchFunction():  # adapters begin in float32, whatever the run is in
        model = _adapted(owner, build("Llama", **BIASES), options, folder)
    draws.model = model = model.double() if is_wide else model
    more = {"task_ids": torch.tensor([0, 1])} if owner in _PAIR else {}
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, BYTES, (2, LENGTH), generator=generator)
    tokens[0, 20:22] = tokens[1, 11:13] = torch.tensor([1, 2])  # invokes activated LoRA
    labels = tokens.where(torch.rand(tokens.shape, generator=generator) < 0.9, -100)
    if cp is not None:
        hf.parallelize(model, cp, logits="gather")
    torch.manual_seed(11)
    output = model(input_ids=tokens, labels=labels, **more)
    output.loss.backward()
    if cp is not None:
        cp.reduce_gradients(model)
    return {"loss": output.loss.detach(), "logits": output.logits.detach()} | gradients(model)


RUNS = {"trainer": _trainer, "peft": _adapter}
