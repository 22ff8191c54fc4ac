"""Tables of the pages, from the code they are about; each function returns Markdown."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ring_core import (
    LAYOUTS,
    STRATEGIES,
    Mask,
    StrategyConfig,
    StrategyName,
    UnsupportedError,
    gather_refusals,
    make_plan,
    reference,
    ring_program,
)
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.programs.grid import rank_grid
from ring_core.programs.steps import pairs_of
from ring_core.viz import kv_messages

RING_SIZES = (1, 2, 4, 8, 16)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"


def faults() -> str:
    """Silent faults of other libraries: what, where it was reported, what Ring does, the test."""
    rows = []
    for fault in _of_tests("faults_of_others/models.py").FAULTS:
        test = f"`test_rejected_there_and_right_here[{fault.name}]`"
        rows.append((fault.text, f"**{fault.ring}** {fault.how}", test))
    return _table(("the fault, and where it was reported", "what Ring does", "test"), rows)


def models(part: Literal["notes", "reasons", "classes"]) -> str:
    """Every class of transformers with its result, or what the notes and reasons there mean."""
    page = _of_tests("sweep/page.py")
    made: str = page.classes(page.read()) if part == "classes" else getattr(page, part)()
    return made


def rings(*masks: Mask, seq_len: int, cp_size: int) -> str:
    """Imbalance, steps with work and messages of every ring under some masks."""
    rows = []
    for mask in masks:
        for name, strategy in pairs_of(ALL_LAYOUTS):
            layout = layout_for(name, mask, seq_len=seq_len, cp_size=cp_size)
            program = ring_program(
                make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout), strategy
            )
            rows.append(
                (
                    mask.describe(),
                    f"`{layout}`",
                    f"`{strategy}`",
                    f"{program.imbalance:.2f}",
                    f"{program.imbalance_by_step:.2f}",
                    f"{program.num_steps} of {cp_size}",
                    kv_messages(program),
                )
            )
    header = (
        "mask",
        "layout",
        "strategy",
        "imbalance",
        "imbalance by step",
        "steps with work",
        "K/V messages",
    )
    return _table(header, rows)


def pairs() -> str:
    """Which layouts and strategies go together: what a plan, or a gather of it, refuses."""
    rows = []
    for name in ALL_LAYOUTS:
        goes = ("yes" if _goes(name, strategy) else "no" for strategy in STRATEGIES)
        rows.append((f"`{name}`", *goes))
    return _table(("layout", *(f"`{strategy}`" for strategy in STRATEGIES)), rows)


def _goes(name: str, strategy: StrategyName) -> bool:
    mask, sizes = Mask(causal=True), dict[str, Any](seq_len=1024, cp_size=2)
    layout = layout_for(name, mask, **sizes)
    if strategy == "gather":
        return not gather_refusals(make_plan(mask, layout=layout, **sizes))
    try:
        if strategy == "hybrid":
            rank_grid(sizes["cp_size"], 8, layout)
        ring_program(
            make_plan(mask, layout=layout, **sizes), StrategyConfig(strategy).ring_strategy
        )
    except UnsupportedError:
        return False
    return True


def layouts(*, seq_len: int, cp_size: int) -> str:
    """Which tokens each rank holds."""
    header = ("layout", *(f"rank {rank}" for rank in range(cp_size)))
    rows = []
    for layout in LAYOUTS:
        plan = make_plan(Mask(), seq_len=seq_len, cp_size=cp_size, layout=layout)
        ranks = (" ".join(map(str, plan.positions(rank))) for rank in range(cp_size))
        rows.append((f"`{layout}`", *ranks))
    return _table(header, rows)


def errors(precision: Literal["float32", "bfloat16"], *, seq_len: int = 256) -> str:
    """Root mean square errors of the simulated ring against float64, by ring size."""
    inputs = [
        np.random.default_rng(n).standard_normal((1, seq_len, 2, 16)).astype(np.float32)
        for n in range(4)
    ]
    if precision == "bfloat16":  # numbers that bfloat16 has, so that rounding inputs costs nothing
        inputs = [(x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in inputs]
    q, k, v, dout = inputs
    out, _ = reference.attention(q, k, v, causal=True)
    exact = [out, *reference.attention_grads(dout, q, k, v, causal=True)[:3]]
    rows = []
    for cp_size in RING_SIZES:
        program = ring_program(
            make_plan(Mask(causal=True), seq_len=seq_len, cp_size=cp_size, layout="zigzag")
        )
        got, _, *grads = reference.simulate(program, q, k, v, dout=dout, precision=precision)
        errors_found = [_rms(a - b) for a, b in zip([got, *grads], exact, strict=True)]
        rows.append((cp_size, *(f"{error:.2e}" for error in errors_found)))
    return _table(("ranks", "out", "dQ", "dK", "dV"), rows)


def sessions() -> str:
    """Every session of the noxfile, in the words of its docstring."""
    rows = []
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        if isinstance(node, ast.FunctionDef) and any("nox.session" in text for text in decorators):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            rows.append((f"`nox -s {node.name}`", summary))
    return _table(("command", "what it does"), rows)


def layers() -> str:
    """Layers of each package, from the top down, as ``tool.importlinter`` has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rows = []
    for contract in contracts["contracts"]:
        for package in contract.get("containers", ()):
            names = (re.sub(r" [|:] ", ", ", x) for x in contract["layers"] if x != "__main__")
            rows.append((f"`{package}`", "; ".join(names)))
    return _table(("package", "from the top down"), rows)


