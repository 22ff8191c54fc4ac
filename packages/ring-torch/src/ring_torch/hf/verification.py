"""Verification of a model of transformers that ``hf.parallelize`` has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_core import UnsupportedError, divisor_of
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.check import is_of_transformers, unwrapped
from ring_torch.hf.models.classes import has_eager_attention
from ring_torch.hf.models.code import parameters_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute
from ring_torch.hf.models.recurrent import is_recurrent, rounded_otherwise
from ring_torch.verification.judgement import VerifyReport, compare_with_whole
from ring_torch.verification.runs import Runner, SavedFields, class_name, weighted_sum
from ring_torch.verification.trace import Tokens

#: Names of a sequence's ids, embeddings and padding mask in a batch: first those of a model with
#: one sequence, or of an encoder; then those of a decoder.
_SEQUENCES = (
    ("input_ids", "inputs_embeds", "attention_mask"),
    ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
)

#: Tokens of a chunk of a recurrent layer's scan in the second whole run; transformers takes 64.
_OTHER_CHUNKS = 16


@dataclass(frozen=True)
class Target:
    """Parallelized model, as ``verify`` takes it.

    Attributes:
        model: Module whose ``__call__`` takes whole batches.
        hooks: Hooks that split its batches.
        undo: Functions that undo each change ``hf.parallelize`` has made. Called from the last to
            the first they leave the model as it was. Empty once the handle was removed.
    """

    model: nn.Module
    hooks: ModelHooks
    undo: list[Callable[[], object]]


@contextmanager
def unhooked(target: Target) -> Iterator[None]:
    """Undo within the block what ``hf.parallelize`` has changed, and put it back at its end.

    Inside of ``cp.whole()`` alone the model would compute by our masks and attention.
    """
    fields = SavedFields(target.model)
    try:
        for undo in reversed(target.undo):
            undo()
        with target.hooks.all_ranks.whole():  # of what the model itself calls of ours
            yield
    finally:
        fields.restore()


def verify_target(target: Target, batch: Mapping[str, Any]) -> VerifyReport:
    """Run a batch split and whole, and compare; see :meth:`ring_torch.hf.Handle.verify`."""
    if not target.undo:
        raise ValueError(
            "verify: remove() was called, so the model is not parallelized; call hf.parallelize again"
        )
    _check_batch(batch, has_recurrent="recurrent" in target.hooks.report.hooks)
    model = target.model
    is_flat = any(getattr(x, "_fsdp_flattened", False) for x in model.parameters())
    if is_flat or any(isinstance(x, FullyShardedDataParallel) for x in model.modules()):
        raise UnsupportedError(
            "verify: the model is in FullyShardedDataParallel, whose parameters its parts cannot run "
            "with; verify it before it is wrapped, or use fully_shard"
        )
    runner = _Runner(target, batch)
    return compare_with_whole(runner, "eager", "sdpa" if runner.has_sdpa else None)


def _check_batch(batch: object, *, has_recurrent: bool) -> None:
    """Refuse batches that cannot be given to a whole model unchanged."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    tokens, mask = tokens_of(batch), batch.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("verify: batch must have input_ids [B, T] or inputs_embeds [B, T, dim]")
    stated = sorted({*STATED} & {name for name, x in batch.items() if x is not None})
    if isinstance(mask, Tensor) and mask.ndim == 2 and int(mask.max()) > 1:
        stated = stated or ["attention_mask that numbers documents"]
    if stated:
        raise UnsupportedError(
            f"verify: {', '.join(stated)}: with transformers' own attention the whole model does not "
            f"read documents from it; give position_ids that start again with each document, and no "
            f"attention_mask"
        )
    positions = batch.get("position_ids")
    if has_recurrent and isinstance(positions, Tensor) and (positions.diff(dim=-1) < 0).any():
        raise UnsupportedError(
            "verify: position_ids that start again: recurrent layers of the whole model carry their "
            "states from document to document; give one document"
        )


class _Runner(Runner):
    """Runs one batch on a model of transformers, split and whole.

    Args:
        target: The parallelized model.
        batch: The whole batch, the same on all ranks.
    """

    def __init__(self, target: Target, batch: Mapping[str, Any]) -> None:
        self.target, self.hooks = target, target.hooks
        self.inner: Any = unwrapped(target.model)
        rows, length = tokens_of(batch).shape[:2]
        super().__init__(
            target.model, target.hooks.sharding.ranks, [*_sequences(target.hooks, batch)],
            (rows, length), target.hooks.factor,
        )  # fmt: skip
        self._undo: list[Callable[[], object]] = []  # of what differs in the second whole run
        self._whole_runs = 0
        takes_cache = "use_cache" in parameters_of(type(self.inner))
        self.batch = ({"use_cache": False} if takes_cache else {}) | dict(batch)

    @property
    def name(self) -> str:
        """Name of the class of transformers."""
        return class_name(self.inner)

    @property
    def has_sdpa(self) -> bool:
        """True if every part of the model can compute its attention with torch's SDPA."""
        models = [x for x in self.inner.modules() if is_of_transformers(x)]
        return not has_eager_attention(self.inner) and all(
            getattr(x, "_supports_sdpa", False) for x in models
        )

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Undo within the block what ``hf.parallelize`` has changed, and put it back at its end."""
        with unhooked(self.target):
            try:
                yield
            finally:
                while self._undo:
                    self._undo.pop()()

    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return the model's own loss, if any, and a loss to differentiate.

        A whole run is with the attention of transformers of this name; models that write their
        attention out have no other. For a model without a loss it is a weighting of its outputs
        ``[B, T, ...]``.
        """
        if attention is not None and not has_eager_attention(self.inner):
            self.inner.set_attn_implementation(attention)
        self._whole_runs += attention is not None
        if self._whole_runs > 1 and self.hooks.splits_recurrent:
            # The noise of a split scan is that of the scan, not of attention alone.
            for module in filter(is_recurrent, self.inner.modules()):
                forward = partial(rounded_otherwise(module, _OTHER_CHUNKS), module)
                self._undo.append(replace_attribute(module, "forward", forward))
        output = self.model(**self.batch)
        if isinstance(loss := output.get("loss"), Tensor):
            return loss, loss
        tokens = self.sequences[-1]
        total = torch.zeros((), device=tokens.positions.device)
        for x in output.values():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            if len(x) == self.rows and x.shape[1] == tokens.length:
                total = total + weighted_sum(x, 1, tokens, is_split=False)
            elif len(x) == self.rows and x.shape[1] == tokens.local_length:
                # The sum of gradients over the ranks is divided by the hooks' factor.
                total = total + weighted_sum(x, 1, tokens, is_split=True) * self.hooks.factor
        return None, total


def _sequences(hooks: ModelHooks, batch: Mapping[str, Any]) -> Iterator[Tokens]:
    """Yield the sequences of a batch: one, or an encoder's and a decoder's."""
    sharding = hooks.sharding
    for names in _SEQUENCES:
        ids, embeds, mask = (batch.get(name) for name in names)
        tokens = ids if ids is not None else embeds
        if tokens is None and names is _SEQUENCES[-1] and hooks.is_pair:
            tokens = batch.get("labels")  # the model makes the decoder's tokens from them
        if tokens is None:
            continue
        length, device = tokens.shape[1], tokens.device
        padded = length + -length % divisor_of(sharding.layout, sharding.ranks.size)
        positions = sharding.positions(padded, device=device)
        local_positions = (positions < length).nonzero().flatten()
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if mask is not None:
            real &= mask != 0
        yield Tokens(length, len(positions), positions[local_positions], local_positions, real)
