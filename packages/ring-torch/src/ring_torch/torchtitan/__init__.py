"""Ring attention in torchtitan 0.3, by an override of its config: no file of it is changed.

``--override.imports ring_torch.torchtitan.ring_attention`` replaces the attention of models that
use :class:`torchtitan.models.common.attention.GQAttention` (Llama 3, Qwen 3), and leaves all else
to torchtitan: its meshes, its sharding of batches, FSDP, tensor parallelism and checkpoints. May
import ``context`` and what is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention, GQAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig

from ring_core import UnsupportedError
from ring_core.base.arguments import check_choice
from ring_torch.context import ContextParallel

#: Layouts, and the load balancers of torchtitan that shard so.
_BALANCERS = {"zigzag": "headtail", "contiguous": "None"}
_TENSORS = ("q_BLNH", "k_BLNH", "v_BLNH")


class RingAttention(Module):  # type: ignore[misc]
    """Causal attention of this rank's queries to the keys of all ranks, within documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Options of the attention.

        Attributes:
            layout: ``"zigzag"`` for torchtitan's load balancer ``"headtail"``, its default, and
                ``"contiguous"`` for none.
            strategy: As of :func:`ring_torch.ring_attention`.
        """

        layout: str = "zigzag"
        strategy: str = "auto"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layout, self.strategy = config.layout, config.strategy
        self._cp: ContextParallel | None = None
        self._is_checked = False

    def parallelize(self, parallel_dims: Any) -> None:
        """Keep the ranks of a sequence; torchtitan calls it with its meshes."""
        mesh = parallel_dims.get_optional_mesh("cp", include_singleton_axes=True)
        self._cp = ContextParallel(mesh, self.layout)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan's name
        k_BLNH: Tensor,  # noqa: N803 - torchtitan's name
        v_BLNH: Tensor,  # noqa: N803 - torchtitan's name
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Return this rank's part of the attention.

        Args:
            q_BLNH: ``[B, T_local, H, D]``.
            k_BLNH: ``[B, T_local, K, D]``.
            v_BLNH: ``[B, T_local, K, Dv]``.
            attention_masks: Places of tokens in their documents, int ``[B, T_local]``; ``None`` for
                one document a row.
            scale: Factor of the scores; ``None`` for ``1 / sqrt(D)``.

        Raises:
            ValueError: The batch is not sharded in this layout, which the first call notices.
            UnsupportedError: torchtitan has not told its meshes.
        """
        cp = self._cp
        if cp is None and dist.is_initialized():
            raise UnsupportedError(
                "ring_torch.torchtitan was not told the ranks of a sequence: set "
                "parallelism.spmd_backend to 'spmd_types' or 'full_dtensor'"
            )
        cp = cp or ContextParallel(None, self.layout)
        starts = None
        if attention_masks is not None:
            own = attention_masks
            own = own.to_local() if isinstance(own, DTensor) else own
            places = cp.positions(own.shape[1] * cp.cp_size, device=own.device)
            # The tokens of a document, and no others, have its first token's place.
            starts = (places - own).to(torch.int32)
            self._check(cp, own)
        return cp.attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            causal=True,
            segment_ids=starts,
            softmax_scale=scale,
            strategy=self.strategy,
        )

    def _check(self, cp: ContextParallel, own: Tensor) -> None:
        """Check once that positions of neighbours follow each other, or begin a document."""
        if self._is_checked or torch.compiler.is_compiling():
            return
        whole = cp.unshard(own)
        if not ((whole[:, 1:] == whole[:, :-1] + 1) | (whole[:, 1:] == 0)).all():
            raise ValueError(
                f"positions do not follow each other in layout={self.layout!r}, which is that of "
                f"parallelism.context_parallel_load_balancer={_BALANCERS[self.layout]!r}: set "
                f"that, or the layout of the override (one of {', '.join(_BALANCERS)})"
            )
        self._is_checked = True


class RingGQAttention(GQAttention):  # type: ignore[misc]
    """Grouped query attention of torchtitan whose inner attention learns of documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        """Options of :class:`torchtitan.models.common.attention.GQAttention`."""

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803 - likewise
        attention_masks: object = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of ``[B, T_local, dim]``, as ``GQAttention`` does.

        Raises:
            UnsupportedError: There is a mask, which torchtitan makes for attention of its own.
        """
        if attention_masks is not None:
            raise UnsupportedError(
                "torchtitan made a mask for attention of its own, so some layer still has that: "
                "ring_attention takes models whose layers are all GQAttention"
            )
        output: Tensor = super().forward(x_BLD, positions, positions)
        return output


@override(target=GQAttention.Config, exact=True, description="ring attention")  # type: ignore[untyped-decorator]
def ring_attention(config: Any, layout: str = "zigzag", strategy: str = "auto") -> Any:
    """Return the config of attention that is computed by Ring.

    Name it in ``override.imports``, with options as JSON if any::

        --override.imports 'ring_torch.torchtitan.ring_attention={"strategy": "gather"}'
        --parallelism.context_parallel_degree 4

    Args:
        config: Config of the attention that is replaced.
        layout: As of :class:`RingAttention`.
        strategy: As of :class:`RingAttention`.

    Raises:
        ValueError: The layout is none of torchtitan's.
        UnsupportedError: The inner attention is none whose mask is causal within documents.
    """
    check_choice("layout", layout, tuple(_BALANCERS))
    inner = config.inner_attention
    if not isinstance(inner, FlexAttention.Config):
        raise UnsupportedError(
            f"ring_attention replaces FlexAttention, causal within documents, not "
            f"{type(inner).__qualname__}: choose attn_backend='flex'"
        )
    sharding = inner.sharding_config
    if sharding is not None:  # keys stay where they are, as queries do
        own = dict.fromkeys(_TENSORS, sharding.in_src_shardings[_TENSORS[0]])
        sharding = replace(
            sharding,
            in_src_shardings=own,
            in_dst_shardings=own,
            local_map=LocalMapConfig(in_grad_placements=tuple(own.values())),
        )
    ring = RingAttention.Config(sharding_config=sharding, layout=layout, strategy=strategy)
    return derive(config, RingGQAttention.Config, inner_attention=ring)
