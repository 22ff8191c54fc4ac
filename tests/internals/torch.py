"""Of ring_torch."""

from ring_torch import (
    attention as attention,
    autograd as autograd,
    call as call,
    capture as capture,
    context as context,
    gradients as gradients,
    kernels as kernels,
    prepare as prepare,
    strategies as strategies,
    transports as transports,
)
from ring_torch.autograd import _sink_grads as _sink_grads
from ring_torch.buffers import (
    BufferSpec as BufferSpec,
    HeadBuffer as HeadBuffer,
    HeadPart as HeadPart,
    flat as flat,
)
from ring_torch.call import (
    Call as Call,
    Resolution as Resolution,
    Strategy as Strategy,
    StrategySpec as StrategySpec,
    add_sinks as add_sinks,
    zero_row_grads as zero_row_grads,
)
from ring_torch.capture import capture_safe_cache as capture_safe_cache
from ring_torch.comm import (
    handshake as handshake,
    head_exchange as head_exchange,
    ranks as ranks,
    store as store,
)
from ring_torch.comm.handshake import (
    _COMPARED as _COMPARED,
    Header as Header,
    _check_on_stream as _check_on_stream,
    agree as agree,
)
from ring_torch.comm.ranks import (
    QueuedPass as QueuedPass,
    Ranks as Ranks,
    Transfer as Transfer,
    exchange as exchange,
    ranks_of as ranks_of,
    watch as watch,
)
from ring_torch.comm.relayout import relayout_between as relayout_between
from ring_torch.comm.store import CallSignature as CallSignature
from ring_torch.compat import documents as documents
from ring_torch.compiled import attention as compiled
from ring_torch.kernels import (
    KERNELS as KERNELS,
    choose as choose,
    eager as eager,
    fa4 as fa4,
    flash_attn as flash_attn,
    sdpa as sdpa,
    triton as triton_kernel,
)
from ring_torch.kernels.api import (
    Kernel as Kernel,
    Selection as Selection,
    SplitBackward as SplitBackward,
)
from ring_torch.kernels.block_index import (
    Grid as Grid,
    block_index as block_index,
    in_blocks as in_blocks,
    kinds_on as kinds_on,
)
from ring_torch.kernels.eager import EagerKernel as EagerKernel, ScoreBlocks as ScoreBlocks
from ring_torch.kernels.fa4 import FA4 as FA4
from ring_torch.kernels.flash import FlashKernel as FlashKernel, aligned as aligned
from ring_torch.kernels.library import (
    Documents as FlashDocuments,
    HeadDims as HeadDims,
    Mods as FlashMods,
    Options as FlashOptions,
    Pass as Pass,
    rounded_to_8 as rounded_to_8,
)
from ring_torch.kernels.triton import TritonKernel as TritonKernel, launch as triton_launch
from ring_torch.options import AttentionOptions as AttentionOptions, CallOptions as CallOptions
from ring_torch.payload import (
    ONE_GROUP as ONE_GROUP,
    HeadGroups as HeadGroups,
    KeyGradBuffer as KeyGradBuffer,
    KVPayload as KVPayload,
)
from ring_torch.prepare import _prepare as _prepare, check_call as check_call
from ring_torch.records import (
    AttentionState as AttentionState,
    BackwardInputs as BackwardInputs,
    Grads as Grads,
    Inputs as Inputs,
    KernelParams as KernelParams,
    KeyBlock as KeyBlock,
    KeyGrads as KeyGrads,
    QueryBlock as QueryBlock,
    QueryGrads as QueryGrads,
    empty_state as empty_state,
    has_unit_stride as has_unit_stride,
    runs_of as runs_of,
)
from ring_torch.strategies import (
    STRATEGIES as STRATEGIES,
    bias_shift as bias_shift,
    choose_strategy as choose_strategy,
    describe_strategy as describe_strategy,
    gather as gather_strategy,
    ring as ring_strategy,
)
from ring_torch.strategies.balanced import Balanced as Balanced
from ring_torch.strategies.gather import GATHER as GATHER, head_groups_of as head_groups_of
from ring_torch.strategies.ring import Ring as Ring
from ring_torch.strategies.ulysses import (
    Ulysses as Ulysses,
    _orders as ulysses_orders,
    exchanges_of as exchanges_of,
)
from ring_torch.tools import bench as bench, doctor as doctor
from ring_torch.tools.cli import main as main
from ring_torch.transports import (
    TRANSPORTS as TRANSPORTS,
    p2p as p2p,
    peer_copies as peer_copies,
    symm_buffer as symm_buffer,
)
from ring_torch.transports.api import (
    GatherSession as GatherSession,
    SessionSpec as SessionSpec,
    Traffic as Traffic,
    Transport as Transport,
    add_staged as add_staged,
)
from ring_torch.transports.p2p import P2P as P2P
from ring_torch.transports.peer_copies import room_of as room_of
from ring_torch.transports.symm_buffer import (
    Place as Place,
    SymmetricMemory as SymmetricMemory,
    refusals as refusals,
)
from ring_torch.transports.symm_mem import SYMM_MEM as SYMM_MEM
from ring_torch.tripwire import settings as tripwire_settings, traffic as tripwire_traffic
