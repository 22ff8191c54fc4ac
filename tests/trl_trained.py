"""Trains tiny models with Trainers of transformers and TRL, on rings in meshes or without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trained
from accelerate.utils import gather_object
from datasets import Dataset
from hf_models import Wide, build
from on_ranks import be_started
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
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

import ring_torch
from ring_torch import ContextParallel, hf

#: Trainers of TRL, and their configs.
TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig), "reward": (RewardTrainer, RewardConfig),
    "gkd": (GKDTrainer, GKDConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig),
    "cpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig), "tpo": (TPOTrainer, TPOConfig),
}  # fmt: skip
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
}  # fmt: skip
READ_LOGITS = ("cpo", "orpo", "tpo", "gkd")
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.:()-'\n"
#: Changes of a small model's config for :func:`tokenizer`.
LETTER_SIZES = {"vocab_size": 3 + len(LETTERS), "pad_token_id": 0, "eos_token_id": 1}
LORA = LoraConfig(target_modules=["q_proj", "down_proj"])


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


def rows_of(kind: str, count: int, data: str = "text") -> Dataset:
    """Return a data set for a trainer; for ``sft`` of texts, of completions, or a chat.

    Others have prompts with a chosen and a rejected completion, which is shorter.
    """
    first, second, third = texts(count), texts(count, 3000), texts(count, 7000)
    if kind in ("sft", "gkd"):
        makes: dict[str, Any] = {
            "text": lambda x, y: {"text": x, "words": y},
            "completion": lambda x, y: {"prompt": x, "completion": y},
            "chat": lambda x, y: {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": y}]},
        }  # fmt: skip
        return Dataset.from_list([*map(makes["chat" if kind == "gkd" else data], first, second)])
    if kind == "kto":
        both = zip(first, second, third, strict=True)
        return Dataset.from_list([
            {"prompt": prompt, "completion": text, "label": is_chosen}
            for prompt, x, y in both for text, is_chosen in ((x, True), (y[9:], False))
        ])  # fmt: skip
    columns = {"prompt": first, "chosen": second, "rejected": [x[9:] for x in third]}
    return Dataset.from_dict(columns | ({"reference": texts(count, 9000)} if kind == "tpo" else {}))


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


def sampler_of(
    kind: str, options: dict[str, Any], *, model: str = "Llama", dtype: Any = torch.float64,
    rows: int = 8, reward: Callable[..., Any] = vowels, cp: ContextParallel | None = None,
    sizes: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Return a Trainer of GRPO or RLOO, of a model in a folder, of which it loads a reference.

    With ``cp`` it is given a model that is parallelized before.
    """
    source, (trainer, config) = f"{options['output_dir']}/model", SAMPLERS[kind]
    if not dist.is_initialized() or dist.get_rank() == 0:
        build(model, **LETTER_SIZES | (sizes or {})).to(dtype).save_pretrained(source)
    if dist.is_initialized():
        dist.barrier()
    prompts = Dataset.from_list([{"prompt": x} for x in texts(rows)])
    loaded: Any = source
    if cp is not None:
        hf.parallelize(loaded := LlamaForCausalLM.from_pretrained(source), cp, reduction="mean")
    args = config(**trained.SETTINGS | {
        "max_completion_length": 9, "gradient_checkpointing": False,  # it would be in float32
        "model_init_kwargs": {"dtype": "auto"} | ({"experts_implementation": "eager"} if model == "Mixtral" else {}),
    } | options)  # fmt: skip
    return trainer(
        loaded, reward_funcs=[reward, brevity], args=args, train_dataset=prompts,
        eval_dataset=prompts.select(range(-(-rows // 3))), processing_class=tokenizer(), **more,
    )  # fmt: skip


#: Sizes of accelerate's ParallelismConfig; rings beside the Trainer's own DDP have no such mesh.
MESHES: dict[str, dict[str, int]] = {
    "ring": {"cp_size": 2}, "ring of 3": {"cp_size": 3},
    "data x ring": {"dp_shard_size": 2, "cp_size": 2},
    "data x ring of 3": {"dp_shard_size": 2, "cp_size": 3},
    "data of 4 x ring": {"dp_shard_size": 4, "cp_size": 2},
    "HSDP": {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2},
    "TP": {"cp_size": 2, "tp_size": 2},
    "DDP": {"cp_size": 2}, "DDP of two": {"dp_replicate_size": 2, "cp_size": 2},
}  # fmt: skip

#: How torch's tensor parallelism splits the layers of Llama.
_SPLIT = {
    **{f"layers.*.self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
    **{f"layers.*.mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")},
    "layers.*.self_attn.o_proj": RowwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def be_fsdp2(args: TrainingArguments, sizes: dict[str, int], **settings: Any) -> None:
    """Set accelerate's state to FSDP2 on a mesh of these sizes, as it is on GPUs.

    Accelerate makes FSDP for GPU kinds alone. So on CPU ranks tests set ``distributed_type`` and
    ``fsdp_plugin`` of its state, after the arguments are made, which reset it, and before the
    Trainer is, which reads it. No code of accelerate is replaced.
    """
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = Accelerator(mixed_precision=args.mixed_precision, cpu=True).state
    state.parallelism_config = ParallelismConfig(**sizes) if sizes else None
    # The state takes this from the PartialState each time that an Accelerator is made.
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "FULL_STATE_DICT"}
        | settings
    )  # fmt: skip
    if args.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(args.mixed_precision)


@dataclass(frozen=True)
class Steps:
    """Steps of a Trainer: with accumulation, clipped gradients, evaluations and a checkpoint.

    Attributes:
        kind: "trainer", or a key of :data:`TRAINERS` or :data:`SAMPLERS`.
        mesh: Key of :data:`MESHES`; or "none", for FSDP2 without a mesh, one ring of all ranks.
        options: Options of the arguments.
        settings: Settings of FSDP2; ``drifts`` for other weights on each rank at first.
        model: The model's name, and changes of its config.
        way: "LoRA", with the model itself as a reference; "model first", parallelized before the
            Trainer is made; "precomputed", the reference's log-probabilities of all rows first, as
            of rows that are evaluated; "samples", for a sampler that generates itself, where
            completions are recorded otherwise; or "rollout", for a function that draws numbers.
        logits: As of ``hf.parallelize``; of a plain Trainer "gather" has a loss that reads them.
        data: Arguments of :func:`trained.documents`, or ``is_stream``.
        dtype: The dtype of weights.
        resumed: Mesh on which the second half runs again, from the checkpoint.
        split: Ranks that hold different parts of ``layers.0.mlp.down_proj.weight``.
        tolerance: Relative error.
        unlike: Options and changes of the config with another first loss.
    """

    kind: str
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: tuple[str, dict[str, Any]] = ("Llama", {})
    way: str = ""
    logits: Any = "local"
    data: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    resumed: str | None = None
    split: int = 2
    tolerance: float = 1e-6
    unlike: tuple[dict[str, Any], dict[str, Any]] | None = None


def accuracy(result: Any) -> dict[str, float]:
    right = result.predictions.argmax(-1)[:, :-1] == result.label_ids[:, 1:]
    return {"accuracy": float(right[result.label_ids[:, 1:] != -100].mean())}


def trainer_of(
    kind: str, options: dict[str, Any], *, model: tuple[str, dict[str, Any]] = ("Llama", {}),
    dtype: Any = torch.float64, way: str = "", rows: Any = None, loss: Any = None,
    cp: ContextParallel | None = None, ready: Callable[[Any], None] = lambda _: None,
) -> Any:  # fmt: skip
    """Return a Trainer over a small model, of TRL with a reference that is another model.

    ``kind``, ``model``, ``dtype`` and ``way`` are those of :class:`Steps`; ``ready`` is called with
    the arguments before the Trainer is made.
    """
    name, changes = model
    if kind == "trainer":
        args = TrainingArguments(**trained.SETTINGS | options)
        ready(args)
        plain = trained.model_of("LoRA") if way == "LoRA" else build(name, **changes)
        metrics = None if args.prediction_loss_only or loss is not None else accuracy
        return Trainer(
            plain.to(dtype), args, trained.collate, trained.documents() if rows is None else rows, trained.documents(5),
            compute_loss_func=loss, compute_metrics=metrics,
        )  # fmt: skip
    letters, (trainer, config) = tokenizer(), TRAINERS[kind]
    letters.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    sizes = LETTER_SIZES | changes
    if kind == "reward":
        sizes |= {"head": "ForSequenceClassification", "num_labels": 1}
    others = {"dpo": "ref_model", "kto": "ref_model", "gkd": "teacher_model"}
    more: dict[str, Any] = {}
    if way == "LoRA":
        more = {"peft_config": LORA}
    elif kind in others:
        more = {others[kind]: build(name, **sizes, rms_norm_eps=0.1).to(dtype)}
    policy = build(name, **sizes).to(dtype)
    if way == "model first" and cp is not None:
        hf.parallelize(policy, cp, reduction="mean")
    # A backward would compute what is checkpointed in float32.
    args = config(**trained.SETTINGS | {"gradient_checkpointing": False} | options)
    ready(args)
    return trainer(
        policy, **more, processing_class=letters, train_dataset=rows,
        eval_dataset=rows.select(range(5)), args=args,
    )  # fmt: skip


def _made(
    rank: int, ranks: int, x: Steps, mesh: str | None, folder: str, cp: Any, patch: pytest.MonkeyPatch
) -> Any:  # fmt: skip
    """Return the Trainer of steps; the arguments are those of :func:`learned`."""
    settings, is_plain = dict(x.settings), x.kind == "trainer"
    drifts = settings.pop("drifts", False)
    options: dict[str, Any] = {
        "output_dir": folder, "max_steps": 4 if x.resumed else 2, "max_grad_norm": 0.5, "save_strategy": "steps",
        "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    if x.kind in SAMPLERS:
        options |= {"num_generations": 4, "num_generations_eval": 2, "reward_weights": [1.0, 0.5]}
        draws, more = x.way == "rollout", {"peft_config": LORA} if x.way == "LoRA" else {}
        generate = recorded(x.kind, rank // (2 if cp else 1), draws=draws)
        if draws:
            alone: Any = [dist.new_group([n]) for n in range(ranks)][rank]
            more["rollout_func"] = rollout_of(tokenizer(), generate, cp and cp.group, alone, patch)
        trainer = sampler_of(
            x.kind, options | x.options, model=x.model[0], rows=12,
            reward=lottery if draws else vowels, cp=cp if x.way == "model first" else None, **more,
        )  # fmt: skip
        if x.way not in ("samples", "rollout"):
            trainer._generate_single_turn = generate
        return trainer
    options |= {"include_num_input_tokens_seen": "all"} | ({} if is_plain else {"max_length": 96})
    if is_plain:
        rows: Any = trained.Stream() if x.data.get("is_stream") else trained.documents(**x.data)
    else:
        rows = rows_of(x.kind, 40 if x.kind == "sft" else 16)
    if x.way == "precomputed":  # in a file that all ranks see
        options["precompute_ref_log_probs"] = True
        if rank == 0:
            rows.save_to_disk(f"{folder}/rows")
        if ranks > 1:
            dist.barrier()
        rows = Dataset.load_from_disk(f"{folder}/rows")

    def ready(args: TrainingArguments) -> None:
        if mesh is not None and not mesh.startswith("DDP"):
            be_fsdp2(args, MESHES.get(mesh, {}), **settings)

    trainer = trainer_of(
        x.kind, options | x.options, model=x.model, dtype=x.dtype, way=x.way, rows=rows, cp=cp,
        ready=ready, loss=trained.mean_of_squares if is_plain and x.logits == "gather" else None,
    )  # fmt: skip
    if drifts and rank:
        nn.init.zeros_(trainer.model.model.embed_tokens.weight)
    if trainer.args.fp16:  # as on a GPU; accelerate makes neither for CPUs
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return trainer


def learned(
    rank: int, ranks: int, x: Steps, mesh: str | None, folder: str, checkpoint: str | None = None
) -> dict[str, Any]:
    """Train a Trainer, evaluate and save; return its logs, weights and how they are split.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        x: The steps, but for their mesh.
        mesh: As of :class:`Steps`; "one" for FSDP2 without a ring; ``None`` for neither.
        folder: Where checkpoints are written.
        checkpoint: Folder to resume from.
    """
    if ranks > 1:
        be_started(rank, ranks)
    is_plain, has_ddp = x.kind == "trainer", mesh is not None and mesh.startswith("DDP")
    cp = trained.context(2) if has_ddp else ContextParallel() if mesh == "none" else None
    patch = pytest.MonkeyPatch()
    trainer = _made(rank, ranks, x, mesh, folder, cp, patch)
    of_devices = getattr(trainer, "_logs", {})
    if mesh not in (None, "one") and cp is None:
        on_device = trainer.accelerator.torch_device_mesh
        if "tp_size" in MESHES[str(mesh)]:
            parallelize_module(trainer.model.model, on_device["tp"], _SPLIT)
        cp = ContextParallel(on_device["cp"])
        assert hf.fsdp2(trainer, cp, logits=x.logits) is hf.fsdp2(trainer, cp, logits=x.logits)
    elif cp is not None:
        reads, options = x.kind in READ_LOGITS, {"logits": x.logits}
        for refused in ("local", "none") if reads else ():
            with pytest.raises(ValueError, match=r"reads logits .*give logits='gather'"):
                hf.parallelize(trainer, cp, logits=refused)
        handle = hf.parallelize(trainer, cp, **({} if reads else options))
        assert hf.parallelize(trainer, cp, **({"logits": "gather"} if reads else options)) is handle
    # KTO gathers the rewards of a batch that has none of a kind in torch's default dtype.
    torch.set_default_dtype(x.dtype)
    wide = Wide() if x.dtype is torch.float64 else nullcontext()
    try:
        with wide, ring_torch.check(every=5) if has_ddp and is_plain else nullcontext():
            if has_ddp and checkpoint:  # accelerate trains without DDP what it has evaluated
                trainer.evaluate()
            trainer.train(resume_from_checkpoint=checkpoint)
            if x.way == "precomputed":
                trainer.evaluate(Dataset.load_from_disk(f"{folder}/rows").select(range(9, 14)))
            predicts = is_plain and trainer.compute_metrics is not None
            predicted = trainer.predict(trained.documents(5)) if predicts else None
    finally:
        torch.set_default_dtype(torch.float32)
        patch.undo()
    if is_plain and mesh in MESHES and cp is not None and not x.options and not has_ddp:
        assert (
            hf.verify(trainer, cp, trained.collate(trained.documents()[:2])).gradients is not None
        )
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): x.detach()
        for name, x in trainer.model.named_parameters()
    }
    names = ("prompt", "completion", "advantages") if of_devices else ()
    logs = {name: [*trainer._logs[name]] for name in names}
    if logs and cp is not None:
        hf.parallelize(trainer, cp, logits=x.logits).remove()
        assert trainer._logs is of_devices and not of_devices["prompt"]
    return {
        "metrics": trained.logged(trainer),
        "logs": logs, "number": lottery([""]),  # drawn after what steps have drawn
        "predictions": torch.from_numpy(predicted.predictions) if predicted else torch.zeros(0),
        "tokens": trainer.state.num_input_tokens_seen,
        "samples": trainer.get_total_train_batch_size(trainer.args),
        "operations": trainer.state.total_flos,
        "weights": {
            name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights.items()
        },
        "split": {
            name.removeprefix("model."): round(x.numel() / x.to_local().numel(), 1)
            for name, x in weights.items() if isinstance(x, DTensor) and x.to_local().numel()
        },
        "files": sorted(x.name for x in Path(folder).glob("checkpoint-2/*")) if rank == 0 else [],
    }  # fmt: skip
