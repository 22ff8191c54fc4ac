"""Compiled calls refuse the arguments that eager calls refuse, and compute no more than they."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from ring_torch import ring_attention

T, HEADS = 8, 2

#: Options with one wrong value, and the error of both calls.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sinks, a list": ({"sinks": [0.0] * HEADS}, "sinks must be a"),
    "alibi_slopes, a list": ({"alibi_slopes": [0.5] * HEADS}, "alibi_slopes must be a"),
    "alibi_slopes, a tuple": ({"alibi_slopes": (0.5,) * HEADS}, "alibi_slopes must be a"),
    "bias, a list": ({"bias": [[[[0.0] * T] * T]]}, "bias must be a"),
    "a seed that is a float": (
        {"dropout_p": 0.1, "dropout_seed": 3.0},
        "dropout_seed must be an integer",
    ),
}


def _attend(*qkv: Tensor, **options: Any) -> Tensor:
    out: Tensor = ring_attention(*qkv, **options)
    return out


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_wrong_kinds_of_values(name: str, compiled: bool) -> None:
    options, message = WRONG[name]
    torch.compiler.reset()
    call: Any = torch.compile(_attend, backend="aot_eager", fullgraph=True) if compiled else _attend
    qkv = torch.randn(3, 1, T, HEADS, 8)
    with pytest.raises(Exception, match=message) as caught:
        call(*qkv, **options)
    # The compiler wraps errors that the operator's own checks raise.
    assert isinstance(caught.value, ValueError) or "ValueError" in str(caught.value)


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_a_seed_of_numpy_is_a_number_that_graphs_refuse(kind: Any) -> None:
    """The compiler takes numpy's numbers for tensors, whose value the host does not know."""
    qkv, options = torch.randn(3, 1, T, HEADS, 8), {"dropout_p": 0.1, "dropout_seed": 3}
    torch.testing.assert_close(
        _attend(*qkv, **options | {"dropout_seed": kind(3)}), _attend(*qkv, **options),
        rtol=0, atol=0,
    )  # fmt: skip
    torch.compiler.reset()
    call: Any = torch.compile(_attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="dropout_seed must be an integer"):
        call(*qkv, **options | {"dropout_seed": kind(3)})


#: Options with a bias, and True if it needs a gradient.
BIASES: dict[str, tuple[dict[str, Any], bool]] = {
    "a mask of booleans": ({"mask": torch.ones(T, T).tril().bool()}, False),
    "a constant bias": ({"bias": torch.randn(1, 1, T, T)}, False),
    "a bias that is trained": ({"bias": torch.randn(1, 1, T, T, requires_grad=True)}, True),
}


@pytest.mark.parametrize("name", BIASES)
def test_gradients_that_a_graph_computes(name: str) -> None:
    options, is_trained = BIASES[name]
    torch.compiler.reset()
    counts: list[int] = []

    def backward_compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.extend(
            len(node.meta["val"])
            for node in graph.graph.nodes
            if "attention_backward" in str(node.target)
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward_compiler
    )
    compiled: Any = torch.compile(_attend, backend=backend, fullgraph=True)
    grads = []
    for call in (compiled, _attend):
        numbers = torch.arange(3 * T * HEADS * 8).sin().view(3, 1, T, HEADS, 8)
        qkv = [x.clone().requires_grad_() for x in numbers]
        leaves = [*qkv, *(x for x in options.values() if x.requires_grad)]
        out = call(*qkv, **options)
        grads.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert counts == [4 if is_trained else 3]  # dQ, dK, dV, and dbias where it is trained
