"""One line after which a model of transformers, or a Trainer, takes whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from ring_core import UnsupportedError, checks
from ring_torch.context import ContextParallel, check_context
from ring_torch.hf.models.check import (
    has_router_loss,
    is_of_transformers,
    report_of,
    text_parts,
    towers,
    unwrapped,
    wrappers,
)
from ring_torch.hf.models.classes import has_attention, has_written_attention, name_of
from ring_torch.hf.models.code import forward_of
from ring_torch.hf.models.hooks import (
    Logits,
    ModelHooks,
    Reduction,
    hooks_of,
    refuse_generation,
    replace_attribute,
)
from ring_torch.hf.models.releases import lacks, warn_of_untested
from ring_torch.hf.register import is_ring, register
from ring_torch.hf.trainer import TrainerHooks, check_trainer, trainer_class, trainer_hooks_of
from ring_torch.hf.verification.judgement import VerifyReport
from ring_torch.hf.verification.runs import Target
from ring_torch.hf.verification.verify import verify_target
from ring_torch.hf.wiring import wire


class Handle:
    """What :func:`parallelize` has done."""

    def __init__(
        self,
        undo: Iterable[Callable[[], object]],
        model: tuple[nn.Module, ModelHooks] | Target,
    ) -> None:
        self._undo = list(undo)
        self._target = model if isinstance(model, Target) else Target(*model, self._undo)

    def verify(self, batch: Mapping[str, Any]) -> VerifyReport:
        """Compare the model on the ring with the whole model, in a forward and backward of a batch.

        Every rank runs the batch split, and twice whole, with attention of transformers: ``eager``
        and ``sdpa``. The difference of these two is noise. Where a model has no ``sdpa``, its
        modules' outputs are changed by a unit in the last place at random, in place of it. Loss,
        outputs and the gradients of parameters may differ from the whole ones by four times that,
        and a floor for what rounding makes of a single operation: ``2**-18`` of their size, in
        float16 ``2**-8``, in bfloat16 ``2**-5``. Outputs are compared token by token, without
        padding. Layers whose attention, masks or positions are wrong are off by far more.

        Parameters, gradients, buffers, random generators, modes and hooks are as before
        afterwards, also when it raises. Dropout is off; checkpoints of activations are taken where
        they are enabled. In bfloat16 experts of a token may be others by rounding alone: give a
        mixture of experts in float32.

        Args:
            batch: A short batch as the model takes it, the same on all ranks of the ring, with
                labels if the loss is to be compared.

        Returns:
            The differences, all of which are rounding.

        Raises:
            WrongResultError: Something differs by more, on all ranks of the ring; the message names
                the first module whose output, or the first parameter whose gradient, does.
            ValueError: The batch is malformed, the whole model's loss is not finite, or the handle
                was removed.
            UnsupportedError: There is too little memory; or the model or the batch cannot be run
                whole (``FullyShardedDataParallel``, documents stated by offsets).
            RankMismatchError: Ranks were given different batches.

        Example::

            handle = hf.parallelize(model, cp)
            print(handle.verify({"input_ids": tokens[:, :512], "labels": tokens[:, :512]}))
        """
        return verify_target(self._target, batch)

    def remove(self) -> None:
        """Undo it: the model is as it was before. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def parallelize(
    model: nn.Module | Any,
    cp: ContextParallel,
    *,
    logits: Logits = "local",
    reduction: Reduction | None = None,
) -> Handle:
    """Let a model of transformers take ordinary whole batches, computed over the ranks of a ring.

    The model's attention becomes that of :func:`register`, and hooks split what goes in and sum or
    join what comes out. Modules, and the keys of ``state_dict``, stay as they are. The same call
    again changes nothing.

    A ``transformers.Trainer`` that is built already, or a trainer of TRL, is given in place of the
    model: its ranks of a ring then draw the same batches, to train, evaluate and predict, and count
    as one. Methods are replaced on the instance alone.

    Args:
        model: A model of transformers, or what wraps it (DDP, FSDP, PEFT), or a Trainer. LoRA comes
            before.
        cp: The ranks that hold a sequence. They are given equal batches.
        logits: ``"local"``: each rank's part, ``[B, T_local, V]`` in the order of the layout;
            ``"gather"``: of the whole sequence, on every rank. A Trainer predicts whole ones either
            way.
        reduction: How gradients are reduced over the ranks, outside of the model. ``"sum"``, the
            default: by :meth:`ring_torch.ContextParallel.reduce_gradients`; ``"mean"``, that of a
            Trainer: by DDP or ``fully_shard``, over the ranks of the ring or of several. The loss
            is the whole batch's either way; its gradient is this rank's part, times ``cp_size`` for
            a mean.

    Returns:
        A handle to undo it.

    Raises:
        ValueError: ``model`` is none of transformers; an option is unknown, or other than before;
            later, in a forward: a batch that was split before, or a ``reduction`` that is wrong.
        UnsupportedError: The model, or a setting of the Trainer, is not exact on split sequences;
            the message says why.
        RankMismatchError: In a forward: ranks were given different batches.

    Example::

        hf.parallelize(model, cp)
        loss = model(**batch).loss  # of the whole batch, on every rank
        loss.backward()
        cp.reduce_gradients(model)
    """
    checks.check_choice("logits", logits, ("local", "gather"))
    checks.check_choice("reduction", reduction or "sum", ("sum", "mean"))
    check_context(cp)
    is_trainer = trainer_class(model) is not None
    inner: Any = model.model if is_trainer else model
    is_new = isinstance(inner, nn.Module) and hooks_of(inner) is None
    if is_trainer:
        handle = _trainer(model, cp, logits, reduction)
    else:
        handle = _model(model, cp, logits, reduction or "sum")
    if is_new:
        warn_of_untested(unwrapped(inner))
    return handle


