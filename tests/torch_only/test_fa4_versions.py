"""Kernel `fa4` with versions of flash-attn-4 whose private parts are known, and with any other.

The library is stubbed on the CPU: its functions, their caches of compiled functions and the places
of arguments as in version 4.0.0b36, and public functions alone for another version.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiled
import torch
from plain_flash import attended
from tiled import Window, options_of
from torch import Tensor
from views import offset, spread

from ring_core import Mask, Request, WorkItem, make_plan, ring_program
from ring_core.base.arguments import not_none
from ring_torch.accumulate import Columns, Rows
from ring_torch.buffers import KeyGradBuffer, KVPayload
from ring_torch.kernels import fa4
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.library import Documents, LaunchOptions
from ring_torch.records import AttentionState, BackwardInputs, KernelParams, KeyBlock, QueryBlock

KNOWN, UNKNOWN = fa4.library.VERSIONS[0], "4.0.0b37"


class Library:
    """Version 4.0.0b36 on Hopper: what was asked of it, and which compiled functions ran."""

    def __init__(self) -> None:
        self.asked, self.compiled = Counter[str](), Counter[str]()
        self.extra: Tensor | None = None  # an argument that it made itself
        self.module: Any = SimpleNamespace(
            _flash_attn_fwd=partial(self._forward), _flash_attn_bwd=partial(self._backward),
            _bwd_preprocess=partial(self._launched, "prepare"),
            _bwd_postprocess_convert=partial(self._launched, "round"),
            _tile_size_bwd_sm90=lambda *_: SimpleNamespace(m_block_size=tiled.TILE),
        )  # fmt: skip
        self._functions: dict[str, tuple[Any, Callable[..., None]]] = {
            "forward": (self.module._flash_attn_fwd, self._forward_launch),
            "backward": (self.module._flash_attn_bwd, tiled.main),
            "prepare": (self.module._bwd_preprocess, tiled.prepare),
            "round": (self.module._bwd_postprocess_convert, tiled.rounded),
        }
        for function, _ in self._functions.values():
            function.compile_cache = {}

    def _launched(self, name: str, *args: Any, key: Any = None, **flag: bool) -> None:
        """Look a compiled function up, or compile it, and call it."""
        function, launch = self._functions[name]
        cache, key = function.compile_cache, args[1].dtype if key is None else key
        absent: Any = {"prepare": (*[None] * 4, 1.0, None, None), "round": (None, None, None)}

        def compiled(*args: Any) -> None:
            self.compiled[name] += 1
            launch(*args, **flag)

        if key not in cache:
            cache[key] = compiled
        cache[key](*args, *absent.get(name, ()))

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, out: Tensor,
        lse: Tensor | None, return_lse: bool, learnable_sink: Tensor | None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert options["score_mod"] is options["mask_mod"] is None
        assert return_lse == (lse is not None)
        self.asked["forward"] += 1
        causal, window = resolved(options)
        self._launched(
            "forward", q, as_it_reads(k), v, out.detach(), lse, softmax_scale, cu_seqlens_q,
            cu_seqlens_k, None, None, None, *window, learnable_sink, None, (None, None), self.extra, None,
            key=(q.dtype, causal, *(side is None for side in window), lse is None), causal=causal,
        )  # fmt: skip
        return out, lse

    def _forward_launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float,
        *rest: Any, causal: bool,
    ) -> None:  # fmt: skip
        *offsets, _, _, page, left, right, sinks, lists, aux, _, end = rest
        assert page is lists is end is None and aux == (None, None)
        assert not any(x.requires_grad for x in (q, k, v, out))
        window = (None, 0) if causal else (left, right)
        results = attended(q, k, v, options_of(scale, window, *offsets, sinks=sinks))
        for x, into in zip(results, (out, lse), strict=True):
            into.copy_(x) if into is not None else None

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
        dq: Tensor | None, softmax_scale: float, deterministic: bool,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert options["score_mod"] is options["score_mod_bwd"] is options["mask_mod"] is None
        assert lse.dtype == torch.float32
        self.asked["backward"] += 1
        causal, window = resolved(options)
        dq = torch.empty_like(q) if dq is None else dq
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        *batch, length, heads, dim = q.shape
        padded, grouped = -(-length // tiled.TILE) * tiled.TILE, k.shape[-2] < heads
        delta, lse_log2 = (lse.new_empty(*batch, heads, padded) for _ in range(2))
        dq_sums = lse.new_empty(*batch, heads, padded * dim)
        sums: Sequence[Tensor] = (dk, dv)
        if grouped:
            sums = [lse.new_zeros(*batch, x.shape[-2], length * x.shape[-1]) for x in (k, v)]
        order = torch.zeros(2, 3, dtype=torch.int32) if deterministic else None
        semaphores = order, order if grouped else None, order if grouped else None
        self.module._bwd_preprocess(out, dout, delta, lse, lse_log2, dq_sums, cu_seqlens_q)
        self._launched(
            "backward", *(as_it_reads(x).detach() for x in (q, k, v, dout)), lse_log2, delta,
            dq_sums, *sums, softmax_scale, cu_seqlens_q, cu_seqlens_k, None, None, *window, *semaphores,
            (None, None), None, self.extra, causal=causal,
            key=(q.dtype, causal, *(side is None for side in window), grouped, deterministic),
        )  # fmt: skip
        self.module._bwd_postprocess_convert(dq_sums, dq, softmax_scale, cu_seqlens_q)
        for x, grad, scale in zip(sums, (dk, dv), (softmax_scale, 1.0), strict=True):
            if grouped:
                self.module._bwd_postprocess_convert(x, grad, scale, cu_seqlens_k)
        return dq, dk, dv

    def public(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, window_size: Window,
        return_lse: bool = False, learnable_sink: Tensor | None = None, softcap: float,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend as the public functions of any version do, differentiable."""
        assert return_lse and softcap == 0.0
        self.asked["public"] += 1
        offsets = cu_seqlens_q, cu_seqlens_k
        return attended(
            q, k, v, options_of(softmax_scale, window_size, *offsets, sinks=learnable_sink)
        )


