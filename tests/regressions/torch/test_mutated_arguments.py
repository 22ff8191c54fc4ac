"""Arguments that are changed in place between two calls: the second call sees what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_core import Dealt, Mask
from ring_torch import ContextParallel, compat, ring_attention

T = 24
FIRST, SECOND = (0, 5, T), (0, 16, T)
attend: Any = ring_attention
KINDS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "tensor": lambda offsets: torch.tensor(offsets, dtype=torch.int32),
    "ndarray": np.array,
    "list": list,
    "tuple of arrays": lambda offsets: tuple(np.array(offset) for offset in offsets),
}


def _qkv(*lead: int) -> Any:
    torch.manual_seed(0)
    return tuple(torch.randn(*lead, T, 2, 8) for _ in range(3))


def _ours(offsets: Any) -> Any:
    return attend(*_qkv(1), cu_seqlens=offsets)


def _of_an_object(offsets: Any) -> Tensor:
    return ContextParallel().attention(*_qkv(1), cu_seqlens=offsets, causal=True)


def _of_a_mask(offsets: Any) -> Any:
    return attend(*_qkv(1), mask=Mask(cu_seqlens=offsets))


def _varlen(offsets: Any) -> Tensor:
    attend: Any = compat.ring_flash_attn_varlen_func
    out: Tensor = attend(*_qkv(), offsets, T)
    return out


def _explained(offsets: Any) -> str:
    return ContextParallel().explain(*_qkv(1), cu_seqlens=offsets)


def _llama3(offsets: Any) -> Tensor:
    attend: Any = compat.llama3_flash_attn_varlen_func
    prepared: Any = compat.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
    cu_q, cu_k, most_q, most_k, part = prepared
    out: Tensor = attend(
        *_qkv(), cu_q, cu_k, most_q, most_k, heads_k_stride=1, local_k_slice=part, causal=True
    )
    return out


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "ring_attention": (_ours, set(KINDS)),
    "ContextParallel.attention": (_of_an_object, set(KINDS)),
    "ContextParallel.explain": (_explained, set(KINDS)),
    "Mask": (_of_a_mask, set(KINDS)),
    "ring_flash_attn_varlen_func": (_varlen, {"tensor", "list"}),
    "llama3_flash_attn_varlen_func": (_llama3, {"tensor"}),
}


def _change(given: Any, offsets: tuple[int, ...]) -> None:
    for n, offset in enumerate(offsets):
        if isinstance(given, tuple):
            given[n][...] = offset
        else:
            given[n] = offset


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, str) else torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (_, kinds) in FUNCTIONS.items() for kind in KINDS if kind in kinds]
)  # fmt: skip
def test_documents_refilled_in_place(name: str, kind: str) -> None:
    function, _ = FUNCTIONS[name]
    given = KINDS[kind](FIRST)
    first = function(given)
    _change(given, SECOND)
    second = function(given)
    assert _same(first, function(KINDS[kind](FIRST)))
    assert _same(second, function(KINDS[kind](SECOND)))
    assert isinstance(first, str) or not _same(first, second)  # figures are alike


def test_a_mask_keeps_what_its_array_held() -> None:
    offsets = np.array(FIRST)
    mask = Mask(cu_seqlens=offsets)  # type: ignore[arg-type]
    offsets[1] = 16
    assert mask == Mask(cu_seqlens=FIRST)
    assert torch.equal(attend(*_qkv(1), mask=mask), _ours(FIRST))


def test_a_window_changed_in_place() -> None:
    window: Any = [3, 0]
    first = attend(*_qkv(1), window=window)
    window[0] = 5
    assert torch.equal(attend(*_qkv(1), window=window), attend(*_qkv(1), window=(5, 0)))
    assert not torch.equal(first, attend(*_qkv(1), window=window))


def test_dealt_chunks_changed_in_place() -> None:
    rows: Any = [[0, 1], [2, 3]]
    schedule = Dealt(rows)
    rows[0][1] = 2
    assert schedule == Dealt(((0, 1), (2, 3)))


@pytest.mark.parametrize("name", ["segment_ids", "bias", "sinks", "alibi_slopes"])
def test_tensors_are_read_at_every_call(name: str) -> None:
    given = {
        "segment_ids": torch.zeros(1, T, dtype=torch.int32), "bias": torch.zeros(1, 1, T, T),
        "sinks": torch.zeros(2), "alibi_slopes": torch.zeros(2),
    }[name]  # fmt: skip
    options: dict[str, Any] = {name: given}
    first = attend(*_qkv(1), **options)
    flat = given.view(-1)
    flat[: len(flat) // 2] = 1
    second = attend(*_qkv(1), **options)
    assert torch.equal(second, attend(*_qkv(1), **{name: given.clone()}))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("inference", [False, True])
def test_prepared_offsets_changed_in_place_are_refused(inference: bool) -> None:
    """Inference tensors do not count how often they are written to."""
    attend: Any = compat.llama3_flash_attn_varlen_func
    with torch.inference_mode(inference):
        offsets = torch.tensor(FIRST, dtype=torch.int32)
        prepared: Any = compat.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
        cu_q, cu_k, most_q, most_k, part = prepared
        cu_q[1] = 16
        with pytest.raises(ValueError, match="cu_seqlens_q is"):
            attend(
                *_qkv(), cu_q, cu_k, most_q, most_k, heads_k_stride=1, local_k_slice=part,
                causal=True,
            )  # fmt: skip


@pytest.mark.parametrize("flag", [1, 0])
def test_a_number_is_no_flag_after_an_equal_call(flag: int) -> None:
    attend(*_qkv(1), causal=bool(flag))
    with pytest.raises(ValueError, match="causal must be a bool"):
        attend(*_qkv(1), causal=flag)
    attend(*_qkv(1), window=(1, 0))
    with pytest.raises(ValueError, match="window"):
        attend(*_qkv(1), window=(True, 0))
