"""A layout belongs to the data, so one object owns both and they cannot disagree."""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ring_core import Layout, LayoutSpec, UnsupportedError, viz
from ring_core.base.arguments import refuse_foreign_options, with_options_of
from ring_torch.attention import in_modes_of_torch, ring_attention, with_dense_mask
from ring_torch.comm.ranks import Group
from ring_torch.compiled.unshard import unshard_in_graph
from ring_torch.gradients import reduce_gradients
from ring_torch.options import AttentionOptions, CallOptions
from ring_torch.prepare import check_call
from ring_torch.sharding import Sharding, UnshardGrad
from ring_torch.strategies import describe_strategy


class ContextParallel:
    """Sequences split over the ranks of a group.

    Args:
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised when the object is first used.
        layout: ``zigzag`` (default), ``striped``, ``contiguous`` or what
            :func:`ring_core.balance_chunks` returns: which rank holds which tokens.

    Over the default group it can be pickled, and is one over the default group of the process that
    reads it. A copy shares the group.

    Raises:
        ValueError: No such layout, or it has chunks for another number of ranks. Later, of every
            method: the group is gone, or the default group another than at the first use.
        UnsupportedError: It is pickled, and was given a group.

    Example::

        cp = ContextParallel(group)
        q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
        out = cp.attention(q, k, v, causal=True)
        full = cp.unshard(out.detach(), dim=1)
    """

    def __init__(self, group: Group = None, layout: LayoutSpec = "zigzag") -> None:
        self._sharding = Sharding(group, layout)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise UnsupportedError(
                f"a ContextParallel over a {type(self.group).__name__} cannot be pickled, for a "
                f"group belongs to its process. Instead: pickle its layout_name, and make "
                f"ContextParallel(group, layout_name) where that is read; or use the default group"
            )
        return type(self), (None, self.layout_name)

    def __copy__(self) -> ContextParallel:
        return type(self)(self.group, self.layout_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return type(self)(self.group, self.layout_name)

    @property
    def group(self) -> Group:
        """The process group, as given."""
        return self._sharding.group

    @property
    def layout_name(self) -> LayoutSpec:
        """The layout, as given."""
        return self._sharding.layout_name

    @property
    def cp_size(self) -> int:
        """Ranks that hold a sequence."""
        return self._sharding.ring.size

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return self._sharding.ring.rank

    def layout(self, seq_len: int) -> Layout:
        """Which rank holds which of ``seq_len`` tokens.

        Raises:
            ValueError: The layout cannot divide this length; the message names the length to pad
                to.
        """
        return self._sharding.layout(seq_len)

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's slice, contiguous, of a whole tensor that every rank holds.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide.
        """
        return self._sharding.shard(x, dim=dim)

    def unshard(self, x: Tensor, *, dim: int = 1, grad: UnshardGrad | None = None) -> Tensor:
        """Return the whole tensor, on every rank, from every rank's slice.

        All ranks call it, and where ``grad`` is ``"sum"`` all of them run its backward.

        Args:
            x: This rank's slice; slices of all ranks have one shape.
            dim: Dimension of the sequence.
            grad: What becomes of the gradient of the whole tensor; required where ``x`` requires
                one and gradients are enabled. ``"sum"``: the gradients of all ranks are added up,
                and each gets its slice of the sum. It is right wherever the loss of a step is the
                sum of the ranks' losses. ``"slice"``: each rank keeps its slice of its own
                gradient, and nothing is sent. It is right only for a loss that every rank computes
                whole, with no parameter between ``unshard`` and the loss; with one, ``"sum"`` and
                the loss divided by ``cp_size``.

        Raises:
            ValueError: ``x`` has no such dimension, or one that is no rank's slice; ``grad`` is
                neither, or missing.
            RankMismatchError: The ranks' slices, or their arguments, are unlike.

        Example::

            hidden = cp.unshard(x, grad="sum")  # [B, T, dim]
            x = cp.shard(hidden.roll(-1, dims=1))  # a layer that looks at neighbours
        """
        if torch.compiler.is_compiling():
            self._sharding.check_group()
            return unshard_in_graph(self.group, self.layout_name, x, dim, grad)
        return self._sharding.unshard(x, dim=dim, grad=grad)

    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, int64 ``[T_local]``, for RoPE and labels."""
        return self._sharding.positions(seq_len, device=device)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of a model that every rank holds whole, in place, over the ranks.

        After the backward of each rank's part of the loss they are those of the whole loss. A
        gradient that no rank has stays ``None``. Call it once a step, after the last backward: a
        later backward that adds to a summed gradient raises a ``ValueError``, until ``zero_grad``
        or a new gradient in its place. Shards of tensor parallelism, whose mesh holds no other rank
        of this group, are summed shard by shard.

        Raises:
            ValueError: A gradient is summed over these ranks already, or the model was told that
                gradients are reduced by their mean.
            UnsupportedError: FSDP shards a parameter over ranks of the group, or a gradient is
                sparse.
            RankMismatchError: The ranks' parameters are unlike.
        """
        reduce_gradients(self._sharding.ring, model)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
        **options: Unpack[AttentionOptions],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    @with_options_of(ring_attention)
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of this rank's shards: :func:`ring_attention` with this group and layout."""
        self._sharding.check_group()
        return ring_attention(
            q, k, v, group=self._sharding.group, layout=self._sharding.layout_name,
            return_lse=return_lse, **options,
        )  # fmt: skip

    @refuse_foreign_options
    @with_options_of(ring_attention)
    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> str:  # fmt: skip
        """Say what :meth:`attention` would do with these arguments; sends and computes nothing.

        The kernel it would choose, why not the faster ones, how keys travel, and the plan in
        figures; :func:`ring_core.viz.describe` draws it.
        """
        given = signature(self.explain).bind(q, k, v, return_lse=return_lse, **options).kwargs
        modes = in_modes_of_torch(q, k, v, given.get("deterministic", False))
        q, k, v, given["deterministic"] = modes
        record = with_dense_mask(q, k, v, CallOptions(**given), self.cp_size)
        call, inputs = check_call(self._sharding.ring, 0, self.layout_name, q, k, v, record)
        return (
            f"{call.choice.describe()}\n{describe_strategy(call, inputs)}\n"
            f"{viz.describe(call.program, pictures=False)}"
        )


def check_context(cp: object) -> None:
    """Raise a ``ValueError`` unless ``cp`` is a :class:`ContextParallel`."""
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp must be a ContextParallel, got {type(cp).__name__}")
