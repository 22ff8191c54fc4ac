"""Prefill by flash-attn-4 over pages: random schedules, with its functions in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from served import SIZES, World
from torch import Tensor

from ring_core import Mask, UnsupportedError
from ring_torch import ContextParallel, KVCache
from ring_torch.kernels.fa4 import library
from ring_torch.local import LocalRanks
from ring_torch.serving import decoding, flash_pages, kernels, paged, prefilling

CALLS: list[str] = []


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool,
    window_size: tuple[int | None, int | None], return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend in plain torch; bands are aligned to the last key."""
    assert return_lse
    CALLS.append("band" if causal or window_size != (None, None) else "all")
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * softmax_scale
    apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    left, right = (None, 0) if causal else window_size
    hidden = (apart > right) if right is not None else torch.zeros_like(apart, dtype=torch.bool)
    hidden |= (-apart > left) if left is not None else False
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, page_table: Tensor, seqused_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    CALLS.append("table")
    pages = page_table[0].long()
    behind = torch.cat([x[pages].flatten(0, 1)[int(seqused_k) :] for x in (k, v)], -1)
    assert behind.isfinite().all()
    k, v = (x[pages].flatten(0, 1)[None, : int(seqused_k)] for x in (k, v))
    return flash_attn_func(q, k, v, **options)


LIBRARY = SimpleNamespace(
    flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
)


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


@pytest.mark.parametrize("queries", [True, False], ids=["queries travel", "keys travel"])
@pytest.mark.parametrize("name", SIZES)
@on_ranks
def test_random_schedules(name: str, queries: bool) -> None:
    def reason(_q: Tensor, _v_dim: int, rules: Any) -> str:
        return flash_pages.reason_against_rules(rules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_pages, "reason_against", reason)
        patch.setattr(kernels, "reason_against_triton", lambda _: "")
        patch.setattr(library, "public_module", lambda: LIBRARY)
        for module in (decoding, prefilling):
            patch.setattr(module, "attend_by", lambda _: paged.attend)
        patch.setattr(prefilling._Part, "queries_travel", queries)
        patch.setattr(prefilling, "_ROWS_OF_FLASH", 8)
        options = World.options
        for refused in (("alibi_slopes", "chunk_size", "softcap"), ()):
            patch.setattr(World, "options", lambda *x, no=refused: _without(no, options(*x)))
            CALLS.clear()
            world = World(ContextParallel(), SIZES[name], len(name))
            world.run(30)
            # Bands are of one rank alone, and pages in a row are read where they lie.
            assert not refused or ("all" if world.cp.cp_size > 1 else "band") in CALLS
            assert "band" not in CALLS or world.cp.cp_size == 1
            assert not refused or world.cp.cp_size > 1 or ("table" in CALLS) == queries


def _without(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in names}


def test_it_is_refused_by_name() -> None:
    cp = ContextParallel()
    cache = KVCache(
        cp, num_layers=1, num_kv_heads=1, head_dim=64, max_requests=1, max_tokens=64, dtype=torch.bfloat16,
    )  # fmt: skip
    cache.extend(cache.add(), 1)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    cache.write(q, q, layer=0)
    with pytest.raises(UnsupportedError, match="kernel='fa4': flash-attn-4 needs CUDA"):
        cp.prefill(q, q, q, cache, layer=0, request=0, kernel="fa4")
    with pytest.raises(UnsupportedError, match="kernel='fa4': it is for prefill"):
        cp.decode(q, cache, layer=0, kernel="fa4")


@pytest.mark.parametrize(("heads", "least"), [(32, 384), (8, 1536)])
def test_few_queries_are_of_split_kv(heads: int, least: int) -> None:
    few, many = (torch.empty(1, n, heads, 64) for n in (least - 1, least))
    assert "no split-KV" in flash_pages.reason_against_few(few)
    assert not flash_pages.reason_against_few(many)


@pytest.mark.parametrize(("flash", "triton", "kernel"), [
    ("", "", "fa4"), ("few", "", "triton"), ("", "no Triton", "eager"), ("few", "no Triton", "eager"),
])  # fmt: skip
def test_what_flash_attention_leaves_needs_triton(
    flash: str, triton: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_pages, "reason_against", lambda *_: flash)
    monkeypatch.setattr(kernels, "reason_against_triton", lambda _: triton)
    rules = paged.Rules(Mask(causal=True), 1.0, None, None)
    q = torch.empty(1, 1, 1, 64)
    taken, reason = kernels.chosen("auto", "prefill", q, 64, rules)
    assert (taken, reason) == (kernel, "; ".join(x for x in (flash, triton) if x))
