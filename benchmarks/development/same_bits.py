"""Compare results of old and new code bit for bit, on CPUs over gloo.

Each tree runs every case in processes of its own: all strategies, layouts and options, on 2 and 4
ranks. ``out``, ``lse`` and all gradients of every rank have to be equal, and so have the bytes that
each rank sends in a pass. Differences are shown; the exit code is 1 if there is one::

    python -m benchmarks.development.same_bits --old ../before

``--old`` is a checkout with ``packages``. ``--cases 'gather/*'`` takes some of the cases, by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.report import Report, UsageError, command
from benchmarks.development import case_bits
from benchmarks.development.old_and_new import HERE, commit_of, process_of

Answer = dict[str, Any]  # a line of `case_bits`
LAYOUTS = ("contiguous", "zigzag", "striped")
#: Strategies as ``StrategyConfig`` takes them, and their layouts.
STRATEGIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ring": ({"name": "ring"}, LAYOUTS),
    "balanced": ({"name": "balanced"}, LAYOUTS[:1]),
    "gather": ({"name": "gather"}, LAYOUTS),
    "ulysses": ({"name": "ulysses"}, LAYOUTS),
    "hybrid-ring": ({"name": "hybrid", "ulysses_size": 2, "outer": "ring"}, LAYOUTS),
    "hybrid-gather": ({"name": "hybrid", "ulysses_size": 2, "outer": "gather"}, LAYOUTS),
}


Case = dict[str, Any]  # as `case_bits` takes it
#: What cases have unless their option says otherwise: arguments that are no tensors, names of
#: tensors beside q, k and v, heads of queries and keys, head dims of keys and values, numbers of
#: queries and keys of the whole sequence.
DEFAULTS: Case = {
    "options": {}, "tensors": (), "heads": (8, 4), "dims": (16, 16), "lengths": (64, 64), "lse_grad": False,
}  # fmt: skip


def causal(*tensors: str, **options: Any) -> Case:
    """Return a causal case with these tensors and arguments."""
    return {"options": {"causal": True, **options}, "tensors": tensors}


OPTIONS: dict[str, Case] = {
    "full": {},
    "causal": causal(),
    "window": causal(window=(21, 0)),
    "window-both": {"options": {"window": (5, 9)}},
    "chunks": causal(chunk_size=24),
    "documents": causal(cu_seqlens=(0, 11, 37, 64)),
    "segments": causal("segment_ids"),
    "bias": causal("bias"),
    "bias-of-all-heads": {"tensors": ("bias of all heads",)},
    "bias-very-negative": {"tensors": ("very negative bias",)},
    "booleans": {"tensors": ("mask",)},
    "alibi": causal("alibi_slopes"),
    "sinks": causal("sinks"),
    "softcap": causal(softcap=5.0),
    "scale": causal(softmax_scale=0.7),
    "dropout": causal(dropout_p=0.2, dropout_seed=7),
    "lse-grad": causal() | {"lse_grad": True},
    "equal-heads": causal() | {"heads": (4, 4)},
    "one-kv-head": causal() | {"heads": (8, 1)},
    "head-dims": causal() | {"dims": (16, 24)},
    "more-keys": causal() | {"lengths": (64, 96)},
    "long": causal() | {"heads": (2, 1), "lengths": (4096, 4096)},
    "all": causal(
        "segment_ids", "bias", "sinks", window=(30, 0), softcap=5.0, dropout_p=0.1, dropout_seed=3
    ) | {"lse_grad": True},
}  # fmt: skip
NUMERICS = (("auto", "float32"), ("eager", "float32"), ("auto", "bfloat16"))  # kernels and dtypes
RANKS = (2, 4)


def all_cases() -> dict[str, Case]:
    """Return the cases by name, as ``case_bits`` takes them; names end in ranks x local tokens."""
    made: dict[str, Case] = {}
    for ranks, strategy, option, (kernel, dtype) in product(RANKS, STRATEGIES, OPTIONS, NUMERICS):
        config, layouts = STRATEGIES[strategy]
        case = DEFAULTS | OPTIONS[option]
        for layout in layouts:
            name = f"{strategy}/{layout}/{option}/{kernel}/{dtype}/{ranks}x{case['lengths'][0] // ranks}"
            made[name] = case | {
                "option": option, "strategy": config, "layout": layout, "kernel": kernel,
                "dtype": dtype, "ranks": ranks, "number": len(made),
            }  # fmt: skip
    return made


class Difference(NamedTuple):
    """A part of a case's results that differs, on some rank, and by how much at most.

    ``part`` is the name of a tensor, ``sent`` for bytes, ``refused`` or ``failed``.
    """

    part: str
    text: str
    largest: float = 0.0


def differences(old: Answer, new: Answer, folders: Sequence[Path], number: int) -> list[Difference]:
    """Return what differs in the answers of two trees to a case.

    If only the old tree refuses a call, there is nothing to compare, and so no difference.
    """
    by_tree = {"old": old, "new": new}
    failed = [f"{name} failed: {x['failed']}" for name, x in by_tree.items() if "failed" in x]
    if failed:
        return [Difference("failed", "; ".join(failed))]
    if refusal := refusal_of(new):
        return [] if refusal_of(old) else [Difference("refused", f"new refuses: {refusal}")]
    if refusal_of(old):
        return []
    found: dict[str, Difference] = {}
    for rank, (a, b) in enumerate(zip(old["ranks"], new["ranks"], strict=True)):
        for name in sorted(a["digests"].keys() | b["digests"].keys()):
            if a["digests"].get(name) != b["digests"].get(name):
                largest = _largest([x / f"{number}-{rank}.pt" for x in folders], name)
                if name not in found or largest > found[name].largest:
                    text = f"{name} of rank {rank} by {largest:.2g}"
                    found[name] = Difference(name, text, largest)
        if a["sent"] != b["sent"]:
            text = f"bytes sent by rank {rank}: {a['sent']} before, {b['sent']} now"
            found.setdefault("sent", Difference("sent", text))
    return list(found.values())


def refusal_of(answer: Answer) -> str | None:
    """Return the first line of the reason why a tree refuses a case, or ``None``."""
    refusals = [x["refused"] for x in answer.get("ranks", ()) if "refused" in x]
    return str(refusals[0]).splitlines()[0] if refusals else None


def _largest(paths: Sequence[Path], name: str) -> float:
    """Return the largest difference of a tensor in two files; infinite if it cannot be compared."""
    old, new = (torch.load(path).get(name) for path in paths)
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    # Infinities of one sign are equal. Where just one of the two is NaN or infinite, the gap is.
    gaps = (old.double() - new.double()).abs()
    gaps[old == new] = 0.0
    return float(gaps.nan_to_num(float("inf")).max())


def ask(process: subprocess.Popen[str], cases: dict[str, Case]) -> Iterator[Answer]:
    """Yield the answers of a tree's process to cases, in their order, as they come.

    Raises:
        RuntimeError: The process ended before it had answered all.
    """
    assert process.stdin is not None and process.stdout is not None
    count = 0
    with process:
        process.stdin.write("\n".join(map(json.dumps, cases.values())))
        process.stdin.close()
        for line in process.stdout:  # libraries may print there, too
            if line.startswith(case_bits.ANSWER):
                count += 1
                yield json.loads(line.removeprefix(case_bits.ANSWER))
    if count < len(cases):
        raise RuntimeError(f"{process.args!r} ended at case {[*cases][count]}")


def row_of(name: str, old: Answer, new: Answer, found: list[Difference]) -> Answer:
    """Return what is shown of a case: its result, and what differs or why it is not compared."""
    if found:
        return {"case": name, "result": "differs", "text": "; ".join(x.text for x in found)}
    by_tree = {"old": refusal_of(old), "new": refusal_of(new)}
    refused = [tree for tree, refusal in by_tree.items() if refusal]
    result = f"{' and '.join(refused)} refused" if refused else "equal"
    return {"case": name, "result": result, "text": by_tree[refused[-1]] if refused else ""}


def body(options: Any) -> int:
    """Compare the cases; return the exit code, 1 if something differs."""
    named = all_cases()
    cases = {name: x for name, x in named.items() if fnmatchcase(name, options.cases)}
    if not cases:
        raise UsageError(
            f"--cases {options.cases}: no case has such a name, as {next(iter(named))}"
        )
    paths = {"old": options.old.resolve(), "new": HERE}
    commits = {name: commit_of(path) for name, path in paths.items()}
    report = Report(
        options.json, lambda: commits, lambda x: f"{x['case']} {x['result']}: {x['text']}"
    )
    rows: list[Answer] = []
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made) / name for name in paths]
        for folder in folders:
            folder.mkdir()
        processes = [
            process_of(path, case_bits.__file__, str(folder))
            for path, folder in zip(paths.values(), folders, strict=True)
        ]
        for (name, case), a, b in zip(
            cases.items(), *(ask(x, cases) for x in processes), strict=True
        ):
            rows.append(row_of(name, a, b, differences(a, b, folders, case["number"])))
            if options.all or rows[-1]["result"] == "differs":
                report.add(rows[-1])
    counts = Counter((x["case"].partition("/")[0], x["result"]) for x in rows)
    for strategy in dict.fromkeys(name for name, _ in counts):
        of_it = (f"{n} {result}" for (name, result), n in counts.items() if name == strategy)
        print(f"{strategy:14} {', '.join(of_it)}")
    return int(any(x["result"] == "differs" for x in rows))


def main(argv: list[str] | None = None) -> int:
    """Compare the cases asked for; return the exit code."""
    arguments: dict[str, dict[str, Any]] = {
        "--old": {"type": Path, "required": True, "help": "a checkout of the old code"},
        "--cases": {"default": "*", "metavar": "PATTERN", "help": "names of cases to compare"},
        "--all": {"action": "store_true", "help": "show and keep equal and refused cases, too"},
    }
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())
