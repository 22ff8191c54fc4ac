"""Runs of a batch on a module whose attention is replaced: split, and whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_core import UnsupportedError
from ring_core.base.arguments import describe_value, is_integer
from ring_torch.comm.ranks import ranks_of
from ring_torch.replaced.calls import Replacement
from ring_torch.verification.comparison import compare_with_whole
from ring_torch.verification.judgement import VerifyReport
from ring_torch.verification.runs import Runner
from ring_torch.verification.trace import Tokens, tensors_in


def verify_module(
    state: Replacement, batch: Mapping[str, Any], dims: Mapping[str, int] | None
) -> VerifyReport:
    """Run a batch split and whole, and compare; see :meth:`ring_torch.SDPAHandle.verify`."""
    if state.removed:
        raise ValueError("verify: remove() was called; call replace_sdpa again")
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"batch must be a mapping of names of arguments to values, got {type(batch).__name__}"
        )
    runner = _ModuleRunner(state, batch, _checked_dims(batch, dims))
    if runner.fsdp_names:
        raise UnsupportedError(
            "verify: fully_shard shards the module over the ring; verify it before"
        )
    return compare_with_whole(runner, "torch", "math")


def _checked_dims(batch: Mapping[str, Any], dims: Mapping[str, int] | None) -> dict[str, int]:
    """Return the dimension of the sequence of each argument that is split.

    Without ``dims`` it is dimension 1 of every tensor that has one.

    Raises:
        ValueError: A name is no tensor of the batch, a dimension is not one of its, or none is
            split.
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


class _ModuleRunner(Runner):
    """Runs one batch on a module, split and whole.

    Args:
        state: State of the replacement.
        batch: The whole batch, the same on all ranks.
        dims: Dimension of the sequence of each argument that is split.
    """

    def __init__(
        self, state: Replacement, batch: Mapping[str, Any], dims: Mapping[str, int]
    ) -> None:
        cp = state.cp
        self.state, self.whole = state, dict(batch)
        self.split = self.whole | {
            name: cp.shard(batch[name], dim=dim) for name, dim in dims.items()
        }
        name, dim = next(iter(dims.items()))
        first = batch[name]
        rows = first.shape[0 if dim else 1] if first.ndim > 1 else 1
        lengths = {batch[name].shape[dim]: batch[name].device for name, dim in dims.items()}
        sequences = [
            Tokens(
                length, length // cp.cp_size, cp.positions(length, device=device),
                torch.arange(length // cp.cp_size, device=device),
                torch.ones(rows, length, dtype=torch.bool, device=device),
            )
            for length, device in lengths.items()
        ]  # fmt: skip
        super().__init__(
            state.root, ranks_of(cp.group), sequences, (rows, first.shape[dim]), factor=1
        )  # fmt: skip

    def unhooked(self) -> AbstractContextManager[None]:
        """Let each rank compute whole sequences alone within the block, by torch's attention."""
        return self.state.cp.whole()

    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return its loss, and what to differentiate.

        That is a random weighting of its outputs. Those without a dimension of a sequence are left
        out where others have one. If all are numbers, their sum is the loss: on a ring of the
        ranks' parts, or where these are equal of one.
        """
        backend = sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext()
        with backend:
            output = self.model(**(self.split if attention is None else self.whole))
        outputs = [x for _, x in tensors_in(output) if x.is_floating_point()]
        if outputs and not any(x.ndim for x in outputs):
            loss = torch.stack(outputs).sum()
            return (loss, loss) if attention is not None else self._whole_loss(loss)
        parts = [self._weighted(x, attention is None) for x in outputs]
        split = [total for total, is_split in parts if is_split]
        # An output that is not split is the same on all ranks, each of which has a part of it.
        share = 1 if attention is not None else self.ranks.size
        total = sum(split) if split else sum(total / share for total, _ in parts)
        return None, total if isinstance(total, Tensor) else torch.zeros((), device="cpu")

    def _whole_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole loss and this rank's part of it, from what each rank returns as loss.

        That is its part, or the whole loss on all ranks.
        """
        losses = [x for (x,) in self.gather([float(loss.detach())])]
        if len({*losses}) == 1:
            return loss, loss / self.ranks.size
        return torch.tensor(sum(losses), dtype=torch.float64, device="cpu"), loss

    def _weighted(self, x: Tensor, is_split: bool) -> tuple[Tensor, bool]:
        """Return a weighted sum of an output, and True if it has a dimension of a sequence."""
        if not x.is_floating_point() or not x.ndim:
            return x.new_zeros((), dtype=torch.float32), False
        for dim in sorted(range(x.ndim), key=lambda dim: dim != 1):
            for tokens in self.sequences:
                if x.shape[dim] == (tokens.local_length if is_split else tokens.length):
                    shape = [*x.shape]
                    shape[dim] = tokens.length
                    weights = _random(shape, x)
                    if is_split:
                        weights = weights.index_select(dim, tokens.positions)
                    return (x * weights).sum(), True
        return (x * _random(x.shape, x)).sum(), False


def _random(shape: Any, like: Tensor) -> Tensor:
    """Return the same random weights of a shape in every run and on every rank."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cpu").to(like)
