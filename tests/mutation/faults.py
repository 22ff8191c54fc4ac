"""Put faults back one by one, and show that a test notices each: ``nox`` has no session for it.

    python tests/mutation/faults.py [NAME ...]

They are faults that once were, or that tests which have been merged were there for. Each is a
replacement in a file of the packages, made in a copy of the tree, and the tests that turn red.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A replacement in a file of ``packages``, and the tests that notice it on a backend."""

    path: str
    right: str
    wrong: str
    backend: str
    tests: str


TORCH, JAX, PALLAS = (
    f"ring-{x}/src/ring_{x.replace('-', '_')}" for x in ("torch", "jax", "jax-tpu")
)
TRITON = "ring-core/src/ring_core/triton"
TABLE = "tests/conformance/test_table.py -k shown-bias"
PADDED = "tests/torch_only/test_movement.py"
FLEX = "tests/torch_only/test_flex_attention.py"
KERNELS = "tests/jax_tpu_only/test_kernels.py"
FAULTS = {
    "torch-bias-lost-beside-a-mask": Fault(
        f"{TORCH}/attention.py", "if bias is None else bias\n    hidden", "\n    hidden", "torch", TABLE
    ),
    "flex-window-off-by-one": Fault(
        f"{TORCH}/replaced/mods.py", 'rest=int(name in ("lt", "gt"))', "rest=0", "torch", FLEX
    ),
    "flex-documents-that-return": Fault(
        f"{TORCH}/replaced/mods.py", "len(np.unique(numbers)) == len(starts) + 1 <", "len(starts) + 1 <",
        "torch", FLEX,
    ),
    "flex-blocks-by-hand": Fault(
        f"{TORCH}/replaced/mods.py", "if wrong.any():", "if False:", "torch", f"{FLEX} -k refused_by_name",
    ),
    "flex-cap-by-another-factor": Fault(
        f"{TORCH}/replaced/mods.py", "if factor == 1 / cap", "if factor", "torch", FLEX
    ),
    "flex-mask-of-an-older-table": Fault(
        f"{TORCH}/replaced/flex.py", "if known is None or known[0] != key:", "if known is None:", "torch",
        f"{FLEX} -k change",
    ),
    "torch-mask-turned": Fault(
        f"{TORCH}/attention.py", "torch.where(visible,", "torch.where(~visible,", "torch", TABLE
    ),
    "triton-hidden-keys-leak": Fault(
        f"{TRITON}/scores.py", "visible &= bias_block != -_INF", "visible &= cols >= 0",
        "torch-triton", "tests/torch_triton_only/test_kernels.py -k shown",
    ),
    "jax-blocks-of-some-heads-are-empty": Fault(
        f"{JAX}/kernels/block_index.py", "(bias != -jnp.inf).any(axis=1)", "(bias != -jnp.inf).all(axis=1)",
        "jax-tpu", f"{KERNELS} -k shown-heads",
    ),
    "pallas-hidden-keys-leak": Fault(
        f"{PALLAS}/scores.py", "shown if visible is None else visible & shown", "visible",
        "jax-tpu", f"{KERNELS} -k shown",
    ),
    "pallas-bias-not-shifted": Fault(
        f"{PALLAS}/scores.py", "bias - self.bias_shift[...]", "bias", "jax-tpu", f"{KERNELS} -k negative",
    ),
    "checks-see-sinks-in-padding": Fault(
        f"{TORCH}/tripwire/samples.py", "(rows >= tokens)[:, None]", "(rows < 0)[:, None]",
        "torch", f"{PADDED} -k sinks",
    ),
    "padding-is-advised-wrongly": Fault(
        "ring-core/src/ring_core/layouts/layout.py", "; pad to {padded}", "; pad to {padded + self.divisor}",
        "torch", f"{PADDED} -k says_how",
    ),
}  # fmt: skip


def main(names: list[str]) -> int:
    """Run the tests of each fault; return 1 if some stay green."""
    seen = {}
    for name in names or FAULTS:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            there = Path(folder) / "tree"
            subprocess.run(["git", "clone", "-q", "--shared", ROOT, there], check=True)
            path = there / "packages" / fault.path
            text = path.read_text()
            assert text.count(fault.right) == 1, name
            path.write_text(text.replace(fault.right, fault.wrong))
            sources = os.pathsep.join(map(str, there.glob("packages/*/src")))
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *fault.tests.split(), f"--backend={fault.backend}", "--all", "-xq", "-n0"],
                cwd=there, env=os.environ | {"PYTHONPATH": sources}, capture_output=True, text=True, check=False,
            )  # fmt: skip
        seen[name] = done.returncode == 1
        last = (done.stdout.splitlines() or done.stderr.splitlines())[-1]
        print(f"{name}: {'noticed' if seen[name] else 'NOT NOTICED'}: {last}", flush=True)
    return int(not all(seen.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
