"""Kernel `fa4` with versions of flash-attn-4 whose private parts are known, and with any other.

The library is stubbed on the CPU: its functions, their caches of compiled functions and the places
of arguments as in version 4.0.0b36, and public functions alone for another version.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from views import offset

from ring_core import Mask, Request, RingProgram, make_plan, ring_program
from ring_torch.kernels import fa4
from ring_torch.kernels.library import (
    Documents as FlashDocuments,
    LaunchOptions as FlashOptions,
)
from ring_torch.records import AttentionState, BackwardInputs, KeyBlock

KNOWN, UNKNOWN = fa4.library.VERSIONS[0], "4.0.0b37"
TILE = 8  # queries that the stub rounds lengths up to
LOG2_E = 1.4426950408889634
Window = tuple[int | None, int | None]


def pieces(q: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[tuple[Any, Any]]:
    """Yield the slices of the rows and of the columns of each sequence."""
    if cu_q is None or cu_k is None:
        yield from ((n, n) for n in range(len(q)))
        return
    for rows, columns in zip(*(pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
        yield slice(*rows), slice(*columns)


def scores(q: Tensor, k: Tensor, scale: float, window: Window) -> Tensor:
    """Return the masked scores of one sequence, ``[H, n, m]``."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = torch.einsum("nhd,mhd->hnm", q, k) * scale
    apart = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left, right = window
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    if left is not None:
        hidden |= apart > left
    if right is not None:
        hidden |= -apart > right
    return s.masked_fill(hidden, -torch.inf)


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``(out [n, H, Dv], lse [H, n])`` of one sequence, differentiable."""
    s = scores(q, k, scale, window)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hnm,mhd->nhd", (s - lse[..., None]).exp(), v), lse


def of_rows(where: Any) -> tuple[Any, ...]:
    """Return the index of rows in ``[B, H, n]`` or ``[H, n]``."""
    return (where,) if isinstance(where, int) else (slice(None), where)


def with_attributes(function: Callable[..., Any]) -> Any:
    """A function whose attributes are not typed: the library keeps its caches there."""
    return function


@dataclass
class Library:
    """Version 4.0.0b36 on Hopper."""

    asked: Counter[str] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)
    extra: Tensor | None = None  # an argument that it made itself

    def __post_init__(self) -> None:
        self.module = SimpleNamespace(
            _flash_attn_fwd=self._forward(), _flash_attn_bwd=self._backward(),
            _bwd_preprocess=self._prepare(), _bwd_postprocess_convert=self._round(),
            _tile_size_bwd_sm90=lambda *_: SimpleNamespace(m_block_size=TILE),
        )  # fmt: skip

    def _forward(self) -> Any:
        @with_attributes
        def flash_attn_fwd(
            q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, window_size_left: int | None,
            window_size_right: int | None, out: Tensor, lse: Tensor | None, return_lse: bool,
            learnable_sink: Tensor | None, score_mod: Any, mask_mod: Any,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
            max_seqlen_q: int = 0, max_seqlen_k: int = 0,
        ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
            del max_seqlen_q, max_seqlen_k
            assert score_mod is None and mask_mod is None and return_lse == (lse is not None)
            self.asked["forward"] += 1
            causal, window = resolved(window_size_left, window_size_right)
            key = (q.dtype, causal, *(side is None for side in window), lse is None)
            if key not in flash_attn_fwd.compile_cache:
                flash_attn_fwd.compile_cache[key] = self._compiled_forward(causal=causal)
            flash_attn_fwd.compile_cache[key](
                q, as_it_reads(k), v, out.detach(), lse, softmax_scale, cu_seqlens_q, cu_seqlens_k, None,
                None, None, *window, learnable_sink, None, (None, None), self.extra, None,
            )  # fmt: skip
            return out, lse

        flash_attn_fwd.compile_cache = {}
        return flash_attn_fwd

    def _compiled_forward(self, *, causal: bool) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            q, k, v, out, lse, scale, cu_q, cu_k, *rest = args
            page, left, right, sinks, lists, aux, _, end = rest[2:]
            assert page is None and lists is None and aux == (None, None) and end is None
            assert not any(x.requires_grad for x in (q, k, v, out))
            self.compiled["forward"] += 1
            window = (None, 0) if causal else (left, right)
            for rows, columns in pieces(q, cu_q, cu_k):
                attention = attended(q[rows], k[columns], v[columns], scale, window, sinks)
                out[rows] = attention[0]
                if lse is not None:
                    lse[of_rows(rows)] = attention[1]

        return launch

    def _prepare(self) -> Any:
        @with_attributes
        def bwd_preprocess(out: Tensor, *args: Any) -> None:
            cache = bwd_preprocess.compile_cache
            cache.setdefault(out.dtype, prepare) if isinstance(cache, dict) else None
            cache[out.dtype](out, *args, None, None, None, None, 1.0, None, None)

        def prepare(*args: Any) -> None:
            out, dout, delta, lse, lse_log2, dq_sums, _, *none, ones, _, _ = args
            assert none == [None] * 4 and ones == 1.0
            self.compiled["prepare"] += 1
            n = lse.shape[-1]
            delta[..., :n] = (out * dout).sum(-1).transpose(-1, -2)
            lse_log2[..., :n] = lse * LOG2_E
            dq_sums.zero_()

        bwd_preprocess.compile_cache = {torch.float32: prepare}
        return bwd_preprocess

    def _round(self) -> Any:
        @with_attributes
        def bwd_postprocess_convert(sums: Tensor, grad: Tensor, scale: float, cu: Any) -> None:
            cache = bwd_postprocess_convert.compile_cache
            cache[grad.dtype](sums, grad, scale, cu, None, None, None)

        def round_to(
            sums: Tensor, grad: Tensor, scale: float, cu: Any, _: None, sink: None, total: None
        ) -> None:
            del cu
            assert sink is None and total is None
            self.compiled["round"] += 1
            in_rows = sums.unflatten(-1, (-1, grad.shape[-1]))[..., : grad.shape[-3], :]
            grad.copy_(in_rows.transpose(-2, -3) * scale)

        bwd_postprocess_convert.compile_cache = {torch.float32: round_to}
        return bwd_postprocess_convert

    def _backward(self) -> Any:
        @with_attributes
        def flash_attn_bwd(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, dq: Tensor | None,
            softmax_scale: float, window_size_left: int | None, window_size_right: int | None,
            deterministic: bool, score_mod: Any, score_mod_bwd: Any, mask_mod: Any,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
            max_seqlen_q: int = 0, max_seqlen_k: int = 0,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            del max_seqlen_q, max_seqlen_k
            assert score_mod is score_mod_bwd is mask_mod is None and lse.dtype == torch.float32
            self.asked["backward"] += 1
            causal, window = resolved(window_size_left, window_size_right)
            dq = torch.empty_like(q) if dq is None else dq
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            *batch, length, heads, dim = q.shape
            padded = -(-length // TILE) * TILE
            delta, lse_log2 = (torch.empty(*batch, heads, padded) for _ in range(2))
            dq_sums = torch.empty(*batch, heads, padded * dim)
            grouped = k.shape[-2] < heads
            sums: Sequence[Tensor] = (dk, dv)
            if grouped:
                sums = [torch.zeros(*batch, x.shape[-2], x.shape[-3] * x.shape[-1]) for x in (k, v)]
            order = torch.zeros(2, 3, dtype=torch.int32) if deterministic else None
            semaphores = order, order if grouped else None, order if grouped else None
            self.module._bwd_preprocess(out, dout, delta, lse, lse_log2, dq_sums, cu_seqlens_q)
            key = (q.dtype, causal, *(side is None for side in window), grouped, deterministic)
            if key not in flash_attn_bwd.compile_cache:
                flash_attn_bwd.compile_cache[key] = self._compiled_backward(causal=causal)
            flash_attn_bwd.compile_cache[key](
                q.detach(), as_it_reads(k).detach(), v.detach(), dout, lse_log2, delta, dq_sums, *sums,
                softmax_scale, cu_seqlens_q, cu_seqlens_k, None, None, *window, *semaphores, (None, None),
                None, self.extra,
            )  # fmt: skip
            self.module._bwd_postprocess_convert(dq_sums, dq, softmax_scale, cu_seqlens_q)
            if grouped:
                for x, grad, scale in zip(sums, (dk, dv), (softmax_scale, 1.0), strict=True):
                    self.module._bwd_postprocess_convert(x, grad, scale, cu_seqlens_k)
            return dq, dk, dv

        flash_attn_bwd.compile_cache = {}
        return flash_attn_bwd

    def _compiled_backward(self, *, causal: bool) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            q, k, v, dout, lse_log2, delta, dq_sums, dk, dv, scale, cu_q, cu_k, _, _, *window = (
                args[:16]
            )
            *semaphores, aux, lists, _ = args[16:]
            assert aux == (None, None) and lists is None
            assert all(x is None or (x.dtype == torch.int32 and not x.any()) for x in semaphores)
            self.compiled["backward"] += 1
            grouped = dk.shape != k.shape
            rows_of_dq = dq_sums.unflatten(-1, (-1, q.shape[-1])).transpose(-2, -3)
            if grouped:
                dk, dv = (
                    x.unflatten(-1, (-1, y.shape[-1])).transpose(-2, -3) for x, y in ((dk, k), (dv, v))
                )  # fmt: skip
            for rows, columns in pieces(q, cu_q, cu_k):
                count = len(q[rows])
                group = q.shape[-2] // k.shape[-2]
                some = (slice(None), slice(count)) if isinstance(rows, int) else ()
                index = (*of_rows(rows), *some)
                s = scores(q[rows], k[columns], scale, (None, 0) if causal else tuple(window))
                p = torch.exp2(s * LOG2_E - lse_log2[index][..., None])
                wide_k, wide_v = (x[columns].repeat_interleave(group, dim=1) for x in (k, v))
                ds = p * (
                    torch.einsum("nhd,mhd->hnm", dout[rows], wide_v) - delta[index][..., None]
                )
                to = (rows, slice(count)) if isinstance(rows, int) else (rows,)
                rows_of_dq[to] += torch.einsum("hnm,mhd->nhd", ds, wide_k)
                key_grads = (
                    torch.einsum("hnm,nhd->mhd", ds, q[rows]) * (1.0 if grouped else scale),
                    torch.einsum("hnm,nhd->mhd", p, dout[rows]),
                )
                for x, to_grad in zip(key_grads, (dk, dv), strict=True):
                    to_grad[columns] = x.unflatten(1, (-1, group)).sum(2)

        return launch


def resolved(left: int | None, right: int | None) -> tuple[bool, Window]:
    """Return the library's flag for causal masks, and the window that it passes beside that."""
    return (True, (None, None)) if (left, right) == (None, 0) else (False, (left, right))


