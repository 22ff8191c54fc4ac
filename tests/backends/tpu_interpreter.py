"""Pallas TPU kernels interpreted on the host: races are detected, fresh memory is NaN."""

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
from ring_jax.records import Kernel, LaunchSpec
from ring_jax_tpu import PallasKernel

#: Kept at a time: a process may map no more than some ten thousand pieces of memory.
_MOST_PROGRAMS = 200


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret the kernels that are traced and run in this context.

    Each access to a kernel's memory is a callback from the program to Python. jax first puts the
    arguments of a callback on a device, which takes longer than all the rest and can deadlock with
    a thread that waits for this one. Here the arguments stay where they are.
    """
    with mock.patch.object(jax_callback, "io_callback_impl", _call), _interpreting():
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


class InterpretedKernel(Kernel):
    """Pallas kernels, each call of which runs as its own program, one device at a time.

    Compiling a program that interprets a kernel takes seconds, running it some 10 ms. All calls
    that trace to the same program share it, whatever the step, the case and the array values.
    """

    capabilities = PallasKernel.capabilities

    def __init__(self) -> None:
        self._programs: dict[str, Any] = {}
        self._forward = jax.jit(PallasKernel().attend_into, static_argnums=0)
        self._backward = jax.jit(PallasKernel().grads_into, static_argnums=0)
        self._outside = ThreadPoolExecutor(1)  # a thread in which no mesh is set
        self._turn = Lock()

    def refusals(self, *args: Any) -> tuple[str, ...]:
        """Return :meth:`PallasKernel.refusals`."""
        return PallasKernel().refusals(*args)

    def attend_into(self, *args: Any) -> Any:
        """Run :meth:`PallasKernel.attend_into` in the interpreter."""
        return self._run(self._forward, *args)

    def grads_into(self, *args: Any) -> Any:
        """Run :meth:`PallasKernel.grads_into` in the interpreter."""
        return self._run(self._backward, *args)

    def _run(self, function: Any, spec: LaunchSpec, *args: Any) -> Any:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        program, results = self._outside.submit(self._program, function, spec, types).result()

        def call(*arrays: Any) -> Any:
            with self._turn:
                return jax.tree.map(np.asarray, program(*jax.tree.map(np.asarray, arrays)))

        return match_varying(jax.pure_callback(call, results, *args), varying_axes(args))

    def _program(self, function: Any, spec: LaunchSpec, types: Any) -> tuple[Any, Any]:
        """Return the compiled program of a call and the types of its results."""
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
    """Yield the kernels' index maps, which the text of a jaxpr leaves out."""
    for equation in jaxpr.eqns:
        if "grid_mapping" in equation.params:
            for block in equation.params["grid_mapping"].block_mappings:
                yield f"{block.array_aval} {block.pipeline_mode} {block.index_map_jaxpr}"
        for value in equation.params.values():
            if hasattr(value, "eqns"):
                yield from _index_maps(value)
