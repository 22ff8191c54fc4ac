"""Processes end in time, by an error or by JAX itself, if another is killed or stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from processes import started

PROGRAM = """
import os, signal, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_jax import ContextParallel

address, rank, how = sys.argv[1], int(sys.argv[3]), getattr(signal, sys.argv[4])
jax.distributed.initialize(
    address, num_processes=2, process_id=rank, heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=2,
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
    with started(program, 2, how, devices=1) as (survivor, lost):
        until = time.monotonic() + 120
        while "lost" not in lost.text and time.monotonic() < until:
            assert lost.process.poll() in (None, -signal.SIGKILL), lost.text
            time.sleep(0.1)
        code = survivor.process.wait(timeout=90)
        text = survivor.text
    steps = [line for line in text.splitlines() if line.startswith("step ")]
    assert steps == ["step 0", "step 1"], text
    assert code != 0
