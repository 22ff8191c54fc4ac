"""Pallas kernels for TPUs, interpreted on the host: races are looked for, fresh memory is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax.experimental.pallas import tpu as pltpu

from ring_jax.collectives import match_varying, varying_axes
from ring_jax.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    ItemTable,
    Kernel,
    KeyBlock,
    LaunchSpec,
    QueryBlock,
)
from ring_jax_tpu import PallasKernel

#: Kept at a time: a process may map no more than some ten thousand pieces of memory.
_MOST_PROGRAMS = 200


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are traced and run here are interpreted.

    Each access to a kernel's memory is a call from the program to Python. jax puts the arguments of
    such a call on a device first, which takes longer than all the rest, and may wait for a thread
    that waits for this one: here they stay where they are.
    """
    with mock.patch.object(jax_callback, "io_callback_impl", _call), _interpreting():
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


class InterpretedKernel(Kernel):
    """The Pallas kernels, each call of which runs as a program of its own, one device at a time.

    Compiling a program that interprets a kernel takes seconds, running it hundredths of one. Calls
    in all steps and cases that come to the same program, but for the values of arrays, share it.
    """

    capabilities = PallasKernel.capabilities

    def __init__(self) -> None:
        self._programs: dict[str, Any] = {}
        self._forward = jax.jit(PallasKernel().attend_into, static_argnums=0)
        self._backward = jax.jit(PallasKernel().grads_into, static_argnums=0)
        self._outside = ThreadPoolExecutor(1)  # where jax knows of no mesh
        self._turn = Lock()

    def refusals(self, *args: Any) -> tuple[str, ...]:
        """As :meth:`PallasKernel.refusals`."""
        return PallasKernel().refusals(*args)

    def attend_into(
        self,
        spec: LaunchSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """As :meth:`PallasKernel.attend_into`."""
        result: AttentionState = self._run(self._forward, spec, rows, columns, work, into)
        return result

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """As :meth:`PallasKernel.grads_into`."""
        grads: Grads = self._run(self._backward, spec, rows, columns, upstream, work, into)
        return grads

    def _run(self, function: Any, spec: LaunchSpec, *args: Any) -> Any:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        program, results = self._outside.submit(self._program, function, spec, types).result()

        def call(*arrays: Any) -> Any:
            with self._turn:
                return jax.tree.map(np.asarray, program(*jax.tree.map(np.asarray, arrays)))

        return match_varying(jax.pure_callback(call, results, *args), varying_axes(args))

    def _program(self, function: Any, spec: LaunchSpec, types: Any) -> tuple[Any, Any]:
        """What is compiled, and the types of its results."""
        with _interpreting():
            traced = function.trace(spec, *types)
            assert not traced.jaxpr.consts
            program_text = "\n".join([str(traced.jaxpr), *_index_maps(traced.jaxpr)])
            if program_text not in self._programs:
                if len(self._programs) >= _MOST_PROGRAMS:
                    self._programs.clear()
                self._programs[program_text] = traced.lower().compile()
        return self._programs[program_text], traced.out_info


def _interpreting() -> Any:
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True))


def _call(*args: Any, result_avals: Any, callback: Any, sharding: Any, ordered: bool) -> Any:
    del result_avals, sharding, ordered
    return jax.tree.map(np.asarray, callback(*map(np.asarray, args)))


def _index_maps(jaxpr: Any) -> Iterator[str]:
    """What a jaxpr's text leaves out of its kernels: which block each step of the grid reads."""
    for equation in jaxpr.eqns:
        if "grid_mapping" in equation.params:
            for block in equation.params["grid_mapping"].block_mappings:
                yield f"{block.array_aval} {block.pipeline_mode} {block.index_map_jaxpr}"
        for value in equation.params.values():
            if hasattr(value, "eqns"):
                yield from _index_maps(value)
