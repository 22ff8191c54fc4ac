"""The record of one checked call, the interfaces of strategies and transports, and the forward.

A session of a transport carries K/V to ranks and dK/dV back, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ring_core import (
    ChunkLayout,
    GatherProgram,
    LayoutSpec,
    Plan,
    Request,
    RingProgram,
    StrategyConfig,
    UnsupportedError,
)
from ring_core.programs.grid import RankGrid
from ring_core.viz.text import imbalance_line
from ring_torch.accumulate import Rows
from ring_torch.buffers import HeadCarrier, KeyGradBuffer, KVPayload, Shapes
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.kernels.measured import measured
from ring_torch.options import CallOptions
from ring_torch.positions import key_positions, query_positions
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Dropout,
    Grads,
    Inputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    folded,
    zero_bias_grad,
)
from ring_torch.tensor_specs import Described

Saved = list[Tensor]  # tensors that a forward saves beside inputs and results


#: Maps local indices of a rank's keys to columns of a buffer.
IndexMap = Callable[[slice], slice]


class SessionSpec(NamedTuple):
    """An exchange of the passes of a call over gathered keys: its program, shapes and groups.

    Attributes:
        gather: This rank's program, from which it derives those of the others.
        keys: The shape of the K/V of a rank for one group of heads.
        groups: Number of groups into which heads are cut.
        sums: The order of dK/dV of a group that travel.
        by_parts: True if the caller can launch kernels for parts of the heads, as they arrive.
    """

    gather: GatherProgram
    keys: KVPayload
    groups: int
    sums: KeyGradBuffer
    by_parts: bool = False


def nothing(*_: object) -> None:
    """Do nothing: queue no kernels beside fetches, or add no gradients."""


class GatherSession(Protocol):
    """The exchange of gathered K/V, and of their gradients, in one pass of a call.

    All ranks call its methods in the same order, groups of heads from the first to the last. A rank
    that calls none in a pass would let its peers wait until the group's timeout.
    """

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Start fetching K/V into new tensors, and yield each group's tensors and their arrival.

        The tensors are shaped as :attr:`KVPayload.message`, for as many tokens as are gathered. The
        caller takes the groups one by one and runs a group's kernels before it takes the next; it
        takes all of them. ``meanwhile`` queues kernels that need nothing of what is fetched. It is
        called once, as early as the fetches can run beside these kernels, so that the GPU need not
        wait until the host has queued the fetches.
        """

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return a flat buffer for each group, for dK/dV of the keys that this rank fetches.

        A backward calls it before anything else. The buffers may be memory that peers read; they
        are filled with zeros if ``zero``, and uninitialised otherwise.
        """

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Start sending a group's dK/dV to the ranks that own the keys, and receiving this rank's.

        Nothing may write ``grads`` any more, but what arrives for own keys. ``before_last_item``
        selects what is sent: ``None`` all; ``True`` the gradients for which
        :meth:`ring_core.GatherProgram.is_before_last_item` is true; ``False``, afterwards, the
        others. ``overlapped`` says that more kernels follow, which the transfer must not slow down.
        """


Refusals = tuple[str, ...]  # reasons, each a clause of a sentence; empty if there is none


