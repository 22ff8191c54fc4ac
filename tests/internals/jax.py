"""Of ring_jax."""

from ring_jax import (
    attention as attention,
    autodiff as autodiff,
    bias_shift as bias_shift,
    collectives as collectives,
    kernels as kernels,
    rank_view as rank_view,
    tripwire as tripwire,
)
from ring_jax.attention import RingAttention as RingAttention
from ring_jax.autodiff import _compiled as _compiled
from ring_jax.collectives import (
    Ranks as Ranks,
    match_varying as match_varying,
    varying_axes as varying_axes,
)
from ring_jax.kernels import compute_capability as compute_capability, xla as xla
from ring_jax.kernels.block_index import shown_in_blocks as shown_in_blocks
from ring_jax.kernels.xla import ScoreBlocks as ScoreBlocks, XlaKernel as XlaKernel
from ring_jax.prepare import choose_strategy as choose_strategy, seed_words as seed_words
from ring_jax.rank_view import (
    RankView as RankView,
    remote_table as remote_table,
    step_table as step_table,
)
from ring_jax.records import (
    AttentionOptions as AttentionOptions,
    AttentionState as AttentionState,
    BackwardInputs as BackwardInputs,
    CallOptions as CallOptions,
    CallSpec as CallSpec,
    Direction as Direction,
    Grads as Grads,
    Inputs as Inputs,
    ItemTable as ItemTable,
    KeyBlock as KeyBlock,
    KVPayload as KVPayload,
    LaunchSpec as LaunchSpec,
    QueryBlock as QueryBlock,
    QueryPayload as QueryPayload,
    Rectangle as Rectangle,
    rectangles_of as rectangles_of,
)
from ring_jax.search import searchsorted as searchsorted
from ring_jax.strategies import STRATEGIES as JAX_STRATEGIES, ring as ring_strategy, steps as steps
from ring_jax.strategies.steps import (
    StepRunner as StepRunner,
    merge as merge,
    own_message as own_message,
)
from ring_jax.tools import cli as cli, doctor as doctor
from ring_jax.tools.cli import main as main
from ring_jax.tools.doctor import self_test as self_test
from ring_jax.tripwire import traffic as tripwire_traffic
