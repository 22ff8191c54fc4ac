"""Exact attention over sequences longer than one device holds: the part without a framework.

A ring-attention call is a :class:`Plan`: for every rank and step, which slice of Q meets which
slice of K/V under which band. Backends execute it.
"""

from ring_core._blocks import EMPTY as EMPTY
from ring_core._blocks import FULL as FULL
from ring_core._blocks import PARTIAL as PARTIAL
from ring_core._blocks import TILE as TILE
from ring_core._blocks import BlockGeometry as BlockGeometry
from ring_core._capabilities import Capabilities as Capabilities
from ring_core._capabilities import KernelConfig as KernelConfig
from ring_core._capabilities import Request as Request
from ring_core._capabilities import refusals as refusals
from ring_core._capabilities import require as require
from ring_core._capabilities import support_matrix as support_matrix
from ring_core._deal import deal as deal
from ring_core._errors import RankMismatchError as RankMismatchError
from ring_core._errors import UnsupportedError as UnsupportedError
from ring_core._gather import Fetch as Fetch
from ring_core._gather import Gather as Gather
from ring_core._gather import gather_memory as gather_memory
from ring_core._gather import gather_program as gather_program
from ring_core._gather import gather_refusals as gather_refusals
from ring_core._gather import longest_gather as longest_gather
from ring_core._item import WorkItem as WorkItem
from ring_core._layout import Dealt as Dealt
from ring_core._layout import Layout as Layout
from ring_core._layout import Run as Run
from ring_core._mask import Mask as Mask
from ring_core._merge import finalize as finalize
from ring_core._merge import merge as merge
from ring_core._plan import TABLE_COLUMNS as TABLE_COLUMNS
from ring_core._plan import TABLE_UNBOUNDED as TABLE_UNBOUNDED
from ring_core._plan import Plan as Plan
from ring_core._plan import make_plan as make_plan
from ring_core._program import HELP_PIECES as HELP_PIECES
from ring_core._program import Stage as Stage
from ring_core._schedule import SCHEDULES as SCHEDULES
from ring_core._schedule import Schedule as Schedule
from ring_core._schedule import ScheduleName as ScheduleName
from ring_core._schedule import Step as Step
from ring_core._schedule import divisor_of as divisor_of
from ring_core._schedule import layout_of as layout_of

__version__ = "0.1.0"
