"""Runs one model class on two ranks and on one, and compares them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_models import Wide, build_class, difference, differences_of_gradients, gradients
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from sweep.images import image_batch
from sweep.tiny import VOCAB

ROWS, LENGTH = 2, 21
SOURCE = 14  # tokens of an encoder next to a decoder
LIMIT = 1e-7  # allowed difference in float64, relative to the largest number compared
FIRST_TOKEN = 4  # lower token ids are special
REAL = torch.ones(ROWS, LENGTH, dtype=torch.int64)
LABELS = {"labels", "start_positions"}

#: Types that are given a mask of ones: in transformers 5.14 their own eager attention is causal
#: only where there is a mask.
GIVEN_MASKS = ("moshi",)

build = build_class
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Outcome:
    """Outcome of a model class.

    Attributes:
        result: ``exact``, ``refused``, ``wrong``, ``error``, ``does not build``, ``does not run``.
        reason: Why, in words; empty where exact.
        loss: ``exact``, ``none`` or why it was refused.
        padding: ``exact``, ``none``, or why it was refused, for rows with padding on either side.
        images: ``exact``, ``none``, or why it was refused, for a batch with an image in each row.
        by: Function that splits batches: ``shard_batch``, or only ``hf.parallelize``.
        recurrent: ``split`` or ``whole``, as ``hf.parallelize`` runs recurrent layers; ``none``
            where there are none, or the class is not exact.
    """

    result: str
    reason: str = ""
    loss: str = "none"
    padding: str = "none"
    images: str = "none"
    by: str = "shard_batch"
    recurrent: str = "none"


class DifferentError(Exception):
    """Results of the ranks differ from those of the whole model."""


def compare(
    rank: int, name: str, model_type: str, changes: Mapping[str, Any] = NO_CHANGES
) -> Outcome:
    """Run a model class whole and on the ranks of the default group, and compare.

    ``changes`` are those of :func:`sweep.tiny.config_of`.
    """
    del rank
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        model = build(name, model_type, **changes)
    except Exception as error:  # noqa: BLE001 - whatever a constructor may raise
        return Outcome("does not build", words(error))
    try:
        batch = batch_of(model)
    except Exception:  # noqa: BLE001 - it is no model of tokens; such are refused
        batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    cp = ContextParallel()
    try:
        outcome = _judged(cp, model, batch)
        if outcome.result != "exact" or "input_ids" not in batch:
            return outcome
        report = hf.check_model(model)
        ran = "whole" if report.whole_layers else "split"
        return Outcome(
            "exact", padding=_with_padding(cp, model, batch), loss=_with_labels(cp, model, batch),
            images=_with_images(cp, model, batch),
            by="hf.parallelize" if report.hooks else "shard_batch",
            recurrent=ran if "recurrent" in report.hooks else "none",
        )  # fmt: skip
    except DifferentError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 - to be told from what is refused by name
        return Outcome("error", words(error))


def _judged(
    cp: ContextParallel, model: Any, batch: dict[str, Any], real: Tensor = REAL, *, hooks: bool | None = None
) -> Outcome:  # fmt: skip
    """Compare one batch, whole and split, with hooks or as the model needs it.

    A model that does not run on its tokens alone may still refuse to be split.

    Raises:
        DifferentError: Outputs or gradients differ.
    """
    is_first = hooks is None and not LABELS & batch.keys()
    report = hf.check_model(model)
    hooks = report.exact and bool(report.hooks) if hooks is None else hooks
    expected, failure = None, ""
    try:
        expected = run(model, batch, real)
    except Exception as error:  # noqa: BLE001 - the error of the whole model itself
        failure = words(error)
        if not is_first:
            return Outcome("does not run", failure)
    handle: Any = None
    try:
        if hooks:  # the model is small, and "auto" would run its recurrent layers whole
            way: Any = "auto" if report.whole_layers else "split"
            handle = hf.parallelize(model, cp, recurrent=way)
        else:
            model.set_attn_implementation(hf.register())
        shard = batch if hooks else hf.shard_batch(cp, batch, model=model)
        split_run = None if expected is None else run(model, shard, real, cp, hooks=hooks)
    except Exception as error:
        if not is_refusal(error):
            raise
        return Outcome("refused", words(error))
    finally:
        if handle is not None:
            handle.remove()
        elif not hooks:
            model.set_attn_implementation("eager")
    if expected is None:
        return Outcome("does not run", failure)
    check(cp, split_run, expected, real)
    return Outcome("exact")


def _with_padding(cp: ContextParallel, model: Any, batch: dict[str, Any]) -> str:
    """Compare rows with padding on the right, and on the left; return the outcome in words."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return "none"
    right = (torch.arange(LENGTH) < torch.tensor([[13], [LENGTH]])).long()
    for real in (right, right.flip(1)):
        outcome = _judged(cp, model, _padded(model, batch, real), real)
        if outcome.result != "exact":
            return f"{outcome.result}: {outcome.reason}"
    return "exact"


