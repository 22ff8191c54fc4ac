"""Transports: the ways in which bytes move between ranks, by messages or out of peers' memory.

This package may import ``call`` and what is below. A new transport is one file here, which ends in
its :class:`~ring_torch.call.Transport`, and a line in ``TRANSPORTS``.
"""

from ring_torch.call import Transport
from ring_torch.transports.p2p import P2P
from ring_torch.transports.symm_mem import SYMM_MEM

#: The transports of ``transport=``, the fastest first: ``auto`` takes the first that can run.
TRANSPORTS: tuple[Transport, ...] = (SYMM_MEM, P2P)


def transport_names() -> tuple[str, ...]:
    """Return the names that ``transport=`` takes."""
    return ("auto", *(transport.name for transport in TRANSPORTS))
