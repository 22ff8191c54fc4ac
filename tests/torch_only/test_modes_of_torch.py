"""Torch's modes around a call: honoured as by SDPA, or refused by name; another default device."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from dense import sdpa
from on_ranks import on_ranks
from refused import refused
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import _device_constructors

import ring_torch
from ring_core import Mask, UnsupportedError
from ring_torch import ContextParallel, attention, autograd, capture, prepare, ring_attention
from ring_torch.buffers import flat
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


def test_explain_knows_of_autocast() -> None:
    explain = ContextParallel().explain
    plain, expected = (explain(x, x, x) for x in (_x(), _x(torch.bfloat16)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(_x(), _x(), _x()) == expected != plain


@pytest.mark.parametrize("only_warns", [False, True])
@pytest.mark.parametrize("name", ["attention", "explain"])
def test_deterministic_algorithms(
    name: str, only_warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Mock(side_effect=prepare.check_call)
    monkeypatch.setattr(attention, "check_call", check)
    torch.use_deterministic_algorithms(True, warn_only=only_warns)
    try:
        getattr(ContextParallel(), name)(_x(), _x(), _x())
    finally:
        torch.use_deterministic_algorithms(False)
    assert check.call_args.args[6].deterministic is not only_warns


def _dual(f: Any) -> Any:
    with forward_ad.dual_level():
        return f(_x())


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([_x(), _x()])),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(_x()),
    "vjp": lambda f: torch.func.vjp(f, _x()),
    "jacrev": lambda f: torch.func.jacrev(f)(_x()),
    "forward mode": _dual,
}
CALLS: list[Callable[[Any], Any]] = [
    lambda x: ring_attention(x, x, x),
    lambda x: ContextParallel().shift(x, 1),
    lambda x: ContextParallel().unshard(x, grad="sum"),
]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_in_words(name: str) -> None:
    message = "forward-mode" if name == "forward mode" else r"torch\.func|forward-mode"
    for call in CALLS:
        refused(message, TRANSFORMS[name], call, error=UnsupportedError)


def test_kernels_launch_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("on", device.index))
    entered: list[Any] = [capture.on_device(torch.device("cuda", n)) for n in (0, 1)]
    assert entered[0] != ("on", 0) and entered[1] == ("on", 1)
    spy = MagicMock()
    monkeypatch.setattr(handshake, "on_device", spy)
    with handshake.GuardedPass(ranks_of(None), 1, Mock(), torch.device("cuda", 1)):
        spy.assert_called_once_with(torch.device("cuda", 1))
        spy.return_value.__enter__.assert_called_once()
        spy.return_value.__exit__.assert_not_called()
    spy.return_value.__exit__.assert_called_once()
    guarded = Mock(return_value=nullcontext())
    monkeypatch.setattr(autograd, "GuardedPass", guarded)
    x = _x().requires_grad_()
    ring_attention(x, x, x).sum().backward()
    assert [call.args[3] for call in guarded.call_args_list] == [x.device] * 2


@pytest.mark.parametrize("inference", [False, True])
def test_memory_of_peers_can_be_written_to_by_later_passes(inference: bool) -> None:
    memory = SymmetricMemory(Ranks(None, 0, 2), 64)
    memory.handle = SimpleNamespace(
        get_buffer=lambda _, sizes, dtype, __: torch.zeros(sizes, dtype=dtype)
    )
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
    empty = partial(torch.ones, dtype=torch.uint8)
    monkeypatch.setattr(torch_memory, "empty", lambda size, **_: empty(size))
    monkeypatch.setattr(torch_memory, "rendezvous", lambda x, _: recorded.append(x.is_inference()))
    with torch.inference_mode():
        assert SymmetricMemory(Ranks(None, 0, 2), 64).reserve(8)
    assert recorded == [False]


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


def test_every_tensor_is_made_on_a_device_that_is_said() -> None:
    root, makers = Path(ring_torch.__file__).parent, {x.__name__ for x in _device_constructors()}
    lines = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) == "torch" and node.func.attr in makers
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert not lines, lines


@on_ranks
def test_calls_under_another_default_device() -> None:
    def results() -> list[Any]:
        cp, length, documents = ContextParallel(), 16, (0, 5, 16)
        draw = torch.Generator().manual_seed(0)
        whole = (torch.randn(2, length, 2, 8, generator=draw, device="cpu") for _ in "qkv")
        q, k, v = (cp.shard(x).requires_grad_() for x in whole)
        with ring_torch.check():
            out, lse = cp.attention(
                q, k, v, return_lse=True, causal=True, window=(7, 0), softcap=3.0, dropout_p=0.2,
                dropout_seed=5, sinks=q.new_zeros(2), alibi_slopes=q.new_ones(2), kernel="eager",
                segment_ids=q.new_zeros(q.shape[:2], dtype=torch.int32),
                bias=q.new_zeros(1, 1, q.shape[1], length),
            )  # fmt: skip
            (out.square().sum() + lse.sum()).backward()
        return [
            out, lse, *(x.grad for x in (q, k, v)), *cp.halo(q, 2, 1, cu_seqlens=documents),
            cp.shard(torch.ones(1, 15, device="cpu"), pad=True, fill=3), cp.relayout(q, to="striped"),
            cp.shift(q, 3, fill=2, cu_seqlens=documents), cp.join(cp.halo(q, 0, 0).rows),
            cp.unshard(q, grad="sum"), cp.positions(length, device="cpu"),
        ]  # fmt: skip

    expected = results()
    with torch.device("meta"):
        actual = results()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
