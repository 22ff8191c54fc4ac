"""Runs MaxText's own training program, tiny and on host devices, and writes each step's metrics.

``python runs.py DEVICES ATTENTION OUT`` makes all of :data:`RUNS` one after another. MaxText's
files are as they were installed: only one method of one class is replaced.
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

#: Settings of each run: the mesh of four devices, then the model.
RUNS: dict[str, dict[str, object]] = {
    "cp": {"ici_context_parallelism": 4},
    "dp-cp-packed": {
        "ici_data_parallelism": 2, "ici_context_parallelism": 2,
        "packing": True, "max_segments_per_seq": 4,
    },
    "fsdp-cp-explicit": {
        "ici_fsdp_parallelism": 2, "ici_context_parallelism": 2, "shard_mode": "explicit",
        "context_parallel_load_balance": False,
    },
    "tensor-cp-no-scan": {
        "ici_tensor_parallelism": 2, "ici_context_parallelism": 2,
        "scan_layers": False, "remat_policy": "full",
    },
    "window-sinks": {
        "ici_context_parallelism": 4, "attention_type": "local_sliding",
        "sliding_window_size": 12, "attention_sink": True,
    },
    "chunks-softcap": {
        "ici_data_parallelism": 2, "ici_context_parallelism": 2, "attention_type": "chunk",
        "chunk_attn_window_size": 24, "attn_logits_soft_cap": 5.0,
    },
    "mla": {
        "ici_data_parallelism": 2, "ici_context_parallelism": 2, "decoder_block": "deepseek",
        "attention_type": "mla", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "base_num_kv_heads": 4,
        "first_num_dense_layers": 2,
    },
}  # fmt: skip
EVERY: dict[str, object] = {
    "hardware": "cpu", "dataset_type": "synthetic", "enable_checkpointing": False, "steps": 4,
    "learning_rate": 0.01, "dtype": "float32", "vocab_size": 128, "max_target_length": 64,
    "base_emb_dim": 32, "base_mlp_dim": 64, "head_dim": 16, "base_num_query_heads": 4,
    "base_num_kv_heads": 2, "base_num_decoder_layers": 2, "log_config": False,
    "skip_jax_distributed_system": True,
}  # fmt: skip
KEPT = ("learning/loss", "learning/grad_norm", "learning/param_norm")


def run(name: str, devices: int, attention: str, folder: Path) -> list[dict[str, float]]:
    """Train for four steps, and return the metrics of each."""
    metrics = folder / f"{name}.json"
    settings = EVERY | {
        "run_name": name, "base_output_directory": folder, "metrics_file": metrics,
        "attention": attention, "per_device_batch_size": 4 // devices,
    } | RUNS[name]  # fmt: skip
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
        for name in sys.argv[4:] or RUNS:
            with patch("ring_jax.maxtext.ContextParallel", wraps=ContextParallel) as contexts:
                steps = run(name, devices, attention, Path(folder))
            results[name] = {"steps": steps, "rings": contexts.call_count}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "32")  # host devices wait for each other in threads of one pool
    main()
