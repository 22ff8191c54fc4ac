"""No network, no code from data: in the sources of all packages, and where core runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline import ROOT, run_offline

SOURCES = [
    *sorted(ROOT.glob("packages/*/src/**/*.py")), *sorted(ROOT.glob("examples/*.py")), ROOT / "noxfile.py",
]  # fmt: skip

#: Modules that turn data into code, or open connections.
MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "ctypes",
    "urllib", "http", "ftplib", "requests", "httpx", "aiohttp", "xmlrpc", "smtplib", "telnetlib",
    "socketserver", "asyncio", "subprocess", "pty",
}  # fmt: skip
#: Functions and methods that do, by their names.
CALLS = {
    "eval", "exec", "compile", "__import__", "system", "popen", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "create_connection",
}  # fmt: skip
ALLOWED = {
    # Ranks of one ring share what a Trainer of TRL has sampled, as TRL's own ranks do.
    "packages/ring-torch/src/ring_torch/hf/rollouts.py": {
        "broadcast_object_list",
        "gather_object",
        "torch.load",
    },
    "noxfile.py": {"subprocess"},  # `ci` runs nox itself, once for each session
    "packages/ring-torch/src/ring_torch/local.py": {"multiprocessing"},  # its own children
    "packages/ring-torch/src/ring_torch/transports/symm_buffer.py": {
        "socket"
    },  # the name of this host
}


def findings(text: str) -> Iterator[str]:
    """Yield what in a source turns data into code or opens connections."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in MODULES | {"socket", "multiprocessing"}:
                yield name.partition(".")[0]
        if isinstance(node, ast.Call):
            yield from _finding_of_call(node)


def _finding_of_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    of = ast.unparse(called).rpartition(".")[0]
    if name in CALLS and of not in ("torch", "triton", "re"):  # torch.compile, re.compile
        yield name
    keywords = {k.arg: k.value for k in node.keywords}
    shell = keywords.get("shell")
    if isinstance(shell, ast.Constant) and shell.value:
        yield "shell=True"
    if (of, name) in (("torch", "load"), ("np", "load"), ("numpy", "load")):
        safe = ("weights_only", True) if of == "torch" else ("allow_pickle", False)
        value = keywords.get(safe[0])
        if not (isinstance(value, ast.Constant) and value.value is safe[1]):
            yield f"{of}.load"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_from_data_and_no_connections(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix(), set())
    assert set(findings(path.read_text())) <= allowed


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from urllib import request", "eval(x)", "os.system(x)", "torch.load(f)",
        "subprocess.run(x, shell=True)", "dist.all_gather_object(a, b)", "import socket",
        "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_search_finds(text: str) -> None:
    assert list(findings(text))


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
