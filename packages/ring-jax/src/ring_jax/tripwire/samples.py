"""Some rows of a call's results, asked of all ranks, and compared on the host.

Every rank shows the others its rows, computes for theirs over its own keys, and gets back what
belongs to its own. What each has found is gathered, so that the hosts of all ranks see the same,
and raise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ring_core import WrongResultError
from ring_core.base.arguments import not_none
from ring_core.tripwire import SAMPLES, Kind, SampledRows, result_shapes
from ring_jax.collectives import Ranks
from ring_jax.rank_view import all_positions, local_positions
from ring_jax.records import Array, Inputs, Static
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
from ring_jax.tripwire.settings import Turn, mixed

#: Got, exact, plain, size of terms and what was rounded, of each name, as ``SampledRows``.
Results = dict[str, tuple[Array, ...]]
_KINDS: tuple[Kind, ...] = ("queries", "keys")


def check_forward(turn: Turn, static: Static, inputs: Inputs, out: Array, lse: Array) -> None:
    """Check a forward, if it is this call's turn: ``out [B, T, H, Dv]`` and ``lse [B, H, T]``."""

    def run() -> None:
        sample = _Sample.of(static, inputs, turn.number)
        b, rows = sample.batch, sample.own("queries")
        exact, plain = sample.means(None)
        size = jnp.broadcast_to(_largest(inputs.v), (SAMPLES,))
        of_lse = (x[..., None] for x in (lse[b][:, rows].T, exact.lse, plain.lse))
        results: Results = {
            "out": (out[b, rows], exact.means, plain.means.astype(out.dtype), size, jnp.sqrt(plain.squares)),
            "lse": (*of_lse, jnp.ones(SAMPLES), jnp.zeros((*plain.lse.shape, 1))),
        }  # fmt: skip
        sample.compare("forward", {"queries": results})

    turn.run(partial(_in_float64, run), lambda: None)


def check_backward(
    turn: Turn, static: Static, inputs: Inputs, results: tuple[Array, Array], upstream: tuple[Array, Array],
    grads: tuple[Array, Array, Array],
) -> None:  # fmt: skip
    """Check a backward, if it is this call's turn.

    Args:
        turn: Of the call.
        static: The call.
        inputs: This rank's.
        results: The forward's ``out [B, T, H, Dv]`` and ``lse [B, H, T]``.
        upstream: Their gradients.
        grads: dQ, dK and dV, ``[B, T, heads, D]``.
    """

    def run() -> None:
        sample = _Sample.of(static, inputs, turn.number)
        b, rows, columns = sample.batch, sample.own("queries"), sample.own("keys")
        (dout, _), (dq, dk, dv) = upstream, grads
        lengths = jnp.linalg.norm(dout[b, rows].astype(jnp.float64), axis=-1).max(axis=-1)
        # A backward computes exp(scores - lse) anew: as many digits are lost as these numbers have.
        lse = results[1][b].astype(jnp.float64)
        digits = 1 + jnp.abs(jnp.where(jnp.isfinite(lse), lse, 0))
        scale, v_long = abs(static.scale), _longest(inputs.v)
        size = scale * lengths * _largest(inputs.k) * v_long * digits[:, rows].max(axis=0)
        exact_dq, plain_dq, rounded = sample.dq(results, upstream)
        q_side: Results = {"dq": (dq[b, rows], exact_dq, plain_dq, size, rounded)}
        exact, plain = sample.key_sums(results, upstream)
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

    turn.run(partial(_in_float64, run), lambda: None)


def _in_float64(run: Callable[[], None]) -> None:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        run()


