"""Runs MaxText's own training program, tiny and on host devices, and writes each step's metrics.

``python runs.py DEVICES ATTENTION OUT RUNS`` makes all runs, one after another; ``RUNS`` is JSON,
settings by name. MaxText's files are as they were installed: one method of a class is replaced.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import jax
import maxtext
from maxtext.layers.attention_op import AttentionOp
from maxtext.trainers.pre_train import train

from ring_jax import ContextParallel
from ring_jax.maxtext import with_ring

EVERY: dict[str, object] = {
    "hardware": "cpu", "dataset_type": "synthetic", "enable_checkpointing": False, "steps": 4,
    "learning_rate": 0.01, "dtype": "float32", "vocab_size": 128, "max_target_length": 64,
    "base_emb_dim": 32, "base_mlp_dim": 64, "head_dim": 16, "base_num_query_heads": 4,
    "base_num_kv_heads": 2, "base_num_decoder_layers": 2, "log_config": False,
    "skip_jax_distributed_system": True,
}  # fmt: skip
KEPT = ("learning/loss", "learning/grad_norm", "learning/param_norm")


def run(
    name: str, own: dict[str, object], devices: int, attention: str, folder: Path
) -> list[dict[str, float]]:
    """Train for four steps, and return the metrics of each."""
    metrics = folder / f"{name}.json"
    settings = EVERY | {
        "run_name": name, "base_output_directory": folder, "metrics_file": metrics,
        "attention": attention, "per_device_batch_size": 4 // devices,
    } | own  # fmt: skip
    if devices == 1:
        settings = {key: value for key, value in settings.items() if not key.startswith("ici_")}
    if attention != "ring":  # MaxText's own cannot split sequences over explicit axes
        settings["shard_mode"] = "auto"
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    train.main(["train.py", str(base), *(f"{key}={value}" for key, value in settings.items())])
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{key: record[key] for key in KEPT} for record in records]


def main() -> None:
    """Make all runs and write their metrics as JSON."""
    devices, attention, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    AttentionOp.apply_attention = with_ring(AttentionOp.apply_attention)
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, own in json.loads(sys.argv[4]).items():
            with patch("ring_jax.maxtext.ContextParallel", wraps=ContextParallel) as contexts:
                steps = run(name, own, devices, attention, Path(folder))
            results[name] = {"steps": steps, "rings": contexts.call_count}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "32")  # host devices wait for each other in threads of one pool
    main()
