"""Log-probabilities of a rank's tokens, and sums over sequences whose tokens lie on several ranks.

Losses of preference and reinforcement learning are made of both, as plain code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from ring_core import checks
from ring_core.base.arguments import (
    check_flag,
    check_rate,
    check_size,
    not_none,
    numbers_as_python,
)
from ring_core.row_checks import offsets_of
from ring_torch.capture import constant_in_graphs, is_traced
from ring_torch.comm.ranks import ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.compiled.static import (
    as_documents,
    from_json,
    group_fields,
    ranks_named,
    size_of,
    to_json,
)
from ring_torch.context import ContextParallel, check_context
from ring_torch.sharding import Sharding, UnshardGrad, agree_on_call, check_grad, length_of
from ring_torch.tensor_specs import check_local
from ring_torch.training.common import (
    head_of,
    of_ranks,
    refuse_transforms,
    sum_of_ranks,
    without_padding,
)
from ring_torch.training.part import IGNORED, linear_log_probs


@overload
def token_log_probs(
    cp: ContextParallel, hidden: Tensor, head_weight: Tensor, labels: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    ignore_index: int = IGNORED, entropy: Literal[False] = ..., seq_len: int | None = None,
    tokens_at_once: int = 1024,
) -> Tensor: ...  # fmt: skip
@overload
def token_log_probs(
    cp: ContextParallel, hidden: Tensor, head_weight: Tensor, labels: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    ignore_index: int = IGNORED, entropy: Literal[True], seq_len: int | None = None,
    tokens_at_once: int = 1024,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def token_log_probs(
    cp: ContextParallel, hidden: Tensor, head_weight: Tensor, labels: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    ignore_index: int = IGNORED, entropy: bool, seq_len: int | None = None,
    tokens_at_once: int = 1024,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@numbers_as_python
def token_log_probs(
    cp: ContextParallel, hidden: Tensor, head_weight: Tensor, labels: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    ignore_index: int = IGNORED, entropy: bool = False, seq_len: int | None = None,
    tokens_at_once: int = 1024,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of the label of each of this rank's tokens; nothing is sent.

    It is ``log_softmax(softcap * tanh(z / softcap) / temperature)`` at the label, where ``z`` is
    ``linear(hidden, head_weight, bias)``. Logits of ``tokens_at_once`` tokens exist at a time. The
    backward computes them once more, and adds up gradients of the head in float32 or wider. Ranks
    may have unlike numbers of tokens.

    Args:
        cp: The ranks that share the sequence, and its layout.
        hidden: ``[..., T_local, dim]``, what the head is applied to, times a scale of the logits if
            there is one.
        head_weight: Weight of the head, ``[V, dim]``, as of :class:`torch.nn.Linear`.
        labels: Integers ``[..., T_local]``, shifted before they were sharded. One that is no class
            is an error of torch's, or gets NaN on a GPU.
        bias: Bias of the head, ``[V]``.
        temperature: Divisor of the logits.
        softcap: Bound of the logits, as of the head of Gemma 2.
        ignore_index: Label of tokens that do not count.
        entropy: True for the entropies of the tokens' distributions, too.
        seq_len: ``T``, if there is padding behind it (:meth:`ring_torch.ContextParallel.shard` with
            ``pad=True``), which is ignored whatever its labels.
        tokens_at_once: Number of tokens whose logits exist at a time.

    Returns:
        ``[..., T_local]``, in float32, or float64 if ``hidden`` is; 0 where the label is ignored.
        With ``entropy`` a pair of such tensors.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: Labels are probabilities, a ``DTensor`` is given, a second derivative is
            asked for, or any by ``torch.func``.

    Example::

        log_probs = token_log_probs(cp, hidden, model.head.weight, labels)
        ratio = (log_probs - old_log_probs).exp()  # [B, T_local], 1 where labels are ignored
    """
    sharding = check_context(cp)
    head = head_of(
        "token_log_probs", sharding, hidden, head_weight, bias, labels, ignore_index, seq_len
    )
    check_rate("temperature", temperature)
    softcap = checks.check_softcap(softcap)
    check_flag("entropy", entropy)
    tokens_at_once = check_size("tokens_at_once", tokens_at_once)
    log_probs, entropies = linear_log_probs(
        *head, float(temperature), softcap, ignore_index, entropy, tokens_at_once
    )
    log_probs = log_probs.view(labels.shape)
    return (log_probs, entropies.view(labels.shape)) if entropy else log_probs


