"""Forward hooks of a parallelized model, which split its batch and join its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_core import StrategyConfig, UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.capture import untraced
from ring_torch.comm.exchange import collective
from ring_torch.gradients.reduce import ReductionChoice, hooks_in
from ring_torch.hf.models.batch import split_batch
from ring_torch.hf.models.check import ModelReport, unwrapped
from ring_torch.hf.models.classes import predicts_labelled
from ring_torch.hf.models.code import by_name, names_in_forward, parameters_of
from ring_torch.hf.models.foreign import (
    activated_offsets,
    is_activated,
    local_offsets,
    refuse_noise,
    replace_noise,
)
from ring_torch.hf.models.head import HeadLogits
from ring_torch.hf.models.parts import (
    is_merged,
    split_labels,
    split_pair,
    split_text,
    take_logit_rows,
)
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.models.training import (
    asks_for_router_loss,
    attention_dropout_seed,
    averaging_wrapper,
    router_loss_weight,
    weight_checksum,
)
from ring_torch.sharding import Sharding
from ring_torch.training.part import IGNORED

Logits = Literal["local", "gather", "none"]
Reduction = Literal["sum", "mean"]
Recurrent = Literal["auto", "split", "whole"]

#: Outputs ``[B, T_local, ...]`` that are joined for ``logits="gather"``: those of a head, and those
#: of a base model, which a head of the caller's takes.
_LOGITS = ("logits", "start_logits", "end_logits", "last_hidden_state")

#: Outputs ``[B, T_local]`` of a head that makes no logits (TRL's), which are always joined.
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")

#: Arguments of a head that have no effect on how a batch is split.
_SWITCHES = ("fused_lm_head", "output_router_logits", "skip_logits")


@dataclass(frozen=True)
class _ForwardState:
    """Facts about the forward under way, kept from its pre-hook for its later hooks.

    Attributes:
        mask: Mask of the split batch; of an encoder-decoder the decoder's.
        is_whole: True while embeddings are whole, to be split before the text model.
        is_shifted_here: True if labels came unshifted and are shifted here, so that a row's last
            token has none.
        has_labels: True if a loss is computed.
        has_router_loss: True if a router's loss is computed, of the whole sequence.
        logit_rows: Rows of the whole sequence's logits that are asked for; ``None`` for all.
        labelled: Tokens with a label, bool ``[B, length]``, if logits are made of these alone;
            else ``None``.
    """

    mask: ShardedMask
    is_whole: bool
    is_shifted_here: bool
    has_labels: bool
    has_router_loss: bool
    logit_rows: slice | Tensor | None
    labelled: Tensor | None


@dataclass(eq=False)
class ModelHooks(ReductionChoice):
    """Forward hooks of one parallelized model.

    Attributes:
        all_ranks: Which rank holds which tokens.
        report: Report of the module whose batches are split.
        logits: ``"gather"`` to join logits over the ranks, ``"local"`` to return this rank's part,
            ``"none"`` to make none.
        reduction: Reduction of gradients that runs outside the model, ``"sum"`` or ``"mean"``.
        strategy: Strategy of each attention call.
        recurrent: How recurrent layers are computed, as ``parallelize`` was asked.
        whole_layers: Reasons why they run on whole sequences, unless that was asked for; empty if
            they are split.
        owner: Handle that the first call of ``parallelize`` returned.
        is_pooling: True if the model picks each sequence's last token from per-token logits.
        joins_router: True if a router's loss can be computed from the whole sequence.
        takes_merged: True for a multimodal model: a hook on its text model splits embeddings.
        undivided_share: Factor of losses that are not divided by a label count: 1, or ``1 /
            cp_size`` under a Trainer that multiplies the loss by the number of all ranks.
        is_evaluating_logits: True while :meth:`with_whole_logits` joins logits.
        reads_padding: True if logits of padding are read, whose queries then see a row's tokens.
        has_joined_states: True once a base model's hidden states were joined with a gradient.
        serves: True while ``generate`` runs, whose forwards split their tokens themselves.
        state: Facts about the forward under way. With activation checkpointing, parts of a forward
            run again in the backward, when ``state`` may be a later batch's. So hooks that run
            again take all they need from arguments.
    """

    all_ranks: Sharding
    report: ModelReport
    logits: Logits
    reduction: Reduction
    strategy: StrategyConfig
    recurrent: Recurrent
    whole_layers: tuple[str, ...]
    owner: Any = None
    is_pooling: bool = False
    joins_router: bool = False
    takes_merged: bool = False
    undivided_share: float = 1.0
    is_evaluating_logits: bool = False
    reads_padding: bool = False
    has_joined_states: bool = False
    serves: bool = False
    state: _ForwardState | None = None

    def __deepcopy__(self, _: object) -> ModelHooks:
        """Return self: a copy of the model is split over the same ranks."""
        return self

    @property
    def sharding(self) -> Sharding:
        """Sharding of the code that runs: inside of ``cp.whole()`` that of one rank alone."""
        return self.all_ranks.acting

    @property
    def gathers_logits(self) -> bool:
        """True if the ranks' logits are gathered: those of the whole sequence are returned."""
        return self.is_pooling or self.logits == "gather" or self.is_evaluating_logits

    @property
    def factor(self) -> int:
        """Factor of the gradients, so that a mean over the ranks of the ring becomes their sum."""
        return self.sharding.ranks.size if self.reduction == "mean" else 1

    @property
    def is_pair(self) -> bool:
        """True for an encoder-decoder, whose batch has two sequences."""
        return "encoder-decoder" in self.report.hooks

    @property
    def splits_recurrent(self) -> bool:
        """True if recurrent layers are split, False if they run on whole sequences."""
        return self.recurrent != "whole" and not self.whole_layers

    @property
    def shifts_labels(self) -> bool:
        """True if token ``i`` predicts label ``i + 1``."""
        return self.report.shifts_labels and not self.is_pair

    def divides_by_items(self, model: nn.Module) -> bool:
        """Return True if the model's loss is a sum over labels, divided by their number.

        The number is that of the whole batch, ``num_items_in_batch`` of the model's forward.
        """
        cls = type(unwrapped(model))
        # Losses that do not go through `loss_function` are means over the labels given, and so are
        # those of token classifiers, which do not pass the number on.
        return not self.is_pooling and (
            self.shifts_labels
            or (
                "loss_function" in names_in_forward(cls)
                and not any("ForTokenClassification" in x.__name__ for x in cls.__mro__)
            )
        )

    @contextmanager
    def with_whole_logits(self, joins: bool) -> Iterator[None]:
        """Within the block, return logits of the whole sequence if ``joins`` is True."""
        undo = replace_attribute(self, "is_evaluating_logits", joins)
        try:
            yield
        finally:
            undo()

    @untraced
    def split(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the whole batch by this rank's part, before the model's forward.

        Raises:
            ValueError: The batch is split already, or ``reduction`` does not fit the model's
                wrapper.
            UnsupportedError: An argument cannot be honoured on split sequences.
            RankMismatchError: Ranks were given different batches.
        """
        if self.serves:
            return (), by_name(module, args, kwargs)
        batch = self._checked(module, by_name(module, args, kwargs))
        if self.logits == "none" and not {"labels", "shift_labels"} & {
            name for name, x in batch.items() if x is not None
        }:
            raise ValueError(
                "logits='none' was given to hf.parallelize, so a forward makes a loss and nothing else: "
                "give labels, or logits='local' to hf.parallelize"
            )
        switches = {name: batch.pop(name) for name in _SWITCHES if name in batch}
        has_router_loss = asks_for_router_loss(
            unwrapped(module), switches.get("output_router_logits"), joins_router=self.joins_router
        )
        logit_rows = take_logit_rows(unwrapped(module), batch, gathers_logits=self.gathers_logits)
        if not self.divides_by_items(module):
            batch.pop("num_items_in_batch", None)
        labels = batch.get("labels") if predicts_labelled(unwrapped(module)) else None
        offsets = activated_offsets(module, batch) if is_activated(module) else None
        if offsets is not None and self.takes_merged and is_merged(batch):
            raise UnsupportedError(
                "alora_invocation_tokens: where images are, activated LoRA is not supported; leave "
                "them out, or take another adapter"
            )
        if self.is_pair:
            refuse_noise(module, "of an encoder-decoder's two sequences is not supported")
        replace_noise(module, self._mask)
        shard, mask, is_whole = self._shard(module, batch)
        if offsets is not None:
            shard["alora_offsets"] = local_offsets(mask, offsets)
        self.state = _ForwardState(
            mask,
            is_whole=is_whole,
            is_shifted_here=self.shifts_labels and batch.get("shift_labels") is None,
            has_labels=shard.get("labels") is not None,
            has_router_loss=has_router_loss,
            logit_rows=logit_rows,
            labelled=None if labels is None else labels != IGNORED,
        )
        # The head computes the router's loss of the whole sequence, so it gets the whole mask; the
        # part below it gets the split one, by `split_mask`.
        if has_router_loss:
            padding = batch.get("attention_mask")
            shard["attention_mask"] = None if padding is None else (padding != 0).to(padding.dtype)
        parameters = parameters_of(type(unwrapped(module)))
        if "use_cache" in parameters:
            shard.setdefault("use_cache", False)
        for name in ("position_ids", "decoder_position_ids"):
            if name not in parameters and self.report.hooks:
                if batch.get(name) is not None:
                    raise UnsupportedError(
                        f"{name}: {type(module).__name__} takes none; leave it out of the batch"
                    )
                shard.pop(name, None)
        return (), {**switches, **shard}

    def _shard(
        self, module: nn.Module, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], ShardedMask, bool]:
        """Return this rank's batch, its mask, and True if embeddings are still to be split."""
        seed, weight = attention_dropout_seed(module), weight_checksum(module)
        arguments = self.sharding, unwrapped(module), batch, self.report, seed, weight
        if self.is_pair:
            shard = split_pair(*arguments)
            return shard, shard["decoder_attention_mask"], False
        if is_whole := self.takes_merged and is_merged(batch):
            shard, mask = split_labels(*arguments)
        else:
            shard = split_batch(
                self.sharding, batch, self.report, seed, weight, with_ids=self.reads_padding
            )
            mask = shard["attention_mask"]
            mask = shard["attention_mask"] = replace(
                mask, padding_sees=self.reads_padding and mask.single
            )
        if mask.documents != (None,) and not self.splits_recurrent:
            asked = self.recurrent == "whole"
            reasons = ("recurrent='whole'",) if asked else self.whole_layers
            raise UnsupportedError(
                f"packed documents: recurrent layers of {type(module).__name__} run on whole "
                f"sequences here ({'; '.join(reasons)}), and would carry their states from one to "
                f"the next. Instead: give one document a row, or have these layers split"
            )
        return shard, mask, is_whole

    def _mask(self) -> ShardedMask | None:
        """Return the mask of the forward under way, ``None`` outside of one."""
        return None if self.state is None else self.state.mask

    @untraced
    def split_text(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split the arguments of a multimodal model's text model, if the batch is whole so far."""
        if self.state is None or not self.state.is_whole:
            return args, kwargs
        self.state = replace(self.state, is_whole=False)
        return split_text(self.state.mask, module, args, kwargs)

    @untraced
    def join(
        self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Replace the loss by the whole batch's, and join the outputs that are wanted whole.

        Raises:
            UnsupportedError: There are labels, and the output has no ``loss``.
        """
        if self.serves:
            return output
        state = self._take_state()
        # Join logits if they are wanted, and TRL's outputs of each token in any case. Where labels
        # were shifted here, TRL expects no entry for a row's last token.
        gathers_dense = self.gathers_logits and state.labelled is None
        for name in (*(_LOGITS if gathers_dense else ()), *_PER_TOKEN):
            value = output.get(name)
            if isinstance(value, Tensor) and value.shape[:2] == state.mask.shape:
                output[name] = self.whole(
                    value, state.mask.length - (name in _PER_TOKEN and state.is_shifted_here)
                )
                self.has_joined_states |= name == "last_hidden_state" and value.requires_grad
        if self.gathers_logits and state.labelled is not None:
            output["logits"] = self._whole_of_labelled(output["logits"], state)
        if state.logit_rows is not None and isinstance(output.get("logits"), Tensor):
            output["logits"] = output["logits"][:, state.logit_rows]
        if isinstance(output.get("logits"), HeadLogits):
            output["logits"] = None
        if isinstance(output.get("loss"), Tensor):
            output["loss"] = self._whole_loss(module, output, state)
        elif state.has_labels:  # under another name it would be this rank's part of the loss
            raise UnsupportedError(lacks(f"the output of {type(module).__name__}", "loss"))
        return output

    @untraced
    def split_mask(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the base model the split mask; its head, with a router's loss, has the whole one."""
        if self.state is not None and self.state.has_router_loss:
            kwargs = {**kwargs, "attention_mask": replace(self.state.mask, joins_router=True)}
        return args, kwargs

    @untraced
    def join_router(
        self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Replace the router's logits by the whole sequence's, before the head computes a loss.

        Raises:
            UnsupportedError: The module returns no router logits of every token.
        """
        if self.state is None or not self.state.has_router_loss:
            return output
        mask = self.state.mask
        shape, logits = mask.shape, output.get("router_logits")
        if not logits or any(x.shape[:-1].numel() != math.prod(shape) for x in logits):
            raise UnsupportedError(
                f"{type(module).__name__} has no router_logits of every token, of which the "
                f"router's loss could be computed; set output_router_logits to False"
            )
        joined = torch.stack([x.reshape(*shape, -1) for x in logits])  # [L, B, T_local, E]
        output["router_logits"] = tuple(
            x.flatten(0, 1) for x in self.whole(joined, mask.length, dim=2)
        )
        return output

    @untraced
    def join_rows(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Join the per-token output of a classifier's ``score``, of which one row is picked.

        Such a model has this hook in place of :meth:`join`: every rank computes its loss whole.
        """
        return self.whole(output, self._take_state().mask.length)

    def whole(self, x: Tensor, length: int, dim: int = 1) -> Tensor:
        """Join all ranks' parts of a tensor along ``dim``, and cut it to ``length``.

        Every rank then computes the same loss from it, so in the backward each rank keeps its own
        slice of the gradient, times :attr:`factor`, and nothing is summed.
        """
        x = _ReplaceValue.apply(x, x, self.factor) if x.is_floating_point() else x
        return self.sharding.unshard(x, dim=dim, grad="slice").narrow(dim, 0, length)

    def _whole_of_labelled(self, logits: Tensor, state: _ForwardState) -> Tensor:
        """Join the logits ``[n, V]`` of labelled tokens, in the order of the whole batch."""
        labelled = not_none(state.labelled)
        local = state.mask.shard(labelled)
        dense = logits.new_zeros(*state.mask.shape, logits.shape[-1]).index_put((local,), logits)
        return self.whole(dense, state.mask.length)[labelled]

    def total_of(self, local_loss: Tensor) -> Tensor:
        """Return the sum of a loss over the ranks.

        Its gradient is that of this rank's part, times :attr:`factor`.
        """
        total, ranks = local_loss.detach().clone(), self.sharding.ranks
        if ranks.size > 1:
            collective(
                ranks, "loss", lambda: dist.all_reduce(total, group=ranks.group, async_op=True)
            )
        joined: Tensor = _ReplaceValue.apply(local_loss, total, self.factor)
        return joined

    def _whole_loss(
        self, module: nn.Module, output: Mapping[str, Any], state: _ForwardState
    ) -> Tensor:
        """Return the loss of the whole batch; every rank has all of a router's loss in it."""
        loss: Tensor = output["loss"]
        if not (state.has_router_loss and state.has_labels):
            return self.total_of(loss)
        router = output.get("aux_loss")
        if not isinstance(router, Tensor):
            raise UnsupportedError(lacks(f"the output of {type(module).__name__}", "aux_loss"))
        router = router * router_loss_weight(module)
        return self.total_of(loss - router) + router * self.undivided_share

    def _take_state(self) -> _ForwardState:
        """Return the facts about the forward that has ended, and forget them."""
        state, self.state = not_none(self.state), None
        return state

    def _checked(self, module: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch's arguments after checking that they can be split."""
        if isinstance(batch.get("attention_mask"), ShardedMask):
            raise ValueError(
                "the model takes whole batches since hf.parallelize, and this one was split by "
                "hf.shard_batch: give the whole batch, or handle.remove() first"
            )
        config = getattr(unwrapped(module), "config", None)
        if batch.get("return_dict", getattr(config, "return_dict", True)) is False:
            raise UnsupportedError("return_dict=False: outputs are joined by name; leave it out")
        is_summed = self.reduction == "sum" and self.sharding.ranks.size > 1
        if is_summed and torch.is_grad_enabled() and (wrapper := averaging_wrapper(module)):
            raise ValueError(
                f"reduction='sum' was given to hf.parallelize, and {wrapper} takes the mean of "
                f"gradients over its ranks: give reduction='mean'"
            )
        return batch

    def check_reduction(self, model: nn.Module) -> None:
        """Raise a ValueError in ``reduce_gradients`` if gradients are no parts of a sum.

        They are multiplied for a mean, or of a head that took joined hidden states: every rank has
        all of its gradient.
        """
        if self.sharding.ranks.size == 1:
            return
        if self.reduction == "mean":
            raise ValueError(
                "reduce_gradients sums gradients over the ranks, and hf.parallelize was given "
                "reduction='mean': give reduction='sum', or leave it to DDP or fully_shard"
            )
        if not self.has_joined_states:
            return
        inner = next(x for x in model.modules() if self.split in x._forward_pre_hooks.values())  # noqa: SLF001 - torch has no other list
        own = {*inner.parameters()}
        if others := [
            n for n, x in model.named_parameters() if x.grad is not None and x not in own
        ]:
            raise ValueError(
                f"reduce_gradients: {', '.join(others[:3])} got hidden states of the whole sequence "
                f"(logits='gather'), so every rank has all of its gradient, and a sum counts it "
                f"{self.sharding.ranks.size} times: give reduce_gradients the {type(inner).__name__} "
                f"that hf.parallelize was given"
            )


def refuse_generation(*_: object, **__: object) -> Never:
    """Raise an error in place of a parallelized model's ``generate``, and say what to do."""
    raise UnsupportedError(
        "generate() is served after hf.parallelize with a cache that is split like the sequence: give "
        "past_key_values=ring_torch.hf.ShardedCache(cp). Or call remove() of the handle first, which "
        "gives the model back as it was, and hf.parallelize again to train on"
    )


def hooks_of(model: object) -> ModelHooks | None:
    """Return the hooks of a parallelized model, found on it or on a module in it, or ``None``."""
    owners = hooks_in(model) if isinstance(model, nn.Module) else ()
    return next((owner for owner in owners if isinstance(owner, ModelHooks)), None)


class _ReplaceValue(torch.autograd.Function):
    """Autograd function that returns another value for ``x``, with the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: int) -> Tensor:
        """Return ``value``, and keep the factor for the backward."""
        ctx.factor = factor
        # torch refuses in-place changes of a view that a custom function returns, and the loss may
        # be changed in place: return a copy.
        return x.view_as(x) if value is x else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``, multiplied by the factor."""
        return grad * ctx.factor, None, None


def replace_attribute(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Set an attribute of an instance, and return a function that restores the former state."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if is_own else delattr(owner, name)
