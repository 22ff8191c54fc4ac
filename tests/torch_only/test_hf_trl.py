"""Trainers of TRL, parallelized, train and evaluate as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl_trained import trl_trained

from ring_torch.local import LocalRanks


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_steps_are_those_of_one_device(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {}
    with LocalRanks(1) as one:
        expected = one.run(trl_trained, 1, None, kind, str(tmp_path / "one"), options)[0]
    with LocalRanks(2) as pair:
        both = pair.run(trl_trained, 2, 2, kind, str(tmp_path / "ring"), options)
    assert sum(name.endswith(" loss") for name in expected) == 4
    for found in both:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
