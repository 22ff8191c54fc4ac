"""Over gathered keys every case of the table is right, too."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, Case
from tolerances import assert_close

from ring_core import gather_refusals

GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]


@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case(case: Case, backend: Any) -> None:
    assert_close(case, backend.run(case, transport="gather"))
