"""Exact attention over sequences longer than one device holds, for JAX.

:func:`ring_attention` works on local shards inside ``jax.shard_map``; :class:`ContextParallel` on
global arrays. :mod:`ring_jax.compat` takes calls written for other libraries; :mod:`ring_jax.flax`,
:mod:`ring_jax.equinox`, :mod:`ring_jax.nn` and :mod:`ring_jax.maxtext` put ring attention into
their models.
"""

from ring_core import (
    KernelConfig as KernelConfig,
    Mask as Mask,
    UnsupportedError as UnsupportedError,
    WrongResultError as WrongResultError,
)
from ring_jax import compat as compat
from ring_jax.adapt import Segments as Segments
from ring_jax.attention import ring_attention as ring_attention
from ring_jax.autodiff import RESIDUALS as RESIDUALS
from ring_jax.context import ContextParallel as ContextParallel
from ring_jax.movement import (
    Halo as Halo,
    halo as halo,
    join as join,
    relayout as relayout,
    shift as shift,
)
from ring_jax.tripwire import check as check
from ring_jax.verification import PreflightReport as PreflightReport, preflight as preflight

__version__ = "0.1.0"
