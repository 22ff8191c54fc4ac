"""Check of results in a running job: some rows of some calls are recomputed densely and compared.

- ``settings`` decides which calls are checked.
- ``dense`` computes attention in float64, from positions and the mask's rule alone.
- ``samples`` asks all ranks for their part of it, and compares.
- ``traffic`` counts the bytes that were sent, and takes the time.

It may import what strategies import, and no strategy.
"""

from ring_torch.tripwire.samples import (
    backward_faults as backward_faults,
    forward_faults as forward_faults,
)
from ring_torch.tripwire.settings import (
    check as check,
    checked_every as checked_every,
    number_checked as number_checked,
)
from ring_torch.tripwire.traffic import Watch as Watch
