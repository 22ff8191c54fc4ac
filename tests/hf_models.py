"""Small models of transformers with random weights, batches for them, and comparisons."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from sweep.tiny import config_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ring_torch import hf

# Most of the time that the import of a model takes is that of writing its docstrings.
for _name in ("auto_class_docstring", "auto_method_docstring"):
    vars(sys.modules["transformers.utils.auto_docstring"])[_name] = lambda x, **_: x

LENGTH, BYTES = 43, 61  # a length that no layout can split evenly
SIZES: dict[str, Any] = {
    "vocab_size": BYTES, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
_ROUTED = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    "Gemma3": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"head_dim": 8, "sliding_window": 9, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **_ROUTED},
    "Llama4": {"attention_chunk_size": 10, "num_local_experts": 2, "intermediate_size_mlp": 24},
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_auto_adjust_ff_dim": False},
}  # fmt: skip
#: Dimensions of latents.
_LATENTS = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
#: Further models, with mixture-of-experts layers.
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.3, **_ROUTED},
    "DeepseekV3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "num_key_value_heads": 4, **_LATENTS, **_ROUTED},
}  # fmt: skip
WHOLE: dict[str, Any] = {"use_cache": False}  # a cache disables packed documents
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


class Wide(TorchFunctionMode):
    """Context that keeps transformers' float32 parts in float64: norms, angles, softmax, loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            return args[0].double()
        kwargs = {name: widened(x) for name, x in (kwargs or {}).items()}
        if func is torch.full and any(isinstance(x, float) for x in (*args, *kwargs.values())):
            kwargs.setdefault("dtype", torch.float64)
        return func(*map(widened, args), **kwargs)


LARGEST = 80_000_000  # most parameters of a small model


def build(name: str, attention: str = "eager", *, head: str = "ForCausalLM", **changes: Any) -> Any:
    """Build a small model in float64 with random weights, equal on every rank.

    ``name`` is of :data:`MODELS` or :data:`EXPERTS`, or of any class of transformers.
    """
    if name not in MODELS | EXPERTS:
        return build_class(name, "", attention, **changes)
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_class(**SIZES | (MODELS | EXPERTS)[name] | changes)
    torch.manual_seed(1)
    cls = getattr(transformers, f"{name}{head}")
    return _moved(cls._from_config(config, attn_implementation=attention))


def build_class(name: str, model_type: str = "", attention: str = "eager", **changes: Any) -> Any:
    """Build a small model of any class in float64 with random weights, equal on every rank."""
    cls = getattr(transformers, name)
    config = config_of(model_type or cls.config_class.model_type, cls, **changes)
    with torch.device("meta"):
        model = cls._from_config(config)
    size = sum(x.numel() for x in model.parameters())
    if size > LARGEST and hf.check_model(model).exact:
        raise ValueError(f"has {size:,} parameters with a small config")
    if size > LARGEST:
        return model  # on the meta device: the model is refused anyway
    torch.manual_seed(1)
    return _moved(cls._from_config(config, attn_implementation=attention))


def _moved(model: Any) -> Any:
    """Change all weights: default biases, norms and sinks would hide that they are unused."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.copy_(torch.nan_to_num(weight)).add_(torch.randn_like(weight), alpha=0.1)
    for part in model.double().modules():
        if hasattr(part, "decay_factors"):  # powers of decays, which MiniMax rounds to float32
            powers = part.decay_factors(part.slope_rate)
            part.query_decay, part.key_decay, part.diagonal_decay = powers
    return model.eval()


def in_training(model: Any) -> Any:
    """Put a model in training mode, without anything that is random."""
    for part in model.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for rate in ("dropout", "activation_dropout", "attention_dropout", "layerdrop"):
            for owner in (part, getattr(part, "config", None)):
                if isinstance(getattr(owner, rate, None), float):
                    setattr(owner, rate, 0.0)
    return model


def whole(kind: str) -> dict[str, Tensor]:
    """Return a whole batch, as a collator makes it."""
    generator = torch.Generator().manual_seed(5)
    rows = 1 if kind == "flattened" else 2
    tokens = torch.randint(BYTES, (rows, LENGTH), generator=generator)
    labels = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, -100, tokens)
    batch = {"input_ids": tokens, "labels": labels}
    if kind in ("left", "right"):
        positions = torch.arange(LENGTH)
        mask = torch.stack([positions < 30, positions < LENGTH]).long()
        batch["attention_mask"] = mask if kind == "right" else mask.flip(1)
        first = torch.tensor([13, 0] if kind == "left" else [0, 0])[:, None] == positions
        batch["labels"] = labels.masked_fill((batch["attention_mask"] == 0) | first, -100)
    if kind in ("packed", "flattened"):  # documents cross the borders of shards
        lengths = [[5, 1, 17, 20], [30, 13]][:rows]
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in r]) for r in lengths]
        )
    return batch


def difference(actual: Tensor, expected: Tensor, limit: float, floor: float = 0.0) -> str:
    """Return an empty string if two tensors agree, relative to the largest entry, or the floor."""
    if actual.shape != expected.shape:
        return f"has shape {[*actual.shape]}, not {[*expected.shape]}"
    if not expected.numel():
        return ""
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    return "" if error <= limit * max(size, floor) else f"is off by {error} of {size}"


def differences_of_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float, floor: float
) -> dict[str, str]:
    """Return how gradients differ, by name; a missing one counts as zeros."""
    return {
        f"gradient of {name}": difference(
            actual[name] if name in actual else torch.zeros_like(expected[name]),
            expected[name] if name in expected else torch.zeros_like(actual[name]), limit, floor,
        )
        for name in {**expected, **actual}
    }  # fmt: skip


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(
        actual, expected, rtol=1e-9, atol=1e-10 * scale, msg=lambda text: f"{what}: {text}"
    )


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        same(actual[name], grad, f"gradient of {name} of {what}")


def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits and the loss; gradients are stored in the model."""
    model.zero_grad()
    with Wide():
        out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach()
