"""Check and plan a call, and choose its kernel, strategy and transport, before any of it is sent.

Equal calls are prepared once: a call is known again by the shapes and dtypes of its tensors and the
values of its options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_core import (
    KernelConfig,
    LayoutSpec,
    Mask,
    Plan,
    Request,
    StrategyConfig,
    UnsupportedError,
    checks,
    head_plan,
    make_plan,
    ring_program,
)
from ring_core.base.arguments import not_none
from ring_core.base.caches import LengthCaches
from ring_core.base.config import kernel_config, strategy_config
from ring_core.masks.mask import snapshot
from ring_core.programs.grid import RankGrid
from ring_core.tripwire import VARIABLE, every_of
from ring_core.viz.text import found_again
from ring_torch.buffers import KVPayload
from ring_torch.call import UNRESOLVED, Call, Transport, agreed_fields
from ring_torch.capture import ASSUMED_CAPABILITY, on_device
from ring_torch.checking.settings import SETTING, number_checked
from ring_torch.comm.groups import warn_if_alone
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.kernels import choose, kernel_names
from ring_torch.options import CallOptions
from ring_torch.records import Inputs, KernelParams, acc_dtype
from ring_torch.strategies import choose_strategy, grid_of, resolve, strategy_names
from ring_torch.tensor_specs import (
    Described,
    TensorSpec,
    check_local,
    check_tensors,
    head_parallel_specs,
)
from ring_torch.transports import transport_names

_QKV = ("q", "k", "v")
#: The name of each field of :class:`Inputs` in the public function.
_NAMES = (*_QKV, "segment_ids", "segment_ids", "sinks", "bias", "alibi_slopes")
#: Immutable types of options: options of these types that are equal are checked once.
_VALUES = frozenset({
    bool, int, float, str, type(None), Mask, KernelConfig, StrategyConfig,
})  # fmt: skip
#: Options that hold tensors, set to ``None``: a key has the tensors' shapes and dtypes instead.
_NO_TENSORS: Any = dict.fromkeys(("segment_ids", "sinks", "bias", "alibi_slopes"))
_NO_FACTS = (None,) * 5
#: Fields of a :class:`TensorSpec`, bare: a repeated call makes them for its key alone.
Fact = tuple[tuple[int, ...], torch.dtype, torch.device, bool]
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)  # not subclasses, whose sizes may be symbols


def check_call(
    ranks: Ranks,
    number: int,
    layout: LayoutSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: CallOptions,
    *,
    grad: bool | None = None,
    bias_grad: bool = False,
    check: tuple[int, int] | None = None,
    keep: bool = True,
) -> tuple[Call, Inputs]:
    """Check all arguments of a call, plan it, and choose kernel, strategy and transport.

    Nothing of the call is sent. The first call of a group that needs it may communicate to find
    out which transports the ranks can use, or for strategy ``hybrid`` on which hosts they are.

    Args:
        ranks: The ranks that hold one sequence.
        number: The call's number, from :meth:`Ranks.next_call`; with 0 ranks do not communicate.
        layout: The layout, as given.
        q: ``[B, T_local, H, D]``.
        k: ``[B, T_kv_local, K, D]``.
        v: ``[B, T_kv_local, K, Dv]``.
        options: All other options, as given.
        grad: True if there will be a backward; ``None`` asks the tensors.
        bias_grad: True if the backward computes the bias's gradient; without ``grad`` unused.
        check: ``(check_every, checked)`` of the call of which this is the backward; ``None`` asks
            the settings of :func:`ring_torch.check`.
        keep: False for ``explain``, which counts the calls that are kept.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: No kernel, strategy or transport, or not the one named, can do the call.
        PeerError: Strategy ``hybrid`` is to go by the ranks' hosts, and a rank has not told its own
            within the group's timeout.
    """
    q_ids, k_ids, bias = None, None, options.bias
    if options.segment_ids is not None:
        sizes = checks.check_qkv(
            *(
                TensorSpec(*_fact(x, name)).described()
                for x, name in zip((q, k, v), "qkv", strict=True)
            )
        )
        q_ids, k_ids = checks.check_pair(options.segment_ids, sizes)
        for ids in (q_ids, k_ids):
            _fact(ids, "segment_ids")
    inputs = Inputs(q, k, v, q_ids, k_ids, options.sinks, bias, options.alibi_slopes)
    facts = tuple(
        [
            None
            if x is None and name not in _QKV
            else (x.shape, x.dtype, x.device, x.requires_grad)
            if x is not None
            and type(x) in _PLAIN_TENSORS
            and x.layout is torch.strided
            and not x.is_nested
            else _fact(x, name)
            for name, x in zip(
                _NAMES, inputs, strict=False
            )  # all but the shift, which is not given
        ]
    )
    if grad is None:
        grad = torch.is_grad_enabled() and True in [
            fact is not None and fact[3] for fact in facts[:-1]
        ]
        bias_grad = grad and bias is not None and bias.requires_grad
    every = SETTING.get() if check is None else check[0]
    setting = os.environ.get(VARIABLE) if every is None else every
    seed = options.dropout_seed
    if seed is not None:
        checks.check_seed(seed)
        seed = int(seed)
    # The key holds no tensors and no seed: calls with other numbers are prepared as one.
    if seed is not None or facts[3:] != _NO_FACTS:
        options = options._replace(**_NO_TENSORS, dropout_seed=None if seed is None else 0)
    option_types = _types_in(options)
    # Options that may change in place, lists and arrays, are known again by what they say.
    is_plain = _VALUES.issuperset(option_types)
    # The backward prepares again, by what a predicate reads now.
    if isinstance(options.mask, Mask) and options.mask.predicate is not None:
        options = options._replace(mask=snapshot(options.mask))
    arguments = (
        ranks,
        layout,
        facts,
        options if is_plain else _in_normal_form(options),
        is_plain,
        (option_types, ASSUMED_CAPABILITY.get()),
        (grad, bias_grad),
        setting,
        number > 0,
    )
    # A call with options that have no hash is prepared anew each time.
    is_known_again = keep and ((is_plain and isinstance(layout, str)) or _is_hashable(arguments))
    tokens = int(math.prod(q.shape[1:2])) * ranks.size
    # A power of two belongs to the lengths below it.
    prepare = _prepare[(tokens - 1).bit_length()] if is_known_again else _prepare.__wrapped__
    call = prepare(*arguments)
    return call.numbered(
        number,
        check[1]
        if check is not None
        else call.check_every and number_checked(call.check_every, number),
        0 if seed is None or call.params.dropout_p == 0 else seed,
        partial(prepare, *arguments, lse_grad=True) if grad and options.return_lse else None,
    ), inputs


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _types_in(options: CallOptions) -> tuple[type, ...]:
    """Return the types of the options and of the numbers in them.

    They belong to the key of a call, as ``True == 1``, but only one of the two is a valid number.
    Numbers stand for the tuples that hold them; any other tuple may hold what has no hash.
    """
    types = [*map(type, options)]
    may_hold = options.window, options.cu_seqlens, options.seq_len
    for numbers in may_hold if tuple in types else ():
        if type(numbers) is tuple:
            types.remove(tuple)
            types += {*map(type, numbers)} if numbers is options.cu_seqlens else map(type, numbers)
    return tuple(types)


def _in_normal_form(options: CallOptions) -> CallOptions:
    """Check the options of the mask and of dropout, and return the options in a normal form.

    All options that make up the mask become one ``Mask``, and the seed is left out. ``causal``
    stays, as it is also checked against the lengths of q and k.

    Raises:
        ValueError: One of these options is malformed.
    """
    given_mask: Any = options.mask  # anything but a mask is refused below
    mask = checks.check_mask(
        given_mask,
        causal=options.causal,
        window=options.window,
        chunk_size=options.chunk_size,
        cu_seqlens=options.cu_seqlens,
    )
    checks.check_dropout(options.dropout_p, options.dropout_seed)
    return options._replace(
        window=None, chunk_size=None, cu_seqlens=None, mask=mask, dropout_seed=None
    )


@LengthCaches
def _prepare(
    ranks: Ranks,
    layout: LayoutSpec,
    facts: tuple[Fact | None, ...],
    options: CallOptions,
    as_given: bool,
    types: tuple[tuple[type, ...], tuple[int, int] | None],
    grads: tuple[bool, bool],
    setting: str | int | None,
    probe: bool,
    *,
    lse_grad: bool = False,
    lengths: tuple[int, int] | None = None,
) -> Call:
    """Check, plan and choose all that is static about a call: once for equal calls.

    Args:
        ranks: The ranks that hold one sequence.
        layout: The layout, as given.
        facts: Properties of each field of :class:`Inputs` that is given.
        options: The options.
        as_given: True if they are as the caller gave them, not in their normal form.
        types: Types of the options, and the GPU that is assumed: part of the key alone.
        grads: True if there will be a backward, and if it is to have the bias's gradient.
        setting: The tripwire's setting, of a block or of the environment.
        probe: True if ranks may communicate to find out which transports they can use, and wait
            for each other's hosts.
        lse_grad: True for the backward of a call whose ``lse`` has a gradient.
        lengths: Queries and keys without padding, for the inner call of a strategy that splits
            heads; ``None`` asks the option ``seq_len``.
    """
    check_every = every_of(setting)  # ranks have to agree on it
    if as_given:
        options = _in_normal_form(options)
    specs = tuple([None if fact is None else TensorSpec(*fact) for fact in facts])
    sizes, tensors = check_tensors(specs)
    if lengths is None:
        lengths = checks.check_seq_len(
            options.seq_len, sizes.q_len, sizes.k_len, layout, ranks.size
        )
    warn_if_alone()
    request, config = _check_options(sizes, tensors, options, grads, lse_grad=lse_grad)
    given_lengths = sizes.q_len, sizes.k_len
    checks.check_causal(options.causal, *(given_lengths if options.seq_len is None else lengths))
    strategy_setting = strategy_config(options.strategy, strategy_names())
    assert isinstance(options.mask, Mask)
    plan = make_plan(
        options.mask,
        seq_len=lengths[0],
        cp_size=ranks.size,
        layout=layout,
        kv_seq_len=lengths[1],
        pad_to=None
        if options.seq_len is None
        else (sizes.q_len * ranks.size, sizes.k_len * ranks.size),
    )
    program = ring_program(plan, strategy_setting.ring_strategy)
    checks.check_bias(tensors.get("bias"), sizes, plan.kv_seq_len, tensors["q"].device)
    _, dtype, device, _ = not_none(facts[0])
    # Groups and kernels are asked about the current device.
    with on_device(device):
        spec, transport = choose_strategy(
            strategy_setting.name,
            options.transport,
            ranks,
            program,
            device,
            request=request,
            probe=probe,
        )
        if strategy_setting.name == "auto":
            strategy_setting = StrategyConfig(spec.name)
        grid = grid_of(strategy_setting, ranks, layout, request, probe=probe)
        inner = None
        if grid is not None and ranks.size > 1:
            prepare = partial(
                _prepare.__wrapped__,  # once for each call that is kept
                as_given=False,
                types=types,
                grads=grads,
                setting=setting,
                probe=False,
                lse_grad=lse_grad,
                lengths=lengths,
            )
            inner = _inner_call(
                prepare, grid, ranks, layout, specs, options, request, transport, strategy_setting
            )
        choice = choose(config, request, program) if inner is None else inner.choice
        needs_index = (
            request.bias or request.alibi or request.dropout or plan.mask.predicate is not None
        )
        keys = KVPayload.of(
            sizes.batch,
            sizes.k_len,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.v_head_dim,
            dtype,
            request.segment_ids,
        )
    params = _params(plan, request, config, options, grads, device, sinks="sinks" in tensors)
    fields = agreed_fields(layout, plan, tensors, options, params, grads) | {
        "check": check_every,
        "kernel": choice.kernel.capabilities.name, "strategy": spec.name, "transport": transport.name,
    }  # fmt: skip
    if grid is not None:
        fields |= {"ulysses_size": grid.ulysses_size, "outer": strategy_setting.outer}
    call = Call(
        ranks,
        plan,
        program,
        keys,
        request,
        params,
        choice.kernel,
        choice,
        dtype,
        acc_dtype(dtype),
        device,
        needs_index,
        grads[0],
        UNRESOLVED,
        transport,
        CallSignature.of(fields, "forward"),
        CallSignature.of(fields, "backward"),
        check_every,
        "sinks" in tensors,
        options.return_lse,
    )
    with on_device(device):
        return call._replace(strategy=resolve(spec, call, inner, grid))


def prepared_figure() -> str:
    """Return a line for ``explain``: how many calls of this process were known again."""
    return found_again("prepared calls", _prepare.by_length())


def _inner_call(
    prepare: Callable[..., Call],
    grid: RankGrid,
    ranks: Ranks,
    layout: LayoutSpec,
    facts: tuple[TensorSpec | None, ...],
    options: CallOptions,
    request: Request,
    transport: Transport,
    setting: StrategyConfig,
) -> Call:
    """Prepare the call that a rank makes for its heads, after a trade of tokens for heads.

    Raises:
        UnsupportedError: The ranks of other groups, with the same heads, cannot make that call.
    """
    split = head_plan(request.q_heads, request.kv_heads, grid.ulysses_size)
    outer = ranks.part(grid.outer_ranks(ranks.rank))
    is_alone = outer.size == 1
    options = options._replace(
        strategy="auto" if is_alone else setting.outer,
        transport="auto" if is_alone else transport.name,
    )
    try:
        return prepare(outer, grid.outer_layout(layout), head_parallel_specs(facts, split), options)
    except UnsupportedError as error:
        if is_alone:
            raise
        raise UnsupportedError(
            f"strategy {setting.name!r}, outer={setting.outer!r}: {error}"
        ) from error


def _check_options(
    sizes: checks.Sizes,
    tensors: Described,
    options: CallOptions,
    grads: tuple[bool, bool],
    *,
    lse_grad: bool,
) -> tuple[Request, KernelConfig]:
    """Check the options that belong to no tensor; return the request and the kernel's settings."""
    scale, bias = checks.check_scale(options.softmax_scale, sizes.head_dim), tensors.get("bias")
    cap = checks.check_softcap(options.softcap)
    for name in ("deterministic", "return_lse"):
        checks.check_flag(name, getattr(options, name))
    checks.check_choice("transport", options.transport, transport_names())
    return Request(
        device=tensors["q"].device.partition(":")[0],
        dtype=tensors["q"].dtype,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        segment_ids="q_ids" in tensors,
        softcap=cap is not None,
        bias="bias" in tensors,
        alibi="alibi_slopes" in tensors,
        dropout=options.dropout_p > 0,
        deterministic=options.deterministic,
        any_scale=scale <= 0,
        grad=grads[0],
        lse_grad=lse_grad,
        batch=sizes.batch,
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        shared_bias_bytes=math.prod(bias.shape) * getattr(torch, bias.dtype).itemsize
        if bias is not None and len(bias.shape) == 4 and bias.shape[1] == 1
        else 0,
    ), kernel_config(options.kernel, kernel_names())


