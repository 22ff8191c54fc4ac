"""Functions of the drop-in modules, each passed to ``torch.compile`` by itself."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ring_torch import compat


def _same(result: object, expected: object) -> bool:
    if isinstance(result, Tensor) and isinstance(expected, Tensor):
        return torch.equal(result, expected)
    return result == expected


def test_documents_are_prepared_anew_in_each_batch() -> None:
    """Offsets are prepared anew in each batch, though dynamo strips ``torch.compiler.disable``."""
    torch.compiler.reset()
    prepare = torch.compile(compat.llama3_flash_attn_prepare_cu_seqlens, backend="aot_eager")
    for offsets in ([0, 5, 16], [0, 3, 9, 16], [0, 7, 32]):
        documents = torch.tensor(offsets)
        arguments = (documents, True, 1, 2)
        expected = compat.llama3_flash_attn_prepare_cu_seqlens(*arguments)
        prepared = prepare(*arguments)
        assert all(map(_same, prepared, expected))
        assert prepared[-1].start.prepared.documents == tuple(offsets)


def test_prepared_documents_are_attended() -> None:
    torch.compiler.reset()
    prepare = torch.compile(compat.llama3_flash_attn_prepare_cu_seqlens, backend="aot_eager")
    for offsets in ([0, 5, 16], [0, 3, 9, 16]):
        torch.manual_seed(0)
        q = torch.randn(16, 2, 8)
        prepared = prepare(torch.tensor(offsets), True, 0, 1)
        out = compat.llama3_flash_attn_varlen_func(
            q, q, q, *prepared[:4], 1, prepared[4], causal=True
        )
        for start, stop in pairwise(offsets):
            x = q[start:stop].transpose(0, 1)
            dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch.testing.assert_close(out[start:stop], dense.transpose(0, 1))
