"""A check that a job can leave on: some rows of some calls, computed once more, densely.

``settings`` says which calls; ``dense`` is the formula in float64, over positions and the mask's
rule alone; ``samples`` asks all ranks for it and hands what it finds to the host, which compares
and raises; ``traffic`` counts the bytes of a traced pass, and times it. It may import what
strategies import, and no strategy.
"""

from ring_jax.tripwire.samples import (
    check_backward as check_backward,
    check_forward as check_forward,
)
from ring_jax.tripwire.settings import (
    Turn as Turn,
    check as check,
    checked_every as checked_every,
)
from ring_jax.tripwire.traffic import (
    check_rate as check_rate,
    check_traffic as check_traffic,
    start as start,
)
