"""Check, plan and choose a kernel for one call, before or while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

from ring_core import (
    Layout,
    LayoutSpec,
    Mask,
    Request,
    RingProgram,
    StrategyName,
    checks,
    make_plan,
    ring_program,
)
from ring_core.base.config import kernel_config, strategy_config
from ring_jax.collectives import match_varying, varying_axes
from ring_jax.dropout import seed_words
from ring_jax.kernels import Selection, choose, kernel_names
from ring_jax.kernels.plugins import installed_kernels
from ring_jax.meshes import refuse_symbolic_dims
from ring_jax.records import (
    Array,
    CallOptions,
    CallSpec,
    Devices,
    Inputs,
    Kernel,
    LocalShape,
    Trade,
)
from ring_jax.strategies import STRATEGIES, Way, choose_way
from ring_jax.tripwire import checked_every


class ShardCounts(NamedTuple):
    """The number of shards that each dimension of global arrays is split into.

    Without a ``mesh`` the arrays are one device's shards already.
    """

    mesh: AbstractMesh | None = None
    batch: int = 1
    heads: int = 1
    mask: int = 1  # shards of a mask that is an array, over all its dimensions
    in_one_process: bool | None = None  # each row of devices along the axis; None: not known


LOCAL = ShardCounts()


def check_call(
    kernels: Sequence[Kernel] | None, axis_name: Hashable | None, layout: LayoutSpec, cp_size: int,
    q: Array, k: Array, v: Array, options: CallOptions, shards: ShardCounts = LOCAL,
) -> tuple[CallSpec, Inputs, Way]:  # fmt: skip
    """Check all arguments of a call, plan it and choose its strategy and kernel.

    Args:
        kernels: The kernels to choose from, the fastest first; ``None`` takes those of the
            installed packages.
        axis_name: The mesh axis that splits the sequence; ``None`` is one device.
        layout: The order of tokens over devices.
        cp_size: Number of devices along the axis.
        q, k, v: Arrays ``[B, T, heads, head_dim]``, global if ``shards`` has a mesh, else local.
        options: All other arguments of the user.
        shards: How global arrays are split.

    Returns:
        The static side of the call; its arrays, to be passed to :func:`prepared`; and the choice
        of strategy and kernels with its reasons.

    Raises:
        ValueError: An argument is malformed, or a jax array where it must be static.
        UnsupportedError: No kernel, or not the one named, can do the call.
    """
    _check_static(options)
    q, k, v = (_canonical(x) for x in (q, k, v))
    described = [described_as(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    kernels = installed_kernels() if kernels is None else kernels
    config = kernel_config(options.kernel, kernel_names(kernels))
    _check_symbolic(described, axis_name)
    sizes = checks.check_qkv(*described)
    factor = cp_size if shards.mesh is None else 1  # from the lengths of q and k to global ones
    padded = sizes.q_len * factor, sizes.k_len * factor
    q_len, k_len = checks.check_seq_len(
        options.seq_len, padded[0] // cp_size, padded[1] // cp_size, layout, cp_size
    )
    mask, dense = _check_mask(options, described[0].shape, k_len, shards.mask)
    if options.seq_len is None:
        checks.check_causal(options.causal, sizes.q_len, sizes.k_len)
    else:
        checks.check_causal(options.causal, q_len, k_len)
    requested = strategy_config(options.strategy)
    checks.check_choice("transport", options.transport, TRANSPORTS)
    program = ring_program(
        make_plan(
            mask,
            seq_len=q_len,
            cp_size=cp_size,
            layout=layout,
            kv_seq_len=k_len,
            pad_to=None if options.seq_len is None else padded,
        ),
        requested.ring_strategy,
    )
    dtype = described[0].dtype
    request, scale, cap = _request(options, sizes, dtype, shards, dense is not None)
    q_ids, k_ids = _check_option_arrays(sizes, k_len, options)
    if cp_size > 1:
        shared = _shared_bias_bytes(options.bias, dense, dtype, shards) * factor // cp_size
        request = replace(request, shared_bias_bytes=shared)
    inputs = Inputs(
        q, k, v, q_ids, k_ids, options.sinks, options.bias, options.alibi_slopes,
        None if options.dropout_seed is None else seed_words(options.dropout_seed), None, dense,
    )  # fmt: skip
    devices = _devices(q, shards)

    def trade_of(strategy: StrategyName) -> Trade | None:
        """Return how a strategy trades heads, if it does."""
        return STRATEGIES[strategy].trade(requested, program, request, devices)

    def kernels_of(strategy: StrategyName) -> Selection:
        """Choose the kernels of a strategy: those that can do what one device computes."""
        trade, computed, asked = trade_of(strategy), program, request
        if trade is not None:
            strategy, computed = trade.strategy, trade.program
            q_heads, kv_heads = (x.shape[1] for x in (trade.heads.q, trade.heads.kv))
            asked = replace(request, q_heads=q_heads, kv_heads=kv_heads)
        local = _local_shape(
            inputs, computed, shards, strategy, has_dropout=options.dropout_p > 0,
            deterministic=options.deterministic,
        )  # fmt: skip
        return choose(kernels, config, asked, computed, local)

    way = choose_way(requested.name, program, request, devices, kernels_of)
    choice = way.kernels
    call = CallSpec(
        program, axis_name, scale, cap, float(options.dropout_p), (*choice.broken, *choice.kernels), config,
        dtype, sizes.head_dim, way.strategy, bias_masks=dense is not None,
        bias_grad=options.bias is not None, check_every=checked_every(),
        deterministic=options.deterministic, has_sinks=options.sinks is not None,
        forward_only=tuple(kernel for kernel, _ in choice.forward_only if len(choice.kernels) > 1),
        trade=trade_of(way.strategy),
    )  # fmt: skip
    return call, inputs, way


def call_with_traced_structs[R](function: Callable[..., R], *args: Any) -> R:
    """Return ``function(*args)``, each ``jax.ShapeDtypeStruct`` in ``args`` as a traced array.

    The result must hold no array.
    """
    tree: Any
    # JAX warns of iterators that it takes as leaves by itself; what is called refuses them by name.
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Iterator))
    is_struct = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    if not any(is_struct):
        return function(*args)
    results: list[R] = []

    def run(*arrays: Array) -> None:
        remaining = iter(arrays)
        traced = [next(remaining) if x else leaf for leaf, x in zip(leaves, is_struct, strict=True)]
        results.append(function(*tree.unflatten(traced)))

    jax.eval_shape(run, *(leaf for leaf, x in zip(leaves, is_struct, strict=True) if x))
    return results[0]


def structs_in(arguments: Mapping[str, object]) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Return the structs among arguments, each with the argument's name."""
    return [
        (name, x)
        for name, value in arguments.items()
        for x in jax.tree.leaves(value)
        if isinstance(x, jax.ShapeDtypeStruct)
    ]