@dataclass(frozen=True)
class Transport:
    """Self-description of a transport: a way in which bytes move between ranks.

    Attributes:
        name: The name that ``transport=`` takes.
        open: Opens a session for a pass over gathered keys, whose signature is the last argument.
            Raises a ``RankMismatchError`` if a peer is making another call.
        refusals: Returns the reasons why these ranks cannot use it for tensors on a device, the
            same on all ranks. Its third argument, ``probe``, allows it to communicate; without
            that it returns ``None`` if only communication can tell.
        sends_messages: True if bytes move as messages of the process group, which a strategy may
            also send itself; they are counted where they are sent. False if ranks read them out of
            their peers' memory; then they are counted where they are read.
        asks: The condition that ranks find out together at the first call, worded to follow "if" in
            the text of ``explain``.
        devices: Types of devices that it supports; empty means any.
        missing: Returns the reason why it cannot run between processes of this machine, or an
            empty string, the default. It gets the type of device and, for each GPU, the GPUs whose
            memory it reaches.
        open_heads: Begins a pass in which some ranks trade tokens for heads, in exchanges of at
            most so many bytes from a rank to all, and returns what moves them. Raises a
            ``RankMismatchError`` if a peer is making another call. Bytes are counted as
            ``sends_messages`` says.
        head_refusals: Returns the reasons why these ranks cannot trade tokens for heads by it,
            though they can use it; the same on all ranks. By default there are none.
        is_short: Returns True if gathering K/V of a shape, in so many groups of heads, is so short
            that no work is done over own keys in place; the same on all ranks. By default no call
            is short.
    """

    name: str
    open: Callable[[Call, SessionSpec, CallSignature], GatherSession]
    refusals: Callable[[Ranks, torch.device, bool], Refusals | None]
    open_heads: Callable[[Call, Ranks, CallSignature, int], HeadCarrier]
    sends_messages: bool
    head_refusals: Callable[[Ranks], Refusals] = lambda _ranks: ()
    asks: str = ""
    devices: tuple[str, ...] = ()
    missing: Callable[[str, Sequence[Sequence[int]]], str] = lambda _device, _reaches: ""
    is_short: Callable[[Plan, KVPayload, int], bool] = lambda _plan, _keys, _groups: False


class PendingKV(NamedTuple):
    """Gathered K/V of one group of heads, whose fetches are in flight."""

    #: The caller may empty the list: then nobody else holds what has arrived.
    tensors: list[Tensor]
    #: Waits (on CUDA: lets the current stream wait) until that many fetches have arrived, counted
    #: in the program's order. With ``None`` it waits for all, and until this rank's own K/V, which
    #: peers or copies may still read, can be changed by the caller. It is ``None`` where whatever
    #: is queued from now on comes after them.
    wait: Callable[[int | None], None] | None
    #: If heads arrive in equal parts, one after the other: for each part, in their order, contexts
    #: in which to launch its kernels, as many as the program has items. A kernel there waits for
    #: its part alone, not for what the caller has queued since, and the caller waits for all behind
    #: them. Empty if all heads arrive together, and if the session was not opened ``by_parts``.
    parts: Sequence[Sequence[Callable[[], AbstractContextManager[object]]]] = ()


#: dK/dV of own keys, on their way home from peers. Called as ``(total, length, index_map)``, it
#: waits for them and adds them to the flat sums ``total`` of ``length`` tokens, in which
#: ``index_map`` finds the columns of own keys. Each is called once, in the order in which the
#: gradients were sent.
PendingGrads = Callable[[Tensor, int, IndexMap], None]


class Traffic(NamedTuple):
    """Bytes that a rank sends to and receives from its peers in a pass, without headers."""

    sent: int
    received: int


