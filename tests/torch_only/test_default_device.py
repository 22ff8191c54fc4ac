"""Another default device changes nothing: tensors are made where a call's own tensors are.

``torch.set_default_device``, or ``with torch.device(...)``, gives a device to every tensor that is
made without one. Library code that makes a tensor without saying where is then wrong in some call;
so all files are read for such a line, and what runs on this machine is run on the meta device,
which has no numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn

import ring_torch
from ring_core import Mask
from ring_torch import ContextParallel

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


CALLS: dict[str, Callable[[ContextParallel], Any]] = {
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


@pytest.mark.parametrize("name", CALLS)
@on_ranks
def test_calls_under_another_default_device(name: str) -> None:
    expected = CALLS[name](ContextParallel())
    with torch.device("meta"):
        results = CALLS[name](ContextParallel())
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