def verify(model: nn.Module | Any, cp: ContextParallel, batch: Mapping[str, Any]) -> VerifyReport:
    """Compare a model on a ring with the whole model: :meth:`Handle.verify` of any model.

    Args:
        model: As in :func:`parallelize`; parallelized already, or else only for this call.
        cp: The ranks of the ring.
        batch: A short batch.

    Returns:
        The differences, all of which are rounding.

    Raises:
        WrongResultError: Something differs by more; the message names the module.
        ValueError: ``model`` is none of transformers, or on another ring; else as
            :meth:`Handle.verify`.
        UnsupportedError: The model is not exact on split sequences; else as :meth:`Handle.verify`.
        RankMismatchError: Ranks were given different batches.

    Example::

        print(hf.verify(model, cp, {"input_ids": tokens, "labels": tokens}))
    """
    check_context(cp)
    inner: Any = model.model if trainer_class(model) is not None else model
    hooks = hooks_of(inner) if isinstance(inner, nn.Module) else None
    if hooks is not None:
        return _handle_of(hooks, cp, hooks.logits, hooks.reduction).verify(batch)
    handle = _model(inner, cp, "local", "mean")  # FSDP takes no other, and verify knows of it
    try:
        return handle.verify(batch)
    finally:
        handle.remove()


def _trainer(
    trainer: Any, cp: ContextParallel, logits: Logits, reduction: Reduction | None
) -> Handle:
    if reduction == "sum":
        raise ValueError("reduction='sum': a Trainer takes the mean of gradients; leave it out")
    check_trainer(trainer, logits)
    models = trainer.model, getattr(trainer, "ref_model", None)  # of TRL, which is not trained
    done: list[Callable[[], object]] = []
    try:
        done.extend(_model(x, cp, logits, "mean").remove for x in models if x is not None)
        if (before := trainer_hooks_of(trainer)) is not None:
            assert isinstance(before.owner, Handle)
            return before.owner
        found = hooks_of(trainer.model)
        assert found is not None
        hooks = TrainerHooks(trainer, found)
        assert isinstance(found.owner, Handle)
        handle = hooks.owner = Handle([*done, *hooks.install()], found.owner._target)  # noqa: SLF001
    except ValueError:  # of the second model, or of the rings: nothing is left half done
        for undo in reversed(done):
            undo()
        raise
    return handle


