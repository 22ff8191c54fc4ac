"""Torch's modes around a call: honoured as by SDPA, or refused by name; another default device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from dense import sdpa
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.autograd import forward_ad

import ring_torch
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


ROOT = Path(ring_torch.__file__).parent
#: Functions of torch that make a tensor on the default device.
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def _makes_without_device(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKERS
        and ast.unparse(node.func.value) == "torch"
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    )


def test_every_tensor_is_made_on_a_device_that_is_said() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr) and _makes_without_device(node)
    ]
    assert not lines, lines


T = 16
PREDICATE = Mask(predicate=lambda i, j: (j <= i) & (j % 3 != 1))


def _qkv(cp: ContextParallel) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    whole = (torch.randn(2, T, 2, 8, generator=numbers, device="cpu") for _ in range(3))
    return [cp.shard(x).requires_grad_() for x in whole]


def _attention(**options: Any) -> Callable[[ContextParallel], Any]:
    def run(cp: ContextParallel) -> list[Tensor]:
        q, k, v = _qkv(cp)
        given = {name: make(q) if callable(make) else make for name, make in options.items()}
        with ring_torch.check():
            out, lse = cp.attention(q, k, v, return_lse=True, **given)
            (out.square().sum() + lse.sum()).backward()
        return [out, lse, *(x.grad for x in (q, k, v) if x.grad is not None)]

    return run


def _loss(cp: ContextParallel, **options: Any) -> list[Tensor]:
    x = _qkv(cp)[0].flatten(2).detach().requires_grad_()
    labels = torch.zeros(x.shape[:2], dtype=torch.int64, device="cpu")
    weight = torch.ones(4, 16, device="cpu")
    part = ring_torch.cross_entropy(cp, x, labels, **options)
    linear = ring_torch.linear_cross_entropy(cp, x, weight, labels, tokens_at_once=5, **options)
    (part + linear).backward()
    return [part, linear, x.grad]  # type: ignore[list-item]  # there after a backward


def _reduced(cp: ContextParallel) -> list[Tensor]:
    model = nn.Linear(8, 8, device="cpu")
    nn.init.ones_(model.weight)
    handle = cp.reduce_each_gradient(model)
    model(_qkv(cp)[0]).sum().backward()
    handle.remove()
    first = not_none(model.weight.grad).clone()
    model.zero_grad()
    model(_qkv(cp)[0]).sum().backward()
    if cp.cp_rank:
        model.bias.grad = None
    cp.reduce_gradients(model)
    return [first, not_none(model.weight.grad), not_none(model.bias.grad)]


def not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _loaded(cp: ContextParallel) -> list[Tensor]:
    lists = [[torch.arange(n, device="cpu") for n in (5, 3, 9)]]
    batch = next(iter(ring_torch.dataloader(cp, lists)))
    balanced = next(iter(ring_torch.dataloader(cp, lists, balanced=True)))
    return [batch.tokens, batch.labels, batch.positions, balanced.tokens]


UNDER_ANOTHER_DEVICE: dict[str, Callable[[ContextParallel], Any]] = {
    "shard": lambda cp: cp.shard(torch.ones(1, T - 1, device="cpu"), pad=True, fill=3),
    "unshard": lambda cp: cp.unshard(_qkv(cp)[0], grad="sum"),
    "shift": lambda cp: cp.shift(_qkv(cp)[0], 3, fill=2, cu_seqlens=(0, 5, T)),
    "halo": lambda cp: list(cp.halo(_qkv(cp)[0], 2, 1, cu_seqlens=(0, 5, T))),
    "join": lambda cp: cp.join(cp.halo(_qkv(cp)[0], 0, 0).rows),
    "relayout": lambda cp: cp.relayout(_qkv(cp)[0], to="striped"),
    "positions": lambda cp: cp.positions(T, device="cpu"),
    "attention": _attention(),
    "attention with documents": _attention(causal=True, cu_seqlens=(0, 5, T)),
    "attention with a predicate": _attention(mask=PREDICATE),
    "attention with everything": _attention(
        causal=True, window=(7, 0), softcap=3.0, dropout_p=0.2, dropout_seed=5, kernel="eager",
        sinks=lambda q: q.new_zeros(2), alibi_slopes=lambda q: q.new_ones(2),
        segment_ids=lambda q: q.new_zeros(q.shape[:2], dtype=torch.int32),
        bias=lambda q: q.new_zeros(1, 1, q.shape[1], T),
    ),
    "attention with a dense mask": _attention(
        mask=lambda q: q.new_ones(q.shape[1], T, dtype=torch.bool)
    ),
    "gathered keys": _attention(causal=True, strategy="gather"),
    "heads": _attention(causal=True, strategy="ulysses"),
    "losses": _loss,
    "losses with padding": lambda cp: _loss(cp, seq_len=T, label_smoothing=0.1),
    "gradients": _reduced,
    "loader": _loaded,
    "compiled": lambda cp: torch.compile(
        lambda x: cp.halo(cp.shift(x, 1, cu_seqlens=(0, 5, T)), 1, 1).rows, backend="eager"
    )(_qkv(cp)[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDER_ANOTHER_DEVICE)
@on_ranks
def test_calls_under_another_default_device(name: str) -> None:
    expected = UNDER_ANOTHER_DEVICE[name](ContextParallel())
    with torch.device("meta"):
        results = UNDER_ANOTHER_DEVICE[name](ContextParallel())
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
