"""Affine maps of a state, ``S -> A S + B``: what a piece of a sequence does to it.

Maps compose: of ``(A, B)`` and then ``(A', B')`` it is ``(A' A, A' B + B')``. A transition ``A`` is
a matrix ``[K, K]`` that multiplies states ``[K, V]`` from the left, or numbers that multiply them
one by one: nothing here divides by a decay, which may be 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def apply(transition: Tensor, state: Tensor, *, is_matrix: bool) -> Tensor:
    """Return ``A S``."""
    return transition @ state if is_matrix else transition * state


def apply_adjoint(transition: Tensor, grad: Tensor, *, is_matrix: bool) -> Tensor:
    """Return ``A^T G``: the gradient before a map, of the gradient ``G`` behind it."""
    return transition.mT @ grad if is_matrix else transition * grad


def compose(transition: Tensor, earlier: Tensor | None, *, is_matrix: bool) -> Tensor:
    """Return the transition of a map and an earlier one; of the first alone if that is ``None``."""
    if earlier is None:
        return transition
    return transition @ earlier if is_matrix else transition * earlier


def transition_grad(grad: Tensor, state: Tensor, like: Tensor, *, is_matrix: bool) -> Tensor:
    """Return the gradient of ``A`` where ``A S + B`` has the gradient ``G``: ``G S^T``.

    Args:
        grad: ``G``.
        state: ``S``.
        like: ``A``, for its shape.
        is_matrix: True if ``A`` is a matrix.
    """
    return grad @ state.mT if is_matrix else (grad * state).sum_to_size(like.shape)


def states_before(
    maps: tuple[Tensor, Tensor], chunks: Iterable[int], state: Tensor | None, out: Tensor, *,
    is_matrix: bool,
) -> Tensor:  # fmt: skip
    """Write the state before each chunk to ``out``, and return the state behind the last.

    Args:
        maps: Transitions and states of all chunks, ``[n, ...]``.
        chunks: Numbers of the chunks to go through.
        state: State before the first; ``None`` for zeros.
        out: ``[n, ...]``.
        is_matrix: True if transitions are matrices.
    """
    for n in chunks:
        if state is None:
            out[n].zero_()
            state = maps[1][n]
        else:
            out[n].copy_(state)
            state = apply(maps[0][n], state, is_matrix=is_matrix) + maps[1][n]
    assert state is not None, "a run has a token"
    return state


def run_map(
    maps: tuple[Tensor, Tensor], chunks: Iterable[int], *, is_matrix: bool
) -> tuple[Tensor, Tensor]:
    """Return the map of a run, composed of those of its chunks."""
    transition: Tensor | None = None
    state: Tensor | None = None
    for n in chunks:
        a, b = maps[0][n], maps[1][n]
        state = b if state is None else apply(a, state, is_matrix=is_matrix) + b
        transition = compose(a, transition, is_matrix=is_matrix)
    assert transition is not None and state is not None, "a run has a token"
    return transition, state


def grads_behind(
    transition: Tensor, grads: Tensor, chunks: range, grad: Tensor | None, out: Tensor | None, *,
    is_matrix: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of the state before a run; write those behind its chunks to ``out``.

    Args:
        transition: Transitions of all chunks, ``[n, ...]``.
        grads: Gradients of the states before all chunks from these chunks' own outputs, likewise.
        chunks: Numbers of the run's chunks.
        grad: Gradient of the state behind the run; ``None`` for zeros.
        out: ``[n, ...]``; ``None`` if only the result is wanted.
        is_matrix: True if transitions are matrices.
    """
    for n in reversed(chunks):
        if out is not None:
            out[n] = 0 if grad is None else grad
        own = grads[n]
        grad = (
            own if grad is None else apply_adjoint(transition[n], grad, is_matrix=is_matrix) + own
        )
    assert grad is not None, "a run has a token"
    return grad
