"""``fa3``: FlashAttention-3, built from the ``hopper`` folder of flash-attention.

Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision",
arXiv 2407.08608.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel, capability, unbounded
from ring_torch.kernels.flash_library import DOCUMENT_ARGUMENTS, Options, rounded_to_8
from ring_torch.records import AttentionState


class Flash3:
    """The functions of ``flash_attn_interface``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, _place: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``; it allocates them."""
        out, lse, *_ = _call("_flash_attn_forward", {"q": q, "k": k, "v": v}, options)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, _place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``."""
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        _call("_flash_attn_backward", {
            "dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq,
            "dk": dk, "dv": dv, "deterministic": options.deterministic,
        }, options)  # fmt: skip
        return dq, dk, dv


def _call(name: str, given: dict[str, Any], options: Options) -> Any:
    """Call a function by the names this version has, with ``None`` for what is not used."""
    function, parameters = _function(name)
    left, right = (unbounded(side) for side in options.window)
    known = given | {
        "softmax_scale": options.scale, "causal": False, "is_causal": False,
        "window_size": (left, right), "window_size_left": left, "window_size_right": right,
        "softcap": 0.0, **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
    }  # fmt: skip
    needed = {key: None for key, is_needed in parameters.items() if is_needed}
    return function(**needed | {key: known[key] for key in parameters.keys() & known.keys()})


@cache
def _function(name: str) -> tuple[Callable[..., Any], dict[str, bool]]:
    """A function and its parameters: whether each has to be given."""
    function = getattr(import_module("flash_attn_interface"), name)
    function = getattr(function, "_init_fn", function)
    parameters = inspect.signature(function).parameters.values()
    return function, {one.name: one.default is inspect.Parameter.empty for one in parameters}


@cache
def _missing() -> str | None:
    try:
        import_module("flash_attn_interface")
    except ImportError as error:
        return (
            f"FlashAttention-3 is not installed or does not load ({error}); build it from the "
            f"folder hopper of github.com/Dao-AILab/flash-attention"
        )
    if capability()[0] not in (8, 9):
        return f"has kernels for compute capability 8.x and 9.x, this is {capability()}"
    return None


FA3 = FlashKernel(
    Flash3(),
    Capabilities(
        name="fa3", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        bands="any", documents=True, deterministic=True,
        deterministic_head_dim=192, exact_nan=False,
        # Not softcap: its tanh is an approximation, as that of FlashAttention-2.
    ),
    head_dims=rounded_to_8,
    missing=_missing,
)  # fmt: skip
