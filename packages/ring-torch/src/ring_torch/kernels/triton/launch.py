"""Launch of a Triton kernel for a work item: its arguments, constants, blocks and grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ring_core import KernelConfig, WorkItem
from ring_core.base.arguments import not_none
from ring_core.philox import dropout_threshold
from ring_core.plan.tile_mask import BlockGeometry
from ring_core.triton.tile_configs import (
    Blocks,
    KernelPass,
    choose_blocks,
    heads_per_swizzle,
    padded_head_dim,
    score_unit,
    stages_that_fit,
)
from ring_torch.capture import capture_safe_cache, on_device
from ring_torch.kernels.block_index import FAR, Grid, block_index, tile_numbers
from ring_torch.kernels.library import capability
from ring_torch.records import (
    Dropout,
    KernelParams,
    KeyBlock,
    QueryBlock,
    has_unit_stride,
)

_LEAST_CAPABILITY = 8, 0

#: Second parameters for the same tensor: kernels read it by pointers in blocks done NaN-safe.
_VIEWS = {"q_pointer": "q", "k_pointer": "k", "v_pointer": "v", "dout_pointer": "dout"}
#: Strides of tensors that a call may not have; then they are 0.
_NO_STRIDES = (
    "bias_batch", "bias_head", "bias_row", "bias_shift_batch", "bias_shift_head", "slopes_batch",
)  # fmt: skip
#: Tensors whose strides have another tensor's name, as they lie alike.
_STRIDES_OF = {"dout": "out", "delta": "lse"}


@dataclass(frozen=True, eq=False)
class ItemLaunch:
    """Launches of the Triton kernels over one work item."""

    rows: QueryBlock
    columns: KeyBlock
    item: WorkItem
    params: KernelParams

    def run(
        self, name: KernelPass, pass_tensors: Mapping[str, Tensor], *, overwrite: bool = False
    ) -> None:
        """Launch the kernel of a pass.

        ``pass_tensors`` are the tensors of the pass beside q, k and v, by the kernel's names.
        Results are merged or added into them or, if ``overwrite``, overwrite them; but
        ``bwd_fused`` always adds to ``dq``, and ``bwd_dbias`` to ``dbias``.
        """
        q, k, v = self.rows.q, self.columns.k, self.columns.v
        batch, q_len, heads, dim = q.shape
        k_len, kv_heads = k.shape[1:3]
        per_score_inputs = (
            self.rows.bias is not None or self.params.dropout_p > 0 or self.item.tiles is not None
        )
        blocks = choose_blocks(
            KernelConfig("triton", self.params.block_q, self.params.block_k),
            name,
            max(dim, v.shape[3]),
            q.element_size(),
            per_score_inputs=per_score_inputs,
        )
        num_q_blocks, num_k_blocks = -(-q_len // blocks.q), -(-k_len // blocks.k)
        # Programs are one a block of the side whose results they sum: queries in the forward and
        # for dQ, keys for dK/dV.
        k_major = name in ("bwd_dkv", "bwd_fused")
        tensors = {"q": q, "k": k, "v": v, **pass_tensors}
        assert all(map(has_unit_stride, tensors.values())), "kernels read and write rows"
        values: dict[str, Any] = {
            **tensors, **{view: tensors.get(source) for view, source in _VIEWS.items()},
            **_strides(tensors), **self._masks(k_major=k_major), **self._options(),
            "q_len": q_len, "k_len": k_len, "heads": heads, "group": heads // kv_heads,
        }  # fmt: skip
        if name == "bwd_dbias":
            dbias = pass_tensors["dbias"]
            # One program sums what the batch rows and heads that share an element of the bias have
            # to add.
            values |= {
                "dbias_batch": dbias.stride(0), "dbias_head": dbias.stride(1),
                "dbias_row": dbias.stride(2), "shared_batch": batch // dbias.shape[0],
                "shared_heads": heads // dbias.shape[1], "bias_heads": dbias.shape[1],
            }  # fmt: skip
            programs = (num_k_blocks, num_q_blocks, dbias.shape[0] * dbias.shape[1])
        else:
            values |= self._block_index(blocks, k_major=k_major)
            values["heads_per_swizzle"] = heads_per_swizzle(
                name,
                batch=batch,
                heads=heads,
                kv_heads=kv_heads,
                q_len=q_len,
                k_len=k_len,
                row=(dim + v.shape[3]) * q.element_size(),
            )
            # One program for each outer block and head: of keys and K/V heads where dK/dV are
            # summed, so that programs of other blocks never add to the same ones.
            count = num_k_blocks * batch * kv_heads if k_major else num_q_blocks * batch * heads
            programs = (count, 1, 1)
        consts = self._consts(
            name,
            blocks,
            tensors,
            is_indexed=name == "bwd_dbias" or "block_index" in values,
            overwrite=overwrite,
        )
        launches = [values]
        if name != "fwd" and self.rows.bias_shift is not None:
            # One of the two computes; the host does not wait to know which.
            values["any_shift"] = self.rows.bias_shift.any().to(torch.int32)
            # Both are queued, with equal arguments but for the shift; the flag is read on the GPU,
            # where one of them returns at once.
            launches.append({**values, "bias_shift": None})
        for arguments in launches:
            _launch(name, programs, arguments, consts, blocks, q.device)

    def _consts(
        self,
        name: KernelPass,
        blocks: Blocks,
        tensors: Mapping[str, Tensor],
        *,
        is_indexed: bool,
        overwrite: bool,
    ) -> dict[str, Any]:
        """Return the constants for which a kernel is compiled, by name."""
        q, k, v, params = *(tensors[name] for name in "qkv"), self.params
        laid_out = {_STRIDES_OF.get(name, name): x.stride(1) for name, x in tensors.items()}
        steps = {
            f"{name.upper()}_STEP": laid_out.get(name, 0)
            for name in ("q", "k", "v", "out", "dq", "dk", "dv")
        }
        # Constants are compiled in: each new combination of them costs a compilation, so lengths
        # and the seed are none.
        p = params.dropout_p
        return {
            "D": q.shape[3], "DV": v.shape[3], "PADDED": padded_head_dim(q.shape[3]),
            "PADDED_V": padded_head_dim(v.shape[3]), "ITEMS": 1, "INDEXED": is_indexed,
            "ALL_PARTIAL": self.rows.bias is not None, "SCALE": params.scale,
            "SOFTCAP": params.softcap, "UNIT": score_unit(q.element_size()),
            "DROPPED": dropout_threshold(p) if p > 0 else None, "BLOCK_Q": blocks.q, "BLOCK_K": blocks.k,
            "TMA": False, "Q_IS_MULTIPLE": q.shape[1] % blocks.q == 0,
            "K_IS_MULTIPLE": k.shape[1] % blocks.k == 0, "FUSED": name == "bwd_fused",
            "OVERWRITE": overwrite, "KV_PACKED": False, "BIAS_BY_POSITION": self.rows.bias is not None,
            "ALIGNED8": self.columns.aligned8, **steps,
        }  # fmt: skip

    def _block_index(self, blocks: Blocks, *, k_major: bool) -> dict[str, Any]:
        """Return the arguments that list the blocks to visit, unless the kernel derives them."""
        rows, columns, params = self.rows, self.columns, self.params
        if self.item.tiles is None and rows.segments is None and not params.bias_masks:
            # The blocks of a band follow from its two bounds.
            return {"block_index_batch": 0}
        grid = Grid(
            blocks.q, blocks.k, rows.bias is not None, k_major, rows.q.device, params.blocks
        )
        segments = None if rows.segments is None else (rows.segments, not_none(columns.segments))
        visible = None
        if params.bias_masks:  # where the bias shows anything to a head, ``[B or 1, n, m]``
            shown = (not_none(rows.bias) != -torch.inf).any(dim=1)
            visible = shown.index_select(2, not_none(columns.position))
        index = block_index(self.item, grid, segments, visible)
        count, outer, inner = index.blocks.shape
        return {
            "block_index": index.blocks, "counts": index.counts,
            "block_index_batch": outer * inner if count > 1 else 0,
        }  # fmt: skip

    def _masks(self, *, k_major: bool) -> dict[str, Tensor]:
        """Return the arguments that mask scores: bounds, segment ids, tiles or documents."""
        rows, columns, item, device = self.rows, self.columns, self.item, self.rows.q.device
        arguments = {
            "items": _bounds(rows.q.shape[1], columns.k.shape[1], item.lo, item.hi, device)
        }
        if rows.segments is not None and columns.segments is not None:
            arguments["q_ids"] = rows.segments.contiguous()
            arguments["k_ids"] = columns.segments.contiguous()
        if item.tiles is not None:
            geometry = not_none(self.params.blocks)
            arguments |= {
                "bits": _partial_tile_bits(geometry, device),
                "tiles": _tile_numbers(item, geometry, device),
            }
        elif item.cu_q is not None:
            arguments["cells"] = _cells(item, k_major, device)
        return arguments

    def _options(self) -> dict[str, Any]:
        """Return the arguments of bias, ALiBi and dropout; strides of absent tensors are 0."""
        rows, columns, params = self.rows, self.columns, self.params
        arguments: dict[str, Any] = dict.fromkeys(_NO_STRIDES, 0)
        if rows.bias is not None or rows.slopes is not None or params.dropout_p > 0:
            arguments["k_at"] = not_none(columns.position).to(torch.int32)
        for name, x in (("bias", rows.bias), ("bias_shift", rows.bias_shift)):
            if x is not None:
                assert has_unit_stride(x)
                # A dimension of size 1 is shared: a stride of 0 reads it again for each row or
                # head.
                batch, head = (x.stride(n) if x.shape[n] > 1 else 0 for n in range(2))
                arguments |= {name: x, f"{name}_batch": batch, f"{name}_head": head}
        if rows.bias is not None:
            arguments["bias_row"] = rows.bias.stride(2)
        if rows.slopes is not None:
            slopes = rows.slopes.float().contiguous()
            arguments |= {"slopes": slopes, "q_at": not_none(rows.position).to(torch.int32)}
            arguments["slopes_batch"] = slopes.shape[1] if slopes.shape[0] > 1 else 0
        if params.dropout_p > 0:
            dropout = _dropout(not_none(rows.dropout), rows.q.shape[2], rows.q.device)
            arguments |= {"q_index": not_none(rows.indices).to(torch.int32), "dropout": dropout}
        return arguments


def _launch(
    name: KernelPass,
    programs: tuple[int, int, int],
    values: Mapping[str, Any],
    consts: Mapping[str, Any],
    blocks: Blocks,
    device: torch.device,
) -> None:
    """Launch a pass's kernel, with only those arguments that it takes."""
    from ring_core.triton import backward, forward
    from ring_core.triton.scores import Constexprs, as_constants, nan_safe_constexprs

    constexprs = Constexprs(**consts)
    kernel: Any = {
        "fwd": forward.fwd,
        "bwd_dq": backward.bwd_dq,
        "bwd_dkv": backward.bwd_dkv,
        "bwd_fused": backward.bwd_dkv,
        "bwd_dbias": backward.bwd_dbias,
    }[name]
    all_values = {
        **values, "consts": as_constants(constexprs),
        "nan_safe": as_constants(nan_safe_constexprs(constexprs)),
    }  # fmt: skip
    # Kernels of other passes take fewer arguments; what is absent in this call is None, and not
    # compiled.
    arguments = {name: all_values.get(name) for name in kernel.arg_names}
    dims, itemsize = (constexprs.D, constexprs.DV), values["q"].element_size()
    # Where Triton interprets kernels on the CPU, stages are those of the least GPU.
    major, minor = capability(device.index) if device.type == "cuda" else _LEAST_CAPABILITY
    stages = stages_that_fit(name, blocks, dims, itemsize, 10 * major + minor)
    with on_device(device):
        _start(
            kernel,
            programs,
            arguments,
            num_warps=blocks.warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )


