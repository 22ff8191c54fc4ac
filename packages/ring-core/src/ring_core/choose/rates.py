"""Measured times of kernels, by which ``kernel="auto"`` chooses: the data are ``rates.json``.

``RING_RATES`` names another file in its place, such as ``python -m ring_torch bench --rates FILE``
writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ring_core.base.config import Request
from ring_core.masks.mask import Mask
from ring_core.programs.ring import RingProgram

Framework = Literal["torch", "jax"]
Option = Literal[
    "causal", "window", "documents", "segment_ids", "predicate", "softcap", "alibi", "bias", "dropout",
]  # fmt: skip

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
OPTIONS: tuple[Option, ...] = get_args(Option)
RATES_VARIABLE = "RING_RATES"
SCHEMA = 1
NEAR = 1.05  # times that differ by less are a tie, which the fixed order of kernels decides

_NOT_TIMED = "was not timed for such calls"
_OWN_RATES = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class Times:
    """Milliseconds of a kernel's forward, and of forward and backward; ``None`` was not timed."""

    forward: float | None
    both: float | None

    def of_call(self, *, grad: bool) -> float | None:
        """Return the time of a call with a backward (``grad``), or without."""
        return self.both if grad else self.forward

    def scaled(self, factor: float) -> Times:
        """Return the times that ``factor`` times as much work would take."""
        return Times(*(None if x is None else factor * x for x in (self.forward, self.both)))

    def describe(self) -> str:
        """Return the times in words.

        >>> Times(1.5, 5.0).describe()
        'about 1.5 ms forward, 5 ms with backward'
        """
        return "about " + ", ".join(
            f"{_digits(x)} ms {what}"
            for x, what in ((self.forward, "forward"), (self.both, "with backward"))
            if x is not None
        )