def named_arrays(inputs: Inputs) -> list[tuple[str, Array]]:
    """Return the arrays of a checked call, each with the name of the user's argument."""
    names = {
        "q_ids": "segment_ids", "k_ids": "segment_ids", "slopes": "alibi_slopes", "seed": "dropout_seed"
    }  # fmt: skip
    return [(names.get(name, name), x) for name, x in inputs._asdict().items() if x is not None]


def _check_symbolic(arrays: Sequence[checks.Tensor], axis_name: Hashable | None) -> None:
    """Refuse symbolic dimensions of ``jax.export``, but a batch on one device."""
    for x in arrays:
        if axis_name is not None:
            refuse_symbolic_dims(x.shape)
        refuse_symbolic_dims(x.shape[1:], "a call is planned for numbers of tokens and heads")


def _check_mask(
    options: CallOptions, q_shape: tuple[int, ...], k_len: int, shards: int
) -> tuple[Mask, Array | None]:
    """Check the mask options, and split them into a rule and an array.

    Returns:
        The rule over positions, and the mask that is an array, ``[B or 1, H or 1, T, T_kv]``, or
        ``None``.
    """
    rule, dense = split_mask(options.mask)
    if dense is not None:
        checks.check_dense_mask(described_as("mask", dense), q_shape, k_len, DEVICE, parts=shards)
        dense = dense if dense.ndim == 4 else dense[None, None]
    return checks.check_mask(
        rule, causal=options.causal, window=options.window, chunk_size=options.chunk_size,
        cu_seqlens=options.cu_seqlens,
    ), dense  # fmt: skip


def _request(
    options: CallOptions, sizes: checks.Sizes, dtype: str, shards: ShardCounts, has_mask: bool
) -> tuple[Request, float, float | None]:
    """Check the scalar options, and make the request by which kernels accept or refuse the call.

    Returns:
        The request, the softmax scale and the soft cap.
    """
    scale = checks.check_scale(options.softmax_scale, sizes.head_dim)
    cap = checks.check_softcap(options.softcap)
    checks.check_dropout(options.dropout_p, None if options.dropout_seed is None else 0)
    for name in ("deterministic", "return_lse"):
        checks.check_flag(name, getattr(options, name))
    return Request(
        device="", dtype=dtype, head_dim=sizes.head_dim, v_head_dim=sizes.v_head_dim,
        segment_ids=options.segment_ids is not None, softcap=cap is not None,
        bias=options.bias is not None or has_mask, alibi=options.alibi_slopes is not None,
        dropout=options.dropout_p > 0, deterministic=options.deterministic, any_scale=scale <= 0,
        lse_grad=options.return_lse, batch=sizes.batch // shards.batch,
        q_heads=sizes.q_heads // shards.heads, kv_heads=sizes.kv_heads // shards.heads,
    ), scale, cap  # fmt: skip


