"""Check of results in a running job: some rows of some calls are recomputed densely and compared.

- ``dense`` computes attention in float64, from positions and the mask's rule alone.
- ``samples`` asks all ranks for their part of it, and compares; the bytes that were sent, and the
  time, as well.

``ring_torch.checking`` says which calls are checked, and counts their bytes. It may import what
strategies import, and no strategy.
"""

from ring_torch.tripwire.samples import (
    backward_faults as backward_faults,
    forward_faults as forward_faults,
)
