"""Count the bytes that TPUs exchange beside no kernel, in Ring and MaxText: ``nox -s tpu_exposed``.

Attention with its backward is compiled for eight chips of each generation, without a TPU, and XLA's
schedule is read: a transfer is exposed if no kernel runs between its start and its end. Every
strategy is compiled as Ring has it, and as MaxText's own ``AttentionOp`` has it under the same name
(``usp`` for the hybrid). Bytes are those that leave a device in both passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.common.harness import Report, command
from benchmarks.development.tpu_static import devices_of
from ring_core import StrategyConfig
from ring_core.tools.bench import watched

TOPOLOGIES = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4")
CHIPS, INNER, LOCAL, HEADS, KV_HEADS, DIM = 8, 4, 2048, 32, 8, 128
STRATEGIES = {"ring": "ring", "ulysses": "ulysses", "hybrid": "usp"}  # Ring's name, MaxText's
_WIDTH = {"bf16": 2, "f32": 4, "s32": 4}

Attend = Callable[[Any, Any, Any], Any]


def measure(topology: str, who: str, strategy: str) -> dict[str, Any]:
    """Return the row of a strategy on a generation."""
    devices = np.array(devices_of(topology)[:CHIPS])
    attend, mesh, axes = (_ring if who == "Ring" else _maxtext)(strategy, devices)
    along = NamedSharding(mesh, P(None, axes))
    q, k = (
        jax.ShapeDtypeStruct((1, CHIPS * LOCAL, heads, DIM), jnp.bfloat16, sharding=along)
        for heads in (HEADS, KV_HEADS)
    )

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    program = jax.jit(both, in_shardings=along, out_shardings=along).lower(q, k, k, q).compile()
    moved, exposed = traffic(str(program.as_text()), CHIPS if strategy == "ulysses" else INNER)
    figures = {"moved MB": round(moved / 1e6, 1), "exposed MB": round(exposed / 1e6, 1)}
    return {"topology": topology, "strategy": strategy, "who": who, **figures}


def _ring(strategy: str, devices: Any) -> tuple[Attend, Mesh, Any]:
    """Return Ring's attention, its mesh, and the axes of tokens."""
    from ring_jax import ring_attention

    config = StrategyConfig("hybrid", ulysses_size=INNER) if strategy == "hybrid" else strategy
    mesh, tokens = Mesh(devices, ("cp",)), P(None, "cp")
    call = partial(ring_attention, axis_name="cp", layout="zigzag", causal=True, strategy=config)
    return jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens), mesh, "cp"


def _maxtext(strategy: str, devices: Any) -> tuple[Attend, Mesh, Any]:
    """Return MaxText's attention, its mesh, and the axes of tokens."""
    import maxtext
    from flax import linen, nnx
    from maxtext.configs import pyconfig
    from maxtext.layers.attention_op import AttentionOp

    outer, inner = (CHIPS // INNER, INNER) if strategy == "hybrid" else (CHIPS, 1)
    settings = {
        "run_name": "exposed", "hardware": "tpu", "dataset_type": "synthetic", "log_config": False,
        "enable_checkpointing": False, "skip_jax_distributed_system": True, "dtype": "bfloat16",
        "base_num_query_heads": HEADS, "base_num_kv_heads": KV_HEADS, "head_dim": DIM,
        "base_emb_dim": 128, "per_device_batch_size": 1 / CHIPS, "attention": "flash",
        "max_target_length": CHIPS * LOCAL, "use_tokamax_splash": True,
        "context_parallel_load_balance": False,
        "context_parallel_strategy": STRATEGIES[strategy], "ici_context_parallelism": outer,
        "ici_context_usp_ulysses_parallelism": inner, "base_output_directory": "/tmp",
    }  # fmt: skip
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in settings.items())])
    sizes = {"context": outer, "context_usp_ulysses": inner}
    mesh = Mesh(devices.reshape([sizes.get(x, 1) for x in config.mesh_axes]), config.mesh_axes)
    rules = partial(linen.logical_axis_rules, config.logical_axis_rules)
    with mesh, rules():
        op = AttentionOp(
            config=config, mesh=mesh, attention_kernel="flash", max_target_length=CHIPS * LOCAL,
            num_query_heads=HEADS, num_kv_heads=KV_HEADS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0),
        )  # fmt: skip

    def attend(q: Any, k: Any, v: Any) -> Any:
        with mesh, rules():
            return op(q, k, v, None, None, "train")

    return attend, mesh, tuple(sizes)


def traffic(text: str, group: int) -> tuple[float, float]:
    """Return the bytes that leave a device in a compiled program, and those beside no kernel.

    ``group`` devices trade in an all-to-all, and each keeps its own part.
    """
    bodies = {
        match[1]: match[2].splitlines()
        for match in re.finditer(
            r"\n(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)\n\}\s*(?=\n\n|\Z)", text, re.DOTALL
        )
    }
    entry = re.search(r"\nENTRY %?([\w.-]+)", text)
    assert entry is not None and "is_scheduled=true" in text

    def of_body(name: str) -> tuple[float, float]:  # of one computation, loops of it included
        moved = exposed = 0.0
        kernels, begun = 0, dict[str, tuple[int, float]]()
        for line in bodies[name]:
            match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)", line)
            if match is None:
                continue
            result, types, operation, operands = match.groups()
            sizes = [  # bytes of each array of the result
                math.prod(int(n) for n in shape.split(",") if n) * _WIDTH[dtype]
                for dtype, shape in re.findall(r"\b(bf16|f32|s32)\[([\d,]*)\]", types)
            ]
            size, alone = 0.0, True  # of a transfer that ends here
            if "tpu_custom_call" in line:
                kernels += 1
            elif operation == "while":
                condition, body = re.findall(r"(?:condition|body)=%?([\w.-]+)", line)
                (times,) = re.findall(
                    r" s32\[\]\S* constant\((\d+)\)", "\n".join(bodies[condition])
                )
                of_loop = of_body(body)
                moved, exposed = moved + int(times) * of_loop[0], exposed + int(times) * of_loop[1]
                kernels += any("tpu_custom_call" in x for x in bodies[body])
            elif operation == "collective-permute-start":
                begun[result] = kernels, sizes[0]
            elif operation == "collective-permute-done":
                before, size = begun.pop(operands.strip(" %"))
                alone = kernels == before
            elif operation in ("all-to-all", "collective-permute"):
                size = sum(sizes) * (1 - 1 / group if operation == "all-to-all" else 1)
            else:
                assert not re.match(r"all-|reduce-scatter|collective|async", operation), line
            moved, exposed = moved + size, exposed + size * alone
        assert not begun
        return moved, exposed

    return of_body(entry[1])


@command(__doc__, {"--topology": {"nargs": "*", "default": TOPOLOGIES, "help": "of these alone"}})
def main(options: Any) -> int:
    """Compile everything and print the figures."""
    jax.config.update("jax_num_cpu_devices", CHIPS)  # as many as MaxText's settings ask for
    report = Report(options, {})
    each = list(product(options.topology, STRATEGIES, ("Ring", "MaxText")))
    for topology, strategy, who in watched(each, len(each), "program"):
        report.add(measure(topology, who, strategy))
    return 0