def _params(
    plan: Plan,
    request: Request,
    config: KernelConfig,
    options: CallOptions,
    grads: tuple[bool, bool],
    device: torch.device,
    *,
    sinks: bool,
) -> KernelParams:
    """Return the parameters of all work items."""
    return KernelParams(
        plan.mask,
        checks.check_scale(options.softmax_scale, request.head_dim),
        checks.check_softcap(options.softcap),
        float(options.dropout_p),
        config.block_q,
        config.block_k,
        bool(config.fused_backward),
        _boundaries(plan, device),
        plan.blocks,
        options.deterministic,
        grads[1],
        options.bias_role != "added",
        shifts_bias=request.bias and options.bias_role != "mask" and not sinks,
        needs_lse=grads[0] or sinks or options.return_lse,
        segment_ids=request.segment_ids,
    )


def _boundaries(plan: Plan, device: torch.device) -> Tensor | None:
    if plan.mask.predicate is None or plan.boundaries is None:
        return None
    with torch.inference_mode(mode=False):  # calls that train share them
        return torch.as_tensor(plan.boundaries, device=device)


def _fact(x: Any, name: str) -> Fact:
    """Return the static properties of an argument, or refuse what is no dense local tensor."""
    x = check_local(name, x)
    return tuple(map(int, x.shape)), x.dtype, x.device, x.requires_grad
