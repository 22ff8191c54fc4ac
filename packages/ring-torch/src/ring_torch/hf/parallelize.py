"""One line after which a model of transformers takes whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from ring_core import UnsupportedError, checks
from ring_torch.context import ContextParallel
from ring_torch.hf.register import is_registered, register
from ring_torch.models.check import check_model, is_of_transformers, unwrapped, wrappers
from ring_torch.models.hooks import Logits, ModelHooks, Reduction, hooks_of

__all__ = ["Handle", "parallelize"]


class Handle:
    """What :func:`parallelize` has done."""

    def __init__(self, undo: Iterable[Callable[[], object]]) -> None:
        self._undo = list(undo)

    def remove(self) -> None:
        """Undo it: the model is as it was before. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def parallelize(
    model: nn.Module,
    cp: ContextParallel,
    *,
    logits: Logits = "local",
    reduction: Reduction | None = None,
) -> Handle:
    """Let a model of transformers take ordinary whole batches, computed over the ranks of a ring.

    The model's attention becomes that of :func:`register`, and hooks split what goes in and sum or
    join what comes out. Modules, and the keys of ``state_dict``, stay as they are. The same call
    again changes nothing.

    Args:
        model: A model of transformers, or what wraps it (DDP, FSDP, PEFT). LoRA comes before.
        cp: The ranks that hold a sequence. They are given equal batches.
        logits: ``"local"``: each rank's part, ``[B, T_local, V]`` in the order of the layout;
            ``"gather"``: of the whole sequence, on every rank.
        reduction: How gradients are reduced over the ranks, outside of the model. ``"sum"``, the
            default: by :meth:`ContextParallel.reduce_gradients`; ``"mean"``: by DDP or
            ``fully_shard``, over the ranks of the ring or of several. The loss is the whole
            batch's either way; its gradient is this rank's part, times ``cp_size`` for a mean.

    Returns:
        A handle to undo it.

    Raises:
        ValueError: ``model`` is none of transformers; an option is unknown, or other than before;
            later, in a forward: a batch that was split before, or a ``reduction`` that is wrong.
        UnsupportedError: The model is not exact on split sequences; the message says why.
        RankMismatchError: In a forward: ranks were given different batches.

    Example::

        hf.parallelize(model, ContextParallel())
        loss = model(**batch).loss  # of the whole batch, on every rank
        loss.backward()
        cp.reduce_gradients(model)
    """
    checks.check_choice("logits", logits, ("local", "gather"))
    reduction = reduction or "sum"
    checks.check_choice("reduction", reduction, ("sum", "mean"))
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp must be a ContextParallel, got {type(cp).__name__}")
    if not isinstance(model, nn.Module) or not is_of_transformers(unwrapped(model)):
        raise ValueError(
            f"model must be a model of transformers, or DDP, FSDP or PEFT round one, got "
            f"{type(model).__name__}"
        )
    if (before := hooks_of(model)) is not None:
        return _again(before, cp, logits, reduction)
    report = check_model(model)
    if not report.exact:
        name = type(unwrapped(model)).__name__
        raise UnsupportedError(f"{name} cannot be split: {'; '.join(report.reasons)}")
    hooks = ModelHooks(cp._sharding, report, logits, reduction)  # noqa: SLF001 - one package
    target = _called(model)
    handle = Handle([
        _attend(unwrapped(model)),
        target.register_forward_pre_hook(hooks.split, with_kwargs=True).remove,
        target.register_forward_hook(hooks.join, with_kwargs=True).remove,
    ])
    hooks.owner = handle
    return handle


def _again(before: ModelHooks, cp: ContextParallel, logits: str, reduction: str) -> Handle:
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


def _called(model: nn.Module) -> nn.Module:
    """The module whose ``__call__`` runs the model: PEFT calls the model's ``forward`` past it."""
    return next(
        part
        for part in wrappers(model)
        if hasattr(type(part), "get_base_model") or is_of_transformers(part)
    )


def _attend(model: nn.Module) -> Callable[[], object]:
    """Give the model ring attention, unless it has it; what gives it back its own."""
    own = model.config._attn_implementation  # type: ignore[union-attr]  # noqa: SLF001
    if is_registered(own):
        return lambda: None
    model.set_attn_implementation(register())  # type: ignore[operator]
    return lambda: model.set_attn_implementation(own)  # type: ignore[operator]
