"""Lists the model classes of transformers, runs one on two ranks and on one, and compares them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_models import Wide, build_class, difference, differences_of_gradients, gradients
from torch import Tensor
from transformers.models.auto import modeling_auto

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from sweep.page import KINDS, Result
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
BEFORE = (3, 5)  # tokens before the image, in each of the two rows
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def entries() -> list[Result]:
    """Return every class that an ``AutoModelFor*`` makes, without a result, by type and name."""
    by_class: dict[str, tuple[str, set[str]]] = {}
    for auto, value in sorted(vars(modeling_auto).items()):
        if not auto.startswith("AutoModelFor") or not hasattr(value, "_model_mapping"):
            continue
        for model_type, names in value._model_mapping._model_mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                by_class.setdefault(name, (model_type, set()))[1].add(auto)
    made = (
        Result(transformers.__version__, name, of, kind=next((x for x in KINDS if x in autos), ""))
        for name, (of, autos) in by_class.items()
    )
    return sorted(made, key=lambda x: x.key)


class DifferentError(Exception):
    """Results of the ranks differ from those of the whole model."""


def compare(
    rank: int, name: str, model_type: str, changes: Mapping[str, Any] = NO_CHANGES
) -> Result:
    """Run a model class whole and on the ranks of the default group, and compare.

    ``changes`` are those of :func:`sweep.tiny.config_of`.
    """
    del rank
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    outcome = partial(Result, transformers.__version__, name, model_type)
    try:
        model = build(name, model_type, **changes)
    except Exception as error:  # noqa: BLE001 - whatever a constructor may raise
        return outcome("does not build", words(error))
    try:
        batch = batch_of(model)
    except Exception:  # noqa: BLE001 - it is no model of tokens; such are refused
        batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    cp = ContextParallel()
    try:
        result, reason = _judged(cp, model, batch)
        if result != "exact" or "input_ids" not in batch:
            return outcome(result, reason)
        report = hf.check_model(model)
        ran = "whole" if report.whole_layers else "split"
        return outcome(
            "exact", padding=_with_padding(cp, model, batch), loss=_with_labels(cp, model, batch),
            images=_with_images(cp, model, batch),
            by="hf.parallelize" if report.hooks else "shard_batch",
            recurrent=ran if "recurrent" in report.hooks else "none",
        )  # fmt: skip
    except DifferentError as error:
        return outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 - to be told from what is refused by name
        return outcome("error", words(error))


def _judged(
    cp: ContextParallel, model: Any, batch: dict[str, Any], real: Tensor = REAL, *, hooks: bool | None = None
) -> tuple[str, str]:  # fmt: skip
    """Compare one batch, whole and split, with hooks or as the model needs it.

    A model that does not run on its tokens alone may still refuse to be split.

    Returns:
        The result and its reason, as of :class:`sweep.page.Result`.

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
            return "does not run", failure
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
        return "refused", words(error)
    finally:
        if handle is not None:
            handle.remove()
        elif not hooks:
            model.set_attn_implementation("eager")
    if expected is None:
        return "does not run", failure
    check(split_run, expected, real)
    return "exact", ""


