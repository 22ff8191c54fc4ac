"""The Triton kernels: the calls that get them, and the options that they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import diagonals

from ring_core import KernelConfig, Mask, Request, UnsupportedError, make_plan, ring_program
from ring_core.plan.tile_mask import BlockGeometry
from ring_torch.kernels import choose, triton as adapter

REQUEST = Request("cuda", "bfloat16", 128, 128, bias=True, grad=True)
PROGRAM = ring_program(make_plan(Mask(causal=True), seq_len=256, cp_size=2, layout="zigzag"))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPU is a Hopper; libraries that need a real one report it missing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def _chosen(config: KernelConfig | None = None, **changes: Any) -> str:
    return choose(
        config or KernelConfig(), replace(REQUEST, **changes), PROGRAM
    ).kernel.capabilities.name


def test_options_go_to_triton() -> None:
    assert _chosen() == "triton"
    assert _chosen(dtype="float64") == "eager"
    assert _chosen(KernelConfig(block_q=64)) == "triton"
    assert _chosen(KernelConfig(block_q=96)) == "eager"


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"block_q": 96}, {}, "block_q must be a power of two from 16 to 256, got 96"),
        ({"block_q": 256, "block_k": 256}, {"head_dim": 256}, "227 KiB of shared memory"),
        ({"fused_backward": True}, {"deterministic": True}, "deterministic=True rules out"),
        ({}, {"head_dim": 512}, "head dims up to 256, not 512"),
    ],
)
def test_settings_it_cannot_do(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _chosen(KernelConfig("triton", **settings), **changes)


def test_predicates_of_too_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ring_program(
        make_plan(Mask(predicate=diagonals), seq_len=256, cp_size=2, layout="contiguous")
    )
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    with pytest.raises(UnsupportedError, match="more than 64 MiB"):
        choose(KernelConfig("triton"), REQUEST, program)
    assert choose(KernelConfig(), REQUEST, program).kernel.capabilities.name == "eager"


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (adapter, "has_triton", lambda: False, "triton is not installed"),
        (torch.cuda, "get_device_capability", lambda *_: (7, 5), "compute capability 8.0 or newer"),
        (torch.version, "cuda", None, "for NVIDIA GPUs"),
    ],
)
def test_machines_it_does_not_run_on(
    where: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(UnsupportedError, match=message):
        _chosen(KernelConfig("triton"))
    assert _chosen() == "eager"
