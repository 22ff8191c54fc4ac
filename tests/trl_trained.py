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
from trl import (
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

PREFERENCES: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig), "tpo": (TPOTrainer, TPOConfig),
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
    """Return a data set of prompts with a chosen and a rejected completion."""
    three = zip(texts(count), texts(count, 3000), texts(count, 7000), strict=True)
    return Dataset.from_list([{"prompt": a, "chosen": b, "rejected": c} for a, b, c in three])


def trl_trained(
    rank: int, ranks: int, cp_size: int | None, kind: str, folder: str
) -> dict[str, Any]:
    """Train with a trainer of TRL and evaluate once; return the metrics.

    Losses of :data:`READ_LOGITS` read logits, so these Trainers are refused without whole ones.
    """
    be_started(rank, ranks)
    common: dict[str, Any] = {
        "output_dir": str(Path(folder) / f"{kind}{rank}"), "max_steps": 4, "logging_steps": 1,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-3,
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant",
    }  # fmt: skip
    tokenizer_of_letters = tokenizer()
    letters: dict[str, Any] = {
        "vocab_size": len(tokenizer_of_letters),
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    trainer: Any
    if kind == "sft":
        rows = Dataset.from_list([{"text": x} for x in texts(40)])
        trainer = SFTTrainer(
            build("Llama", **letters).float(), processing_class=tokenizer_of_letters, train_dataset=rows,
            eval_dataset=rows.select(range(5)),
            args=SFTConfig(**common, packing=True, max_length=96),
        )  # fmt: skip
    elif kind == "reward":
        model = build("Llama", head="ForSequenceClassification", num_labels=1, **letters).float()
        trainer = RewardTrainer(
            model, processing_class=tokenizer_of_letters, train_dataset=pairs(16), eval_dataset=pairs(5),
            args=RewardConfig(**common, max_length=96),
        )  # fmt: skip
    elif kind == "gkd":
        turns = [
            [
                {"role": "user", "content": x["prompt"]},
                {"role": "assistant", "content": x["chosen"]},
            ]
            for x in pairs(16)
        ]
        tokenizer_of_letters.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        data = Dataset.from_list([{"messages": x} for x in turns])
        trainer = GKDTrainer(
            build("Llama", **letters).float(), teacher_model=build("Llama", **letters, rms_norm_eps=0.1).float(),
            processing_class=tokenizer_of_letters, train_dataset=data, eval_dataset=data.select(range(5)),
            args=GKDConfig(**common, lmbda=0.0, max_length=96),
        )  # fmt: skip
    else:
        trainer_of_kind, config_of_kind = PREFERENCES[kind]
        data, model = pairs(16), build("Llama", **letters).float()
        if kind == "kto":
            right, wrong = (
                [
                    {"prompt": x["prompt"], "completion": x[name], "label": name == "chosen"}
                    for x in data
                ]
                for name in ("chosen", "rejected")
            )
            data = Dataset.from_list(
                [row for both in zip(right, wrong, strict=True) for row in both]
            )
        if kind == "tpo":
            data = data.add_column("reference", texts(16, 9000))
        reference = (
            {"ref_model": build("Llama", **letters).float()} if kind in ("dpo", "kto") else {}
        )
        trainer = trainer_of_kind(
            model, **reference, processing_class=tokenizer_of_letters, train_dataset=data,
            eval_dataset=data.select(range(5)), args=config_of_kind(**common, max_length=96),
        )  # fmt: skip
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