class Strategy(Protocol):
    """A strategy resolved for one rank: it moves tokens so that each work item has its operands.

    Both passes compare the call with the peers' (:func:`ring_torch.comm.handshake.agree`, or a
    transport's own comparison) before a peer's tensor is used. They work on plain tensors: autograd
    is outside of them.
    """

    name: str  # the name that ``strategy=`` takes
    depends_on_kernel: bool = False  # True if another kernel would change what travels
    adds_sinks: bool = False  # True if the forward's results include the sinks

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)`` of this rank's queries, and tensors to save for the backward.

        ``out`` is ``[B, T_local, H, Dv]`` in the inputs' dtype or wider.
        """

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved, /
    ) -> Grads:
        """Return the gradients of this rank's shards, in the inputs' dtype or wider.

        A strategy takes a tensor out of ``saved``, which the forward returned, once all launches
        that read it are queued: unless the graph is retained, that frees its memory.
        """

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes that this rank exchanges in a pass, for the tripwire and ``explain``.

        ``saved`` is true if the forward saves tensors, which the backward need not fetch again.
        """

    def visible_pairs(self, call: Call) -> float:
        """Return the number of visible (query, key) pairs that this rank computes for each head."""
        return float(call.program.work()[:, call.ranks.rank].sum())

    def notes(self, _call: Call) -> tuple[str, ...]:
        """Return lines for ``explain`` that say what is special about this call."""
        return ()

    def figures(self, call: Call, _inputs: Inputs) -> list[str]:
        """Return lines for ``explain`` with numbers: how even the work is, what moves how often."""
        return [imbalance_line(call.program)]

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return shapes and dtypes of what a compiled forward saves.

        Without ``plan_known`` they fit every plan of the same graph.
        """
        del call, inputs, plan_known
        return []


#: The strategy of a call while one is made for it.
UNRESOLVED: Strategy = cast("Strategy", None)


class Call(NamedTuple):
    """A checked call without its tensors: plan, kernel, strategy, dtypes, signatures, number."""

    ranks: Ranks
    plan: Plan
    program: RingProgram  # the plan in the order of a ring
    keys: KVPayload  # shape of this rank's K/V as they travel
    request: Request  # the options and sizes that kernels and strategies have to support
    params: KernelParams
    kernel: Kernel
    choice: Selection
    dtype: torch.dtype  # of the inputs
    acc_dtype: torch.dtype  # of accumulators
    device: torch.device
    needs_index: bool  # True if an option needs global positions of tokens
    needs_grad: bool
    strategy: Strategy
    transport: Transport
    forward_signature: CallSignature
    backward_signature: CallSignature
    check_every: int  # the tripwire's setting at this call: it checks each n-th; 0 is none
    has_sinks: bool
    returns_lse: bool  # whose gradient may need another kernel
    # The fields that follow are set per call; all others are cached with the prepared call.
    number: int = 0  # counted on the group, from 1
    checked: int = 0  # not 0 if the tripwire checks this call: the number that picks its samples
    seed: int = 0  # of dropout
    dropout_heads: Tensor | None = None  # as in `records.Dropout`
    prepare_lse_grad: Callable[[], Call] | None = None  # makes this call for a gradient of ``lse``

    def numbered(
        self, number: int, checked: int, seed: int, prepare_lse_grad: Callable[[], Call] | None
    ) -> Call:
        """Return a prepared call with what changes from call to call; `_replace` takes longer."""
        return tuple.__new__(
            Call, (*self[:_PREPARED], number, checked, seed, None, prepare_lse_grad)
        )

    def with_lse_grad(self) -> Call:
        """Return this call for a backward with a gradient of ``lse``, maybe with another kernel.

        Raises:
            UnsupportedError: The kernel that was named cannot take a gradient of ``lse``.
        """
        if self.kernel.capabilities.lse_grad or self.prepare_lse_grad is None:
            return self
        # The number stays: to the peers it is the backward of the same call.
        call = self.prepare_lse_grad()
        if not self.strategy.depends_on_kernel:
            call = call._replace(backward_signature=self.backward_signature)
        return call._replace(
            number=self.number,
            checked=self.checked,
            seed=self.seed,
            dropout_heads=self.dropout_heads,
        )

    def check_capture(self) -> None:
        """Refuse a call that a CUDA graph cannot hold.

        Raises:
            UnsupportedError: An option needs positions or a seed, which come from the host and
                would be frozen, or the kernel looks at numbers on the host.
        """
        if self.needs_index:
            raise UnsupportedError(
                "bias, masks that are tensors or predicates, alibi_slopes and dropout_p cannot be "
                "captured into a CUDA graph. Instead: leave the call out of the graph, or the option out of the call"
            )
        if self.kernel.reads_on_host:
            raise UnsupportedError(
                f"kernel {self.kernel.capabilities.name!r} looks at numbers on the host, so it cannot be captured into a CUDA "
                f"graph. Instead: leave the call out of the graph, or use kernel='triton'"
            )

    def rows(self, inputs: Inputs, *, adds_sinks: bool = False) -> QueryBlock:
        """Return this rank's queries as a block, with what options need beside them.

        With ``adds_sinks`` that is the sinks, too, for launches that see all keys of a row.
        """
        q, sinks = inputs.q, inputs.sinks
        # Views of a tensor that needs no gradient take the host less time.
        q = q.detach() if q.requires_grad else q
        sinks = folded(sinks, torch.float32) if adds_sinks and sinks is not None else None
        if not self.needs_index:
            return QueryBlock(q, sinks, inputs.q_ids)
        indices, position, runs = query_positions(self.plan, self.ranks.rank, self.device)
        return QueryBlock(
            q,
            sinks,
            inputs.q_ids,
            indices,
            position,
            inputs.bias,
            None if inputs.alibi_slopes is None else torch.atleast_2d(inputs.alibi_slopes),
            runs,
            inputs.bias_shift,
            Dropout(self.seed, self.dropout_heads),
        )

    def row_sums(
        self,
        rows: QueryBlock,
        how: Literal["write", "add", "wait"],
        *,
        fully_written: bool = False,
        by_one: bool = False,
    ) -> Rows:
        """Return where launches leave dQ, and the bias's gradient, of this rank's rows.

        dQ that is written is in the inputs' dtype if the kernel rounds it itself, with zeros in
        rows that are in no launch unless it is ``fully_written``; sums begin with zeros. With
        ``by_one`` a single launch has all rows, so the bias's gradient is no sum.
        """
        is_sum = how == "add" or self.kernel.needs_delta
        dtype = self.acc_dtype if is_sum else self.dtype
        new = torch.empty_like if how == "write" and fully_written else torch.zeros_like
        make = partial(new, rows.q, dtype=dtype, memory_format=torch.contiguous_format)
        if rows.bias is None or by_one:
            return Rows(make, how)
        return Rows(make, how, zero_bias_grad(rows, self.params, self.acc_dtype))

    def columns(
        self, rank: int, tensors: Sequence[Tensor], gather: GatherProgram | None = None
    ) -> KeyBlock:
        """Return K/V of a rank, or those that it gathers by a program, as a block.

        ``tensors`` are k, v and, if any, segment ids.
        """
        segments = tensors[2] if len(tensors) > 2 else None
        if not self.needs_index:
            return KeyBlock(tensors[0], tensors[1], segments)
        positions = key_positions(gather or self.plan, rank, self.device)
        return KeyBlock(tensors[0], tensors[1], segments, *positions)

    def open_session(self, spec: SessionSpec, signature: CallSignature) -> GatherSession:
        """Open a session of the transport for the pass that a signature is of.

        Raises:
            RankMismatchError: A peer is making another call.
        """
        return self.transport.open(self, spec, signature)

    def open_heads(self, signature: CallSignature, size: int, members: Ranks | None) -> HeadCarrier:
        """Begin a pass that trades tokens for heads, in exchanges of at most ``size`` bytes a rank.

        ``members`` are the ranks that trade, if not all do; all compare their calls before that.
        Raises a ``RankMismatchError`` if a peer is making another call.
        """
        if members is not None:
            self.agree(self.ranks, signature)
        return self.transport.open_heads(self, members or self.ranks, signature, size)

    def agree(self, ranks: Ranks, signature: CallSignature) -> None:
        """Compare a pass of the call with the ranks' (:func:`ring_torch.comm.handshake.agree`)."""
        agree(ranks, self.number, self.seed, signature, self.device)

    @property
    def is_plain(self) -> bool:
        """True if launches need q, k and v alone, and maybe sinks."""
        return not self.needs_index and not self.request.segment_ids