def _shared_bias_bytes(
    bias: Array | None, mask: Array | None, dtype: str, shards: ShardCounts
) -> int:
    """Return the bytes of a bias, with its mask, that all heads share, in a shard of the batch."""
    arrays = [x for x in (bias, mask) if x is not None]
    if not arrays or any(x.shape[1] > 1 for x in arrays):
        return 0
    batch = max(x.shape[0] for x in arrays)
    batch = batch // shards.batch if batch > 1 else 1
    itemsize = jnp.dtype(dtype if bias is None else bias.dtype).itemsize
    return batch * arrays[0].shape[2] * arrays[0].shape[3] * itemsize


def device_kind(x: Array, mesh: AbstractMesh | None = None) -> str:
    """Return the kind of device that an array's program is compiled for, as jax calls it."""
    return str(_device(x, mesh).device_kind)


def _device(x: Array, mesh: AbstractMesh | None) -> Any:
    """Return a device of those that an array's program is compiled for.

    The first of these that names a device decides: ``mesh``, the mesh around the call
    (``shard_map``, ``set_mesh``), the mesh of the array's sharding, the machine's first device.
    """
    meshes = mesh, jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    devices = [x.abstract_device for x in meshes if x is not None and x.abstract_device is not None]
    return (devices or jax.devices())[0]


def _devices(x: Array, shards: ShardCounts) -> Devices:
    """Return the platform of the devices along the axis, and whether one process drives them."""
    alone = shards.in_one_process
    return Devices(
        _device(x, shards.mesh).platform, jax.process_count() == 1 if alone is None else alone
    )


def _local_shape(
    x: Inputs,
    program: RingProgram,
    shards: ShardCounts,
    strategy: StrategyName,
    *,
    has_dropout: bool,
    deterministic: bool,
) -> LocalShape:
    """Return the sizes, dtypes and options of one device's part, for kernels to refuse it."""
    masks = [] if x.mask is None else [array for array in (x.bias, x.mask) if array is not None]
    rows_differ = x.q_ids is not None or any(array.shape[0] > 1 for array in masks)
    return LocalShape(
        x.q.shape[0] // shards.batch if rows_differ else 1, program.plan.q_layout.local_len,
        STRATEGIES[strategy].key_lengths(program), x.q.shape[3], x.v.shape[3], x.q.dtype.itemsize,
        x.bias is not None or x.mask is not None, has_dropout, device_kind(x.q, shards.mesh),
        str(x.q.dtype), None if x.bias is None else str(x.bias.dtype), x.mask is not None,
        deterministic,
    )  # fmt: skip


def prepared(
    call: CallSpec, inputs: Inputs, first: tuple[Array | int, Array | int] = (0, 0)
) -> Inputs:
    """Bring this device's shards of a checked call into the form that strategies take.

    An array mask is folded into the bias, and all arrays are marked as varying over the same mesh
    axes. ``first`` are the global indices of the first local batch row and query head.
    """
    seed = numbers = None
    if call.dropout_p > 0:
        seed = inputs.seed
        row, head = (jnp.asarray(x, jnp.int32) for x in first)
        heads = head + jnp.arange(inputs.q.shape[2], dtype=jnp.int32)
        numbers = jnp.concatenate([row[None], heads])
    inputs = inputs._replace(
        bias=with_mask(inputs.bias, inputs.mask, inputs.q.dtype), mask=None,
        slopes=None if inputs.slopes is None else jnp.atleast_2d(inputs.slopes),
        seed=seed, numbers=numbers,
    )  # fmt: skip
    inputs = inputs._replace(bias=_with_padding(inputs.bias, call.plan.k_layout))
    # What is replicated varies from here on over all axes that anything varies over, the rank too:
    # loops need carries of one type, and the transpose of the mark sums gradients of replicas.
    rank = None if call.axis_name is None else lax.axis_index(call.axis_name)
    return match_varying(inputs, varying_axes((inputs, rank)))


def split_mask(mask: Any) -> tuple[Any, Any]:
    """Split a mask argument into ``(rule, array)``; the one that it is not is ``None``."""
    return (None, mask) if isinstance(mask, jax.Array | np.ndarray) else (mask, None)


def with_mask(bias: Array | None, mask: Array | None, dtype: jnp.dtype) -> Array | None:
    """Return the bias ``[B or 1, H or 1, T, S]`` with ``-inf`` where ``mask`` is False.

    Without a bias it is zeros in ``dtype``; without a mask the bias is returned as it is.
    """
    if mask is None:
        return bias
    return jnp.where(mask, jnp.zeros((), dtype) if bias is None else bias, -jnp.inf)


