"""flash-attn-4's host code on a machine without a GPU: launches are recorded, not made.

Its functions check arguments, look up or compile kernels, and call them. Here they accept CPU
tensors, see a Hopper GPU, and get a :class:`Kernel` where they ask for a compiled one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor

# Modules that ask whether tensors are on a GPU.
_MODULES = ("flash_attn.cute.interface", "flash_attn.cute.block_sparsity")
_LARGEST_NUMBER = 1 << 32  # an integer above it is an address
_ENVIRONMENT = {
    "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132", "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",  # compiled kernels on disk would be launched
}  # fmt: skip


@dataclass(eq=False)
class Kernel:
    """Stands for a compiled function: a call adds itself and its arguments to ``launches``."""

    source: Any  # what was to be compiled: an object with the kernel's tile sizes
    launches: Launches = field(repr=False)

    def __call__(self, *arguments: Any) -> None:
        self.launches.append((self, arguments))

    @property
    def name(self) -> str:
        """Name of the kernel's class in the library."""
        return type(self.source).__name__


Launches = list[tuple[Kernel, tuple[Any, ...]]]


class Recorder(Launches):
    """Launches of all kernels, in order, each with its arguments."""

    def compiled(self, source: Any, *_: Any, **__: Any) -> Kernel:
        """Return a kernel in place of one that the compiler would make."""
        return Kernel(source, self)

    def taken(self) -> Launches:
        """Return the launches since the last call, and forget them."""
        launches = [*self]
        self.clear()
        return launches


class _OnCpu(SourceFileLoader):
    """Loads a module so that it accepts CPU tensors where it asks for CUDA tensors."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path).replace(b".is_cuda", b".is_cpu")
        return compile(source, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, _: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _MODULES else None
        if spec is not None and spec.origin is not None:
            spec.loader = _OnCpu(name, spec.origin)
        return spec


@contextmanager
def loaded() -> Iterator[Recorder]:
    """Import the library for CPUs, once in a process, and yield a recorder of its launches."""
    assert not {*_MODULES} & {*sys.modules}, "flash-attn-4 has been imported before"
    recorder, zeros = Recorder(), torch.zeros

    def zeros_on_cpu(*sizes: int, device: Any = None, **options: Any) -> Tensor:
        return zeros(*sizes, device="cpu" if device == "cuda" else device, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("CUTE_DSL_PTXAS_PATH", raising=False)  # it would change the compiler
        patch.setattr(sys, "meta_path", [_Finder(), *sys.meta_path])
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch, "zeros", zeros_on_cpu)
        interface: Any = import_module("flash_attn.cute.interface")
        patch.setattr(interface.cute, "compile", recorder.compiled)
        patch.setattr(interface, "to_cute_tensor", lambda *_, **__: None)
        yield recorder


def described(launches: Launches, own: Sequence[Tensor] = (), results: Any = ()) -> list[Any]:
    """Return launches and results in a form that is equal for the same kernels on other memory.

    Memory is numbered: first that of ``own``, then the rest as it appears. Of addresses given as
    numbers those of ``own`` are told apart.
    """
    numbers: dict[int, int] = {}
    for x in own:
        numbers.setdefault(x.data_ptr(), len(numbers))

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            number = numbers.setdefault(x.data_ptr(), len(numbers))
            return number, x.dtype, tuple(x.shape), x.stride(), x.requires_grad
        if isinstance(x, tuple):
            return [of(y) for y in x]
        x = getattr(x, "value", x)  # `cutlass.Int32` and `Int64` hold their number there
        is_address = isinstance(x, int) and x > _LARGEST_NUMBER
        return ("address", numbers.get(x)) if is_address else x

    return [*((kernel, of(arguments)) for kernel, arguments in launches), of(results)]
