"""Every snippet of the pages and READMEs runs with the backend it is about.

The front matter of a page names its backend, ``runs: core``, ``torch`` or ``jax``; with torch,
``ranks: 2`` starts two ranks. JAX gets eight host devices.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from pages import ROOT, Page, run

DOCS = ROOT / "docs"

SLOW = ("bench", "doctor")

#: Pages that JAX compiles slowly and whose subject `tests/jax_only` tests, too.
NIGHTLY = (
    "docs/coming-from-maxtext.md", "docs/jax-adapters.md", "docs/meshes-jax.md",
    "docs/layers-beside-attention-jax.md", "docs/training-loop-jax.md",
)  # fmt: skip

#: Backends whose commands, ``python -m ring_BACKEND``, run here; slow ones have tests of their own.
COMMANDS = ("core", "torch", "jax")


@dataclass(frozen=True)
class Readme:
    """Snippets of one backend in a README, with code to run before and after them."""

    path: str
    backend: str
    imports: str
    ranks: int = 1
    given: str = ""
    then: str = ""


TORCH_GIVEN = """
import torch
import torch.distributed as dist
torch.manual_seed(0)
seq_len, group = 64, None
q, k, v = whole = torch.randn(3, 1, seq_len, 4, 16)
"""
TORCH_THEN = """
heads_first = (x.transpose(1, 2) for x in whole)
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
torch.testing.assert_close(cp.unshard(out, dim=1), expected.transpose(1, 2))
"""
JAX_GIVEN = """
import jax
import numpy as np
q, k, v = whole = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
"""
JAX_THEN = """
expected = jax.nn.dot_product_attention(*whole, is_causal=True, implementation="xla")
np.testing.assert_allclose(out, expected, atol=1e-5)
"""

MODEL_GIVEN = """
from copy import deepcopy
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
)
model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
expected_model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
expected_model.load_state_dict(model.state_dict())
tokens = torch.randint(64, (1, 50))
from unchanged_models import model_of
gpt, token_ids = model_of("gpt"), torch.randint(11, (1, seq_len))
batch = {"input_ids": tokens, "labels": tokens}
"""
MODEL_THEN = """
expected_logits = model_of("gpt")(token_ids, torch.arange(seq_len)).detach()
torch.testing.assert_close(cp.unshard(logits.detach()), expected_logits)
expected_model(**batch).loss.backward()
for mine, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
"""
LAYER_GIVEN = """
import jax
import numpy as np
x = whole = jax.random.normal(jax.random.key(0), (2, 64, 32))
weights = {
    "qkv": jax.random.normal(jax.random.key(1), (32, 3, 4, 16)) / 6,
    "out": jax.random.normal(jax.random.key(2), (4, 16, 32)) / 8,
}
"""
LAYER_THEN = """
def dense(weights):
    q, k, v = jnp.einsum("btw,wnhd->nbthd", whole, weights["qkv"])
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    return whole + jnp.einsum("bthd,hdw->btw", out, weights["out"])
expected = dense(weights)
np.testing.assert_allclose(cp.unshard(layer(weights, x), dim=1), expected, atol=1e-4)
np.testing.assert_array_equal(whole[:, pos], x)
of_dense = jax.grad(lambda weights: jnp.mean(dense(weights) ** 2))(weights)
assert grads.keys() == of_dense.keys()
for name, grad in grads.items():
    np.testing.assert_allclose(grad, of_dense[name], rtol=1e-4, atol=1e-6)
"""

READMES = (
    Readme("README.md", "torch", "ring_torch", 2, TORCH_GIVEN + MODEL_GIVEN, TORCH_THEN + MODEL_THEN),
    Readme("README.md", "jax", "ring_jax", 1, LAYER_GIVEN, LAYER_THEN),
    Readme("packages/ring-core/README.md", "core", "ring_core"),
    Readme(
        "packages/ring-torch/README.md", "torch", "ring_torch", 2,
        TORCH_GIVEN + "dist.init_process_group()", TORCH_THEN,
    ),
    Readme("packages/ring-jax/README.md", "jax", "ring_jax", 1, JAX_GIVEN, JAX_THEN),
    Readme("packages/ring-jax-tpu/README.md", "jax-tpu", "ring_jax"),
    Readme("packages/ring-jax-gpu/README.md", "jax-gpu", r"ring_jax(_gpu)?"),
)  # fmt: skip


def snippets(backend: str) -> dict[str, Callable[[Path], None]]:
    """Return what this backend runs, by name: functions that take a working directory."""
    functions: dict[str, Callable[[Path], None]] = {}
    pages = [Page.read(path) for path in sorted(DOCS.rglob("*.md"))]
    for page in pages:
        if page.settings.get("runs") == backend:
            ranks = int(page.settings.get("ranks", "1"))
            path = str(page.path.relative_to(ROOT))
            functions[path] = partial(run_blocks, page.path, backend, ranks)
    functions |= {x.path: partial(run_readme, x) for x in READMES if x.backend == backend}
    paths = (ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")))
    for page in (*pages, *map(Page.read, paths)):
        for line in page.commands if backend in COMMANDS else ():
            if line.startswith(f"python -m ring_{backend} ") and line.split()[3] not in SLOW:
                functions[line] = partial(run_command, line)
    return functions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the test with the snippets of the backend under test."""
    chosen = snippets(metafunc.config.getoption("--backend"))
    metafunc.parametrize("snippet", [
        pytest.param(snippet, id=name, marks=[pytest.mark.nightly] * (name in NIGHTLY))
        for name, snippet in chosen.items()
    ])  # fmt: skip


def start(command: list[str], folder: Path) -> str:
    """Run a command as a user would, without this suite's JAX settings; return its output."""
    paths = [str(Path(x).resolve()) for x in os.environ.get("PYTHONPATH", "").split(":") if x]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": ":".join(paths), "JAX_NUM_CPU_DEVICES": "8", "NPROC": "32"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_blocks(path: Path, backend: str, ranks: int, folder: Path) -> None:
    """Run a page; with torch on ranks, as ``torchrun`` does, but importing torch only once."""
    if backend != "torch":
        start([sys.executable, str(ROOT / "tests" / "pages.py"), str(path)], folder)
        return
    from torch._C._distributed_c10d import TCPStore

    from ring_torch.local import LocalRanks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(ranks) as processes:
        processes.run(run_on_rank, str(path), ranks, store.port)


def run_on_rank(rank: int, path: str, ranks: int, port: int) -> None:
    """Run a page as if ``torchrun`` had just started this process."""
    from on_ranks import be_started

    be_started(rank, ranks, port)
    warnings.simplefilter("error")
    run(Page.read(Path(path)))


def run_readme(readme: Readme, folder: Path) -> None:
    blocks = [
        block.code
        for block, _ in Page.read(ROOT / readme.path).program
        if re.search(rf"^(from|import) {readme.imports}\b", block.code, re.MULTILINE)
    ]
    assert blocks
    path = folder / "page.md"
    parts = (readme.given, *blocks, readme.then)
    path.write_text("\n".join(f"```python\n{code.strip()}\n```\n" for code in parts))
    run_blocks(path, readme.backend, readme.ranks, folder)


def run_command(line: str, folder: Path) -> None:
    """Run a command in this process: another would take seconds to start."""
    (folder / "docs" / "images").mkdir(parents=True)
    _, _, package, *arguments = line.split()
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        patch.object(sys, "argv", [package, *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(package, run_name="__main__")
    assert ended.value.code == 0
    assert printed.getvalue()


def test_snippet(snippet: Callable[[Path], None], tmp_path: Path) -> None:
    snippet(tmp_path)