def as_it_reads(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not begin at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def public_functions(asked: Counter[str]) -> SimpleNamespace:
    """The public functions of any version, differentiable."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
        softmax_scale: float, window_size: Window, learnable_sink: Tensor | None = None,
        softcap: float, deterministic: bool, return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        del max_seqlen_q, max_seqlen_k, deterministic
        assert return_lse and softcap == 0.0
        asked["public"] += 1
        by_document = [
            attended(q[rows], k[columns], v[columns], softmax_scale, window_size, learnable_sink)
            for rows, columns in pieces(q, cu_seqlens_q, cu_seqlens_k)
        ]
        outs, lses = zip(*by_document, strict=True)
        if cu_seqlens_q is None:
            return torch.stack(outs), torch.stack(lses)
        return torch.cat(outs), torch.cat(lses, dim=1)

    return SimpleNamespace(
        flash_attn_func=flash_attn_varlen_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Library]]:
    """Install a version of the library, on a GPU of Hopper's capability."""
    caches = fa4.library.is_known, fa4.library.interface, fa4.library.public_module, fa4._missing

    def forget() -> None:
        for cached in caches:
            cached.cache_clear()

    def installed(version: str) -> Library:
        library = Library()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        for module in (fa4, fa4.library):
            monkeypatch.setattr(module, "version", lambda _: version)
        public = public_functions(library.asked)
        # Of another version nothing but public functions is there.
        private = library.module if version == KNOWN else None
        modules = {
            "flash_attn": SimpleNamespace(), "flash_attn.cute": public,
            "flash_attn.cute.interface": private,
        }  # fmt: skip
        for name, stub in modules.items():
            monkeypatch.setitem(sys.modules, name, stub)
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

    @property
    def options(self) -> FlashOptions:
        documents = sinks = None
        if self.documents:
            cu = torch.tensor([0, 3, 11, 12, 20], dtype=torch.int32)
            documents = FlashDocuments(cu, cu.clone(), 8, 8)
        if self.sinks:
            sinks = torch.linspace(-1.0, 1.0, self.heads[0])
        return FlashOptions(
            0.3, None, self.window, documents, self.deterministic, self.needs_lse, sinks=sinks
        )

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """``q, k, v, dout``."""
        torch.manual_seed(seed)
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        lead = (20,) if self.documents else (2, 12)
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)
        return [torch.randn(*lead, *shape) for shape in shapes]

    def wanted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``(out, lse)``, differentiable."""
        options = self.options
        cu = (None, None) if options.documents is None else options.documents[:2]
        states = [
            attended(q[rows], k[columns], v[columns], options.scale, self.window, options.sinks)
            for rows, columns in pieces(q, *cu)
        ]
        outs, lses = zip(*states, strict=True)
        if self.documents:
            return torch.cat(outs), torch.cat(lses, dim=1)
        return torch.stack(outs), torch.stack(lses)

    def whole(self, *tensors: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The global ``(out, lse)`` of this launch and of another one, and this launch's grads."""
        *qkv, dout = tensors
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out, lse = self.wanted(q, k, v)
        with torch.no_grad():
            other, other_lse = self.wanted(*self.tensors(seed=9)[:3])
        both = torch.logaddexp(lse, other_lse)
        weights = ((x - both).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse, other_lse))
        merged = sum(w * x for w, x in zip(weights, (out, other), strict=True))
        assert isinstance(merged, Tensor)
        grads = torch.autograd.grad(merged, (q, k, v), dout)
        return merged.detach(), both.detach(), list(grads)


