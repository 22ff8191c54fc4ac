"""Test backend for ring_torch: gloo processes on CPUs, NCCL processes on GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cases import TOKEN_AXES, Case
from mutants import applied
from views import VIEWS

import ring_torch
from ring_core import Plan, StrategyConfig
from ring_torch.local import LocalRankError, LocalRanks

Arrays = dict[str, npt.NDArray[Any]]


class Pools(dict[int, LocalRanks]):
    """Pools of rank processes by world size, each started at its first use with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def __missing__(self, world_size: int) -> LocalRanks:
        self[world_size] = LocalRanks(world_size, **self._options)
        return self[world_size]

    def close(self) -> None:
        """Stop all processes."""
        for pool in self.values():
            pool.close()


class TorchBackend:
    """Backend that runs each case on the pool of its ring size."""

    dtypes = ("float64", "float32", "bfloat16", "float16")
    failures = (LocalRankError,)

    def __init__(self, *, cuda: bool = False) -> None:
        self._cuda = cuda
        self._pools = Pools(cuda=cuda)

    def pool(self, world_size: int) -> LocalRanks:
        """Return the pool of a world size."""
        return self._pools[world_size]

    def run(
        self,
        case: Case,
        mutant: str | None = None,
        kernel: str = "auto",
        strategy: str | StrategyConfig = "auto",
        transport: str = "auto",
    ) -> Arrays:
        """Run one case on its ring size and put the results together."""
        ways, is_right = (kernel, case.moved(strategy), transport), mutant is None
        # A broken backend may leave messages behind: it has ranks of its own.
        ranks = (
            self.pool(case.cp_size) if is_right else LocalRanks(case.cp_size, timeout=5, cuda=self._cuda)
        )  # fmt: skip
        try:
            # A copy is without cached results, which would be pickled too.
            parts = ranks.run(run_rank, replace(case), ways, mutant, self._cuda)
        except LocalRankError as error:
            if is_right and "UnsupportedError" not in str(error):  # such a call sent nothing
                self._pools.pop(case.cp_size).close()  # its ranks may have undelivered messages
            raise
        finally:
            if not is_right:
                ranks.close()
        return gather(case, case.plan, parts)

    def close(self) -> None:
        """End all processes."""
        self._pools.close()


Ways = tuple[str, str | StrategyConfig, str]  # kernel, strategy and transport


def run_rank(rank: int, case: Case, ways: Ways, mutant: str | None, cuda: bool) -> Arrays:
    """Run one rank's forward and backward of a case."""
    with applied(mutant):
        return _run_rank(rank, case, ways, torch.device("cuda" if cuda else "cpu"))


def _run_rank(rank: int, case: Case, ways: Ways, device: torch.device) -> Arrays:
    plan, x = case.plan, {name: case.padded(name) for name in case.inputs}
    q_at, k_at = plan.positions(rank), plan.k_positions(rank)

    def tensor(
        name: str, at: Any = (), dtype: torch.dtype | None = None, *, grad: bool = False
    ) -> torch.Tensor:
        dtype = dtype or getattr(torch, case.dtype)
        value = torch.tensor(np.ascontiguousarray(x[name][at]), dtype=dtype, device=device)
        view = case.view_of(name)
        return (value if view is None else VIEWS[view](value)).requires_grad_(grad)

    q = tensor("q", np.s_[:, q_at], grad=True)
    k, v = (tensor(side, np.s_[:, k_at], grad=True) for side in "kv")
    sinks = tensor("sinks", grad=True) if "sinks" in x else None
    bias = tensor("bias", np.s_[:, :, q_at], grad=True) if "bias" in x else None
    slopes = tensor("alibi_slopes") if "alibi_slopes" in x else None
    ids = None
    if case.segments:
        sides = ("q_ids", q_at), ("k_ids", k_at)
        ids = tuple(tensor(side, np.s_[:, positions], torch.int32) for side, positions in sides)
    rules = case.rules
    if case.shown:
        rules["mask"] = tensor("shown", np.s_[..., q_at, :], torch.bool)
    options: dict[str, Any] = {
        **rules, "seq_len": case.lengths, "layout": case.layout, "segment_ids": ids, "softmax_scale": case.softmax_scale,
        "softcap": case.softcap, "sinks": sinks, "bias": bias, "alibi_slopes": slopes, "dropout_p": case.dropout_p,
        "dropout_seed": case.dropout_seed, "kernel": ways[0], "strategy": ways[1],
        "transport": ways[2],
    }  # fmt: skip
    dout = tensor("dout", np.s_[:, q_at])
    if case.lse_grad:
        out, lse = ring_torch.ring_attention(q, k, v, return_lse=True, **options)
        dlse = tensor("dlse", np.s_[:, :, q_at], lse.dtype)
        torch.autograd.backward([out, lse], [dout, dlse])
    else:  # kernels without a gradient through lse may run too
        out = ring_torch.ring_attention(q, k, v, **options)
        out.backward(dout)
        with torch.no_grad():
            _, lse = ring_torch.ring_attention(q, k, v, return_lse=True, **options)
    results: dict[str, Any] = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    results |= {"dsinks": sinks.grad} if sinks is not None else {}
    results |= {"dbias": bias.grad} if bias is not None else {}
    return {key: value.detach().double().cpu().numpy() for key, value in results.items()}


def gather(case: Case, plan: Plan, parts: list[Arrays]) -> Arrays:
    """Assemble the results of all ranks into global arrays."""
    results: Arrays = {}
    for name in parts[0]:
        if (axis := TOKEN_AXES.get(name)) is None:
            results[name] = np.sum([part[name] for part in parts], axis=0)
            continue
        of_rank = plan.k_positions if name in ("dk", "dv") else plan.positions
        positions = [of_rank(rank) for rank in range(case.cp_size)]
        whole = np.concatenate([part[name] for part in parts], axis=axis)
        whole = np.take(whole, np.argsort(np.concatenate(positions)), axis=axis)
        results[name] = case.without_padding(name, whole)
    return results
