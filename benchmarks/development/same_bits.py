"""Compare results of old and new code bit for bit, on CPUs over gloo.

Each tree runs every case of the tests on 2 and 4 ranks, by all strategies, in processes of its own.
``out``, ``lse`` and all gradients of every rank have to be equal, and so have the bytes that each
rank sends. Differences are shown; the exit code is 1 if there is one::

    python -m benchmarks.development.same_bits --old ../before

``--old`` is a checkout with ``packages``, of a time whose Ring takes the calls of today's tests.
``--cases 'gather/*'`` takes some of the cases, by name.
``--one-gpu`` takes others: kernels of GPUs, three calls each, on two ranks that share one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.harness import Report, command
from benchmarks.development import case_bits
from benchmarks.development.old_and_new import OLD, trees

Answer = dict[str, Any]  # of `case_bits`


def row_of(name: str, old: Answer, new: Answer, folders: Sequence[Path]) -> Answer:
    """Return what is shown of a case: its result, and what differs or why it is not compared.

    If only the old tree refuses a call, there is nothing to compare, and so no difference.
    """
    trees = {"old": old, "new": new}
    differs = {"case": name, "result": "differs"}
    if failed := [f"{tree} failed: {x['failed']}" for tree, x in trees.items() if "failed" in x]:
        return differs | {"text": "; ".join(failed)}
    refused = {
        tree: next(x["refused"] for x in answer["ranks"] if "refused" in x).splitlines()[0]
        for tree, answer in trees.items()
        if any("refused" in x for x in answer["ranks"])
    }
    if [*refused] == ["new"]:
        return differs | {"text": f"new refuses: {refused['new']}"}
    if refused:
        result, text = f"{' and '.join(refused)} refused", [*refused.values()][-1]
        return differs | {"result": result, "text": text}
    parts: dict[str, tuple[float, str]] = {}  # of each part that differs, where it does so most
    for rank, (a, b) in enumerate(zip(old["ranks"], new["ranks"], strict=True)):
        results = [dict(np.load(case_bits.path_of(folder, rank))) for folder in folders]
        for part in sorted(results[0].keys() | results[1].keys()):
            gap = _gap(*(x.get(part) for x in results))
            if gap is not None and (part not in parts or gap > parts[part][0]):
                parts[part] = gap, f"{part} of rank {rank} by {gap:.2g}"
        if a["sent"] != b["sent"]:
            text = f"bytes sent by rank {rank}: {a['sent']} before, {b['sent']} now"
            parts.setdefault("sent", (0.0, text))
    text = "; ".join(text for _, text in parts.values())
    return differs | {"text": text} | ({} if text else {"result": "equal"})


def _gap(old: Any, new: Any) -> float | None:
    """Return the largest difference of two arrays, infinite of shapes or NaN; None if equal."""
    if old is None or new is None or old.shape != new.shape:
        return float("inf")
    if old.tobytes() == new.tobytes():
        return None
    # Infinities of one sign are equal. Where just one of the two is NaN or infinite, the gap is.
    with np.errstate(invalid="ignore"):
        gaps = np.where(old == new, 0.0, np.abs(old - new))
    return float(np.nan_to_num(gaps, nan=np.inf).max())


@command(__doc__, OLD | {"--cases": "*", "--one-gpu": {"action": "store_true"}})
def main(options: Any) -> int:
    """Compare the cases; return the exit code, 1 if something differs."""
    every = [*case_bits.all_runs(one_gpu=options.one_gpu)]
    cases = [name for name in every if fnmatchcase(name, options.cases)]
    if not cases:
        sys.exit(f"--cases {options.cases}: no case has such a name, as {every[0]}")
    counts = dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("old", "new")]
        for made in folders:
            made.mkdir()
        with trees(options, case_bits.__file__, map(str, folders)) as (old, new):
            report = Report(options, {"old": old.commit, "new": new.commit})
            for name in cases:
                for tree in (old, new):
                    tree.send([name, options.one_gpu])
                row = row_of(name, old.answer(), new.answer(), folders)
                counts.setdefault(name.partition("/")[0], Counter())[row["result"]] += 1
                if row["result"] == "differs":
                    report.add(row)
    for strategy, results in counts.items():
        print(f"{strategy:14} {', '.join(f'{n} {result}' for result, n in results.items())}")
    return int(bool(report.rows))
