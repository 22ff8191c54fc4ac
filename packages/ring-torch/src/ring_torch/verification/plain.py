"""Verification of a model that is given its rank's tokens, and whole ones in ``cp.whole()``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_core import UnsupportedError
from ring_core.base.arguments import describe_value, is_integer
from ring_torch.sharding import Sharding
from ring_torch.verification.judgement import VerifyReport, compare_with_whole
from ring_torch.verification.runs import Runner, weighted_sum
from ring_torch.verification.trace import Tokens, tensors_in


def verify_model(
    model: nn.Module, sharding: Sharding, batch: Mapping[str, Any], dims: Mapping[str, int] | None
) -> VerifyReport:
    """Run a batch split and whole, and compare; see :meth:`ContextParallel.verify`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {describe_value(model)}")
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"batch must be a mapping of names of arguments to values, got {type(batch).__name__}"
        )
    runner = _PlainRunner(model, sharding, batch, _checked_dims(batch, dims))
    if runner.fsdp_names:
        raise UnsupportedError(
            "verify: fully_shard shards the module over the ring; verify it before"
        )
    return compare_with_whole(runner, "torch", "math")


def _checked_dims(batch: Mapping[str, Any], dims: Mapping[str, int] | None) -> dict[str, int]:
    """Return the dimension of the sequence of each argument that is split.

    Without ``dims`` it is dimension 1 of every tensor that has one. A name that is no tensor of the
    batch, a dimension that is not one of its, and an empty result are a ValueError.
    """
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    if dims is None:
        dims = {name: 1 for name, x in tensors.items() if x.ndim > 1}
    elif not isinstance(dims, Mapping):
        raise ValueError(
            f"dims must be a mapping of names to dimensions, got {describe_value(dims)}"
        )
    for name, dim in dims.items():
        if name not in tensors:
            raise ValueError(
                f"dims names {name!r}, and the tensors of the batch are {', '.join(tensors)}"
            )
        if not is_integer(dim) or not 0 <= dim < tensors[name].ndim:
            raise ValueError(
                f"dims[{name!r}] must be a dimension of {tuple(tensors[name].shape)}, got {dim!r}"
            )
    if not dims:
        raise ValueError("verify: no argument of the batch is split; name them in dims")
    return dict(dims)


class _PlainRunner(Runner):
    """Runs one batch on a module, split and whole.

    Args:
        model: The module, which takes the batch's arguments by name.
        sharding: Which rank holds which tokens.
        batch: The whole batch, the same on all ranks.
        dims: Dimension of the sequence of each argument that is split.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        batch: Mapping[str, Any],
        dims: Mapping[str, int],
    ) -> None:
        self.sharding, self.whole = sharding, dict(batch)
        self.split = self.whole | {
            name: sharding.shard(batch[name], dim=dim) for name, dim in dims.items()
        }
        name, dim = next(iter(dims.items()))
        first, size = batch[name], sharding.ranks.size
        rows = first.shape[0 if dim else 1] if first.ndim > 1 else 1
        lengths = {batch[name].shape[dim]: batch[name].device for name, dim in dims.items()}
        sequences = [
            Tokens(
                length,
                length // size,
                sharding.positions(length, device=device),
                torch.arange(length // size, device=device),
                torch.ones(rows, length, dtype=torch.bool, device=device),
            )
            for length, device in lengths.items()
        ]
        super().__init__(model, sharding.ranks, sequences, (rows, first.shape[dim]), factor=1)

    def unhooked(self) -> AbstractContextManager[None]:
        """Let each rank compute whole sequences alone within the block."""
        return self.sharding.whole()

    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return its loss, and what to differentiate.

        That is a random weighting of its outputs. Those without a dimension of a sequence are left
        out where others have one. If all are numbers, their sum is the loss: on a ring of the
        ranks' parts, or where these are equal of one.
        """
        is_split = attention is None
        with sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext():
            output = self.model(**(self.split if is_split else self.whole))
        outputs = [x for _, x in tensors_in(output) if x.is_floating_point()]
        if outputs and not any(x.ndim for x in outputs):
            loss = torch.stack(outputs).sum()
            return self._whole_loss(loss) if is_split else (loss, loss)
        found = [(x, self._sequence_in(x, is_split)) for x in outputs if x.ndim]
        parts = [weighted_sum(x, *at, is_split=is_split) for x, at in found if at is not None]
        if not parts:
            # An output that is not split is the same on all ranks, each of which has a part of it.
            share = self.ranks.size if is_split else 1
            parts = [weighted_sum(x, 0, None, is_split=is_split) / share for x, _ in found]
        return None, sum(parts, torch.zeros((), device="cpu").to(parts[0] if parts else "cpu"))

    def _sequence_in(self, x: Tensor, is_split: bool) -> tuple[int, Tokens] | None:
        """Return the dimension of an output along which a sequence lies, 1 before others."""
        for dim in sorted(range(x.ndim), key=lambda dim: dim != 1):
            for tokens in self.sequences:
                if x.shape[dim] == (tokens.local_length if is_split else tokens.length):
                    return dim, tokens
        return None

    def _whole_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole loss and this rank's part of it, from what each rank returns as loss.

        That is its part, or the whole loss on all ranks.
        """
        losses = [x for (x,) in self.gather([float(loss.detach())])]
        if len({*losses}) == 1:
            return loss, loss / self.ranks.size
        return torch.tensor(sum(losses), dtype=torch.float64, device="cpu"), loss
