"""Check if a transformers model computes the same on split sequences as on whole ones.

The answer comes from the model's modules, their code and its config. Nothing is run, so the model
may be on the meta device. transformers is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from ring_torch.hf.models.classes import (
    counts_real_tokens,
    has_attention,
    hooks_for,
    is_mask_function,
    is_pair,
    is_whole_embedding,
    labels_reason,
    makes_chunks,
    makes_masks,
    name_of,
    pair_reasons,
    pooling_of,
    pooling_reason,
    position_offset,
    predicts_labelled,
    shifts_labels,
    takes_positions,
)
from ring_torch.hf.models.code import (
    names_in,
    names_in_forward,
    parameters_of,
    reads_in_forward,
)
from ring_torch.hf.models.foreign import adapter_reasons, is_activated, puts_tokens
from ring_torch.hf.models.missing import missing_names
from ring_torch.hf.models.recurrent import is_recurrent, whole_reason
from ring_torch.training.part import IGNORED

#: Kinds of layers, in a config's ``layer_types``, that ring attention can compute.
SERVED_LAYERS = ("full_attention", "sliding_attention")


#: Names of modules that process images or sound, not the sequence of tokens.
_TOWERS = re.compile(r"vision|visual|image|img|audio|speech|video|tower|pixel|protein|codec")

#: Names of module classes that mix tokens by other means than attention.
_MIXERS = re.compile(
    r"Mamba|SSM|Recurrent|Rwkv|RWKV|Hyena|Retention|LinearAttention|GatedDelta|Fourier|LSTM|GRU"
    r"|ShortConv|CausalConv"
)

#: Kinds of layers that are exact as well in a model whose recurrent layers get whole sequences.
_WHOLE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "mamba", "mlp", "moe"})

#: Tensor methods by which a module reads its mask's values.
_READS = ("sum", "unsqueeze", "masked_fill", "cumsum", "repeat_interleave", "masked_select")


@dataclass(frozen=True)
class ModelReport:
    """Result of :func:`check_model`: what splitting its sequences would do to a model.

    Attributes:
        exact: True if outputs, loss and gradients equal the whole model's, or a call is refused
            with an error. A module that does not come from transformers is not examined, and is
            assumed exact.
        reasons: Reasons why it is not exact, and what to do; empty if it is.
        position_offset: Position id of a first token: 0, or ``padding_idx + 1`` in models that
            start there (RoBERTa). Padding then has position ``padding_idx``.
        counts_padding: True if padding counts in default position ids as a token does.
        pooling: Name of the output or head that makes one entry a sequence; ``None`` for models
            whose outputs are per token.
        layers: The config's kind of each layer; ``attention`` if it names no kinds. Empty if
            nothing is known.
        shifts_labels: True if token ``i`` predicts label ``i + 1``, as in causal language models;
            False if it predicts label ``i``.
        hooks: Names of the hooks that ``hf.parallelize`` installs for it, besides those for batch
            and loss. Batches of a model that needs any cannot be split by hand.
        no_labels: Reason why ``labels`` are refused, and what to do; empty if they are not.
        whole_layers: Reasons why ``hf.parallelize`` with ``recurrent="auto"`` runs recurrent layers
            on whole sequences on every rank; empty if it splits them, or there are none. In the
            ``striped`` layout convolutions alone are split.
    """

    exact: bool = True
    reasons: tuple[str, ...] = ()
    position_offset: int = 0
    counts_padding: bool = True
    pooling: str | None = None
    layers: tuple[str, ...] = ()
    shifts_labels: bool = True
    hooks: tuple[str, ...] = ()
    no_labels: str = ""
    whole_layers: tuple[str, ...] = ()


def check_model(model: nn.Module) -> ModelReport:
    """Check if a transformers model is exact when its sequences are split over ranks.

    It reads modules, their code and the config, and runs nothing; weights may be on the meta
    device. Wrappers (DDP, FSDP, PEFT, ``torch.compile``) are looked through. Faults that show in a
    call only (a KV cache, a mask of the user's own) are refused when the model is called.

    Args:
        model: A model of transformers, bare or wrapped, or a module that contains some.

    Returns:
        A report, whose ``exact`` is the answer and whose ``reasons`` explain it.

    Raises:
        ValueError: ``model`` is no module.

    Example::

        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
        print(hf.check_model(model).reasons)
    """
    return report_of(model)


def report_of(model: nn.Module, *, joins_router: bool = False) -> ModelReport:
    """Return the report of a model; see :func:`check_model`.

    Args:
        model: The model.
        joins_router: True if the caller computes the loss of a mixture-of-experts router from the
            whole sequence; a model with such a loss can then be exact.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    adapters = [reason for x in wrappers(model) for reason in adapter_reasons(x)]
    if any(map(puts_tokens, wrappers(model))):
        adapters.append("PEFT puts tokens of its own before each rank's part (prompt learning)")
    if adapters:
        return ModelReport(exact=False, reasons=tuple(adapters))
    is_invoked = any(map(is_activated, wrappers(model)))
    model = unwrapped(model)
    if is_of_transformers(model):
        report = _report(model, joins_router=joins_router)
        return replace(report, hooks=(*report.hooks, *["activated LoRA"][:is_invoked]))
    # A user's own module round models of transformers: each of them that takes tokens is examined,
    # the rest is taken on trust. What the report has of positions, labels and hooks is the first's:
    # positions and labels have to be the same for all.
    reports = [
        _report(x, joins_router=joins_router) for x in filter(_takes_tokens, _models_in(model))
    ]
    if not reports:
        return ModelReport()
    reasons = tuple(dict.fromkeys(reason for x in reports for reason in x.reasons))
    if len({(x.position_offset, x.counts_padding, x.shifts_labels) for x in reports}) > 1:
        reasons = ("it holds models of transformers that want other positions or labels",)
    return replace(
        reports[0],
        exact=not reasons,
        reasons=reasons,
        pooling=next((x.pooling for x in reports if x.pooling), None),
        layers=tuple(layer for x in reports for layer in x.layers),
        whole_layers=tuple(dict.fromkeys(reason for x in reports for reason in x.whole_layers)),
        no_labels="",  # the loss may be the module's own
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the innermost model inside DDP, FSDP, PEFT or ``torch.compile``."""
    return list(wrappers(model))[-1]


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and then each model it wraps, from the outside in."""
    yield model
    inner = getattr(model, "_orig_mod", None)
    if not isinstance(inner, nn.Module) and hasattr(type(model), "get_base_model"):
        inner = cast("Any", model).get_base_model()  # of PEFT, which mypy does not see
    if not isinstance(inner, nn.Module) and not is_of_transformers(model):
        inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module) and inner is not model:
        yield from wrappers(inner)


def _report(model: Any, *, joins_router: bool) -> ModelReport:
    """Return the report of a model of transformers that has no wrappers."""
    # Towers get whole inputs on every rank, so nothing in them has to be exact on parts.
    modules = dict(text_modules(model))
    pooling = pooling_of(model)
    types = getattr(_text_config(model), "layer_types", None)
    layers = tuple(map(str, types or ("attention",) * sum(map(has_attention, modules.values()))))
    hooks = hooks_for(model, modules)
    reasons = [
        *_input_reasons(model, hooks, joins_router=joins_router),
        *([] if pooling is None else [pooling_reason(model, pooling)]),
        *_layer_reasons(model, modules, layers),
        *_mask_reasons(modules, hooks),
        *missing_names(model, modules),
    ]
    return ModelReport(
        exact=not reasons,
        reasons=tuple(dict.fromkeys(reasons)),
        position_offset=position_offset(modules),
        counts_padding=not any(map(counts_real_tokens, modules.values())),
        pooling=pooling,
        layers=layers,
        shifts_labels=shifts_labels(model),
        hooks=hooks,
        no_labels=labels_reason(model),
        whole_layers=tuple(
            sorted({*map(whole_reason, filter(is_recurrent, modules.values()))} - {""})
        ),
    )


def is_of_transformers(model: nn.Module) -> bool:
    """Return True for a model of transformers, without importing transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(model).__mro__
    )


def _models_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of transformers within a module."""
    for child in model.children():
        if is_of_transformers(child):
            yield child
        else:
            yield from _models_in(child)


def towers(model: nn.Module) -> Iterator[Any]:
    """Return the models of transformers within a model that process images or sound.

    They are known by their names.
    """
    return (
        module
        for name, module in model.named_modules()
        if is_of_transformers(module) and _TOWERS.search(name)
    )


def _takes_tokens(model: nn.Module) -> bool:
    """Return True if a model's forward takes token ids or embeddings."""
    return bool(parameters_of(type(model)) & {"input_ids", "inputs_embeds"})


def text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that process the sequence of tokens, with their names.

    Names are those within the decoder, with a dot behind them; the shells round it are named "" and
    "base_model.".
    In a model of an encoder and a decoder names are the module's own, and no module is left out.
    """
    if is_pair(model):
        yield from model.named_modules()
        return
    # A model of several parts has the sequence in its decoder, and in the two shells round it.
    decoder = model
    if getattr(model.config, "sub_configs", None):
        decoder = model.get_decoder()
        for name, outer in (("", model), ("base_model.", model.base_model)):
            if outer is not decoder:
                yield name, outer
    for name, module in decoder.named_modules():
        if not _TOWERS.search(name):
            yield f"{name}.", module


def _text_config(model: Any) -> Any:
    """Return the config of a model's text part, or the model's own if there are several."""
    try:
        return model.config.get_text_config()
    except ValueError:  # transformers raises it if there are several text parts
        return model.config


def _input_reasons(model: Any, hooks: tuple[str, ...], *, joins_router: bool) -> Iterator[str]:
    """Yield reasons that lie in the arguments of the model's forward."""
    parameters = parameters_of(type(model))
    name = name_of(model)
    if not _takes_tokens(model):
        yield f"{name} takes no input_ids nor inputs_embeds: it has no sequence of tokens to split"
    elif "decoder_input_ids" in parameters:
        yield from pair_reasons(model)
    elif not takes_positions(parameters, hooks):
        yield f"{name} takes no position_ids: it would count a rank's tokens from 0"
    if getattr(_text_config(model), "output_router_logits", False) and not (
        joins_router and has_router_loss(model)
    ):
        yield (
            "config.output_router_logits: the router's loss is no sum over ranks; set it to False, "
            "and add that loss yourself from logits of the whole sequence"
        )


def has_router_loss(model: nn.Module) -> bool:
    """Return True if the code of a model calls Mixtral's load balancing loss for its router.

    That loss is computed from router logits ``[B * T, E]``, which can be joined over the ranks.
    """
    return "load_balancing_loss_func" in names_in_forward(type(model))


def _layer_reasons(
    model: Any, modules: Mapping[str, nn.Module], layers: tuple[str, ...]
) -> Iterator[str]:
    """Yield reasons that lie in layers which mix tokens in a way that a ring cannot."""
    has_chunks = any(map(makes_chunks, modules.values()))
    # Hooks give a recurrent layer whole sequences: what it contains may mix tokens as it likes.
    in_recurrent = {id(x) for y in modules.values() if is_recurrent(y) for x in y.modules()}
    served = {
        *SERVED_LAYERS, "attention", *(("chunked_attention",) if has_chunks else ()),
        *(_WHOLE_LAYERS if in_recurrent else ()),
    }  # fmt: skip
    if unserved := sorted({*layers} - served):
        yield (
            f"layers of type {', '.join(unserved)} would see this rank's tokens only; "
            f"{' and '.join(SERVED_LAYERS)} are served"
        )
        return
    if not any(has_attention(x) or is_recurrent(x) for x in modules.values()):
        yield (
            f"{name_of(model)} calls no attention function of transformers' registry: its "
            f"layers would see this rank's tokens only, or attend with attention of their own"
        )
        return
    if mixers := {
        type(x).__name__ for x in modules.values() if id(x) not in in_recurrent and _mixes(x)
    }:
        yield f"modules {', '.join(sorted(mixers))} mix tokens that lie on other ranks"
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and not is_pair(model):
            attends = [
                any(has_attention(x) or is_recurrent(x) for x in layer.modules())
                for layer in module
            ]
            if any(attends) and not all(attends) and layers == ("attention",) * len(layers):
                yield f"layers {attends.count(False)} of {len(attends)} of {name} call no attention function"
    config, types = model.config, {type(x).__name__ for x in modules.values()}
    reasons = {
        "config.alibi: its slopes are made of a mask, which cannot be split": (
            getattr(config, "alibi", False) is True and "FalconAttention" in types
        ),
        "config.use_prompt: learned keys before a sequence's own cannot be split; set it to False": (
            getattr(config, "use_prompt", False)
        ),
        "config.attention_type: sparse blocks are not supported; set it to original_full": (
            getattr(config, "attention_type", None) == "block_sparse"
        ),
        "config.trigram_input: a token's embedding is made of its neighbours' too": (
            getattr(config, "trigram_input", False)
        ),
        "config.sparse_pred_ignore_index: labels that do not count are -100 on a ring; set it to -100": (
            predicts_labelled(model) and model.sparse_pred_ignore_index != IGNORED
        ),
        f"{name_of(model)} cuts its sequence into patches, of a rank's own tokens": any(
            "patch_lengths" in names_in_forward(type(x)) for x in (model, model.base_model)
        ),
        f"{name_of(model)} looks for one token of the whole sequence": (
            {"question_token_id", "question_lengths"} & names_in_forward(type(model))
        ),
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def _mixes(module: nn.Module) -> bool:
    """Return True if a module mixes tokens by other means than attention and known layers.

    Found from its type or the name of its class.
    """
    if isinstance(module, nn.RNNBase):
        return True
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return max(module.kernel_size) > 1
    if type(module).__module__.startswith("peft."):
        return False  # its adapters are named after their weights (FourierFT)
    # The prefix RecurrentGemma is the model's name, and says nothing about this layer.
    name = type(module).__name__.removeprefix("RecurrentGemma")
    if name.endswith("Norm"):
        return False  # named after its model (MambaRMSNorm)
    return _MIXERS.search(name) is not None and not any(
        has_attention(x) or is_recurrent(x) for x in module.modules()
    )


def _mask_reasons(modules: Mapping[str, nn.Module], hooks: tuple[str, ...]) -> Iterator[str]:
    """Yield reasons that lie in how the model makes, reads or adds masks and biases."""
    attention = [x for x in modules.values() if has_attention(x)]
    if not attention:
        return
    # Masks that transformers makes are replaced by stand-ins; those that a model builds itself
    # cannot be.
    makes = {n for x in modules.values() for n in names_in(type(x)) if is_mask_function(n)}
    parameters = [parameters_of(type(x)) for x in modules.values() if makes_masks(type(x))]
    reasons = {
        "it makes its masks itself, not through transformers.masking_utils": not makes,
        "it has recurrent or convolutional layers, which would see this rank's tokens only": (
            "create_recurrent_attention_mask" in makes and "recurrent" not in hooks
        ),
        "its attention computes masks of its own from the keys": any(
            "prepare_dynamic_mask" in names_in(type(x)) for x in attention
        ),
        "the part that makes its masks takes no position_ids: it would count a rank's tokens from 0": (
            parameters and not {"positions", "alibi", "bias"} & {*hooks}
            and not any("position_ids" in names for names in parameters)
        ),
        "its attention adds a position bias of its own, which cannot be split": (
            not {"alibi", "bias"} & {*hooks}
            and any("position_bias" in names_in_forward(type(x)) for x in attention)
        ),
    }  # fmt: skip
    yield from (reason for reason, applies in reasons.items() if applies)
    for module in modules.values():
        reads = reads_in_forward(type(module), "attention_mask") & {*_READS}
        # Some modules are given the whole mask, which they may read.
        if reads and not (is_recurrent(module) or is_whole_embedding(module)):
            yield (
                f"{type(module).__name__} reads the attention_mask "
                f"({', '.join(sorted(reads))}), and that of a split batch cannot be read"
            )