def _start(
    kernel: Any, programs: tuple[int, int, int], arguments: Mapping[str, Any], **options: int
) -> None:
    """Launch a kernel; tests compile what it is given for GPUs that are not there."""
    kernel[programs](**arguments, **options)


def _strides(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the strides of the batch and head dimensions of all tensors but dbias, by name."""
    return {
        f"{_STRIDES_OF.get(name, name)}_{kind}": x.stride(dim)
        for name, x in tensors.items()
        if name != "dbias"
        for kind, dim in (("batch", 0), ("head", 2 if x.ndim == 4 else 1))
    }


@capture_safe_cache(maxsize=1024)
def _bounds(q_len: int, k_len: int, lo: int | None, hi: int | None, device: torch.device) -> Tensor:
    """Return the bounds of an item, int32 ``[1, 6]``: of rows, of columns, and of the band."""
    band = [-FAR if lo is None else lo, FAR if hi is None else hi]
    return torch.tensor([[0, q_len, 0, k_len, *band]], dtype=torch.int32, device=device)


@capture_safe_cache(maxsize=256)
def _cells(item: WorkItem, k_major: bool, device: torch.device) -> Tensor:
    """Return for each outer token where its document's inner tokens start and stop, ``[2, outer]``.

    Outer tokens are keys with ``k_major``, otherwise queries.
    """
    # Documents ascend on both sides, so a token sees one interval of the other side.
    cu_q, cu_k = not_none(item.cu_q), not_none(item.cu_k)
    outer, inner = (cu_k, cu_q) if k_major else (cu_q, cu_k)
    sides = [np.repeat(x, np.diff(outer)) for x in (inner[:-1], inner[1:])]
    return torch.as_tensor(np.stack(sides), dtype=torch.int32, device=device)


@capture_safe_cache(maxsize=32)
def _partial_tile_bits(geometry: BlockGeometry, device: torch.device) -> Tensor:
    """Return a predicate's distinct partial tiles as bits, int32 ``[n, 128, 4]``."""
    return torch.tensor(not_none(geometry.tiles)[0].view(np.int32), device=device)


@capture_safe_cache(maxsize=256)
def _tile_numbers(item: WorkItem, geometry: BlockGeometry, device: torch.device) -> Tensor:
    """Return the numbers of an item's tiles among :func:`_partial_tile_bits`, on the device."""
    return torch.as_tensor(tile_numbers(item, geometry), device=device)


def _dropout(dropout: Dropout, heads: int, device: torch.device) -> Tensor:
    """Return int32 ``[3 + H]``: the seed's two words, the first batch row 0, and global heads.

    It is filled on the device, so the host copies nothing and does not wait.
    """
    numbers = torch.zeros(3 + heads, dtype=torch.int64, device=device)
    numbers[0].fill_(dropout.seed & 0xFFFFFFFF)
    numbers[1].fill_(dropout.seed >> 32 & 0xFFFFFFFF)
    own = dropout.heads
    numbers[3:] = torch.arange(heads, device=device) if own is None else own
    return numbers.to(torch.int32)