def _with_padding(cp: ContextParallel, model: Any, batch: dict[str, Any]) -> str:
    """Compare rows with padding on the right, and on the left, of both sequences of a pair."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return "none"
    right = (torch.arange(LENGTH) < torch.tensor([[13], [LENGTH]])).long()
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    for real in (right, right.flip(1)):
        padded = {"input_ids": batch["input_ids"], "attention_mask": real}
        if "decoder_input_ids" in batch:
            tokens = batch["decoder_input_ids"].where(real == 1, padding)
            padded["attention_mask"] = real[:, :SOURCE] if real[0, 0] else real[:, -SOURCE:]
            padded |= {"decoder_input_ids": tokens, "decoder_attention_mask": real}
        padded["input_ids"] = batch["input_ids"].where(padded["attention_mask"] == 1, padding)
        result, reason = _judged(cp, model, padded, real)
        if result != "exact":
            return f"{result}: {reason}"
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
    for more in ({}, {"labels": labels}):
        result, reason = _judged(cp, model, images | more, hooks=True)
        if result != "exact":
            return f"{'refused' if result == 'refused' else 'not run'}: {reason}"
    return "exact"


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


def image_batch(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the batch with an image in each row, or None if the kind of images is unknown."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    vision = getattr(config, "vision_config", None)
    token = getattr(config, "image_token_id", None)
    token = getattr(config, "image_token_index", None) if token is None else token
    if vision is None or not isinstance(token, int) or "pixel_values" not in takes:
        return None
    generator = torch.Generator().manual_seed(11)
    images = (_patches if "image_grid_thw" in takes else _squares)(vision, generator)
    if images is None:
        return None
    kind = config.model_type
    if kind.startswith(("mistral3", "lighton")):
        images["image_sizes"] = torch.tensor([images["pixel_values"].shape[-2:]] * 2)
    if kind.startswith(("idefics", "smolvlm")):
        images["pixel_values"] = images["pixel_values"][:, None]
    images = {name: x for name, x in images.items() if name in takes}
    count = _tokens_of_image(model, images, len(batch["input_ids"]))
    tokens = batch["input_ids"].clone()
    if not 0 < count <= tokens.shape[1] - max(BEFORE):
        return None
    for row, start in enumerate(BEFORE):
        tokens[row, start : start + count] = token
    is_image = (tokens == token).long()
    if "mm_token_type_ids" in takes:
        images["mm_token_type_ids"] = is_image
    return {**batch, **images, "input_ids": tokens}


def _patches(vision: Any, generator: torch.Generator) -> dict[str, Tensor] | None:
    """Return patches of two images, as Qwen's processors make them."""
    size = getattr(vision, "patch_size", None)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    if not isinstance(size, int):
        return None
    merge = getattr(vision, "spatial_merge_size", 1)
    side = 2 * merge
    width = channels * getattr(vision, "temporal_patch_size", 1) * size**2
    return {
        "pixel_values": torch.randn(2 * side**2, width, generator=generator).double(),
        "image_grid_thw": torch.tensor([[1, side, side]] * 2),
    }


def _squares(vision: Any, generator: torch.Generator) -> dict[str, Tensor] | None:
    """Return two square images."""
    size = getattr(vision, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    channels = getattr(vision, "num_channels", 3)
    if not isinstance(size, int):
        return None
    return {"pixel_values": torch.randn(2, channels, size, size, generator=generator).double()}


def _tokens_of_image(model: Any, images: dict[str, Tensor], rows: int) -> int:
    """Return the number of tokens per image."""
    with torch.no_grad():
        features = model.get_image_features(**images)
    for name in ("pooler_output", "last_hidden_state"):
        if not isinstance(features, Tensor | list | tuple):
            features = getattr(features, name) if getattr(features, name) is not None else features
    if isinstance(features, list | tuple):
        features = torch.cat([x.flatten(0, -2) for x in features])
    assert isinstance(features, Tensor)
    return features.shape[:-1].numel() // rows


def run(
    model: Any, batch: dict[str, Any], real: Tensor, cp: ContextParallel | None = None, *, hooks: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return outputs of the whole sequence, and gradients of a weighted sum of real tokens'.

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
        outs = outs if cp is None else {n: _joined(cp, x) for n, x in outs.items()}
        parts = [
            (x * _weights(x, real)).sum()
            for x in outs.values()
            if x.shape[:2] == real.shape and x.requires_grad
        ]
        if parts:
            sum(parts).backward()
        if cp is None and not all(_of_tokens(x, real).isfinite().all() for x in outs.values()):
            raise ValueError("outputs of the whole model are not finite")
    if cp is not None:
        cp.reduce_gradients(model)
    return {n: x.detach() for n, x in outs.items()}, gradients(model)


def _joined(cp: ContextParallel, x: Tensor) -> Tensor:
    """Return the output of a whole sequence of which ranks have parts."""
    is_part = x.shape[:2] == (ROWS, -(-LENGTH // (2 * cp.cp_size)) * 2)
    return cp.unshard(x, grad="slice")[:, :LENGTH] if is_part else x


def _weights(x: Tensor, real: Tensor) -> Tensor:
    """Return random weights for an output's entries, 0 for padding tokens."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    return weights * real.reshape(*real.shape, *(1 for _ in x.shape[2:]))


def _of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the outputs of real tokens, or all of an output without a token dimension."""
    return x[real == 1] if x.shape[:2] == real.shape else x


def check(split_run: Any, expected: Any, real: Tensor) -> None:
    """Compare outputs and gradients.

    Raises:
        DifferentError: Some differ.
    """
    (outs, grads), (whole_outs, whole_grads) = split_run, expected
    differences = {"outputs": "" if outs.keys() == whole_outs.keys() else f"are {sorted(outs)}"}
    differences |= {} if whole_outs else {"the model": "has no output to compare"}
    for name in outs.keys() & whole_outs.keys():
        x, whole = _of_tokens(outs[name], real), _of_tokens(whole_outs[name], real)
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
    result, reason = _judged(cp, model, batch)
    return {"exact": "exact", "refused": reason}.get(result, "none")


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
