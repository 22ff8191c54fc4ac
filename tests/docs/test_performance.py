"""Tables and charts on the pages are rendered from ``benchmarks/results`` and up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.common.cases import Setting
from benchmarks.common.pages import (
    METHODS,
    MOST_COLUMNS,
    PAGES,
    SETTINGS,
    chart,
    parts_of,
    printed,
    rendered,
    table,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "performance.md").read_text()
STRATEGIES = json.loads((RESULTS / "h200x4-strategies.json").read_text())["rows"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_and_charts_are_those_of_their_files(page: Path) -> None:
    """Pages are up to date. If not, run ``python -m benchmarks.common.pages``."""
    assert page.read_text() == rendered(page.read_text())


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.stem)
def test_every_file_of_results_can_be_printed(path: Path) -> None:
    """A page names it, and each part says by which command it was measured, in a narrow table."""
    assert path.name in PAGE
    text = printed(path)
    for part in parts_of(path).values():
        assert re.search(r"python -m benchmarks\.|nox -s bench", part["about"]["command"])
        shown = table(part["rows"])
        assert shown in text
        (columns,) = {line.count(" |") for line in shown.splitlines()}
        assert columns <= MOST_COLUMNS


def test_the_page_names_no_other_file() -> None:
    assert all((RESULTS / name).exists() for name in re.findall(r"`([\w-]+\.json)`", PAGE))


def test_a_setting_that_one_gpu_did_not_run_is_compared_with_128k_tokens() -> None:
    timed = {"ms": 1.0, "tflops": 100.0, "peak_gib": 1.0}
    row = {"gpus": 2, "forward": timed, "both": timed}
    half = {**timed, "tflops": 50.0}
    rows = [
        {**row, "setting": "window 128 128k 64/8 of 64 sinks", "method": "one"},
        {**row, "setting": "window 128 512k 64/8 of 64 sinks", "method": "ring", "both": half},
    ]
    assert table(rows).splitlines()[-1].count("(0.50)") == 1


def test_flops_count_both_head_dims() -> None:
    """FLOPs count two products forward and five backward, three of them over the q/k head dim."""
    pairs = 1024 * 1025 // 2
    equal, unlike = Setting(1024, dim=64), Setting(1024, dim=192, v_dim=128)
    assert equal.flops == {"forward": 4 * pairs * 32 * 64, "both": 14 * pairs * 32 * 64}
    both = 2 * pairs * 32 * (192 + 128 + 3 * 192 + 2 * 128)
    assert unlike.flops == {"forward": 2 * pairs * 32 * (192 + 128), "both": both}
    assert unlike.name == "causal 1k 32/8 of 192/128"


def test_below_the_chart_each_row_and_each_missing_bar_is_explained() -> None:
    """No mask is named in a row, and no bar is missing, without a sentence below the chart."""
    timed = {(row["setting"], row["method"]) for row in STRATEGIES if "both" in row}
    text = " ".join(PAGE.partition("end of chart -->")[2].partition("\n|")[0].split())
    explained, absent = text.split("Without a bar: ")
    by_name = {part.split(" in ")[0]: part for part in absent.split("), ")}
    for setting in SETTINGS:
        mask = setting.partition(" ")[0]
        assert mask == "causal" or f"`{mask}`: " in explained
        for name in {name for method, name in METHODS.items() if any(method in x for x in timed)}:
            is_drawn = any((setting, m) in timed for m, of in METHODS.items() if of == name)
            assert is_drawn != (f"`{mask}`" in by_name.get(name, "")), (setting, name)
    assert "itself and 4,096 keys before it" in text


def test_the_readme_has_figures_of_the_chart() -> None:
    lines = chart(STRATEGIES).splitlines()
    ring = {line[:21].strip(): line[-4:] for line in lines if line[21:25] == "Ring"}
    short, middle, long = (ring[f"causal {length} 32/8"] for length in ("8k", "32k", "128k"))
    text = f"{short} of one GPU's rate at 8k causal tokens, {middle} at 32k and {long} at 128k"
    assert text in (ROOT / "README.md").read_text()
