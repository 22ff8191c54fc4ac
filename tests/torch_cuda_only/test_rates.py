"""Every case of the table of kernel times can be timed on a GPU, by the installed kernels."""

from __future__ import annotations

from pathlib import Path

from ring_torch.tools import rates


def test_every_case_has_times(tmp_path: Path) -> None:
    table = rates.renew(tmp_path / "rates.json", 2048, {})
    cases = [case for case in table.cases if case.tokens == 2048]
    sizes = [rates.Sizes(case.option, case.dims, case.heads) for case in cases]
    assert sizes == list(rates.CASES)
    assert all("triton" in dict(case.kernels) for case in cases)
