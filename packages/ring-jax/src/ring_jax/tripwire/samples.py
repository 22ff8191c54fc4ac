"""Sample rows of a call's results, compute them again over all ranks, and compare on the host.

Every rank gathers the sampled rows of all ranks, computes their attention over its own keys, and
sends the results back to each row's rank, which merges them. The merged rows and the call's own are
gathered: the hosts of all ranks compare the same numbers and raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ring_core import WrongResultError
from ring_core.base.arguments import not_none
from ring_core.tripwire import SAMPLES, Kind, SampledRows, result_shapes
from ring_jax.collectives import Ranks
from ring_jax.positions import all_positions, local_positions
from ring_jax.rank_view import is_padding, ranks_of
from ring_jax.records import Array, CallSpec, Inputs
from ring_jax.tripwire.dense import (
    EXACT,
    Partial,
    Precision,
    Rule,
    SampledKeys,
    SampledQueries,
    key_sums,
    merged,
    plain_precision,
    query_means,
)
from ring_jax.tripwire.settings import CheckedCall, mixed

#: The fields of a ``SampledRows`` by name of the result: the call's rows, exact and plain ones, the
#: size of the terms that they are sums of, and the size of what was rounded.
Results = dict[str, tuple[Array, ...]]
_KINDS: tuple[Kind, ...] = ("queries", "keys")


def check_forward(
    checked_call: CheckedCall, call: CallSpec, inputs: Inputs, out: Array, lse: Array
) -> None:
    """Check ``out [B, T, H, Dv]`` and ``lse [B, H, T]`` of a forward, if this call is checked."""

    def run() -> None:
        sample = _Sample.of(call, inputs, checked_call.number)
        b, rows = sample.batch, sample.own("queries")
        exact, plain = sample.means(None)
        size = jnp.broadcast_to(_largest(inputs.v), (SAMPLES,))
        lse_rows = (x[..., None] for x in (lse[b][:, rows].T, exact.lse, plain.lse))
        results: Results = {
            "out": (out[b, rows], exact.means, plain.means.astype(out.dtype), size, jnp.sqrt(plain.squares)),
            "lse": (*lse_rows, jnp.ones(SAMPLES), jnp.zeros((*plain.lse.shape, 1))),
        }  # fmt: skip
        sample.compare("forward", {"queries": results})

    checked_call.run(partial(_in_float64, run), lambda: None)


def check_backward(
    checked_call: CheckedCall, call: CallSpec, inputs: Inputs, results: tuple[Array, Array],
    upstream: tuple[Array, Array], grads: tuple[Array, Array, Array],
) -> None:  # fmt: skip
    """Check the gradients of a backward, if this call is checked.

    Args:
        checked_call: The number of the call.
        call: The call.
        inputs: This rank's arrays.
        results: The forward's ``out [B, T, H, Dv]`` and ``lse [B, H, T]``.
        upstream: The gradients of ``out`` and ``lse``.
        grads: dQ, dK and dV, ``[B, T, heads, D]``.
    """

    def run() -> None:
        sample = _Sample.of(call, inputs, checked_call.number)
        b, rows, columns = sample.batch, sample.own("queries"), sample.own("keys")
        (dout, _), (dq, dk, dv) = upstream, grads
        lengths = jnp.linalg.norm(dout[b, rows].astype(jnp.float64), axis=-1).max(axis=-1)
        # A backward computes exp(scores - lse) again, and loses as many digits as lse has.
        lse = results[1][b].astype(jnp.float64)
        digits = 1 + jnp.abs(jnp.where(jnp.isfinite(lse), lse, 0))
        scale, v_long = abs(call.scale), _longest(inputs.v)
        size = scale * lengths * _largest(inputs.k) * v_long * digits[:, rows].max(axis=0)
        exact_dq, plain_dq, rounded = sample.dq(results, upstream)
        q_side: Results = {"dq": (dq[b, rows], exact_dq, plain_dq, size, rounded)}
        exact, plain = sample.key_sums(results, upstream)
        # Gradients of a key are as large as the weights that all queries together give it.
        weights = exact[..., -1].max(axis=-1) * digits.max()
        long, dim = _longest(dout), inputs.k.shape[3]
        cuts = (dim, dim + inputs.v.shape[3], 2 * dim + inputs.v.shape[3])
        exact_dk, exact_dv, *_ = jnp.split(exact[..., :-1], cuts, axis=-1)
        plain_dk, plain_dv, dk_squares, dv_squares = jnp.split(plain[..., :-1], cuts, axis=-1)
        dk_size = scale * weights * long * v_long * _largest(inputs.q)
        k_side: Results = {
            "dk": (dk[b, columns], exact_dk, plain_dk.astype(dk.dtype), dk_size, jnp.sqrt(dk_squares)),
            "dv": (dv[b, columns], exact_dv, plain_dv.astype(dv.dtype), weights * long, jnp.sqrt(dv_squares)),
        }  # fmt: skip
        sample.compare("backward", {"queries": q_side, "keys": k_side})

    checked_call.run(partial(_in_float64, run), lambda: None)


def _in_float64(run: Callable[[], None]) -> None:
    """Run a function with 64-bit types, whatever the user's settings."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        run()


