"""Direct launches of Triton kernels that were compiled before, to save the host's time.

``kernel[grid](...)`` binds arguments by name and works out for which values each is specialised,
which takes the host longer than the launch itself. A launch whose tensors have the same dtypes and
alignments as those of one before, and whose integers are of the same kinds, has the same compiled
kernel, which is launched directly. That relies on Triton's internals, so it is done with
:data:`VERSIONS` of Triton alone; with others, and in the interpreter, Triton launches as usual.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

#: Versions of Triton whose compiled kernels are launched as :class:`DirectKernel` does.
VERSIONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
_MOST_LAUNCHES = 1024


class _Compiled(NamedTuple):
    """A compiled kernel, and the values of its constants, which follow a launch's arguments."""

    kernel: Any  # kept alive: Triton unloads a kernel that nobody references
    run: Any
    constants: tuple[object, ...]


class DirectKernel:
    """A Triton kernel, launched as ``kernel[grid](*arguments, **constants_and_options)``.

    Arguments that are no ``tl.constexpr`` are positional: tensors, integers and ``None``.
    Constants and options of the launch, such as ``num_warps``, are given by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_direct = triton.__version__ in VERSIONS and isinstance(kernel, JITFunction)
        self._compiled: dict[object, _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid) if self._is_direct else self.kernel[grid]

    def _launch(self, grid: tuple[int, ...], *given: Tensor | int | None, **named: Any) -> None:
        """Launch directly if an equal launch was compiled before, otherwise by Triton.

        The key holds all that Triton specialises a kernel for, and the constants.
        """
        device = torch.cuda.current_device()
        values: list[int | None] = []
        facts: list[object] = [device, *named.items()]
        for x in given:
            if isinstance(x, Tensor):
                pointer = x.data_ptr()
                facts += (x.dtype, x.get_device(), pointer % 16 == 0)
                values.append(pointer)
            else:
                if x is None or isinstance(x, bool):
                    facts.append((x,))  # False equals 0, which is the kind of some integers
                else:  # Triton specialises for 1, for multiples of 16, and for an integer's width
                    is_int32 = -(1 << 31) <= x < 1 << 31
                    facts.append((x == 1) + 2 * (x % 16 == 0) + 4 * is_int32 + 8 * (x >= 1 << 63))
                values.append(x)
        key = tuple(facts)
        compiled = self._compiled.get(key)
        runtime = triton.knobs.runtime
        if compiled is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._remember(key, self.kernel[grid](*given, **named), len(given), named)
            return
        x_size, y_size, z_size = (*grid, 1, 1)[:3]
        kernel = compiled.kernel
        stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - as Triton asks
        compiled.run(
            x_size, y_size, z_size, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *values, *compiled.constants,
        )  # fmt: skip

    def _remember(self, key: object, kernel: Any, count: int, named: dict[str, Any]) -> None:
        if len(self._compiled) >= _MOST_LAUNCHES:
            self._compiled = {}
        constants = tuple(named[name] for name in self.kernel.arg_names[count:])
        self._compiled[key] = _Compiled(kernel, kernel.run, constants)
