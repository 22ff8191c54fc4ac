"""``set_xla_flags`` sets XLA's flags before JAX reads them, or raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ring_jax_gpu.xla_flags import XLA_FLAGS

MODE, LIMIT = XLA_FLAGS
WRITTEN = " ".join(f"--{name}={value}" for name, value in XLA_FLAGS.items())

#: What happens to XLA_FLAGS, before and after the call, and what JAX then says of it.
REPORT = """
import json, os
before = os.environ.get("XLA_FLAGS")
import jax
import ring_jax_gpu
imported = os.environ.get("XLA_FLAGS")
{earlier}
try:
    added = ring_jax_gpu.set_xla_flags()
except ValueError as error:
    added = str(error)
{later}
print(json.dumps([before == imported, added, os.environ.get("XLA_FLAGS")]))
"""


def outcome(flags: str | None = None, earlier: str = "", later: str = "") -> tuple[Any, str | None]:
    """Return the result of ``set_xla_flags``, or its error, and XLA_FLAGS after it."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags})
    code = REPORT.format(earlier=earlier, later=later)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    import_kept, added, in_environment = json.loads(done.stdout.splitlines()[-1])
    assert import_kept
    return added, in_environment


def test_the_installed_jaxlib_takes_them() -> None:
    """The installed jaxlib knows the flags: it ends a process that sets unknown ones."""
    assert outcome(later="jax.jit(lambda x: x + 1)(1.0)") == (XLA_FLAGS, WRITTEN)


def test_flags_of_the_user_stay() -> None:
    user_flags = f"--xla_force_host_platform_device_count=2 --{LIMIT}=3"
    added, flags = outcome(user_flags, later="assert len(jax.devices()) == 2")
    assert added == {MODE: "peer"}
    assert flags == f"{user_flags} --{MODE}=peer"


def test_a_second_call_adds_nothing() -> None:
    assert outcome(earlier="ring_jax_gpu.set_xla_flags()") == ({}, WRITTEN)
    assert outcome(f" --{MODE}=private --{LIMIT}=2 ") == ({}, f" --{MODE}=private --{LIMIT}=2 ")


def test_too_late() -> None:
    added, flags = outcome(earlier="jax.devices()")
    assert "JAX has started" in added
    assert WRITTEN in added
    assert flags is None


def test_a_file_of_flags() -> None:
    later = "os.environ.pop('XLA_FLAGS')"
    added, flags = outcome("flags.txt", later=later)
    assert "'flags.txt' names a file" in added
    assert flags is None
