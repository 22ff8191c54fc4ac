"""Hooks of a model that takes whole batches: they split what goes in, and join what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.comm.ranks import collective
from ring_torch.gradients import ReductionChoice, hooks_in
from ring_torch.hf.models.batch import split_batch
from ring_torch.hf.models.check import ModelReport, unwrapped
from ring_torch.hf.models.code import by_name, names_in_forward, parameters_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.models.parts import is_merged, split_labels, split_pair, split_text
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.models.sealed import ShardedMask
from ring_torch.hf.models.training import (
    attention_dropout_rates,
    averaging_wrapper,
    router_loss_weight,
    weight_checksum,
)
from ring_torch.sharding import Sharding

Logits = Literal["local", "gather"]
Reduction = Literal["sum", "mean"]

#: Outputs ``[B, T_local, V]``, which are joined where that is asked for.
_LOGITS = ("logits", "start_logits", "end_logits")

#: Outputs ``[B, T_local]`` of a head that makes no logits (TRL's), which are always joined.
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")

#: Switches of a head, which do not concern how a batch is split.
_SWITCHES = ("fused_lm_head", "output_router_logits", "skip_logits")


@dataclass(frozen=True)
class _Call:
    """The forward that is under way, and what its hooks have to know of the batch.

    Attributes:
        mask: Names the sequence; of an encoder-decoder the decoder's.
        is_whole: The text model is given whole embeddings, which are to be split.
        is_shifted_here: Labels came unshifted, so that the last token has none.
        has_labels: A loss is computed.
        has_router_loss: A router's loss is computed, of the whole sequence.
        kept: The rows of the whole sequence's logits that are asked for; ``None`` for all.
    """

    mask: ShardedMask
    is_whole: bool
    is_shifted_here: bool
    has_labels: bool
    has_router_loss: bool
    kept: slice | Tensor | None


@dataclass(eq=False)
class ModelHooks(ReductionChoice):
    """The hooks of one model.

    Attributes:
        sharding: Which rank holds which tokens.
        report: Of the part whose batches are split.
        logits: Whether logits are joined.
        reduction: How gradients are reduced over ranks, outside.
        owner: What put them on.
        is_pooling: One row of a sequence is taken from logits.
        joins_router: The router's loss is computed of the whole sequence.
        takes_merged: Images may come, and a text model is hooked.
        undivided_share: Of losses by no count of labels, if multiplied outside.
        is_evaluating_logits: Logits are joined for a while.
        call: The forward that is under way. What runs again, for a backward, is given all it needs
            as arguments, and does not read it: it would be that of a later batch.
    """

    sharding: Sharding
    report: ModelReport
    logits: Logits
    reduction: Reduction
    owner: object = None
    is_pooling: bool = False
    joins_router: bool = False
    takes_merged: bool = False
    undivided_share: float = 1.0
    is_evaluating_logits: bool = False
    call: _Call | None = None

    def __deepcopy__(self, _: object) -> ModelHooks:
        """Itself: a copy of the model belongs to the same ranks."""
        return self

    @property
    def joins_logits(self) -> bool:
        """Whether logits of the whole sequence are returned."""
        return self.is_pooling or self.logits == "gather" or self.is_evaluating_logits

    @property
    def factor(self) -> int:
        """What gradients are multiplied by, so that a mean over the ranks is their sum."""
        return self.sharding.ring.size if self.reduction == "mean" else 1

    @property
    def is_pair(self) -> bool:
        """Whether there are two sequences: an encoder's and a decoder's."""
        return "encoder-decoder" in self.report.hooks

    @property
    def shifts_labels(self) -> bool:
        """Whether labels are of the next token."""
        return self.report.shifts_labels and not self.is_pair

    def divides_by_items(self, model: nn.Module) -> bool:
        """Whether the model's loss is a sum over labels, divided by ``num_items_in_batch``."""
        return not self.is_pooling and (
            self.shifts_labels
            or "loss_function" in names_in_forward(type(unwrapped(model)))  # others: the mean
        )

    @contextmanager
    def with_whole_logits(self, joins: bool) -> Iterator[None]:
        """Return logits of the whole sequence for a while, whatever was asked for."""
        undo = replace_attribute(self, "is_evaluating_logits", joins)
        try:
            yield
        finally:
            undo()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def split(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Before a forward: this rank's part of the batch, in place of the whole one."""
        given = self._checked(module, by_name(module, args, kwargs))
        switches = {name: given.pop(name) for name in _SWITCHES if name in given}
        has_router_loss = self._has_router_loss(module, switches)
        kept = self._kept(module, given)
        if not self.divides_by_items(module):
            given.pop("num_items_in_batch", None)
        shard, mask, is_whole = self._shard(module, given)
        self.call = _Call(
            mask,
            is_whole=is_whole,
            is_shifted_here=self.shifts_labels and given.get("shift_labels") is None,
            has_labels=shard.get("labels") is not None,
            has_router_loss=has_router_loss,
            kept=kept,
        )
        if has_router_loss:
            padding = given.get("attention_mask")
            shard["attention_mask"] = None if padding is None else (padding != 0).to(padding.dtype)
        takes = parameters_of(type(unwrapped(module)))
        if "use_cache" in takes:
            shard.setdefault("use_cache", False)
        for name in ("position_ids", "decoder_position_ids"):
            if name not in takes and self.report.hooks:
                if given.get(name) is not None:
                    raise UnsupportedError(f"{name}: {type(module).__name__} takes none")
                shard.pop(name, None)
        return (), {**switches, **shard}

    def _shard(
        self, module: nn.Module, given: dict[str, Any]
    ) -> tuple[dict[str, Any], ShardedMask, bool]:
        """Return this rank's part of the batch, its mask, and if embeddings are still whole."""
        seed, weight = self._dropout_seed(module), weight_checksum(module)
        rest = self.sharding, unwrapped(module), given, self.report, seed, weight
        if "recurrent" in self.report.hooks and (stated := {*STATED} & given.keys()):
            raise UnsupportedError(
                f"{', '.join(sorted(stated))}: recurrent layers of {type(module).__name__} are not "
                f"told of documents on a ring; leave them out"
            )
        if self.is_pair:
            shard = split_pair(*rest)
            return shard, shard["decoder_attention_mask"], False
        if self.takes_merged and is_merged(given):
            return *split_labels(*rest), True
        shard = split_batch(self.sharding, given, self.report, seed, weight)
        return shard, shard["attention_mask"], False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def split_text(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a text model: split what it is given, if the batch came whole so far."""
        if self.call is None or not self.call.is_whole:
            return args, kwargs
        self.call = replace(self.call, is_whole=False)
        return split_text(self.call.mask, module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def join(
        self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After a forward: the loss of the whole batch, and what is wanted of the sequence."""
        call = self._ended()
        for name in (*(_LOGITS if self.joins_logits else ()), *_PER_TOKEN):
            value = output.get(name)
            if isinstance(value, Tensor) and value.shape[:2] == call.mask.shape:
                output[name] = self.whole(
                    value, call.mask.length - (name in _PER_TOKEN and call.is_shifted_here)
                )
        if call.kept is not None and isinstance(output.get("logits"), Tensor):
            output["logits"] = output["logits"][:, call.kept]
        if isinstance(output.get("loss"), Tensor):
            output["loss"] = self._whole_loss(module, output, call)
        elif call.has_labels:  # a loss of another name would be of this rank's tokens
            raise UnsupportedError(lacks(f"the output of {type(module).__name__}", "loss"))
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def split_mask(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the part below a router's loss, which needs the whole mask: the split one."""
        if self.call is not None and self.call.has_router_loss:
            kwargs = {**kwargs, "attention_mask": replace(self.call.mask, joins_router=True)}
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def join_router(
        self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After it: the router's logits of the whole sequence."""
        if self.call is None or not self.call.has_router_loss:
            return output
        mask = self.call.mask
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def join_rows(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """After a head of which the model takes one row: those of the whole sequence."""
        return self.whole(output, self._ended().mask.length)

    def whole(self, x: Tensor, length: int, dim: int = 1) -> Tensor:
        """Join every rank's part; each rank computes the same loss of it, and keeps its slice."""
        x = _Replaced.apply(x, x, self.factor) if x.is_floating_point() else x
        return self.sharding.unshard(x, dim=dim, grad="slice").narrow(dim, 0, length)

    def total_of(self, part: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is that of this rank's part."""
        total, ring = part.detach().clone(), self.sharding.ring
        if ring.size > 1:
            with collective(ring, "loss"):
                dist.all_reduce(total, group=ring.group)
        joined: Tensor = _Replaced.apply(part, total, self.factor)
        return joined

    def _whole_loss(self, module: nn.Module, output: Mapping[str, Any], call: _Call) -> Tensor:
        """The router's part, if any, is of the whole sequence already."""
        loss: Tensor = output["loss"]
        if not (call.has_router_loss and call.has_labels):
            return self.total_of(loss)
        router = output.get("aux_loss")
        if not isinstance(router, Tensor):
            raise UnsupportedError(lacks(f"the output of {type(module).__name__}", "aux_loss"))
        router = router * router_loss_weight(module)
        return self.total_of(loss - router) + router * self.undivided_share

    def _ended(self) -> _Call:
        call, self.call = self.call, None
        assert call is not None
        return call

    def _checked(self, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        if isinstance(given.get("attention_mask"), ShardedMask):
            raise ValueError(
                "the model takes whole batches since hf.parallelize, and this one was split by "
                "hf.shard_batch: give the whole batch, or handle.remove() first"
            )
        config = getattr(unwrapped(module), "config", None)
        if given.get("return_dict", getattr(config, "return_dict", True)) is False:
            raise UnsupportedError("return_dict=False: outputs are joined by name; leave it out")
        is_summed = self.reduction == "sum" and self.sharding.ring.size > 1
        if is_summed and torch.is_grad_enabled() and (wrapper := averaging_wrapper(module)):
            raise ValueError(
                f"reduction='sum' was given to hf.parallelize, and {wrapper} takes the mean of "
                f"gradients over its ranks: give reduction='mean'"
            )
        return given

    def _has_router_loss(self, module: nn.Module, switches: Mapping[str, Any]) -> bool:
        config = getattr(unwrapped(module), "config", None)
        asked = switches.get("output_router_logits")
        if asked is None:
            asked = getattr(config and config.get_text_config(), "output_router_logits", False)
        if asked and not self.joins_router:
            raise UnsupportedError(
                f"output_router_logits: {type(unwrapped(module)).__name__} has no router's loss that "
                f"could be computed of the whole sequence; leave it out"
            )
        return bool(asked)

    def _kept(self, module: nn.Module, given: dict[str, Any]) -> slice | Tensor | None:
        """Take ``logits_to_keep`` out of a batch; return the rows of whole logits that it names."""
        kept = given.get("logits_to_keep")
        if "logits_to_keep" not in parameters_of(type(unwrapped(module))):
            return None  # whoever splits the batch refuses it
        given.pop("logits_to_keep", None)
        if kept is None or (isinstance(kept, int) and kept == 0):
            return None
        if not self.joins_logits:
            raise UnsupportedError(
                f"logits_to_keep={kept!r} asks for logits of the whole sequence, and each rank has a "
                f"part of them: give logits='gather' to hf.parallelize, or leave it out"
            )
        if given.get("labels") is not None:
            raise UnsupportedError(
                "logits_to_keep beside labels: the loss is of all tokens; leave one of them out"
            )
        return slice(-kept, None) if isinstance(kept, int) else kept

    def check_reduction(self) -> None:
        """Refuse to sum gradients that are multiplied for a mean."""
        if self.reduction == "mean" and self.sharding.ring.size > 1:
            raise ValueError(
                "reduce_gradients sums gradients over the ranks, and hf.parallelize was given "
                "reduction='mean': give reduction='sum', or leave it to DDP or fully_shard"
            )

    def _dropout_seed(self, module: nn.Module) -> int | None:
        """New with every batch, and equal where ranks seeded torch alike; ranks compare it."""
        is_dropping = module.training and any(attention_dropout_rates(module))
        return int(torch.randint(1 << 62, (), dtype=torch.int64).item()) if is_dropping else None


def refuse_generation(*_: object, **__: object) -> Never:
    """In place of a model's ``generate``: say what to do."""
    raise UnsupportedError(
        "generate() is not served after hf.parallelize: a split sequence has no KV cache, and tokens "
        "come one by one. Call remove() of the handle first, which gives the model back as it was, and "
        "hf.parallelize again to train on"
    )


def hooks_of(model: nn.Module) -> ModelHooks | None:
    """The hooks that a model has, itself or in a part of it."""
    return next((owner for owner in hooks_in(model) if isinstance(owner, ModelHooks)), None)


class _Replaced(torch.autograd.Function):
    """Another value in place of ``x``, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x) if value is x else value.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


def replace_attribute(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Set an attribute of an instance; returns what sets it back."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    if is_own:
        return lambda: setattr(owner, name, before)
    return lambda: delattr(owner, name)