class _Sample(NamedTuple):
    """A batch row of a call, and four queries and four keys of each rank."""

    call: CallSpec
    inputs: Inputs
    number: Array  # of the CheckedCall, which decides on rows
    batch: Array  # int32, local index of the batch row
    rule: Rule

    @classmethod
    def of(cls, call: CallSpec, x: Inputs, number: Array) -> _Sample:
        """Choose the batch row of a call by its number, the same on all ranks."""
        batch = (number % jnp.uint32(x.q.shape[0])).astype(jnp.int32)
        slopes = None if x.slopes is None else x.slopes[batch % len(x.slopes)]
        first_row = 0 if x.numbers is None else x.numbers[0]
        heads = None if x.numbers is None else x.numbers[1:]
        rule = Rule(call, slopes, x.seed, batch + first_row, heads)
        return cls(call, x, number, batch, rule)

    @property
    def ranks(self) -> Ranks:
        """The devices that share the sequence."""
        return ranks_of(self.call)

    def all_indices(self, kind: Kind) -> Array:
        """Return the local indices of the samples of all ranks, int32 ``[P, 4]``."""
        plan, size = self.call.plan, self.ranks.size
        length = (plan.q_layout if kind == "queries" else plan.k_layout).local_len
        counts = jnp.arange(size * SAMPLES, dtype=jnp.uint32).reshape(size, SAMPLES)
        # Hashed on every device alike, so that no message says which rows are checked.
        numbers = counts + jnp.uint32(0x9E3779B9) * jnp.uint32(1 + _KINDS.index(kind))
        return (mixed(numbers ^ self.number) % jnp.uint32(length)).astype(jnp.int32)

    def own(self, kind: Kind) -> Array:
        """Return the local indices of this rank's samples, int32 ``[4]``."""
        return self.all_indices(kind)[self.ranks.rank()]

    def positions(self, kind: Kind) -> Array:
        """Return the global indices of the samples of all ranks, int32 ``[P * 4]``."""
        plan = self.call.plan
        layout = plan.q_layout if kind == "queries" else plan.k_layout
        indices = self.all_indices(kind)
        return jnp.take_along_axis(all_positions(layout), indices, axis=1).reshape(-1)

    def means(self, dout: Array | None) -> tuple[Partial, Partial]:
        """Compute :func:`query_means` of this rank's samples over all keys and sinks.

        Returns:
            The exact means, and those of a plain implementation.
        """
        x, b, plan, ranks = self.inputs, self.batch, self.call.plan, self.ranks
        rows, indices = self.own("queries"), self.positions("queries")
        # Every rank gets the samples of all ranks ...
        queries = SampledQueries(
            ranks.gather(x.q[b, rows], 0), indices, indices + plan.q_offset,
            None if x.q_ids is None else ranks.gather(x.q_ids[b, rows], 0), self._bias_of(rows),
            None if x.bias_shift is None else ranks.gather(self._shift()[rows], 0),
            None if dout is None else ranks.gather(dout[b, rows], 0),
        )  # fmt: skip
        keys = SampledKeys(
            x.k[b], x.v[b], local_positions(plan.k_layout, ranks.rank()),
            None if x.k_ids is None else x.k_ids[b],
        )  # fmt: skip

        # ... meets them with its own keys, and sends each part to the sample's rank, to be merged.
        def means(precision: Precision) -> Partial:
            # Parts of all samples over own keys become those of own samples over each rank's keys.
            parts = query_means(self.rule, queries, keys, precision)
            total = merged(Partial(*(self._return_to_owner(y) for y in parts)))
            if x.sinks is None:
                return total
            total = total.with_sinks(x.sinks)
            padding = is_padding(self.call)[rows]  # it sees no sink either
            return total._replace(lse=jnp.where(padding[:, None], -jnp.inf, total.lse))

        return means(EXACT), means(plain_precision(self.call.dtype))

    def dq(
        self, results: tuple[Array, Array], upstream: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Compute dQ of this rank's samples.

        Delta comes from ``out`` as the forward rounded it, which is all that a backward has, here
        and in :meth:`key_sums`. An exact delta would differ by one number a row and head; in the
        plain gradients that difference can vanish behind other roundings by chance, so that twice
        their error would not bound it.

        Returns:
            The exact dQ, that of a plain implementation, and the size of what that one rounds.
        """
        b, rows = self.batch, self.own("queries")
        dout, out = (y[b, rows].astype(jnp.float64) for y in (upstream[0], results[0]))
        dlse = upstream[1][b][:, rows].T.astype(jnp.float64)[..., None]
        delta = (dout * out).sum(axis=-1, keepdims=True) - dlse
        scale, (exact, plain) = self.call.scale, self.means(upstream[0])
        dq = [
            scale * (first - delta * second)
            for first, second in (
                jnp.split(x.means.astype(jnp.float64), 2, axis=-1) for x in (exact, plain)
            )
        ]
        first, second = jnp.split(jnp.sqrt(plain.squares.astype(jnp.float64)), 2, axis=-1)
        rounded = abs(scale) * (first + jnp.abs(delta) * second)
        return dq[0], dq[1].astype(self.inputs.q.dtype), rounded

    def key_sums(
        self, results: tuple[Array, Array], upstream: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Compute :func:`key_sums` of this rank's samples over all queries: exact, and plain."""
        x, b, plan, ranks = self.inputs, self.batch, self.call.plan, self.ranks
        columns, position = self.own("keys"), self.positions("keys")
        # As in `means` with the sides exchanged: every rank gets the keys that are samples, meets
        # them with its own queries, and sends the sums to their ranks, where they add up.
        keys = SampledKeys(
            ranks.gather(x.k[b, columns], 0), ranks.gather(x.v[b, columns], 0), position,
            None if x.k_ids is None else ranks.gather(x.k_ids[b, columns], 0),
        )  # fmt: skip
        indices, bias = local_positions(plan.q_layout, ranks.rank()), None
        if x.bias is not None:
            bias = jnp.moveaxis(jnp.take(x.bias[b % len(x.bias)], position, axis=2), 0, 1)
        queries = SampledQueries(
            x.q[b], indices, indices + plan.q_offset, None if x.q_ids is None else x.q_ids[b],
            bias, None if x.bias_shift is None else self._shift(), upstream[0][b],
        )  # fmt: skip
        wide = [y[b].astype(jnp.float64) for y in (upstream[0], results[0], upstream[1])]
        delta = (wide[0] * wide[1]).sum(axis=-1) - wide[2].T

        def sums(precision: Precision) -> Array:
            parts = key_sums(self.rule, queries, keys, results[1][b].T, delta, precision)
            return self._return_to_owner(parts).sum(axis=0)

        return sums(EXACT), sums(plain_precision(self.call.dtype))

    def _bias_of(self, rows: Array) -> Array | None:
        """Return the bias of all ranks' samples for this rank's keys, ``[P * 4, H or 1, m]``."""
        x = self.inputs
        if x.bias is None:
            return None
        # A rank has its own rows of the bias, with the columns of all keys. It sends each rank the
        # columns of that rank's keys, and gets those of its own keys for the samples of all.
        own_rows = jnp.moveaxis(x.bias[self.batch % len(x.bias)][:, rows], 1, 0)
        parts = jnp.moveaxis(
            jnp.take(own_rows, all_positions(self.call.plan.k_layout), axis=2), 2, 0
        )  # [P, 4, H or 1, m]
        return lax.collapse(self.ranks.trade(parts, 0, 0), 0, 2)

    def _shift(self) -> Array:
        """Return the shift of the bias of this rank's queries, ``[T, H or 1]``."""
        shift = not_none(self.inputs.bias_shift)
        return shift[self.batch % len(shift)].T

    def _return_to_owner(self, x: Array) -> Array:
        """Send parts ``[P * 4, ...]`` to the samples' ranks.

        Returns:
            The parts of all ranks for this rank's samples, ``[P, 4, ...]``.
        """
        return self.ranks.trade(x.reshape(self.ranks.size, SAMPLES, *x.shape[1:]), 0, 0)

    def compare(self, direction: str, results: dict[Kind, Results]) -> None:
        """Pass the results of all ranks to every rank's host, which compares and raises."""
        # Every rank gets the results of all, so that all processes raise the same error.
        names = [(kind, name) for kind, by_name in results.items() for name in by_name]
        arrays = [
            self.ranks.gather(self._for_host(x)[None], 0)
            for kind, name in names
            for x in results[kind][name]
        ]
        shapes = result_shapes(*(x.shape for x in self.inputs[:3]))
        jax.debug.callback(
            partial(_compare_rows, self.call, direction, shapes, names),
            self.number, self.batch, *(self.all_indices(kind) for kind in _KINDS), *arrays,
        )  # fmt: skip

    def _for_host(self, x: Array) -> Array:
        """Split float64 into two float32, as callbacks take no float64 if JAX has no 64 bits."""
        x = x.astype(jnp.float64)
        if self.call.dtype == "float64":
            return x
        high = x.astype(jnp.float32)
        low = jnp.where(jnp.isfinite(high), x - high.astype(jnp.float64), 0)
        return jnp.stack([high, low.astype(jnp.float32)])


def _compare_rows(
    call: CallSpec, direction: str, shapes: Mapping[str, tuple[int, ...]], names: Sequence[tuple[Kind, str]],
    number: Any, batch: Any, *arrays: Any,
) -> None:  # fmt: skip
    """Raise ``WrongResultError`` if a row of any rank is wrong; runs on the host.

    ``arrays`` are the local indices of queries and of keys, and five arrays for each of ``names``.
    """
    indices = dict(zip(_KINDS, arrays[:2], strict=True))
    faults = []
    for n, (kind, name) in enumerate(names):
        fields = [_joined(call.dtype, x) for x in arrays[2 + 5 * n : 7 + 5 * n]]
        for rank, rows in enumerate(zip(*fields, strict=True)):
            worst = SampledRows(*rows).worst(call.dtype)
            if worst is not None:
                token = int(indices[kind][rank][worst.row])
                text = worst.describe(name, int(batch), token, shapes[name])
                faults.append(f"rank {rank}: {text}")
    if faults:
        raise WrongResultError(
            f"call {int(number):08x} ({direction}) is wrong. {'; '.join(faults)}. {_described(call)}. "
            f"Every rank raises this. To find out more: python -m ring_jax doctor, and the same "
            f"call with kernel='xla' and strategy='ring'"
        )


def _described(call: CallSpec) -> str:
    """Return the part of the error that names kernel, strategy, layout, mask and ranks."""
    kernels = ", ".join(repr(kernel.capabilities.name) for kernel in call.kernels)
    return (
        f"Kernel {kernels}, strategy {call.strategy!r}, layout "
        f"{str(call.plan.q_layout.name)!r}, mask {call.plan.mask.describe()!r}, "
        f"{call.plan.cp_size} ranks"
    )


def _joined(dtype: str, x: Any) -> npt.NDArray[np.float64]:
    """Undo :meth:`_Sample._for_host` on the host: ``[P, ...]`` in float64."""
    wide: npt.NDArray[np.float64] = np.asarray(x, np.float64)
    return wide if dtype == "float64" else wide[:, 0] + wide[:, 1]


def _largest(x: Array) -> Array:
    """Return the largest finite magnitude of an array."""
    size = jnp.abs(x.astype(jnp.float64))
    return jnp.where(jnp.isfinite(size), size, 0).max()


def _longest(x: Array) -> Array:
    """Return the largest norm of the finite vectors along the last dimension."""
    size = jnp.linalg.norm(x.astype(jnp.float64), axis=-1)
    return jnp.where(jnp.isfinite(size), size, 0).max()
