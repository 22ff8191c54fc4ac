"""Check some rows of a call's results, and the bytes that it sent, on all ranks of a group.

Every rank sends its sampled rows to all others. Each computes their attention over its own keys,
densely, and sends the parts back, where they are merged and compared. Sampled keys of a backward
travel likewise. A last exchange tells all ranks what any of them has found, so that a fault on one
rank is an error on all.

Attention is computed twice: exactly, in float64, and plainly, with the roundings of a simple
implementation in the call's dtype. The call's error may be at most twice that of the plain result,
and a few roundings more (:meth:`ring_core.tripwire.SampledRows.worst`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import batched
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core.base.arguments import Ints, not_none
from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import Kind, SampledRows, peak_tflops, result_shapes, sampled
from ring_torch.call import Call
from ring_torch.checking.watch import Watch, shared_findings
from ring_torch.comm.exchange import exchange
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.positions import key_positions, on_device, query_positions
from ring_torch.records import BackwardInputs, Inputs, folded
from ring_torch.tripwire.dense import (
    EXACT,
    ForwardResults,
    Partial,
    SampledKeys,
    SampledQueries,
    ScoreRule,
    key_sums,
    merged,
    plain_precision,
    query_means,
)

#: The fields of a ``SampledRows`` on the device: the call's result, the exact and the plain one,
#: ``[4, H, D]`` each, a bound of each row's terms ``[4]``, and the root of the summed squares of
#: terms that were rounded, ``[4, H, D]``.
Compared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Sample(NamedTuple):
    """Sampled rows of a checked call: in one batch row, four queries and four keys of each rank.

    Attributes:
        call: The call.
        inputs: Inputs of this rank.
        batch: Index of the batch row.
        rule: Parameters that the scores of this batch row share.
    """

    call: Call
    inputs: Inputs
    batch: int
    rule: ScoreRule

    @classmethod
    def of(cls, call: Call, inputs: Inputs) -> Sample:
        """Return the sample of a checked call whose batch is not empty."""
        batch = call.checked % inputs.q.shape[0]
        slopes = None if inputs.alibi_slopes is None else torch.atleast_2d(inputs.alibi_slopes)
        row_slopes = None if slopes is None else slopes[batch % len(slopes)]
        lengths = call.plan.seq_len, call.plan.kv_seq_len
        return cls(
            call, inputs, batch, ScoreRule(call.params, batch, row_slopes, *lengths, call.seed)
        )

    def local_rows(self, kind: Kind) -> Tensor:
        """Return the local indices of this rank's sampled queries or keys."""
        return on_device(self._sampled(kind, self.call.ranks.rank), self.call.device)

    def dq(self, upstream: BackwardInputs, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ of this rank's sampled queries: exact, plain, and the size of rounded terms.

        Both start from ``delta = rowsum(dout * out)`` of the output as the forward rounded it, as a
        kernel's backward does; so do the gradients of keys. With an exact ``delta`` the exact
        gradients would differ from the kernel's by that rounding, which is one number for each row
        and head. The plain gradients' error need not show it, so it could not bound the kernel's.
        """
        b, rows = self.batch, self.local_rows("queries")
        dout, out = (x[b, rows].double() for x in (upstream.dout, upstream.out))
        delta = (dout * out).sum(dim=-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[b, :, rows].t().double().unsqueeze(-1)
        scale, (exact, plain) = self.call.params.scale, self.means(upstream.dout)
        dq = [
            scale * (first - delta * second)
            for first, second in (x.means.double().chunk(2, -1) for x in (exact, plain))
        ]
        first, second = plain.squares.double().sqrt().chunk(2, -1)
        rounded = abs(scale) * (first + delta.abs() * second)
        return dq[0], dq[1].to(self.call.dtype), rounded

    def key_sums(self, upstream: BackwardInputs, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what all ranks' queries contribute to this rank's sampled keys: exact, plain.

        Each is ``[4, K, 2 * (D + Dv) + 1]``: dK, dV, squares of rounded terms and sums of weights,
        side by side; see :func:`ring_torch.tripwire.dense.key_sums`.
        """
        call, inputs, b, ranks = self.call, self.inputs, self.batch, self.call.ranks
        columns = self.local_rows("keys")
        local = [x[b, columns] for x in (inputs.k, inputs.v, inputs.k_ids) if x is not None]
        # Every rank receives the sampled keys of all ranks, in ascending order of positions.
        k, v, *ids = (
            torch.cat(x) for x in exchange(ranks, [[x] * ranks.size for x in local], call.device)
        )
        position = self._all_positions(call.plan.k_positions, "keys")
        order = position.argsort()
        keys = SampledKeys(k[order], v[order], position[order], ids[0][order] if ids else None)
        bias = None
        if inputs.bias is not None:
            bias = self._shifted_bias(slice(None), keys.position)
        index, q_position, _ = query_positions(call.plan, ranks.rank, call.device)
        queries = SampledQueries(
            inputs.q[b],
            index,
            q_position,
            None if inputs.q_ids is None else inputs.q_ids[b],
            bias,
            upstream.dout[b],
        )
        results = ForwardResults(
            upstream.out[b], upstream.lse[b].t(), None if dlse is None else dlse[b].t()
        )
        sums = key_sums(self.rule, queries, keys, results, (EXACT, plain_precision(call.dtype)))
        # Undo the sorting, send each rank the sums over this rank's queries for its keys, and
        # receive those of this rank's keys from every rank: their total is over all queries.
        by_rank = [list(x[order.argsort()].chunk(ranks.size)) for x in sums]
        exact, plain = (torch.stack(x).sum(dim=0) for x in exchange(ranks, by_rank, call.device))
        return exact, plain

    def _shifted_bias(self, rows: Tensor | slice, columns: Tensor) -> Tensor:
        """Return the bias less its rows' shift, ``[n, H or 1, m]``, as kernels add it to scores."""
        bias, shift, b = not_none(self.inputs.bias), self.inputs.bias_shift, self.batch
        columns = columns.clamp(max=bias.shape[-1] - 1)  # padding, which is not seen, has none
        added = bias[b % len(bias)][:, rows].index_select(-1, columns)
        if shift is not None:
            added = added.double() - shift[b % len(shift)][:, rows, None].double()
        return added.transpose(0, 1)

    def means(self, dout: Tensor | None = None) -> tuple[Partial, Partial]:
        """Return the softmax-weighted means of this rank's sampled queries: exact, plain.

        They are means over the keys of all ranks, sinks included: of V, which is the output, or
        with ``dout`` the two means that dQ is made of; see :func:`query_means`.
        """
        call, inputs, b, ranks = self.call, self.inputs, self.batch, self.call.ranks
        rows = self.local_rows("queries")
        tensors = {"q": inputs.q, "dout": dout, "ids": inputs.q_ids}
        sent = {name: [x[b, rows]] * ranks.size for name, x in tensors.items() if x is not None}
        if inputs.bias is not None:
            k_positions = (
                on_device(call.plan.k_positions(x), call.device) for x in range(ranks.size)
            )
            sent["bias"] = [self._shifted_bias(rows, columns) for columns in k_positions]
        # Every rank receives the sampled queries of all ranks (of their bias only the columns of
        # its own keys) ...
        received = map(torch.cat, exchange(ranks, list(sent.values()), call.device))
        queries_of_all = dict(zip(sent, received, strict=True))
        index = self._all_positions(call.plan.positions, "queries")
        queries = SampledQueries(
            queries_of_all["q"],
            index,
            index + call.plan.q_offset,
            queries_of_all.get("ids"),
            queries_of_all.get("bias"),
            queries_of_all.get("dout"),
        )
        keys = SampledKeys(
            inputs.k[b],
            inputs.v[b],
            key_positions(call.plan, ranks.rank, call.device)[0],
            None if inputs.k_ids is None else inputs.k_ids[b],
        )
        # ... computes their means over its own keys ...
        partials = query_means(self.rule, queries, keys, (EXACT, plain_precision(call.dtype)))
        by_rank = [list(x.chunk(ranks.size)) for partial in partials for x in partial]
        # ... and sends them back. Each rank merges the parts that it receives for its queries.
        returned = exchange(ranks, by_rank, call.device)
        exact, plain = (
            merged([Partial(*x) for x in zip(*fields, strict=True)])
            for fields in (returned[:3], returned[3:])
        )
        if inputs.sinks is not None:
            exact, plain = (x.with_sinks(folded(inputs.sinks, x.lse.dtype)) for x in (exact, plain))
            tokens = int(call.plan.q_layout.num_tokens(ranks.rank))  # padding sees no sink either
            exact, plain = (
                x._replace(lse=x.lse.masked_fill((rows >= tokens)[:, None], -torch.inf))
                for x in (exact, plain)
            )
        return exact, plain

    def _sampled(self, kind: Kind, rank: int) -> Ints:
        """Return the local indices of a rank's sampled queries or keys."""
        layout = self.call.plan.q_layout if kind == "queries" else self.call.plan.k_layout
        return sampled(kind, self.call.checked, rank, layout.local_len)

    def _all_positions(self, positions: Callable[[int], Ints], kind: Kind) -> Tensor:
        """Return the positions of all ranks' samples, in the order of ranks."""
        by_rank = [
            positions(rank)[self._sampled(kind, rank)] for rank in range(self.call.ranks.size)
        ]
        return on_device(np.concatenate(by_rank), self.call.device)

    def faults(self, kind: Kind, results: Mapping[str, Compared]) -> list[str]:
        """Return a message for each of this rank's results that is wrong."""
        messages = []
        dtype = str(self.call.dtype).removeprefix("torch.")
        # One copy for all, as each waits for the device.
        arrays = iter(_on_host(*(x for tensors in results.values() for x in tensors)))
        for name, rows in zip(results, batched(arrays, len(SampledRows._fields)), strict=True):
            worst = SampledRows(*rows).worst(dtype)
            if worst is not None:
                token = int(self._sampled(kind, self.call.ranks.rank)[worst.row])
                shapes = result_shapes(*(tuple(x.shape) for x in self.inputs[:3]))
                messages.append(worst.describe(name, self.batch, token, shapes[name]))
        return messages

    def agree(self, messages: list[str], pass_name: str) -> str | None:
        """Exchange findings with all ranks; return the error message, or ``None`` for no fault."""
        call, ranks = self.call, self.call.ranks
        lines = shared_findings(ranks, messages, call.device)
        if lines is None:
            return None
        return (
            f"call {call.checked} ({pass_name}) is wrong. {lines}. Kernel "
            f"{call.kernel.capabilities.name!r}, strategy {call.strategy.name!r} over "
            f"{call.transport.name!r}, layout {str(call.plan.q_layout.name)!r}, mask "
            f"{call.plan.mask.describe()!r}, {ranks.size} ranks. Every rank of the group raises this. "
            f"To find out more: python -m ring_torch doctor, and the same call with kernel='eager' and "
            f"strategy='ring'"
        )


def forward_faults(
    call: Call, inputs: Inputs, out: Tensor, lse: Tensor, watch: Watch, *, sent_before: int
) -> str | None:
    """Check a forward on all ranks; return the error message, or ``None`` if no fault is found.

    Args:
        call: The call.
        inputs: Inputs of this rank.
        out: Output ``[B, T_local, H, Dv]``, in the inputs' dtype.
        lse: Log-sum-exp ``[B, H, T_local]``, sinks included; compared if the call needs it.
        watch: Counter of the bytes that the forward sent, and its duration.
        sent_before: Bytes of messages sent before those of the call's strategy.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    if inputs.q.shape[0] == 0:
        return None
    sample = Sample.of(call, inputs)
    rows, (exact, plain) = sample.local_rows("queries"), sample.means()
    size = _largest_norm(inputs.v).expand(len(rows))
    results: dict[str, Compared] = {
        "out": (
            out[sample.batch, rows], exact.means, plain.means.to(call.dtype), size,
            plain.squares.sqrt(),
        )
    }  # fmt: skip
    if call.params.needs_lse:
        lse, exact_lse, plain_lse = (
            x.unsqueeze(-1) for x in (lse[sample.batch, :, rows].t(), exact.lse, plain.lse)
        )
        zeros = torch.zeros_like(plain_lse)
        results["lse"] = (
            lse,
            exact_lse,
            plain_lse,
            torch.ones(len(rows), device=zeros.device),
            zeros,
        )
    messages = sample.faults("queries", results)
    messages += _traffic_faults(call, inputs, watch, sent_before=sent_before)
    return sample.agree(messages, "forward")


def backward_faults(
    call: Call,
    inputs: Inputs,
    upstream: BackwardInputs,
    dlse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    watch: Watch,
    *,
    fetches: bool,
) -> str | None:
    """Check a backward on all ranks; return the error message, or ``None`` if no fault is found.

    Args:
        call: The call.
        inputs: Inputs of this rank.
        upstream: ``dout``, and the forward's ``out`` and ``lse``.
        dlse: Gradient of ``lse``, ``[B, H, T_local]``, if any.
        grads: dQ, dK and dV, in the inputs' dtype.
        watch: Counter of the bytes that the backward's strategy sent, and its duration.
        fetches: True if gathered keys were fetched again, False if the forward had saved them.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    if inputs.q.shape[0] == 0:
        return None
    sample, (q, k, v) = Sample.of(call, inputs), inputs[:3]
    b, rows, columns = sample.batch, sample.local_rows("queries"), sample.local_rows("keys")
    dq, dk, dv = grads
    row_norms = upstream.dout[b, rows].double().norm(dim=-1).amax(dim=-1)
    # A backward computes exp(scores - lse) again. Its relative error is the absolute error of the
    # exponent, which grows with the size of lse.
    lse_error = 1 + upstream.lse[b].double().nan_to_num(posinf=0.0, neginf=0.0).abs()
    scale, v_norm = abs(call.params.scale), _largest_norm(v, 2)
    size = scale * row_norms * _largest_norm(k) * v_norm * lse_error[:, rows].amax(dim=0)
    exact_dq, plain_dq, dq_rounded = sample.dq(upstream, dlse)
    messages = sample.faults("queries", {"dq": (dq[b, rows], exact_dq, plain_dq, size, dq_rounded)})
    exact, plain = sample.key_sums(upstream, dlse)
    weights = exact[..., -1].amax(dim=-1) * lse_error.amax()
    dout_norm, dims = _largest_norm(upstream.dout, 2), [k.shape[3], v.shape[3]]
    (exact_dk, exact_dv), (plain_dk, plain_dv, *squares) = (
        x[..., :-1].split(dims * 2, dim=-1)[:count] for x, count in ((exact, 2), (plain, 4))
    )
    dk_rounded, dv_rounded = (x.sqrt() for x in squares)
    dk_size = scale * weights * dout_norm * v_norm * _largest_norm(q)
    messages += sample.faults(
        "keys",
        {
            "dk": (dk[b, columns], exact_dk, plain_dk.to(call.dtype), dk_size, dk_rounded),
            "dv": (
                dv[b, columns],
                exact_dv,
                plain_dv.to(call.dtype),
                weights * dout_norm,
                dv_rounded,
            ),
        },
    )
    messages += _traffic_faults(call, inputs, watch, forward=False, fetches=fetches)
    return sample.agree(messages, "backward")


def _traffic_faults(
    call: Call,
    inputs: Inputs,
    watch: Watch,
    *,
    forward: bool = True,
    fetches: bool = True,
    sent_before: int = 0,
) -> list[str]:
    """Compare the bytes and the time of a forward or backward with its program and its device.

    No device exceeds its peak rate: a pass that seems to has left work out.

    Args:
        call: The call.
        inputs: Inputs of this rank.
        watch: Counter of the bytes that the pass sent and read, and its duration.
        forward: True for the forward, False for the backward.
        fetches: True if gathered keys are fetched; a backward may have them saved.
        sent_before: Bytes of messages sent before those of the call's strategy.

    Returns:
        A message for other bytes than the program's, and one for an impossible speed.
    """
    messages = []
    # Bytes are compared where they were counted: messages at the sender, reads at the reader.
    if call.ranks.size > 1:
        traffic = call.strategy.traffic(call, inputs, forward=forward, saved=not fetches)
        expected, actual, verbs = traffic.received, watch.read, ("read from peers", "reads")
        if call.transport.sends_messages:
            expected, actual, verbs = traffic.sent, watch.sent, ("sent", "sends")
            expected += HEADER_BYTES + sent_before
        if actual != expected:
            messages.append(
                f"{actual:,} bytes were {verbs[0]}, and the program {verbs[1]} {expected:,}"
            )
    peak = peak_tflops(
        torch.cuda.get_device_name(call.device) if call.device.type == "cuda" else "cpu"
    )
    # Segment ids and a bias may hide pairs that the plan counts.
    if peak is not None and inputs.q_ids is None and inputs.bias is None:
        q, v = inputs.q, inputs.v
        model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
        flops = call.strategy.visible_pairs(call) * model.flops_per_pair
        rate = flops * (1.0 if forward else BACKWARD_FLOPS) / watch.seconds / 1e12
        if rate > peak:
            messages.append(
                f"{rate:,.0f} TFLOP/s, and the device has {peak:,.0f}: work was left out"
            )
    return messages


def _on_host(*tensors: Tensor) -> list[npt.NDArray[np.float64]]:
    """Return tensors as float64 arrays, copied from the device at once: each copy waits for it."""
    flat = torch.cat([x.detach().double().to(tensors[0].device).flatten() for x in tensors])
    parts = flat.cpu().split([x.numel() for x in tensors])
    return [part.view(x.shape).numpy() for part, x in zip(parts, tensors, strict=True)]


def _largest_norm(x: Tensor, order: float = torch.inf) -> Tensor:
    """Return the largest norm of the last dimension's vectors, with NaN and infinity counted as 0.

    ``order`` infinity gives the largest absolute number, 2 the largest length.
    """
    lengths: Tensor = torch.linalg.vector_norm(
        x, order, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    return lengths.nan_to_num(nan=0.0, posinf=0.0).amax().double()
