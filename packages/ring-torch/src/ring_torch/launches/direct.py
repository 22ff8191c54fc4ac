"""Direct launches of Triton kernels that were compiled before, to save the host's time.

``kernel[grid](...)`` binds arguments by name and works out for which values each is specialised,
which takes the host longer than the launch itself. A launch whose tensors have the same dtypes and
alignments as those of one before, and whose integers are of the same kinds, has the same compiled
kernel, which is launched directly. That relies on Triton's internals, so it is done with
:data:`VERSIONS` of Triton alone; with others, and in the interpreter, Triton launches as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def launch(self, grid: tuple[int, ...], device: int, values: Sequence[int | None]) -> None:
        """Launch on the device's current stream; tensors are given by their addresses."""
        (x_size, y_size, z_size, *_), kernel = (*grid, 1, 1), self.kernel
        # Asked at each launch: the caller may be on another stream than before, or capture a graph.
        stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - as Triton asks
        self.run(
            x_size,
            y_size,
            z_size,
            stream,
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *values,
            *self.constants,
        )


class PreparedLaunch(NamedTuple):
    """A launch whose arguments are known, but for some tensors and integers that change.

    Tensors are given by their addresses, which keep nothing alive: whoever keeps a launch also has
    to keep the tensors that do not change.
    """

    compiled: _Compiled
    grid: tuple[int, ...]
    device: int
    values: tuple[int | None, ...]

    def __call__(self, changes: dict[int, int]) -> None:
        """Launch with other arguments at some indices: addresses of tensors, or integers.

        They must be of the kind that the kernel is specialised for: tensors of the same dtype and
        alignment to 16 bytes; integers of the same width and, unless their parameter is in the
        kernel's ``do_not_specialize``, alike in being 1 or a multiple of 16. Whoever repeats a
        launch asks :func:`has_launch_hooks` before.
        """
        compiled, grid, device, prepared = self
        # A copy: another thread may repeat the same launch with other tensors.
        values = [*prepared]
        for index, x in changes.items():
            values[index] = x
        compiled.launch(grid, device, values)


def has_launch_hooks() -> bool:
    """Return True if somebody, such as a profiler, asks Triton to be told of launches.

    Direct launches tell nobody.
    """
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def assert_unit_strides(*tensors: Tensor) -> None:
    """Assert that the last dimensions are contiguous, as the kernels take for granted."""
    assert False not in [x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel() for x in tensors]


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

    def launch(
        self, grid: tuple[int, ...], *arguments: Tensor | int | None, **options: Any
    ) -> PreparedLaunch | None:
        """Launch, and return the launch, to be repeated with other tensors.

        It is ``None`` where the kernel cannot be launched directly.
        """
        if not self._is_direct:
            self.kernel[grid](*arguments, **options)
            return None
        device, values, compiled = self._launch(grid, *arguments, **options)
        return None if compiled is None else PreparedLaunch(compiled, grid, device, tuple(values))

    def _launch(
        self, grid: tuple[int, ...], *arguments: Tensor | int | None, **options: Any
    ) -> tuple[int, Sequence[int | None], _Compiled | None]:
        """Launch directly if an equal launch was compiled before, otherwise by Triton.

        Return the device, the arguments' values, and the compiled kernel, if there is any.
        """
        device = torch.cuda.current_device()
        key, values = _key_and_values(device, arguments, options)
        # Keys hold all that Triton specialises for: an equal key has the same machine code.
        compiled = self._compiled.get(key)
        if compiled is not None and not has_launch_hooks():
            compiled.launch(grid, device, values)
        # A hook of Triton's compiler may keep it from compiling.
        elif (kernel := self.kernel[grid](*arguments, **options)) is not None:
            if len(self._compiled) >= _MOST_LAUNCHES:
                # Launches that were handed out keep their kernels alive; only later lookups begin
                # anew.
                self._compiled = {}
            # Options that are no arguments of the kernel, such as num_warps, are compiled in.
            constants = tuple(options[name] for name in self.kernel.arg_names[len(arguments) :])
            compiled = self._compiled[key] = _Compiled(kernel, kernel.run, constants)
        return device, values, compiled


#: Arguments of a launch beside its tensors: its grid, the integers that follow them, and constants
#: and options. Tensors that are absent come first among the integers, as ``None``.
Arguments = tuple[tuple[int, ...], tuple[int | None, ...], dict[str, Any]]


class RepeatedKernel:
    """A kernel whose arguments begin with tensors, launched directly for tensors like earlier ones.

    They are alike in shapes, strides, dtypes, device and alignment to 16 bytes; all else that the
    arguments depend on is static.
    """

    def __init__(self, kernel: DirectKernel, arguments_of: Callable[..., Arguments]) -> None:
        """Take the kernel, and a function from tensors and static values to what follows them."""
        self._kernel, self._arguments_of = kernel, arguments_of
        self._launches: dict[object, PreparedLaunch | None] = {}

    def __call__(self, *tensors: Tensor, **static: Any) -> None:
        """Launch; arguments are worked out once."""
        facts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
        key = tensors[0].device, *static.values(), *facts
        launch = self._launches.get(key)
        if launch is not None and not has_launch_hooks():
            launch(dict(enumerate([x.data_ptr() for x in tensors])))
            return
        grid, integers, constants = self._arguments_of(*tensors, **static)
        if len(self._launches) >= _MOST_LAUNCHES:
            self._launches = {}
        self._launches[key] = self._kernel.launch(grid, *tensors, *integers, **constants)


def _key_and_values(
    device: int, arguments: Sequence[Tensor | int | None], options: dict[str, Any]
) -> tuple[object, list[int | None]]:
    """Return the key and the values of a launch; tensors become their addresses.

    The key holds all that Triton specialises a kernel for, and the constants.
    """
    values: list[int | None] = []
    facts: list[object] = [device, *options.items()]
    for x in arguments:
        if isinstance(x, Tensor):
            pointer = x.data_ptr()
            # Addresses change from call to call; only their alignment is compiled in.
            facts += (x.dtype, x.get_device(), pointer % 16 == 0)
            values.append(pointer)
        else:
            if x is None or isinstance(x, bool):
                facts.append((x,))  # False equals 0, which is the kind of some integers
            else:  # Triton specialises for 1, for multiples of 16, and for an integer's width
                is_int32 = -(1 << 31) <= x < 1 << 31
                facts.append((x == 1) + 2 * (x % 16 == 0) + 4 * is_int32 + 8 * (x >= 1 << 63))
            values.append(x)
    return tuple(facts), values