LAUNCHES = (
    Launch(), Launch((None, 0)), Launch((5, 0), heads=(4, 2)), Launch((3, 2), deterministic=True),
    Launch((None, 0), heads=(4, 2), deterministic=True), Launch((None, 0), documents=True),
    Launch(heads=(4, 1), documents=True), Launch((None, 0), dims=(16, 8), needs_lse=False),
    Launch((None, 0), heads=(4, 2), dims=(16, 8)), Launch((2, 0), sinks=True),
)  # fmt: skip


def forward(flash: Any, launch: Launch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    destination = None
    if not launch.documents:
        out = torch.empty(*q.shape[:-1], v.shape[-1])
        destination = AttentionState(out, torch.full((q.shape[0], q.shape[2], q.shape[1]), 7.0))
    result: tuple[Tensor, Tensor] = flash.forward(q, k, v, launch.options, destination)
    return result


def backward(flash: Any, launch: Launch, tensors: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    out, lse, _ = launch.whole(*tensors)
    return list(flash.backward(dout, q, k, v, out, lse, launch.options, None))


@pytest.mark.parametrize("version", [KNOWN, UNKNOWN])
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_results_are_right_with_each_version(
    launch: Launch, version: str, install: Callable[[str], Library]
) -> None:
    library, flash = install(version), fa4.Flash4()
    for seed in range(3):
        tensors = launch.tensors(seed)
        out, lse = forward(flash, launch, *tensors[:3])
        expected = launch.wanted(*tensors[:3])
        torch.testing.assert_close(out, expected[0])
        if launch.needs_lse:
            torch.testing.assert_close(lse, expected[1])
        for grad, right in zip(
            backward(flash, launch, tensors), launch.whole(*tensors)[2], strict=True
        ):
            torch.testing.assert_close(grad, right, check_dtype=False)
    if version == KNOWN:
        assert library.asked == {"forward": 1, "backward": 1}
        assert library.compiled["forward"] == library.compiled["backward"] == 3
    else:
        assert library.asked == {"public": 6} and not library.compiled


def spread(x: Tensor) -> Tensor:
    """Return equal numbers with a larger stride between rows."""
    return torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]]


