"""Random cases of fixed seeds, on the backend under test."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz.campaign import Campaign, Tally
from fuzz.draw import LIMITS

SEEDS = {"core": range(1_000_000, 1_000_100), "torch": range(1_000_000, 1_000_060)}
SEEDS["jax"] = range(LIMITS["jax"].values)


def test_random_cases(backend: Any, request: pytest.FixtureRequest) -> None:
    name = str(request.config.getoption("--backend"))
    seeds = SEEDS[name]
    campaign = Campaign(name, backend, Tally(seeds.start, seeds.start))
    failures = [campaign.run_next() for _ in seeds]
    assert not any(failures), "\n".join(map(str, filter(None, failures)))
    assert campaign.tally.cases > 0.6 * len(seeds), "most are run, not refused"
