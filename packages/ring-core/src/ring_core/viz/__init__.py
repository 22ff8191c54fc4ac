"""Pictures of a ring's program, for a terminal or drawn to a file.

They show what its tables say, at sampled positions, never the mask alone: where
the two disagree, or two ranks compute the same pair, the cell is marked ``!``.
"""

from ring_core.viz.cells import (
    NOBODY as NOBODY,
    WRONG as WRONG,
    computing_ranks as computing_ranks,
    kv_messages as kv_messages,
)
from ring_core.viz.figure import plot as plot
from ring_core.viz.text import describe as describe
