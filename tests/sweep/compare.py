"""One class of models on two ranks and on one: what differs, or what is refused."""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_models import Wide
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from sweep.tiny import VOCAB, config_of

ROWS, LENGTH = 2, 21
LIMIT = 1e-7  # of differences in float64, as a part of the largest number compared
LARGEST = 30_000_000  # parameters of what counts as small
FIRST_TOKEN = 4  # those below are special


@dataclass(frozen=True)
class Outcome:
    """What became of a class of models.

    Attributes:
        result: ``exact``, ``refused``, ``wrong``, ``error``, ``does not build``, ``does not run``.
        reason: Why, in words; empty where exact.
        loss: ``exact``, ``none`` or why it was refused.
    """

    result: str
    reason: str = ""
    loss: str = "none"


class DifferentError(Exception):
    """Ranks computed something else than the whole model."""


def compare(rank: int, name: str, model_type: str) -> Outcome:
    """Run a class of models whole and on the ranks of the default group."""
    del rank
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        model = build(name, model_type)
    except Exception as error:  # noqa: BLE001 - whatever a constructor may raise
        return Outcome("does not build", _words(error))
    try:
        batch = batch_of(model)
        expected = run(model, batch)
    except Exception as error:  # noqa: BLE001 - the whole model's own
        batch, expected = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}, None
        failure = _words(error)
    try:
        model.set_attn_implementation(hf.register())
        cp = ContextParallel()
        shard = cp.shard_batch(batch, model=model)
    except Exception as error:  # noqa: BLE001 - to be told from what is refused by name
        return Outcome("refused" if _is_refusal(error) else "error", _words(error))
    if expected is None:
        return Outcome("does not run", failure)
    try:
        check(cp, model, run(model, shard, cp), expected)
    except DifferentError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 - to be told from what is refused by name
        return Outcome("refused" if _is_refusal(error) else "error", _words(error))
    return _with_labels(cp, model, batch)


def build(name: str, model_type: str, attention: str = "eager", **changes: Any) -> Any:
    """A small model with random weights, the same on every rank, in float64."""
    cls = getattr(transformers, name)
    config = config_of(model_type, cls, **changes)
    with torch.device("meta"):
        size = sum(x.numel() for x in cls._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"has {size:,} parameters with a small config")
    torch.manual_seed(1)
    model = cls._from_config(config, attn_implementation=attention)
    with torch.no_grad():  # biases, norms and sinks begin at values that would hide their use
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.copy_(torch.nan_to_num(weight)).add_(torch.randn_like(weight), alpha=0.1)
    return model.double().eval()


def batch_of(model: Any) -> dict[str, Any]:
    """Tokens for a model of text, or nothing but what the model takes first."""
    generator = torch.Generator().manual_seed(5)
    takes = inspect.signature(model.forward).parameters
    tokens = torch.randint(FIRST_TOKEN, VOCAB - 16, (ROWS, LENGTH), generator=generator)
    if "input_ids" in takes:
        return {"input_ids": tokens}
    if "inputs_embeds" in takes:
        width = model.config.get_text_config().hidden_size
        return {"inputs_embeds": torch.randn(ROWS, LENGTH, width, generator=generator).double()}
    return {model.main_input_name: tokens}


