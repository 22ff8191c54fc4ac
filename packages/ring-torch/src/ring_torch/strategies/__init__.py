"""Strategies of context parallelism, and the choice of the one that runs a call.

A strategy moves Q, K and V between ranks so that each work item finds its operands. This package
may import ``call``, ``transports`` and what is below. A new strategy is one file here, which ends
in its :class:`~ring_torch.call.StrategySpec`, and a line in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ring_core import LayoutSpec, Request, RingProgram, StrategyConfig, UnsupportedError
from ring_core.programs.grid import RankGrid
from ring_core.viz.text import heading
from ring_torch import transports
from ring_torch.call import Call, Strategy, StrategySpec, Transport
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Ranks
from ring_torch.records import Inputs
from ring_torch.strategies.balanced import BALANCED
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.hybrid import HYBRID
from ring_torch.strategies.ring import RING
from ring_torch.strategies.single import Single, only_item
from ring_torch.strategies.ulysses import ULYSSES

#: The strategies of ``strategy=``: ``auto`` takes the first of its own that can do a call.
STRATEGIES: tuple[StrategySpec, ...] = (ULYSSES, GATHER, RING, BALANCED, HYBRID)

Way = tuple[StrategySpec, Transport]  # a strategy over a transport


def strategy_names() -> tuple[str, ...]:
    """Return the names that ``strategy=`` takes."""
    return ("auto", *(spec.name for spec in STRATEGIES))


def resolve(spec: StrategySpec, call: Call, inner: Call | None, grid: RankGrid | None) -> Strategy:
    """Return the object that runs both passes of a call, which has none yet, on its rank.

    A call of one rank whose plan is a single launch gets a :class:`Single`, whatever the strategy,
    unless :func:`only_item` says that it needs more.
    """
    item = only_item(call)
    if item is None:
        return spec.resolve(call, inner, grid)
    return Single.of(spec.name, item, call)


def ways(strategy: str = "auto", transport: str = "auto") -> Iterator[Way]:
    """Yield the pairs of strategy and transport that the given names allow, preferred ones first.

    A named strategy or transport allows only itself. ``"auto"`` allows every transport, but only
    the strategies that offer themselves for automatic choice over it.
    """
    for spec in STRATEGIES:
        for candidate in transports.TRANSPORTS:
            is_meant = spec.is_automatic(candidate) if strategy == "auto" else spec.name == strategy
            if is_meant and transport in ("auto", candidate.name) and spec.runs_over(candidate):
                yield spec, candidate


def choose_strategy(
    strategy: str,
    transport: str,
    ranks: Ranks,
    program: RingProgram,
    device: torch.device,
    *,
    request: Request,
    probe: bool,
    trades: bool = True,
) -> Way:
    """Return the strategy and the transport of a call: the first allowed pair that can do it.

    All ranks choose alike, as nothing here depends on the rank.

    Args:
        strategy: A name, one of ``strategy_names()``.
        transport: A name, one of ``transport_names()``.
        ranks: The ranks that hold one sequence.
        program: The call's plan in the order of a ring. On one rank, where nothing travels, the
            strategy it was made for is returned.
        device: The device of the call's tensors.
        request: The options and sizes that the call asks for.
        probe: True if ranks may communicate here, to find out e.g. if their GPUs reach each
            other's memory. ``explain`` must not.
        trades: True if ``auto`` may trade tokens for heads.

    Raises:
        UnsupportedError: No allowed pair can do this call; the reasons of the last are named.
    """
    candidates = list(ways(strategy, transport))
    senders = [f"transport={x.name!r}" for x in transports.TRANSPORTS if x.sends_messages]
    if not candidates:
        (named,) = (x for x in transports.TRANSPORTS if x.name == transport)
        over_it = [f"strategy={x.name!r}" for x in STRATEGIES if x.runs_over(named)]
        raise UnsupportedError(
            f"strategy {strategy!r} sends messages, and transport {transport!r} copies out of the "
            f"peers' memory. Instead: use {', '.join(senders)} or 'auto', or {' or '.join(over_it)}"
        )
    if ranks.size == 1:
        return next(ways(program.strategy))
    for spec, candidate in candidates:
        is_left_out = not trades and spec.grid is not None
        if strategy == "auto" and (is_left_out or spec.unsuited(program.plan, request)):
            continue
        reasons = _reasons(spec, candidate, ranks, program, device, request, probe=probe)
        # Who names one of the two wants it even where `auto` would rather not.
        if not reasons and (strategy, transport) == ("auto", "auto"):
            reasons = [*spec.automatic_refusals(program.plan, request)]
        if not reasons:
            return spec, candidate
    # What `auto` comes to over messages: strategies that refuse nothing.
    able = [
        f"strategy={spec.name!r}"
        for spec, sender in ways()
        if sender.sends_messages and not spec.refusals(program.plan, request)
    ]
    raise UnsupportedError(
        f"strategy {strategy!r} over transport {candidates[-1][1].name!r}: {'; '.join(reasons)}. "
        f"Instead: use {', '.join(able)} or 'auto' and {', '.join(senders)} or 'auto'"
    )


def without_trade(call: Call, transport: str) -> tuple[str, str]:
    """Return the strategy that ``auto`` takes over ``transport`` if it must not trade heads.

    The transport that it takes comes with it. ``call`` is what ``auto`` has chosen otherwise.
    """
    (chosen,) = (x for x in STRATEGIES if x.name == call.strategy.name)
    if chosen.grid is None:
        return chosen.name, call.transport.name
    spec, candidate = choose_strategy(
        "auto",
        transport,
        call.ranks,
        call.program,
        call.device,
        request=call.request,
        probe=False,
        trades=False,
    )
    return spec.name, candidate.name


def grid_of(
    config: StrategyConfig, ranks: Ranks, layout: LayoutSpec, request: Request, *, probe: bool
) -> RankGrid | None:
    """Return the groups of ranks that trade tokens for heads; ``None`` for other strategies.

    Raises:
        UnsupportedError: There are no such groups of these ranks.
    """
    grids = (x.grid for x in STRATEGIES if x.name == config.name)
    grid = next(grids, None)
    return None if grid is None else grid(ranks, layout, request, config, probe)


def _reasons(
    spec: StrategySpec,
    transport: Transport,
    ranks: Ranks,
    program: RingProgram,
    device: torch.device,
    request: Request,
    *,
    probe: bool,
) -> list[str]:
    """Return the reasons why a strategy over a transport cannot do a call.

    A reason that only communication would find is missing where ``probe`` is false.
    """
    unreachable = transport.refusals(ranks, device, probe) or ()
    of_heads = () if spec.grid is None else transport.head_refusals(ranks)
    return [*spec.refusals(program.plan, request), *unreachable, *of_heads]


def ask_ranks(ranks: Ranks) -> None:
    """Let the ranks find out now which transports they can use.

    It communicates, so all ranks have to call it together. A compiled call needs it beforehand:
    while a compiler traces, ranks cannot communicate.

    Raises:
        ValueError: This process was forked from one that had made the group.
        RuntimeError: A pass of an earlier call failed.
    """
    if ranks.size > 1:
        ranks.check_open()
        device = default_device(ranks)
        # What they find out is kept with the group, where the traced call reads it.
        for transport in transports.TRANSPORTS:
            transport.refusals(ranks, device, True)


def explained(call: Call, inputs: Inputs) -> str:
    """Return the text of :meth:`ContextParallel.explain`: a call's kernel, movement and plan."""
    return (
        f"{call.choice.describe()}\n{describe_strategy(call, inputs)}\n"
        f"{'\n'.join([heading(call.program), *call.strategy.figures(call, inputs)])}"
    )


