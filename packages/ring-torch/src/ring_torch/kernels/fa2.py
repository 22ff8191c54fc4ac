"""``fa2``: FlashAttention-2 (``pip install flash-attn``), versions 2.6 to 2.8.

Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", arXiv
2307.08691.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel, old_gpu_reason, unbounded
from ring_torch.kernels.flash_library import DOCUMENT_ARGUMENTS, Options, Pass, rounded_to_8
from ring_torch.records import AttentionState


class Flash2:
    """The functions of ``flash_attn.flash_attn_interface``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, _place: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``; it allocates them."""
        out, lse, *_ = _call("forward", options, q=q, k=k, v=v, return_softmax=False)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, _place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``."""
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        _call(
            "backward", options, dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk,
            dv=dv, deterministic=options.deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _call(direction: Pass, options: Options, **given: Any) -> Any:
    """Call one of its functions: 2.6 takes a window as one pair, later ones as two numbers."""
    packed = "" if options.documents is None else "varlen_"
    function, names = _function(f"_flash_attn_{packed}{direction}")
    left, right = (unbounded(side) for side in options.window)
    sides: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    return function(
        **given, **({"window_size": (left, right)} if "window_size" in names else sides),
        **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
        dropout_p=0.0, softmax_scale=options.scale, causal=False, alibi_slopes=None, softcap=0.0,
    )  # fmt: skip


@cache
def _function(name: str) -> tuple[Callable[..., Any], frozenset[str]]:
    # The functions, not the operators made of them: those check for aliases, and cost more.
    function = getattr(import_module("flash_attn.flash_attn_interface"), name)
    function = getattr(function, "_init_fn", function)
    return function, frozenset(inspect.signature(function).parameters)


@cache
def _missing() -> str | None:
    try:
        found = version("flash-attn")
        import_module("flash_attn.flash_attn_interface")
    except (PackageNotFoundError, ImportError) as error:
        return f"flash-attn is not installed or does not load ({error}); pip install flash-attn"
    major, minor, *_ = (int(part) for part in found.split(".")[:2])
    if (major, minor) not in ((2, 6), (2, 7), (2, 8)):
        return f"flash-attn {found} is installed; 2.6 to 2.8 are known to work"
    return old_gpu_reason()


FA2 = FlashKernel(
    Flash2(),
    Capabilities(
        name="fa2", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        bands="any", documents=True, deterministic=True, exact_nan=False,
        # Not softcap: its tanh is an approximation, and lse is off by more than rounding (2.8.3).
    ),
    head_dims=rounded_to_8,
    missing=_missing,
    clips_right_window=True,
)  # fmt: skip