@dataclass(frozen=True)
class Case:
    """A call that was timed on one device, with the times of kernels that can run it.

    Attributes:
        framework: The framework of the kernels, ``torch`` or ``jax``.
        capability: Compute capability of the GPU as in ``sm_90``: 90; 0 is the CPU.
        gpu: Name of the device.
        versions: Names and versions of libraries.
        tokens: Number of queries, and of keys.
        pairs: Number of visible (query, key) pairs, without regard to segment ids.
        heads: Numbers of query heads and of key/value heads.
        dims: Head dims of Q and K, and of V.
        option: The option that the call had beside a causal mask; ``causal`` is none.
        kernels: Names and times of kernels.
    """

    framework: Framework
    capability: int
    gpu: str
    versions: tuple[tuple[str, str], ...]
    tokens: int
    pairs: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    option: Option
    kernels: tuple[tuple[str, Times], ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of calls that the times are taken for; they were measured with the first."""
        return ("bfloat16", "float16") if self.capability else ("float32",)

    @property
    def work(self) -> int:
        """Amount of work that times are in proportion to: pairs x query heads x head dims."""
        return self.pairs * self.heads[0] * sum(self.dims)

    def took(self, names: Iterable[str], *, grad: bool) -> dict[str, float]:
        """Return the milliseconds of those kernels among ``names`` that were timed."""
        measured = ((name, times.of_call(grad=grad)) for name, times in self.kernels)
        return {name: time for name, time in measured if time is not None and name in names}

    def describe(self) -> str:
        """Return the device, option and head dims in words."""
        dim, v = self.dims
        return f"{self.gpu}, {self.option}, head dim {dim if dim == v else f'{dim} and {v}'}"


@dataclass(frozen=True)
class Expected:
    """An estimate of the times that kernels take for a call, from the measured case nearest to it.

    It counts the computing of the busiest rank alone, at the rate of the case.

    Attributes:
        case: The case; ``None`` if there is none, and nothing is known.
        factor: Work of the call over that of the case.
    """

    case: Case | None = None
    factor: float = 0.0

    def fastest(self, names: Sequence[str], *, grad: bool) -> str:
        """Return the kernel to take of some, which come in a fixed order of preference.

        It is the first of those that are within ``NEAR`` times the fastest time. Kernels without a
        time are not taken, unless fewer than two have one: then the order decides alone.
        """
        times = {} if self.case is None else self.case.took(names, grad=grad)
        if len(times) < 2:
            return names[0]
        limit = NEAR * min(times.values())
        return next(name for name in names if name in times and times[name] < limit)

    def time(self, name: str) -> str:
        """Return the expected time of a kernel in words, or that it was not timed."""
        times = None if self.case is None else dict(self.case.kernels).get(name)
        return _NOT_TIMED if times is None else times.scaled(self.factor).describe()

    def time_and_source(self, name: str) -> str:
        """Return the expected time and its source, as ``: time (by case)``; empty if unknown."""
        time = self.time(name)
        if self.case is None or time == _NOT_TIMED:
            return ""
        return f": {time} (by {self.case.describe()})"


UNKNOWN = Expected()


@dataclass(frozen=True)
class Rates:
    """A table of measured cases, of any GPU and framework."""

    cases: tuple[Case, ...]

    @cached_property
    def digest(self) -> str:
        """Hash by which ranks check that they choose by the same table."""
        return hashlib.blake2s(to_text(self).encode(), digest_size=8).hexdigest()

    def cases_of(self, framework: Framework, capability: int | None) -> tuple[Case, ...]:
        """Return the cases of a framework on GPUs of one generation (major compute capability)."""
        return tuple(
            case
            for case in self.cases
            if capability is not None
            and (case.framework, case.capability // 10) == (framework, capability // 10)
        )


def expected(
    cases: Sequence[Case],
    request: Request,
    program: RingProgram,
    names: Sequence[str],
    *,
    grad: bool,
) -> Expected:
    """Estimate the times of kernels for a call, from the measured case nearest to it.

    With several options the one whose case predicts the longest time counts. The result is
    :data:`UNKNOWN` if no case has a time of one of the kernels.

    Args:
        cases: Those of the framework and the GPU (:meth:`Rates.of`).
        request: The call.
        program: The work of its ranks in a ring.
        names: The kernels that can do it.
        grad: The call has a backward.
    """
    cases = [case for case in cases if request.dtype in case.dtypes]
    work = int(program.work().sum(axis=0).max())
    work *= request.batch * request.q_heads * (request.head_dim + request.v_head_dim)
    for min_timed in (2, 1):  # a case that compares kernels, else one that says what one takes
        timed = [case for case in cases if len(case.took(names, grad=grad)) >= min_timed]
        estimates = [
            (work / case.work * min(case.took(names, grad=grad).values()), case)
            for option in options_of(request, program.plan.mask)
            if (case := _case_for(timed, option, request))
        ]
        if estimates:
            _, longest = max(estimates, key=lambda time_and_case: time_and_case[0])
            return Expected(longest, work / longest.work)
    return UNKNOWN


def options_of(request: Request, mask: Mask) -> tuple[Option, ...]:
    """Return the options that a call has beside a causal mask, ``("causal",)`` if none."""
    options: dict[Option, bool] = {
        "window": mask.window is not None,
        "documents": mask.cu_seqlens is not None or mask.chunk_size is not None,
        "segment_ids": request.segment_ids, "predicate": mask.predicate is not None,
        "softcap": request.softcap, "alibi": request.alibi, "bias": request.bias,
        "dropout": request.dropout,
    }  # fmt: skip
    return tuple(option for option, is_asked in options.items() if is_asked) or ("causal",)


def _case_for(cases: Sequence[Case], option: Option, request: Request) -> Case | None:
    """Return the case of an option, or else a causal one, that is most like a call.

    Kernels compute head dims that they lack at larger ones, so a case that is no narrower than the
    call comes first, even a causal one. Then the option decides, then the difference of head dims,
    then the number of query heads per key head.
    """
    dims, group = (request.head_dim, request.v_head_dim), request.q_heads / request.kv_heads

    def distance(case: Case) -> tuple[bool, bool, int, float]:
        wider = [a - b for a, b in zip(case.dims, dims, strict=True)]
        ratio = abs(math.log(case.heads[0] / case.heads[1] / group))
        return min(wider) < 0, case.option != option, sum(map(abs, wider)), ratio

    return min((x for x in cases if x.option in (option, "causal")), key=distance, default=None)


def default() -> Rates:
    """Return the table in the file that ``RING_RATES`` names, or else the one of this package.

    Raises:
        ValueError: The file cannot be read, or is no such table.
    """
    return _read_rates_once(os.environ.get(RATES_VARIABLE) or str(_OWN_RATES))


def read(path: str) -> Rates:
    """Read a table of times from a file, as ``python -m ring_torch bench --rates FILE`` writes it.

    Raises:
        ValueError: It cannot be read, or is no such table.
    """
    try:
        return Rates(_cases(json.loads(Path(path).read_text())))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no table of rates: {error}. Write one with 'python -m ring_torch bench "
            f"--rates FILE', or unset {RATES_VARIABLE} for the package's own"
        ) from None


_read_rates_once = lru_cache(maxsize=8)(read)


def to_text(rates: Rates) -> str:
    """Return a table as the text of a file, with a case in each line."""
    entries = []
    for case in rates.cases:
        kernels = {name: [times.forward, times.both] for name, times in case.kernels}
        entries.append(asdict(case) | {"versions": dict(case.versions), "kernels": kernels})
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{{\n "schema": {SCHEMA},\n "rates": [\n{lines}\n ]\n}}\n'


def _cases(table: Any) -> tuple[Case, ...]:
    """Make the cases of a file's table.

    Raises:
        ValueError: It is no such table, or an entry is malformed.
    """
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        raise ValueError(f'it has no "schema": {SCHEMA}')
    return tuple(_case(entry) for entry in table["rates"])


def _case(entry: Any) -> Case:
    """Make a case of an entry of the file.

    Raises:
        ValueError: The entry is malformed.
    """
    names = [field.name for field in fields(Case)]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"a case has {', '.join(names)}, got {entry!r}")
    counts = [
        entry["tokens"],
        entry["pairs"],
        *_pair_of_numbers(entry, "heads"),
        *_pair_of_numbers(entry, "dims"),
    ]
    if not all(type(x) is int and x >= 1 for x in counts):
        raise ValueError(f"tokens, pairs, heads and dims are integers >= 1, got {entry!r}")
    if type(entry["capability"]) is not int or entry["capability"] < 0:
        raise ValueError(f"capability is an integer, as 90, or 0 for the host, got {entry!r}")
    for name, known in (("framework", FRAMEWORKS), ("option", OPTIONS)):
        if entry[name] not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, got {entry[name]!r}")
    versions, kernels = entry["versions"], entry["kernels"]
    if not isinstance(entry["gpu"], str) or not isinstance(versions, dict):
        raise ValueError(f"gpu is a name, versions are names and versions, got {entry!r}")
    if not isinstance(kernels, dict) or not kernels:
        raise ValueError(f"kernels are names and times, got {kernels!r}")
    return Case(
        entry["framework"], entry["capability"], entry["gpu"],
        tuple((name, str(x)) for name, x in versions.items()), entry["tokens"], entry["pairs"],
        _pair_of_numbers(entry, "heads"), _pair_of_numbers(entry, "dims"), entry["option"],
        tuple((name, _times(name, x)) for name, x in kernels.items()),
    )  # fmt: skip


def _pair_of_numbers(entry: dict[str, Any], name: str) -> tuple[int, int]:
    """Return a field of an entry that must be a list of two numbers."""
    numbers = entry[name]
    if not isinstance(numbers, list) or len(numbers) != 2:
        raise ValueError(f"{name} are two numbers, got {numbers!r}")
    return cast("tuple[int, int]", tuple(numbers))


def _times(name: str, milliseconds: Any) -> Times:
    """Make the times of the kernel ``name`` of a pair ``[forward, both]``."""
    well_formed = (
        isinstance(milliseconds, list) and len(milliseconds) == 2 and milliseconds != [None, None]
    )
    if not well_formed or not all(
        x is None or (isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf)
        for x in milliseconds
    ):
        raise ValueError(
            f"{name} has milliseconds of the forward and of both passes, one of which may be null, "
            f"got {milliseconds!r}"
        )
    return Times(*milliseconds)


def _digits(x: float) -> str:
    if x < 0.01:  # less than it takes to start a kernel
        return "< 0.01"
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"
