"""The benchmark of options times nothing that is wrong, and counts ratios round by round."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with little work, of ways that are right, wrong, and refuse."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import jax_gpu_options

    def right(setting: Any, q: Any, *x: Any) -> Any:
        return jax_gpu_options.exact(setting, *(y.astype("float32") for y in (q, *x))).astype(
            q.dtype
        )

    def forgets_the_scale(setting: Any, q: Any, *x: Any) -> Any:
        return right(setting, 2 * q, *x)

    def refuses(*_: Any) -> Any:
        raise ValueError("no such head dims\nand more")

    ring = partial(jax_gpu_options.ours, "xla")
    methods = {"ring": ring, "triton": right, "cudnn": forgets_the_scale, "other": refuses}
    monkeypatch.setattr(jax_gpu_options, "METHODS", methods)
    for name, value in {"GATE_LENGTH": 96, "ROUNDS": 3, "TURN": 0.001}.items():
        monkeypatch.setattr(jax_gpu_options, name, value)
    monkeypatch.setattr(
        jax_gpu_options,
        "SETTINGS",
        tuple(
            x._replace(
                heads=4,
                kv_heads=2,
                dim=x.dim // 8,
                v_dim=x.v_dim // 8,
                window=x.window and 20,
                methods=tuple(methods),
            )
            for x in jax_gpu_options.SETTINGS
        ),
    )
    return jax_gpu_options


def test_what_is_wrong_is_not_timed(small: Any) -> None:
    for setting in small.SETTINGS:
        if setting.name in ("window 1,024", "192/128", "bias"):
            wrong = small.errors(setting)
            assert wrong["other"] == "ValueError: no such head dims"
            assert small.passing(wrong) == ["ring", "triton"]
            assert small.passing({**wrong, "other": float("nan")}) == ["ring", "triton"]


def test_the_whole_run(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "found" / "figures.json"
    given = ["--length", "64", "--settings", "192/128", "bias", "--json", str(path)]
    assert small.main(given) == 0
    report = json.loads(path.read_text())
    assert report["environment"]["length"] == 64
    assert [row["setting"] for row in report["rows"]] == ["192/128", "bias"]
    for row in report["rows"]:
        assert set(row["milliseconds"]["both"]) == {"ring", "triton"}
        assert set(row["ratio"]["forward"]) == {"triton"}
        assert row["kernel"] == "triton"


def test_ratios_are_of_rounds(small: Any) -> None:
    times = {"ring": [2.0, 3.0, 2.0], "cudnn": [4.0, 2.0, 2.0]}
    row = small.row_of(small.SETTINGS[0], {"ring": 0.1}, {"both": times}, "cudnn")
    assert row["ratio"] == {"both": {"cudnn": [0.5, 1.0, 1.5]}}
    without = small.row_of(small.SETTINGS[0], {"ring": "no"}, {"both": {"cudnn": [1.0]}}, "")
    assert without["ratio"] == {"both": {}}
