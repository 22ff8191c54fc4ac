"""Hooks for modules that mix tokens without attention: recurrent layers, embeddings of ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ring_core import UnsupportedError
from ring_torch import recurrent
from ring_torch.capture import untraced
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.classes import CACHES
from ring_torch.hf.models.code import by_name
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.hf.models.recurrent import forward_with
from ring_torch.recurrent.arguments import Explained, explained
from ring_torch.sharding import Sharding

_CACHES = CACHES | {"cache_params"}
_LOGGER = logging.getLogger("ring_torch")
_MOST_SIZES = 256  #: Sizes of batches of which it is known whether a layer runs whole.


class MaskKeeper:
    """Hooks that keep the mask of a module's forward while it runs, for others to look up.

    The mask is taken from the forward's own arguments. With activation checkpointing the forward
    runs again in the backward, when the model may have seen another batch in the meantime.
    """

    def __init__(self) -> None:
        self._mask: ShardedMask | None = None

    @property
    def mask(self) -> ShardedMask:
        """Mask of the forward under way.

        Raises:
            UnsupportedError: The module was not given the mask of a split batch.
        """
        if self._mask is None:
            raise UnsupportedError(
                "a part of this model that has to know where its tokens stand was called, or run "
                "again by checkpointing, without the mask of a split batch: call the whole model, and "
                "checkpoint whole layers, or modules that are given the attention_mask"
            )
        return self._mask

    @untraced
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the mask that the forward is given."""
        mask = by_name(module, args, kwargs).get("attention_mask")
        if isinstance(mask, Mapping):  # one for each kind of layer, all of the same batch
            mask = next((x for x in mask.values() if isinstance(x, LayerMask)), None)
        mask = mask.batch if isinstance(mask, LayerMask) else mask
        self._mask = mask if isinstance(mask, ShardedMask) else None

    @untraced
    def end(self, *_: object) -> None:
        """Forget the mask after the forward, also when it raised."""
        self._mask = None


