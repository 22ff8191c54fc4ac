"""Head dims that are no power of two: the kernels are launched at the next one."""

from __future__ import annotations

import pytest
from backends.triton_compiler import launches_in

LAUNCHED = {
    (96, 96): (128, 128), (80, 80): (128, 128), (48, 48): (64, 64), (192, 128): (256, 128),
    (160, 160): (256, 256), (24, 24): (24, 24), (64, 64): (64, 64), (128, 64): (128, 64),
}  # fmt: skip


@pytest.mark.parametrize(("dims", "launched"), LAUNCHED.items(), ids=str)
def test_they_are_launched_at(dims: tuple[int, int], launched: tuple[int, int]) -> None:
    call = {"dims": dims, "tokens": [256, 256], "options": {"causal": True}}
    launches = [params["launch"] for params, _ in launches_in(call)]
    assert len(launches) >= 2
    for launch in launches:
        consts = dict(launch.consts)
        assert (consts["D"], consts["DV"]) == launched
        assert launch.hopper == (launched[0] == launched[1] in (64, 128))