def describe_strategy(call: Call, inputs: Inputs) -> str:
    """Return the lines of ``explain`` about movement: strategy, transport and bytes of each pass.

    They also say why the preferred strategy and transport were not taken. Nothing is sent.
    """
    ranks, transport = call.ranks, call.transport
    lines = [f"strategy {call.strategy.name}, transport {transport.name}"]
    if ranks.size == 1:
        return f"{lines[0]} (one rank: nothing travels)"
    if transport.refusals(ranks, call.device, False) is None:
        lines[0] += f", if {transport.asks}"
    # The same answers as when the call was prepared: they depend on plan and request alone.
    unsuited = {spec.name: spec.unsuited(call.plan, call.request) for spec, _ in ways()}
    spec, fastest = next(way for way in ways() if not unsuited[way[0].name])
    if (call.strategy.name, transport) != (spec.name, fastest):
        reasons = _reasons(
            spec, fastest, ranks, call.program, call.device, call.request, probe=False
        ) or [*spec.automatic_refusals(call.plan, call.request)]
        reason_text = "; ".join(reasons) or "another one was named"
        lines.append(f"  not {spec.name} over {fastest.name}: {reason_text}")
    lines += [
        f"  not {spec.name} over {candidate.name}: {reason}"
        for spec, candidate in ways()
        for reason in unsuited[spec.name]
        if spec.name != call.strategy.name
    ]
    saves = bool(call.strategy.saved_shapes(call, inputs, plan_known=True))
    passes = {"forward": True, "backward": False} if call.needs_grad else {"forward": True}
    bytes_of_passes = [
        f"{name} {moved.sent:,} bytes out and {moved.received:,} in"
        for name, forward in passes.items()
        for moved in [call.strategy.traffic(call, inputs, forward=forward, saved=saves)]
    ]
    lines.append(f"  this rank moves {', '.join(bytes_of_passes)}")
    lines += [f"  {note}" for note in call.strategy.notes(call)]
    return "\n".join(lines)
