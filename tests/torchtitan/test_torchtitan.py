"""Models of the released torchtitan, with its meshes, FSDP and sharding: Ring by an override.

torchtitan takes a machine without an accelerator for one of GPUs, so tests name its device, and
have its own attention run by torch's.
"""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torchtitan.distributed.parallel_dims as meshes
import torchtitan.tools.utils as tools
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, full_dtensor
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.spmd_types import annotate_input_spmd_types, set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import attention

from ring_core import Layout, UnsupportedError
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.torchtitan import RingAttention

IMPORT = "ring_torch.torchtitan.ring_attention"
T = 256


@dataclass(frozen=True)
class Case:
    """A model, its meshes and options of the override."""

    model: str = "llama3"
    backend: str = "spmd_types"
    dp: int = 1
    cp: int = 2
    tp: int = 1
    balancer: str | None = "headtail"
    options: tuple[tuple[str, str], ...] = ()


CASES = {
    "llama3": Case(),
    "llama3, full_dtensor": Case(backend="full_dtensor"),
    "contiguous": Case(balancer=None, options=(("layout", "contiguous"),)),
    "qwen3, gathered": Case(model="qwen3", options=(("strategy", "gather"),)),
    "four ranks": Case(cp=4),
    "beside data": Case(dp=2),
    "beside tensors": Case(tp=2),
    "no ring": Case(dp=2, cp=1),
}


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **_: Any
) -> tuple[Tensor, None]:
    """Return attention under torchtitan's mask; FlexAttention has no backward on CPUs."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out, None


def config_of(case: Case) -> Any:
    """Return torchtitan's config of a model of two layers."""
    tools.device_type = meshes.device_type = "cpu"
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    attention._compiled_create_block_mask = create_block_mask
    set_spmd_backend(case.backend)
    registry = importlib.import_module(f"torchtitan.models.{case.model}.config_registry")
    config: Any = getattr(registry, f"{case.model}_debugmodel")()
    config.training.seq_len = T
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    parallelism = config.parallelism
    parallelism.spmd_backend, parallelism.context_parallel_degree = case.backend, case.cp
    parallelism.data_parallel_shard_degree, parallelism.tensor_parallel_degree = case.dp, case.tp
    model = config.model_spec.model
    model.layers = model.layers[:2]
    model.update_from_config(config=config)
    return config


def built(config: Any) -> Any:
    """Return the model of a config, with the same weights each time."""
    model = config.model_spec.model.build()
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def batch(rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions of documents that differ between rows."""
    tokens = torch.randint(vocab_size, (rows, T + 1), generator=torch.Generator().manual_seed(1))
    starts = [(0, 100, 101, 230), (0, 64, 128), (0, 7), (0,)]
    positions = torch.arange(T).repeat(rows, 1)
    for row, begins in zip(positions, starts * rows, strict=False):
        for begin in begins:
            row[begin:] = torch.arange(T - begin)
    return tokens[:, :-1], tokens[:, 1:], positions


def _compare(rank: int, case: Case) -> None:
    os.environ.setdefault("WORLD_SIZE", str(case.dp * case.cp * case.tp))
    config = config_of(case)
    tokens, labels, positions = batch(2 * case.dp, config.model_spec.model.vocab_size)
    whole = built(config)
    masks = whole.get_attention_masks(positions)
    assert isinstance(masks, attention.BlockMask)
    expected = whole(tokens, positions, masks)
    loss_of = partial(functional.cross_entropy, reduction="sum")
    (loss_of(expected.flatten(0, 1), labels.flatten()) / labels.numel()).backward()

    config = config_of(case)
    apply_overrides(OverrideConfig(imports=[(IMPORT, dict(case.options))]), config)
    dims = ParallelDims.from_config(config.parallelism, case.dp * case.cp * case.tp)
    dims.build_mesh()
    model = config.model_spec.parallelize_fn(
        built(config), parallel_dims=dims, training=config.training,
        parallelism=config.parallelism, compile_config=config.compile, ac_config=None,
        dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no other reduction
            module.set_force_sum_reduction_for_comms(True)
    kinds = [type(x.attention.inner_attention) for x in model.layers.values()]
    assert kinds == [RingAttention] * 2
    ring = rank // (case.cp * case.tp)
    rows = slice(2 * ring, 2 * ring + 2)
    shard, own_labels, extra = tokens[rows], labels[rows], {"positions": positions[rows]}
    if case.cp > 1:
        shard, own_labels, extra = prepare_context_parallel_input(
            shard, own_labels, extra, dims.get_mesh("cp"), torch.device("cpu"), case.balancer
        )
    plain = own_labels
    split = annotate_input_spmd_types
    if case.backend == "full_dtensor":
        split = full_dtensor.parallelize_inputs
    shard, own_labels, extra = split(dims, shard, own_labels, extra)
    is_typed = case.backend == "spmd_types"
    with set_current_spmd_mesh(dims.spmd_dense_mesh()) if is_typed else nullcontext():
        logits = model(shard, **extra)
    logits = logits.to_local() if case.backend == "full_dtensor" else logits
    if case.tp > 1:  # outputs alone: a rank has its part of the classes
        indices = Layout("zigzag", T, case.cp).positions(rank // case.tp)
        part = expected.detach()[:, indices].chunk(case.tp, dim=-1)[rank % case.tp]
        torch.testing.assert_close(logits.detach(), part, rtol=1e-4, atol=1e-5)
    else:
        own = loss_of(logits.flatten(0, 1), plain.flatten())
        total = own.detach().clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(
            total, loss_of(expected.flatten(0, 1), labels.flatten()).detach()
        )
        (own / labels.numel()).backward()
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-6)
        grads = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
        # torchtitan ties weights where it draws them, later than here.
        if whole.enable_weight_tying:
            grads["tok_embeddings.weight"] += grads.pop("lm_head.weight")
        for name, grad in grads.items():
            close(grad, whole.get_parameter(name).grad)


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_that_of_one_process(name: str) -> None:
    """Ranks are started anew: torchtitan makes its meshes once in a process."""
    case = CASES[name]
    with LocalRanks(case.dp * case.cp * case.tp) as ranks:
        ranks.run(_compare, case)


def test_attention_that_is_no_causal_one_of_documents_is_refused() -> None:
    config = config_of(Case())
    model = config.model_spec.model
    for layer in model.layers:
        layer.attention.inner_attention = attention.VarlenAttention.Config()
    with pytest.raises(UnsupportedError, match="ring_attention replaces FlexAttention"):
        apply_overrides(OverrideConfig(imports=[IMPORT]), config)
    with pytest.raises(ValueError, match="unknown layout 'striped'; known: zigzag, contiguous"):
        apply_overrides(OverrideConfig(imports=[(IMPORT, {"layout": "striped"})]), config)


MISTAKES = {
    "another load balancer": (Case(balancer=None), "positions do not follow each other"),
    "no load balancer": (Case(options=(("layout", "contiguous"),)), "positions do not follow each other"),
    "a backend without meshes": (Case(backend="partial_dtensor"), "not supported for RingAttention"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    case, message = MISTAKES[name]
    with LocalRanks(2) as ranks, pytest.raises(LocalRankError, match=message):
        ranks.run(_compare, case)