def _model(model: nn.Module, cp: ContextParallel, logits: Logits, reduction: Reduction) -> Handle:
    if not isinstance(model, nn.Module) or not is_of_transformers(unwrapped(model)):
        raise ValueError(
            f"model must be a model of transformers, or DDP, FSDP or PEFT round one, or a Trainer, "
            f"got {type(model).__name__}"
        )
    if (before := hooks_of(model)) is not None:
        return _handle_of(before, cp, logits, reduction)
    inner: Any = unwrapped(model)
    # Such a model takes the row of each sequence's last token from what ``score`` makes of all.
    is_pooling = isinstance(inner, GenericForSequenceClassification) and (
        forward_of(type(inner)) is forward_of(GenericForSequenceClassification)
    )
    split: nn.Module = inner.base_model if is_pooling else _split_module(model)
    report = report_of(split, joins_router=True)
    reasons = report.reasons
    if is_pooling and not hasattr(inner, "score"):
        reasons = (*reasons, lacks(type(inner).__name__, "score"))
    if reasons:
        raise UnsupportedError(f"{type(inner).__name__} cannot be split: {'; '.join(reasons)}")
    hooks = ModelHooks(
        cp._sharding, report, logits, reduction, is_pooling=is_pooling,  # noqa: SLF001 - one package
        joins_router=not is_pooling and has_router_loss(inner) and inner.base_model is not inner,
    )  # fmt: skip
    undo = [_attend(inner), *_register(hooks, split, inner), *wire(hooks, inner)]
    handle = hooks.owner = Handle(undo, (_split_module(model), hooks))
    return handle


def _register(hooks: ModelHooks, split: nn.Module, inner: Any) -> Iterator[Callable[[], object]]:
    """Put the hooks on; yields what takes each off."""
    if hasattr(inner, "generate"):
        yield replace_attribute(inner, "generate", refuse_generation)
    yield split.register_forward_pre_hook(hooks.split, with_kwargs=True).remove
    if hooks.is_pooling:
        yield inner.score.register_forward_hook(hooks.join_rows).remove
        return
    yield split.register_forward_hook(hooks.join, with_kwargs=True).remove
    if hooks.joins_router:
        base = inner.base_model
        assert isinstance(base, nn.Module) and base is not inner
        yield base.register_forward_pre_hook(hooks.split_mask, with_kwargs=True).remove
        yield base.register_forward_hook(hooks.join_router, with_kwargs=True).remove


def _handle_of(before: ModelHooks, cp: ContextParallel, logits: str, reduction: str) -> Handle:
    """The handle of the first call.

    Raises:
        ValueError: That had other options.
    """
    same = before.sharding is cp._sharding  # noqa: SLF001 - one package
    if not same or (before.logits, before.reduction) != (logits, reduction):
        raise ValueError(
            f"the model is parallelized already, with logits={before.logits!r}, "
            f"reduction={before.reduction!r} and {'this' if same else 'another'} ContextParallel: "
            f"call remove() of the handle first"
        )
    assert isinstance(before.owner, Handle)
    return before.owner


def _split_module(model: nn.Module) -> nn.Module:
    """The module whose ``__call__`` runs the model: PEFT calls the model's ``forward`` past it."""
    return next(
        part
        for part in wrappers(model)
        if hasattr(type(part), "get_base_model") or is_of_transformers(part)
    )


def _attend(model: Any) -> Callable[[], object]:
    """Give the model ring attention, unless it has it; what gives it back its own.

    Towers that see images or sound see whole ones, and keep theirs.
    """
    if is_ring(_attention_of(model)):
        return lambda: None
    before = [
        (config, config._attn_implementation)  # noqa: SLF001 - transformers has no other name
        for config in _configs(model)
    ]
    kept = [(module.config, _attention_of(module)) for module in towers(model)]
    set_attention = model.set_attn_implementation
    if has_written_attention(model):  # of which transformers has no other to set
        set_attention = partial(setattr, model.config, "_attn_implementation")
    set_attention(register())
    # A model whose own module has attention of images alone sets that of its text part only.
    attending = [x for _, x in text_parts(model) if has_attention(x) and hasattr(x, "config")]
    if not all(is_ring(_attention_of(x)) for x in attending or [model]):
        _set(before)
        raise UnsupportedError(lacks(name_of(model), "attention that set_attn_implementation sets"))
    _set([(config, name) for config, name in kept if config is not model.config])
    return partial(_set, before)


def _configs(model: Any) -> Iterator[Any]:
    """Yield configs of a model and of its parts, each before those within it."""
    found = [model.config, *(x.config for x in model.modules() if is_of_transformers(x))]
    while found:
        config = found.pop(0)
        yield config
        inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
        found += [x for x in inner if x is not None]


def _set(attention: Iterable[tuple[Any, str]]) -> None:
    """Set the attention of configs, in this order: each sets those within it, too."""
    for config, name in attention:
        config._attn_implementation = name  # noqa: SLF001 - transformers has no other name


def _attention_of(model: Any) -> str:
    name: str = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name
    return name
