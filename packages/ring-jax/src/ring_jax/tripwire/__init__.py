"""The tripwire, a check that a job can leave on: some rows of some calls, computed again densely.

``settings`` decides which calls are checked; ``dense`` is attention in float64, from positions and
the mask's rule alone; ``samples`` computes it over all ranks and hands the numbers to the host,
which compares and raises; ``traffic`` counts the bytes that a traced pass sends, and times it.
Beside it ``agreement`` compares a call between processes before the first step. May import
``rank_view``, ``meshes`` and what is below them, and no strategy.
"""

from ring_jax.tripwire.samples import (
    check_backward as check_backward,
    check_forward as check_forward,
)
from ring_jax.tripwire.settings import (
    CheckedCall as CheckedCall,
    check as check,
    checked_every as checked_every,
)
from ring_jax.tripwire.traffic import (
    check_movement as check_movement,
    check_rate as check_rate,
    check_traffic as check_traffic,
    start_clock as start_clock,
)
