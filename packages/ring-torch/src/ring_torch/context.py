"""Context parallelism as one object, so that all its methods use the same group and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ring_core import Layout, LayoutSpec, checks
from ring_core.base.arguments import numbers_as_python, refuse_foreign_options, with_options_of
from ring_torch import recurrent, serving
from ring_torch.attention import explained_call, ring_attention
from ring_torch.capture import is_traced
from ring_torch.comm.ranks import Group
from ring_torch.compiled.movement import halo_in_graph, relayout_in_graph, shift_in_graph
from ring_torch.compiled.static import size_of
from ring_torch.compiled.unshard import unshard_in_graph
from ring_torch.gradients.each import ReductionHandle, reduce_each_gradient
from ring_torch.gradients.reduce import reduce_gradients
from ring_torch.movement import methods
from ring_torch.movement.methods import Halo
from ring_torch.options import AttentionOptions, CallOptions
from ring_torch.prepare import prepared_figure
from ring_torch.recurrent.arguments import explained
from ring_torch.sharding import Sharding, UnshardGrad
from ring_torch.verification import equality
from ring_torch.verification.judgement import VerifyReport
from ring_torch.verification.plain import verify_model

#: Recurrent layers, by the names of their methods.
RECURRENT = (
    "causal_conv1d", "gated_delta_rule", "kda", "linear_recurrence", "selective_scan", "simple_gla",
    "ssd",
)  # fmt: skip


class ContextParallel:
    """Context parallelism over the ranks of a group: splitting, attention and gradients.

    Args:
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised when the object is first used.
        layout: The layout says which rank holds which tokens: ``zigzag`` (default), ``striped``,
            ``contiguous`` or a result of :func:`ring_core.balanced_layout`.

    Make it outside of functions that ``torch.compile`` compiles: a graph is for one object. It can
    be pickled if it uses the default group; unpickled, it uses the default group of the process
    that reads it. A copy shares the group.

    Raises:
        ValueError: The layout is unknown, or has chunks for another number of ranks; or it is made
            inside of a function that ``torch.compile`` compiles. Later, from every method: the
            group was destroyed, or the default group is another than at the first use.
        UnsupportedError: An object that was given a group is pickled.

    Example::

        cp = ContextParallel(group)
        q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
        out = cp.attention(q, k, v, causal=True)
        full = cp.unshard(out.detach(), dim=1)
    """

    def __init__(self, group: Group = None, layout: LayoutSpec = "zigzag") -> None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "a ContextParallel cannot be made inside of a function that torch.compile compiles: "
                "make it once, outside of the function, and use it there"
            )
        self._split = Sharding(group, layout)

    @property
    def _sharding(self) -> Sharding:
        """Sharding of the code that runs: inside of :meth:`whole` that of one rank alone."""
        return self._split.acting

    @property
    def group(self) -> Group:
        """Process group, as given; inside of :meth:`whole` what stands for one rank alone."""
        return self._sharding.group

    @property
    def layout(self) -> LayoutSpec:
        """Layout, as given; inside of :meth:`whole` a single chunk."""
        return self._sharding.layout

    @property
    def cp_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self._sharding.ranks.size

    @property
    def cp_rank(self) -> int:
        """Rank of this process in the group."""
        return self._sharding.ranks.rank

    @numbers_as_python
    def layout_of(self, seq_len: int, *, pad: bool = False) -> Layout:
        """Return the layout of a sequence: which rank holds which of its ``seq_len`` tokens.

        Args:
            seq_len: Number of tokens of the whole sequence, ``T``.
            pad: Lay out the padding, too, that :meth:`shard` adds with ``pad=True``.

        Raises:
            ValueError: The layout cannot divide this length, and ``pad`` is false; the message
                names the length to pad to.

        Example::

            tokens_of_rank_0 = cp.layout_of(1024).positions(0)  # int64 [T_local]
        """
        return self._sharding.layout_of(seq_len, pad=pad)

    @numbers_as_python
    def shard(self, x: Tensor, *, dim: int = 1, pad: bool = False, fill: float = 0) -> Tensor:
        """Return this rank's slice of a whole tensor that every rank holds, as a contiguous tensor.

        Args:
            x: The whole tensor, ``[..., T, ...]``.
            dim: Dimension of the sequence.
            pad: If the layout cannot divide ``T``, pad the end of the sequence to the least length
                that it can divide. Pass ``seq_len=T`` to what takes the slices, as
                :meth:`attention` and :meth:`unshard`. :meth:`shift`, :meth:`halo`, labels of the
                losses and inputs of :func:`replace_sdpa` know the length of the very tensor that is
                returned, not of what is computed from it, nor of a sequence of another length that
                is copied into it. Padding gets no gradient.
            fill: Number in the padding, for example -100 for labels.

        Returns:
            The slice, ``[..., T_local, ...]``, in the order of the layout; padding comes last.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide, and
                ``pad`` is false.

        Example::

            tokens = cp.shard(tokens, dim=1)  # [B, T] to [B, T_local]
            labels = cp.shard(labels, pad=True, fill=-100)  # of any length
        """
        return self._sharding.shard(x, dim=dim, pad=pad, fill=fill)

    @numbers_as_python
    def unshard(
        self,
        x: Tensor,
        *,
        dim: int = 1,
        grad: UnshardGrad | None = None,
        seq_len: int | None = None,
    ) -> Tensor:
        """Return the whole tensor, on every rank, joined from the slices of all ranks.

        All ranks must call it. If ``grad`` is ``"sum"``, all of them must run its backward too.

        Args:
            x: This rank's slice, ``[..., T_local, ...]``, of the same shape on all ranks.
            dim: Dimension of the sequence.
            grad: How the gradient of the whole tensor becomes that of ``x``; required if ``x``
                requires a gradient and gradients are enabled. ``"sum"`` adds up the gradients of
                all ranks, and gives each its slice of the sum. It is right wherever the loss of a
                step is the sum of the ranks' losses. ``"slice"`` gives each rank its slice of its
                own gradient, and sends nothing. It is right only for a loss that every rank
                computes whole, with no parameter between ``unshard`` and the loss. If there is a
                parameter, use ``"sum"`` and divide the loss by ``cp_size``.
            seq_len: ``T``, if the slices have padding behind it (:meth:`shard` with ``pad=True``),
                which is left out of the result and gets no gradient.

        Returns:
            The whole tensor, ``[..., T, ...]``.

        Raises:
            ValueError: ``x`` has no such dimension, or no rank's number of tokens in it; or
                ``grad`` is unknown, or missing where it is required.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.

        Example::

            hidden = cp.unshard(x, grad="sum")  # [B, T, dim]
            x = cp.shard(hidden.roll(-1, dims=1))  # a layer that looks at neighbours
        """
        if is_traced(x):
            self._sharding.check_group()
            return unshard_in_graph(self.group, self.layout, x, dim, grad, seq_len)
        return self._sharding.unshard(x, dim=dim, grad=grad, seq_len=seq_len)

    @numbers_as_python
    def shift(
        self,
        x: Tensor,
        n: int,
        *,
        dim: int = 1,
        fill: float = 0,
        cu_seqlens: Sequence[int] | None = None,
        seq_len: int | None = None,
    ) -> Tensor:
        """Move tokens ``n`` positions on: ``out[t] = x[t - n]`` over positions of the sequence.

        All ranks must call it, and if ``x`` requires a gradient run its backward, which moves
        gradients back. Only rows that change rank are sent.

        Args:
            x: This rank's slice, ``[..., T_local, ...]``, of any dtype.
            n: How far; negative for tokens that look ahead, as ``n=-1`` gives each the next one's.
            dim: Dimension of the sequence.
            fill: Number in rows that no token moves to.
            cu_seqlens: ``(0, ..., T)``, global offsets of packed documents, which no token leaves.
            seq_len: ``T``, if there is padding behind it (:meth:`shard` with ``pad=True``), which
                no token moves to or from: its rows are ``fill``. ``None`` if there is none, or
                ``x`` is what ``shard`` returned.

        Returns:
            A tensor like ``x``.

        Raises:
            ValueError: An argument is malformed, or ``x`` has no rank's number of tokens.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.

        Example::

            labels = cp.shift(tokens, -1, fill=-100)  # for each token the token after it
        """
        run = shift_in_graph if is_traced(x) else methods.shift
        return run(self._sharding, x, n, dim=dim, fill=fill, cu_seqlens=cu_seqlens, seq_len=seq_len)

    @numbers_as_python
    def halo(
        self,
        x: Tensor,
        left: int,
        right: int,
        *,
        dim: int = 1,
        cu_seqlens: Sequence[int] | None = None,
        seq_len: int | None = None,
    ) -> Halo:
        """Return each run of consecutive tokens with its neighbours, as a row of a batch.

        A rank holds ``R`` runs of ``L = T_local / R`` consecutive tokens: ``R`` is 2 for
        ``zigzag``, 1 for ``contiguous``. A layer with a bounded reach, as a convolution, computes
        all rows alike; :meth:`join` brings its outputs back. All ranks must call it, and if ``x``
        requires a gradient run its backward, which sums what returns from neighbours. Only rows
        that change rank are sent.

        Args:
            x: This rank's slice, ``[B, ..., T_local, ...]``, of any dtype; ``[T_local, ...]`` with
                ``dim=0``.
            left: Number of tokens before each run.
            right: Number of tokens behind it.
            dim: Dimension of the sequence.
            cu_seqlens: ``(0, ..., T)``, global offsets of packed documents. They change
                ``documents`` alone: rows of other documents are in ``rows``, for the layer to mask.
            seq_len: ``T``, if there is padding behind it (:meth:`shard` with ``pad=True``), which
                is outside of the sequence. ``None`` if there is none, or ``x`` is what ``shard``
                returned.

        Returns:
            ``(rows, positions, documents)``: rows ``[B * R, ..., left + L + right, ...]``, zeros
            outside of the sequence, or ``[R, left + L + right, ...]`` with ``dim=0``; and int64
            ``[B * R, left + L + right]``, the global position and the document of each token, -1
            outside.

        Raises:
            ValueError: An argument is malformed, or ``x`` has no rank's number of tokens.
            UnsupportedError: The layout is ``striped``, whose ranks, if several, hold no
                consecutive tokens.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.

        Example::

            rows, positions, _ = cp.halo(x, 3, 0)  # [B * R, 3 + L, C]
            y = torch.nn.functional.conv1d(rows.mT, weight, groups=C).mT  # [B * R, L, C]
            y = cp.join(y)  # [B, T_local, C]
        """
        run = halo_in_graph if is_traced(x) else methods.halo
        return run(self._sharding, x, left, right, dim=dim, cu_seqlens=cu_seqlens, seq_len=seq_len)

    @numbers_as_python
    def join(self, y: Tensor, *, dim: int = 1) -> Tensor:
        """Bring what a layer made of each run of :meth:`halo` back to this rank's slice.

        Args:
            y: A row for each run, ``[B * R, ..., L, ...]``; ``[R, L, ...]`` with ``dim=0``.
            dim: Dimension of the tokens.

        Returns:
            ``[B, ..., R * L, ...]``; a view where that is possible. Nothing is sent.

        Raises:
            ValueError: ``y`` has no such dimension, or not a row for each run.
            UnsupportedError: The layout is ``striped``, over several ranks.

        Example::

            y = cp.join(layer(cp.halo(x, 3, 0).rows))
        """
        self._sharding.check_group()
        return methods.join(y, dim, self.layout, size_of(self.group))

    @numbers_as_python
    def relayout(
        self,
        x: Tensor,
        *,
        to: LayoutSpec | ContextParallel,
        dim: int = 1,
        seq_len: int | None = None,
    ) -> Tensor:
        """Return this rank's tokens in another layout, for layers that want other tokens on a rank.

        All ranks must call it, and if ``x`` requires a gradient run its backward, which moves
        gradients back. Only rows that change rank are sent.

        To other ranks, one of the two groups must have all ranks of the other, and every rank of
        that one calls. A rank outside of the smaller group makes its ``ContextParallel`` over a
        ``DeviceMesh`` of the group's ranks, and gives or gets a tensor of 0 tokens.

        Args:
            x: This rank's slice, ``[..., T_local, ...]``, of any dtype; on a rank that holds none
                of the sequence ``[..., 0, ...]``.
            to: The layout, or a ``ContextParallel`` that has it.
            dim: Dimension of the sequence.
            seq_len: Length of the whole sequence, ``T``. If ranks call that hold none of it, all
                ranks must give it. With it there may be padding behind ``T`` in both layouts, each
                with the least that it needs; rows of padding are zeros in the result.

        Returns:
            A tensor like ``x``, its tokens those of this rank in the layout ``to``.

        Raises:
            ValueError: An argument is malformed, or ``x`` has no rank's number of tokens.
            UnsupportedError: Neither of the two groups has all ranks of the other.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.

        Example::

            plain = ContextParallel(group, layout="contiguous")
            x = cp.relayout(x, to=plain)  # a rank's tokens are consecutive now
            x = plain.relayout(scan(x), to=cp)

            half = ContextParallel(DeviceMesh("cuda", [0, 1]))  # on all four ranks of cp
            x = cp.relayout(x, to=half)  # no tokens on ranks 2 and 3
            x = half.relayout(x, to=cp, seq_len=4096)
        """
        sharding = self._sharding
        target = check_context(to) if isinstance(to, ContextParallel) else to
        if sharding.acts_alone_with(target):
            return x
        run = relayout_in_graph if is_traced(x) else methods.relayout
        return run(sharding, x, target, dim=dim, seq_len=seq_len)

    @numbers_as_python
    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of this rank's tokens, int64 ``[T_local]``, as for RoPE.

        Args:
            seq_len: Length of the whole sequence, ``T``. If the layout cannot divide it, positions
                from ``T`` on are those of the padding that ``shard(pad=True)`` adds.
            device: Device of the result; ``None`` for torch's default device.

        Raises:
            ValueError: It is no positive integer, or the device cannot be used.

        Example::

            position_ids = cp.positions(seq_len, device=q.device)[None]  # [1, T_local]
        """
        return self._sharding.positions(seq_len, device=device)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of a model that every rank holds whole over the ranks, in place.

        After each rank's backward of its part of the loss, the sums are the gradients of the whole
        loss. A gradient that no rank has stays ``None``, beside others that some rank has. Call it
        once a step, after the last backward. A later backward that adds to a summed gradient raises
        a ``ValueError``, until ``zero_grad``; a tensor in its place, as by ``p.grad = p.grad * c``,
        still counts as the sum. Tensor-parallel parameters, whose mesh has no other rank of this
        group, are summed shard by shard. A gradient that was set to an inference tensor, or to a
        view whose elements share memory, is replaced by a tensor of its own.

        Args:
            model: The model, with the same parameters on all ranks.

        Raises:
            ValueError: A gradient is summed over these ranks already; no rank has any gradient, as
                where optimizers step inside of the backward (:meth:`reduce_each_gradient`); or
                ``hf.parallelize`` was told that gradients are reduced by their mean.
            UnsupportedError: FSDP shards a parameter over ranks of the group, or a gradient is
                sparse, or kept in ``main_grad``.
            RankMismatchError: Parameters differ between ranks.

        Example::

            loss.backward()  # each rank's part of the loss
            cp.reduce_gradients(model)
            optimizer.step()
        """
        reduce_gradients(self._sharding.ranks, model)

    def reduce_each_gradient(self, model: nn.Module) -> ReductionHandle:
        """Sum each gradient of a model over the ranks as soon as a backward has made it.

        For optimizers that step inside of the backward, and leave no gradients for
        :meth:`reduce_gradients`. It puts a hook on each parameter, which runs before the hooks that
        the parameter has or gets (``register_post_accumulate_grad_hook``). All ranks call it once,
        with the same model, and then run the same backwards. A parameter that a rank's backward
        does not come to gets the sum, and runs its hooks, at the end of the backward. Each backward
        is a step: a gradient that is still there when a backward comes to it again is refused.
        Parameters that are unfrozen or added later need a new call.

        Args:
            model: The model, with the same parameters on all ranks.

        Returns:
            A handle, whose ``remove()`` takes the hooks off.

        Raises:
            ValueError: ``hf.parallelize`` was told that gradients are reduced by their mean. Later,
                from the backward: it would add to a gradient that is there, or a parameter has no
                hook.
            UnsupportedError: The model is wrapped by DDP or FSDP, keeps gradients in ``main_grad``,
                or has such hooks already. Later, from the backward: a gradient is sparse.
            RankMismatchError: Parameters differ between ranks. Later, from the backward: ranks come
                to parameters in another order.

        Example::

            cp.reduce_each_gradient(model)
            for weight in model.parameters():
                optimizer = torch.optim.AdamW([weight])
                weight.register_post_accumulate_grad_hook(
                    lambda _, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
                )
            loss.backward()  # each rank's part of the loss
        """
        return reduce_each_gradient(self._sharding.ranks, model)

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[AttentionOptions],
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @with_options_of(ring_attention)
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention of this rank's shards, over this group and layout.

        Arguments and results are those of :func:`ring_attention`, with group and layout left out.

        Example::

            out = cp.attention(q, k, v, causal=True)  # [B, T_local, H, Dv]
        """
        sharding = self._sharding
        sharding.check_group()
        return ring_attention(
            q, k, v, group=sharding.group, layout=sharding.layout, return_lse=return_lse, **options
        )

    @refuse_foreign_options
    @with_options_of(ring_attention)
    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> str:
        """Return a text that says what :meth:`attention` would do with these arguments.

        It names the kernel and why not a faster one, how keys travel between ranks, the plan in
        numbers, and how often this process has found a call prepared, as it does where lengths
        return; :func:`ring_core.viz.describe` draws the plan. Nothing is sent or computed.

        Example::

            print(cp.explain(q, k, v, causal=True, window=(4095, 0)))
        """
        ranks, given = self._sharding.ranks, CallOptions(return_lse=return_lse, **options)
        text = explained_call(ranks, self.layout, q, k, v, given)
        return f"{text}\n{prepared_figure()}"

    def explain_recurrent(self, layer: str, *args: Any, **options: Any) -> str:
        """Return a text that says what a recurrent layer would do with these arguments.

        It names the kernel, the state, and the bytes that a rank sends. Nothing is sent or
        computed, so that one rank may ask.

        Args:
            layer: Name of a method below, as ``"gated_delta_rule"``.
            *args: Its arguments.
            **options: Its options.

        Raises:
            ValueError: There is no such layer, or the layer itself would raise it.

        Example::

            print(cp.explain_recurrent("gated_delta_rule", q, k, v, g, beta))
        """
        checks.check_choice("layer", layer, RECURRENT)
        return str(explained(getattr(recurrent, layer), self, *args, **options))

    # Recurrent layers: functions whose first argument is a ContextParallel, as they stand.
    causal_conv1d, linear_recurrence = recurrent.causal_conv1d, recurrent.linear_recurrence
    gated_delta_rule, kda = recurrent.gated_delta_rule, recurrent.kda
    selective_scan, simple_gla = recurrent.selective_scan, recurrent.simple_gla
    ssd = recurrent.ssd

    # Serving: likewise.
    decode, prefill = serving.decode, serving.prefill
    merge_partials, explain_serving = serving.merge_partials, serving.explain_serving
    # What has to be equal, likewise.
    check_equal = equality.check_equal

    @numbers_as_python
    def whole_length(self, x: Tensor | int, *, seq_len: int | None = None, dim: int = 1) -> int:
        """Return the length of the whole sequence, ``T``, of a rank's slice of it.

        Models of one's own need it where something depends on how long a sequence is, as LongRoPE,
        YaRN and dynamic NTK scaling of rotary embeddings do: ``x.shape[1]`` is that of a slice.

        Args:
            x: A slice, or its length ``T_local``, padding included.
            seq_len: Length of the whole sequence, without padding; ``None`` is what
                ``shard(pad=True)`` has noted on ``x``, or else that no padding was added.
            dim: Dimension of the tokens of ``x``.

        Raises:
            ValueError: ``x`` is neither, or no rank's slice of ``seq_len`` tokens.

        Example::

            scaling = rope_scaling(cp.whole_length(hidden))  # hidden is [B, T_local, D]
        """
        return methods.whole_length(self._sharding, x, seq_len=seq_len, dim=dim)

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which this rank acts alone, on whole sequences: nothing is sent.

        Inside, every method of a ``ContextParallel`` over these ranks, or over some of them, and
        every function that takes one do what they do on one device: ``cp_size`` is 1,
        :meth:`shard` and :meth:`unshard` return their argument, also with ``pad=True``, and
        reductions do nothing. So code written for shards runs on whole tensors, to be compared.
        Models of ``hf.parallelize`` and :func:`replace_sdpa` follow. Padding that the tensors have
        themselves is padding still, as ``seq_len`` says.

        The block belongs to its thread, and blocks nest. Backwards and recomputations follow their
        forward; in another thread, and under compiled autograd, those of checkpoints, saved-tensor
        hooks and functions with a ``ctx``. Compiled functions are compiled anew for the block; a
        checkpoint may be refused that would compute one again by the other side's graph. For hooks
        of parameters, as of :meth:`reduce_each_gradient`, ``backward`` has to be called on the
        forward's side.

        Raises:
            UnsupportedError: It begins inside of a function that ``torch.compile`` compiles, or in
                a backward. Later, from the backward of a compiled function in a checkpoint: its
                graph is of the other side of the block than the forward.

        Example::

            out = cp.unshard(model(cp.shard(x)), grad="slice")
            with cp.whole():
                expected = model(x)  # the same code, on every rank the whole sequence
        """
        return self._split.whole()

    def verify(
        self, model: nn.Module, batch: Mapping[str, Any], *, dims: Mapping[str, int] | None = None
    ) -> VerifyReport:
        """Run a batch split over the ranks and whole, forward and backward, and compare them.

        It is for a model whose code is written for shards, with the methods of this object. Every
        rank runs the batch split once, and whole twice, inside of :meth:`whole`, with torch's
        default attention and with its plainest. The difference between the two whole runs is the
        noise; the split run may differ by four times that and the rounding of a few operations, as
        of :meth:`ring_torch.hf.Handle.verify`.

        Outputs of modules are compared token by token, and gradients of all parameters for a loss
        that weighs the model's outputs at random. Numbers beside other outputs, as a loss, are not
        compared. If a model returns numbers alone, their sum is the loss: on each rank its part, as
        of :func:`ring_torch.cross_entropy`, or on all ranks the whole. Everything is put back as it
        was; dropout is off.

        Args:
            model: The model.
            batch: Arguments of the model by name, of whole sequences, the same on all ranks.
            dims: Dimension of the sequence of each argument that you shard; the others are given
                whole. ``None`` shards every tensor of two or more dimensions along dimension 1.

        Returns:
            The differences, all of which are small enough to be rounding.

        Raises:
            WrongResultError: A difference is larger. The message names the first module whose
                output, or the first parameter whose gradient, differs.
            ValueError: The batch or ``dims`` is malformed, there is no output that can be compared,
                or the two whole runs differ so much that nothing can be told.
            UnsupportedError: There is too little memory, or ``fully_shard`` was called before.

        Example::

            print(cp.verify(model, {"x": x, "positions": positions}, dims={"x": 1, "positions": 0}))
        """
        return verify_model(model, self._sharding, batch, dims)


def check_context(cp: object, *, acting: bool = True) -> Sharding:
    """Return the sharding of a :class:`ContextParallel`; anything else is a ``ValueError``.

    Without ``acting`` it is that of all ranks also inside of ``cp.whole()``, to be kept.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp must be a ContextParallel, got {type(cp).__name__}")
    return cp._sharding if acting else cp._split  # noqa: SLF001 - private to users, not to this package
