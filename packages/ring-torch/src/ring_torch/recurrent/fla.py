"""Linear attention and delta rules by flash-linear-attention's kernels, an optional dependency.

``fla-core`` computes runs as it computes packed sequences, each from a state of its own. The maps
of runs are made by :mod:`ring_torch.recurrent.map_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ring_torch.capture import capture_safe_cache
from ring_torch.recurrent import maps
from ring_torch.recurrent.chunks import Chunks, with_padding
from ring_torch.recurrent.kernels import Kernel, LinearAttention
from ring_torch.recurrent.runs import Runs, Starts

#: The release whose functions are called below, by their names.
RELEASE = "0.6"

_CHUNK = 64  # tokens, of its kernels
_MOST_KEYS = 256
LEAST_CAPABILITY = (8, 0)
_HOPPER = 9
#: Triton releases from the first to before the second compile its gated backward wrongly on Hopper.
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))

#: Decays are at least exp(-100), which is 0 beside any other: differences of sums may not be NaN.
_LEAST_LOG_DECAY = -100.0

_FUNCTIONS = {
    "fla.modules.norm.l2norm": ("l2norm_fwd", "l2norm_bwd"),
    "fla.ops.common.chunk_delta_h": ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu"),
    "fla.ops.common.chunk_h": ("chunk_fwd_h", "chunk_bwd_dh"),
    "fla.ops.common.chunk_o": ("chunk_fwd_o", "chunk_bwd_dv", "chunk_bwd_dv_local", "chunk_bwd_dqkwg"),
    "fla.ops.gated_delta_rule.chunk_fwd": ("chunk_gated_delta_rule_fwd_intra",),
    "fla.ops.gated_delta_rule.wy_fast": ("prepare_wy_repr_bwd",),
    "fla.ops.gla.chunk": ("chunk_gla_fwd_o_gk",),
    "fla.ops.kda.chunk_bwd": ("chunk_kda_bwd_dAv", "chunk_kda_bwd_wy_dqkg_fused"),
    "fla.ops.kda.chunk_intra": ("chunk_kda_fwd_intra", "chunk_kda_bwd_intra"),
    "fla.ops.utils": ("chunk_local_cumsum",),
    "fla.ops.utils.constant": ("RCP_LN2",),
    "fla.ops.utils.index": ("prepare_chunk_indices",),
}  # fmt: skip


@cache
def library() -> Any:
    """Return the library's functions; a text that says why there are none."""
    if find_spec("fla") is None:
        return "fla-core is not installed"
    try:
        return SimpleNamespace(
            **{
                name: getattr(import_module(module), name)
                for module, names in _FUNCTIONS.items()
                for name in names
            }
        )
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"fla-core is another than {RELEASE}, or cannot be imported ({error})"


def reasons_against(
    kernel: Kernel, inputs: Sequence[Tensor], dtype: torch.dtype, *, needs_grad: bool
) -> Iterator[str]:
    """Yield the reasons why the library's kernels do not take a call, each if none came before it.

    Args:
        kernel: The layer.
        inputs: Its inputs.
        dtype: Dtype of states.
        needs_grad: True if there will be a backward.
    """
    x = inputs[0]
    if not isinstance(kernel, LinearAttention):
        yield f"it has no kernels of {kernel.name}"
        return
    if x.device.type != "cuda":
        yield f"its kernels need CUDA, and tensors are on {x.device.type}"
    q, k, v = inputs[:3]
    is_half = q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float16)
    is_half = is_half and (v.dtype == q.dtype or kernel.rounds_values)
    if not is_half or dtype != torch.float32:
        yield "its kernels take q, k and v in bfloat16 or float16, with states in float32"
    if k.shape[-1] % 2 or v.shape[-1] % 2:
        yield "its kernels take even numbers of channels"
    if k.shape[-1] > _MOST_KEYS:
        yield f"its kernels take at most {_MOST_KEYS} key channels, got {k.shape[-1]}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < LEAST_CAPABILITY:
        yield f"its kernels need compute capability 8.0, and this is {capability}"
    if isinstance(found := library(), str):
        yield found
    first, last = _WRONG_ON_HOPPER
    is_wrong = capability[0] == _HOPPER and first <= triton_version() < last
    if needs_grad and kernel.has_decay and is_wrong:
        yield "its backward is wrong on Hopper with Triton 3.4 to before 3.7.1"


