"""Check of recurrent layers in a running job: one document is computed again, token by token.

A checked call takes one document, one row and the heads of one key head. Each rank goes through its
runs of the document by the maps of single tokens, which it multiplies out in float64. It takes a
run's entry state as the call has it, and tells all ranks the state behind the run, with which the
next run, on another rank, must have begun. So all entry states are right if the first is. Outputs
of sampled tokens must be right, too, and in the backward, which goes the other way with gradients
of states, the gradients of their inputs. No kernel takes part, nor any map of a run or a chunk.

A result may be off by what rounding does to states: by as much as their random errors, of the size
that the arithmetic of the call has, change it (:meth:`ring_core.tripwire.SampledRows.worst`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core.checks import padded_layout
from ring_core.tripwire import SampledRows, sampled
from ring_torch.comm.exchange import exchange
from ring_torch.recurrent.kernels import LinearAttention, LinearRecurrence, SelectiveScan
from ring_torch.recurrent.layer_call import LayerCall

_BLOCK_BYTES = 256 << 20  # most bytes of tokens' maps at a time
_MOST_TOKENS = 1024  # whose maps are multiplied out at a time
_DRAWS = 8  # of random errors of states
_CHUNK = 1024  # tokens: errors of states grow as the square root of how many such there were

#: States of runs, or gradients of them, by positions.
States = Mapping[int, Tensor]


class Run(NamedTuple):
    """Consecutive tokens of the document on one rank: rank, local index, position and length."""

    rank: int
    local: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.length


class Check(NamedTuple):
    """Part of a checked call that is compared.

    Attributes:
        call: The call.
        inputs: Inputs of this rank.
        document: Number of the document.
        runs: Its runs on all ranks, in sequence order.
        row: Index of the batch row.
        head: Key head, of linear attention.
    """

    call: LayerCall
    inputs: Sequence[Tensor]
    document: int
    runs: list[Run]
    row: int
    head: int

    @classmethod
    def of(cls, call: LayerCall, inputs: Sequence[Tensor]) -> Check:
        """Return what the call's number chooses, the same on all ranks."""
        size = call.ranks.size
        layout = padded_layout(call.seq_len, inputs[0].shape[1], call.layout, size)
        offsets = call.cu_seqlens or (0, layout.seq_len)
        (token,) = sampled("queries", call.checked, 0, layout.seq_len, count=1)
        document = int(np.searchsorted(offsets, token, side="right")) - 1
        first, end = offsets[document : document + 2]
        # From the positions of all tokens alone, not by the table of runs.
        runs = []
        for rank in range(size):
            positions = layout.positions(rank)
            local = np.flatnonzero((positions >= first) & (positions < end))
            breaks = (np.diff(local) != 1) | (np.diff(positions[local]) != 1)
            for piece in np.split(local, np.flatnonzero(breaks) + 1):
                if len(piece):
                    start = int(positions[piece[0]])
                    runs.append(Run(rank, int(piece[0]), start, len(piece)))
        rows = inputs[0].shape[0]
        heads = inputs[1].shape[2] if isinstance(call.kernel, LinearAttention) else 1
        row, head = call.checked % rows, call.checked // rows % heads
        return cls(call, inputs, document, sorted(runs, key=lambda x: x.start), row, head)

    def of_token(self, n: int, x: Tensor) -> Tensor:
        """Return what is compared of input ``n``, or of its gradient, ``[T_local, ...]``."""
        if self.call.kernel.fills[n] is None:
            return x
        x = x[self.row]
        if not isinstance(self.call.kernel, LinearAttention):
            return x
        return x[:, self.head] if n < 2 else x[:, self._heads]

    def of_state(self, state: Tensor) -> Tensor:
        """Return the part that is compared of a state ``[B, *S]``, in float64."""
        state = state[self.row].double()
        return state[self._heads] if isinstance(self.call.kernel, LinearAttention) else state

    @property
    def _heads(self) -> slice:
        """Value heads of the key head."""
        _, k, v = self.inputs[:3]
        copies = v.shape[2] // k.shape[2]
        return slice(self.head * copies, (self.head + 1) * copies)

    @property
    def zeros(self) -> Tensor:
        """A state of zeros."""
        inputs = self.inputs
        shape = (inputs[0].shape[0], *self.call.kernel.state_shape(*inputs))
        return self.of_state(inputs[0].new_zeros(()).expand(shape))

    def own(self) -> Iterator[tuple[Run, list[Tensor], list[int]]]:
        """Yield this rank's runs, with the kernel's inputs, ``[L, ...]``, and the sampled tokens.

        Inputs are in float64, of one row, and of one key head with its value heads.
        """
        rank, at = self.call.ranks.rank, 0
        own = [run for run in self.runs if run.rank == rank]
        chosen = sampled("queries", self.call.checked, rank, sum(x.length for x in own) or 1)
        wide = [self.of_token(n, x).double() for n, x in enumerate(self.inputs)]
        for run in own:
            tokens = _rows(self, wide, slice(run.local, run.local + run.length))
            yield run, tokens, sorted({int(t) - at for t in chosen if at <= t < at + run.length})
            at += run.length

    def told(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Tell all ranks a state, and its size, of each of this rank's runs; and return all."""
        ranks, zeros = self.call.ranks, self.zeros
        counts = np.bincount([run.rank for run in self.runs], minlength=ranks.size)
        sent = zeros.new_zeros(int(counts.max()), 2, *zeros.shape)
        for n, state in enumerate(states):
            sent[n] = state
        of_ranks = [iter(x) for x in exchange(ranks, [[sent] * ranks.size], zeros.device)[0]]
        return [next(of_ranks[run.rank]) for run in self.runs]

    @property
    def is_rounded(self) -> bool:
        """True if products are of numbers in 16 bits."""
        return self.call.library == "fla"

    def fault(
        self, name: str, got: Tensor, exact: Tensor, noise: Tensor, dtype: torch.dtype,
        entry: Callable[..., str],
    ) -> list[str]:  # fmt: skip
        """Return a message if results are off by more than rounding.

        Args:
            name: Name of the result.
            got: Results ``[rows, ...]``.
            exact: What they should be.
            noise: How far errors of states of their own size change them.
            dtype: Dtype in which the call has them.
            entry: Returns the entry of an index into the results, in words.
        """
        rows, narrow = len(got), self.inputs[0].dtype  # of ssd's values products are float32
        if self.is_rounded and torch.finfo(narrow).eps > torch.finfo(dtype).eps:
            dtype = narrow
        growth = sqrt(1 + sum(run.length for run in self.runs) / _CHUNK)
        by_row = noise.reshape(rows, -1).amax(1) * growth
        cells = (rows, prod(exact.shape[1:-1]), exact.shape[-1]) if exact.ndim > 1 else (rows, 1, 1)
        arrays = [
            x.detach().double().reshape(cells).cpu().numpy()
            for x in (got, exact, exact.to(dtype), noise)
        ]
        rounded = arrays.pop() if self.is_rounded else 0.0
        got_rows, exact_rows, plain = arrays[:3]
        terms = by_row.double().cpu().numpy()
        worst = SampledRows(got_rows, exact_rows, plain, terms, rounded).worst(
            str(dtype).removeprefix("torch.")
        )
        if worst is None:
            return []
        index = np.unravel_index(worst.head * cells[2] + worst.dim, exact.shape[1:] or (1,))
        where = entry(worst.row, *map(int, index[: exact.ndim - 1]))
        text = (
            f"{name}{where} is {worst.got!r}, and {worst.exact!r} by the recurrence in float64 (the "
            f"error may be {worst.limit:.3g})"
        )
        return [text]

    def token_fault(
        self, n: int, name: str, got: Tensor, exact: Tensor, noise: Tensor, local: list[int]
    ) -> list[str]:
        """Compare sampled tokens of an input's gradient, or of the outputs; see :meth:`fault`."""
        first = 0
        if isinstance(self.call.kernel, LinearAttention):
            first = self.head if n < 2 else self._heads.start

        def entry(row: int, *index: int) -> str:
            if isinstance(self.call.kernel, LinearAttention):
                index = (first, *index) if n < 2 else (first + index[0], *index[1:])
            return f"{[self.row, local[row], *index]} of {list(got.shape)}"

        return self.fault(name, self.of_token(n, got)[local], exact, noise, got.dtype, entry)

    def state_fault(self, name: str, got: Tensor, exact: Tensor) -> list[str]:
        """Compare a state, or a gradient of one, with it and its size; see :meth:`fault`."""
        first = self._heads.start if isinstance(self.call.kernel, LinearAttention) else 0
        entry = lambda row, *index: f"{[first + row, *index]}"  # noqa: E731 - as above
        return self.fault(name, got, exact[0], exact[1], self.call.dtype, entry)

    def bytes_fault(self, sent: int, order: int) -> list[str]:
        """Return a message if other bytes were sent in pass 1, or back in 2, than of states."""
        expected = self.call.traffic(self.inputs)[order] * (self.call.ranks.size - 1)
        if sent == expected:
            return []
        return [f"{sent:,} bytes were sent, and the states that travel have {expected:,}"]


def forward_faults(
    check: Check, entries: States, initial: Tensor | None, out: Tensor, final: Tensor, sent: int
) -> list[str]:
    """Check a forward on all ranks; return what this rank finds wrong.

    Args:
        check: What is compared.
        entries: State before each of this rank's runs that follow another, ``[B, *S]``, by the
            position of its first token.
        initial: Initial states ``[documents, B, *S]``; ``None`` for zeros.
        out: Outputs of this rank's tokens.
        final: Final states ``[documents, B, *S]``; of no documents if they are not wanted.
        sent: How many bytes the forward sent.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    kernel, starts = check.call.kernel, {}
    messages, exits = check.bytes_fault(sent, 1), []
    for run, tokens, samples in check.own():
        starts[run.start] = _start(check, run, entries, initial)
        walk = _forward(check, tokens, samples, starts[run.start])
        exits.append(torch.stack([walk.end, walk.size]))
        if samples:
            at = _rows(check, tokens, samples)
            state = _stepped(kernel, at, walk.states)
            size = torch.maximum(walk.sizes, _size(kernel, state))
            noise = _rms([outputs_of(kernel, at, x) for x in _errors(check, size)])
            local = [run.local + t for t in samples]
            exact = outputs_of(kernel, at, state) + _nan_in(tokens)
            messages += check.token_fault(kernel.values, "out", out, exact, noise, local)
    behind = check.told(exits)
    for before, run in zip(behind, check.runs[1:], strict=False):
        if run.rank == check.call.ranks.rank:
            name = f"the state before position {run.start}"
            messages += check.state_fault(name, starts[run.start], before)
    if len(final):
        state = check.of_state(final[check.document])
        messages += check.state_fault("final state", state, behind[-1])
    return messages


def backward_faults(
    check: Check, entries: States, exits: States, initial: Tensor | None,
    upstream: tuple[Tensor, Tensor], initial_grad: Tensor | None, grads: Sequence[Tensor], sent: int,
) -> list[str]:  # fmt: skip
    """Check a backward on all ranks; return what this rank finds wrong.

    Args:
        check: What is compared.
        entries: As of :func:`forward_faults`.
        exits: Gradient of the state behind each run, by the position behind its last token.
        initial: As of :func:`forward_faults`.
        upstream: This rank's gradients of the outputs, and of the final states: of no documents if
            there are none.
        initial_grad: Gradient of the initial states, if there are any.
        grads: Gradients of the inputs.
        sent: How many bytes the backward sent.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    kernel, first, last = check.call.kernel, check.runs[0], check.runs[-1]
    ranks = check.call.ranks
    messages, before, ends = check.bytes_fault(sent, 2), [], {}
    out_grad, final_grad = upstream
    row_grad = check.of_token(kernel.values, out_grad).double()
    total = check.zeros
    if len(final_grad):
        part = check.of_state(final_grad[check.document])
        total = torch.stack(exchange(ranks, [[part] * ranks.size], part.device)[0]).sum(0)
    for run, tokens, samples in check.own():
        own_grad = row_grad[run.local : run.local + run.length]
        ends[run.end] = check.of_state(exits[run.end]) if run.end in exits else check.zeros
        back = _backward(check, tokens, own_grad, samples, ends[run.end])
        before.append(torch.stack([back.end, back.size]))
        if not samples:
            continue
        ahead = _forward(check, tokens, samples, _start(check, run, entries, initial))
        at, at_grad = _rows(check, tokens, samples), own_grad[samples]
        exact = _token_grads(kernel, at, ahead.states, back.states, at_grad)
        size = torch.maximum(ahead.sizes, _size(kernel, _stepped(kernel, at, ahead.states)))
        # The gradient behind a token has its own output's part, too.
        behind = back.states + _read_grads(kernel, at, at_grad, check.zeros)
        grad_size = torch.maximum(back.sizes, _size(kernel, behind))
        moved = [
            _token_grads(kernel, at, ahead.states + x, back.states + y, at_grad, x)
            for x, y in zip(_errors(check, size), _errors(check, grad_size, 1), strict=True)
        ]
        local = [run.local + t for t in samples]
        for n, (name, fill) in enumerate(zip(kernel.inputs, kernel.fills, strict=True)):
            if fill is not None:
                noise = _rms([x[n] - exact[n] for x in moved])
                right = exact[n] + _nan_in([*tokens, own_grad])
                messages += check.token_fault(n, f"d{name}", grads[n], right, noise, local)
    if last.rank == ranks.rank:
        right = torch.stack([total, _size(kernel, total)])
        messages += check.state_fault("the gradient of the final state", ends[last.end], right)
    of_entries = check.told(before)
    for run, behind in zip(check.runs, of_entries[1:], strict=False):
        if run.rank == ranks.rank:
            name = f"the gradient of the state before position {run.end}"
            messages += check.state_fault(name, ends[run.end], behind)
    if initial_grad is not None and first.rank == ranks.rank:
        grad = check.of_state(initial_grad[check.document])
        messages += check.state_fault("the gradient of the initial state", grad, of_entries[0])
    return messages


def _start(check: Check, run: Run, entries: States, initial: Tensor | None) -> Tensor:
    """Return the state before a run: as the call has it, or that before the document."""
    if run != check.runs[0]:  # a call that has none began with zeros
        return check.of_state(entries[run.start]) if run.start in entries else check.zeros
    return check.zeros if initial is None else check.of_state(initial[check.document])


def maps_of(kernel: object, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the map ``S -> A S + B`` of each token, ``[n, ...]``, as the layer is defined."""
    if isinstance(kernel, LinearRecurrence):
        a, b = tokens
        return a, b
    if isinstance(kernel, SelectiveScan):
        u, delta, b, _, rates = tokens
        step = delta.unsqueeze(-1)
        return (step * rates).exp(), step * u.unsqueeze(-1) * _copied(b, u)
    assert isinstance(kernel, LinearAttention)
    _, k, v, *others = tokens
    k = _normed(kernel, k).unsqueeze(1)  # [n, 1, K], of all value heads
    decay = others[0].exp() if kernel.has_decay else torch.ones_like(v[..., 0])
    decay = decay if kernel.by_channel else decay.unsqueeze(-1)  # [n, HV, K or 1]
    if not kernel.is_delta:
        return decay.unsqueeze(-1), k.unsqueeze(-1) * v.unsqueeze(-2)
    beta = others[-1].unsqueeze(-1)
    taken = (beta * k).unsqueeze(-1) * (k * decay).unsqueeze(-2)
    kept = torch.diag_embed(decay.expand(*decay.shape[:2], k.shape[-1]))
    return kept - taken, k.unsqueeze(-1) * (beta * v).unsqueeze(-2)


def outputs_of(kernel: object, tokens: Sequence[Tensor], state: Tensor) -> Tensor:
    """Return the output of each token, ``[n, ...]``, of the state behind it."""
    if isinstance(kernel, LinearRecurrence):
        return state
    if isinstance(kernel, SelectiveScan):
        return (_copied(tokens[3], tokens[0]) * state).sum(-1)
    assert isinstance(kernel, LinearAttention)
    q = _normed(kernel, tokens[0])[:, None, None]
    return kernel.scale * (q @ state).squeeze(-2)


def _normed(kernel: LinearAttention, x: Tensor) -> Tensor:
    """Return rows of q or k, divided by their norms if that is asked for."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if kernel.normalizes else x


def _copied(x: Tensor, u: Tensor) -> Tensor:
    """Return projections of groups ``[n, G, N]`` for each channel of ``u``."""
    return x.repeat_interleave(u.shape[1] // x.shape[1], 1)


def _applied(kernel: object, a: Tensor, state: Tensor) -> Tensor:
    """Return ``A S``; products with another transition, likewise."""
    is_matrix = isinstance(kernel, LinearAttention) and kernel.is_delta
    return a @ state if is_matrix else a * state


def _stepped(kernel: object, tokens: Sequence[Tensor], state: Tensor) -> Tensor:
    """Return the state behind each token, of those before."""
    a, b = maps_of(kernel, tokens)
    return _applied(kernel, a, state) + b


def _read_grads(kernel: object, tokens: Sequence[Tensor], grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient that each token's output gives to the state behind it."""
    state = like.expand(len(grad), *like.shape)
    result: Tensor = torch.func.vjp(lambda s: outputs_of(kernel, tokens, s), state)[1](grad)[0]
    return result


def _token_grads(
    kernel: object, tokens: Sequence[Tensor], state: Tensor, grad: Tensor, out_grad: Tensor,
    error: Tensor | float = 0.0,
) -> Sequence[Tensor]:  # fmt: skip
    """Return the gradients of tokens' inputs, of the state before and the gradient behind each.

    ``error`` is added to the state behind each token.
    """

    def step(*tokens: Tensor) -> tuple[Tensor, Tensor]:
        after = _stepped(kernel, tokens, state) + error
        return outputs_of(kernel, tokens, after), after

    grads: Sequence[Tensor] = torch.func.vjp(step, *tokens)[1]((out_grad, grad))
    return grads


class Walk(NamedTuple):
    """States that a walk through a run has met.

    Attributes:
        states: State before each sampled token, ``[n, *S]``.
        sizes: How large entries of states were until then, likewise.
        end: State behind the last token.
        size: How large entries were in the whole run.
    """

    states: Tensor
    sizes: Tensor
    end: Tensor
    size: Tensor


def _walk(
    check: Check, length: int, stops: Sequence[int], state: Tensor,
    maps: Callable[[int, int], tuple[Tensor, Tensor]],
) -> Walk:  # fmt: skip
    """Go through a run, from one sampled token to the next; ``maps`` are those of some tokens."""
    kernel = check.call.kernel
    is_delta = isinstance(kernel, LinearAttention) and kernel.is_delta
    numbers = state.numel() + (state.shape[-2] ** 2 * len(state) if is_delta else state.numel())
    block = max(1, min(_MOST_TOKENS, _BLOCK_BYTES // (8 * numbers)))
    size, states, sizes, at = _size(kernel, state), [], [], 0
    for stop in (*stops, length):
        while at < stop:
            end = min(at + block, stop)
            a, b = maps(at, end)
            while len(a) > 1:  # multiply neighbours, until one map is left
                even = len(a) // 2 * 2
                first, late = a[0:even:2], a[1:even:2]
                b = torch.cat([_applied(kernel, late, b[0:even:2]) + b[1:even:2], b[even:]])
                a = torch.cat([_applied(kernel, late, first), a[even:]])
            state = _applied(kernel, a[0], state) + b[0]
            size, at = torch.maximum(size, _size(kernel, state)), end
        states.append(state)
        sizes.append(size)
    kept = len(stops)
    return Walk(torch.stack(states)[:kept], torch.stack(sizes)[:kept], state, size)


def _forward(check: Check, tokens: list[Tensor], samples: list[int], start: Tensor) -> Walk:
    """Walk through a run from its entry state."""
    kernel = check.call.kernel

    def maps(first: int, end: int) -> tuple[Tensor, Tensor]:
        return maps_of(kernel, _rows(check, tokens, slice(first, end)))

    return _walk(check, len(tokens[0]), samples, start.double(), maps)


def _backward(
    check: Check, tokens: list[Tensor], grad: Tensor, samples: list[int], end: Tensor
) -> Walk:
    """Walk back through a run, from the gradient of the state behind it."""
    kernel, length = check.call.kernel, len(tokens[0])

    def maps(first: int, last: int) -> tuple[Tensor, Tensor]:
        part = slice(length - last, length - first)
        own = _rows(check, tokens, part)
        a = maps_of(kernel, own)[0]
        a = a.mT if isinstance(kernel, LinearAttention) and kernel.is_delta else a
        back = _applied(kernel, a, _read_grads(kernel, own, grad[part], end.double()))
        return a.flip(0), back.flip(0)

    stops = [length - 1 - t for t in reversed(samples)]
    walk = _walk(check, length, stops, end.double(), maps)
    return Walk(walk.states.flip(0), walk.sizes.flip(0), walk.end, walk.size)


def _rows(check: Check, tokens: Sequence[Tensor], rows: slice | list[int]) -> list[Tensor]:
    """Return some tokens of a run."""
    fills = check.call.kernel.fills
    return [x if fill is None else x[rows] for x, fill in zip(tokens, fills, strict=True)]


def _size(kernel: object, state: Tensor) -> Tensor:
    """Return how large a state's entries are: by entry, or by head where products mix them."""
    if isinstance(kernel, LinearAttention):
        return state.double().square().mean((-2, -1), keepdim=True).sqrt().expand(state.shape)
    return state.double().abs()


def _errors(check: Check, size: Tensor, which: int = 0) -> Iterator[Tensor]:
    """Draw errors of states of a size, some times; torch's own random numbers stay."""
    generator = torch.Generator(size.device).manual_seed(2 * check.call.checked + which)
    for _ in range(_DRAWS):
        draw = torch.randn(size.shape, generator=generator, dtype=size.dtype, device=size.device)
        yield size * draw


def _rms(errors: Sequence[Tensor]) -> Tensor:
    """Return the root of the mean square of errors."""
    return torch.stack(list(errors)).square().mean(0).sqrt()


def _nan_in(tokens: Sequence[Tensor]) -> float:
    """Return NaN if there is one among the tokens, near which a chunk's outputs are NaN; else 0."""
    return torch.nan if any(bool(x.isnan().any()) for x in tokens) else 0.0