CAUSAL = Launch((None, 0), heads=(4, 2))
NAMES = ("q", "k", "v", "dout")
#: Changes of a launch's tensors that ask the library, and how often in two launches: a copy that is
#: made of a tensor which is not aligned is another tensor each time.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "offset": (offset, 2), "spread": (spread, 1),
    "batch": (lambda x: x[:1], 1), "length": (lambda x: x[:, :8], 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "which"),
    [
        *((change, which) for change in ("offset", "spread") for which in ("all", *NAMES)),
        ("batch", "all"), ("length", "all"),
    ],
)  # fmt: skip
def test_other_strides_and_shapes_ask_the_library(
    change: str, which: str, install: Callable[[str], Library]
) -> None:
    library, flash, (changed, times) = install(KNOWN), fa4.Flash4(), CHANGES[change]
    backward(flash, CAUSAL, CAUSAL.tensors())
    forward(flash, CAUSAL, *CAUSAL.tensors()[:3])
    library.asked.clear()
    for seed in (1, 2):
        tensors = [
            changed(x) if which in ("all", name) else x
            for name, x in zip(NAMES, CAUSAL.tensors(seed), strict=True)
        ]
        torch.testing.assert_close(
            forward(flash, CAUSAL, *tensors[:3])[0], CAUSAL.wanted(*tensors[:3])[0]
        )
        if change in ("batch", "length"):
            continue
        grads = zip(backward(flash, CAUSAL, tensors), CAUSAL.whole(*tensors)[2], strict=True)
        for grad, right in grads:
            torch.testing.assert_close(grad, right)
    forwards = {} if which == "dout" else {"forward": times}
    backwards = {} if change in ("batch", "length") else {"backward": times}
    assert library.asked == {**forwards, **backwards}