@cache
def triton_version() -> tuple[int, ...]:
    """Return the version of Triton, as ``(3, 7, 1)``."""
    version: str = import_module("triton").__version__
    return tuple(int(x) for x in version.split("+", maxsplit=1)[0].split(".")[:3] if x.isdigit())


@capture_safe_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets of runs of these lengths, int64, and their chunks as the library has them.

    The same tensors again for the same lengths: the library knows its own tables by them.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
    offsets = ends.to(device)
    indices = library().prepare_chunk_indices(offsets, _CHUNK, cu_seqlens_cpu=ends)
    return offsets, indices


def map_kernels() -> Any:
    """Return :mod:`ring_torch.recurrent.map_kernels`, which imports Triton."""
    return import_module("ring_torch.recurrent.map_kernels")


class _FlaRuns:
    """Runs by the library's kernels: all rows behind one another, with a state for each run.

    Args:
        kernel: The layer.
        chunks: Which runs there are.
        inputs: The kernel's inputs, ``[B, T_local, ...]``.
    """

    def __init__(self, kernel: LinearAttention, chunks: Chunks, inputs: Sequence[Tensor]) -> None:
        self.kernel, self.inputs, self.fla = kernel, inputs, library()
        runs, x = chunks.runs, inputs[0]
        lengths = runs.length[[span.run for span in chunks.spans]].tolist()
        self.rows, self.count, self.tokens = x.shape[0], len(lengths), sum(lengths)
        self.bounds = list(pairwise(accumulate(lengths * self.rows, initial=0)))
        self.offsets, indices = _offsets(tuple(lengths) * self.rows, x.device)
        self.options = {
            "cu_seqlens": self.offsets, "chunk_indices": indices, "chunk_size": _CHUNK,
        }  # fmt: skip
        self.q, self.k, self.v, *others = map(self._flat, inputs)
        self.v = self.v.to(self.q.dtype)
        if kernel.normalizes:
            self.q, self.q_norm = self.fla.l2norm_fwd(self.q)
            self.k, self.k_norm = self.fla.l2norm_fwd(self.k)
        self.log_decay = self.g = None
        if kernel.has_decay:
            self.log_decay = others[0].float().clamp(min=_LEAST_LOG_DECAY)
            # The library's decays are powers of 2.
            self.g = self.fla.chunk_local_cumsum(
                self.log_decay, scale=self.fla.RCP_LN2, **self.options
            )
        if kernel.is_delta:
            self.beta = others[-1]
        self.prepare()

    def prepare(self) -> None:
        """Compute what depends on no state."""

    def maps_of(self, runs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the transitions of runs and what they leave of zeros."""
        raise NotImplementedError

    def leave(self, run: int, start: Tensor | None) -> Tensor:
        """Return the state behind a run."""
        ((transition, state),) = self.maps_of([run])
        if start is None:
            return state
        return maps.apply(transition, start, is_matrix=self.kernel.is_matrix) + state

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        """Shape of a state of a run, ``(HV, K, V)``."""
        return self.kernel.state_shape(*self.inputs)  # type: ignore[return-value]  # three of them

    def _by_run(self, states: Tensor) -> list[Tensor]:
        """Return states ``[B * runs, *S]`` as ``[B, *S]`` of each run."""
        return list(states.unflatten(0, (self.rows, self.count)).unbind(1))

    def _tokens(self, runs: Sequence[int]) -> list[tuple[int, int]]:
        """Return the flat tokens of runs in all rows, those of a run behind one another."""
        return [self.bounds[row * self.count + run] for run in runs for row in range(self.rows)]

    def _stacked(self, states: Starts) -> Tensor:
        """Return states ``[B, *S]`` of all runs as the library takes them, ``[B * runs, *S]``."""
        zeros = torch.zeros(self.rows, *self._shape, dtype=torch.float32, device=self.k.device)
        return torch.stack([zeros if x is None else x for x in states], 1).flatten(0, 1)

    def _flat(self, x: Tensor) -> Tensor:
        """Return the tokens of all rows behind one another, ``[1, B * tokens, ...]``."""
        return x[:, : self.tokens].flatten(0, 1)[None].contiguous()

    def _rows(self, x: Tensor, like: Tensor) -> Tensor:
        """Return flat tokens as this rank's rows, ``[B, T_local, ...]``, zeros in padding."""
        rows = x[0].unflatten(0, (self.rows, self.tokens)).to(like.dtype)
        return with_padding(rows, self.inputs[0].shape[1] - self.tokens)

    def _input_grads(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs, of those of flat tokens and of sums of decays."""
        q, k = (self._of_key_heads(x) for x in (q, k))
        if self.kernel.normalizes:
            q = self.fla.l2norm_bwd(self.q, self.q_norm, q)
            k = self.fla.l2norm_bwd(self.k, self.k_norm, k)
        if self.log_decay is not None:
            g = self.fla.chunk_local_cumsum(others[0], reverse=True, **self.options)
            # A decay of 0 has no gradient.
            others = (g.masked_fill(self.log_decay <= _LEAST_LOG_DECAY, 0), *others[1:])
        grads = zip((q, k, v, *others), self.inputs, strict=True)
        return tuple(self._rows(x, like) for x, like in grads)

    def _of_key_heads(self, x: Tensor) -> Tensor:
        """Return gradients of copies of q or k, if there are, summed over each head's copies."""
        heads = self.q.shape[2]
        return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3)


class DeltaRuns(_FlaRuns):
    """Runs of the gated delta rule.

    Attributes:
        query: Queries, as states are read.
        key: Keys, as states are written.
        decay: Sums of logarithms of decays in a chunk, by the name that functions have for them.
        w: What each token takes from the state before its chunk.
        u: What it writes.
        solved: Inverse of each chunk's triangular system.
    """

    def prepare(self) -> None:
        """Solve each chunk's system."""
        self.query, self.key, self.decay = self.q, self.k, {"g": self.g}
        self.w, self.u, self.solved = self.fla.chunk_gated_delta_rule_fwd_intra(
            k=self.k, v=self.v, g=self.g, beta=self.beta, **self.options
        )

    def maps_of(self, runs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the maps of runs."""
        if not runs:
            return []
        both = map_kernels().delta_maps(
            self.key, self.w, self.u, self.g, self._tokens(runs), by_channel=self.kernel.by_channel
        )
        transitions, states = (x.unflatten(0, (len(runs), self.rows)) for x in both)
        return list(zip(transitions, states, strict=True))

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of all runs, each from its own state."""
        out = self.read(*self._states(self._stacked(starts)))
        return self._rows(out, self.inputs[self.kernel.values])

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients from the runs' own outputs."""
        self.start, self.out_grad = self._stacked(starts), self._flat(out_grad).to(self.q.dtype)
        self.states, self.new_values = self._states(self.start)
        self.value_grad = self.own_value_grad()
        if not runs:
            return []
        grads = self._by_run(self._state_grads(None)[1])
        return [grads[run] for run in runs]

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return all gradients, by the library's backward with a gradient behind each run."""
        state_grads, entries, value_grad = self._state_grads(self._stacked(exits))
        grads = self.token_grads(state_grads, value_grad)
        return self._by_run(entries), self._input_grads(*grads)

    def read(self, states: Tensor, new_values: Tensor) -> Tensor:
        """Return flat outputs, of the states before chunks and of what their tokens write."""
        out: Tensor = self.fla.chunk_fwd_o(
            q=self.q, k=self.k, v=new_values, h=states, g=self.g, scale=self.kernel.scale,
            **self.options,
        )  # fmt: skip
        return out

    def own_value_grad(self) -> Tensor:
        """Return the gradients of what tokens write, of outputs of their own chunk."""
        grad: Tensor = self.fla.chunk_bwd_dv_local(
            q=self.q, k=self.k, g=self.g, do=self.out_grad, scale=self.kernel.scale, **self.options
        )
        return grad

    def token_grads(self, state_grads: Tensor, value_grad: Tensor) -> tuple[Tensor, ...]:
        """Return flat gradients of q, k, v, of sums of decays, and of beta."""
        q, k, w, g = self.fla.chunk_bwd_dqkwg(
            q=self.q, k=self.k, v=self.new_values, w=self.w, g=self.g, h=self.states,
            dv=value_grad, do=self.out_grad, dh=state_grads, scale=self.kernel.scale, **self.options,
        )  # fmt: skip
        options = {name: x for name, x in self.options.items() if name != "chunk_size"}
        more_k, v, beta, more_g = self.fla.prepare_wy_repr_bwd(
            k=self.k, v=self.v, beta=self.beta, g=self.g, A=self.solved, dw=w, du=value_grad,
            **options,
        )  # fmt: skip
        return q, k.add_(more_k), v, g.add_(more_g), beta

    def _states(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before all chunks, and what their tokens write to them."""
        states, new_values, _ = self.fla.chunk_gated_delta_rule_fwd_h(
            k=self.key, w=self.w, u=self.u, **self.decay, initial_state=start,
            output_final_state=False, **self.options,
        )  # fmt: skip
        return states, new_values

    def _state_grads(self, exits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the states before all chunks and runs, and of what is written."""
        grads: tuple[Tensor, Tensor, Tensor] = self.fla.chunk_gated_delta_rule_bwd_dhu(
            q=self.query, k=self.key, w=self.w, **self.decay, h0=self.start, dht=exits,
            do=self.out_grad, dv=self.value_grad, scale=self.kernel.scale, **self.options,
        )  # fmt: skip
        return grads


class ChannelDeltaRuns(DeltaRuns):
    """Runs of Kimi Delta Attention: keys and queries are multiplied by decays before they are used.

    Attributes:
        scores: Products of queries and keys of each chunk.
    """

    def prepare(self) -> None:
        """Solve each chunk's system."""
        self.decay = {"gk": self.g}
        self.w, self.u, self.query, self.key, self.scores, self.solved = (
            self.fla.chunk_kda_fwd_intra(
                q=self.q, k=self.k, v=self.v, gk=self.g, beta=self.beta, scale=self.kernel.scale,
                disable_recompute=True, **self.options,
            )
        )  # fmt: skip

    def read(self, states: Tensor, new_values: Tensor) -> Tensor:
        """Return flat outputs."""
        out: Tensor = self.fla.chunk_gla_fwd_o_gk(
            q=self.q, v=new_values, g=self.g, A=self.scores, h=states, scale=self.kernel.scale,
            **self.options,
        )  # fmt: skip
        return out

    def own_value_grad(self) -> Tensor:
        """Return the gradients of what tokens write, of outputs of their own chunk."""
        self.scores_grad, grad = self.fla.chunk_kda_bwd_dAv(
            q=self.q, k=self.k, v=self.new_values, do=self.out_grad, A=self.scores,
            scale=self.kernel.scale, **self.options,
        )  # fmt: skip
        return grad  # type: ignore[no-any-return]  # the library has no types

    def token_grads(self, state_grads: Tensor, value_grad: Tensor) -> tuple[Tensor, ...]:
        """Return flat gradients of q and k (of each value head), v, sums of decays and beta."""
        q, k, v, beta, g, solved = self.fla.chunk_kda_bwd_wy_dqkg_fused(
            q=self.q, k=self.k, v=self.v, v_new=self.new_values, g=self.g, beta=self.beta,
            A=self.solved, h=self.states, do=self.out_grad, dh=state_grads, dv=value_grad,
            scale=self.kernel.scale, **self.options,
        )  # fmt: skip
        q, k, beta, g = self.fla.chunk_kda_bwd_intra(
            q=self.q, k=self.k, g=self.g, beta=self.beta, dAqk=self.scores_grad, dAkk=solved,
            dq=q, dk=k, db=beta, dg=g, **self.options,
        )  # fmt: skip
        return q, k, v, g, beta


class AttentionRuns(_FlaRuns):
    """Runs of linear attention with a decay for each head."""

    def maps_of(self, runs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the decays of runs, and what they leave of zeros."""
        if not runs:
            return []
        heads, *_ = self._shape
        tokens, until, decays = self._tokens(runs), None, None
        if self.log_decay is not None:
            g = self.log_decay[0].T.contiguous()  # sums along rows are fast
            # A token's own decay comes before it is written: sums are of those behind it.
            until = torch.zeros_like(g)
            for first, end in tokens:
                until[:, first : end - 1] = g[:, first + 1 : end].flip(1).cumsum(1).flip(1)
            decays = torch.stack([g[:, first:end].sum(1) for first, end in tokens]).exp()
        states = map_kernels().weighted_products(self.k, self.v, until, tokens)
        if decays is None:
            decays = states.new_ones(len(tokens), heads)
        parts = (x.unflatten(0, (len(runs), self.rows)) for x in (decays[..., None, None], states))
        return list(zip(*parts, strict=True))

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of all runs, each from its own state."""
        self.start = self._stacked(starts)
        out = self.fla.chunk_fwd_o(
            q=self.q, k=self.k, v=self.v, g=self.g, h=self._states(is_wide=False),
            scale=self.kernel.scale, **self.options,
        )  # fmt: skip
        return self._rows(out, self.inputs[self.kernel.values])

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients from the runs' own outputs."""
        self.start, self.out_grad = self._stacked(starts), self._flat(out_grad).to(self.q.dtype)
        if not runs:
            return []
        tokens, since = self._tokens(runs), None
        if self.log_decay is not None:
            g = self.log_decay[0].T.contiguous()
            since = torch.zeros_like(g)
            for first, end in tokens:
                torch.cumsum(g[:, first:end], 1, out=since[:, first:end])
        grads = map_kernels().weighted_products(self.q, self.out_grad, since, tokens)
        return list((grads * self.kernel.scale).unflatten(0, (len(runs), self.rows)))

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return all gradients, by the library's backward with a gradient behind each run."""
        state_grads, entries = self._state_grads(self._stacked(exits))
        options = {
            "do": self.out_grad,
            "dh": state_grads,
            "scale": self.kernel.scale,
            **self.options,
        }
        q, k, _, g = self.fla.chunk_bwd_dqkwg(
            q=self.q, k=self.k, v=self.v, g=self.g, h=self._states(is_wide=True), **options
        )
        v = self.fla.chunk_bwd_dv(q=self.q, k=self.k, g=self.g, **options)
        return self._by_run(entries), self._input_grads(q, k, v, *([] if g is None else [g]))

    def _states(self, *, is_wide: bool) -> Tensor:
        """Return the states before all chunks, in float32 if they are to be wide."""
        states, _ = self.fla.chunk_fwd_h(
            k=self._copied(self.k), v=self.v, g=self.g, h0=self.start, cu_seqlens=self.offsets,
            chunk_size=_CHUNK, states_in_fp32=is_wide,
        )  # fmt: skip
        return states  # type: ignore[no-any-return]  # the library has no types

    def _state_grads(self, exits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states before all chunks, and before all runs."""
        grads: tuple[Tensor, Tensor] = self.fla.chunk_bwd_dh(
            q=self._copied(self.q), k=self._copied(self.k), v=self.v, g=self.g, do=self.out_grad,
            h0=self.start, dht=exits, scale=self.kernel.scale, cu_seqlens=self.offsets,
            chunk_size=_CHUNK, states_in_fp32=True,
        )  # fmt: skip
        return grads

    def _copied(self, x: Tensor) -> Tensor:
        """Return q or k for each value head."""
        copies = self.v.shape[2] // x.shape[2]
        return x if copies == 1 else x.repeat_interleave(copies, 2)


def fla_runs(kernel: LinearAttention, chunks: Chunks, inputs: Sequence[Tensor]) -> Runs:
    """Return a rank's runs, computed by the library's kernels."""
    if not kernel.is_delta:
        return AttentionRuns(kernel, chunks, inputs)
    return (ChannelDeltaRuns if kernel.by_channel else DeltaRuns)(kernel, chunks, inputs)
