"""Verify a parallelized model: check the batch, run it split and twice whole, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_core import UnsupportedError
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.verification.runs import HFRunner, Target
from ring_torch.verification.comparison import compare_with_whole
from ring_torch.verification.judgement import VerifyReport

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
    runner = HFRunner(target, batch)
    return compare_with_whole(runner, "eager", "sdpa" if runner.has_sdpa else None)


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