OTHERS = (
    Launch((None, 1)), Launch((4, 0)), Launch(), Launch((None, 0), sinks=True), CAUSAL,
    Launch((None, 0), dims=(16, 8)), Launch((None, 0), deterministic=True),
)  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_options_ask_the_library(other: Launch, install: Callable[[str], Library]) -> None:
    library, launch, flash = install(KNOWN), Launch((None, 0)), fa4.Flash4()
    backward(flash, launch, launch.tensors())
    library.asked.clear()
    tensors = other.tensors()
    grads = backward(flash, other, tensors)
    for grad, right in zip(grads, other.whole(*tensors)[2], strict=True):
        torch.testing.assert_close(grad, right)
    assert library.asked == {"backward": 1}


def test_what_the_library_makes_itself_is_not_kept(install: Callable[[str], Library]) -> None:
    library, launch, flash = install(KNOWN), Launch(), fa4.Flash4()
    library.extra = torch.zeros(3)
    tensors = launch.tensors()
    for _ in range(2):
        forward(flash, launch, *tensors[:3])
        backward(flash, launch, tensors)
    assert library.asked == {"forward": 2, "backward": 2}


def test_no_tensor_of_a_call_is_kept(install: Callable[[str], Library]) -> None:
    install(KNOWN)
    flash, alive = fa4.Flash4(), []
    for launch in LAUNCHES:
        tensors = launch.tensors()
        results = [*forward(flash, launch, *tensors[:3]), *backward(flash, launch, tensors)]
        alive += [weakref.ref(x) for x in (*tensors, *results)]
        del tensors, results
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


def test_notes_are_bounded(install: Callable[[str], Library]) -> None:
    library, flash = install(KNOWN), fa4.Flash4()
    tensors = Launch().tensors()
    for left in (*range(300), 299, 0):
        forward(flash, Launch((left, 0)), *tensors[:3])
    assert library.asked["forward"] == 301, "the last is known, the first no more"


