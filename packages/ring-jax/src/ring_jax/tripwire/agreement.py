"""Compare a call between the processes of a job, before any of them compiles it.

JAX runs the program of each process as if all were one. Where they differ, devices wait for each
other for ever, or compute with other tokens than their peers. Tracing never communicates; so the
comparison is a step of its own, :meth:`ring_jax.ContextParallel.check_agreement`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ring_core import RankMismatchError, UnsupportedError, __version__
from ring_jax.collectives import AnyMesh
from ring_jax.meshes import devices_of
from ring_jax.records import CallOptions, CallSpec, Inputs

#: The properties of a call that all processes must have in common: a text for each name.
Signature = Mapping[str, str]

_LONGEST = 120  # characters of a value in a message


def signature_of(
    mesh: AnyMesh, layout: object, axes: object, call: CallSpec, x: Inputs, options: CallOptions
) -> Signature:
    """Return the properties of a checked call that all processes must have in common.

    Args:
        mesh: The mesh of the call.
        layout: The layout, a name or chunks.
        axes: The axes of the sequence, the batch and the heads.
        call: The static side of the call.
        x: Its arrays, of which shapes and dtypes count.
        options: Its options as given.
    """
    arrays = {
        f"shape of {name}": f"{array.dtype}{list(array.shape)}"
        for name, array in x._asdict().items()
        if array is not None
    }
    seed = options.dropout_seed
    choice = {
        "kernels": [kernel.capabilities.name for kernel in call.kernels],
        "kernels without a backward": [kernel.capabilities.name for kernel in call.forward_only],
        "kernel settings": call.config,
        "strategy": call.strategy,
        "groups": call.trade and (call.trade.grid.ulysses_size, call.trade.strategy),
        "checked calls": call.check_every,
    }
    values: dict[str, object] = {
        "versions": f"ring {__version__}, jax {jax.__version__}",
        "mesh": f"{dict(mesh.shape)}, {mesh.axis_types}, devices {devices_of(mesh)}",
        "axes": axes,
        "layout": layout,
        "mask": call.plan.mask.describe(),
        "cu_seqlens": call.plan.mask.cu_seqlens,
        "plan": call.plan.digest.hex(),
        "softmax_scale": call.scale,
        "softcap": call.softcap,
        "dropout_p": call.dropout_p,
        "dropout_seed": np.asarray(seed) if isinstance(seed, jax.Array) else seed,
        "deterministic": call.deterministic,
        "return_lse": options.return_lse,
        **choice,
        **arrays,
    }
    return {name: str(value) for name, value in values.items()}


def compare(make_signature: Callable[[], Signature], arguments: Iterable[object]) -> None:
    """Compare the signatures of all processes; every process of the job has to call it.

    A process that refuses the call takes part with its error, so that no other one waits for it.

    Args:
        make_signature: Returns the signature of the call in this process.
        arguments: The call's arguments, none of which may be traced.

    Raises:
        RankMismatchError: They differ, also in what ``make_signature`` raised; the message, the
            same in all, says what on which process.
        UnsupportedError: A function is being traced.
        Exception: What ``make_signature`` raised, if it raised the same in every process.
    """
    # Under jax.jit new arrays are traced; under jax.grad and jax.vmap only the arguments are.
    if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *arguments)):
        raise UnsupportedError(
            "check_agreement talks to the other processes, and a function that is traced cannot. "
            "Instead: call it outside of jax.jit, jax.grad and jax.vmap, once, before the first step"
        )
    refusal: Exception | None = None
    try:
        signature = make_signature()
    except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
        signature, refusal = {"refusal": str(error)}, error
    if jax.process_count() > 1 and (message := disagreement(_exchanged(signature))):
        raise RankMismatchError(message) from refusal
    if refusal is not None:
        raise refusal


def disagreement(signatures: Sequence[Signature]) -> str | None:
    """Name the properties that differ between processes, with their values; ``None`` if none does.

    >>> disagreement([{"layout": "zigzag"}, {"layout": "zigzag"}, {"layout": "striped"}])
    "processes disagree on layout: zigzag in processes 0, 1; striped in process 2"
    """
    # A process that refuses the call has no other property to compare.
    names = dict.fromkeys(name for signature in signatures for name in signature)
    if "refusal" in names:
        names = {"refusal": None}
    differences = []
    for name in names:
        processes: defaultdict[str, list[int]] = defaultdict(list)
        for process, signature in enumerate(signatures):
            processes[signature.get(name, "none")].append(process)
        if len(processes) > 1:
            begin = max(0, _common(*processes) - _LONGEST // 2)
            said = "; ".join(
                f"{_part(value, begin)} in process{'es' * (len(who) > 1)} {', '.join(map(str, who))}"
                for value, who in processes.items()
            )
            differences.append(f"{name}: {said}")
    # A plan differs if a mask does; alone it says that functions of equal names show other keys.
    if len(differences) > 1:
        differences = [text for text in differences if not text.startswith("plan: ")]
    if not differences:
        return None
    return f"processes disagree on {'; on '.join(differences)}"


def _common(*values: str) -> int:
    """Return the number of characters with which all values begin."""
    return sum(1 for _ in takewhile(lambda x: len({*x}) == 1, zip(*values, strict=False)))


def _part(value: str, begin: int) -> str:
    """Return a value from ``begin`` on, where values begin to differ, cut to ``_LONGEST``."""
    end = begin + _LONGEST
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if len(value) > end else ''}"


def _exchanged(signature: Signature) -> list[Signature]:
    """Return the signatures of all processes, in their order."""
    message = np.frombuffer(json.dumps(dict(signature)).encode(), np.uint8)
    # Gathers take arrays of one shape: first the lengths, then messages padded to the longest.
    lengths = multihost_utils.process_allgather(np.int32(message.size))
    padded = np.pad(message, (0, int(lengths.max()) - message.size))
    messages = multihost_utils.process_allgather(padded)
    return [
        json.loads(message[:length].tobytes())
        for message, length in zip(messages, lengths, strict=True)
    ]
