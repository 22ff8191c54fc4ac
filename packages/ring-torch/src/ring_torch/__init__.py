"""Exact attention over sequences longer than one device holds, for PyTorch.

``ContextParallel`` shards tensors by a layout and attends to them; ``ring_attention`` is the
function beneath it, for callers that shard tensors themselves.
"""

from ring_core import (
    KernelConfig as KernelConfig,
    Mask as Mask,
    RankMismatchError as RankMismatchError,
    UnsupportedError as UnsupportedError,
    WrongResultError as WrongResultError,
)
from ring_torch.attention import ring_attention as ring_attention
from ring_torch.checking.settings import check as check
from ring_torch.context import ContextParallel as ContextParallel
from ring_torch.debugging.debug import debug as debug
from ring_torch.gradients.each import ReductionHandle as ReductionHandle
from ring_torch.kernels import matrix as support_matrix
from ring_torch.movement.methods import Halo as Halo
from ring_torch.replaced.replace import SDPAHandle as SDPAHandle, replace_sdpa as replace_sdpa
from ring_torch.serving import KVCache as KVCache
from ring_torch.training.data import dataloader as dataloader
from ring_torch.training.loss import (
    cross_entropy as cross_entropy,
    linear_cross_entropy as linear_cross_entropy,
)
from ring_torch.verification.preflight import preflight as preflight

__all__ = [
    "ContextParallel",
    "Halo",
    "KVCache",
    "KernelConfig",
    "Mask",
    "RankMismatchError",
    "ReductionHandle",
    "SDPAHandle",
    "UnsupportedError",
    "WrongResultError",
    "check",
    "cross_entropy",
    "dataloader",
    "debug",
    "linear_cross_entropy",
    "preflight",
    "replace_sdpa",
    "ring_attention",
    "support_matrix",
]
__version__ = "0.1.0"
