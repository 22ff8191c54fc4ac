"""Verify a parallelized model: check the batch, run it split and twice whole, and compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_core import UnsupportedError
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.verification.comparison import compare_traces
from ring_torch.hf.verification.judgement import (
    ComparedRuns,
    VerifyReport,
    gradient_differences,
    judge,
)
from ring_torch.hf.verification.runs import Runner, Target
from ring_torch.hf.verification.state import unchanged

_NO_DOCUMENTS = (
    "verify: {}: with transformers' own attention the whole model does not read documents from it; "
    "give position_ids that start again with each document, and no attention_mask"
)


def verify_target(target: Target, batch: Mapping[str, Any]) -> VerifyReport:
    """Run a batch split and whole, and compare; see :meth:`ring_torch.hf.Handle.verify`."""
    if not target.undo:
        raise ValueError(
            "verify: remove() was called, so the model is not parallelized; call hf.parallelize again"
        )
    _check_batch(batch)
    _check_wrappers(target.model)
    runner = Runner(target, batch)
    with unchanged(target.model):
        split = runner.run()
        with runner.unhooked():
            whole = runner.run("eager")
            errors = runner.gradient_distances(split, whole)
            split.gradients.clear()  # free their memory before the next run
            other = runner.run("sdpa") if runner.has_sdpa else runner.run("eager", perturbs=True)
            noise = runner.gradient_distances(other, whole)
            sizes = runner.gradient_distances(None, whole)
    if whole.loss is not None and not math.isfinite(whole.loss):
        raise ValueError(
            f"verify: the whole model's loss is {whole.loss}, with which nothing can be compared; "
            f"give a batch whose loss is finite"
        )
    outputs = compare_traces(split.trace, whole.trace, other.trace, runner.sequences, runner.rows)
    gradients = gradient_differences(errors, noise, sizes, runner, whole.trace.floor)
    return judge(runner, ComparedRuns(split, whole, other), outputs, gradients)


def _check_batch(batch: object) -> None:
    """Refuse batches that cannot be given to a whole model unchanged.

    Raises:
        ValueError: The batch is no mapping, or has no tokens.
        UnsupportedError: It states documents in a way that transformers' own attention does not
            read.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    tokens = tokens_of(batch)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("verify: batch must have input_ids [B, T] or inputs_embeds [B, T, dim]")
    mask = batch.get("attention_mask")
    numbers_documents = isinstance(mask, Tensor) and mask.ndim == 2 and int(mask.max()) > 1
    if stated := sorted({*STATED} & {name for name, x in batch.items() if x is not None}):
        raise UnsupportedError(_NO_DOCUMENTS.format(", ".join(stated)))
    if numbers_documents:
        raise UnsupportedError(_NO_DOCUMENTS.format("attention_mask that numbers documents"))


def _check_wrappers(model: nn.Module) -> None:
    """Refuse a model in FSDP1, or one that holds flat parameters of it.

    Raises:
        UnsupportedError: It is or does: modules within cannot run with such parameters.
    """
    is_flat = any(getattr(x, "_fsdp_flattened", False) for x in model.parameters())
    if is_flat or any(isinstance(x, FullyShardedDataParallel) for x in model.modules()):
        raise UnsupportedError(
            "verify: the model is in FullyShardedDataParallel, whose parameters its parts cannot run "
            "with; verify it before it is wrapped, or use fully_shard"
        )
