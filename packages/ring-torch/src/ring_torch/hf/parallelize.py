"""Parallelize a transformers model or Trainer in one call, after which it takes whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast, get_args

import torch.distributed as dist
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from ring_core import StrategyConfig, UnsupportedError, checks
from ring_core.base.arguments import not_none
from ring_core.base.config import strategy_config
from ring_torch.context import ContextParallel, check_context
from ring_torch.hf.generation import serving_generate
from ring_torch.hf.models.check import (
    has_router_loss,
    is_of_transformers,
    report_of,
    text_modules,
    unwrapped,
    wrappers,
)
from ring_torch.hf.models.code import forward_of
from ring_torch.hf.models.foreign import LossTerm, adapter_reasons, has_loss_term, is_activated
from ring_torch.hf.models.head import head_without_logits
from ring_torch.hf.models.hooks import (
    Logits,
    ModelHooks,
    Recurrent,
    Reduction,
    hooks_of,
    replace_attribute,
)
from ring_torch.hf.models.recurrent import carries_states, is_recurrent
from ring_torch.hf.models.releases import lacks, warn_of_untested
from ring_torch.hf.register import set_ring_attention
from ring_torch.hf.rollouts import Rollouts, check_rollouts, is_sampler, sampled_by_gkd
from ring_torch.hf.trainer import TrainerHooks, trainer_hooks_of
from ring_torch.hf.trainer_settings import check_trainer, reads_logits, trainer_class
from ring_torch.hf.verification import Target, verify_target
from ring_torch.hf.wiring import wire
from ring_torch.strategies import strategy_names
from ring_torch.verification.judgement import VerifyReport


class Handle:
    """Result of :func:`parallelize`: undoes its changes, and verifies the model."""

    def __init__(
        self, undo: list[Callable[[], object]], target: Target,
        check: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._undo, self._target, self._check = undo, target, check
        self._trainers: set[Handle] = set()  # of Trainers of this model, which need it split

    def verify(self, batch: Mapping[str, Any]) -> VerifyReport:
        """Run one batch on the ring and on the whole model, forward and backward, and compare them.

        Every rank runs the batch split over the ring once, and whole twice, with transformers'
        ``eager`` and ``sdpa`` attention. The difference between the two whole runs is the noise. A
        model without ``sdpa`` runs ``eager`` twice, the second time with module outputs changed at
        random by a unit in the last place.

        The split run's loss, outputs and parameter gradients may differ from the whole run's by
        four times the noise plus a floor for the rounding of a single operation, relative to their
        size: ``2**-18``, in float16 ``2**-8``, in bfloat16 ``2**-5``. Outputs are compared token by
        token, padding left out. Wrong attention, masks or positions cause far larger differences.

        Parameters, gradients, buffers, random generators, training modes and hooks are restored
        afterwards, also when an error is raised. Dropout is off; activation checkpointing is used
        where the model has it enabled. In bfloat16, rounding alone can send a token to other
        experts: verify a mixture of experts in float32.

        Args:
            batch: A short batch as the model takes it, the same on all ranks of the ring, with
                labels if the loss is to be compared.

        Returns:
            The differences, all of which are small enough to be rounding.

        Raises:
            WrongResultError: A difference is larger than that. It is raised on all ranks of the
                ring; the message names the first module whose output, or the first parameter whose
                gradient, differs.
            ValueError: The batch is malformed, the whole model's loss is not finite, there is
                neither a loss nor an output that can be compared, or the two whole runs differ so
                much that nothing can be told; or the handle was removed.
            UnsupportedError: There is too little memory; or the model or the batch cannot be run
                whole (``FullyShardedDataParallel``, documents stated by offsets).
            RankMismatchError: Ranks were given different batches.

        Example::

            handle = hf.parallelize(model, cp)
            print(handle.verify({"input_ids": tokens[:, :512], "labels": tokens[:, :512]}))
        """
        self._check()
        return verify_target(self._target, batch)

    def remove(self) -> None:
        """Undo all changes: the model is as it was before. A second call does nothing.

        A model that was parallelized before its Trainer stays so: its own handle undoes that, and
        what was done to the Trainer, if that is still so.
        """
        while self._trainers:
            self._trainers.pop().remove()
        while self._undo:
            self._undo.pop()()


def parallelize(
    model: nn.Module | Any,
    cp: ContextParallel,
    *,
    logits: Logits | None = None,
    reduction: Reduction | None = None,
    strategy: str | StrategyConfig = "auto",
    recurrent: Recurrent = "auto",
) -> Handle:
    """Make a transformers model take whole batches and compute them over the ranks of a ring.

    The model's attention becomes that of :func:`register`. Forward hooks split the inputs, sum the
    loss over the ranks and, if asked for, join the logits. Modules and the keys of ``state_dict``
    stay as they are. ``generate`` takes a :class:`ShardedCache`, and no other cache. A second call
    with the same options changes nothing. The first one warns of a model that no test has run: one
    of another package, or of a transformers newer than the tested ones.

    Instead of a model, pass a ``transformers.Trainer`` or TRL trainer that is already built. The
    ranks of a ring then draw the same batches in training, evaluation and prediction, and count as
    one device in its statistics. Methods are replaced on this instance, not on its class.

    Args:
        model: A model of transformers, bare or wrapped (DDP, FSDP, PEFT), or a Trainer. Add LoRA
            adapters before.
        cp: The ranks that share a sequence. They must be given equal batches.
        logits: ``"local"`` (default) returns each rank's part, ``[B, T_local, V]`` in the order of
            the layout; ``"gather"`` returns the whole sequence's, ``[B, T, V]``, on every rank. A
            Trainer's predictions are of whole sequences either way. ``"none"`` makes none: the
            loss is computed for a few tokens at a time, labels are required and ``.logits`` is
            ``None``. Of TRL's Trainers whose losses read whole logits (ORPO, CPO, TPO, GKD) the
            default is ``"gather"``.
        reduction: The reduction of gradients over the ranks that runs outside the model. ``"sum"``
            (default) is for :meth:`ring_torch.ContextParallel.reduce_gradients`; ``"mean"``
            (default of a Trainer) is for DDP or ``fully_shard``, over the ranks of one ring or of
            several. Either way the returned loss is the whole batch's, and its gradient this rank's
            part, which for ``"mean"`` is multiplied by ``cp_size``.
        strategy: Strategy of each attention call, as in :func:`ring_torch.ring_attention`. A model
            that was given the attention of :func:`register` keeps its strategy with ``"auto"``.
        recurrent: What recurrent layers (linear attention, delta rules, Mamba, short convolutions)
            compute. With ``"split"`` each rank computes its own tokens, and states go from rank to
            rank; packed documents begin anew. With ``"whole"`` each rank gathers the sequence, runs
            the layer on all of it and keeps its part; packed documents are refused. ``"auto"``
            splits them if all can be, which ``check_model(model).whole_layers`` tells, and runs
            them whole else, and in the ``striped`` layout, which takes convolutions alone. Where
            a layer's states would take more bytes than its hidden states, as with short batches,
            it runs whole, too, and the logger ``ring_torch`` tells (level ``INFO``).

    Returns:
        A handle that can undo the changes and verify the model.

    Raises:
        ValueError: ``model`` does not come from transformers; an option is unknown, or differs from
            an earlier call's; or its attention was registered with another strategy. Later, in a
            forward: the batch is already split, or ``reduction`` does not fit the model's wrapper.
        UnsupportedError: The model, or a setting of the Trainer, is not exact on split sequences;
            the message says why.
        RankMismatchError: In a forward: ranks were given different batches; in training also if
            their weights differ, or the seeds that they draw for attention dropout.

    Example::

        hf.parallelize(model, cp)
        loss = model(**batch).loss  # of the whole batch, on every rank
        loss.backward()
        cp.reduce_gradients(model)
    """
    checks.check_choice("logits", logits or "local", get_args(Logits))
    checks.check_choice("reduction", reduction or "sum", ("sum", "mean"))
    checks.check_choice("recurrent", recurrent, get_args(Recurrent))
    check_context(cp)
    way = strategy_config(strategy, strategy_names())
    is_trainer = trainer_class(model) is not None
    inner: Any = model.model if is_trainer else model
    is_new = hooks_of(inner) is None
    if is_trainer:
        default: Logits = "gather" if reads_logits(model) else "local"
        handle = _trainer(model, cp, logits or default, reduction, way, recurrent)
    else:
        handle = _model(model, cp, logits or "local", reduction or "sum", way, recurrent)
    if is_new:
        warn_of_untested(unwrapped(inner))
    return handle


def fsdp2(
    trainer: Any,
    cp: ContextParallel,
    *,
    logits: Logits = "local",
    strategy: str | StrategyConfig = "auto",
    recurrent: Recurrent = "auto",
) -> Handle:
    """Parallelize a Trainer whose weights accelerate shards by FSDP2, over data x ring.

    The Trainer has FSDP2 and accelerate's ``ParallelismConfig`` with ``cp_size``, whose ring of
    torch's becomes one of Ring's; replicas (HSDP) and torch's tensor parallelism beside it stay.
    All else is as :func:`parallelize` does it: the Trainer takes whole batches, saves and resumes,
    also with other numbers of ranks.

    Args:
        trainer: A ``transformers.Trainer``, or TRL's ``SFTTrainer`` (without packing),
            ``DPOTrainer``, ``KTOTrainer`` or ``RewardTrainer``, before ``train()``.
        cp: The ranks of accelerate's dimension ``cp``.
        logits: As in :func:`parallelize`.
        strategy: As in :func:`parallelize`.
        recurrent: As in :func:`parallelize`.

    Returns:
        A handle that can undo the changes and verify the model.

    Raises:
        ValueError: ``trainer`` is no Trainer, or has no FSDP2 or no ``cp`` mesh of the ranks of
            ``cp``; or a reason of :func:`parallelize`.
        UnsupportedError: Trainers of this class, or a setting, do not train on such a mesh; or the
            model is not exact on split sequences.
        RankMismatchError: As in :func:`parallelize`.

    Example::

        config = ParallelismConfig(dp_shard_size=4, cp_size=2)
        trainer = SFTTrainer(model, SFTConfig(fsdp=True, parallelism_config=config), ...)
        hf.fsdp2(trainer, ContextParallel(trainer.accelerator.torch_device_mesh["cp"]))
        trainer.train()
    """
    checks.check_choice("logits", logits, get_args(Logits))
    checks.check_choice("recurrent", recurrent, get_args(Recurrent))
    group = check_context(cp).ranks.group
    if trainer_class(trainer) is None:
        raise ValueError(f"hf.fsdp2 takes a Trainer, got {type(trainer).__name__}")
    ring = {0} if group is None else {*dist.get_process_group_ranks(group)}
    config = strategy_config(strategy, strategy_names())
    is_new = hooks_of(trainer.model) is None
    handle = _trainer(trainer, cp, logits, None, config, recurrent, ring)
    if is_new:
        warn_of_untested(unwrapped(trainer.model))
    return handle


def verify(model: nn.Module | Any, cp: ContextParallel, batch: Mapping[str, Any]) -> VerifyReport:
    """Compare a model on a ring with the whole model on one batch; see :meth:`Handle.verify`.

    Args:
        model: A model or Trainer as in :func:`parallelize`. One that is not parallelized yet is
            parallelized for this call alone.
        cp: The ranks of the ring.
        batch: A short batch, the same on all ranks.

    Returns:
        The differences, all of which are small enough to be rounding.

    Raises:
        WrongResultError: A difference is larger than that; the message names the module.
        ValueError: ``model`` does not come from transformers, or is parallelized over another ring;
            or a reason of :meth:`Handle.verify`.
        UnsupportedError: The model is not exact on split sequences; or a reason of
            :meth:`Handle.verify`.
        RankMismatchError: Ranks were given different batches.

    Example::

        print(hf.verify(model, cp, {"input_ids": tokens, "labels": tokens}))
    """
    check_context(cp)
    inner = model
    if trainer_class(model) is not None:
        inner = model.model
        if (existing := trainer_hooks_of(model)) is not None:
            existing.check_models()
    if (hooks := hooks_of(inner)) is not None:
        options = hooks.logits, hooks.reduction, hooks.strategy, hooks.recurrent
        return _handle_of(hooks, cp, *options).verify(batch)
    # Any model may have "mean", also one in FSDP, and verify divides the gradients by the factor.
    handle = _model(inner, cp, "local", "mean", StrategyConfig("auto"), "auto")
    try:
        return handle.verify(batch)
    finally:
        handle.remove()


def _trainer(
    trainer: Any, cp: ContextParallel, logits: Logits, reduction: Reduction | None,
    strategy: StrategyConfig, recurrent: Recurrent, ring: set[int] | None = None,
) -> Handle:  # fmt: skip
    """Parallelize a Trainer: its model, TRL's reference model if it has one, and its own methods.

    If an error is raised, nothing has changed. A model that was parallelized before stays so, then
    and after ``remove`` of the Trainer's handle: what an earlier call did, its own handle undoes.

    Raises:
        ValueError: ``reduction`` is ``"sum"``, a loss function needs whole logits, or options
            differ from an earlier call's.
        UnsupportedError: A model or a setting is not exact on split sequences.
    """
    if reduction == "sum":
        raise ValueError("reduction='sum': a Trainer takes the mean of gradients; leave it out")
    check_trainer(trainer, logits, ring)
    # TRL's frozen reference model, if there is one, sees the same split sequences.
    models = [x for x in (trainer.model, getattr(trainer, "ref_model", None)) if x is not None]
    with ExitStack() as undo:
        handles = []
        for model in models:
            is_new = hooks_of(model) is None
            handles.append(_model(model, cp, logits, "mean", strategy, recurrent))
            if is_new:
                undo.callback(handles[-1].remove)
        if (hooks := trainer_hooks_of(trainer)) is None:
            hooks = TrainerHooks(trainer, not_none(hooks_of(trainer.model)))
            target = handles[0]._target  # noqa: SLF001 - a class of this module
            if samples := is_sampler(trainer):
                check_rollouts(trainer, len(hooks.firsts), hooks.cp_size)
            undone = [*hooks.install(), *(Rollouts(hooks, target).install() if samples else ())]
            undone += sampled_by_gkd(hooks, target)
            hooks.owner = Handle(undone, target, hooks.check_models)
        hooks.check_models()
        owner: Handle = hooks.owner
        # No error came: from here on the handle undoes it, the models last.
        owner._undo.insert(0, undo.pop_all().close)  # noqa: SLF001 - a class of this module
    for handle in handles:
        handle._trainers.add(owner)  # noqa: SLF001 - a class of this module
    return owner


def _model(
    model: nn.Module, cp: ContextParallel, logits: Logits, reduction: Reduction,
    strategy: StrategyConfig, recurrent: Recurrent,
) -> Handle:  # fmt: skip
    """Parallelize a model: check it, set ring attention and install the hooks.

    Raises:
        ValueError: It does not come from transformers, or was parallelized with other options.
        UnsupportedError: It is not exact on split sequences.
    """
    if not isinstance(model, nn.Module) or not is_of_transformers(unwrapped(model)):
        raise ValueError(
            f"model must be a model of transformers, or DDP, FSDP or PEFT round one, or a Trainer, "
            f"got {type(model).__name__}"
        )
    if (existing := hooks_of(model)) is not None:
        return _handle_of(existing, cp, logits, reduction, strategy, recurrent)
    inner: Any = unwrapped(model)
    # The generic classifier computes ``score`` for all tokens and picks each sequence's last token
    # from the result. So its base model is split, and the output of ``score`` is joined.
    is_pooling = isinstance(inner, GenericForSequenceClassification) and (
        forward_of(type(inner)) is forward_of(GenericForSequenceClassification)
    )
    split: nn.Module = inner.base_model if is_pooling else _split_module(model)
    report = report_of(split, joins_router=True)
    reasons = report.reasons
    if is_pooling and not hasattr(inner, "score"):
        reasons = (*reasons, lacks(type(inner).__name__, "score"))
    # Adapters of a classifier see the whole batch, and the base model within them a rank's part.
    adapted = [x for x in wrappers(model) if has_loss_term(x)]
    if is_pooling:
        reasons = (*reasons, *(reason for x in wrappers(model) for reason in adapter_reasons(x)))
        if any(map(is_activated, wrappers(model))):
            reasons = (*reasons, "activated LoRA of a classifier counts tokens of a rank's part")
        if adapted and reduction == "sum":
            reasons = (*reasons, "AdaLoRA of a classifier adds a term that each rank has whole")
    whole_layers = report.whole_layers
    if cp.layout == "striped" and any(
        is_recurrent(x) and carries_states(x) for _, x in text_modules(inner)
    ):
        whole_layers = (*whole_layers, "striped layout, in which no two neighbours are on one rank")
    if recurrent == "split" and whole_layers:
        reasons = (*reasons, *(f"recurrent='split': {x}" for x in whole_layers))
    if reasons:
        raise UnsupportedError(f"{type(inner).__name__} cannot be split: {'; '.join(reasons)}")
    hooks = ModelHooks(
        check_context(cp, acting=False), report, logits, reduction, strategy, recurrent,
        whole_layers, is_pooling=is_pooling,
        joins_router=not is_pooling and has_router_loss(inner) and inner.base_model is not inner,
    )  # fmt: skip
    replaced: list[tuple[nn.Module, object]] = []  # heads, and their forwards without logits
    if logits == "none":
        if is_pooling or hooks.is_pair:
            raise UnsupportedError(
                f"logits='none' is for models of one sequence with a loss of tokens, not "
                f"{type(inner).__name__}: give logits='local'"
            )
        replaced.append(head_without_logits(inner, lambda: hooks.state is not None))
    undo = [set_ring_attention(inner, strategy)]
    undo += [replace_attribute(head, "forward", forward) for head, forward in replaced]
    undo += [*_register(hooks, split, inner), *wire(hooks, inner)]
    for wrapper in () if is_pooling else adapted:
        tuner: Any = wrapper.base_model
        term = LossTerm(lambda: hooks.undivided_share / hooks.sharding.ranks.size)
        undo.append(tuner.register_forward_pre_hook(term.begin).remove)
        undo.append(tuner.register_forward_hook(term.end, always_call=True).remove)
    handle = hooks.owner = Handle(undo, Target(_split_module(model), hooks, undo))
    return handle


def _register(hooks: ModelHooks, split: nn.Module, inner: Any) -> Iterator[Callable[[], object]]:
    """Install hooks that split batches and join outputs, and serve ``generate``.

    Yields:
        A function for each change that undoes it.
    """
    if hasattr(inner, "generate"):
        yield replace_attribute(inner, "generate", serving_generate(inner, hooks))
    yield split.register_forward_pre_hook(hooks.split, with_kwargs=True).remove
    if hooks.is_pooling:
        yield inner.score.register_forward_hook(hooks.join_rows).remove
        return
    yield split.register_forward_hook(hooks.join, with_kwargs=True).remove
    if hooks.joins_router:
        base = inner.base_model
        yield base.register_forward_pre_hook(hooks.split_mask, with_kwargs=True).remove
        yield base.register_forward_hook(hooks.join_router, with_kwargs=True).remove


def _handle_of(
    hooks: ModelHooks,
    cp: ContextParallel,
    logits: str,
    reduction: str,
    strategy: StrategyConfig,
    recurrent: str,
) -> Handle:
    """Return the handle of an earlier call of :func:`parallelize` with the same options.

    Raises:
        ValueError: The earlier call had other options.
    """
    same = hooks.all_ranks is check_context(cp, acting=False)
    options = hooks.logits, hooks.reduction, hooks.strategy, hooks.recurrent
    if not same or options != (logits, reduction, strategy, recurrent):
        raise ValueError(
            f"the model is parallelized already, with logits={hooks.logits!r}, "
            f"reduction={hooks.reduction!r}, strategy={hooks.strategy.name!r}, "
            f"recurrent={hooks.recurrent!r} and {'this' if same else 'another'} ContextParallel: call remove() of the handle first"
        )
    return cast("Handle", hooks.owner)


def _split_module(model: nn.Module) -> nn.Module:
    """Return the module to hook: the model of transformers, or PEFT's model that wraps it.

    PEFT calls the ``forward`` of the model it wraps, not its ``__call__``, so hooks on that would
    not run. Other wrappers, such as DDP, call it.
    """
    return next(
        wrapper
        for wrapper in wrappers(model)
        if hasattr(type(wrapper), "get_base_model") or is_of_transformers(wrapper)
    )
