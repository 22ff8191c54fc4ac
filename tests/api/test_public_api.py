"""The packages' public names and signatures match the recorded ones in ``tests/api``."""

from __future__ import annotations

import public_api
import pytest


def test_public_names_and_signatures(request: pytest.FixtureRequest) -> None:
    backend = request.config.getoption("--backend")
    kept = public_api.file_of(backend).read_text().splitlines()
    lines = public_api.described(backend).splitlines()
    gone = [f"- {line}" for line in kept if line not in lines]
    new = [f"+ {line}" for line in lines if line not in kept]
    assert lines == kept, "if it is meant: python tests/public_api.py\n" + "\n".join(gone + new)