def resolved(options: dict[str, Any]) -> tuple[bool, Window]:
    """Return the library's flag for causal masks, and the window that it passes beside that."""
    window = options["window_size_left"], options["window_size_right"]
    return (True, (None, None)) if window == (None, 0) else (False, window)


def as_it_reads(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not begin at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


Install = Callable[[str], Library]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a version of the library, on a GPU of Hopper's capability."""
    of_library = fa4.library.is_known, fa4.library.interface, fa4.library.public_module

    def forget() -> None:
        for cached in (*of_library, fa4._missing, fa4.library.split_functions):
            cached.cache_clear()

    def installed(version: str) -> Library:
        library = Library()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        for module in (fa4, fa4.library):
            monkeypatch.setattr(module, "version", lambda _: version)
        names = "flash_attn_func", "flash_attn_varlen_func"
        public = SimpleNamespace(**dict.fromkeys(names, library.public))
        # Of another version nothing but public functions is there.
        private = library.module if version == KNOWN else None
        stubs = {"": SimpleNamespace(), ".cute": public, ".cute.interface": private}
        for name, stub in stubs.items():
            monkeypatch.setitem(sys.modules, f"flash_attn{name}", stub)
        forget()
        return library

    yield installed
    monkeypatch.undo()
    forget()


@dataclass(frozen=True)
class Launch:
    """A launch over the first half of the keys; the other half is another launch's."""

    window: Window = (None, None)
    heads: tuple[int, int] = (4, 4)
    dims: tuple[int, int] = (8, 8)
    documents: bool = False
    deterministic: bool = False
    sinks: bool = False
    needs_lse: bool = True
    lead: tuple[int, ...] = (2, 12)

    @property
    def options(self) -> LaunchOptions:
        cu = torch.tensor([0, 3, 11, 12, 20], dtype=torch.int32)
        return LaunchOptions(
            0.3, None, self.window, Documents(cu, cu.clone(), 8, 8) if self.documents else None,
            self.deterministic, self.needs_lse,
            sinks=torch.linspace(-1.0, 1.0, self.heads[0]) if self.sinks else None,
        )  # fmt: skip

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """``q, k, v, dout``."""
        torch.manual_seed(seed)
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        lead = (20,) if self.documents else self.lead
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)
        return [torch.randn(*lead, *shape) for shape in shapes]

    def wanted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``(out, lse)``, differentiable."""
        return attended(q, k, v, self.options)

    def whole(self, *tensors: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The global ``(out, lse)`` of this launch and of another one, and this launch's grads."""
        *qkv, dout = tensors
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        states = self.wanted(q, k, v), self.wanted(*self.tensors(seed=9)[:3])
        outs, lses = (torch.stack(x) for x in zip(*states, strict=True))
        both = lses.logsumexp(0)
        merged = ((lses - both).exp().mT[..., None] * outs).sum(0)
        grads = torch.autograd.grad(merged, (q, k, v), dout)
        return merged.detach(), both.detach(), list(grads)


