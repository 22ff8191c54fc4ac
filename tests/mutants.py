"""Mutants: patches that break the backends on purpose, each of which a test must notice."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from ring_core import finalize
from ring_core.masks import band as _band
from ring_core.plan import geometry as _geometry, plan as _plan
from ring_core.programs import gather as _gather, grid as _grid, ring as _ring
from ring_core.reference import item_kernel, simulated_ranks, simulator

Patches = list[tuple[Any, str, Any]]


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Apply a mutant while this context lasts."""
    if name is None:
        yield
        return
    _plan._make_plan.cache_clear()
    try:
        with ExitStack() as stack:
            for target, attribute, replacement in (
                MUTANTS | GATHERED_MUTANTS | JAX_GATHERED_MUTANTS | GROUP_MUTANTS | HEAD_MUTANTS
                | BUFFER_MUTANTS | HARMLESS
            )[name]():  # fmt: skip
                stack.enter_context(patch.object(target, attribute, replacement))
            yield
    finally:
        _plan._make_plan.cache_clear()


def _torch(name: str) -> Any:
    """Import a module of ring_torch; return None if torch is not installed."""
    return _installed(f"ring_torch.{name}", ("torch", "ring_torch"))


def _jax(name: str) -> Any:
    """Import a module of ring_jax; return None if jax is not installed."""
    return _installed(f"ring_jax.{name}", ("jax", "ring_jax"))


def _installed(module: str, needs: tuple[str, ...]) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in needs:
            raise
        return None


def _window_off_by_one() -> Patches:
    right = _band.local_band

    def wrong(q_start: Any, k_start: Any, stride: int, band: Any) -> Any:
        left, right_side = band
        return right(q_start, k_start, stride, (None if left is None else left + 1, right_side))

    return [(_band, "local_band", wrong)]


def _last_step_dropped() -> Patches:
    items = _ring.RingProgram.items

    def wrong(program: Any, rank: int, step: int) -> Any:
        return () if step == program.num_steps - 1 > 0 else items(program, rank, step)

    patches: Patches = [(_ring.RingProgram, "items", wrong)]
    if sides := _jax("rank_view"):
        right = sides.step_table

        def tables(program: Any, step: int) -> Any:
            table = right(program, step)
            if step < program.num_steps - 1 or step == 0:
                return table
            return table._replace(own=table.own[:, :0], peer=table.peer[:, :0], helpers=())

        users = (_jax("strategies.ring"), _jax("strategies.steps"))
        patches += [(user, "step_table", tables) for user in users]
    return patches


def _ring_reversed() -> Patches:
    def rotate(held: Any, hop: int | None) -> Any:
        return held if hop is None else [held[(r + hop) % len(held)] for r in range(len(held))]

    patches: Patches = [(simulator, "_hop", rotate)]
    if comm := _torch("comm.ranks"):

        def start(ring: Any, sends: Any, receives: Any) -> Any:
            def turned(pairs: Any) -> Any:
                return [(tensor, (2 * ring.rank - peer) % ring.size) for tensor, peer in pairs]

            return right(ring, turned(sends), turned(receives))

        right = comm.Ranks.start
        patches.append((comm.Ranks, "start", start))
    if ring := _jax("collectives"):
        move = ring.Ranks.move

        def back(ring: Any, x: Any, hop: int, receivers: Any = None) -> Any:
            return move(ring, x, -hop, receivers)

        patches.append((ring.Ranks, "move", back))
    return patches


def _merge_without_rescale() -> Patches:
    def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        visible = ~np.isneginf(lse_b)[..., None]
        return out_a + np.where(visible, out_b, 0), np.logaddexp(lse_a, lse_b)

    patches: Patches = [(simulator, "merge", merge)]

    def add_up(state: Any, out: Any, lse: Any) -> None:
        state.out.add_(out)
        state.lse.copy_(state.lse.logaddexp(lse))

    patches += _torch_merges(lambda _: add_up)
    if ring := _jax("strategies.ring"):
        import jax.numpy as jnp

        def added(a: Any, b: Any) -> Any:
            return ring.AttentionState(a.out + b.out, jnp.logaddexp(a.lse, b.lse))

        patches.append((ring, "merge", added))
    return patches


