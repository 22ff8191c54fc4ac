"""A check that a job can leave on: some rows of some calls, computed once more, densely.

``settings`` says which calls; ``dense`` is the formula in float64, over positions and the mask's
rule alone; ``samples`` asks all ranks for it and compares; ``traffic`` counts the bytes that were
sent. It may import what strategies import, and no strategy.
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