CAUSAL = Launch((None, 0), heads=(4, 2))
LAUNCHES = (
    Launch(), Launch((None, 0)), Launch((5, 0), heads=(4, 2)), Launch((3, 2), deterministic=True),
    replace(CAUSAL, deterministic=True), Launch((None, 0), documents=True),
    Launch(heads=(4, 1), documents=True), Launch((None, 0), dims=(16, 8), needs_lse=False),
    replace(CAUSAL, dims=(16, 8)), Launch((2, 0), sinks=True),
)  # fmt: skip


def forward(flash: Any, launch: Launch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    destination = None
    if not launch.documents:
        out = torch.empty(*q.shape[:-1], v.shape[-1])
        destination = AttentionState(out, torch.full((q.shape[0], q.shape[2], q.shape[1]), 7.0))
    result: tuple[Tensor, Tensor] = flash.forward(q, k, v, launch.options, destination)
    return result


def check(flash: Any, launch: Launch, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Compare a forward and a backward with dense attention, and return their results."""
    q, k, v, dout = tensors
    results, expected = [*forward(flash, launch, q, k, v)], [*launch.wanted(q, k, v)]
    whole, whole_lse, grads = launch.whole(*tensors)
    results += flash.backward(dout, q, k, v, whole, whole_lse, launch.options, None)
    for n, (x, y) in enumerate(zip(results, expected + grads, strict=True)):
        if n != 1 or launch.needs_lse:
            torch.testing.assert_close(x, y, check_dtype=False)
    return results


@pytest.mark.parametrize("version", [KNOWN, UNKNOWN])
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_results_are_right_with_each_version(
    launch: Launch, version: str, install: Install
) -> None:
    library, flash = install(version), fa4.Flash4()
    for seed in range(3):
        check(flash, launch, launch.tensors(seed))
    if version == KNOWN:
        assert library.asked == {"forward": 1, "backward": 1}
        assert library.compiled["forward"] == library.compiled["backward"] == 3
    else:
        assert library.asked == {"public": 6} and not library.compiled


#: Calls after a causal one: of another launch, or with tensors changed, by their names.
OTHERS: dict[str, tuple[Launch, Callable[[Tensor], Tensor], str]] = {
    **{
        str(changes): (replace(CAUSAL, **changes), torch.clone, "")
        for changes in (
            {"window": (None, 1)}, {"window": (4, 0)}, {"window": (None, None)}, {"sinks": True},
            {"heads": (4, 4)}, {"dims": (16, 8)}, {"deterministic": True}, {"lead": (1, 12)},
            {"lead": (2, 8)},
        )
    },
    **{
        f"{change.__name__} {names}": (CAUSAL, change, names)
        for change in (offset, spread) for names in ("q k v dout", "q", "k", "v", "dout")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_ask_the_library(name: str, install: Install) -> None:
    """A copy of a tensor that is not aligned is another tensor each time: it is never known."""
    library, flash, (launch, change, names) = install(KNOWN), fa4.Flash4(), OTHERS[name]
    check(flash, CAUSAL, CAUSAL.tensors())
    library.asked.clear()
    for seed in (1, 2):
        named = zip(("q", "k", "v", "dout"), launch.tensors(seed), strict=True)
        check(flash, launch, [change(x) if side in names.split() else x for side, x in named])
    times = 2 if change is offset else 1
    assert library.asked == {"backward": times} | ({} if names == "dout" else {"forward": times})


def test_what_the_library_makes_itself_is_not_kept(install: Install) -> None:
    library, launch, flash = install(KNOWN), Launch(), fa4.Flash4()
    library.extra = torch.zeros(3)
    for _ in range(2):
        check(flash, launch, launch.tensors())
    assert library.asked == {"forward": 2, "backward": 2}


def test_no_tensor_of_a_call_is_kept(install: Install) -> None:
    install(KNOWN)
    flash, alive = fa4.Flash4(), []
    for launch in LAUNCHES:
        tensors = launch.tensors()
        alive += [weakref.ref(x) for x in (*tensors, *check(flash, launch, tensors))]
        del tensors
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


def test_calls_of_other_threads_are_not_noted(install: Install) -> None:
    library, launch, flash = install(KNOWN), Launch(), fa4.Flash4()
    by_hand = library.module._flash_attn_fwd
    compiled, (q, k, v, _) = by_hand.compile_cache, launch.tensors()
    other = partial(
        by_hand, q, k, v, softmax_scale=1.0, window_size_left=1, window_size_right=1, lse=None,
        out=torch.empty_like(q), return_lse=False, learnable_sink=None, score_mod=None, mask_mod=None,
    )  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        with fa4.library._calls_of(by_hand) as (calls,):
            pool.submit(other).result(10)
        assert calls == [] and by_hand.compile_cache is compiled
        outs = pool.map(lambda _: forward(flash, launch, q, k, v)[0], range(8))
        for out in (*outs, forward(flash, launch, q, k, v)[0]):
            torch.testing.assert_close(out, launch.wanted(q, k, v)[0])
    assert by_hand.compile_cache is compiled


@pytest.mark.parametrize("window", [(None, 0), (5, 2)])
def test_a_split_backward(
    window: Window, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are asked for once, whatever torch's default dtype is."""
    library, zeros, launch = install(KNOWN), torch.zeros, Launch(window, heads=(4, 2))
    monkeypatch.setattr(torch, "zeros", lambda *n, **x: zeros(*n, **x | {"device": "cpu"}))
    q, k, v, dout = launch.tensors()
    out, lse, grads = launch.whole(q, k, v, dout)
    (batch, length, heads, dim), (left, right) = k.shape, window
    keys, params = (
        KVPayload.of(batch, length, heads, dim, dim, q.dtype, False),
        KernelParams(Mask(), 0.3),
    )
    item = WorkItem(0, 0, 0, 0, length, 0, length, None if right is None else -right, left)
    split = not_none(fa4.FA4.split_backward)
    backward = split.backward([item], params)
    rounding = split.rounding(OwnSpans(1, length, 0, 0, 0, 0, length), keys, params)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(2):
            # Sums lie somewhere in a larger tensor.
            flat = zeros(5 + 2 * k.numel(), dtype=q.dtype)[5:]
            results, held = [torch.empty_like(x) for x in (q, k, v)], [KeyBlock(k, v)]
            sums = Columns(KeyGradBuffer(keys, head_major=True), flat, length, {})
            rows = Rows(partial(results.__getitem__, 0), "write")
            backward.run(QueryBlock(q), held, BackwardInputs(dout, out, lse, None), rows, sums)
            assert held == []
            rounding(flat, results[1], results[2])
            torch.testing.assert_close(results, grads)
    finally:
        torch.set_default_dtype(torch.float32)
    assert library.asked == {"backward": 1 if window == (None, 0) else 2}  # rounding's are causal


@pytest.mark.parametrize("version", [KNOWN, UNKNOWN])
def test_other_versions_refuse_what_has_no_public_function(version: str, install: Install) -> None:
    install(version)
    assert fa4.FA4.unavailable_reason() is None
    request = Request("cuda", "bfloat16", 64, 64, grad=True, q_heads=4, kv_heads=2)
    rows: tuple[tuple[dict[str, Any], Mask], ...] = (
        ({"segment_ids": True}, Mask()), ({"alibi": True}, Mask(causal=True)),
        ({}, Mask(predicate=lambda q, k: q >= k)),
    )  # fmt: skip
    for asked, mask in rows:
        program = ring_program(make_plan(mask, seq_len=256, cp_size=1))
        reasons = not_none(fa4.FA4.limits)(replace(request, **asked), program)
        assert [KNOWN in why for why in reasons] == [True] * (version == UNKNOWN)
    plan, split = make_plan(Mask(causal=True), seq_len=1024, cp_size=2), fa4.FA4.split_backward
    applies = not_none(split).applies(plan, request, splits=True, tile=not_none(split).tile)
    assert applies == (version == KNOWN)
