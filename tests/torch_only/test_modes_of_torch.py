"""Torch's modes around a call: honoured as by SDPA, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from dense import sdpa
from torch import Tensor
from torch.autograd import forward_ad

from ring_core import Mask, UnsupportedError
from ring_torch import ContextParallel, attention, autograd, capture, prepare, ring_attention
from ring_torch.buffers import flat
from ring_torch.capture import capture_safe_cache
from ring_torch.comm import handshake
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.transports import symm_buffer
from ring_torch.transports.symm_buffer import SymmetricMemory


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(1, 16, 2, 8, dtype=dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("float32",) * 3, ("float32", "float32", "bfloat16"), ("float64",) * 3]
)
@pytest.mark.parametrize("function", ["ring_attention", "ContextParallel"])
def test_autocast(function: str, dtypes: tuple[str, ...], compiled: bool) -> None:
    call: Any = ring_attention if function == "ring_attention" else ContextParallel().attention
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    leaves = [_x(getattr(torch, name)).requires_grad_() for name in dtypes]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = call(*leaves), sdpa(*leaves)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves)


@pytest.fixture(params=[False, True])
def only_warns(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(True, warn_only=request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def test_explain_knows_of_autocast() -> None:
    explain = ContextParallel().explain
    plain, expected = (explain(x, x, x) for x in (_x(), _x(torch.bfloat16)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(_x(), _x(), _x()) == expected != plain


@pytest.mark.parametrize("name", ["attention", "explain"])
def test_deterministic_algorithms(name: str, only_warns: bool) -> None:
    with patch.object(
        attention, "check_call", autospec=True, side_effect=prepare.check_call
    ) as check:
        getattr(ContextParallel(), name)(_x(), _x(), _x())
    assert check.call_args.args[6].deterministic is not only_warns


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([_x(), _x()])),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(_x()),
    "vjp": lambda f: torch.func.vjp(f, _x()),
    "jacrev": lambda f: torch.func.jacrev(f)(_x()),
}
CALLS: list[Callable[[Any], Any]] = [
    lambda x: ring_attention(x, x, x),
    lambda x: ContextParallel().shift(x, 1),
    lambda x: ContextParallel().unshard(x, grad="sum"),
]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_in_words(name: str) -> None:
    for call in CALLS:
        with pytest.raises(UnsupportedError, match=r"torch\.func|forward-mode"):
            TRANSFORMS[name](call)


def test_forward_mode_gradients_are_refused_in_words() -> None:
    for call in CALLS:
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
            call(_x())


def test_kernels_launch_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("on", device.index))
    entered: list[Any] = [capture.on_device(torch.device("cuda", n)) for n in (0, 1)]
    assert entered[0] != ("on", 0)
    assert entered[1] == ("on", 1)
    recorded: list[str] = []

    @contextmanager
    def spy(device: torch.device) -> Iterator[None]:
        recorded.append(f"on {device}")
        yield
        recorded.append(f"off {device}")

    monkeypatch.setattr(handshake, "on_device", spy)
    with handshake.GuardedPass(ranks_of(None), 1, Mock(), torch.device("cuda", 1)):
        assert recorded == ["on cuda:1"]
    assert recorded == ["on cuda:1", "off cuda:1"]
    guarded = Mock(return_value=nullcontext())
    monkeypatch.setattr(autograd, "GuardedPass", guarded)
    x = _x().requires_grad_()
    ring_attention(x, x, x).sum().backward()
    assert [call.args[3] for call in guarded.call_args_list] == [x.device] * 2


def _played(_: int, sizes: tuple[int, ...], dtype: torch.dtype, __: int) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.parametrize("inference", [False, True])
def test_memory_of_peers_can_be_written_to_by_later_passes(inference: bool) -> None:
    memory = SymmetricMemory(Ranks(None, 0, 2), 64)
    memory.handle = SimpleNamespace(get_buffer=_played)
    with torch.inference_mode(inference):
        headers = memory.headers()
        views = memory.views(1, 0, flat(8, torch.float32))
    for x in (*headers, *views):
        x.fill_(1)
    assert memory.views(1, 0, flat(8, torch.float32))[0] is views[0]


def test_new_memory_is_taken_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    for name in ("run_collective", "not_none"):
        monkeypatch.setattr(symm_buffer, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def allocated(size: int, **_: object) -> torch.Tensor:
        return torch.ones(size, dtype=torch.uint8)

    def shared(memory: torch.Tensor, _: object) -> None:
        recorded.append(memory.is_inference())

    monkeypatch.setattr(torch_memory, "empty", allocated)
    monkeypatch.setattr(torch_memory, "rendezvous", shared)
    with torch.inference_mode():
        assert SymmetricMemory(Ranks(None, 0, 2), 64).reserve(8)
    assert recorded == [False]


def test_cached_tensors_can_be_saved_for_a_backward() -> None:
    made = capture_safe_cache(4)(torch.zeros)
    with torch.inference_mode():
        first: Any = made(3)
    assert made(3) is first
    assert not first.is_inference()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True}, {"cu_seqlens": (0, 5, 16)}, {"alibi_slopes": torch.ones(2)},
        {"dropout_p": 0.3, "dropout_seed": 3},
        {"mask": Mask(predicate=lambda i, j: i - j < 3, cu_seqlens=(0, 5, 16))},
    ],
)  # fmt: skip
def test_inference_before_training(options: dict[str, Any]) -> None:
    x = torch.randn(1, 16, 2, 8)
    with torch.inference_mode():
        expected = ring_attention(x, x, x, **options).clone()
    leaf = x.clone().requires_grad_()
    out = ring_attention(leaf, leaf, leaf, **options)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), expected.clone(), rtol=0, atol=1e-6)
