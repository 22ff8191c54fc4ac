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
from collections.abc import Iterator
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
from sweep.switches import Row

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
        texts = [str(x).strip().splitlines()[-1][:300] for ok, x in answers if not ok]
        if texts:
            outcome = Outcome("hanging", "; ".join(texts))
        else:
            outcome, second = (x for _, x in answers)
            if replace(outcome, reason="") != replace(second, reason=""):
                result = "hanging" if "error" in (outcome.result, second.result) else "wrong"
                outcome = Outcome(result, f"ranks differ: {outcome} and {second}")
        if outcome.result in BAD:
            self.close()
        return outcome

    def close(self) -> None:
        """End the ranks."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None


def progress(entries: list[Entry]) -> Iterator[tuple[tqdm[Entry], Entry]]:
    """Yield entries, each shown while it runs."""
    bar = tqdm(entries, unit="class", file=sys.stdout, mininterval=5)
    for entry in bar:
        bar.set_postfix_str(entry.name, refresh=False)
        yield bar, entry


def run(ranks: Pair, chosen: list[Entry]) -> None:
    """Run entries and append results."""
    for bar, entry in progress(chosen):
        outcome = ranks.compare(entry)
        own = {"version": transformers.__version__, "name": entry.name, "kind": entry.kind}
        result = Result(**own, model_type=entry.model_type, **asdict(outcome))
        with RESULTS.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if result.is_bad:
            bar.write(f"{outcome.result.upper()} {entry.name}: {outcome.reason}")


def run_switches(ranks: Pair, chosen: list[Entry], *, again: bool) -> int:
    """Run the switches of classes that are exact without them; return how many are bad.

    A class is run again if it has another set of switches than in the table.
    """
    defaults, rows = of_release(read(), transformers.__version__), switches.read()
    exact = [x for x in chosen if x.name in defaults and defaults[x.name].result == "exact"]
    for bar, entry in progress(exact):
        own = {x.label: x for x in switches.switches_of(entry)}
        row = rows.pop(entry.name, None)
        if row is not None and row.labels == own.keys() and not row.bad and not again:
            rows[entry.name] = row
        elif own:
            row = rows[entry.name] = Row(transformers.__version__, entry.name)
            for label, switch in own.items():
                outcome = ranks.compare(entry, kind=switch.kind, values=switch.values)
                row.add(label, outcome, defaults[entry.name])
                if label in row.bad:
                    bar.write(f"{entry.name} {label}: {row.bad[label]}")
            switches.write(rows.values())
    done = [rows[x.name] for x in exact if x.name in rows]
    bad = {row.name: row.bad for row in done if row.bad}
    print(f"{sum(len(x.labels) for x in done)} switches, neither exact nor refused: {bad}")
    return len(bad)


def main() -> int:
    """Run the chosen classes, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of classes")
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--switches", action="store_true", help="switches of classes instead")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*PRELOADED, "transformers.modeling_utils", "transformers.masking_utils"]
    )
    forkserver.ensure_running()
    installed = {entry.name: entry for entry in entries()}
    words = [word.lower() for word in options.only]
    chosen = [x for name, x in installed.items() if any(word in name.lower() for word in words)]
    version = transformers.__version__
    with closing(Pair()) as ranks:
        if options.switches:
            return int(run_switches(ranks, chosen, again=options.again) > 0)
        before = {x.name for x in read() if x.version == version}
        run(ranks, [x for x in chosen if options.again or x.name not in before])
    # Of this version the latest results are kept, and those of other releases.
    latest = {x.name: x for x in read() if x.version == version and x.name in installed}
    release = version.rpartition(".")[0]
    RESULTS.write_text(written([*(x for x in read() if x.release != release), *latest.values()]))
    bad = [x.name for x in latest.values() if x.is_bad]
    count = f"{len(latest)} of {len(installed)} classes"
    print(f"{count}, {len(bad)} neither exact nor refused: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
