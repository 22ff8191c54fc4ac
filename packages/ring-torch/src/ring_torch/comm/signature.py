"""What ranks compare of a call, before they use each other's data."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class CallSignature:
    """What must be equal on all ranks for a pass of a call, beside its number and seed."""

    fields: dict[str, Any]  # anything that ``json`` writes
    digest: bytes

    @classmethod
    def of(cls, fields: dict[str, Any], name: str) -> CallSignature:
        """The signature of the pass of this name."""
        fields = {"pass": name, **fields}
        text = json.dumps(fields, sort_keys=True).encode()
        return cls(fields, hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())

    def for_call(self, number: int, seed: int) -> bytes:
        """What tells this call from any other: the digest of all, number and seed included."""
        text = self.digest + struct.pack("<QQ", number, seed)
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()

    def as_int64(self, number: int, seed: int) -> int:
        """The same as a number, int64."""
        return int.from_bytes(self.for_call(number, seed), "little", signed=True)
