"""A ring runs right in a program with ``set_xla_flags``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: Program: compares both passes of a ring over all GPUs with XLA's kernel in float32 on one. It
#: prints the differences, and how XLA scheduled the transfers.
CODE = """
import json
import ring_jax_gpu
added = ring_jax_gpu.set_xla_flags()
import jax
import jax.numpy as jnp

keys = jax.random.split(jax.random.key(0), 4)
heads = (4, 2, 2, 4)
arrays = [jax.random.normal(key, (1, 1024, h, 128)) for key, h in zip(keys, heads)]
rounded = [x.astype("bfloat16") for x in arrays]
mesh = jax.make_mesh((jax.device_count(),), ("cp",))
cp = ring_jax_gpu.ContextParallel(mesh, axis_name="cp", layout="zigzag")

def ring(q, k, v):
    q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
    return cp.unshard(cp.attention(q, k, v, causal=True, kernel="triton"), dim=1)

def alone(q, k, v):
    return ring_jax_gpu.ring_attention(q, k, v, axis_name=None, causal=True, kernel="xla")

def both(attend):
    def run(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(dout.astype(out.dtype)))
    return jax.jit(run)

compiled = both(ring).lower(*rounded).compile()
with jax.default_matmul_precision("float32"):
    expected = both(alone)(*(x.astype("float32") for x in rounded))
pairs = zip(compiled(*rounded), expected)
off = max(float(jnp.abs(jax.device_get(a) - jax.device_get(b)).max() / jnp.abs(b).max()) for a, b in pairs)
text = compiled.as_text()
print(json.dumps([added, off, "COLLECTIVES_PEER_MEMORY" in text, text.count("collective-permute-start(")]))
"""


@pytest.mark.ranks(2)
def test_a_ring_with_the_flags() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", CODE], timeout=240, check=False, **options)
    assert done.returncode == 0, done.stderr
    added, off, by_peers, transfers = json.loads(done.stdout.splitlines()[-1])
    assert len(added) == 2 and off < 0.02
    assert by_peers and transfers >= 2
