"""The benchmark of options times only right results, and takes ratios round by round."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.cases import JAX_ROWS, Rival
from benchmarks.common.turns import passing
from benchmarks.jax import options
from benchmarks.jax.methods import exact, kernel


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a small benchmark of methods that are right, wrong, and refuse."""

    def right(q: Any, *x: Any, mask: Any) -> Any:
        return exact(*(y.astype("float32") for y in (q, *x)), mask=mask).astype(q.dtype)

    def forgets_the_scale(q: Any, *x: Any, mask: Any) -> Any:
        return right(2 * q, *x, mask=mask)

    def refuses(*_: Any, mask: Any) -> Any:
        raise ValueError(f"no such head dims\nfor {mask}")

    ring = partial(kernel, name="xla")
    methods = {"ring": ring, "triton": right, "cudnn": forgets_the_scale, "other": refuses}
    rivals = tuple(Rival(name, name) for name in methods if name != "ring")
    rows = tuple(
        replace(x, heads=4, kv_heads=2, dim=x.dim // 8, v_dim=x.v_dim // 8, rivals=rivals)
        for x in JAX_ROWS
    )
    for name, value in (
        ("METHODS", methods), ("JAX_ROWS", rows), ("WINDOW", 20), ("GATE_LENGTH", 96),
        ("TURN", 0.001),
    ):  # fmt: skip
        monkeypatch.setattr(options, name, value)
    return options


def test_what_is_wrong_is_not_timed(small: Any) -> None:
    for row in small.JAX_ROWS:
        if row.name in ("window", "bias"):
            wrong = small.errors(row)
            assert wrong["other"] == "ValueError: no such head dims"
            assert passing(wrong) == ["ring", "triton"]
            assert passing({**wrong, "other": float("nan")}) == ["ring", "triton"]


@pytest.mark.nightly
def test_the_whole_run(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "found" / "figures.json"
    arguments = [
        "--length=64",
        "--rounds=3",
        "--json",
        str(path),
        "--rows",
        "192/128, 32/8",
        "bias",
    ]
    assert small.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["environment"]["length"] == 64
    assert [row["row"] for row in report["rows"]] == ["192/128, 32/8", "bias"]
    for row in report["rows"]:
        assert set(row["milliseconds"]["both"]) == {"ring", "triton"}
        assert set(row["ratio"]["forward"]) == {"triton"}
        assert row["kernel"] == "triton"
