"""The tables of measurements are those of the measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.common.chart import WIDTH, bar, chart
from benchmarks.common.tables import summary, table
from ring_core.choose import rates

ROOT = Path(__file__).parents[2]


JAX = "benchmarks/results/jax-h200.json"
JAX_RANKS = "benchmarks/results/jax-h200-ranks.json"
HOST = "benchmarks/results/h200x4-host.json"  # in a table of its own columns
OPTIONS = "benchmarks/results/options-h200*.json"
JAX_OPTIONS = "benchmarks/results/jax-options-h200.json"


def _tables_of(page: str) -> dict[str, str]:
    text = (ROOT / page).read_text()
    found = re.findall(r"<!-- table of (\S+) -->\n(.*?)\n<!-- end of table -->", text, re.DOTALL)
    return dict(found)


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("docs/performance.md", JAX),
        ("packages/ring-jax-gpu/README.md", JAX),
        ("docs/performance.md", JAX_RANKS),
    ],
)
def test_the_table_of_jax_is_that_of_its_file(page: str, file: str) -> None:
    """If this fails, paste what ``python -m benchmarks.jax.scaling --table FILE`` prints."""
    rows = json.loads((ROOT / file).read_text())["rows"]
    assert _tables_of(page)[file] == table(rows)


def test_the_table_of_options_is_that_of_its_file() -> None:
    """If this fails, paste what ``python -m benchmarks.torch.options --table FILE`` prints."""
    tables = _tables_of("docs/performance.md")
    measured = {str(path.relative_to(ROOT)) for path in ROOT.glob(OPTIONS)}
    assert {name for name in tables if (ROOT / name).match(OPTIONS)} == measured
    for name in measured:
        assert tables[name] == table(json.loads((ROOT / name).read_text())["rows"])


def test_the_table_of_options_of_jax_is_that_of_its_file() -> None:
    """If this fails, paste what ``python -m benchmarks.jax.options --table FILE`` prints."""
    rows = json.loads((ROOT / JAX_OPTIONS).read_text())["rows"]
    assert _tables_of("docs/performance.md")[JAX_OPTIONS] == table(rows)


def test_auto_chooses_in_jax_by_the_figures_of_that_file() -> None:
    """Medians of four digits; at 192/128 ours, which is cuDNN, as ``jax.nn`` gets zeros there."""
    report = json.loads((ROOT / JAX_OPTIONS).read_text())
    cases = [case for case in rates.default().cases if case.framework == "jax"]
    rows = [row for row in report["rows"] if "triton" in row["milliseconds"]["both"]]
    assert len(cases) == len(rows) > 0
    for case, row in zip(cases, rows, strict=True):
        cudnn = "ring" if row["setting"].startswith("192/128") else "cudnn"
        took = [row["milliseconds"][way] for way in ("forward", "both")]
        for name, method in (("triton", "triton"), ("cudnn", cudnn)):
            medians = [float(f"{of_way[method][1]:.4g}") for of_way in took]
            times = dict(case.kernels)[name]
            assert [times.forward, times.both] == medians, row["setting"]
        assert case.gpu == report["environment"]["gpu"]
        assert dict(case.versions) == {"jax": report["environment"]["jax"]}


def test_tables_are_those_of_their_files() -> None:
    """If this fails, paste what ``python -m benchmarks.torch.scaling --table FILE`` prints."""
    tables = _tables_of("docs/performance.md")
    others = {JAX, JAX_RANKS, JAX_OPTIONS}
    assert others <= tables.keys()
    others |= {name for name in tables if (ROOT / name).match(OPTIONS)}
    tables = {name: x for name, x in tables.items() if name not in others}
    measured = {str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/h200*.json")}
    measured -= {HOST}
    assert tables.keys() == measured
    for name, shown in tables.items():
        assert shown == table(json.loads((ROOT / name).read_text())["rows"])
    begin, end = "<!-- summary of benchmarks/results/h200x4.json -->", "<!-- end of summary -->"
    _, _, rest = (ROOT / "docs" / "performance.md").read_text().partition(begin)
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200x4.json").read_text())["rows"]
    settings = ("causal 32k 32/8", "causal 128k 32/8", "window 512k 32/8")
    shown = summary(rows, settings, ("one", "zigzag/fa4/gather/symm_mem", "ulysses"))
    assert rest.partition(end)[0].strip() == shown


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_chart_is_that_of_its_file(page: str) -> None:
    """If this fails, paste what ``python -m benchmarks.common.chart`` prints into the page."""
    begin, end = "<!-- chart of benchmarks/results/h200x4.json -->", "<!-- end of chart -->"
    _, found, rest = (ROOT / page).read_text().partition(begin)
    assert found
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200x4.json").read_text())["rows"]
    assert rest.partition(end)[0].strip() == f"```text\n{chart(rows)}\n```"


def test_bars_are_drawn_to_the_eighth() -> None:
    assert bar(0) == ""
    assert bar(0.5) == "█" * (WIDTH // 2)
    assert bar(1) == "█" * WIDTH
    assert bar(1 / WIDTH + 0.5 / WIDTH) == "█▌"