_PREPARED = Call._fields.index("number")  # fields that equal calls share


def agreed_fields(
    layout: LayoutSpec,
    plan: Plan,
    tensors: Described,
    options: CallOptions,
    params: KernelParams,
    grads: tuple[bool, bool],
) -> dict[str, Any]:
    """Return the fields that ranks have to agree on, but for the kernel and strategy chosen."""
    padded = plan.q_layout.pad_to is not None or plan.k_layout.pad_to is not None
    return {
        "seq_len": [plan.seq_len, plan.kv_seq_len] if padded else None,
        "layout": str(layout), "mask": plan.mask.describe(), "plan": plan.digest.hex(),
        "cu_seqlens": plan.mask.cu_seqlens,
        "chunks": layout.chunks if isinstance(layout, ChunkLayout) else None,
        "softmax_scale": params.scale, "softcap": params.softcap, "dropout_p": params.dropout_p,
        "deterministic": options.deterministic, "return_lse": options.return_lse,
        "segment_ids": "q_ids" in tensors, "needs_grad": grads[0], "bias_grad": grads[1],
        "shifts_bias": params.shifts_bias, "rates": measured().digest,
        **{
            name: [*x.shape, x.dtype] for name, x in tensors.items() if not name.endswith("_ids")
        },
    }  # fmt: skip