@numbers_as_python
def sum_by_sequence(
    cp: ContextParallel, x: Tensor, *, cu_seqlens: Sequence[int] | None = None,
    segment_ids: Tensor | None = None, seq_len: int | None = None, grad: UnshardGrad | None = None,
) -> Tensor:  # fmt: skip
    """Return sums over sequences of a number of each of their tokens, equal on all ranks.

    A sequence is a row of the batch, or with ``cu_seqlens`` or ``segment_ids`` a packed document.
    The sum of a mask is the number of tokens. All ranks must call it, and if ``grad`` is ``"sum"``
    run its backward; one number for each sequence is sent. Ranks may have unlike numbers of tokens;
    with ``cu_seqlens`` if the layout is ``"contiguous"``, which has each rank's behind those of the
    rank before.

    Args:
        cp: The ranks that share the sequences, and their layout.
        x: ``[B, T_local]``, a number of each of this rank's tokens, or a mask; ``B`` is 1 with
            documents.
        cu_seqlens: ``(0, ..., T)``, global offsets of packed documents; in layout ``"contiguous"``
            the host waits for the ranks' numbers of tokens.
        segment_ids: Integers ``[1, T_local]``, the number of the document of each of this rank's
            tokens, from 0 on; tokens of a negative one are left out. There are as many documents as
            the largest number on all ranks and one; for it the host waits, and a function that is
            compiled with ``fullgraph=True`` needs ``cu_seqlens`` instead.
        seq_len: ``T``, if there is padding behind it (:meth:`ring_torch.ContextParallel.shard` with
            ``pad=True``), which is left out.
        grad: As of :meth:`ring_torch.ContextParallel.unshard`, required if ``x`` requires a
            gradient: ``"slice"`` for a loss that every rank computes whole from the sums,
            ``"sum"`` where the loss is the sum of what the ranks compute.

    Returns:
        ``[B]``, or ``[documents]``: float32, or float64 if ``x`` is; int64 of integers and masks.

    Raises:
        ValueError: An argument is malformed, or ``grad`` is missing.
        UnsupportedError: A transform of ``torch.func`` is under way.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        log_probs = token_log_probs(cp, hidden, model.head.weight, labels)
        of_sequence = sum_by_sequence(cp, log_probs, grad="slice", seq_len=T)  # [B]
        tokens = sum_by_sequence(cp, labels != -100, seq_len=T)  # padding of shards left out
    """
    refuse_transforms("sum_by_sequence cannot run", "call it outside")
    sharding = check_context(cp)
    _check_numbers("x", x)
    check_grad(x, grad, "sum_by_sequence")
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("cu_seqlens and segment_ids both say which documents there are: give one")
    if (cu_seqlens is not None or segment_ids is not None) and x.shape[0] != 1:
        raise ValueError(
            f"packed documents are of one row, and x has {x.shape[0]}: give documents of all rows in "
            f"one, or each row in a call of its own"
        )
    own = without_padding(sharding, "x", x, 0, seq_len)
    if segment_ids is not None:
        _check_numbers("segment_ids", segment_ids)
        if segment_ids.shape != x.shape or segment_ids.is_floating_point():
            raise ValueError(
                f"segment_ids must be integers {list(x.shape)} as x, got {segment_ids.dtype} "
                f"{list(segment_ids.shape)}"
            )
        ids = without_padding(sharding, "segment_ids", segment_ids, -1, seq_len)[0]
        largest = torch.cat([ids, ids.new_full((1,), -1)]).max().reshape(1)
        documents = int(of_ranks(sharding, largest, None).max()) + 1
    elif cu_seqlens is not None:
        offsets: Any = as_documents(cu_seqlens) if is_traced(x) else offsets_of(cu_seqlens)
        documents = len(offsets) - 1
        length = length_of(x, 1, seq_len, size_of(sharding.group))
        ids = _ids_of_documents(sharding, x, offsets, length)
    else:
        return sum_of_ranks(sharding, own.sum(1), grad)
    # Tokens of no document go to a number behind the last, which is cut off.
    # In float64, as the numbers of a long document are added one by one.
    wide = own.double() if own.is_floating_point() else own
    sums = wide.new_zeros(documents + 1)
    sums = sums.index_add(0, ids.where(ids >= 0, documents), wide[0]).to(own.dtype)
    return sum_of_ranks(sharding, sums[:-1], grad)


