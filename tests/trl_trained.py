"""Trains tiny models with TRL's trainers, and returns their logs and evaluations."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from datasets import Dataset
from hf_models import build
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from trained import be_started, context
from transformers import PreTrainedTokenizerFast
from trl import (  # fmt: skip
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from ring_torch import hf

#: Trainers, their configs, and options that each needs.
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"packing": True}), "reward": (RewardTrainer, RewardConfig, {}),
    "gkd": (GKDTrainer, GKDConfig, {"lmbda": 0.0}), "dpo": (DPOTrainer, DPOConfig, {}),
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
    kind: str, rows: Dataset, options: dict[str, Any], dtype: Any, **changes: Any
) -> Any:
    """Return a Trainer of TRL over a small model of this dtype."""
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
    trainer, config, _ = TRAINERS[kind]
    return trainer(
        build(name, **sizes).to(dtype), **more, processing_class=letters, train_dataset=rows,
        eval_dataset=rows.select(range(5)), args=config(**options),
    )  # fmt: skip


def trl_trained(
    rank: int, ranks: int, cp_size: int | None, kind: str, folder: str
) -> dict[str, Any]:
    """Train with a trainer of TRL and evaluate once; return the metrics.

    Losses of :data:`READ_LOGITS` read logits, so these Trainers are refused without whole ones.
    """
    be_started(rank, ranks)
    options: dict[str, Any] = {
        "output_dir": str(Path(folder) / f"{kind}{rank}"), "max_steps": 4, "logging_steps": 1,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-3,
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "max_length": 96,
    } | TRAINERS[kind][2]  # fmt: skip
    rows = rows_of(kind, 40 if kind == "sft" else 16)
    trainer = trainer_of(kind, rows, options, torch.float32)
    if cp_size is not None and kind in READ_LOGITS:
        with pytest.raises(ValueError, match=r"reads logits .*give logits='gather'"):
            hf.parallelize(trainer, context(cp_size))
        hf.parallelize(trainer, context(cp_size), logits="gather")
    elif cp_size is not None:
        hf.parallelize(trainer, context(cp_size))
    trainer.train()
    trainer.evaluate()
    timed = ("runtime", "per_second", "preparation_time", "flos", "lr")
    return {
        f"{n} {name}": value
        for n, entry in enumerate(trainer.state.log_history)
        for name, value in entry.items()
        # Means over all tokens, those of padding too, which have no meaning on a ring.
        if not name.endswith(timed) and not (kind in READ_LOGITS and "logits/" in name)
    }
