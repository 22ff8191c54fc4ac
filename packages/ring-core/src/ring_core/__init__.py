"""Exact attention over sequences longer than one device holds: the part without a framework.

A ring-attention call is a :class:`Plan`: for every pair of ranks, which slice of Q meets which
slice of K/V, and which of these queries see which of these keys. A strategy orders it in time
(:class:`RingProgram`, :class:`GatherProgram`), and backends execute that. Everything is decided
here in numpy, once for all frameworks.
"""

from ring_core.base.config import (
    STRATEGIES as STRATEGIES,
    Capabilities as Capabilities,
    KernelConfig as KernelConfig,
    Request as Request,
    StrategyConfig as StrategyConfig,
    StrategyName as StrategyName,
)
from ring_core.base.errors import (
    RankMismatchError as RankMismatchError,
    UnsupportedError as UnsupportedError,
    WrongResultError as WrongResultError,
)
from ring_core.base.merge import finalize as finalize, merge as merge
from ring_core.choose.balance import balanced_layout as balanced_layout
from ring_core.choose.gathering import gather_memory as gather_memory
from ring_core.choose.packing import pack_sequences as pack_sequences
from ring_core.choose.refusals import (
    refusals as refusals,
    require as require,
    support_matrix as support_matrix,
)
from ring_core.layouts.layout import (
    LAYOUTS as LAYOUTS,
    ChunkLayout as ChunkLayout,
    Layout as Layout,
    LayoutName as LayoutName,
    LayoutSpec as LayoutSpec,
    Run as Run,
    divisor_of as divisor_of,
)
from ring_core.masks.mask import Mask as Mask
from ring_core.plan.item import WorkItem as WorkItem
from ring_core.plan.plan import Plan as Plan, make_plan as make_plan
from ring_core.programs.gather import (
    GatherProgram as GatherProgram,
    gather_program as gather_program,
    gather_refusals as gather_refusals,
    longest_gather as longest_gather,
)
from ring_core.programs.heads import HeadPlan as HeadPlan, head_plan as head_plan
from ring_core.programs.ring import (
    RingProgram as RingProgram,
    ring_program as ring_program,
)
from ring_core.programs.steps import Step as Step

__version__ = "0.1.0"
