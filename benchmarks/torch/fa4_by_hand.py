"""Call FlashAttention-4's two functions for the rows of ``options.py``, as fast as they go.

They are called without autograd. Masks are given as block lists: of keys for each block of queries
in the forward, of queries for each block of keys in the backward. Partial blocks, where a
``mask_mod`` decides, and full ones are listed apart. From segment ids the lists are made in each
call, of a predicate once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.torch.cases import CAP, FIRST, STRIPE, Case, Rule, striped

MODS = "benchmarks.torch.fa4_mods"  # imported where CuTe, its language, is installed
BLOCK = 128  # queries and keys of a block: the forward's tile at head dim 128, the backward's keys
Passes = tuple[Callable[..., Tensor], Callable[..., list[Tensor]]]
Given = dict[str, Any]


class Lists(NamedTuple):
    """Block lists of FlashAttention-4: ``[1, 1, N]`` counts, ``[1, 1, N, M]`` indices, int32."""

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


class Blocks(NamedTuple):
    """Boolean tables ``[query blocks, key blocks]`` of partial and of full blocks."""

    partial: Tensor
    full: Tensor

    @property
    def transposed(self) -> Blocks:
        """Tables ``[key blocks, query blocks]``."""
        return Blocks(self.partial.mT, self.full.mT)


def lists_of(*blocks: Blocks) -> list[Lists]:
    """Return the block lists of tables of one shape: for each row its True columns."""
    shown = torch.stack([table for both in blocks for table in both])
    counts = shown.sum(-1, dtype=torch.int32)[:, None, None]
    order = shown.byte().argsort(dim=-1, descending=True, stable=True).int()[:, None, None]
    pairs = [x for pair in zip(counts, order, strict=True) for x in pair]
    return [Lists(*pairs[n : n + 4]) for n in range(0, len(pairs), 4)]


def segment_blocks(ids: Tensor, size: int = BLOCK) -> Blocks:
    """Return the blocks of causal attention among equal ids ``[1, T]``.

    They come from each block's least and largest id. Partial blocks may show nothing where ids are
    out of order; full blocks are always full.
    """
    least, most = ids.view(-1, size).aminmax(dim=1)
    shown = ((least[:, None] <= most) & (least <= most[:, None])).tril()
    full = ((least[:, None] == most) & (least == most[:, None])).tril(-1)
    return Blocks(shown ^ full, full)


def predicate_blocks(rule: Rule, length: int, queries: int, keys: int, device: str) -> Blocks:
    """Return the blocks of a predicate over positions."""
    j = torch.arange(length, device=device)
    blocks = []
    for i in j.split(queries):
        tile = rule(i[:, None], j).view(queries, -1, keys)
        blocks.append((tile.any(2).any(0), tile.all(2).all(0)))
    some, full = (torch.stack(x) for x in zip(*blocks, strict=True))
    return Blocks(some & ~full, full)


class Call(NamedTuple):
    """Arguments of a call: those of both functions, and those of the backward alone.

    ``lists`` makes the block lists, with the backward's if its argument is True.
    """

    common: Given
    backward: Given | None = None
    lists: Callable[[bool], list[Lists]] | None = None


def _biased(case: Case, _: int) -> Call:
    mods = import_module(MODS)
    common = {"causal": True, "score_mod": mods.biased, "aux_tensors": [case.bias()]}
    return Call(common, {"score_mod_bwd": mods.unchanged})


def _alibi(case: Case, _: int) -> Call:
    mods, row = import_module(MODS), case.row
    backward = mods.alibi(case.alibi_step, row.heads // row.kv_heads)
    return Call(
        {"causal": True, "score_mod": mods.alibi(case.alibi_step)},
        {"score_mod": backward, "score_mod_bwd": mods.unchanged},
    )


def _segments(case: Case, _: int) -> Call:
    ids = case.segments()
    common = {"mask_mod": import_module(MODS).same_segment, "aux_tensors": [ids]}

    def lists(backward: bool) -> list[Lists]:
        blocks = segment_blocks(ids)
        return lists_of(blocks, blocks.transposed) if backward else lists_of(blocks)

    return Call(common, lists=lists)


def _predicate(case: Case, keys: int) -> Call:
    forward, backward = (
        predicate_blocks(striped, case.length, BLOCK, size, case.device) for size in (keys, BLOCK)
    )
    made = lists_of(forward) + lists_of(backward.transposed)
    mask_mod = import_module(MODS).striped(STRIPE, FIRST)
    return Call({"mask_mod": mask_mod}, lists=lambda _: made)


def _documents(case: Case, _: int) -> Call:
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=case.device)
    longest = min(case.document, case.length)
    common = {
        "causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
        "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip
    return Call(common)


CALLS: dict[str, Callable[[Case, int], Call]] = {
    "causal": lambda *_: Call({"causal": True}),
    "softcap": lambda *_: Call({"causal": True, "softcap": CAP}), "alibi": _alibi, "bias": _biased,
    "segment_ids": _segments, "cu_seqlens": _documents, "predicate": _predicate,
    "sinks": lambda case, _: Call({"causal": True, "learnable_sink": case.sinks().detach()}),
    "window": lambda case, _: Call({"causal": True, "window_size_left": case.window}),
}  # fmt: skip


def passes(case: Case, *, pack_gqa: bool | None = None, keys: int = BLOCK) -> Passes:
    """Return a case's forward, and its forward + backward.

    Args:
        case: Its length is a multiple of ``BLOCK`` if its mask is given as block lists.
        pack_gqa: True if a tile of the forward has all query heads of its keys.
        keys: Keys in a block of the forward's lists; the library then takes tiles of so many.
    """
    library, call = import_module("flash_attn.cute.interface"), CALLS[case.row.option](case, keys)
    packed = "cu_seqlens_q" in call.common

    def given(*tensors: Tensor) -> list[Tensor]:
        return [x.detach().squeeze(0) if packed else x.detach() for x in tensors]

    def attend(tensors: list[Tensor], lists: list[Lists], *, return_lse: bool) -> list[Tensor]:
        state = library._flash_attn_fwd(  # noqa: SLF001 - by hand
            *tensors, return_lse=return_lse, pack_gqa=pack_gqa, **_sparse(lists[:1], keys),
            **call.common,
        )  # fmt: skip
        return list(state[:2])

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lists = [] if call.lists is None else call.lists(False)
        out = attend(given(q, k, v), lists, return_lse=False)[0]
        return out[None] if packed else out

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        lists = [] if call.lists is None else call.lists(True)
        tensors = given(q, k, v)
        out, lse = attend(tensors, lists, return_lse=True)
        gradients = library._flash_attn_bwd(  # noqa: SLF001 - by hand
            *tensors, out, *given(dout), lse, **_sparse(lists[1:], BLOCK),
            **{**call.common, **(call.backward or {})},
        )  # fmt: skip
        return [x[None] if packed else x for x in (out, *gradients)]

    return forward, both


def _sparse(lists: list[Lists], keys: int) -> Given:
    """Return FlashAttention-4's argument for the first of some lists; none if there are none."""
    if not lists:
        return {}
    sparsity = import_module("flash_attn.cute.block_sparsity")
    made = sparsity.BlockSparseTensorsTorch(*lists[0], block_size=(BLOCK, keys))
    return {"block_sparse_tensors": made}
