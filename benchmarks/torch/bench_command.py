"""Keep what ``python -m ring_torch bench`` prints as a file whose table a page can show.

The command runs once for each length, with the options that follow ``--``. To time torch's kernels
alone, run it where flash-attn-4 is not installed::

    python -m benchmarks.torch.bench_command --lengths 8k 32k 128k --json cudnn.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.common.harness import Report, command
from benchmarks.torch import described


@command(
    __doc__,
    {
        "--lengths": {"nargs": "+", "default": ["8k", "32k"], "metavar": "N"},
        "rest": {"nargs": "*", "help": "options of the command, behind --"},
    },
)
def main(options: Any) -> int:
    """Run the command for each length; returns the exit code."""
    report = Report(options, described())
    for length in options.lengths:
        words = [sys.executable, "-m", "ring_torch", "bench", "--json", "--seq-len", length]
        done = subprocess.run(
            [*words, *options.rest], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            print(done.stdout)
            return done.returncode
        printed = json.loads(done.stdout[done.stdout.index("{") :])
        report.environment |= {"gpus": printed["setting"]["ranks"], "versions": printed["versions"]}
        setting = {"tokens": printed["setting"]["seq_len"], "setting": printed["setting"]}
        for timing in printed["timings"]:
            alone, ring = timing["alone"], timing["ring"]
            rates = [timing["work_fraction"] * a / b for a, b in zip(alone, ring, strict=True)]
            report.add(setting | {
                "bench_pass": timing["name"], "alone_ms": 1e3 * median(alone), "ring_ms": 1e3 * median(ring),
                "shares": [min(rates), timing["efficiency"], max(rates)], "check_cost": timing["check_cost"],
            })  # fmt: skip
    return 0
