"""Run every model class of transformers on two ranks, and record if it is exact or refused.

Results go to a file, a line of JSON each, of which a page of the documentation is made. Classes
that the file has for the installed version of transformers are not run again, and results of other
releases are kept::

    nox -s sweep
    nox -s "sweep-3.12(5.24)" -- --only llama bert --again
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from contextlib import closing
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import transformers  # after the environment variables above, which it reads
from tqdm import tqdm

from ring_torch.local import PRELOADED, LocalRanks
from sweep import switches
from sweep.compare import Outcome, compare
from sweep.entries import Entry, entries
from sweep.page import BAD, RESULTS, Result, of_release, read, written
from sweep.switches import TABLE, Row

SECONDS = 60.0  # limit for a class
WAIT = 8.0  # limit for a rank that waits for another


class Pair:
    """Two ranks, which are started anew once they may be out of step."""

    def __init__(self) -> None:
        self.ranks: LocalRanks | None = None

    def compare(self, entry: Entry, **changes: Any) -> Outcome:
        """Run a class on both ranks, and combine their answers into one outcome."""
        self.ranks = self.ranks or LocalRanks(2, timeout=WAIT, patience=SECONDS)
        answers = self.ranks.answers(compare, entry.name, entry.model_type, changes, grace=WAIT + 4)
        outcome = combined(answers)
        if outcome.result in BAD:
            self.close()
        return outcome

    def close(self) -> None:
        """End the ranks."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None


def combined(answers: list[tuple[bool, Any]]) -> Outcome:
    """Combine the answers of both ranks into one outcome."""
    if texts := [str(x).strip().splitlines()[-1][:300] for ok, x in answers if not ok]:
        return Outcome("hanging", "; ".join(texts))
    outcomes: list[Outcome] = [x for _, x in answers]
    first, second = outcomes
    if replace(first, reason="") == replace(second, reason=""):
        return first
    result = "hanging" if "error" in (first.result, second.result) else "wrong"
    return Outcome(result, f"ranks differ: {first} and {second}")


def run(chosen: list[Entry], results: Path) -> None:
    """Run entries and append results."""
    bar = tqdm(chosen, unit="class", file=sys.stdout, mininterval=5)
    with closing(Pair()) as ranks:
        for entry in bar:
            bar.set_postfix_str(entry.name, refresh=False)
            outcome = ranks.compare(entry)
            own = {"version": transformers.__version__, "name": entry.name, "kind": entry.kind}
            result = Result(**own, model_type=entry.model_type, **asdict(outcome))
            with results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            if result.is_bad:
                bar.write(f"{outcome.result.upper()} {entry.name}: {outcome.reason}")


def run_switches(
    chosen: list[Entry], results: list[Result], table: Path, *, again: bool
) -> list[Row]:
    """Run the switches of classes that are exact without them, and return the rows of the table.

    A class is run again if it has another set of switches than in the table.
    """
    defaults = of_release(results, transformers.__version__)
    rows = switches.read(table)
    exact = [x for x in chosen if x.name in defaults and defaults[x.name].result == "exact"]
    bar = tqdm(exact, unit="class", file=sys.stdout, mininterval=5)
    with closing(Pair()) as ranks:
        for entry in bar:
            bar.set_postfix_str(entry.name, refresh=False)
            own = {x.label: x for x in switches.switches_of(entry)}
            if not own:
                rows.pop(entry.name, None)
                continue
            row = rows.get(entry.name)
            if row is not None and row.labels == own.keys() and not row.bad and not again:
                continue
            row = rows[entry.name] = Row(transformers.__version__, entry.name)
            for label, switch in own.items():
                outcome = ranks.compare(entry, kind=switch.kind, values=switch.values)
                row.add(label, outcome, defaults[entry.name])
                if label in row.bad:
                    bar.write(f"{entry.name} {label}: {row.bad[label]}")
            switches.write(table, rows.values())
    names = {x.name for x in exact}
    return [row for row in rows.values() if row.name in names]


def results_of(results: list[Result], names: set[str]) -> tuple[list[Result], list[Result]]:
    """Return the installed version's latest results, alone and with other releases' results."""
    version = transformers.__version__
    by_name = {x.name: x for x in results if x.version == version and x.name in names}
    release = version.rpartition(".")[0]
    other_results = [x for x in results if x.release != release]
    return [*by_name.values()], [*other_results, *by_name.values()]


def main() -> int:
    """Run the chosen classes, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of classes")
    parser.add_argument("--auto", nargs="+", default=[], help="words in the names of auto classes")
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--switches", action="store_true", help="switches of classes instead")
    parser.add_argument("--table", type=Path, default=TABLE, help="of switches")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*PRELOADED, "transformers.modeling_utils", "transformers.masking_utils"]
    )
    forkserver.ensure_running()
    all_entries = entries()
    chosen = [
        entry
        for entry in all_entries
        if (not options.only or any(w.lower() in entry.name.lower() for w in options.only))
        and (not options.auto or any(w in a for w in options.auto for a in entry.autos))
    ]
    earlier = read(options.results)
    if options.switches:
        rows = run_switches(chosen, earlier, options.table, again=options.again)
        bad_rows = {row.name: row.bad for row in rows if row.bad}
        print(f"{sum(len(x.labels) for x in rows)} switches, neither exact nor refused: {bad_rows}")
        return 1 if bad_rows else 0
    before = {x.name for x in earlier if x.version == transformers.__version__}
    run([x for x in chosen if options.again or x.name not in before], options.results)
    done_before, results = results_of(read(options.results), {entry.name for entry in all_entries})
    options.results.write_text(written(results))
    bad = [x.name for x in done_before if x.is_bad]
    print(
        f"{len(done_before)} of {len(all_entries)} classes, {len(bad)} neither exact nor refused: {bad}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
