"""MaxText's training program gives the same losses on the ring as with its own attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import compare

PROGRAM = Path(__file__).with_name("runs.py")
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the runs of MaxText's attention on one and four devices, and of the ring on four."""
    results = []
    for devices, attention in ((1, "dot_product"), (4, "dot_product"), (4, "ring")):
        out = tmp_path_factory.mktemp("runs") / "results.json"
        arguments = (str(devices), attention, str(out), json.dumps(RUNS))
        command = (sys.executable, str(PROGRAM), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        results.append(json.loads(out.read_text()))
    return results


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_one_device(name: str, runs: list[dict[str, Any]]) -> None:
    """Metrics differ from one device's at most twice as much as MaxText's do on four devices."""
    one_device, own, ring = (by_name[name] for by_name in runs)
    assert (one_device["rings"], own["rings"]) == (0, 0)
    assert ring["rings"] > 0
    expected, baseline, actual = (
        np.array([list(step.values()) for step in run["steps"]]).T
        for run in (one_device, own, ring)
    )
    assert expected.shape == (3, 4)
    assert expected[0, -1] < expected[0, 0] - 1  # the model learns
    for metrics in zip(actual, expected, baseline, strict=True):
        bad, error, bound = compare(*metrics, "float32")
        assert not bad
        assert error <= bound
