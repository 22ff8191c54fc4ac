"""Counts the bytes that ranks send."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Dispatch mode that counts the bytes sent in its block, without the header of one pass.

    It keeps those of each all-gather apart.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the base has no types
        self.sent = -2048
        self.gathered: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::send":
            self.sent += sum(x.nbytes for x in args[0])
        elif "allgather" in name:
            self.gathered.append(args[1].nbytes)
        else:
            assert not name.startswith("c10d::") or name == "c10d::recv_", name
        return func(*args, **(kwargs or {}))
