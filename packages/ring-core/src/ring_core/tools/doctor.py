"""Diagnose an installation: versions, clashes between them, results against the oracle.

``python -m ring_core doctor`` is the doctor of this package; those of ``ring_torch`` and
``ring_jax`` are the same, with what they find on their kernels and devices.
"""

from __future__ import annotations

import json
import platform
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import requires, version
from typing import Any

import numpy as np
import numpy.typing as npt

import ring_core
from ring_core import reference
from ring_core.base.arguments import Floats as Floats
from ring_core.base.config import RingStrategy
from ring_core.layouts.layout import LAYOUTS, LayoutName
from ring_core.masks.mask import Mask
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import ring_program
from ring_core.programs.steps import pairs_of
from ring_core.tools.case import CAUSAL as CAUSAL, Check as Check, shown_checks

RESULTS = ("out", "dq", "dk", "dv")
OURS = ("ring-core", "ring-torch", "ring-jax", "ring-jax-gpu", "ring-jax-tpu")
TOKENS = 128  # a rank
_HEADS = (4, 2, 2, 4)  # of q, k, v and dout

Run = Callable[[], Sequence[npt.ArrayLike]]  # returns out, dq, dk and dv


def inputs_for(ranks: int, head_dim: int) -> tuple[Floats, ...]:
    """Return random ``q [1, T, 4, D]``, ``k``, ``v [1, T, 2, D]`` and ``dout [1, T, 4, D]``.

    There are :data:`TOKENS` tokens per rank. They are seeded.
    """
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, TOKENS * ranks, heads, head_dim)) for heads in _HEADS)


def exact_results(inputs: Sequence[npt.ArrayLike], mask: Mask = CAUSAL) -> tuple[Floats, ...]:
    """Return the :data:`RESULTS` of ``q, k, v, dout`` by dense attention in float64."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in inputs)
    out = reference.attention(q, k, v, mask=mask)[0]
    return out, *reference.attention_grads(dout, q, k, v, mask=mask)[:3]


def compared(
    name: str, where: str, inputs: Sequence[npt.ArrayLike], run: Run, plain: Run, eps: float, *,
    mask: Mask = CAUSAL, is_fault: Callable[[BaseException], bool] = lambda e: isinstance(e, Exception),
) -> Iterator[Check]:  # fmt: skip
    """Compare what ``run`` returns with float64, one check for each of :data:`RESULTS`.

    The error may be four times that of ``plain``, a dense implementation in the same dtype on the
    same device, plus 16 ulps (``eps``) of the largest number. ``inputs`` are ``q, k, v, dout``, as
    they were rounded to their dtype. Of an exception that ``is_fault`` there is one failed check.
    """
    try:
        results = [np.asarray(x, np.float64) for x in run()]
    except BaseException as fault:
        if not is_fault(fault):
            raise
        yield Check(name, where, "runs", None, 0.0, passed=False, trace=traceback.format_exc())
        return
    all_results = zip(RESULTS, results, plain(), exact_results(inputs, mask), strict=True)
    for result, actual, actual_plain, exact in all_results:
        error, plain_error = (
            float(np.abs(np.asarray(x, np.float64) - exact).max()) for x in (actual, actual_plain)
        )
        limit = 4 * plain_error + 16 * eps * float(np.abs(exact).max())
        yield Check(
            name, where, result,
            error if error < float("inf") else None,  # neither is NaN less
            limit, passed=error <= limit,
        )  # fmt: skip


def versions(libraries: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, and of libraries that are installed.

    ``ours`` are packages of this project, which may be used without being installed.
    """
    return {
        "python": platform.python_version(), "platform": platform.platform(terse=True),
        **{name: installed(name) or f"{ring_core.__version__} (not installed)" for name in ours},
        **{name: current for name in libraries if (current := installed(name))},
    }  # fmt: skip


def installed(library: str) -> str | None:
    """Return the version of a library; ``None`` if it is not installed, or without one to read."""
    # The exception for damaged metadata differs between Python versions.
    with suppress(Exception):
        return version(library)
    return None


