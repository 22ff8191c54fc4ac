"""Compare results of old and new code bit for bit, on CPUs over gloo.

Each tree runs every case in processes of its own: all strategies, layouts and options, on 2 and 4
ranks. ``out``, ``lse`` and all gradients of every rank have to be equal, and so have the bytes that
each rank sends in a pass. Differences are shown; the exit code is 1 if there is one::

    python -m benchmarks.development.same_bits --old ../before

``--old`` is a checkout with ``packages``. ``--cases 'gather/*'`` takes some of the cases, by name.
``--one-gpu`` takes others: kernels of GPUs, three calls each, on two ranks that share one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.harness import Report, command
from benchmarks.development import case_bits
from benchmarks.development.old_and_new import OLD, trees

Answer = dict[str, Any]  # of `case_bits`
Case = dict[str, Any]  # as `case_bits` takes it
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
#: What cases have unless their option says otherwise: arguments that are no tensors, names of
#: tensors beside q, k and v, heads of queries and keys, head dims of keys and values, numbers of
#: queries and keys of the whole sequence.
DEFAULTS: Case = {
    "options": {}, "tensors": (), "heads": (8, 4), "dims": (16, 16), "lengths": (64, 64), "lse_grad": False,
}  # fmt: skip
_ON_GPU: Case = {
    "heads": (8, 2), "dims": (64, 64), "lengths": (2048, 2048), "batch": 1, "calls": 3, "device": "cuda",
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
#: What kernels of GPUs bind in the first call, and repeat.
GPU_OPTIONS: dict[str, Case] = {
    **{name: OPTIONS[name] for name in ("full", "causal", "segments", "equal-heads")},
    "without-lse": causal() | {"returns_lse": False},
    "inference": causal() | {"returns_lse": False, "grad": False},
    "two-sequences": causal() | {"batch": 2},
    "head-groups": causal() | {"returns_lse": False, "head_groups": True},
    "window": causal(window=(300, 0)) | {"returns_lse": False},
    "documents": causal(cu_seqlens=(0, 400, 1100, 2048)),
    "padding": causal(seq_len=1900),
    "sinks": causal("sinks") | {"returns_lse": False},
}
RANKS = (2, 4)
NUMERICS = (("auto", "float32"), ("eager", "float32"), ("auto", "bfloat16"))  # kernels and dtypes
GPU_NUMERICS = (("fa4", "bfloat16"), ("cudnn", "bfloat16"), ("triton", "bfloat16"))


def all_cases(*, one_gpu: bool = False) -> dict[str, Case]:
    """Return the cases by name, as ``case_bits`` takes them; names end in ranks x local tokens.

    With ``one_gpu`` those of two ranks that share it, without hybrids: the inner call of one is
    another case.
    """
    counts, strategies, options, numerics = (
        (RANKS[:1], [*STRATEGIES][:4], GPU_OPTIONS, GPU_NUMERICS)
        if one_gpu
        else (RANKS, [*STRATEGIES], OPTIONS, NUMERICS)
    )
    made: dict[str, Case] = {}
    for ranks, strategy, option, (kernel, dtype) in product(counts, strategies, options, numerics):
        config, layouts = STRATEGIES[strategy]
        case = DEFAULTS | options[option]
        if one_gpu:
            layouts = layouts[1:2] or layouts
            # Some gradients are added up in any order: there the forwards alone are compared.
            is_loose = kernel == "cudnn" or (kernel == "fa4" and option == "segments")
            case = DEFAULTS | _ON_GPU | options[option] | ({"grad": False} if is_loose else {})
            exact = {"deterministic": kernel == "fa4" and not is_loose}
            case["options"] = case["options"] | exact
        for layout in layouts:
            tokens = case["lengths"][0] // ranks
            made[f"{strategy}/{layout}/{option}/{kernel}/{dtype}/{ranks}x{tokens}"] = case | {
                "option": option, "strategy": config, "layout": layout, "kernel": kernel,
                "dtype": dtype, "ranks": ranks, "number": len(made),
            }  # fmt: skip
    return made


def row_of(name: str, number: int, old: Answer, new: Answer, folders: Sequence[Path]) -> Answer:
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
        for part in sorted(a["digests"].keys() | b["digests"].keys()):
            if a["digests"].get(part) != b["digests"].get(part):
                gap = _gap([case_bits.path_of(x, number, rank) for x in folders], part)
                if part not in parts or gap > parts[part][0]:
                    parts[part] = gap, f"{part} of rank {rank} by {gap:.2g}"
        if a["sent"] != b["sent"]:
            text = f"bytes sent by rank {rank}: {a['sent']} before, {b['sent']} now"
            parts.setdefault("sent", (0.0, text))
    text = "; ".join(text for _, text in parts.values())
    return differs | {"text": text} | ({} if text else {"result": "equal"})


def _gap(paths: Sequence[Path], name: str) -> float:
    """Return the largest difference of a tensor in two files; infinite if it cannot be compared."""
    old, new = (torch.load(path).get(name) for path in paths)
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    # Infinities of one sign are equal. Where just one of the two is NaN or infinite, the gap is.
    gaps = (old.double() - new.double()).abs()
    gaps[old == new] = 0.0
    return float(gaps.nan_to_num(float("inf")).max())


@command(__doc__, OLD | {"--cases": "*", "--one-gpu": {"action": "store_true"}})
def main(options: Any) -> int:
    """Compare the cases; return the exit code, 1 if something differs."""
    named = all_cases(one_gpu=options.one_gpu)
    cases = {name: x for name, x in named.items() if fnmatchcase(name, options.cases)}
    if not cases:
        sys.exit(f"--cases {options.cases}: no case has such a name, as {next(iter(named))}")
    counts = dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("old", "new")]
        for made in folders:
            made.mkdir()
        with trees(options, case_bits.__file__, map(str, folders)) as (old, new):
            report = Report(options, {"old": old.commit, "new": new.commit})
            for name, case in cases.items():
                for tree in (old, new):
                    tree.send(case)
                row = row_of(name, case["number"], old.answer(), new.answer(), folders)
                counts.setdefault(name.partition("/")[0], Counter())[row["result"]] += 1
                if row["result"] == "differs":
                    report.add(row)
    for strategy, results in counts.items():
        print(f"{strategy:14} {', '.join(f'{n} {result}' for result, n in results.items())}")
    return int(bool(report.rows))
