"""Of ring_core, what needs Triton."""

from ring_core.triton.forward import attend as attend
from ring_core.triton.scores import Facts as Facts
