"""Diagnose an installation: versions, clashes between them, results against the oracle.

``python -m ring_core doctor`` is the doctor of this package; ``ring_torch`` and ``ring_jax`` have
theirs, made of the same parts.
"""

from __future__ import annotations

import json
import platform
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
from ring_core.layouts.layout import LAYOUTS
from ring_core.masks.mask import Mask
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import ring_program
from ring_core.programs.steps import pairs_of

RESULTS = ("out", "dq", "dk", "dv")
OURS = ("ring-core", "ring-torch", "ring-jax", "ring-jax-gpu", "ring-jax-tpu")
TOKENS = 128  # a rank
CAUSAL = Mask(causal=True)
_HEADS = (4, 2, 2, 4)  # of q, k, v and dout


@dataclass(frozen=True)
class Check:
    """A comparison of a result with float64: its largest error, and the largest allowed.

    Attributes:
        name: The kernel, strategy, transport or layout that was tested.
        where: The devices, and how many.
        result: Name of the result, or ``runs``.
        error: The largest absolute error; ``None`` where the result is not finite, or there is
            none.
        limit: The largest error allowed.
        passed: True if the error is within the limit.
        trace: The traceback of an exception raised instead of a result; else empty.
    """

    name: str
    where: str
    result: str
    error: float | None
    limit: float
    passed: bool
    trace: str = ""


@dataclass(frozen=True)
class Example:
    """A call with grouped heads, and its results by dense attention in float64.

    ``inputs`` are ``q [1, T, 4, D]``, ``k``, ``v [1, T, 2, D]`` and ``dout [1, T, 4, D]``, seeded;
    ``expected`` are the :data:`RESULTS`.
    """

    inputs: tuple[Floats, ...]
    expected: tuple[Floats, ...]


def inputs_for(ranks: int, head_dim: int) -> tuple[Floats, ...]:
    """Return random ``q, k, v, dout`` of an :class:`Example`, :data:`TOKENS` tokens per rank."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, TOKENS * ranks, heads, head_dim)) for heads in _HEADS)


def example_of(inputs: Sequence[npt.ArrayLike], mask: Mask) -> Example:
    """Make the example of some inputs, which may have been rounded to a narrower dtype."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in inputs)
    out = reference.attention(q, k, v, mask=mask)[0]
    return Example((q, k, v, dout), (out, *reference.attention_grads(dout, q, k, v, mask=mask)[:3]))


def compared(
    name: str,
    where: str,
    example: Example,
    results: Sequence[npt.ArrayLike],
    plain: Sequence[npt.ArrayLike],
    eps: float,
) -> Iterator[Check]:
    """Compare results with those of an example, one check for each of :data:`RESULTS`.

    The error may be four times that of ``plain``, the results of a dense implementation in the same
    dtype on the same device, plus 16 ulps (``eps``) of the largest number.
    """
    for result, actual, actual_plain, exact in zip(
        RESULTS, results, plain, example.expected, strict=True
    ):
        error, plain_error = (
            float(np.abs(np.asarray(x, np.float64) - exact).max()) for x in (actual, actual_plain)
        )
        limit = 4 * plain_error + 16 * eps * float(np.abs(exact).max())
        yield Check(
            name, where, result,
            error if error < float("inf") else None,  # neither is NaN less
            limit, passed=error <= limit,
        )  # fmt: skip


def failed(name: str, where: str, trace: str) -> Check:
    """Return the failed check that takes the place of results where an exception was raised."""
    return Check(name, where, "runs", None, 0.0, passed=False, trace=trace)


def versions(libraries: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, of packages of this project, and of installed libraries.

    Args:
        libraries: Names of libraries; those that are missing are left out.
        ours: Names of packages of this project, which may be used without being installed.
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
class Diagnosis:
    """The findings of this package's doctor; the doctors of other packages add to it."""

    versions: dict[str, str]
    clashes: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """True if there are checks, all of them passed, and no versions clash."""
        return not self.clashes and bool(self.checks) and all(x.passed for x in self.checks)


def report[D: Diagnosis](diagnosis: D, shown: Callable[[D], str], *, as_json: bool) -> str:
    """Return what a ``doctor`` command prints: JSON, or the text that ``shown`` makes."""
    if not as_json:
        return shown(diagnosis)
    fields: dict[str, Any] = asdict(diagnosis) | {"healthy": diagnosis.healthy}
    return json.dumps(fields, indent=2)


def diagnose() -> Diagnosis:
    """Look at this installation, and run a ring of two ranks in numpy in every layout."""
    by_name = versions(("numpy", "matplotlib"), ("ring-core",))
    return Diagnosis(by_name, clashes(by_name), tuple(_self_test(2)))


def _self_test(ranks: int) -> Iterator[Check]:
    """Run every layout and ring strategy in the simulator, against the oracle."""
    example = example_of(inputs_for(ranks, head_dim=16), CAUSAL)
    q, k, v, dout = example.inputs
    for layout, strategy in pairs_of(LAYOUTS):
        plan = make_plan(CAUSAL, seq_len=q.shape[1], cp_size=ranks, layout=layout)
        out, _, *grads = reference.simulate(ring_program(plan, strategy), q, k, v, dout=dout)
        yield from compared(
            f"{layout}/{strategy}", f"numpy, {ranks} ranks", example, (out, *grads),
            example.expected, float(np.finfo(np.float64).eps),
        )  # fmt: skip


def shown_versions(versions: Mapping[str, str], clashes: Sequence[str]) -> list[str]:
    """Return the first lines of a report: versions and clashes."""
    return [
        *(f"{name:14}{current}" for name, current in versions.items()),
        *(f"{'conflicts':14}{clash}" for clash in clashes or ("none",)),
    ]


def shown_checks(title: str, checks: Sequence[Check], *, healthy: bool) -> list[str]:
    """Return the last lines of a report: a line for each check, and the verdict."""
    lines = ["", f"self-test: {title} against dense attention in float64"]
    names = max((len(check.name) for check in checks), default=0) + 2
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        error = "not finite" if check.error is None else f"{check.error:.1e}"
        lines.append(
            f"  {check.name:{names}}{check.where:18}{check.result:6}{verdict:8}"
            f"{check.trace or f'error {error}, limit {check.limit:.1e}'}"
        )
    return [*lines, "", "all is well" if healthy else "something is wrong"]


def shown(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text for people."""
    return "\n".join(
        [
            *shown_versions(diagnosis.versions, diagnosis.clashes),
            *shown_checks("a causal ring in float64", diagnosis.checks, healthy=diagnosis.healthy),
        ]
    )