def _torch_merges(change: Callable[[Any], Any]) -> Patches:
    """Change torch's merge in the modules that merge; none if torch is not installed."""
    users = (_torch("accumulate"), _torch("kernels.sdpa"))
    name = "merge_in_torch"
    return [(user, name, change(getattr(user, name))) for user in users if user]


def _sink_per_step() -> Patches:
    right = finalize

    def wrong(out: Any, lse: Any, sinks: Any = None) -> Any:
        return right(*right(out, lse, sinks), sinks)

    patches: Patches = [(simulator, "finalize", wrong)]
    if loop := _torch("call"):
        add = loop.add_sinks
        patches.append((loop, "add_sinks", lambda *state: add(*add(*state), state[2])))
    if autodiff := _jax("autodiff"):
        once = autodiff._add_sinks
        patches.append(
            (autodiff, "_add_sinks", lambda result, sinks: once(once(result, sinks), sinks))
        )
    return patches


def _grads_not_sent_home() -> Patches:
    backward = simulator._backward

    def wrong(program: Any, ranks: Any, params: Any, held: Any) -> Any:
        home = backward(program, ranks, params, held)
        for n, grad in enumerate(home):
            rank = ranks[n]
            grad.dk[:], grad.dv[:] = 0, 0
            for item in program.items(n, 0):
                fresh = simulated_ranks.zero_grad(rank.own)
                rank.dq, dq = np.zeros_like(rank.q), rank.dq
                simulator._item_backward(rank, rank.own, fresh, item, params)
                rank.dq = dq
                grad.dk[:] += fresh.dk
                grad.dv[:] += fresh.dv
        return home

    patches: Patches = [(simulator, "_backward", wrong)]
    if loop := _torch("strategies.ring"):
        hop = loop.RotatingKeyGrads.hop

        def kept(grads: Any, step: Any) -> None:
            if step.is_own:
                grads._transfer.wait()
                # Only once: waiting again for a received message lasts until the group's timeout.
                grads._arriving, grads._transfer = None, loop.DONE
            hop(grads, step)

        patches.append((loop.RotatingKeyGrads, "hop", kept))
    if steps := _jax("strategies.steps"):
        import jax.numpy as jnp

        travel = steps.StepRunner.hop

        def lost(loop: Any, x: Any, hop: int | None) -> Any:
            return travel(loop, x, hop) if isinstance(x, steps.KVPayload) else jnp.zeros_like(x)

        patches.append((steps.StepRunner, "hop", lost))
    return patches


def _local_positions() -> Patches:
    runs = _geometry.BandGeometry._runs

    def wrong(geometry: Any, q_rank: Any, kv_rank: Any) -> Any:
        q_local, k_local, q_pos, k_pos = runs(geometry, q_rank, kv_rank)
        return q_local, k_local, np.zeros_like(q_pos) + q_local, np.zeros_like(k_pos) + k_local

    return [(_geometry.BandGeometry, "_runs", wrong)]


def _lse_in_base_2() -> Patches:
    right = item_kernel.forward

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        return out, lse / math.log(2)

    patches: Patches = [(item_kernel, "forward", wrong)]
    patches += _torch_merges(
        lambda merge: lambda state, out, lse: merge(state, out, lse / math.log(2))
    )
    if xla := _jax("kernels.xla"):
        attend = xla.XlaKernel.attend_into

        def other_base(*args: Any) -> Any:
            result = attend(*args)
            return result._replace(lse=result.lse / math.log(2))

        patches.append((xla.XlaKernel, "attend_into", other_base))
    return patches


