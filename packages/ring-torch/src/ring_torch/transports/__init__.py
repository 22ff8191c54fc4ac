"""How bytes move: messages, copies between GPUs, one kernel each way.

May import ``kernels``, ``payload``, ``comm`` and what is below. A new transport is one file here,
and a line in ``TRANSPORTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from ring_torch.transports.api import GatherSession, SessionSpec
from ring_torch.transports.p2p import Messages


def _peer_copies(spec: SessionSpec) -> GatherSession:
    from ring_torch.transports.peer_copies import open_session

    return open_session(spec)


#: What opens a session over gathered keys: messages of ``torch.distributed``, or copies out of the
#: peers' memory.
TRANSPORTS: MappingProxyType[str, Callable[[SessionSpec], GatherSession]] = MappingProxyType(
    {"p2p": Messages.open, "symm_mem": _peer_copies}
)