def promises() -> str:
    """What is promised, the command that tests it, and how many tests the last kept run ran."""
    stored = json.loads((RESULTS / "reliability.json").read_text())["promises"]
    rows = []
    for name, promise in stored.items():
        counts = [
            sum(run[key] for run in promise["runs"]) for key in ("passed", "failed", "skipped")
        ]
        backends = ", ".join(dict.fromkeys(run["backend"] for run in promise["runs"]))
        rows.append((promise["text"], f"`nox -s reliability -- {name}`", backends, *counts))
    return _table(("promise", "command", "backends", "passed", "failed", "skipped"), rows)


def fuzz() -> str:
    """What the last kept run of random cases has run."""
    stored = json.loads((RESULTS / "fuzz.json").read_text())
    names = ("cases", "refused", "failed", "worst_error_over_tolerance", "seconds")
    rows = [
        (f"`{backend}`", *(run[name] for name in names))
        for backend, run in stored["backends"].items()
    ]
    header = ("backend", "cases", "refused", "failed", "worst error / tolerance", "seconds")
    return _table(header, rows)


def on_gpus() -> str:
    """Return how the cases of the table, and lost ranks, ended on 4 and on 2 H200s."""
    rows = [*_ended("4", "conformance-h200x4.json"), *_ended("2", "conformance-h200x2.json")]
    names = ("passed", "refused", "failed", "not reached")
    return _table(("H200s", "kernel, strategy and transport", *names), rows)


def _ended(gpus: str, file: str) -> list[tuple[object, ...]]:
    """Return a row for each kernel, strategy and transport of a run on so many GPUs."""
    kept = json.loads((RESULTS / file).read_text())
    runs = {f"`{name}`": run for name, run in kept["cases"].items()}
    if "lost ranks" in kept:
        runs |= {"a lost rank": kept["lost ranks"], "`ring_jax_gpu`": kept["jax"]}
    names = ("passed", "refused", "failed", "not reached")
    return [(gpus, what, *(run.get(name, 0) for name in names)) for what, run in runs.items()]


def hosts() -> str:
    """How jobs over several hosts ended."""
    stored = json.loads((RESULTS / "hosts.json").read_text())
    rows = [
        (f"`{backend}`", job["name"], job["words"], "" if job["ok"] else "failed")
        for backend, jobs in stored["backends"].items()
        for job in jobs
    ]
    return _table(("backend", "hosts x ranks, link", "how it ended", "failed"), rows)


def soak() -> str:
    """What ranks held after a fifth of the calls, and at their end."""
    stored = json.loads((RESULTS / "soak.json").read_text())
    rows = []
    for rank, runs in enumerate(stored["calls"]["ranks"]):
        for name, run in runs.items():
            counted = ("files", "threads", "plans", "calls", "agreed")
            files, threads, plans, calls, agreed = (
                f"{run['warm'][key]} to {run['end'][key]}" for key in counted
            )
            grown = (run["end"]["memory"] - run["warm"]["memory"]) / 2**20
            kept_of = f"{plans}; {calls}"
            bits = f"`{run['digest']}`"
            rows.append((f"{rank}, {name}", files, threads, kept_of, agreed, f"{grown:+.1f}", bits))
    header = (
        "rank, run",
        "open files",
        "threads",
        "plans; calls kept",
        "calls agreed on",
        "memory, MiB",
        "bits of results",
    )
    return _table(header, rows)


def long_sequence() -> str:
    """The one long sequence."""
    run = json.loads((RESULTS / "soak.json").read_text())["long"]
    header = ("tokens", "ranks", "window", "seconds", "largest error", "allowed")
    row = (
        f"{run['tokens']:,}", run["ranks"], run["window"], run["seconds"],
        f"{run['error']:.1e}", f"{run['allowed']:.1e}",
    )  # fmt: skip
    return _table(header, [row])


def mutants() -> str:
    """How many small changes of ring_core the tests notice, by module and in all."""
    stored = json.loads((RESULTS / "mutants.json").read_text())["modules"]
    outcomes = ("mutants", "killed", "stopped", "survived", "not reached", "not run")
    rows = [(f"`{module}`", *(counts[x] for x in outcomes)) for module, counts in stored.items()]
    total = ("all", *(sum(row[n] for row in rows) for n in range(1, len(rows[0]))))
    return _table(("module", *outcomes), [*rows, total])


def _of_tests(file: str) -> ModuleType:
    """Import a file of the tests, which are no package."""
    path = ROOT / "tests" / file
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