def _with_images(cp: ContextParallel, model: Any, batch: dict[str, Any]) -> str:
    """Compare a batch with labels and an image in each row; return the outcome in words."""
    try:
        with Wide():
            images = image_batch(model, batch)
    except Exception as error:  # noqa: BLE001 - whatever a small tower may raise
        return f"not run: {words(error)}"
    if images is None:
        return "none"
    labels = torch.where(images["input_ids"] < VOCAB - 16, images["input_ids"], -100)
    outcome = _judged(cp, model, images, hooks=True)
    if outcome.result == "exact":
        outcome = _judged(cp, model, images | {"labels": labels}, hooks=True)
    if outcome.result == "refused":
        return f"refused: {outcome.reason}"
    return "exact" if outcome.result == "exact" else f"not run: {outcome.reason}"


def _padded(model: Any, batch: dict[str, Any], real: Tensor) -> dict[str, Any]:
    """Pad a batch; of an encoder-decoder both sequences."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    if "decoder_input_ids" not in batch:
        tokens = batch["input_ids"].where(real == 1, padding)
        return {"input_ids": tokens, "attention_mask": real}
    source = real[:, :SOURCE] if real[0, 0] else real[:, -SOURCE:]
    return {
        "input_ids": batch["input_ids"].where(source == 1, padding),
        "attention_mask": source,
        "decoder_input_ids": batch["decoder_input_ids"].where(real == 1, padding),
        "decoder_attention_mask": real,
    }


def batch_of(model: Any) -> dict[str, Any]:
    """Return tokens for a text model, or the main input of another model."""
    generator = torch.Generator().manual_seed(5)
    takes = inspect.signature(model.forward).parameters
    tokens = torch.randint(FIRST_TOKEN, VOCAB - 16, (ROWS, LENGTH), generator=generator)
    if "decoder_input_ids" in takes and "input_ids" in takes:
        source = torch.randint(FIRST_TOKEN, VOCAB - 16, (ROWS, SOURCE), generator=generator)
        return {"input_ids": source, "decoder_input_ids": tokens}
    if "input_ids" in takes and model.config.model_type in GIVEN_MASKS:
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if "input_ids" in takes:
        return {"input_ids": tokens}
    if "inputs_embeds" in takes:
        width = model.config.get_text_config().hidden_size
        return {"inputs_embeds": torch.randn(ROWS, LENGTH, width, generator=generator).double()}
    return {model.main_input_name: tokens}


def run(
    model: Any, batch: dict[str, Any], real: Tensor, cp: ContextParallel | None = None, *, hooks: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return this rank's outputs, and gradients of a weighted sum of those of real tokens.

    Of a batch with labels, the loss over all ranks, and its gradients.

    Raises:
        ValueError: Outputs of the whole model are not finite.
    """
    model.zero_grad()
    has_labels = bool(LABELS & batch.keys())
    takes = inspect.signature(model.forward).parameters
    uses_no_cache = {"use_cache": False} if "use_cache" in takes else {}
    with Wide():
        out = model(**batch, **(uses_no_cache if cp is None or not has_labels else {}))
    if has_labels:
        out.loss.backward()
        total = out.loss.detach().clone()
        if cp is not None and not hooks:  # else the loss is summed over ranks already
            dist.all_reduce(total)
        outs = {"loss": total}
    else:
        outs = {n: x for n, x in out.items() if isinstance(x, Tensor) and x.is_floating_point()}
        outs = {n: x for n, x in outs.items() if n != "loss" and not n.startswith("encoder_")}
        parts = [
            (x * _weights(x, real, cp)).sum()
            for x in outs.values()
            if x.ndim > 1 and x.shape[:2] == (ROWS, _length(cp)) and x.requires_grad
        ]
        if parts:
            sum(parts).backward()
        if cp is None and not all(_of_tokens(x, real).isfinite().all() for x in outs.values()):
            raise ValueError("outputs of the whole model are not finite")
    if cp is not None:
        cp.reduce_gradients(model)
    return {n: x.detach() for n, x in outs.items()}, gradients(model)


