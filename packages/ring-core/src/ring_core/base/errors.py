"""Exceptions of this project."""


class UnsupportedError(ValueError):
    """The call is valid but cannot be done this way; nothing was sent or computed.

    The message names every reason at once and what would work instead. It is a ``ValueError``:

    >>> from ring_core import Mask, make_plan, ring_program
    >>> plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="zigzag")
    >>> ring_program(plan, "balanced")
    Traceback (most recent call last):
    ...
    ring_core.base.errors.UnsupportedError: ... Instead: use layout='contiguous', or strategy='ring'
    """


class RankMismatchError(RuntimeError):
    """Ranks of one group made calls that differ; this rank used nothing of the other's data."""


class WrongResultError(RuntimeError):
    """A checked result differs from a slower, simpler computation by more than rounding.

    With ``RING_CHECK`` a few rows of an attention call are compared with dense attention in
    float64; the message names the rank, the call, the tensor and the entry, with both values.
    ``ring_torch.hf.verify`` compares a parallelized model with the same model on one device; the
    message names the module.
    """