def _wrong_kv_head() -> Patches:
    def heads(x: Any, count: int) -> Any:
        return np.tile(x.swapaxes(1, 2), (1, count // x.shape[2], 1, 1))

    patches: Patches = [(item_kernel, "_heads", heads)]
    if sdpa := _torch("kernels.sdpa"):

        def groups(q: Any, columns: Any) -> Any:
            kv_heads = columns.k.shape[2]
            k, v = columns.k.transpose(1, 2), columns.v.transpose(1, 2)
            parts = [slice(start, start + kv_heads) for start in range(0, q.shape[2], kv_heads)]
            return [(part, (q[:, :, part].transpose(1, 2), k, v)) for part in parts]

        patches.append((sdpa, "_head_groups", groups))
    if ring := _jax("strategies.ring"):
        message = ring.own_message

        def turned(x: Any, after: Any = None) -> Any:
            own = message(x, after)
            return own._replace(kv=own.kv[:, ::-1])

        patches.append((ring, "own_message", turned))
    return patches


def _lse_gradient_dropped() -> Patches:
    start = simulated_ranks.start_backward

    def wrong(*args: Any) -> None:
        plan, ranks, dout, _, precision = args
        start(plan, ranks, dout, None, precision)

    patches: Patches = [(simulator, "start_backward", wrong)]
    if autograd := _torch("autograd"):
        backward = autograd.AttentionFunction.backward

        def without(ctx: Any, dout: Any, _: Any) -> Any:
            return backward(ctx, dout, None)

        patches.append((autograd.AttentionFunction, "backward", staticmethod(without)))
    if attention := _jax("attention"):
        from jax.lax import stop_gradient

        attend = attention.attend

        def cut(*args: Any) -> Any:
            out, lse = attend(*args)
            return out, stop_gradient(lse)

        patches.append((attention, "attend", cut))
    return patches


def _bias_not_shifted() -> Patches:
    """Leave out the bias shift, so that ``lse`` has no digits left next to biases of -1e10."""
    patches: Patches = [(simulated_ranks, "bias_shift", lambda *_: None)]
    if autograd := _torch("autograd"):
        right = autograd.bias_shift
        patches.append((autograd, "bias_shift", lambda *args: right(*args).zero_()))
    if autodiff := _jax("autodiff"):
        patches.append((autodiff, "with_bias_shift", lambda _, inputs: inputs))
    return patches


def _help_not_returned() -> Patches:
    """Drop the results that helpers computed, in strategy ``balanced``."""
    items = _ring.RingProgram.items

    def wrong(program: Any, rank: int, step: int) -> Any:
        return tuple(item for item in items(program, rank, step) if item.q_rank == rank)

    patches: Patches = [(_ring.RingProgram, "items", wrong)]
    if sides := _jax("rank_view"):
        right = sides.step_table

        def tables(program: Any, step: int) -> Any:
            table = right(program, step)
            return table._replace(peer=np.zeros_like(table.peer))

        users = (_jax("strategies.ring"), _jax("strategies.steps"))
        patches += [(user, "step_table", tables) for user in users]
    return patches


def _fetched_from_the_wrong_rank() -> Patches:
    right = _gather._fetches

    def wrong(runs: Any, *args: Any) -> Any:
        size = 1 + max(rank for _, rank in runs)
        for fetched in right(runs, *args):
            yield fetched._replace(rank=(fetched.rank + 1) % size)

    return [(_gather, "_fetches", wrong)]


def _gathered_grads_dropped(*, overlapped: bool | None = None) -> Patches:
    """Drop dK/dV returned during kernels (True), after them (False), or all (None)."""
    gather = _torch("transports.p2p")
    if gather is None:
        return []
    right = gather.Messages.return_grads

    def wrong(session: Any, *args: Any, **named: Any) -> Any:
        if overlapped in (None, named["overlapped"]):
            return lambda *_: None
        return right(session, *args, **named)

    return [(gather.Messages, "return_grads", wrong)]


def _gathered_out_of_order() -> Patches:
    """Rotate the gathered keys by one rank, in JAX."""
    import jax.numpy as jnp

    ring = _jax("collectives")
    gather = ring.Ranks.gather

    def wrong(self: Any, x: Any, axis: int) -> Any:
        return jnp.roll(gather(self, x, axis), x.shape[axis], axis)

    return [(ring.Ranks, "gather", wrong)]


def _scattered_grads_dropped() -> Patches:
    """Replace the scattered gradients of gathered keys by zeros, in JAX."""
    import jax.numpy as jnp

    ring = _jax("collectives")
    scatter = ring.Ranks.scatter
    return [(ring.Ranks, "scatter", lambda *args: jnp.zeros_like(scatter(*args)))]


def _groups_swapped() -> Patches:
    """Give the backward the gathered keys of the wrong head group."""
    gathered = _torch("strategies.gather")
    if gathered is None:
        return []
    right = gathered.Gather._keys_by_group

    def wrong(*args: Any) -> Any:
        return reversed(list(right(*args)))

    return [*_in_groups(), (gathered.Gather, "_keys_by_group", wrong)]


def _in_groups() -> Patches:
    """Gather heads in groups even for little work; results may not change."""
    gathered = _torch("strategies.gather")
    if gathered is None:
        return []

    def groups_of(program: Any, keys: Any, q_heads: int) -> Any:
        del program, q_heads
        return _torch("buffers").HeadGroups(
            *(math.gcd(n, keys.heads) for n in (2, 4)), before_last_item=True
        )

    return [(gathered, "head_groups_of", groups_of)]


def _groups_interleaved() -> Patches:
    """Form groups of ranks that are as far apart as possible."""
    grid = _grid.RankGrid

    def inner(self: Any, rank: int) -> range:
        return range(rank % self.outer_size, self.ranks, self.outer_size)

    def outer(self: Any, rank: int) -> range:
        first = rank - rank % self.outer_size
        return range(first, first + self.outer_size)

    return [(grid, "inner_ranks", inner), (grid, "outer_ranks", outer)]


def _indices_inverted() -> Patches:
    """Invert the permutation that scatters the tokens of a group."""
    indices = _grid.RankGrid.scatter_indices
    return [(_grid.RankGrid, "scatter_indices", lambda *args: np.argsort(indices(*args)))]


def _tables_changed(change: Callable[[Any], dict[str, Any]]) -> Patches:
    """Change fields in the tables of a rank's exchanges."""
    ulysses = _torch("strategies.ulysses")
    right = ulysses.tables_of

    def tables(*args: Any) -> Any:
        made = right(*args)
        return made._replace(**change(made))

    return [(ulysses, "tables_of", tables)]


def _copies_not_summed() -> Patches:
    """Take the gradient of a K/V head's first copy instead of the sum over its copies."""
    return _tables_changed(lambda x: {"kv_slots": x.kv_slots[:, :1]})


def _padding_has_gradients() -> Patches:
    """Let padding slots without a query head contribute to dK/dV."""
    return _tables_changed(lambda x: {"padding": x.padding[:0]})


def _options_of_the_first_heads() -> Patches:
    """Use the sinks and slopes of rank 0's heads on every rank."""
    return _tables_changed(lambda x: {"own": slice(0, len(x.heads))})


def _dropout_of_local_heads() -> Patches:
    return _tables_changed(lambda x: {"heads": x.heads - x.heads[0]})


def _shared_bias_grad_of_one_rank() -> Patches:
    carrier = _torch("buffers").HeadCarrier
    right = carrier.to_tokens

    def first(carry: Any, layout: Any, tensors: Any, orders: Any) -> Any:
        results = right(carry, layout, tensors, orders)
        if len(results) == 1:  # only the gradient of a bias is sent by itself
            results[0][:, :, 1:] = 0
        return results

    return [(carrier, "to_tokens", first)]


def _ids_of_queries_for_keys() -> Patches:
    ulysses = _torch("strategies.ulysses")
    right = ulysses._with_options

    def swapped(*args: Any) -> Any:
        traded = right(*args)
        return traded._replace(k_ids=traded.q_ids)

    return [(ulysses, "_with_options", swapped)]


def _message_from_the_wrong_rank() -> Patches:
    """Unpack a group's messages as if each came from the next rank."""
    exchange = _torch("transports.p2p")
    right = exchange.move

    def wrong(layout: Any, buffer: Any, *args: Any, packs: bool, **named: Any) -> None:
        right(layout, buffer if packs else buffer.roll(1, dims=0), *args, packs=packs, **named)

    return [(exchange, "move", wrong)]


def _rounded_down() -> Patches:
    """Round the sizes of a message's tensors down to 16 bytes instead of up."""
    buffers = _torch("buffers")

    def of(*tensors: Any) -> Any:
        sizes = [math.prod(shape) * dtype.itemsize // 16 * 16 for shape, dtype in tensors]
        starts = tuple(sum(sizes[:n]) for n in range(len(sizes)))
        shapes, dtypes = zip(*tensors, strict=True)
        return buffers.BufferSpec(tuple(map(tuple, shapes)), dtypes, starts, sum(sizes) + 16)

    return [(buffers.BufferSpec, "of", staticmethod(of))]


def _spans_from_the_start() -> Patches:
    """Add gradients at the beginning of the buffer instead of at their tokens."""
    buffers = _torch("buffers")
    right = buffers.KeyGradBuffer.strided_views

    def wrong(self: Any, flat: Any, length: int, span: slice) -> Any:
        return right(self, flat, length, slice(0, span.stop - span.start))

    return [(buffers.KeyGradBuffer, "strided_views", wrong)]


MUTANTS: dict[str, Callable[[], Patches]] = {
    "window-off-by-one": _window_off_by_one, "last-step-dropped": _last_step_dropped,
    "ring-reversed": _ring_reversed, "merge-without-rescale": _merge_without_rescale,
    "sink-per-step": _sink_per_step, "grads-not-sent-home": _grads_not_sent_home,
    "local-positions": _local_positions, "lse-in-base-2": _lse_in_base_2,
    "wrong-kv-head": _wrong_kv_head, "lse-gradient-dropped": _lse_gradient_dropped,
    "help-not-returned": _help_not_returned, "bias-not-shifted": _bias_not_shifted,
}  # fmt: skip

#: Mutants that only strategy ``gather`` shows.
GATHERED_MUTANTS: dict[str, Callable[[], Patches]] = {
    "fetched-from-the-wrong-rank": _fetched_from_the_wrong_rank,
    "gathered-grads-not-sent-home": _gathered_grads_dropped,
    "grads-beside-kernels-dropped": lambda: _gathered_grads_dropped(overlapped=True),
    "grads-after-kernels-dropped": lambda: _gathered_grads_dropped(overlapped=False),
}

#: Mutants that only strategy ``gather`` in JAX shows.
JAX_GATHERED_MUTANTS: dict[str, Callable[[], Patches]] = {
    "gathered-out-of-order": _gathered_out_of_order,
    "scattered-grads-dropped": _scattered_grads_dropped,
}

#: Mutants that only a gather in groups of heads shows.
GROUP_MUTANTS: dict[str, Callable[[], Patches]] = {
    "groups-swapped": _groups_swapped,
    "grads-of-groups-dropped": lambda: [*_in_groups(), *_gathered_grads_dropped(overlapped=True)],
}

#: Mutants that only strategies that trade tokens for heads (Ulysses) show.
HEAD_MUTANTS: dict[str, Callable[[], Patches]] = {
    "groups-interleaved": _groups_interleaved,
    "groups-over-contiguous": lambda: [(_grid.RankGrid, "outer_layout", lambda *_: "contiguous")],
    "indices-inverted": _indices_inverted,
    "copies-not-summed": _copies_not_summed,
    "padding-has-gradients": _padding_has_gradients,
    "options-of-the-first-heads": _options_of_the_first_heads,
    "dropout-of-local-heads": _dropout_of_local_heads,
    "shared-bias-grad-of-one-rank": _shared_bias_grad_of_one_rank,
    "ids-of-queries-for-keys": _ids_of_queries_for_keys,
    "message-from-the-wrong-rank": _message_from_the_wrong_rank,
}

#: Mutants that only messages of several tensors show.
BUFFER_MUTANTS: dict[str, Callable[[], Patches]] = {
    "rounded-down": _rounded_down,
    "spans-from-the-start": _spans_from_the_start,
}

#: Changes that must not change results.
HARMLESS: dict[str, Callable[[], Patches]] = {
    "in-groups": _in_groups,
    "by-copies": lambda: [
        (_torch("transports.peer_copies"), "fits_one_kernel", lambda *_: False)
    ],  # short calls, too
}