def _length(cp: ContextParallel | None) -> int:
    """Return the tokens of a row, or of a rank's part of it."""
    return LENGTH if cp is None else -(-LENGTH // (2 * cp.cp_size)) * 2


def _weights(x: Tensor, real: Tensor, cp: ContextParallel | None) -> Tensor:
    """Return random weights for an output's entries, 0 for padding tokens."""
    size = (ROWS, LENGTH, *x.shape[2:])
    weights = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    weights = weights * real.reshape(ROWS, LENGTH, *(1 for _ in x.shape[2:]))
    if cp is None:
        return weights
    padding = weights.new_zeros((ROWS, _length(cp) * cp.cp_size - LENGTH, *x.shape[2:]))
    return cp.shard(torch.cat([weights, padding], dim=1))


def _of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the outputs of real tokens, or all of an output without a token dimension."""
    return x[real == 1] if x.shape[:2] == real.shape else x


def check(cp: ContextParallel, split_run: Any, expected: Any, real: Tensor) -> None:
    """Compare outputs and gradients.

    Raises:
        DifferentError: Some differ.
    """
    (outs, grads), (whole_outs, whole_grads) = split_run, expected
    differences = {"outputs": "" if outs.keys() == whole_outs.keys() else f"are {sorted(outs)}"}
    differences |= {} if whole_outs else {"the model": "has no output to compare"}
    for name in outs.keys() & whole_outs.keys():
        x, whole = outs[name], whole_outs[name]
        if whole.shape[:2] == (ROWS, LENGTH) and x.shape[:2] == (ROWS, _length(cp)):
            x = cp.unshard(x.detach())[:, :LENGTH]
        x, whole = _of_tokens(x, real), _of_tokens(whole, real)
        differences[name] = difference(x, whole, LIMIT, 1e-6)
    differences |= differences_of_gradients(grads, whole_grads, LIMIT, 1e-6)
    texts = [f"{name} {text}" for name, text in differences.items() if text]
    flag = torch.tensor(len(texts))
    dist.all_reduce(flag)
    if flag:
        raise DifferentError("; ".join(texts[:4]) or "on the other rank")


def _with_labels(cp: ContextParallel, model: Any, batch: dict[str, Any]) -> str:
    """Compare the model's own loss, whole and split; return the outcome in words."""
    batch = dict(batch)
    tokens = batch.pop("decoder_input_ids", batch["input_ids"])
    if tokens is not batch["input_ids"]:
        # Decoder inputs are made of labels, and some models take ignored labels for padding.
        batch["decoder_attention_mask"] = torch.ones_like(tokens)
    takes = inspect.signature(model.forward).parameters
    if "start_positions" in takes:
        batch |= {"start_positions": torch.tensor([3, 11]), "end_positions": torch.tensor([5, 17])}
    elif "labels" in takes:
        generator = torch.Generator().manual_seed(7)
        labels = tokens
        if "TokenClassification" in type(model).__name__:
            labels = torch.randint(model.config.num_labels, tokens.shape, generator=generator)
        hidden = torch.rand(tokens.shape, generator=generator) < 0.4
        batch |= {"labels": torch.where(hidden, -100, labels)}
    else:
        return "none"
    outcome = _judged(cp, model, batch)
    return {"exact": "exact", "refused": outcome.reason}.get(outcome.result, "none")


def is_refusal(error: BaseException) -> bool:
    """Return True for a ValueError raised in ring_torch or ring_core, whoever called them."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and module.partition(".")[0] in ("ring_torch", "ring_core")


def words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, UnsupportedError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:400]
