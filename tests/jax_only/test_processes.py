"""Several processes with several devices each, over loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_core import reference
from ring_jax import ContextParallel

jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))
cp = ContextParallel(mesh, "cp")
whole = np.random.default_rng(0).standard_normal((3, 1, 32, 2, 8)).astype(np.float32)
everywhere = NamedSharding(mesh, P())
q, k, v = (jax.make_array_from_callback(x.shape, everywhere, lambda at, x=x: x[at]) for x in whole)


@jax.jit
def out_and_grad(q, k, v):
    def loss(q):
        out = cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)), causal=True))
        return (out * out).sum(), out
    return jax.grad(loss, has_aux=True)(q)


grad, out = (np.asarray(process_allgather(x, tiled=True)) for x in out_and_grad(q, k, v))
expected, _ = reference.attention(*whole, causal=True)
dq = reference.attention_grads(2 * expected, *whole, causal=True).dq
np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
np.testing.assert_allclose(grad, dq, rtol=5e-5, atol=5e-5)

dropping = {"causal": True, "dropout_p": 0.5, "dropout_seed": 5}  # by a call that nothing compiles
out = process_allgather(cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), **dropping)), tiled=True)
expected, _ = reference.attention(*whole, **dropping)
np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
print("equal", len(jax.devices()), len(jax.local_devices()))
"""


def test_two_processes_of_two_devices(tmp_path: Path) -> None:
    program = tmp_path / "ring.py"
    program.write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    running = [
        subprocess.Popen(
            [sys.executable, program, address, str(rank)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "equal 4 2"