class _Sample(NamedTuple):
    """One batch row of a call, and four queries and keys of each rank."""

    static: Static
    inputs: Inputs
    number: Array
    batch: Array  # which row
    rule: Rule

    @classmethod
    def of(cls, static: Static, x: Inputs, number: Array) -> _Sample:
        batch = (number % jnp.uint32(x.q.shape[0])).astype(jnp.int32)
        slopes = None if x.slopes is None else x.slopes[batch % len(x.slopes)]
        offsets = jnp.zeros(2, jnp.int32) if x.offsets is None else x.offsets
        rule = Rule(
            static.plan.mask, static.scale, static.softcap, static.dropout_p, slopes, x.seed,
            batch + offsets[0], offsets[1],
        )  # fmt: skip
        return cls(static, x, number, batch, rule)

    @property
    def ring(self) -> Ranks:
        return Ranks(self.static.axis_name, self.static.plan.cp_size)

    def of_all(self, kind: Kind) -> Array:
        """Local indices of the samples of all ranks, int32 ``[P, 4]``."""
        plan, size = self.static.plan, self.ring.size
        length = (plan.q_layout if kind == "queries" else plan.k_layout).local_len
        counts = jnp.arange(size * SAMPLES, dtype=jnp.uint32).reshape(size, SAMPLES)
        numbers = counts + jnp.uint32(0x9E3779B9) * jnp.uint32(1 + _KINDS.index(kind))
        return (mixed(numbers ^ self.number) % jnp.uint32(length)).astype(jnp.int32)

    def own(self, kind: Kind) -> Array:
        return self.of_all(kind)[self.ring.rank()]

    def positions(self, kind: Kind) -> Array:
        """Global indices of the samples of all ranks, int32 ``[P * 4]``."""
        plan = self.static.plan
        layout = plan.q_layout if kind == "queries" else plan.k_layout
        return jnp.take_along_axis(all_positions(layout), self.of_all(kind), axis=1).reshape(-1)

    def means(self, dout: Array | None) -> tuple[Partial, Partial]:
        """Of this rank's queries over all keys and sinks: exact, and by a plain implementation."""
        x, b, plan, ring = self.inputs, self.batch, self.static.plan, self.ring
        rows, indices = self.own("queries"), self.positions("queries")
        queries = SampledQueries(
            ring.gather(x.q[b, rows], 0), indices, indices + plan.q_offset,
            None if x.q_ids is None else ring.gather(x.q_ids[b, rows], 0), self._bias_of(rows),
            None if x.bias_shift is None else ring.gather(self._shift()[rows], 0),
            None if dout is None else ring.gather(dout[b, rows], 0),
        )  # fmt: skip
        keys = SampledKeys(
            x.k[b], x.v[b], local_positions(plan.k_layout, ring.rank()),
            None if x.k_ids is None else x.k_ids[b],
        )  # fmt: skip

        def means(precision: Precision) -> Partial:
            parts = query_means(self.rule, queries, keys, precision)
            whole = merged(Partial(*(self._home(y) for y in parts)))
            return whole if x.sinks is None else whole.with_sinks(x.sinks)

        return means(EXACT), means(plain_precision(self.static.dtype))

    def dq(
        self, results: tuple[Array, Array], upstream: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """The gradients of this rank's queries: exact, by a plain implementation, what it rounds.

        Both take delta from ``out`` as the forward rounded it, which is all that a backward has;
        so do those of keys. An exact delta would differ by one number a row and head. In the
        plain gradients it can vanish behind other roundings by chance, and twice their error is
        no bound of it.
        """
        b, rows = self.batch, self.own("queries")
        dout, out = (y[b, rows].astype(jnp.float64) for y in (upstream[0], results[0]))
        dlse = upstream[1][b][:, rows].T.astype(jnp.float64)[..., None]
        delta = (dout * out).sum(axis=-1, keepdims=True) - dlse
        scale, (exact, plain) = self.static.scale, self.means(upstream[0])
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
        """Compute :func:`key_sums` for this rank's keys: exact, and plain."""
        x, b, plan, ring = self.inputs, self.batch, self.static.plan, self.ring
        columns, position = self.own("keys"), self.positions("keys")
        keys = SampledKeys(
            ring.gather(x.k[b, columns], 0), ring.gather(x.v[b, columns], 0), position,
            None if x.k_ids is None else ring.gather(x.k_ids[b, columns], 0),
        )  # fmt: skip
        indices, bias = local_positions(plan.q_layout, ring.rank()), None
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
            return self._home(parts).sum(axis=0)

        return sums(EXACT), sums(plain_precision(self.static.dtype))

    def _bias_of(self, rows: Array) -> Array | None:
        """The bias of all ranks' samples for this rank's keys, ``[P * 4, H or 1, m]``."""
        x = self.inputs
        if x.bias is None:
            return None
        mine = jnp.moveaxis(x.bias[self.batch % len(x.bias)][:, rows], 1, 0)
        parts = jnp.moveaxis(
            jnp.take(mine, all_positions(self.static.plan.k_layout), axis=2), 2, 0
        )  # [P, 4, H or 1, m]
        return lax.collapse(self._all_to_all(parts), 0, 2)

    def _shift(self) -> Array:
        """Return the shift of the bias of this rank's queries, ``[T, H or 1]``."""
        shift = not_none(self.inputs.bias_shift)
        return shift[self.batch % len(shift)].T

    def _home(self, x: Array) -> Array:
        """What all ranks have found of this rank's samples, ``[P, 4, ...]``."""
        return self._all_to_all(x.reshape(self.ring.size, SAMPLES, *x.shape[1:]))

    def _all_to_all(self, x: Array) -> Array:
        """Part ``n`` goes to rank ``n``."""
        if self.static.axis_name is None:
            return x
        return cast("Array", lax.all_to_all(x, self.static.axis_name, 0, 0, tiled=True))

    def compare(self, which: str, results: dict[Kind, Results]) -> None:
        """Show the hosts of all ranks what was found; they compare and raise."""
        names = [(kind, name) for kind, found in results.items() for name in found]
        arrays = [
            self.ring.gather(self._for_host(x)[None], 0)
            for kind, name in names
            for x in results[kind][name]
        ]
        shapes = result_shapes(*(x.shape for x in self.inputs[:3]))
        jax.debug.callback(
            partial(_compare, self.static, which, shapes, names),
            self.number, self.batch, *(self.of_all(kind) for kind in _KINDS), *arrays,
        )  # fmt: skip

    def _for_host(self, x: Array) -> Array:
        """A float64 as two float32, which callbacks take where jax has no 64 bits."""
        x = x.astype(jnp.float64)
        if self.static.dtype == "float64":
            return x
        high = x.astype(jnp.float32)
        low = jnp.where(jnp.isfinite(high), x - high.astype(jnp.float64), 0)
        return jnp.stack([high, low.astype(jnp.float32)])


def _compare(
    static: Static, which: str, shapes: Mapping[str, tuple[int, ...]], names: Sequence[tuple[Kind, str]],
    number: Any, batch: Any, *arrays: Any,
) -> None:  # fmt: skip
    picked = dict(zip(_KINDS, arrays[:2], strict=True))
    found = []
    for n, (kind, name) in enumerate(names):
        parts = [_joined(static.dtype, x) for x in arrays[2 + 5 * n : 7 + 5 * n]]
        for rank, rows in enumerate(zip(*parts, strict=True)):
            worst = SampledRows(*rows).worst(static.dtype)
            if worst is not None:
                token = int(picked[kind][rank][worst.row])
                text = worst.describe(name, int(batch), token, shapes[name])
                found.append(f"rank {rank}: {text}")
    if found:
        raise WrongResultError(
            f"call {int(number):08x} ({which}) is wrong. {'; '.join(found)}. {_described(static)}. "
            f"Every rank raises this. To find out more: python -m ring_jax doctor, and the same "
            f"call with kernel='xla' and strategy='ring'"
        )


def _described(static: Static) -> str:
    kernels = ", ".join(repr(kernel.capabilities.name) for kernel in static.kernels)
    return (
        f"Kernel {kernels}, strategy {static.strategy!r}, layout "
        f"{str(static.plan.q_layout.name)!r}, mask {static.plan.mask.describe()!r}, "
        f"{static.plan.cp_size} ranks"
    )


def _joined(dtype: str, x: Any) -> npt.NDArray[np.float64]:
    """``[P, ...]`` in float64, from one array or from pairs."""
    found: npt.NDArray[np.float64] = np.asarray(x, np.float64)
    return found if dtype == "float64" else found[:, 0] + found[:, 1]


def _largest(x: Array) -> Array:
    size = jnp.abs(x.astype(jnp.float64))
    return jnp.where(jnp.isfinite(size), size, 0).max()


def _longest(x: Array) -> Array:
    """The largest length of a finite vector of the last dimension."""
    size = jnp.linalg.norm(x.astype(jnp.float64), axis=-1)
    return jnp.where(jnp.isfinite(size), size, 0).max()
