"""Reference results: dense attention in float64, and a ring run rank by rank in one process.

May import ``choose`` and what is below it. Another oracle would be another module here.
"""

from ring_core.reference.dense import (
    Floats as Floats,
    Grads as Grads,
    attention as attention,
    attention_grads as attention_grads,
)
from ring_core.reference.inputs import SegmentIds as SegmentIds
from ring_core.reference.simulator import Simulation as Simulation, run as run, simulate as simulate
