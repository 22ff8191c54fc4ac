"""Kernels ``fa2`` and ``fa3``: FlashAttention-2 and -3, by their inner forward and backward.

``fa2`` is ``pip install flash-attn``, versions 2.6 to 2.8: Dao, "FlashAttention-2: faster attention
with better parallelism and work partitioning", arXiv 2307.08691.

``fa3`` is built from the ``hopper`` folder of flash-attention: Shah et al., "FlashAttention-3: fast
and accurate attention with asynchrony and low-precision", arXiv 2407.08608.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel, gpu_reason, old_gpu_reason, unbounded
from ring_torch.kernels.library import (
    DOCUMENT_ARGUMENTS,
    Direction,
    FlashLibrary,
    LaunchOptions,
    rounded_to_8,
)
from ring_torch.records import AttentionState


@dataclass(frozen=True)
class FlashAttention(FlashLibrary):
    """Calls of one major version of FlashAttention.

    Attributes:
        module: Name of the module that has its functions.
        packed: Prefix of the pass in the names of its functions for documents.
    """

    module: str
    packed: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, _dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, allocated by the library."""
        out, lse, *_ = self._call("forward", options, q=q, k=k, v=v)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        _dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``, in new tensors."""
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        self._call(
            "backward",
            options,
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=options.deterministic,
        )
        return dq, dk, dv

    def _call(self, direction: Direction, options: LaunchOptions, **tensors: Any) -> Any:
        """Call a function of the library with those arguments that the installed version has.

        Versions differ: 2.6 takes a window as one pair, later ones as two numbers. Required
        arguments that are not known here are ``None``.
        """
        packed = "" if options.documents is None else self.packed
        function, parameters = _library_function(self.module, f"_flash_attn_{packed}{direction}")
        left, right = (unbounded(side) for side in options.window)
        arguments = tensors | {
            "softmax_scale": options.scale, "causal": False, "is_causal": False, "softcap": 0.0,
            "dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False,
            "window_size": (left, right), "window_size_left": left, "window_size_right": right,
            **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
        }  # fmt: skip
        required = {key: None for key, is_needed in parameters.items() if is_needed}
        return function(
            **required | {key: arguments[key] for key in parameters.keys() & arguments.keys()}
        )


FLASH_2 = FlashAttention("flash_attn.flash_attn_interface", packed="varlen_")
FLASH_3 = FlashAttention("flash_attn_interface", packed="")


@cache
def _library_function(module: str, name: str) -> tuple[Callable[..., Any], dict[str, bool]]:
    """Return a function of the library, and for each of its parameters whether it is required.

    It is the plain function, not the torch operator made of it, which checks for aliases and costs
    the host more.
    """
    function = getattr(import_module(module), name)
    function = getattr(function, "_init_fn", function)
    parameters = inspect.signature(function).parameters.values()
    return function, {
        parameter.name: parameter.default is inspect.Parameter.empty for parameter in parameters
    }


@cache
def _missing_2() -> str | None:
    """Return why FlashAttention-2 cannot be called on this machine, or ``None``."""
    try:
        installed = version("flash-attn")
        import_module(FLASH_2.module)
    except (PackageNotFoundError, ImportError) as error:
        return f"flash-attn is not installed or does not load ({error}); pip install flash-attn"
    if installed.split(".")[:2] not in (["2", "6"], ["2", "7"], ["2", "8"]):
        return f"flash-attn {installed} is installed; 2.6 to 2.8 are known to work"
    return None


FA2 = FlashKernel(
    FLASH_2,
    Capabilities(
        name="fa2",
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=256,
        bands="any",
        documents=True,
        deterministic=True,
        exact_nan=False,
        # Not softcap: its tanh is an approximation, and lse is off by more than rounding (2.8.3).
    ),
    head_dims=rounded_to_8,
    unavailable=_missing_2,
    wrong_gpu=old_gpu_reason,
    clips_right_window=True,
)


@cache
def _missing_3() -> str | None:
    """Return why FlashAttention-3 cannot be called on this machine, or ``None``."""
    try:
        import_module(FLASH_3.module)
    except ImportError as error:
        return (
            f"FlashAttention-3 is not installed or does not load ({error}); build it from the "
            f"folder hopper of github.com/Dao-AILab/flash-attention"
        )
    return None


FA3 = FlashKernel(
    FLASH_3,
    Capabilities(
        name="fa3",
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=256,
        bands="any",
        documents=True,
        deterministic=True,
        deterministic_head_dim=192,
        exact_nan=False,
        # Not softcap: its tanh is an approximation, as that of FlashAttention-2.
    ),
    head_dims=rounded_to_8,
    unavailable=_missing_3,
    wrong_gpu=partial(gpu_reason, 8, 9),
)
