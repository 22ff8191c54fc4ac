"""Run a model without dropout for a while, and put everything back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: Dicts of a module whose entries are restored.
_DICTS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_buffers",
)  # fmt: skip


class SavedFields:
    """Copy of the attributes, hooks and buffers of a model's modules, and of their configs.

    Args:
        model: The model; tensors are kept by reference, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._public = [(x, _public_fields(x)) for x in modules]
        configs = {id(x): x for module in modules for x in _configs_in(module)}
        self._configs_in = [(x, dict(vars(x))) for x in configs.values()]
        self._dicts = [(vars(x)[name], dict(vars(x)[name])) for x in modules for name in _DICTS]

    def restore(self) -> None:
        """Restore all fields. Hooks registered since then stay, after the restored ones."""
        for owner, before in self._public:
            for name in _public_fields(owner).keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)
        for config, before in self._configs_in:
            vars(config).clear()
            vars(config).update(before)
        for current, before in self._dicts:
            added = {key: x for key, x in current.items() if key not in before}
            current.clear()
            # Handles of hooks refer to these very dictionaries: their contents change, not they.
            current.update(before | added)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a block with dropout off and gradients enabled, then restore the model and torch's RNG.

    In the block parameters have no gradient and no hooks on its accumulation, and the CPU's RNG is
    seeded alike on all ranks. Restored are the parameters' gradients and hooks, and the modules'
    buffers, modes, hooks, attributes and configs, also when the block raises. Parameters are not
    copied: the block must not change them.
    """
    fields = SavedFields(model)
    buffers = [(x, x.clone()) for x in model.buffers()]
    weights = [*model.parameters()]
    gradients = [x.grad for x in weights]
    # Hooks may step an optimizer as soon as there is a gradient. Torch has no public name for them.
    hooks = [x._post_accumulate_grad_hooks or {} for x in weights]  # noqa: SLF001 - torch has no other list
    saved_hooks = [dict(x) for x in hooks]
    devices = {x.device for x in weights if x.device.type not in ("cpu", "meta")}
    device_type = next((x.type for x in devices), "cuda")
    try:
        with (
            torch.random.fork_rng([x.index for x in devices], device_type=device_type),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            # Ranks compare the dropout seeds that they draw, so they must draw alike.
            torch.default_generator.manual_seed(0)
            for weight, weight_hooks in zip(weights, hooks, strict=True):
                # Gradients of the user's step are set aside, not added to.
                weight.grad = None
                weight_hooks.clear()
            for module in model.modules():
                _switch_off_dropout(module)
            yield
    finally:
        fields.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                # In place, as modules and compiled graphs hold the tensors.
                buffer.copy_(before)
        for weight, gradient, weight_hooks, saved in zip(
            weights, gradients, hooks, saved_hooks, strict=True
        ):
            weight.grad = gradient
            weight_hooks.update(saved)


def _switch_off_dropout(module: nn.Module) -> None:
    """Set a module to evaluation mode.

    Activation checkpointing works in training mode only. A module with it stays in training mode
    with dropout rates of zero, so that its checkpointed path is verified.
    """
    module.training = bool(getattr(module, "gradient_checkpointing", False))
    for name, rate in _public_fields(module).items() if module.training else ():
        if "drop" in name and isinstance(rate, float):
            setattr(module, name, 0.0)


def _public_fields(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes whose names have no leading underscore."""
    return {name: x for name, x in vars(module).items() if not name.startswith("_")}


def _configs_in(module: nn.Module) -> Iterator[Any]:
    """Yield the config of a module, if it has one, and the configs nested in it."""
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        yield config
        yield from (x for x in vars(config).values() if hasattr(x, "to_dict"))
