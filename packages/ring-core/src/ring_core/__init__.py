"""Exact attention over sequences longer than one device holds: the part without a framework.

A ring-attention call is a :class:`Plan`: for every pair of ranks, which slice of Q meets which
slice of K/V under which band. A strategy orders it in time (:class:`RingProgram`,
:class:`GatherProgram`), and backends execute that.
"""

from ring_core.base.capabilities import Capabilities as Capabilities
from ring_core.base.capabilities import KernelConfig as KernelConfig
from ring_core.base.capabilities import Request as Request
from ring_core.base.errors import RankMismatchError as RankMismatchError
from ring_core.base.errors import UnsupportedError as UnsupportedError
from ring_core.base.errors import WrongResultError as WrongResultError
from ring_core.base.merge import finalize as finalize
from ring_core.base.merge import merge as merge
from ring_core.base.strategy import STRATEGIES as STRATEGIES
from ring_core.base.strategy import StrategyConfig as StrategyConfig
from ring_core.base.strategy import StrategyName as StrategyName
from ring_core.base.tiles import EMPTY as EMPTY
from ring_core.base.tiles import FULL as FULL
from ring_core.base.tiles import PARTIAL as PARTIAL
from ring_core.base.tiles import TILE as TILE
from ring_core.choose.balance import balance_chunks as balance_chunks
from ring_core.choose.refusals import refusals as refusals
from ring_core.choose.refusals import require as require
from ring_core.choose.refusals import support_matrix as support_matrix
from ring_core.layouts.layout import LAYOUTS as LAYOUTS
from ring_core.layouts.layout import ChunkLayout as ChunkLayout
from ring_core.layouts.layout import Layout as Layout
from ring_core.layouts.layout import LayoutName as LayoutName
from ring_core.layouts.layout import LayoutSpec as LayoutSpec
from ring_core.layouts.layout import Run as Run
from ring_core.layouts.layout import divisor_of as divisor_of
from ring_core.masks.mask import Mask as Mask
from ring_core.plan.items import WorkItem as WorkItem
from ring_core.plan.plan import Plan as Plan
from ring_core.plan.plan import make_plan as make_plan
from ring_core.plan.tile_mask import BlockGeometry as BlockGeometry
from ring_core.programs.gather import Fetch as Fetch
from ring_core.programs.gather import GatherProgram as GatherProgram
from ring_core.programs.gather import gather_memory as gather_memory
from ring_core.programs.gather import gather_program as gather_program
from ring_core.programs.gather import gather_refusals as gather_refusals
from ring_core.programs.gather import longest_gather as longest_gather
from ring_core.programs.ring import RingProgram as RingProgram
from ring_core.programs.ring import ring_program as ring_program
from ring_core.programs.steps import HELP_PIECES as HELP_PIECES
from ring_core.programs.steps import Stage as Stage
from ring_core.programs.steps import Step as Step
from ring_core.programs.table import TABLE_COLUMNS as TABLE_COLUMNS
from ring_core.programs.table import TABLE_UNBOUNDED as TABLE_UNBOUNDED

__version__ = "0.1.0"