@dataclass(frozen=True)
class StrategySpec:
    """Self-description of a strategy that ``strategy=`` can name.

    Attributes:
        name: The name that ``strategy=`` takes.
        resolve: Returns the object that runs both passes of a call, which has none yet, on its
            rank, with all steps made; its other arguments are there if it has a ``grid``: the call
            for this rank's heads, and the groups of ranks that trade. It is not asked for a
            one-rank call that is a single launch.
        refusals: Returns the reasons why it cannot do a call, the same on all ranks.
        moves_by_any: True if all that moves can move by any transport: K/V in sessions, or heads.
            Other strategies send messages, and need a transport that does.
        grid: Of strategies that trade tokens for heads: returns the groups of ranks that trade. The
            kernels run in an inner call, over all tokens of a part of the heads, of one rank or,
            between several groups, of one in each. Its last argument allows it to wait for other
            ranks. It raises an ``UnsupportedError`` if there are no such groups, on all ranks
            alike.
        is_automatic: Returns True if ``strategy="auto"`` considers it over a transport.
        unsuited: Returns reasons for which ``strategy="auto"`` leaves a call to the strategies
            after it, which move fewer bytes; the same on all ranks.
        automatic_refusals: Returns reasons for which a call that names neither strategy nor
            transport does not take it, though it could.
    """

    name: str
    resolve: Callable[[Call, Call | None, RankGrid | None], Strategy]
    refusals: Callable[[Plan, Request], Refusals] = lambda _plan, _request: ()
    moves_by_any: bool = False
    grid: Callable[[Ranks, LayoutSpec, Request, StrategyConfig, bool], RankGrid] | None = None
    is_automatic: Callable[[Transport], bool] = lambda _transport: False
    unsuited: Callable[[Plan, Request], Refusals] = lambda _plan, _request: ()
    automatic_refusals: Callable[[Plan, Request], Refusals] = lambda _plan, _request: ()

    def runs_over(self, transport: Transport) -> bool:
        """Return True if its bytes can move by a transport."""
        return self.moves_by_any or transport.sends_messages


def attend(call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
    """Run the forward of a call by its strategy; the results include the sinks."""
    state, saved = call.strategy.forward(call, inputs)
    if inputs.sinks is not None and not call.strategy.adds_sinks:
        state = add_sinks(state.out.to(call.acc_dtype), state.lse, inputs.sinks)
    return state, saved


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> AttentionState:
    """Let sinks ``[H]`` or ``[H, n]`` join each row's softmax, changing ``out`` in place.

    It is :func:`ring_core.finalize`: sinks add to the denominator and have no value.
    """
    with_sinks = torch.logaddexp(lse, folded(sinks, lse.dtype)[:, None])
    weight = (lse - with_sinks.masked_fill(with_sinks == -torch.inf, 0.0)).exp_()
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    return AttentionState(out, with_sinks)
