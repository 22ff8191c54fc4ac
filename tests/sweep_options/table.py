"""The table of options: how a row is judged, read and written.

Why an option has no effect, or is not run here, is a word that a person has written into its row: a
new option of that kind is "unexplained" until then. Of these words "sampling" says that completions
are recorded, "files" that TRL computes before there is a ring, "collator" that GKD's reads chats
alone, "adapters" that several trained ones are needed, "single" that a type has one value, "unused"
that this class does not read it, "precision" that the head is in float32 or wider, "model" that it
has no dropout, "TRL" that one device fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ring_torch.local import LocalRanks
from sweep_options.options import Entry
from sweep_options.runs import Results, run
from sweep_options.values import RESULTS, SINGLE

SECONDS = 120.0  # limit for a run
VERDICTS = ("exact", "refused", "no effect", "not run")
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """Row of the table: an option with a value, and what comes of it.

    Attributes:
        kind: ``trainer`` or ``peft``.
        owner: Name of the config class.
        option: Name of the field.
        value: The value tried, as Python writes it.
        verdict: ``exact``, ``refused`` by name, ``no effect`` (one rank computes the same with it,
            and so do two), ``not run`` on this machine; or ``wrong``, ``error``, ``unexplained``.
        reason: The refusal; or in a word why there is no effect, or why it is not run.
    """

    kind: str
    owner: str
    option: str
    value: str
    verdict: str
    reason: str = ""

    @property
    def is_bad(self) -> bool:
        """True for a verdict that is none of :data:`VERDICTS`."""
        return self.verdict not in VERDICTS


class Pools:
    """One rank alone, and two ranks, which are started anew once they may be out of step."""

    def __init__(self) -> None:
        self.started: dict[int, LocalRanks] = {}
        self.whole: dict[str, Results] = {}

    def run(self, ranks: int, entry: Entry, options: dict[str, Any]) -> list[Results]:
        """Return each rank's results of a run with these options."""
        pool = self.started.get(ranks) or LocalRanks(ranks, timeout=20, patience=SECONDS)
        self.started[ranks] = pool
        with tempfile.TemporaryDirectory() as folder:
            limit = entry.attempt.limit
            arguments = (ranks, entry.kind, entry.owner, options, limit, folder)
            answers = pool.answers(run, *arguments, grace=30)
        results = [
            x if ok else {"error": str(x).strip()[-300:], "is refusal": False} for ok, x in answers
        ]
        # Ranks that refused a call together, or one that is alone, are not out of step.
        refusals = [x.get("is refusal") for x in results]
        if not all(ok for ok, _ in answers) or (
            ranks > 1 and any("error" in x for x in results) and not all(refusals)
        ):
            self.started.pop(ranks).close()
        return results

    def without(self, entry: Entry) -> Results:
        """Return the results of one rank without the option; they are kept."""
        given = sorted(map(repr, entry.attempt.given.items()))
        key = repr((entry.kind, entry.owner, given, entry.attempt.limit))
        if key not in self.whole:
            self.whole[key] = self.run(1, entry, entry.attempt.given)[0]
        return self.whole[key]

    def close(self) -> None:
        """End all ranks."""
        for pool in self.started.values():
            pool.close()


def judged(pools: Pools, entry: Entry, rows: Mapping[Key, Row]) -> Row:
    """Run an option on one rank and on two, and judge it, with the reasons of the table's rows."""

    def row(verdict: str, reason: str = "") -> Row:
        value = repr(entry.attempt.value)
        return Row(
            entry.kind, entry.owner, entry.option, value, verdict, " ".join(reason.split())[:300]
        )

    options = entry.attempt.given | {entry.option: entry.attempt.value}
    words = (x.reason for x in rows.values() if (x.owner, x.option) == (entry.owner, entry.option)
             and x.verdict in ("no effect", "not run"))  # fmt: skip
    word = next(words, "")
    if options[entry.option] is None and entry.option not in entry.attempt.given:
        return row("not run" if word else "unexplained", word)
    whole, without = pools.run(1, entry, options)[0], pools.without(entry)
    split = pools.run(2, entry, options)
    errors = [x["error"] for x in split if "error" in x]
    ran = [] if errors or "error" in whole else split
    wrong = [x for each in ran for x in differences(each, whole, entry.attempt.limit)]
    if len(errors) == len(split) and all(x["is refusal"] for x in split):
        return row("refused", errors[0])
    if "error" in whole:
        return row("not run" if word else "unexplained", word or f"alone: {whole['error']}")
    if errors or wrong:
        return row("error" if errors else "wrong", errors[0] if errors else "; ".join(wrong[:4]))
    if "error" in without or [*differences(whole, without, 1e-9)]:
        return row("exact", "each rank draws for its own tokens" if whole["draws"] else "")
    return row("no effect" if word else "unexplained", word or "it changes nothing")


def differences(results: Results, whole: Results, limit: float) -> Iterable[str]:
    """Yield what differs by more than a limit, relative to the largest entry."""
    for name in {**whole, **results}:
        if name == "draws":
            continue
        x, y = (torch.as_tensor(z[name]).double() if name in z else None for z in (results, whole))
        if x is None or y is None or x.shape != y.shape:
            yield f"{name}: {x if x is None else [*x.shape]} for {y if y is None else [*y.shape]}"
        elif x.numel():
            # Metrics near 0 (rewards, mean logits) are differences of rounded numbers.
            smallest = 1.0 if limit > SINGLE else 0.1 if y.ndim == 0 else 1e-6
            scale = max(float(y.abs().nan_to_num().max()), smallest)
            error = float((x.nan_to_num() - y.nan_to_num()).abs().max()) / scale
            if error > limit:
                yield f"{name} off by {error:.1e}"


def read(path: Path = RESULTS) -> dict[Key, Row]:
    """Return the rows of the table by owner, option and value."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(x.owner, x.option, x.value): x for x in rows}


def written(rows: Mapping[Key, Row]) -> str:
    """Return the table as text: a line of JSON for each row, in order."""
    ordered = sorted(rows.values(), key=lambda x: (x.kind, x.owner, x.option, x.value))
    return "".join(json.dumps(asdict(x)) + "\n" for x in ordered)
