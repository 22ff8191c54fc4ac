"""Run models of transformers, their switches, or options of Trainers and adapters on two ranks.

Each row of a table says if one is exact or refused. Rows that a table has for the installed version
are not run again, and those of other releases are kept::

    nox -s sweep
    nox -s "sweep-3.12(5.24)" -- --only llama bert --again
    nox -s sweep_options -- --only LoraConfig peft
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import transformers  # after the environment variables above, which it reads
from backends.torch_ranks import Pools
from tqdm import tqdm

from ring_torch.local import PRELOADED
from sweep import page, switches
from sweep.compare import compare, entries

VERSION = transformers.__version__
SECONDS = 60.0  # limit for a class
WAIT = 8.0  # limit for a rank that waits for another


def outcome_of(pools: Pools, entry: page.Result, **changes: Any) -> page.Result:
    """Run a class on two ranks, and combine their answers into one result."""
    answers = pools[2].answers(compare, entry.name, entry.model_type, changes, grace=WAIT + 4)
    texts = [str(x).strip().splitlines()[-1][:300] for ok, x in answers if not ok]
    if texts:
        outcome = replace(entry, result="hanging", reason="; ".join(texts))
    else:
        outcome, second = (replace(x, kind=entry.kind) for _, x in answers)
        if replace(outcome, reason="") != replace(second, reason=""):
            result = "hanging" if "error" in (outcome.result, second.result) else "wrong"
            reason = f"ranks differ: {outcome} and {second}"
            outcome = replace(entry, result=result, reason=reason)
    if outcome.is_bad:
        pools.pop(2).close()  # ranks may be out of step
    return outcome


def row_of_switches(pools: Pools, entry: page.Result, default: page.Result) -> switches.Row:
    """Run a class with each of its switches; ``default`` is its result without any."""
    verdicts = {}
    for switch in switches.switches_of(entry):
        outcome = outcome_of(pools, entry, kind=switch.kind, values=switch.values)
        verdicts[switch.label] = switches.verdict(outcome, default)
    return switches.Row(VERSION, entry.name, verdicts)


def swept(
    chosen: Mapping[Any, Any], rows: dict[Any, Any], judge: Callable[[Any], Any], path: Path,
    others: Any = (), *, again: bool,
) -> bool:  # fmt: skip
    """Judge the entries whose rows a table lacks, or which are bad; return True if some are.

    The table, with the rows of others, is written after each.
    """
    bar = tqdm(chosen.items(), file=sys.stdout, mininterval=5)
    for key, entry in bar:
        bar.set_postfix_str(str(key), refresh=False)
        if again or key not in rows or rows[key].is_bad:
            rows[key] = row = judge(entry)
            path.write_text(page.written([*rows.values(), *others]))
            if row.is_bad:
                bar.write(f"BAD {asdict(row)}")
    bad = [key for key, row in rows.items() if row.is_bad]
    print(f"{len(rows)} rows, {len(bad)} neither exact nor refused: {bad}")
    return bool(bad)


def main() -> int:
    """Run what is chosen, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", choices=("models", "switches", "options"))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--again", action="store_true", help="also what was run before")
    options = parser.parse_args()

    def chosen(names: Mapping[Any, str]) -> list[Any]:
        words = [word.lower() for word in options.only]
        return [x for x, name in names.items() if any(word in name.lower() for word in words)]

    own: dict[Any, Any]
    rows: dict[Any, Any]
    judge: Callable[[Any], Any]
    if options.table == "options":
        from sweep_options import table

        rows, tried = table.read(), {x.key: x for x in table.entries()}
        names = {x: f"{y.kind} {y.owner} {y.option}" for x, y in tried.items()}
        with closing(table.Ranks()) as ranks:
            judge = lambda x: table.judged(ranks, x)  # noqa: E731
            own = {key: tried[key] for key in chosen(names)}
            return int(swept(own, rows, judge, table.RESULTS, again=options.again))
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*PRELOADED, "transformers.modeling_utils", "transformers.masking_utils"]
    )
    forkserver.ensure_running()
    installed, results = {x.name: x for x in entries()}, page.read()
    own = {name: installed[name] for name in chosen({x: x for x in installed})}
    with closing(Pools(timeout=WAIT, patience=SECONDS)) as pools:
        if options.table == "models":
            rows = {x.name: x for x in results if x.version == VERSION and x.name in installed}
            others = [x for x in results if x.release != VERSION.rpartition(".")[0]]
            judge = lambda x: outcome_of(pools, x)  # noqa: E731
            return int(swept(own, rows, judge, page.RESULTS, others, again=options.again))
        defaults = page.of_release(results, VERSION)
        labels = {
            name: {switch.label for switch in switches.switches_of(entry)}
            for name, entry in own.items() if name in defaults and defaults[name].result == "exact"
        }  # fmt: skip
        # A class is run again if it has another set of switches than in the table.
        rows = {
            x.name: x for x in page.read(switches.TABLE, switches.Row)
            if labels.get(x.name, {*x.verdicts}) == {*x.verdicts}
        }  # fmt: skip
        judge = lambda x: row_of_switches(pools, x, defaults[x.name])  # noqa: E731
        own = {name: own[name] for name, has in labels.items() if has}
        return int(swept(own, rows, judge, switches.TABLE, again=options.again))


if __name__ == "__main__":
    sys.exit(main())
