"""The check rejects the results of each fault, and Ring's are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ring_torch
from faults_of_others.models import FAULTS, LENGTH, RANKS, Example, Fault, Results
from ring_core import Layout
from ring_core.tripwire import Kind, SampledRows, sampled
from ring_torch import ContextParallel, UnsupportedError, hf
from ring_torch.local import LocalRankError

KINDS: dict[str, Kind] = {
    "out": "queries", "lse": "queries", "dq": "queries", "dk": "keys", "dv": "keys",
}  # fmt: skip


def is_rejected(wrong: Results, exact: Results) -> bool:
    """Return True if a sample of the first four checked calls exceeds its limit on some rank."""
    for name, actual in wrong.items():
        if name == "dsinks":  # one number per head: all are compared
            return not np.allclose(actual, exact[name], rtol=1e-4)
        rows = [x[0].T[..., None] if name == "lse" else x[0] for x in (actual, exact[name])]
        for call, rank in np.ndindex(4, RANKS):
            rows_at = sampled(KINDS[name], call + 1, rank, LENGTH // RANKS) + rank * LENGTH // RANKS
            sampled_wrong, true = (x[rows_at] for x in rows)
            plain = true.astype(np.float32).astype(np.float64)
            if (
                SampledRows(sampled_wrong, true, plain, np.ones(len(rows_at))).worst("float32")
                is not None
            ):
                return True
    return False


def shards(x: Example, rank: int, layout: str) -> list[torch.Tensor]:
    """Return a rank's q, k, v and output gradient, as views of memory with heads first."""
    positions = Layout(layout, LENGTH, RANKS).positions(rank)  # type: ignore[arg-type]  # a parameter of the test
    return [
        torch.tensor(x.arrays[name][:, positions], dtype=torch.float32)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        for name in ("q", "k", "v", "dout")
    ]


def run(rank: int, x: Example, layout: Any, strategy: str) -> Results:
    """Return a rank's results of a checked call."""
    q, k, v, dout = shards(x, rank, layout)
    leaves = [y.requires_grad_() for y in (q, k, v)]
    options: dict[str, Any] = dict(x.options)
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], dtype=torch.float32, requires_grad=True)
        leaves.append(options["sinks"])
    with ring_torch.check():
        out, lse = ring_torch.ring_attention(
            q, k, v, layout=layout, strategy=strategy, return_lse=True, **options
        )
        grads = torch.autograd.grad(out, leaves, dout)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {
        name: y.detach().double().numpy()
        for name, y in zip(names, (out, lse, *grads), strict=False)
    }


def together(parts: list[Results], layout: str) -> Results:
    """Return all ranks' results in the order of tokens."""
    cut = Layout(layout, LENGTH, RANKS)  # type: ignore[arg-type]  # a parameter of the test
    back = np.argsort(np.concatenate([cut.positions(rank) for rank in range(RANKS)]))
    results = {
        name: np.take(np.concatenate([x[name] for x in parts], axis), back, axis)
        for name in parts[0]
        if name != "dsinks"
        for axis in (2 if name == "lse" else 1,)
    }
    if "dsinks" in parts[0]:
        results["dsinks"] = np.sum([x["dsinks"] for x in parts], axis=0)
    return results


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_rejected_there_and_right_here(fault: Fault, backend: Any) -> None:
    x = Example(fault.options, fault.heads)
    assert is_rejected(fault.model(x), x.exact), "the check sees the fault"
    for layout, strategy in (("zigzag", "ring"), ("contiguous", "gather")):
        right = together(backend.pool(RANKS).run(run, x, layout, strategy), layout)
        assert not is_rejected({"out": right["out"]}, x.exact)
        for name, value in right.items():
            np.testing.assert_allclose(value, x.exact[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "name",
    ["heads_of_another_model", "ratio_of_heads_broken_by_padding", "key_heads_fewer_than_ranks"],
)
def test_heads_that_ranks_do_not_divide_are_right(name: str, backend: Any) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    x = Example(fault.options, fault.heads)
    right = together(backend.pool(RANKS).run(run, x, "zigzag", "ulysses"), "zigzag")
    for key, value in right.items():
        np.testing.assert_allclose(value, x.exact[key], rtol=2e-4, atol=2e-5, err_msg=key)


def test_fewer_heads_than_ranks_are_refused(backend: Any) -> None:
    x = Example({}, (2, 1))
    with pytest.raises(LocalRankError, match="at most 2 ranks can split them, not 4"):
        backend.pool(RANKS).run(run, x, "contiguous", "ulysses")


def foreign_attention(rank: int) -> str:
    """Return the error of torch's SDPA when it is given a sharded batch's mask."""
    del rank
    tokens = torch.arange(16)[None]
    cp, model = ContextParallel(layout="zigzag"), torch.nn.Identity()
    mask = hf.shard_batch(cp, {"input_ids": tokens}, model=model)["attention_mask"]
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(UnsupportedError) as refused:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None])
    return str(refused.value)


def test_another_attention_cannot_read_the_mask(backend: Any) -> None:
    for text in backend.pool(2).run(foreign_attention):
        assert "attn_implementation=ring_torch.hf.register()" in text


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_each_names_its_source(fault: Fault) -> None:
    assert fault.text.endswith(".") and fault.how.endswith(".")
    assert "#" in fault.text or "/" in fault.text, "the project, and the thread where there is one"
