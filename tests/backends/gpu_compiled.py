"""Compiles programs for GPUs without having one, by XLA's own GPU compiler.

``python tests/backends/gpu_compiled.py LIBRARY`` prints, as JSON, the schedule of the loops of a
ring over eight H100s as letters, ``S`` for the start of a transfer, ``D`` for its end and ``K`` for
attention, and what they copy. ``LIBRARY`` is JAX's CUDA plug-in, which needs no GPU for this.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxlib import xla_client

import ring_jax

#: Properties of the GPU for XLA's compiler, a ``GpuTargetConfig`` in protobuf text format.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 patch: 1 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
DEVICES, LOCAL = 8, 512


def compiled(library: str) -> str:
    """Compile the forward and backward of a causal zigzag ring, and return the scheduled text."""
    api = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    topology: Any = xla_client.make_c_api_device_topology(
        api, "h100", target_config=H100, topology=f"1x1x{DEVICES}"
    )
    devices: Any = topologies.TopologyDescription(topology._make_compile_only_devices()).devices
    mesh = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))
    cp = ring_jax.ContextParallel(mesh, "cp", layout="zigzag")
    tokens = NamedSharding(mesh, P(None, "cp"))
    q, k = (
        jax.ShapeDtypeStruct((1, DEVICES * LOCAL, heads, 64), jnp.bfloat16, sharding=tokens)
        for heads in (8, 2)
    )

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = cp.attention(q, k, v, causal=True, kernel="xla", strategy="ring")
        return out.astype(jnp.float32).sum()

    return str(jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower().compile().as_text())


def loops_of(text: str) -> list[tuple[str, list[str]]]:
    """Return, for each loop that transfers something, its schedule and what it copies.

    Copies that zero an accumulator do not count; their source is a ``loop_broadcast``.
    """
    loops = []
    letters = {"collective-permute-start": "S", "collective-permute-done": "D", "while": "K"}
    for match in re.finditer(r"\n(?!ENTRY)(?:%?[\w.-]+ [^\n]*)\{\n(.*?)\n\}", text, re.DOTALL):
        if "collective-permute-start(" in match[1]:
            operations = re.findall(r" = (.*?) ([\w-]+)\((%[\w.-]*)?", match[1])
            word = "".join(letters.get(operation, "") for _, operation, _ in operations)
            copied = [
                result for result, operation, source in operations
                if operation.startswith("copy") and not source.startswith("%loop_broadcast")
            ]  # fmt: skip
            loops.append((word, copied))
    return loops


if __name__ == "__main__":
    sys.stdout.write(json.dumps(loops_of(compiled(sys.argv[1]))) + "\n")
