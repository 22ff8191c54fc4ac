"""Kernels of flash-linear-attention in Triton's interpreter, on tensors of the host."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from triton.runtime import autotuner  # after it

_MODULES = (
    "fla.ops.common.chunk_delta_h", "fla.ops.common.chunk_h", "fla.ops.common.chunk_o",
    "fla.ops.gla.chunk", "fla.ops.kda.chunk_bwd", "fla.ops.kda.chunk_intra",
)  # fmt: skip


class _Number(int):
    """Number of a loop's step, which kernels cast as a number of Triton."""

    def to(self, _: object) -> _Number:
        """Return self."""
        return self


def load() -> None:
    """Import the library, and let its kernels run in the interpreter.

    Of each kernel's configurations the first is taken, as none can be timed.
    """
    own = autotuner.Autotuner.__init__

    def init(self: Any, function: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        own(self, function, names, configs[:1], *args, **kwargs)

    with patch.object(autotuner.Autotuner, "__init__", init), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no GPU
        modules = [import_module(name) for name in _MODULES]
    for module in modules:
        vars(module)["range"] = lambda *bounds: map(_Number, range(*bounds))
        if hasattr(module, "_check_cp_device"):
            vars(module)["_check_cp_device"] = lambda _: None
