"""Run one batch on a model of transformers that ``hf.parallelize`` has changed, and undo that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_core import divisor_of
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.check import is_of_transformers, unwrapped
from ring_torch.hf.models.classes import has_eager_attention
from ring_torch.hf.models.code import parameters_of
from ring_torch.hf.models.hooks import ModelHooks
from ring_torch.verification.runs import Runner, class_name
from ring_torch.verification.state import SavedFields
from ring_torch.verification.trace import Tokens

#: Names of a sequence's ids, embeddings and padding mask in a batch: first those of a model with
#: one sequence, or of an encoder; then those of a decoder.
_SEQUENCES = (
    ("input_ids", "inputs_embeds", "attention_mask"),
    ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
)


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


class HFRunner(Runner):
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
        fields = SavedFields(self.model)
        try:
            for undo in reversed(self.target.undo):
                undo()
            with self.hooks.all_ranks.whole():  # of what the model itself calls of ours
                yield
        finally:
            fields.restore()

    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return the model's own loss, if any, and a loss to differentiate.

        Args:
            attention: Name of an attention of transformers that the model is set to first, for a
                whole run; ``None`` leaves the model's, for a split run. Models that write their
                attention out have no other.
        """
        if attention is not None and not has_eager_attention(self.inner):
            self.inner.set_attn_implementation(attention)
        output = self.model(**self.batch)
        loss = output.get("loss")
        return (loss, loss) if isinstance(loss, Tensor) else (None, self._stand_in_loss(output))

    def _stand_in_loss(self, output: Mapping[str, Any]) -> Tensor:
        """Return a loss for a model that has none: a fixed random weighting of per-token outputs.

        Outputs are ``[B, T, ...]`` or, on a ring, ``[B, T_local, ...]``; padding has weight 0.
        """
        tokens = self.sequences[-1]
        total = torch.zeros((), device=tokens.positions.device)
        for x in output.values():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            is_whole = x.shape[1] == tokens.length
            if len(x) != self.rows or not (is_whole or x.shape[1] == tokens.local_length):
                continue
            generator = torch.Generator().manual_seed(x.ndim)
            shape = self.rows, tokens.length, *x.shape[2:]
            weights = torch.randn(shape, generator=generator, device="cpu")
            weights = weights.to(x.device, x.dtype) * tokens.real.reshape(
                *tokens.real.shape, *[1] * (x.ndim - 2)
            )
            if is_whole:
                total = total + (x * weights).sum()
            else:
                # The caller sums gradients over the ranks, and divides by the hooks' factor.
                local = x[:, tokens.local_positions] * weights[:, tokens.positions]
                total = total + local.sum() * self.hooks.factor
        return total


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
