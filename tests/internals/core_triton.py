"""Of ring_core, what needs Triton."""

from ring_core.triton.forward import fwd as fwd
from ring_core.triton.scores import Constexprs as Constexprs