def _check_numbers(name: str, numbers: object) -> Tensor:
    """Check that an argument is a real number, an integer or a truth value of each token."""
    x = check_local(name, numbers, has_numbers=True)
    is_narrow = x.is_floating_point() and x.dtype.itemsize < 2
    if x.ndim != 2 or x.is_complex() or is_narrow:
        raise ValueError(
            f"{name} must be [B, T_local], of integers, truth values or real numbers of 16 bits or "
            f"more, got {x.dtype} {[*x.shape]}"
        )
    return x


def _ids_of_documents(sharding: Sharding, x: Tensor, offsets: Any, seq_len: int | None) -> Tensor:
    """Return the number of the document of each of this rank's tokens, -1 of padding."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    fields = [to_json(seq_len, tensors, numbers), to_json(offsets, tensors, numbers)]
    ids: Tensor = document_ids(
        x, tensors, numbers, _text(sharding.group, to_json(sharding.layout), fields)
    )
    return ids


@constant_in_graphs
def _text(group: Any, layout: Any, fields: list[Any]) -> str:
    """Return the constant part of :func:`document_ids`; the compiler takes it for a constant."""
    return json.dumps({**group_fields(ranks_of(group)), "layout": layout, "fields": fields})


@torch.library.custom_op("ring_torch::document_ids", mutates_args=())
def document_ids(x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Tensor:
    """Return the number of each token's document, int64 ``[T_local]``; -1 of padding.

    It is an operation so that offsets may change without a new graph. Ranks compare theirs.

    Args:
        x: Numbers of this rank's tokens, ``[1, T_local]``.
        tensors: Tensors that the text names by their indices.
        numbers: Numbers that it names likewise.
        text: Group, layout, length and offsets, as JSON.
    """
    facts: dict[str, Any] = json.loads(text)
    ranks = ranks_named(facts, is_forward=True)
    number, layout = ranks.next_call(), from_json(facts["layout"])
    seq_len, stated = (from_json(field, tensors, numbers) for field in facts["fields"])
    offsets, tokens = not_none(offsets_of(stated)), x.shape[1]
    fields = {"layout": str(layout), "seq_len": seq_len, "cu_seqlens": offsets}
    by_counts = layout == "contiguous" and seq_len is None and ranks.size > 1
    if not by_counts:
        fields["tokens (unlike numbers take segment_ids, or layout 'contiguous')"] = tokens
    agree_on_call(ranks, number, CallSignature.of(fields, "sum_by_sequence"), x.device)
    if by_counts:
        own = torch.tensor([tokens], device=x.device)
        counts = Sharding(ranks.group, "contiguous").unshard(own, dim=0).tolist()
        positions, length = sum(counts[: ranks.rank]) + np.arange(tokens), sum(counts)
    else:
        padded = checks.padded_layout(seq_len, tokens, layout, ranks.size)
        positions, length = padded.positions(ranks.rank), padded.seq_len
    if offsets[-1] != length:
        raise ValueError(
            f"cu_seqlens must end at the sequence length {length}, got {offsets[-1]}; if there is "
            f"padding behind it, give seq_len"
        )
    ids = np.searchsorted(offsets, positions, side="right") - 1
    return torch.as_tensor(np.where(positions < length, ids, -1), device=x.device)


@document_ids.register_fake
def _document_ids_like(
    x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> Tensor:
    """Return a tensor of the result's shape, while a graph is traced."""
    del tensors, numbers, text
    return x.new_empty(x.shape[1], dtype=torch.int64)
