"""Facts about how a model is trained, read from its weights, configs and wrappers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring_core import UnsupportedError

#: Config fields that hold dropout rates of attention.
_DROPOUT = re.compile(r"att\w*_(dropout|pdrop)(_prob)?|dropout_rate")


def averaging_wrapper(module: nn.Module) -> str | None:
    """Return the name of the wrapper that averages a model's gradients over ranks, or ``None``.

    Call it within a forward: only then DDP can be seen, and modules in FSDP1 hold a flat parameter
    or views of one.
    """
    if DistributedDataParallel._active_ddp_module is not None:  # noqa: SLF001 - torch says it nowhere else
        return "DistributedDataParallel"
    if any(isinstance(x, FSDPModule) for x in module.modules()):
        return "fully_shard"
    is_wrapped = any(isinstance(x, FullyShardedDataParallel) for x in module.modules())
    is_flat = any(
        isinstance(x, FlatParameter) or isinstance(x._base, FlatParameter)  # noqa: SLF001 - FSDP1 leaves views of it
        for x in module.parameters()
    )
    return "FullyShardedDataParallel" if is_wrapped or is_flat else None


def weight_checksum(module: nn.Module) -> float:
    """Return the sum of the smallest trained weight, which ranks compare to see that weights agree.

    It is 0 where nothing is trained, as in evaluation or under ``no_grad``; where the sum is not
    finite; and where ``fully_shard`` splits the weights over ranks: it reduces gradients itself, so
    weights cannot drift apart.
    """
    weights = [x for x in module.parameters() if x.requires_grad]
    if not module.training or not torch.is_grad_enabled() or not weights:
        return 0.0
    # The smallest weight: its sum costs next to nothing, and drift shows in any of them.
    weight = min(weights, key=Tensor.numel)
    if isinstance(weight, DTensor):
        return 0.0
    total = weight.detach().double().sum().item()
    return total if math.isfinite(total) else 0.0


def attention_dropout_seed(module: nn.Module) -> int | None:
    """Return a new seed if attention dropout is on, else ``None``.

    It is drawn from torch's CPU generator. Ranks compare it, as they must have seeded torch alike.
    """
    is_dropping = module.training and any(attention_dropout_rates(module))
    return int(torch.randint(1 << 62, (), device="cpu")) if is_dropping else None


def attention_dropout_rates(module: nn.Module) -> Iterator[float]:
    """Return the attention dropout rates in the configs of a model's modules, nested ones too."""
    configs = (getattr(submodule, "config", None) for submodule in module.modules())
    # Modules share configs; each is read once.
    by_id = {id(x): x for x in configs if hasattr(x, "__dict__")}
    nested = [y for x in by_id.values() for y in vars(x).values() if hasattr(y, "to_dict")]
    return (
        value
        for config in (*by_id.values(), *nested)
        for name, value in vars(config).items()
        if _DROPOUT.fullmatch(name) and isinstance(value, int | float)
    )


def asks_for_router_loss(model: Any, is_asked: bool | None, *, joins_router: bool) -> bool:
    """Return True if a call or the config asks for a router's loss.

    Args:
        model: The model, without wrappers.
        is_asked: The call's ``output_router_logits``; ``None`` leaves it to the config.
        joins_router: True if that loss can be computed from the whole sequence.

    Raises:
        UnsupportedError: It is asked for, and cannot be computed from the whole sequence.
    """
    if is_asked is None:
        config = getattr(model, "config", None)
        is_asked = getattr(config and config.get_text_config(), "output_router_logits", False)
    if is_asked and not joins_router:
        raise UnsupportedError(
            f"output_router_logits: {type(model).__name__} has no router's loss that "
            f"could be computed of the whole sequence; leave it out"
        )
    return bool(is_asked)


def router_loss_weight(module: nn.Module) -> float:
    """Return the factor with which a mixture-of-experts model adds its router's auxiliary loss.

    Raises:
        UnsupportedError: No module has an attribute of transformers' name for it,
            ``router_aux_loss_coef``.
    """
    for submodule in module.modules():
        weight = getattr(submodule, "router_aux_loss_coef", None)
        if isinstance(weight, int | float):
            return weight
    raise UnsupportedError(
        f"{type(module).__name__} has a router's loss and no router_aux_loss_coef: what it adds to "
        f"its loss is not known"
    )
