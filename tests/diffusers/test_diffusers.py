"""Diffusers' transformers on a ring have one process's outputs and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from diffusers import ContextParallelConfig, ParallelConfig
from on_ranks import on_ranks

from ring_core import UnsupportedError
from ring_torch import ContextParallel, replace_sdpa
from ring_torch.local import LocalRanks


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Import the example as a module that ranks can import, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield importlib.import_module("diffusers_models")


@pytest.fixture(scope="module")
def pool(example: ModuleType) -> Iterator[LocalRanks]:
    assert example.MODELS
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "flux"])
@pytest.mark.parametrize(
    ("strategy", "layout"), [("ring", "zigzag"), ("gather", "contiguous"), ("ulysses", "striped")]
)
def test_a_model_is_that_of_one_process(
    pool: LocalRanks, example: ModuleType, name: str, strategy: str, layout: str
) -> None:
    for output, gradients in pool.run(example.compare, name, strategy, layout):
        assert output < 5e-6
        assert gradients < 1e-5


@on_ranks
def test_diffusers_own_context_parallelism_is_refused() -> None:
    """Turn it on before, and after."""
    example = importlib.import_module("diffusers_models")
    cp, before, after = ContextParallel(), example.wan(), example.wan()
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    before._parallel_config = config  # as enable_parallelism does, which needs GPUs
    with pytest.raises(UnsupportedError, match="diffusers' own context parallelism"):
        replace_sdpa(before, cp)
    replace_sdpa(after, cp, whole_keys=("blocks.*.attn2",))
    after._parallel_config = config
    with pytest.raises(UnsupportedError, match="diffusers' own context parallelism"):
        after(**example.batch_of("wan"))