def clashes(by_name: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each library that asks for another version of a library than is installed.

    Packages of this project of different versions clash, too: they are released together.
    """
    from packaging.requirements import Requirement  # the rest of ring_core imports numpy alone

    own = {name: current for name in OURS if (current := installed(name))}
    releases = ", ".join(f"{name} {current}" for name, current in own.items())
    several = [f"packages of unlike releases: {releases}"] if len(set(own.values())) > 1 else []
    requirements = [
        (name, Requirement(text))
        for name in by_name
        if installed(name)
        for text in requires(name) or ()
    ]
    return (
        *several,
        *(
            f"{name} {by_name[name]} asks for {requirement.name}{requirement.specifier}, and there is {current}"
            for name, requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if (current := installed(requirement.name))
            if not requirement.specifier.contains(current, prereleases=True)
        ),
    )


@dataclass(frozen=True)
class Report:
    """Availability of a kernel, or of a strategy over a transport.

    Attributes:
        name: Name of the kernel, or ``strategy/transport``.
        where: Types of devices that it runs on, or the package that brings it.
        available: True if it can run here.
        why: Reasons why it cannot; empty if it can.
        notes: Lines on what it decides only when a call is lowered.
    """

    name: str
    where: str
    available: bool
    why: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Findings of a doctor.

    Attributes:
        versions: Versions of Python and of libraries.
        clashes: Lines on versions that do not go together.
        checks: Comparisons of results with float64.
        tested: What was checked, in words.
        device: Type of the devices; empty in a package without devices.
        devices: A line for each device.
        kernels: Kernels in the order of ``kernel="auto"``.
        strategies: Strategies, each over each transport that can carry it.
    """

    versions: dict[str, str]
    clashes: tuple[str, ...]
    checks: tuple[Check, ...]
    tested: str
    device: str = ""
    devices: tuple[str, ...] = ()
    kernels: tuple[Report, ...] = ()
    strategies: tuple[Report, ...] = ()

    @property
    def healthy(self) -> bool:
        """True if there are checks, all of them passed, and no versions clash."""
        return not self.clashes and bool(self.checks) and all(x.passed for x in self.checks)


def report(diagnosis: Diagnosis, *, as_json: bool) -> str:
    """Return what a ``doctor`` command prints: JSON, or text for people."""
    if as_json:
        fields: dict[str, Any] = asdict(diagnosis) | {"healthy": diagnosis.healthy}
        return json.dumps(fields, indent=2)
    lines = [f"{name:14}{current}" for name, current in diagnosis.versions.items()]
    lines += [f"{'conflicts':14}{clash}" for clash in diagnosis.clashes or ("none",)]
    if diagnosis.device:
        lines += ["", f"device        {diagnosis.device}", *(f"  {x}" for x in diagnosis.devices)]
    for title, reports in (
        ("kernels, in the order in which kernel='auto' tries them", diagnosis.kernels),
        ("strategies, over transports, between processes of this machine", diagnosis.strategies),
    ):
        lines += ["", title] if reports else []
        for x in reports:
            lines.append(
                f"  {x.name:18}{x.where:14}{'available' if x.available else f'no: {x.why}'}"
            )
            lines += [f"{'':34}bfloat16: {note}" for note in x.notes]
    return "\n".join(
        [*lines, *shown_checks(diagnosis.tested, diagnosis.checks, healthy=diagnosis.healthy)]
    )


def diagnose() -> Diagnosis:
    """Look at this installation, and run a ring of two ranks in numpy in every layout."""
    by_name = versions(("numpy", "matplotlib"), ("ring-core",))
    inputs = inputs_for(2, head_dim=16)
    expected = exact_results(inputs)
    checks: list[Check] = []
    for layout, strategy in pairs_of(LAYOUTS):

        def run(layout: LayoutName = layout, strategy: RingStrategy = strategy) -> list[Floats]:
            plan = make_plan(CAUSAL, seq_len=inputs[0].shape[1], cp_size=2, layout=layout)
            program = ring_program(plan, strategy)
            out, _, *grads = reference.simulate(program, *inputs[:3], dout=inputs[3])
            return [out, *grads]

        checks += compared(
            f"{layout}/{strategy}", "numpy, 2 ranks", inputs, run, lambda: expected,
            float(np.finfo(np.float64).eps),
        )  # fmt: skip
    return Diagnosis(by_name, clashes(by_name), tuple(checks), "a causal ring in float64")
