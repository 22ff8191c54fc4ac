"""Hooks for modules that mix tokens without attention: recurrent layers, convolutions, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.code import by_name
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.movement import methods
from ring_torch.sharding import Sharding


class MaskKeeper:
    """Hooks that keep the mask of a module's forward while it runs, for others to look up.

    The mask is taken from the forward's own arguments. With activation checkpointing the forward
    runs again in the backward, when the model may have seen another batch in the meantime.
    """

    def __init__(self) -> None:
        self._mask: ShardedMask | None = None

    @property
    def mask(self) -> ShardedMask:
        """Mask of the forward under way.

        Raises:
            UnsupportedError: The module was not given the mask of a split batch.
        """
        if self._mask is None:
            raise UnsupportedError(
                "a part of this model that has to know where its tokens stand was called, or run "
                "again by checkpointing, without the mask of a split batch: call the whole model, and "
                "checkpoint whole layers, or modules that are given the attention_mask"
            )
        return self._mask

    @untraced
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the mask that the forward is given."""
        mask = by_name(module, args, kwargs).get("attention_mask")
        if isinstance(mask, Mapping):  # one for each kind of layer, all of the same batch
            mask = next((x for x in mask.values() if isinstance(x, LayerMask)), None)
        mask = mask.batch if isinstance(mask, LayerMask) else mask
        self._mask = mask if isinstance(mask, ShardedMask) else None

    @untraced
    def end(self, *_: object) -> None:
        """Forget the mask after the forward, also when it raised."""
        self._mask = None


class WholeLayer(MaskKeeper):
    """Hooks that run a recurrent layer, or an embedding of ids, on whole sequences, on every rank.

    Such a layer carries a state from each token to the next. It begins with none and does not
    return its last one with a gradient, so that no rank can go on where another has ended. Such an
    embedding is scaled by how many tokens of the row are masked.
    """

    @untraced
    def gather(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the layer's input by the whole sequence, gathered from all ranks."""
        self.begin(module, args, kwargs)
        arguments = by_name(module, args, kwargs)
        # The hidden states, or ids: [B, T_local, ...] becomes [B, T, ...].
        name = next(iter(arguments))
        arguments[name] = self.mask.unshard(arguments[name])
        # The state runs over whole rows, and so must know the padding of all ranks.
        arguments["attention_mask"] = self.mask.whole
        if isinstance(arguments.get("position_ids"), Tensor):
            arguments["position_ids"] = self.mask.unshard(arguments["position_ids"])
        return (), arguments

    @untraced
    def scatter(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return this rank's part of the layer's output, after its forward.

        Raises:
            UnsupportedError: The output is not ``[B, T, ...]``.
        """
        hidden_states = output[0] if isinstance(output, tuple) else output
        if hidden_states.shape[:2] != (self.mask.shape[0], self.mask.length):
            raise UnsupportedError(
                f"{type(module).__name__} must return [B, T, ...] = {(self.mask.shape[0], self.mask.length)} "
                f"to be split after it, and returns {tuple(hidden_states.shape)}"
            )
        # The other ranks keep their own tokens of the same output: nothing is sent.
        local = self.mask.shard(hidden_states)
        return (local, *output[1:]) if isinstance(output, tuple) else local


class ConvolutionLayer(MaskKeeper):
    """Hooks that give a causal convolution a row for each run of consecutive tokens of this rank.

    In its row a run follows the tokens before it that the kernel reaches back to; other ranks may
    hold them. A run at the beginning of the sequence has none: the layer pads it inside, with zeros
    that no input would become there. So such a run begins its row, and the columns that it lacks
    before it are put behind it, where they change no output that is kept.
    """

    @untraced
    def gather(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the layer's input by this rank's runs with the tokens before them."""
        self.begin(module, args, kwargs)
        arguments, mask = by_name(module, args, kwargs), self.mask
        name = next(iter(arguments))  # the hidden states: [B, T_local, dim] becomes rows
        x, runs, left = arguments[name], self._runs, module.conv.kernel_size[0] - 1
        if runs is not mask.sharding:
            # A striped rank has no neighbours of its tokens: give it a run of consecutive ones for
            # this layer.
            x = methods.relayout(mask.sharding, x, runs, dim=1, seq_len=None)
        # Only the tokens before each run come from other ranks; the backward sends their gradients
        # home.
        rows, positions, _ = methods.halo(runs, x, left, 0, dim=1, cu_seqlens=None, seq_len=None)
        lacking = self._lacking(left)
        arguments[name] = _rolled(rows, [-n for n in lacking])
        arguments["attention_mask"] = None
        if mask.whole is not None:
            # Entries outside of the sequence are behind their run, so they may be anything.
            entries = pad(mask.whole, (0, mask.seq_len - mask.length))
            columns = _rolled(positions, [-n for n in lacking]).clamp(min=0)
            entries = entries.repeat_interleave(len(lacking), dim=0)
            arguments["attention_mask"] = entries.gather(1, columns)
        return (), arguments

    @untraced
    def scatter(self, module: Any, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return this rank's part of the layer's output, after its forward.

        Raises:
            UnsupportedError: The output has not a token for each token of the rows.
        """
        mask, runs, left = self.mask, self._runs, module.conv.kernel_size[0] - 1
        lacking, (batch, length) = self._lacking(left), mask.shape
        shape = (batch * len(lacking), length // len(lacking) + left)
        if output.shape[:2] != shape:
            raise UnsupportedError(
                f"{type(module).__name__} must return [B, T, ...] = {shape} to be split after it, "
                f"and returns {tuple(output.shape)}"
            )
        # Undo the roll, and drop what was computed of the tokens before the run, which belongs to
        # other runs.
        rows = _rolled(output, lacking)[:, left:]
        local = methods.join(rows, 1, runs.layout, runs.ranks.size)
        if runs is not mask.sharding:
            local = methods.relayout(runs, local, mask.sharding, dim=1, seq_len=None)
        return local

    @property
    def _runs(self) -> Sharding:
        """Sharding in which each rank holds runs of consecutive tokens: the batch's, if it does."""
        sharding = self.mask.sharding
        return Sharding(sharding.group, "contiguous") if sharding.layout == "striped" else sharding

    def _lacking(self, left: int) -> list[int]:
        """Return for each run how many of the ``left`` tokens before it are not in the sequence."""
        runs = self._runs
        # Only the first runs of the sequence reach back beyond its beginning.
        starts = runs.layout_of(self.mask.seq_len).run_positions(runs.ranks.rank)
        return [max(left - start, 0) for start in starts.tolist()]


def _rolled(rows: Tensor, steps: Sequence[int]) -> Tensor:
    """Roll the rows ``[B * R, W, ...]`` of each run by its number of steps."""
    if not any(steps):
        return rows
    by_run = rows.unflatten(0, (-1, len(steps))).unbind(1)
    return torch.stack([x.roll(n, 1) for x, n in zip(by_run, steps, strict=True)], 1).flatten(0, 1)
