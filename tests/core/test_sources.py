"""Sources open no network, make no code of data, and have docstrings that are sentences."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline import ROOT, run_offline

SOURCES = [
    *sorted(ROOT.glob("packages/*/src/**/*.py")), *sorted(ROOT.glob("examples/*.py")), ROOT / "noxfile.py",
]  # fmt: skip

#: Modules that turn data into code, open connections or start processes, and functions that do.
MODULES = (
    "pickle cPickle dill cloudpickle marshal shelve joblib yaml ctypes urllib http ftplib requests httpx aiohttp"
    " xmlrpc smtplib telnetlib socketserver asyncio subprocess pty socket multiprocessing"
)
CALLS = (
    "eval exec compile __import__ system popen all_gather_object broadcast_object_list gather_object"
    " scatter_object_list send_object_list recv_object_list create_connection"
)
#: Loading is safe with one argument, and `compile` where it is of torch, triton or re.
SAFE = {
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
}
COMPILERS = ("torch.compile", "triton.compile", "re.compile")
ALLOWED = {
    # Ranks of one ring share what a Trainer of TRL has sampled, as TRL's own ranks do.
    "ring_torch/hf/rollouts.py": {"broadcast_object_list", "gather_object", "torch.load"},
    "noxfile.py": {"subprocess"},  # `ci` runs nox itself, once for each session
    "ring_torch/local.py": {"multiprocessing"},  # its own children
    "ring_torch/transports/symm_buffer.py": {"socket"},  # the name of this host
}


def findings(text: str) -> Iterator[str]:
    """Yield what in a source turns data into code or opens connections."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=aliases):
                yield from {alias.name.partition(".")[0] for alias in aliases} & {*MODULES.split()}
            case ast.ImportFrom(module=str(module), level=0):
                yield from {module.partition(".")[0]} & {*MODULES.split()}
            case ast.Call(func=called, keywords=keywords):
                name, given = ast.unparse(called), {ast.unparse(x) for x in keywords}
                if name.rpartition(".")[2] in CALLS.split() and name not in COMPILERS:
                    yield name.rpartition(".")[2]
                if "shell=True" in given:
                    yield "shell=True"
                if name in SAFE and SAFE[name] not in given:
                    yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_from_data_and_no_connections(path: Path) -> None:
    allowed = [names for end, names in ALLOWED.items() if path.as_posix().endswith(f"/{end}")]
    assert {*findings(path.read_text())} == set().union(*allowed)


def test_the_search_finds() -> None:
    for text in ("from urllib import request", "subprocess.run(x, shell=True)", "eval(x)"):
        assert list(findings(text))


#: First words of docstrings that are no sentence: `What is timed`, `Of a forward`.
FRAGMENTS = ("What", "Whether", "Of", "Which", "Where", "How", "As", "Those", "The same")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", ["packages", "benchmarks", "examples", "tests"])
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        nodes = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, DOCUMENTED))
        texts = [ast.get_docstring(node) or "" for node in nodes]
        assert [x for x in texts if x.startswith(tuple(f"{word} " for word in FRAGMENTS))] == [], (
            path
        )


def test_core_stays_offline() -> None:
    run_offline("""
import numpy as np
import ring_core, ring_core.cost, ring_core.viz, ring_core.tools.doctor
from ring_core import reference
x = np.ones((1, 8, 2, 4))
program = ring_core.ring_program(ring_core.make_plan(ring_core.Mask(causal=True), seq_len=8, cp_size=2))
reference.simulate(program, x, x, x, dout=x)
ring_core.viz.describe(program)
""")
