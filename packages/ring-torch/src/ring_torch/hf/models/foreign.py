"""Code of other libraries in a model's forward that takes a rank's part for the whole batch.

NEFTune (a hook that Trainers put on input embeddings) scales its noise by the length. PEFT's
activated LoRA counts tokens from the end, its AdaLoRA adds a term to the loss, and other adapters
take means over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.models.code import names_in_forward

_NEFTUNE = "neftune_post_forward_hook"
_TERM = "orth_reg_weight"  # of AdaLoRA's config

#: Adapters of PEFT that are not exact on split sequences, by the class of their config, and why.
_MIXING = {
    "ShadowConfig": "runs a second model on a rank's tokens, without ring attention",
    "LilyConfig": "weighs its experts by a mean over the tokens that it sees, which are a rank's",
}


class _Mask(Protocol):
    """The parts of a :class:`~ring_torch.hf.models.placeholders.ShardedMask` that are needed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def length(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def sharding(self) -> Any: ...

    def shard(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class WholeNoise:
    """Forward hook of embeddings that adds this rank's part of the whole sequence's NEFTune noise.

    Attributes:
        hook: Hook of transformers, called where no split batch is under way.
        mask_of: Function that returns the mask of the forward under way, ``None`` outside of one.
    """

    hook: Callable[..., Tensor]
    mask_of: Callable[[], _Mask | None]

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return embeddings ``[B, T_local, dim]``, in training with noise."""
        mask = self.mask_of()
        if mask is None or output.shape[:2] != mask.shape:
            return self.hook(module, args, output)
        # Each rank draws the noise of all tokens. Trainers seed the ranks alike, so it is what one
        # device draws, of the whole sequence's strength.
        whole = output.new_zeros(output.shape[0], mask.length, *output.shape[2:])
        return output + mask.shard(self.hook(module, args, whole))


def replace_noise(model: nn.Module, mask_of: Callable[[], _Mask | None]) -> None:
    """Replace NEFTune's hooks in a model by :class:`WholeNoise`.

    A Trainer sets its hook when training starts, and removes it by its handle, which works as
    before.
    """
    for module, key, hook in _noise_hooks(model):
        module._forward_hooks[key] = WholeNoise(hook, mask_of)  # noqa: SLF001 - torch has no other way to change a hook


def _noise_hooks(model: nn.Module) -> list[tuple[nn.Module, int, Callable[..., Tensor]]]:
    """Return the modules that have NEFTune's hook, its key among the module's, and the hook itself.

    It is looked for anew in each forward: one that was replaced before may have been for another
    ring.
    """
    return [
        (module, key, hook.hook if isinstance(hook, WholeNoise) else hook)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()  # noqa: SLF001 - torch lists hooks nowhere else
        if isinstance(hook, WholeNoise) or getattr(hook, "__name__", "") == _NEFTUNE
    ]


def refuse_noise(model: nn.Module, reason: str) -> None:
    """Raise UnsupportedError if a model in training has NEFTune's hook, with the reason why."""
    if model.training and _noise_hooks(model):
        raise UnsupportedError(
            f"neftune_noise_alpha: noise {reason} on a ring; leave it out for {type(model).__name__}"
        )


def adapter_configs(model: Any) -> Iterator[Any]:
    """Yield the configs of all adapters of a model of PEFT."""
    configs = getattr(model, "peft_config", None)
    yield from configs.values() if isinstance(configs, dict) else ()


def puts_tokens(model: Any) -> bool:
    """Return True if a model of PEFT puts tokens of its own before the batch's."""
    config = getattr(model, "active_peft_config", None)
    return getattr(config, "is_prompt_learning", False) is True


def adapter_reasons(model: Any) -> Iterator[str]:
    """Yield reasons why adapters of PEFT would not compute on a rank's part what they do whole."""
    for config in adapter_configs(model):
        velora = getattr(config, "velora_config", None)
        if velora is not None and getattr(velora, "init_type", "") != "random":
            yield (
                f"VeLoRA with init_type={velora.init_type!r} takes the mean of the tokens that it sees, "
                f"which are a rank's; give init_type='random'"
            )
        name = type(config).__name__
        if name in _MIXING:
            yield f"{name} {_MIXING[name]}; take another adapter"


@dataclass(eq=False)
class LossTerm:
    """Forward hooks of PEFT's AdaLoRA model, which adds a term of its weights to the loss.

    Every rank adds it to its part of the loss, and the parts are summed.

    Attributes:
        share_of: Function that returns the share of the term that a rank is to add.
    """

    share_of: Callable[[], float]
    undo: list[tuple[Any, float]] = field(default_factory=list)

    @untraced
    def begin(self, module: Any, _args: object) -> None:
        """Set the term's weight in the adapters' configs to a rank's share."""
        for config in adapter_configs(module):
            if (weight := getattr(config, _TERM, None)) is not None:
                self.undo.append((config, weight))
                setattr(config, _TERM, weight * self.share_of())

    @untraced
    def end(self, *_: object) -> None:
        """Set it back after the forward, also when it raised."""
        while self.undo:
            config, weight = self.undo.pop()
            setattr(config, _TERM, weight)


def has_loss_term(model: Any) -> bool:
    """Return True if an adapter of a model of PEFT adds a term to the loss."""
    return any(hasattr(x, _TERM) for x in adapter_configs(model))


def is_activated(model: Any) -> bool:
    """Return True if a model of PEFT has an adapter that begins at tokens which invoke it."""
    return any(getattr(x, "alora_invocation_tokens", None) for x in adapter_configs(model))


def activated_offsets(module: Any, batch: dict[str, Any]) -> list[int | None] | None:
    """Return for each row the token, counted from its end, at which activated LoRA begins.

    ``alora_offsets`` is taken out of the batch. Otherwise they are found as PEFT does, if the
    model's forward does so; ``None`` if it does not.
    """
    offsets: list[int | None] | None = batch.pop("alora_offsets", None)
    if offsets is None and "get_alora_offsets_for_forward" in names_in_forward(type(module)):
        find: Any = import_module("peft.tuners.lora.variants").get_alora_offsets_for_forward
        found = find(module, batch.get("input_ids"), batch.get("inputs_embeds"))
        offsets = found.get("alora_offsets")
    return offsets


def local_offsets(mask: _Mask, offsets: list[int | None]) -> list[int]:
    """Return offsets counted from the end of this rank's part, whose tokens are in order.

    Raises:
        UnsupportedError: There is not one offset for each row.
    """
    if len(offsets) != mask.shape[0]:
        raise UnsupportedError(
            f"alora_offsets: {len(offsets)} for a batch of {mask.shape[0]} rows; give one a row"
        )
    positions = mask.sharding.positions(mask.seq_len)
    return [int((positions >= mask.length - (x or 0)).sum()) if x else 0 for x in offsets]