def _with_padding(bias: Array | None, layout: Layout) -> Array | None:
    """Return a bias with columns of ``-inf`` for the padding of the keys."""
    padding = layout.padded_len - layout.seq_len
    if bias is None or padding == 0:
        return bias
    return jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)


def _check_option_arrays(sizes: checks.Sizes, k_len: int, options: CallOptions) -> tuple[Any, Any]:
    """Check sinks, bias, ALiBi slopes and segment ids.

    Returns:
        The segment ids of queries and of keys, or two ``None``.
    """
    sinks, bias, slopes = (
        None if x is None else described_as(name, x)
        for name, x in (
            ("sinks", options.sinks), ("bias", options.bias), ("alibi_slopes", options.alibi_slopes)
        )
    )  # fmt: skip
    checks.check_sinks(sinks, sizes, DEVICE)
    checks.check_bias(bias, sizes, k_len, DEVICE)
    checks.check_alibi_slopes(slopes, sizes, DEVICE)
    if options.segment_ids is None:
        return None, None
    q_ids, k_ids = (
        int32_ids("segment_ids", ids) for ids in checks.check_pair(options.segment_ids, sizes)
    )
    for side, ids in (("queries", q_ids), ("keys", k_ids)):
        checks.check_segment_ids(described_as("segment_ids", ids), sizes, side, DEVICE)
    return q_ids, k_ids


def _canonical(x: Any) -> Any:
    """Return numpy's float64 arrays in the dtype that JAX has for them: float32 without x64."""
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        return x.astype(jnp.result_type(x), copy=False)
    return x


def int32_ids(name: str, ids: Any) -> Any:
    """Return segment ids as int32, the same array if they are.

    Raises:
        ValueError: They are no array of integers, or of a type that int32 does not hold.
    """
    text = described_as(name, ids).dtype
    if not text.startswith(("int", "uint")):  # of keys of random numbers JAX knows no such dtype
        raise ValueError(f"{name} must be integers, got {text}")
    dtype = jnp.dtype(text)
    if dtype == jnp.int32:
        return ids
    if not np.can_cast(dtype, np.int32):
        raise ValueError(
            f"{name} must be int32, or integers that it holds, got {dtype}, of which JAX would cut bits: "
            f"two documents could become one. Number them first, as "
            f"numpy.unique(ids, return_inverse=True) does, and cast that"
        )
    return jnp.asarray(ids, jnp.int32)


def int32_counts(counts: Any) -> Array:
    """Return numbers of tokens as int32; numbers beyond it, beyond every sequence, become its last.

    JAX alone would cut their bits.
    """
    wide: Any = counts if isinstance(counts, jax.Array) else np.asarray(counts)
    if np.issubdtype(wide.dtype, np.integer) and not np.can_cast(wide.dtype, np.int32):
        wide = wide.clip(None, np.iinfo(np.int32).max)
    array = jnp.asarray(wide)
    return array.astype(jnp.int32) if jnp.issubdtype(array.dtype, jnp.integer) else array


DEVICE = "device"  # arrays of a traced call have no device to compare


def axis_size(axis_name: Hashable | None) -> int:
    """Return the number of devices along a mesh axis, 1 for ``None``.

    Raises:
        ValueError: No surrounding ``shard_map`` has such an axis.
    """
    if axis_name is None:
        return 1
    try:
        return int(lax.axis_size(axis_name))
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"axis_name {axis_name!r} is not a mesh axis here; call this inside "
            f"jax.shard_map over a mesh that has it, use ContextParallel on global arrays, or "
            f"axis_name=None for one device"
        ) from error


#: Options that a program is compiled for.
_STATIC = (
    "seq_len", "causal", "window", "chunk_size", "cu_seqlens", "softmax_scale", "softcap", "dropout_p",
    "deterministic", "return_lse",
)  # fmt: skip


def _check_static(options: CallOptions) -> None:
    """Refuse arrays as values of options that a program is compiled for."""
    for name in _STATIC:
        value = getattr(options, name)
        elements = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(x, jax.Array) for x in elements):
            raise ValueError(
                f"{name} must be known when the call is traced, and is a jax array; pass Python "
                f"numbers (under jit: close over them or name them in static_argnames)"
            )


def described_as(name: str, x: object) -> checks.Tensor:
    """Describe an array by shape and dtype, as :mod:`ring_core.checks` takes it.

    Raises:
        ValueError: It is not an array.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} must be a jax.Array, got {type(x).__name__}")
    return checks.Tensor(tuple(x.shape), str(x.dtype), DEVICE)


#: ``xla``: XLA's collectives.
TRANSPORTS = ("auto", "xla")
