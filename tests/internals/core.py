"""Of ring_core."""

from ring_core.base.arguments import (
    FOREIGN_OPTIONS as FOREIGN_OPTIONS,
    refuse_foreign_options as refuse_foreign_options,
)
from ring_core.base.config import (
    RingStrategy as RingStrategy,
    pairs_of as pairs_of,
    strategy_config as strategy_config,
    takes_layout as takes_layout,
)
from ring_core.choose import rates as rates
from ring_core.choose.balance import (
    EVEN as EVEN,
    _assign as _assign,
    _balance as _balance,
    _swap_until_even as _swap_until_even,
    layout_for as layout_for,
)
from ring_core.choose.rates import (
    UNKNOWN as UNKNOWN,
    Case as Case,
    Expected as Expected,
    Option as Option,
    Rates as Rates,
    Times as Times,
    expected as expected,
    written as written,
)
from ring_core.masks import band as band
from ring_core.masks.band import (
    UNBOUNDED as UNBOUNDED,
    Rectangles as Rectangles,
    clip as clip,
    count as count,
    local_band as local_band,
    trim as trim,
)
from ring_core.masks.expression import evaluated as evaluated, expression_of as expression_of
from ring_core.plan import geometry as geometry, plan as plan, tile_mask as tile_mask
from ring_core.plan.geometry import RectangleTable as RectangleTable
from ring_core.programs import gather as gather, ring as ring
from ring_core.programs.gather import Interval as Interval, _subtract as _subtract
from ring_core.reference import item_kernel as item_kernel, simulator as simulator
from ring_core.reference.item_kernel import Precision as Precision, masked_matmul as masked_matmul
from ring_core.tools.cli import main as main
from ring_core.tripwire import (
    Kind as Kind,
    SampledRows as SampledRows,
    every_of as every_of,
    peak_tflops as peak_tflops,
    sampled as sampled,
)
from ring_core.triton import tile_configs as tile_configs
from ring_core.triton.tile_configs import (
    FLAGS_TOGETHER as FLAGS_TOGETHER,
    Blocks as Blocks,
    Row as Row,
    choose_blocks as choose_blocks,
    parts_of_tiles as parts_of_tiles,
    positions_aligned8 as positions_aligned8,
)
