"""``python -m ring_jax explain`` says what ``ContextParallel.explain`` says, without devices."""

from __future__ import annotations

import jax
import pytest
from jax import numpy as jnp

from ring_jax import ContextParallel
from ring_jax.tools.cli import main


def test_the_command_explains_devices_that_are_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cp = ContextParallel(jax.make_mesh((4,), ("cp",)), "cp")
    q, k = jnp.zeros((1, 64, 4, 16), jnp.bfloat16), jnp.zeros((1, 64, 2, 16), jnp.bfloat16)
    shape = "--cp 4 --heads 4/2 --head-dim 16"
    assert main(["explain", *shape.split(), "--seq-len", "64", "--window", "9,0"]) == 0
    first, _, text = capsys.readouterr().out.rstrip().partition("\n")
    assert (
        first == "rank 0 of 4 has queries [1, 16, 4, 16] and keys [1, 16, 2, 16], bfloat16 on cpu"
    )
    # The kernels of this platform are listed for default options, as for these.
    assert (
        text.splitlines()[-7:] == cp.explain(q, k, k, causal=True, window=(9, 0)).splitlines()[-7:]
    )
    assert main(["explain", *shape.split(), "--seq-len", "62"]) == 0
    assert "queries [1, 16, 4, 16]" in capsys.readouterr().out
    assert main(["explain", *shape.split(), "--seq-len", "64k", "--strategy", "x"]) == 2
    assert "ring_jax: error: " in capsys.readouterr().err