def run(
    model: Any, batch: dict[str, Any], cp: ContextParallel | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All outputs, and gradients of a sum over them, of this rank's part."""
    model.zero_grad()
    with Wide():
        out = model(**batch, **_whole(model))
    given = {n: x for n, x in out.items() if isinstance(x, Tensor) and x.is_floating_point()}
    given.pop("loss", None)
    length = next(iter(batch.values())).shape[1]
    seeded = torch.Generator()
    parts = []
    for x in given.values():
        if x.shape[:2] == (ROWS, length) and x.requires_grad:
            if cp is None:
                weights = torch.randn(x.shape, generator=seeded.manual_seed(3)).to(x.dtype)
            else:
                size = (ROWS, LENGTH, *x.shape[2:])
                weights = torch.randn(size, generator=seeded.manual_seed(3)).to(x.dtype)
                more = length * cp.cp_size - LENGTH
                shape = (ROWS, more, *x.shape[2:])
                weights = cp.shard(torch.cat([weights, weights.new_zeros(shape)], 1))
            parts.append((x * weights).sum())
    if parts:
        sum(parts).backward()  # type: ignore[union-attr]
    if cp is not None:
        cp.reduce_gradients(model)
    grads = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
    return {n: x.detach() for n, x in given.items()}, grads


def check(cp: ContextParallel, model: Any, got: Any, expected: Any) -> None:
    """Compare outputs and gradients.

    Raises:
        DifferentError: They differ.
    """
    del model
    (outs, grads), (whole_outs, whole_grads) = got, expected
    found = []
    if not whole_outs:
        raise DifferentError("the model has no output to compare")
    if outs.keys() != whole_outs.keys():
        found.append(f"outputs {sorted(outs)} for {sorted(whole_outs)}")
    for name in sorted(outs.keys() & whole_outs.keys()):
        x, whole = outs[name], whole_outs[name]
        local = -(-LENGTH // (2 * cp.cp_size)) * 2
        if whole.shape[:2] == (ROWS, LENGTH) and x.shape[:2] == (ROWS, local):
            x = cp.unshard(x)[:, :LENGTH]
        found += _difference(name, x, whole)
    if grads.keys() != whole_grads.keys():
        found.append(f"gradients of {sorted(grads.keys() ^ whole_grads.keys())[:4]} on one side")
    for name in sorted(grads.keys() & whole_grads.keys()):
        found += _difference(f"gradient of {name}", grads[name], whole_grads[name])
    flag = torch.tensor(len(found))
    dist.all_reduce(flag)
    if flag:
        raise DifferentError("; ".join(found[:4]) or "on the other rank")


def _difference(name: str, x: Tensor, whole: Tensor) -> list[str]:
    if x.shape != whole.shape:
        return [f"{name} {tuple(x.shape)} for {tuple(whole.shape)}"]
    if not whole.isfinite().all():
        return [f"{name} of the whole model is not finite"] if x.isfinite().all() else []
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    error = float((x - whole).abs().max()) if whole.numel() else 0.0
    if error <= LIMIT * max(scale, 1e-6):
        return []
    return [f"{name} off by {error / max(scale, 1e-6):.1e}"]


def labels_of(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Labels that a model of this kind may take."""
    generator = torch.Generator().manual_seed(7)
    takes = inspect.signature(model.forward).parameters
    if "start_positions" in takes:
        return {"start_positions": torch.tensor([3, 11]), "end_positions": torch.tensor([5, 17])}
    if "labels" not in takes:
        return {}
    labels = tokens
    if "TokenClassification" in type(model).__name__:
        labels = torch.randint(model.config.num_labels, tokens.shape, generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.4
    return {"labels": torch.where(hidden, -100, labels)}


def _with_labels(cp: ContextParallel, model: Any, batch: dict[str, Any]) -> Outcome:
    """The model's own loss, of the whole batch and of its parts."""
    if "input_ids" not in batch or not (labels := labels_of(model, batch["input_ids"])):
        return Outcome("exact")
    model.set_attn_implementation("eager")
    expected = None
    with suppress(Exception):  # the model has no loss of such labels
        expected = _loss(model, batch | labels | _whole(model))
    model.set_attn_implementation(hf.register())
    if expected is None:
        return Outcome("exact")
    try:
        loss, grads = _loss(model, cp.shard_batch(batch | labels, model=model), cp)
    except Exception as error:  # noqa: BLE001 - to be told from what is refused by name
        if _is_refusal(error):
            return Outcome("exact", loss=_words(error))
        return Outcome("error", f"loss: {_words(error)}")
    try:
        check(cp, model, ({"loss": loss}, grads), ({"loss": expected[0]}, expected[1]))
    except DifferentError as error:
        return Outcome("wrong", str(error), loss="wrong")
    return Outcome("exact", loss="exact")


def _loss(model: Any, batch: dict[str, Any], cp: ContextParallel | None = None) -> Any:
    model.zero_grad()
    with Wide():
        loss = model(**batch).loss
    if loss is None:
        return None
    loss.backward()
    total = loss.detach().clone()
    if cp is not None:
        cp.reduce_gradients(model)
        dist.all_reduce(total)
    return total, {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def _whole(model: Any) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in takes else {}


def _is_refusal(error: BaseException) -> bool:
    """Whether ring_torch refused it by name, wherever it was called from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and where.partition(".")[0] in ("ring_torch", "ring_core")


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, UnsupportedError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:400]
