"""Two GPUs: first calls in inference mode, devices other than the current one, a hidden GPU."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks
from torch import Tensor

from ring_torch import ContextParallel, ring_attention

RANKS = 2
pytestmark = [pytest.mark.nccl, pytest.mark.ranks(RANKS)]
HEADS, DIM = 4, 64
LENGTHS = {"short": 512, "long": 98_304}  # tokens of all ranks: keys of the long one exceed 64 MiB
MOVES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"}, "symm_mem": {"transport": "symm_mem"},
    "messages": {"strategy": "gather", "transport": "p2p"},
}  # fmt: skip


def _whole(length: int, device: torch.device) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(0)
    options: Any = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    return [torch.randn(1, length, HEADS, DIM, **options) for _ in range(4)]


def _check(cp: ContextParallel, length: int, device: torch.device, **options: Any) -> None:
    """Compare the result and gradients with torch's attention over the whole sequence."""
    *qkv, dout = _whole(length, device)
    with torch.cuda.device(device):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = sdpa(*leaves, is_causal=True)
        expected = [cp.shard(x.detach()) for x in (out, *torch.autograd.grad(out, leaves, dout))]
    local = [cp.shard(x).requires_grad_() for x in qkv]
    results = cp.attention(*local, causal=True, **options)
    actual = (results, *torch.autograd.grad(results, local, cp.shard(dout)))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)


def _new_context() -> ContextParallel:
    """Return a context of a new group, which has no peer memory yet."""
    group: Any = dist.new_group(list(range(RANKS)))
    return ContextParallel(group)


@pytest.mark.parametrize("move", [{}, *MOVES.values()], ids=["auto", *MOVES])
@pytest.mark.parametrize("length", LENGTHS)
@on_ranks
def test_inference_before_training(rank: int, length: str, move: Any) -> None:
    device, cp = torch.device("cuda", rank), _new_context()
    for _turn in range(2):
        with torch.inference_mode():
            shards = [cp.shard(x) for x in _whole(LENGTHS[length], device)[:3]]
            cp.attention(*shards, causal=True, **move)
        _check(cp, LENGTHS[length], device, **move)


@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("length", LENGTHS)
@on_ranks
def test_the_current_device_is_another(rank: int, length: str, move: Any, kernel: str) -> None:
    cp = _new_context()
    torch.cuda.set_device(1 - rank)
    try:
        _check(cp, LENGTHS[length], torch.device("cuda", rank), **move, kernel=kernel)
        assert torch.cuda.current_device() == 1 - rank
    finally:
        torch.cuda.set_device(rank)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {}, "window": {"window": (40, 0)}, "documents": {"cu_seqlens": (0, 100, 512)},
    "softcap": {"softcap": 20.0}, "dropout": {"dropout_p": 0.2, "dropout_seed": 7},
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["auto", "triton", "sdpa", "cudnn", "fa4"])
@pytest.mark.parametrize("name", OPTIONS)
def test_one_rank_on_another_device(name: str, kernel: str) -> None:
    """A call on a device that is not the current one is right, as in models spread over GPUs."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).requires_grad_() for x in _whole(512, torch.device("cuda:0"))[:3]]
        try:
            out = ring_attention(*leaves, causal=True, kernel=kernel, **OPTIONS[name])
        except ValueError as error:
            if f"kernel '{kernel}'" not in str(error):
                raise
            return
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        assert torch.cuda.current_device() == 0
    for x, y in zip(*results, strict=True):
        assert y.device.index == 1
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=0, atol=1e-2)


def _hidden(rank: int, folder: str) -> None:
    """Run a rank that sees its own GPU alone, and write its answer to a file."""
    answer = Path(folder) / f"answer {rank}"
    try:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/hidden", rank=rank, world_size=RANKS,
            timeout=timedelta(seconds=60), device_id=torch.device("cuda", 0),
        )  # fmt: skip
        cp, device = ContextParallel(), torch.device("cuda", 0)
        for length in LENGTHS.values():
            _check(cp, length, device)
        shards = [cp.shard(x) for x in _whole(LENGTHS["long"], device)[:3]]
        answer.write_text(cp.explain(*shards, causal=True))
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
        answer.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.parametrize("overlapping", ["0", "1"])
def test_every_rank_sees_one_gpu(
    overlapping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers may hide other ranks' GPUs; the transport then depends on a variable of torch."""
    context = multiprocessing.get_context("spawn")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", overlapping)
    processes = []
    for rank in range(RANKS):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
        process = context.Process(target=_hidden, args=(rank, str(tmp_path)))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(80)
        process.kill()
    answers = [(tmp_path / f"answer {rank}").read_text() for rank in range(RANKS)]
    transport = "symm_mem" if overlapping == "1" else "p2p"
    for answer in answers:
        assert f"transport {transport}" in answer, answer
        assert ("ALLOW_OVERLAPPING_DEVICES" in answer) or overlapping == "1"
