"""Trains tiny models with TRL's trainers, and returns their logs and evaluations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import Dataset
from hf_models import Wide, build
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from trained import be_started, context
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (  # fmt: skip
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from ring_torch import ContextParallel, hf

#: Trainers, their configs, and options that each needs.
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"packing": True}), "reward": (RewardTrainer, RewardConfig, {}),
    "gkd": (GKDTrainer, GKDConfig, {"max_new_tokens": 9}), "dpo": (DPOTrainer, DPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {}), "cpo": (CPOTrainer, CPOConfig, {}),
    "orpo": (ORPOTrainer, ORPOConfig, {}), "tpo": (TPOTrainer, TPOConfig, {}),
}  # fmt: skip
READ_LOGITS = ("cpo", "orpo", "tpo", "gkd")
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.:()-'\n"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each letter."""
    vocabulary_words = ["<pad>", "<eos>", "<unk>", *LETTERS]
    vocabulary = {word: number for number, word in enumerate(vocabulary_words)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(count: int, start: int = 0) -> list[str]:
    """Return pieces of Python's help texts, of several lengths."""
    text = "".join(topics[name].lower() for name in sorted(topics))
    return [
        text[start + 80 * n : start + 80 * n + 20 + 7 * n % 50].replace("\n", " ")
        for n in range(count)
    ]


def pairs(count: int) -> Dataset:
    """Return a data set of prompts with a chosen and a rejected completion, which is shorter."""
    three = zip(texts(count), texts(count, 3000), texts(count, 7000), strict=True)
    return Dataset.from_list([{"prompt": a, "chosen": b, "rejected": c[9:]} for a, b, c in three])


def _chat(prompt: str, answer: str) -> dict[str, Any]:
    turns = (("user", prompt), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def rows_of(kind: str, count: int, data: str = "text") -> Dataset:
    """Return a data set for a trainer; for ``sft`` of texts, of completions, or a chat."""
    if kind in ("sft", "gkd"):
        both = zip(texts(count), texts(count, 3000), strict=True)
        makes: dict[str, Any] = {
            "text": lambda x, y: {"text": x, "words": y}, "chat": _chat,
            "completion": lambda x, y: {"prompt": x, "completion": y},
        }  # fmt: skip
        return Dataset.from_list([makes["chat" if kind == "gkd" else data](*x) for x in both])
    rows = pairs(count)
    if kind == "kto":
        return Dataset.from_list([
            {"prompt": x["prompt"], "completion": x[name], "label": name == "chosen"}
            for x in rows for name in ("chosen", "rejected")
        ])  # fmt: skip
    return rows.add_column("reference", texts(count, 9000)) if kind == "tpo" else rows


def trainer_of(
    kind: str, rows: Dataset, options: dict[str, Any], dtype: Any, *, way: str = "",
    cp: ContextParallel | None = None, ready: Callable[[Any], None] = lambda _: None, **changes: Any,
) -> Any:  # fmt: skip
    """Return a Trainer of TRL over a small model of this dtype, which has a reference in a way.

    It is the model itself with "LoRA"; "model first" is parallelized before the Trainer is made.
    ``ready`` is called with the arguments before that.
    """
    letters = tokenizer()
    letters.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    sizes: dict[str, Any] = {"vocab_size": len(letters), "pad_token_id": 0, "eos_token_id": 1}
    name, sizes = changes.pop("model", "Llama"), sizes | changes
    if kind == "reward":
        sizes |= {"head": "ForSequenceClassification", "num_labels": 1}
    others = {"dpo": "ref_model", "kto": "ref_model", "gkd": "teacher_model"}
    more = (
        {others[kind]: build(name, **sizes, rms_norm_eps=0.1).to(dtype)} if kind in others else {}
    )
    if way == "LoRA":
        more = {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"])}
    model, (trainer, config, _) = build(name, **sizes).to(dtype), TRAINERS[kind]
    if way == "model first" and cp is not None:
        hf.parallelize(model, cp, reduction="mean")
    args = config(**options)
    ready(args)
    return trainer(
        model, **more, processing_class=letters, train_dataset=rows,
        eval_dataset=rows.select(range(5)), args=args,
    )  # fmt: skip


def trl_trained(
    rank: int, ranks: int, cp_size: int | None, kind: str, folder: str, way: str = ""
) -> dict[str, Any]:
    """Train with a trainer of TRL and evaluate once; return the metrics.

    Logits that losses of :data:`READ_LOGITS` read are gathered, and other options refused.
    Models of TRL's fused head learn in a ``way``: "model first", parallelized before its Trainer is
    made; "LoRA", with the model itself as a reference; "compiled"; "no logits"; or "precomputed",
    the reference's log-probabilities of all rows first, as of rows that are evaluated.
    """
    be_started(rank, ranks)
    cp = None if cp_size is None else context(cp_size)
    options: dict[str, Any] = {
        "output_dir": str(Path(folder) / f"{kind}{rank}"), "max_steps": 4, "logging_steps": 1,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-3,
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "max_length": 96,
    } | TRAINERS[kind][2]  # fmt: skip
    if way == "compiled":
        options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    rows = rows_of(kind, 40 if kind == "sft" else 16)
    if way == "precomputed":  # into a file beside the rows', which all ranks see
        options["precompute_ref_log_probs"] = True
        if rank == 0:
            rows.save_to_disk(f"{folder}/rows")
        if ranks > 1:
            dist.barrier()
        rows = Dataset.load_from_disk(f"{folder}/rows")
    trainer = trainer_of(kind, rows, options, torch.float32, way=way, cp=cp)
    if cp is not None and kind in READ_LOGITS:
        for logits in ("local", "none"):
            with pytest.raises(ValueError, match=r"reads logits .*give logits='gather'"):
                hf.parallelize(trainer, cp, logits=logits)
        handle = hf.parallelize(trainer, cp)
        assert hf.parallelize(trainer, cp, logits="gather") is handle
    elif cp is not None:
        hf.parallelize(trainer, cp, logits="none" if way == "no logits" else "local")
    trainer.train()
    trainer.evaluate()
    if way == "precomputed":
        trainer.evaluate(rows.select(range(9, 14)))
    timed = ("runtime", "per_second", "preparation_time", "flos", "lr")
    return {
        f"{n} {name}": value
        for n, entry in enumerate(trainer.state.log_history)
        for name, value in entry.items()
        if not name.endswith(timed)
    }


#: Options with which experts are computed in float64.
EAGER_EXPERTS: dict[str, dict[str, Any]] = {"Mixtral": {"experts_implementation": "eager"}}
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
}  # fmt: skip


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Reward completions by their vowels."""
    return [sum(x.count(vowel) for vowel in "aeiou") / 4 for x in completions]


def brevity(
    completion_ids: list[list[int]], bonus: Sequence[Any] = (), **_: Any
) -> list[float | None]:
    """Reward short completions; those of a single token have no reward."""
    more = [float(x) for x in bonus] or [0.0] * len(completion_ids)
    assert {x.device.type for x in bonus} <= {"cpu"}
    pairs = zip(completion_ids, more, strict=True)
    return [None if len(x) == 1 else y - len(x) / 10 for x, y in pairs]


def lottery(completions: list[str], **__: Any) -> list[float]:
    """Reward completions by numbers of Python's and numpy's generators."""
    return [random.random() + np.random.random() for _ in completions]  # noqa: NPY002


def recorded(kind: str, ring: int, *, draws: bool = False) -> Any:
    """Return a function that makes completions of prompts, ragged, some cut off at 9 tokens.

    It has a generator of its own, and with ``draws`` takes a number of Python's and numpy's.
    """
    calls = [0]

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        calls[0] += 1
        if draws:
            lottery([""])
        completions = []
        for n, prompt in enumerate(prompt_ids):
            draw = torch.Generator().manual_seed(
                1000 * calls[0] + 100 * ring + 10 * n + sum(prompt) % 7
            )
            length = int(torch.randint(1, 10, (), generator=draw))
            tokens = torch.randint(3, 30, (length,), generator=draw).tolist()
            completions.append(tokens if length == 9 else [*tokens[:-1], 1])
        return (completions, None) if kind == "grpo" else completions  # log-probabilities, or not

    return generate


#: Functions of torch.distributed that wait for all ranks, as they are before any is replaced, with
#: arguments of two ranks or more.
_ONE, _SEVERAL = torch.ones(2), [torch.ones(1), torch.ones(1)]
COLLECTIVES: dict[Callable[..., Any], tuple[Any, ...]] = {
    dist.all_gather: ([_ONE] * 2, _ONE), dist.all_gather_into_tensor: (_ONE, _SEVERAL[0]),
    dist.all_gather_object: ([0, 0], 0), dist.all_reduce: (_ONE,), dist.barrier: (),
    dist.all_to_all: (_SEVERAL, _SEVERAL), dist.all_to_all_single: (_ONE, _ONE),
    dist.broadcast: (_ONE, 0), dist.broadcast_object_list: ([0], 0), dist.gather: (_ONE, None),
    dist.gather_object: (0, None), dist.monitored_barrier: (), dist.reduce: (_ONE, 0),
    dist.reduce_scatter: (_ONE, [_ONE] * 2), dist.reduce_scatter_tensor: (_SEVERAL[0], _ONE),
    dist.scatter: (_ONE, None), dist.scatter_object_list: ([0], [0, 0]),
}  # fmt: skip


def rollout_of(
    letters: Any, generate: Any, ring: Any, alone: Any, patch: pytest.MonkeyPatch
) -> Callable[[list[str], Any], dict[str, Any]]:
    """Return a ``rollout_func``, which on a ring tries to wait for the ranks that wait for it."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if ring is not None:
            calls = [partial(function, *x) for function, x in COLLECTIVES.items()]
            calls += [partial(gather_object, [0])]
            calls.append(partial(dist.barrier, group=ring.get_group()))
            for gathers in (*calls, partial(trainer.accelerator.gather, torch.ones(1))):
                with pytest.raises(ValueError, match=r"rollout runs on the first .* waits for"):
                    gathers()
            dist.barrier(group=alone)
            # Tensors on a GPU of the first rank, as far as those are told who receive them.
            patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        ids = [letters(x)["input_ids"] for x in prompts]
        bonus = [*torch.arange(len(ids)).double() / 7]
        completions, _ = generate(ids)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "bonus": bonus}

    return rollout


def parallelized(source: Path, cp: ContextParallel | None) -> Any:
    """Return a model from a folder, on a ring if there is one."""
    model = LlamaForCausalLM.from_pretrained(source)
    if cp is not None:
        hf.parallelize(model, cp, reduction="mean")
    return model


#: Options of :func:`sampled` that are not those of the trainer's config.
OWN = ("draws", "rollout", "logits", "model first", "samples", "model", "LoRA")


def sampled(
    rank: int, ranks: int, cp_size: int | None, kind: str, folder: str, options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train GRPO or RLOO in float64, and evaluate once; return metrics, completions and weights.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        cp_size: Ranks of a ring; ``None`` without rings.
        kind: A key of :data:`SAMPLERS`.
        folder: Folder that each rank writes into.
        options: Options of the trainer's config; and ``samples`` for a trainer that generates
            itself, ``model`` for another than Llama, ``LoRA`` for an adapter, ``rollout`` for a
            function in the place of the trainer's, ``draws`` for it and a reward to draw numbers,
            ``logits`` of Ring, and ``model first`` to parallelize it before the trainer is made.
    """
    be_started(rank, ranks)
    own = {name: options.get(name) for name in OWN}
    options = {name: x for name, x in options.items() if name not in own}
    name, draws = own["model"] or "Llama", bool(own["draws"])
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"]) if own["LoRA"] else None
    output, letters = Path(folder) / f"{kind}{rank}", tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(letters), "pad_token_id": 0, "eos_token_id": 1}
    source = Path(folder) / "model"  # of which the trainer loads a reference model
    if rank == 0:
        build(name, **sizes).save_pretrained(source)
    if ranks > 1:
        dist.barrier()
    trainer_of_kind, config_of_kind = SAMPLERS[kind]
    args = config_of_kind(**{
        "output_dir": str(output), "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_generations": 4,
        "num_generations_eval": 2, "gradient_accumulation_steps": 2, "max_completion_length": 9,
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "report_to": "none",
        "save_strategy": "steps", "save_steps": 3, "disable_tqdm": True,
        "dataloader_pin_memory": False, "lr_scheduler_type": "constant", "seed": 7,
        "model_init_kwargs": {"dtype": "auto"} | EAGER_EXPERTS.get(name, {}), "reward_weights": [1.0, 0.5],
        "gradient_checkpointing": False,  # a backward would recompute in float32
    } | options)  # fmt: skip
    rows = Dataset.from_list([{"prompt": x} for x in texts(12)])
    generate = recorded(kind, rank // (cp_size or 1), draws=draws)

    patch, cp = pytest.MonkeyPatch(), None if cp_size is None else context(cp_size)
    functions: dict[str, Any] = {}
    if own["rollout"]:
        alone: Any = [dist.new_group([n]) for n in range(ranks)][rank]
        functions["rollout_func"] = rollout_of(letters, generate, cp and cp.group, alone, patch)
    trainer: Any = trainer_of_kind(
        parallelized(source, cp) if own["model first"] else str(source), reward_funcs=[lottery if draws else vowels, brevity], args=args,
        train_dataset=rows, eval_dataset=rows.select(range(4)), processing_class=letters,
        peft_config=adapter, **functions,
    )  # fmt: skip
    if not own["samples"] and not functions:
        trainer._generate_single_turn = generate
    of_devices = trainer._logs
    handle = None if cp is None else hf.parallelize(trainer, cp, logits=own["logits"] or "local")
    completions, numbers = [], []
    prepare = trainer._generate_and_score_completions

    def kept(*inputs: Any) -> Any:
        made = prepare(*inputs)
        patch.undo()
        completions.append(made["completion_ids"].tolist())
        numbers.append(lottery([""]))
        return made

    trainer._generate_and_score_completions = kept
    with Wide():
        trainer.train()
        trainer.evaluate()
    weights = "model.safetensors" if adapter is None else "adapter_model.safetensors"
    saved = load_file(output / "checkpoint-3" / weights) if rank == 0 else {}
    timed = ("runtime", "per_second", "step_time", "flos", "lr")
    metrics = {
        f"{n} {name}": value
        for n, entry in enumerate(trainer.state.log_history)
        for name, value in entry.items() if not name.endswith(timed)
    }  # fmt: skip
    logs = {name: [*trainer._logs[name]] for name in ("prompt", "completion", "advantages")}
    if handle is not None:
        handle.remove()
        assert trainer._logs is of_devices and not of_devices["prompt"]
    return {
        "metrics": metrics, "completions": completions, "logs": logs, "numbers": numbers,
        "weights": {name: x.double().sum().item() for name, x in saved.items()},
    }  # fmt: skip
