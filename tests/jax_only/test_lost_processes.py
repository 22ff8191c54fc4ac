"""A process that is killed or stopped ends the others, in an error or by JAX's hand, in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_jax import ContextParallel

address, rank, how = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
jax.distributed.initialize(
    address, num_processes=2, process_id=rank, heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=10,
)
mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))
cp = ContextParallel(mesh, "cp")
whole = np.ones((1, 32, 2, 8), np.float32)
x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P()), lambda at: whole[at])


@jax.jit
def gradient(x):
    return jax.grad(lambda x: cp.attention(*(cp.shard(x) for _ in range(3)), causal=True).sum())(x)


for step in range(3):
    if rank == 1 and step == 2:
        print("lost", flush=True)
        os.kill(os.getpid(), how)
    jax.block_until_ready(gradient(x))
    print("step", step, flush=True)
"""


@pytest.mark.nightly(unless=["SIGKILL"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_other_process_ends_in_time(how: str, tmp_path: Path) -> None:
    program = tmp_path / "ring.py"
    program.write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    files = [tmp_path / f"{rank}.txt" for rank in range(2)]
    running = []
    for rank, file in enumerate(files):
        with file.open("w") as output:
            running.append(
                subprocess.Popen(
                    [sys.executable, program, address, str(rank), how],
                    env=environment, stdout=output, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while "lost" not in files[1].read_text() and time.monotonic() < until:
            assert running[1].poll() in (None, -signal.SIGKILL), files[1].read_text()
            time.sleep(0.1)
        code = running[0].wait(timeout=90)
    finally:
        for process in running:
            process.kill()
            process.wait()
    text = files[0].read_text()
    steps = [line for line in text.splitlines() if line.startswith("step ")]
    assert steps == ["step 0", "step 1"], text
    assert code != 0