def test_calls_of_other_threads_are_not_noted(install: Callable[[str], Library]) -> None:
    library, launch, flash = install(KNOWN), Launch(), fa4.Flash4()
    compiled, other = library.module._flash_attn_fwd.compile_cache, Launch((1, 1))
    begun, done = threading.Event(), threading.Event()
    by_hand = library.module._flash_attn_fwd

    def meanwhile() -> None:
        begun.wait()
        q, k, v, _ = other.tensors()
        by_hand(
            q, k, v, softmax_scale=1.0, window_size_left=1, window_size_right=1, lse=None,
            out=torch.empty_like(q), return_lse=False, learnable_sink=None, score_mod=None, mask_mod=None,
        )  # fmt: skip
        done.set()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    with fa4.library._calls_of(by_hand) as (calls,):
        begun.set()
        assert done.wait(10)
    thread.join()
    assert calls == [] and by_hand.compile_cache is compiled
    tensors = launch.tensors()
    threads = [
        threading.Thread(target=forward, args=(flash, launch, *tensors[:3])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_hand.compile_cache is compiled
    torch.testing.assert_close(
        forward(flash, launch, *tensors[:3])[0], launch.wanted(*tensors[:3])[0]
    )


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (5, 2)])
def test_functions_of_a_split_backward_are_those_of_a_small_one(
    window: Window, default_dtype: torch.dtype, install: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are asked for once, and give an item's gradients."""
    library, launch, zeros = install(KNOWN), Launch(window, heads=(4, 2)), torch.zeros

    def on_cpu(*sizes: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        del device
        return zeros(*sizes, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_cpu)
    is_causal, sides = resolved(*window)
    bounded = tuple(side is not None for side in sides)
    torch.set_default_dtype(default_dtype)
    try:
        functions = fa4.library.split_functions.__wrapped__(torch.float32, 8, 2, is_causal, bounded)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (functions.tile, functions.dim) == (TILE, 8)
    assert functions.after_window == (None, None, None, (None, None), None, None)
    assert library.asked == {"backward": 1}
    q, k, v, dout = launch.tensors()
    out, lse, grads = launch.whole(q, k, v, dout)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    flat = zeros(k.numel() + v.numel())
    item = fa4.library.SplitLaunch(0, k.shape[1], launch.options.scale, sides, functions)
    run = fa4.library.AllLaunches(slice(0, q.shape[1]), [item], tuple(k.shape))
    held, upstream = [KeyBlock(k, v)], BackwardInputs(dout, out, lse, None)
    run(q, held, upstream, flat, lambda: dq, is_last=True)
    assert held == []
    for x, grad, scale in zip(flat.chunk(2), (dk, dv), (launch.options.scale, 1.0), strict=True):
        sums = x.view(*k.transpose(1, 2).shape[:2], -1)
        functions.round_dkv(*fa4.library.round_arguments(sums, grad, scale, None))
    for actual, right in zip((dq, dk, dv), grads, strict=True):
        torch.testing.assert_close(actual, right)
    assert library.asked == {"backward": 1}


def program(mask: Mask) -> RingProgram:
    return ring_program(make_plan(mask, seq_len=256, cp_size=1))


@pytest.mark.parametrize(
    ("asked", "mask"),
    [
        ({"segment_ids": True}, Mask()), ({"alibi": True}, Mask(causal=True)),
        ({}, Mask(predicate=lambda q, k: q >= k)),
    ],
    ids=["segment_ids", "alibi", "predicate"],
)  # fmt: skip
def test_other_versions_refuse_what_has_no_public_function(
    asked: dict[str, bool], mask: Mask, install: Callable[[str], Library]
) -> None:
    request = Request("cuda", "bfloat16", 64, 64, grad=True, **asked)
    for version, expected in ((KNOWN, []), (UNKNOWN, [KNOWN])):
        install(version)
        assert fa4.FA4.unavailable_reason() is None
        assert fa4.FA4.limits is not None
        reasons = fa4.FA4.limits(request, program(mask))
        assert len(reasons) == len(expected)
        assert all(version in why for version, why in zip(expected, reasons, strict=True))


def test_other_versions_have_no_split_backward(install: Callable[[str], Library]) -> None:
    split_backward = fa4.FA4.split_backward
    plan = make_plan(Mask(causal=True), seq_len=1024, cp_size=2)
    assert split_backward is not None
    request = Request("cuda", "bfloat16", 64, 64, grad=True, q_heads=4, kv_heads=2)
    for version in (KNOWN, UNKNOWN):
        install(version)
        applies = split_backward.applies(plan, request, splits=True, tile=split_backward.tile)
        assert applies == (version == KNOWN)


#: Private names of flash-attn-4, of what records calls of its compiled functions, fields of its
#: tiles (``FwdConfig``, ``BwdConfig``), modules of it, and what is read from a call by position.
PRIVATE = re.compile(
    r"\b_(?:flash_attn_[fb]wd|bwd_|tile_size)\w*|\b_?calls_of\b|\bcompile_cache\b|\b[mn]_block_size\b"
    r"|\b(?:SdP|dKV|dQ)_swapAB|\bAtomLayout\w+|\bnum_stages_\w+|\b(?:num_wg|dQ_single_wg|mma_pv_is_rs)\b"
    r"|\b(?:intra_wg_overlap|q_stage|num_splits)\b|flash_attn\.cute\b|(?<!bound)\.(?:arguments|buffers)\[|= \w+\.(?:arguments|buffers)\n"
)
ABSENT = re.compile(r"None, None, None")  # a call's row of arguments that are not there


def test_private_parts_are_known_in_one_file() -> None:
    """Elsewhere none is named, and no call is read by position or has a row of absent arguments."""
    folder = Path(fa4.__file__).parent
    found = {path: {*PRIVATE.findall(path.read_text())} for path in folder.parents[1].rglob("*.py")}
    assert len(found.pop(folder / "library.py")) > 10
    assert {path.name: names for path, names in found.items() if names} == {}
    rows = [path.name for path in folder.glob("*.py") if ABSENT.search(path.read_text())]
    assert rows == ["library.py"]
