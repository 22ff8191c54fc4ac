"""Comparing results of old and new code bit for bit: differences are found, known ones allowed."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.development import case_bits, same_bits
from benchmarks.development.old_and_new import HERE

NAME = "ring/zigzag/all/auto/float32/2x32"


def test_differences_are_found(backend: Any, tmp_path: Path) -> None:
    case = same_bits.all_cases()[NAME]
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        folder.mkdir()
    old, new = ({"ranks": backend.pool(2).run(case_bits.bits_of, case, str(x))} for x in folders)

    def found(changed: same_bits.Answer) -> list[same_bits.Difference]:
        return same_bits.differences(old, changed, folders, case["number"])

    assert found(new) == [] and "lse" in new["ranks"][1]["digests"]
    assert all(min(x["sent"].values()) > 0 for x in new["ranks"])
    assert same_bits.row_of(NAME, old, new, [])["result"] == "equal"

    path = case_bits.path_of(str(folders[1]), case, 1)
    tensors = torch.load(path)
    tensors["dk"][0, 0, 0, 0] += 0.5
    torch.save(tensors, path)
    changed = deepcopy(new)
    changed["ranks"][1]["digests"]["dk"] = case_bits.digest_of(tensors["dk"])
    (difference,) = found(changed)
    assert (difference.part, difference.text) == ("dk", "dk of rank 1 by 0.5")
    assert difference.largest == pytest.approx(0.5)
    assert same_bits.row_of(NAME, old, changed, [difference])["result"] == "differs"

    changed = deepcopy(new)
    changed["ranks"][0]["sent"]["forward"] += 4
    assert [x.part for x in found(changed)] == ["sent"]
    refused = {"ranks": [{"refused": "ValueError: no"}] * 2}
    assert [x.part for x in found(refused)] == ["refused"]
    assert same_bits.differences(refused, new, folders, 0) == []
    assert same_bits.row_of(NAME, refused, new, [])["result"] == "old refused"
    assert [x.part for x in found({"failed": "died"})] == ["failed"]


@pytest.mark.nightly
def test_a_tree_that_computes_otherwise_is_found(tmp_path: Path) -> None:
    arguments = ["--cases", "gather/zigzag/causal/*/2x32", "--json", str(tmp_path / "bits.json")]
    assert same_bits.main(["--old", str(HERE), *arguments]) == 0
    shutil.copytree(HERE / "packages", tmp_path / "packages")
    changed = tmp_path / "packages/ring-torch/src/ring_torch/autograd.py"
    text, line = changed.read_text(), "    return dq, dk, dv, None, None, dsinks"
    assert line in text
    changed.write_text(text.replace(line, "    dv = dv * 1.01\n" + line))
    assert same_bits.main(["--old", str(tmp_path), *arguments]) == 1
    rows = json.loads((tmp_path / "bits.json").read_text())["rows"]
    assert len(rows) == 3 and all(x["text"].startswith("dv of rank") for x in rows)
    assert all("; " not in x["text"] for x in rows)