class WholeLayer(MaskKeeper):
    """Hooks that run a recurrent layer, or an embedding of ids, on whole sequences, on every rank.

    Such a layer carries a state from each token to the next. It begins with none and does not
    return its last one with a gradient, so that no rank can go on where another has ended. Such an
    embedding is scaled by how many tokens of the row are masked.
    """

    @untraced
    def gather(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the layer's input by the whole sequence, gathered from all ranks."""
        self.begin(module, args, kwargs)
        arguments = by_name(module, args, kwargs)
        # The hidden states, or ids: [B, T_local, ...] becomes [B, T, ...].
        name = next(iter(arguments))
        arguments[name] = self.mask.unshard(arguments[name])
        # The state runs over whole rows, and so must know the padding of all ranks.
        arguments["attention_mask"] = self.mask.whole
        if isinstance(arguments.get("position_ids"), Tensor):
            arguments["position_ids"] = self.mask.unshard(arguments["position_ids"])
        return (), arguments

    @untraced
    def scatter(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return this rank's part of the layer's output, after its forward.

        Raises:
            UnsupportedError: The output is not ``[B, T, ...]``.
        """
        hidden_states = output[0] if isinstance(output, tuple) else output
        if hidden_states.shape[:2] != (self.mask.shape[0], self.mask.length):
            raise UnsupportedError(
                f"{type(module).__name__} must return [B, T, ...] = {(self.mask.shape[0], self.mask.length)} "
                f"to be split after it, and returns {tuple(hidden_states.shape)}"
            )
        # The other ranks keep their own tokens of the same output: nothing is sent.
        local = self.mask.shard(hidden_states)
        return (local, *output[1:]) if isinstance(output, tuple) else local


class SplitLayer(WholeLayer):
    """Hooks and forward of a recurrent layer that computes this rank's part of its sequences.

    Its own code runs, with Ring's operations in place of its convolution and scan. A copy of the
    model has copies of these, which compute with the copied weights.

    Args:
        module: The layer.
        may_be_whole: True to run it on whole sequences where that sends less.
    """

    def __init__(self, module: Any, *, may_be_whole: bool = False) -> None:
        super().__init__()
        self.module, self.may_be_whole = module, may_be_whole
        self.asks = False  # while a scan is only described
        self._known: dict[tuple[Any, ...], bool] = {}  # which batches run whole, by their sizes

    @property
    def _sharding(self) -> Sharding:
        """Sharding of the batch, which the operations look up."""
        return self.mask.sharding

    @property
    def documents(self) -> tuple[tuple[int, ...] | None, ...]:
        """Offsets of each row's documents."""
        return self.mask.documents

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer, in place of its own ``forward``.

        Raises:
            UnsupportedError: It is given a cache.
        """
        arguments, mask = by_name(self.module, args, kwargs), self.mask
        if caches := sorted(x for x in _CACHES if arguments.get(x) is not None):
            raise UnsupportedError(
                f"{', '.join(caches)}: {type(self.module).__name__} is split over the sequence, of "
                f"which there is no cache; call the whole model, with use_cache=False"
            )
        may_be_whole = self.may_be_whole and mask.documents == (None,)
        if may_be_whole and self._sends_less_whole(arguments):
            return self._whole(args, kwargs)
        return self._split(arguments)

    def _sends_less_whole(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if states would take more bytes than hidden states; tell it once a size."""
        x = next(iter(arguments.values()))
        size = (x.shape, x.dtype, self.mask.sharding.layout)
        if size not in self._known:
            # The layer runs as far as its scan, whose operation is only described. Dropout before
            # it draws what it would, so that a recomputation draws the same numbers.
            self.asks, states = True, 0
            devices = [x.device] if x.device.type == "cuda" else []
            try:
                with torch.no_grad(), torch.random.fork_rng(devices):
                    self._split(arguments)
            except Explained as call:
                states = call.sent
            finally:
                self.asks = False
            if len(self._known) == _MOST_SIZES:
                self._known.clear()
            self._known[size] = states > x.nbytes
            if self._known[size]:
                _LOGGER.info(
                    "%s runs on whole sequences: states would take %s bytes, hidden states take %s",
                    type(self.module).__name__, states, x.nbytes,
                )  # fmt: skip
        return self._known[size]

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the layer on whole sequences, by its own code."""
        _, arguments = self.gather(self.module, args, kwargs)
        output = forward_with(self.module, {})(self.module, **arguments)
        return self.scatter(self.module, (), output)

    def _split(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the layer on this rank's tokens."""
        mask = self.mask
        # The layer multiplies padding by 0, as it does on whole sequences.
        padding = None if mask.whole is None else mask.shard(mask.whole)
        arguments = {**arguments, "attention_mask": padding}
        inline = _INLINE.get(type(self.module).__name__)
        if inline is not None:
            return inline(self, self.module, **arguments)
        operations = {name: partial(operation, self) for name, operation in _OPERATIONS.items()}
        return forward_with(self.module, operations)(self.module, **arguments)


def _run(
    rows: SplitLayer, operation: Callable[..., Any], tensors: Mapping[str, Tensor | None],
    **options: Any,
) -> Tensor:  # fmt: skip
    """Run an operation on rows ``[B, T_local, ...]``: at once, or one by one if documents vary."""
    if rows.asks and operation is not recurrent.causal_conv1d:
        raise explained(operation, rows, **tensors, **options, cu_seqlens=None)
    if len(rows.documents) == 1:
        whole: Tensor = operation(rows, **tensors, **options, cu_seqlens=rows.documents[0])
        return whole
    return torch.cat([
        operation(
            rows, **{name: None if x is None else x[n : n + 1] for name, x in tensors.items()},
            **options, cu_seqlens=documents,
        )
        for n, documents in enumerate(rows.documents)
    ])  # fmt: skip


def _convolution(
    rows: SplitLayer, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: object,
) -> Tensor:  # fmt: skip
    """Return the causal convolution of ``hidden_states [B, D, T_local]``, ``weight [D, W]``."""
    known = activation if activation in (None, "silu", "swish") else None
    y = _run(
        rows, recurrent.causal_conv1d, {"x": hidden_states.mT}, weight=weight, bias=bias,
        activation=known,
    )  # fmt: skip
    if activation != known:
        y = ACT2FN[activation](y)
    return y.mT


def _delta_rule(
    operation: Callable[..., Any], rows: SplitLayer, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the outputs of a delta rule, ``[B, T_local, HV, V]``, and no state."""
    del chunk_size
    _refuse_states(initial_state, output_final_state)
    tensors = {"q": query, "k": key, "v": value, "g": g, "beta": beta}
    return _run(rows, operation, tensors, use_qk_l2norm=use_qk_l2norm_in_kernel), None


def _mamba2(
    rows: SplitLayer, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,  # noqa: N803 - mamba_ssm's names
    chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False, **_: object,
) -> Tensor:  # fmt: skip
    """Return the outputs of Mamba-2's scan, ``[B, T_local, H, P]``."""
    del chunk_size
    _refuse_states(initial_states, return_final_states)
    return _run(
        rows, recurrent.ssd, {"x": hidden_states, "dt": dt, "B": B, "C": C, "z": z}, A=A, D=D,
        dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip


def _mamba(
    rows: SplitLayer, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,  # noqa: N803 - mamba_ssm's names
    D: Tensor | None = None, z: Tensor | None = None,  # noqa: N803
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False,
    **_: object,
) -> Tensor:  # fmt: skip
    """Return the outputs of Mamba's scan, ``[B, D, T_local]``; all rows have tokens last."""
    _refuse_states(None, return_last_state)
    tensors = {"u": hidden_states, "delta": dt, "B": B, "C": C, "z": z}
    return _run(
        rows, recurrent.selective_scan,
        {name: None if x is None else x.mT for name, x in tensors.items()}, A=A, D=D,
        delta_bias=delta_bias, delta_softplus=delta_softplus,
    ).mT  # fmt: skip


def _lightning_attention(
    rows: SplitLayer, module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute MiniMax's lightning attention, all of whose forward stands in one function."""
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask.unsqueeze(-1).to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (module.num_attention_heads, -1)).split(module.head_dim, dim=-1)
    out = _run(
        rows, recurrent.simple_gla, {"q": q, "k": k, "v": v},
        g_gamma=-module.slope_rate.flatten(), scale=1.0,
    )  # fmt: skip
    gate = module.output_gate(hidden_states).sigmoid()
    return module.out_proj(gate * module.norm(out.flatten(2))), None


class _WithParts:
    """A module some of whose attributes are others, for its forward to look up.

    Args:
        module: The module.
        **parts: The other attributes.
    """

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        self.__dict__.update(parts, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _recurrent_block(rows: SplitLayer, module: Any, **arguments: Any) -> Any:
    """Compute RecurrentGemma's block by its own code, but for its convolution and its scan."""
    convolution, unit = module.conv_1d, module.rg_lru

    def scan(
        hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: object
    ) -> tuple[Tensor, None]:
        factors = recurrent_gate * ~reset
        return _run(rows, recurrent.linear_recurrence, {"a": factors, "b": hidden_states}), None

    parts = _WithParts(
        module,
        conv_1d=lambda x: _convolution(rows, x, convolution.weight.squeeze(1), convolution.bias),
        rg_lru=partial(forward_with(unit, {}), _WithParts(unit, _rnn_scan=scan)),
    )
    return forward_with(module, {})(parts, **{**arguments, "use_cache": False})


def _not_fused(_rows: SplitLayer, *_: object, **__: object) -> None:
    """Return nothing, upon which a layer computes convolution, scan and projections one by one."""


def _refuse_states(initial: object, wants_final: object) -> None:
    """Refuse the states of a cache.

    Raises:
        UnsupportedError: There are any.
    """
    if initial is not None or wants_final:
        raise UnsupportedError(
            "a recurrent layer is given the state of a cache, or asked for one: there is no cache of "
            "a split sequence; call the whole model, with use_cache=False"
        )


#: What takes the place of the functions :data:`REPLACED`.
_OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "causal_conv1d_fn": _convolution,
    "chunk_kimi_delta_attention": partial(_delta_rule, recurrent.kda),
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_inner_fn": _not_fused,
    "mamba_selective_scan": _mamba,
    "torch_chunk_gated_delta_rule": partial(_delta_rule, recurrent.gated_delta_rule),
})  # fmt: skip

#: What takes the place of the forwards of layers :data:`ring_torch.hf.models.recurrent.INLINE`.
_INLINE: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "MiniMaxLightningAttention": _lightning_attention,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
})  # fmt: skip
