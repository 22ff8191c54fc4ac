"""The gated delta rule by the kernels of flash-linear-attention, an optional dependency.

``fla-core`` computes runs as it computes packed sequences, each from a state of its own, and makes
the map of a run by the kernels of its own context parallelism. Its other layers are not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ring_torch.capture import is_traced
from ring_torch.recurrent.chunks import Chunks
from ring_torch.recurrent.kernels import Kernel, LinearAttention
from ring_torch.recurrent.runs import Starts

#: The release whose functions are called below, by their names.
RELEASE = "0.6"

_CHUNK = 64  # tokens, of its kernels
_MOST_KEYS = 256
_LEAST_CAPABILITY = (8, 0)
_HOPPER = 9
#: Triton releases from the first to before the second compile its gated backward wrongly on Hopper.
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))

_FUNCTIONS = {
    "fla.modules.norm.l2norm": ("l2norm_fwd", "l2norm_bwd"),
    "fla.ops.common.chunk_delta_h": ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu"),
    "fla.ops.common.chunk_o": ("chunk_fwd_o", "chunk_bwd_dv_local", "chunk_bwd_dqkwg"),
    "fla.ops.cp.chunk_fwd": ("chunk_cp_fwd_h",),
    "fla.ops.cp.chunk_bwd": ("chunk_cp_bwd_dh",),
    "fla.ops.gated_delta_rule.chunk_fwd": ("chunk_gated_delta_rule_fwd_intra",),
    "fla.ops.gated_delta_rule.wy_fast": ("prepare_wy_repr_bwd",),
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
    if not isinstance(kernel, LinearAttention) or kernel.name != "gated_delta_rule":
        yield f"its kernels of {kernel.name} are not used"
    if x.device.type != "cuda":
        yield f"its kernels need CUDA, and tensors are on {x.device.type}"
    q, k, v = inputs[:3]
    is_half = {q.dtype, k.dtype, v.dtype} in ({torch.bfloat16}, {torch.float16})
    if not is_half or dtype != torch.float32:
        yield "its kernels take q, k and v in bfloat16 or float16, with states in float32"
    if k.shape[-1] > _MOST_KEYS:
        yield f"its kernels take at most {_MOST_KEYS} key channels, got {k.shape[-1]}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < _LEAST_CAPABILITY:
        yield f"its kernels need compute capability 8.0, and this is {capability}"
    if isinstance(found := library(), str):
        yield found
    first, last = _WRONG_ON_HOPPER
    if needs_grad and capability[0] == _HOPPER and first <= triton_version() < last:
        yield "its backward is wrong on Hopper with Triton 3.4 to before 3.7.1"


@cache
def triton_version() -> tuple[int, ...]:
    """Return the version of Triton, as ``(3, 7, 1)``."""
    version: str = import_module("triton").__version__
    return tuple(int(x) for x in version.split("+", maxsplit=1)[0].split(".")[:3] if x.isdigit())


def chosen(
    name: str, kernel: Kernel, inputs: Sequence[Tensor], dtype: torch.dtype, *, needs_grad: bool
) -> tuple[str, str]:
    """Return the library that a name or ``"auto"`` stands for, and why it is not a faster one."""
    if name == "eager":
        return "eager", "it was asked for"
    reason = "it is not called in graphs" if is_traced(inputs[0]) else ""
    reason = reason or next(reasons_against(kernel, inputs, dtype, needs_grad=needs_grad), "")
    if not reason and name == "auto":  # its results on GPUs have not been compared yet
        reason = "it has to be named"
    return ("fla", "") if not reason else ("eager", reason)


class FlaRuns:
    """Runs by the library's kernels: all rows behind one another, with a state for each run.

    Args:
        kernel: The layer.
        chunks: Which runs there are.
        inputs: q, k, v, g and beta, ``[B, T_local, ...]``.
    """

    def __init__(self, kernel: LinearAttention, chunks: Chunks, inputs: Sequence[Tensor]) -> None:
        self.kernel, self.inputs, self.fla = kernel, inputs, library()
        runs, x = chunks.runs, inputs[0]
        lengths = runs.length[[span.run for span in chunks.spans]].tolist()
        self.rows, self.count, self.tokens = x.shape[0], len(lengths), sum(lengths)
        ends = torch.tensor([0, *lengths * self.rows], dtype=torch.int64, device="cpu").cumsum(0)
        self.offsets = ends.to(x.device)
        indices = self.fla.prepare_chunk_indices(self.offsets, _CHUNK, cu_seqlens_cpu=ends)
        self.options = {
            "cu_seqlens": self.offsets, "chunk_indices": indices, "chunk_size": _CHUNK,
        }  # fmt: skip
        self.q, self.k, self.v, g, self.beta = map(self._flat, inputs)
        if kernel.normalizes:
            self.q, self.q_norm = self.fla.l2norm_fwd(self.q)
            self.k, self.k_norm = self.fla.l2norm_fwd(self.k)
        # The library's decays are powers of 2.
        self.g = self.fla.chunk_local_cumsum(g.float(), scale=self.fla.RCP_LN2, **self.options)
        self.w, self.u, self.solved = self.fla.chunk_gated_delta_rule_fwd_intra(
            k=self.k, v=self.v, g=self.g, beta=self.beta, **self.options
        )

    def map_of(self, run: int) -> tuple[Tensor, Tensor]:
        """Return a run's map, which the library writes as ``[state | transition]``."""
        _, values = self.v.shape[2:]
        both = self._summaries()
        for row in range(self.rows):
            self.fla.chunk_cp_fwd_h(
                k=self.k, w=self.w, u=self.u, hm=both[row], g=self.g,
                cu_seqlens=self._bounds(row, run), chunk_size=_CHUNK,
            )  # fmt: skip
        return both[..., values:], both[..., :values]

    def leave(self, run: int, start: Tensor | None) -> Tensor:
        """Return the state behind a run."""
        transition, state = self.map_of(run)
        return state if start is None else transition @ start + state

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of all runs, each from its own state."""
        states, new_values = self._states(self._stacked(starts))
        out = self.fla.chunk_fwd_o(
            q=self.q, k=self.k, v=new_values, h=states, g=self.g, scale=self.kernel.scale,
            **self.options,
        )  # fmt: skip
        return self._rows(out.to(self.inputs[2].dtype))

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients from the runs' own outputs."""
        self.start, self.out_grad = self._stacked(starts), self._flat(out_grad)
        self.value_grad = self.fla.chunk_bwd_dv_local(
            q=self.q, k=self.k, g=self.g, do=self.out_grad, scale=self.kernel.scale, **self.options
        )
        grads = []
        for run in runs:
            both = self._summaries()
            for row in range(self.rows):
                self.fla.chunk_cp_bwd_dh(
                    q=self.q, k=self.k, w=self.w, do=self.out_grad, dv=self.value_grad,
                    dhm=both[row], g=self.g, scale=self.kernel.scale,
                    cu_seqlens=self._bounds(row, run), chunk_size=_CHUNK,
                )  # fmt: skip
            grads.append(both[..., : self.v.shape[3]])
        return grads

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return all gradients, by the library's backward with a gradient behind each run."""
        scale, options = self.kernel.scale, self.options
        states, new_values = self._states(self.start)
        state_grads, entries, value_grad = self.fla.chunk_gated_delta_rule_bwd_dhu(
            q=self.q, k=self.k, w=self.w, g=self.g, h0=self.start, dht=self._stacked(exits),
            do=self.out_grad, dv=self.value_grad, scale=scale, **options,
        )  # fmt: skip
        q, k, w, g = self.fla.chunk_bwd_dqkwg(
            q=self.q, k=self.k, v=new_values, w=self.w, g=self.g, h=states, dv=value_grad,
            do=self.out_grad, dh=state_grads, scale=scale, **options,
        )  # fmt: skip
        del options["chunk_size"]
        more_k, v, beta, more_g = self.fla.prepare_wy_repr_bwd(
            k=self.k, v=self.v, beta=self.beta, g=self.g, A=self.solved, dw=w, du=value_grad,
            **options,
        )  # fmt: skip
        g = self.fla.chunk_local_cumsum(g.add_(more_g), chunk_size=_CHUNK, reverse=True, **options)
        k = k.add_(more_k)
        if self.kernel.normalizes:
            q = self.fla.l2norm_bwd(self.q, self.q_norm, q)
            k = self.fla.l2norm_bwd(self.k, self.k_norm, k)
        grads = tuple(
            self._rows(x.to(like.dtype))
            for x, like in zip((q, k, v, g, beta), self.inputs, strict=True)
        )
        return list(entries.unflatten(0, (self.rows, self.count)).unbind(1)), grads

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        """Shape of a state of a run, ``(HV, K, V)``."""
        return self.kernel.state_shape(*self.inputs)  # type: ignore[return-value]  # three of them

    def _states(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before all chunks, and what their tokens write to them."""
        states, new_values, _ = self.fla.chunk_gated_delta_rule_fwd_h(
            k=self.k, w=self.w, u=self.u, g=self.g, initial_state=start, output_final_state=False,
            **self.options,
        )  # fmt: skip
        return states, new_values

    def _summaries(self) -> Tensor:
        """Return room for the maps of a run in all rows, ``[B, HV, K, V + K]``."""
        heads, keys, values = self._shape
        shape = self.rows, heads, keys, values + keys
        return torch.zeros(shape, dtype=torch.float32, device=self.k.device)

    def _bounds(self, row: int, run: int) -> Tensor:
        """Return the offsets at which a run begins and ends."""
        first = row * self.count + run
        return self.offsets[first : first + 2]

    def _stacked(self, states: Starts) -> Tensor:
        """Return states ``[B, *S]`` of all runs as the library takes them, ``[B * runs, *S]``."""
        zeros = torch.zeros(self.rows, *self._shape, dtype=torch.float32, device=self.k.device)
        return torch.stack([zeros if x is None else x for x in states], 1).flatten(0, 1)

    def _flat(self, x: Tensor) -> Tensor:
        """Return the tokens of all rows behind one another, ``[1, B * tokens, ...]``."""
        return x[:, : self.tokens].flatten(0, 1)[None].contiguous()

    def _rows(self, x: Tensor) -> Tensor:
        """Return flat tokens as this rank's rows, ``[B, T_local, ...]``, zeros in padding."""
        rows = x[0].unflatten(0, (self.rows, self.tokens))
        padding = self.inputs[0].shape[1] - self.tokens
        return functional.pad(rows, (*(0, 0) * (rows.ndim - 2), 0, padding))
