"""Run every model class of transformers on two ranks, and record if it is exact or refused.

Results go to a file, a line of JSON each, and from there to a page of the documentation. Classes
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
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import transformers  # after the environment variables above, which it reads
from tqdm import tqdm

from ring_torch.local import PRELOADED, LocalRanks
from sweep.compare import Outcome, compare
from sweep.entries import Entry, entries
from sweep.page import PAGE, RESULTS, Result, read, rendered, written

SECONDS = 60.0  # limit for a class
WAIT = 8.0  # limit for a rank that waits for another


def compared(answers: list[tuple[bool, object]]) -> Outcome:
    """Combine the answers of both ranks into one outcome."""
    outcomes = [x if ok and isinstance(x, Outcome) else None for ok, x in answers]
    texts = [str(x).strip().splitlines()[-1][:300] for ok, x in answers if not ok]
    if texts:
        return Outcome("hanging", "; ".join(texts))
    first, second = outcomes
    assert first is not None and second is not None
    if replace(first, reason="") == replace(second, reason=""):
        return first
    return Outcome(
        "hanging" if "error" in (first.result, second.result) else "wrong",
        f"ranks differ: {first} and {second}",
    )


def run(chosen: list[Entry], results: Path) -> None:
    """Run entries and append results."""
    ranks = None
    bar = tqdm(chosen, unit="class", file=sys.stdout, mininterval=5)
    for entry in bar:
        bar.set_postfix_str(entry.name, refresh=False)
        ranks = ranks or LocalRanks(2, timeout=WAIT, patience=SECONDS)
        outcome = compared(ranks.answers(compare, entry.name, entry.model_type, grace=WAIT + 4))
        result = Result(
            transformers.__version__, entry.name, entry.model_type, outcome.result, outcome.reason,
            outcome.loss, outcome.padding, outcome.images, outcome.by, entry.kind,
        )  # fmt: skip
        with results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if result.is_bad:
            bar.write(f"{outcome.result.upper()} {entry.name}: {outcome.reason}")
            ranks.close()  # the ranks of the group may be out of step
            ranks = None
    if ranks is not None:
        ranks.close()


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
    before = {x.name for x in earlier if x.version == transformers.__version__}
    run([x for x in chosen if options.again or x.name not in before], options.results)
    done_before, results = results_of(read(options.results), {entry.name for entry in all_entries})
    options.results.write_text(written(results))
    if options.results == RESULTS:
        PAGE.write_text(rendered(results))
    bad = [x.name for x in done_before if x.is_bad]
    print(
        f"{len(done_before)} of {len(all_entries)} classes, {len(bad)} neither exact nor refused: {bad}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
