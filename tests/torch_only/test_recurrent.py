"""Recurrent layers split over the sequence, compared with the recurrence token by token."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product, zip_longest
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RANDOM
from messages import Sent
from on_ranks import on_four_ranks, on_ranks, on_two_ranks
from refused import refused
from torch import Tensor
from torch.nn import functional

import ring_torch
from ring_core import ChunkLayout, LayoutSpec, UnsupportedError, WrongResultError
from ring_torch import ContextParallel, recurrent
from ring_torch.local import LocalRanks
from ring_torch.recurrent import calls, maps
from ring_torch.recurrent.calls import RecurrentCall
from ring_torch.recurrent.chunks import chunks_of
from ring_torch.recurrent.kernels import LinearAttention, Parts
from ring_torch.recurrent.runs import EagerRuns

T = 48
CHUNKS = RANDOM | {
    1: ChunkLayout(((0, 1, 2),)),
    8: ChunkLayout(tuple((n, 8 + n, 23 - n) for n in range(8))),
}
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)
B, H, HV, K, V = 2, 2, 4, 3, 2

Offsets = tuple[int, ...] | None


@pytest.fixture(
    params=[1, 2, 3, 4, pytest.param(8, marks=pytest.mark.nightly)], ids="{} ranks".format
)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


def layouts() -> list[LayoutSpec]:
    return ["contiguous", "zigzag", CHUNKS[dist.get_world_size()]]


@dataclass
class Layer:
    """A layer with whole inputs: those that are sharded, and those that every rank holds."""

    name: str
    rows: dict[str, Any]  # tensors
    shared: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def mapped(self, of_rows: Any = Tensor.clone, of_shared: Any = Tensor.clone) -> Layer:
        """Return the layer with other tensors, which have gradients."""
        rows, shared = (
            {name: function(x).detach().clone().requires_grad_() for name, x in tensors.items()}
            for function, tensors in ((of_rows, self.rows), (of_shared, self.shared))
        )
        return replace(self, rows=rows, shared=shared)

    def of(self, cp: ContextParallel, **options: Any) -> Any:
        """Run the layer."""
        return getattr(cp, self.name)(**self.rows, **self.shared, **self.options, **options)


def numbers(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.randn, generator=generator, dtype=torch.float64)


def drawn(name: str, tokens: int, rows: int, *, states: Offsets | bool = False) -> Layer:
    """Draw a layer; keys have norms of at most 1, and some decays are 1, exp(-50) and 0."""
    randn = numbers(len(name))
    of, (kind, _, variant) = partial(randn, rows, tokens), name.partition(", ")
    g, beta, pair = (
        -of(HV, *((K,) * (kind == "kda"))).abs(),
        of(HV).sigmoid(),
        randn(2, rows, tokens, H, K),
    )
    g[:, 3::7], g[:, 5::11], g[:, 17:18] = 0, -50, -inf
    beta[:, 2::9], beta[:, 4::9] = 0, 1
    k = functional.normalize(of(H, K), dim=-1) * of(H, 1).tanh()
    attention = {"q": of(H, K), "k": k, "v": of(HV, V), "g": g}
    # With keys of norm 1 beta may reach 2.
    wide = {"k": k * 5} | ({} if kind == "simple_gla" else {"beta": beta * 2})
    width = int(variant.split()[0]) if kind == "causal_conv1d" else 0
    parts: dict[str, list[dict[str, Any]]] = {
        "linear_recurrence": [{"a": of(2, 3).sigmoid() * (of(2, 3) > -1), "b": of(2, 3)}],
        "simple_gla": [attention],
        **{key: [attention | {"beta": beta}] for key in ("gated_delta_rule", "kda")},
        "ssd": [{"x": of(HV, V), "dt": of(HV).abs(), "B": pair[0], "C": pair[1]}, {"A": -randn(HV).exp()}],
        "selective_scan": [{"u": of(HV), "delta": of(HV).abs(), "B": of(K), "C": of(K)}, {"A": -randn(HV, K).exp()}],
        "causal_conv1d": [{"x": of(5)}, {"weight": randn(5, width)}],
        # Variants: more tensors, and options.
        **{key: [{}, {"g_gamma": -randn(HV).abs()}] for key in ("g_gamma", "both decays")},
        "norms, scale": [wide, {}, {"use_qk_l2norm": True, "scale": 0.7}],
        "groups, all options": [
            {"B": pair[0], "C": pair[1], "z": of(HV)}, {"D": randn(HV), "delta_bias": randn(HV)}, {"delta_softplus": True},
        ],
        "all options": [{"z": of(HV, V)}, {"D": randn(HV, V), "dt_bias": randn(HV)}, {"dt_softplus": True, "dt_limit": (0.3, 1.5)}],
        "D a head": [{}, {"D": randn(HV)}],
        **{f"{width} {x}": [{}, {"bias": randn(5)}, {"activation": x}] for x in ("silu", "swish")},
    }  # fmt: skip
    more: Any = zip_longest(parts[kind], parts.get(variant, []), [{}] * 3, fillvalue={})
    layer = Layer(kind, *(x | y for x, y, _ in more))
    if variant in ("no decay", "g_gamma"):
        del layer.rows["g"]
    count = rows if isinstance(states, bool) else len(states or (0, 0)) - 1
    if states is not False and kind not in ("selective_scan", "causal_conv1d"):  # without states
        key = "initial_states" if kind == "ssd" else "initial_state"
        layer.shared[key] = randn(count, *STATES[kind])
        layer.options["output_final_state"] = True
    return layer


#: Layers with their variants; the first of each kind is the one that most tests take.
KINDS = ("linear_recurrence", "simple_gla", "gated_delta_rule", "kda", "ssd, all options")
VARIANTS = (
    *KINDS, "simple_gla, no decay", "simple_gla, g_gamma", "simple_gla, both decays",
    "simple_gla, norms, scale", "gated_delta_rule, norms, scale", "kda, norms, scale", "ssd",
    "ssd, D a head", "selective_scan", "selective_scan, groups, all options",
)  # fmt: skip


def spread(x: Tensor, heads: int = HV) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def step_of_attention(
    x: dict[str, Tensor], s: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    q, k, v = spread(x["q"]), spread(x["k"]), x["v"]
    if options.get("use_qk_l2norm"):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = x.get("g", torch.zeros(1, HV).double()) + x.get("g_gamma", 0)
    s = (g if g.ndim == 3 else g[..., None]).exp()[..., None] * s
    if "beta" in x:
        v = x["beta"][..., None] * (v - (s * k[..., None]).sum(-2))
    s = s + k[..., None] * v[:, :, None]
    return s, options.get("scale", K**-0.5) * (s * q[..., None]).sum(-2)


def step_of_ssd(x: dict[str, Tensor], s: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    u, dt = x["x"], x["dt"] + x.get("dt_bias", 0)
    dt = functional.softplus(dt) if options.get("dt_softplus") else dt
    dt = dt.clamp(*options.get("dt_limit", (0, inf)))
    s = (dt * x["A"]).exp()[..., None, None] * s
    s = s + (dt[..., None] * u)[..., None] * spread(x["B"])[:, :, None]
    y = (s * spread(x["C"])[:, :, None]).sum(-1)
    skip = x.get("D", torch.zeros(HV).double())
    y = y + (skip if skip.ndim == 2 else skip[:, None]) * u
    return s, y * functional.silu(x["z"]) if "z" in x else y


def step_of_scan(x: dict[str, Tensor], s: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    u, dt = x["u"], x["delta"] + x.get("delta_bias", 0)
    dt = functional.softplus(dt) if options.get("delta_softplus") else dt
    b, c = (spread(x[name].view(len(u), -1, K)) for name in "BC")
    s = (dt[..., None] * x["A"]).exp() * s + (dt * u)[..., None] * b
    y = (s * c).sum(-1) + x.get("D", 0) * u
    return s, y * functional.silu(x["z"]) if "z" in x else y


#: The step of each layer: state and output of a token, of its inputs and the state before.
STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linear_recurrence": lambda x, s, _: (x["a"] * s + x["b"],) * 2, "ssd": step_of_ssd, "selective_scan": step_of_scan,
    **dict.fromkeys(("simple_gla", "gated_delta_rule", "kda"), step_of_attention),
}  # fmt: skip
#: The shape of its state, of one row.
STATES = {
    "linear_recurrence": (2, 3), "ssd": (HV, V, K), "selective_scan": (HV, K),
    **dict.fromkeys(("simple_gla", "gated_delta_rule", "kda"), (HV, K, V)),
}  # fmt: skip


def by_token(layer: Layer, offsets: Offsets) -> list[Tensor]:
    """Return outputs and final states of the recurrence, one token after another.

    Of a convolution, that of each document alone by torch, which has no states.
    """
    first = next(iter(layer.rows.values()))
    rows, tokens = first.shape[:2]
    if layer.name == "causal_conv1d":
        weight, bias = layer.shared["weight"], layer.shared.get("bias")
        parts = (first[:, i:j].mT for i, j in pairwise(offsets or (0, tokens)) if i < j)
        wide = (functional.pad(x, (weight.shape[1] - 1, 0)) for x in parts)
        out = torch.cat([functional.conv1d(x, weight[:, None], bias, groups=5).mT for x in wide], 1)
        return [functional.silu(out) if "activation" in layer.options else out]
    initial = layer.shared.get("initial_state", layer.shared.get("initial_states"))
    if initial is None:
        initial = first.new_zeros(len(offsets or (0, 0)) - 1, *STATES[layer.name])
        initial = initial.expand(rows, *initial.shape[1:]) if offsets is None else initial
    outs, finals = [], []
    for number, (start, stop) in enumerate(pairwise(offsets or (0, tokens))):
        s = initial if offsets is None else initial[number : number + 1]
        for t in range(start, stop):
            token = {name: x[:, t] for name, x in layer.rows.items()}
            s, out = STEPS[layer.name]({**token, **layer.shared}, s, layer.options)
            outs.append(out)
        finals.append(s)
    return [torch.stack(outs, 1), torch.cat(finals)]


def close(actual: Tensor, expected: Tensor, what: object) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def compare(
    layer: Layer, offsets: Offsets, *layouts: LayoutSpec, rank: int,
    call: Callable[..., Any] = lambda f, **x: f(**x),
) -> None:  # fmt: skip
    """Compare outputs, states and all gradients of a layer with the recurrence, in each layout."""
    randn, whole = numbers(99), layer.mapped()
    expected = by_token(whole, offsets)[: 1 + bool(layer.options.get("output_final_state"))]
    out_grad, tokens = randn(*expected[0].shape), expected[0].shape[1]
    # Each rank has a gradient of its own for the final states, which are equal on all.
    final_grads = [[randn(*x.shape) for x in expected[1:]] for _ in range(dist.get_world_size())]
    torch.autograd.backward(expected, [out_grad, *(sum(x) for x in zip(*final_grads, strict=True))])
    for layout in layouts:
        what = (layer.name, [*layer.shared], layer.options, layout, offsets)
        cp = ContextParallel(layout=layout)
        shard = partial(cp.shard, pad=True)
        mine = layer.mapped(partial(shard, fill=torch.nan))
        padded = cp.layout_of(tokens, pad=True).padded_len > tokens
        options = {**layer.options, "cu_seqlens": offsets, "seq_len": tokens if padded else None}
        results = call(partial(getattr(cp, layer.name), **options), **mine.rows, **mine.shared)
        results = results if isinstance(results, tuple) else (results,)
        # Gradients of padding may be anything, too.
        torch.autograd.backward(results, [shard(out_grad, fill=torch.nan), *final_grads[rank]])
        likes = [shard(expected[0].detach()), *(x.detach() for x in expected[1:])]
        for result, like in zip(results, likes, strict=True):
            close(result.detach(), like, what)
        for name, x in (mine.rows | mine.shared).items():
            grad, like = (
                torch.zeros_like(y) if y.grad is None else y.grad
                for y in (x, (whole.rows | whole.shared)[name])
            )
            if name in mine.shared:
                dist.all_reduce(grad)
            close(grad, like if name in mine.shared else shard(like), (*what, name))


@pytest.mark.nightly(unless=[
    *(f"2 ranks-{name}" for name in VARIANTS), *(f"4 ranks-{name}" for name in KINDS),
    *(f"{n} ranks-{name}" for n in (1, 3) for name in ("kda", "ssd, all options")),
])  # fmt: skip
@pytest.mark.parametrize("name", VARIANTS)
@on_ranks
def test_a_split_layer_is_the_recurrence(rank: int, name: str) -> None:
    contiguous, zigzag, chunks = layouts()
    compare(drawn(name, T, B, states=True), None, contiguous, zigzag, rank=rank)
    compare(drawn(name, T, B), DOCUMENTS, zigzag, chunks, rank=rank)
    compare(drawn(name, T, 1, states=DOCUMENTS), DOCUMENTS, chunks, contiguous, rank=rank)


@pytest.mark.nightly(unless=["1 ranks-3", "2 ranks-2", "2 ranks-4", "3 ranks-0", "4 ranks-1"])
@pytest.mark.parametrize("seed", range(len(KINDS)))
@on_ranks
def test_any_documents_in_any_layout(rank: int, seed: int) -> None:
    """Any chunks, length, padding, which may hold anything, and documents, empty ones too.

    First of one token each, and longer than the chunks in which a run is computed.
    """
    size, random, kind = dist.get_world_size(), Random(seed), KINDS[seed]
    one_token, long = tuple(range(T + 1)), (0, 100, 101, 350, 480)
    compare(drawn(kind, T, 1, states=one_token), one_token, *layouts(), rank=rank)
    compare(drawn(kind, 480, 1, states=long), long, "zigzag", "contiguous", rank=rank)
    for _ in range(5):
        chunks = random.randint(1, 4)
        order = random.sample(range(size * chunks), size * chunks)
        shares = tuple(tuple(sorted(order[n::size])) for n in range(size))
        names: list[LayoutSpec] = ["contiguous", "zigzag", ChunkLayout(shares)]
        layout = random.choice(names)
        tokens = random.choice([random.randint(1, 90), 18, 19])  # ranks with nothing but padding
        offsets = (0, *sorted(random.choices(range(tokens + 1), k=random.randint(0, 6))), tokens)
        name = random.choice(VARIANTS)
        compare(drawn(name, tokens, 1, states=offsets), offsets, layout, rank=rank)
        compare(drawn(name, tokens, B), random.choice([None, offsets]), layout, rank=rank)


@pytest.mark.parametrize("name", KINDS)
@on_two_ranks
def test_a_nan_stays_in_its_document(rank: int, name: str) -> None:
    """A NaN in one document, in inputs and gradients, leaves all others as they are."""
    offsets, whole = (0, 5, 21, 26, 37, T), torch.arange(T)
    layer = drawn(name, T, 1, states=offsets)
    for layout in layouts():
        cp, results = ContextParallel(layout=layout), []
        for has_nan in (False, True):
            is_bad = (whole >= 21) & (whole < 37) & has_nan  # two documents, at cuts and inside

            def poisoned(x: Tensor, is_bad: Tensor = is_bad) -> Tensor:
                is_bad = is_bad.view(1, -1, *(1,) * (x.ndim - 2))
                return cp.shard(torch.where(is_bad, torch.nan, x))  # noqa: B023 - called at once

            mine = layer.mapped(poisoned)
            out, final = mine.of(cp, cu_seqlens=offsets)
            grad = poisoned(torch.ones(1, T, *out.shape[2:], dtype=out.dtype))
            torch.autograd.backward([out, final], [grad, torch.ones_like(final)])
            state = next(x for key, x in mine.shared.items() if key.startswith("initial"))
            results.append(([out, *(x.grad for x in mine.rows.values())], [final, state.grad]))
        mine_is_bad = cp.shard(is_bad[None])[0]
        for clean, dirty in zip(*(x[0] for x in results), strict=True):
            assert torch.equal(clean[:, ~mine_is_bad], dirty[:, ~mine_is_bad]), (layout, rank)
        assert results[1][0][0][:, mine_is_bad].isnan().all()
        for clean, dirty in zip(*(x[1] for x in results), strict=True):
            assert torch.equal(clean[[0, 1, 4]], dirty[[0, 1, 4]]), (layout, rank)
        assert results[1][1][0][[2, 3]].isnan().any()


COMPILED = [*KINDS, "selective_scan, groups, all options", "causal_conv1d, 4 silu"]


@pytest.mark.nightly(unless=["gated_delta_rule", COMPILED[-1]])
@pytest.mark.parametrize("name", COMPILED)
@on_two_ranks
def test_in_one_graph(rank: int, name: str) -> None:
    """One graph, forward and backward, serves any documents."""
    compiled: dict[Any, Any] = {}
    is_scan = "conv" not in name  # others have no states, and any layout

    def call(function: Any, **inputs: Tensor) -> Any:
        options = dict(function.keywords)
        offsets = options.pop("cu_seqlens")

        def layer(offsets: Any, **inputs: Tensor) -> Any:
            # A product before and behind: the layer is an operation among others.
            rows = {key: x * 1 for key, x in inputs.items()}
            return function.func(**rows, **options, cu_seqlens=offsets)

        key = str((function.func, options)), None if offsets is None else len(offsets)
        if key not in compiled:
            compiled[key] = torch.compile(layer, backend="aot_eager", fullgraph=True)
        is_tensor = offsets is not None and is_scan  # a convolution takes numbers
        return compiled[key](torch.tensor(offsets) if is_tensor else offsets, **inputs)

    torch._dynamo.reset()
    both: dict[str, Any] = {"rank": rank, "call": call}
    layout: LayoutSpec = "zigzag" if is_scan else "striped"
    compare(drawn(name, T, B, states=is_scan), None, layout, **both)
    compare(drawn(name, T - 7, B), None, layout, **both)
    for offsets in (DOCUMENTS, (0, 2, 9, 9, 11, 30, 44, T))[: 1 + is_scan]:
        compare(drawn(name, T, 1, states=is_scan and offsets), offsets, layout, **both)


STATES_BYTES, MAPS, BETAS = 4 * B * HV * K * V, 4 * B * HV * K * (K + V), 4 * B * HV
#: Layers, layouts, ends of documents as parts of a sequence, and bytes of each pass's gather.
GATHERED: tuple[tuple[str, LayoutSpec, tuple[float, ...] | None, list[int]], ...] = (
    ("gated_delta_rule", "zigzag", None, [2 * MAPS, 2 * STATES_BYTES]),
    ("gated_delta_rule", "contiguous", None, [MAPS, STATES_BYTES]),
    ("simple_gla", "zigzag", None, [2 * (BETAS + STATES_BYTES), 2 * STATES_BYTES]),
    ("kda", "zigzag", (0, 1 / 4, 1 / 2, 1), [2 * MAPS, 2 * STATES_BYTES]),
    ("simple_gla", "contiguous", (0, 1 / 4, 1 / 2, 3 / 4, 1), []),  # none crosses from rank to rank
    # A rank has the end of a document and the beginning of another: one run a pass.
    ("simple_gla", "contiguous", (0, 1 / 3, 2 / 3, 1), [BETAS + STATES_BYTES, STATES_BYTES]),
)  # fmt: skip


@pytest.mark.parametrize("tokens", [48, 480])
@on_four_ranks
def test_one_gather_a_pass_carries_what_the_page_says_whatever_the_length(
    rank: int, tokens: int
) -> None:
    for name, layout, ends, expected in GATHERED:
        cp = ContextParallel(layout=layout)
        mine = drawn(name, tokens, B).mapped(lambda x: cp.shard(x).float())  # noqa: B023 - called at once
        offsets = ends and tuple(round(x * tokens) for x in ends)
        if rank == 0:  # one rank may ask: nothing is sent, and no call is counted
            with Sent() as asked:
                text = cp.explain_recurrent(name, **mine.rows, cu_seqlens=offsets)
            assert (asked.gathered, asked.sent) == ([], -2048)
            assert f"{name} over 4 ranks, {layout}" in text and "kernel eager" in text
            told = re.findall(r"(?:=|states,) ([\d,]+) bytes", text)
            assert [int(x.replace(",", "")) for x in told] == (expected or [0, 0]), text
        with Sent() as forward:
            out = mine.of(cp, cu_seqlens=offsets)
        with Sent() as backward:
            out.sum().backward()
        assert forward.sent == backward.sent == 0  # but the header of each pass
        assert forward.gathered + backward.gathered == expected, (name, layout)


@pytest.mark.parametrize("name", KINDS)
@on_two_ranks
def test_second_derivatives_and_striped_tokens_are_refused(name: str) -> None:
    cp = ContextParallel()
    mine = drawn(name, T, B).mapped(cp.shard)
    out, leaves = mine.of(cp), [*mine.rows.values()]
    loss, grad = out.square().sum(), torch.autograd.grad
    refused("no second derivative", grad, loss, leaves, error=UnsupportedError, create_graph=True)
    # Nothing was sent: the group is as it was.
    dist.barrier()
    grad(loss, leaves)
    refused("relayout", mine.of, ContextParallel(layout="striped"), error=UnsupportedError)


@on_two_ranks
def test_precisions() -> None:
    """16 bits: outputs in the values' dtype, states in float32, as close as inputs allow."""
    cp = ContextParallel()
    for dtype, name in product(
        (torch.bfloat16, torch.float16, torch.float32), ("gated_delta_rule", "ssd, all options")
    ):
        layer = drawn(name, T, B, states=True).mapped(lambda x: x.to(dtype), Tensor.float)  # noqa: B023 - called at once
        expected, final = by_token(layer.mapped(Tensor.double, Tensor.double), None)
        mine = layer.mapped(cp.shard)
        out, states = mine.of(cp)
        assert (out.dtype, states.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(states.double(), final, rtol=1e-5, atol=1e-5)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(
            out.double(), cp.shard(expected), rtol=rounding, atol=1e-5 + rounding / 16
        )
        # Splitting costs no digits: the error is that of one rank.
        with cp.whole():
            alone, _ = layer.of(cp)
        error, of_one = (
            (x.double() - like).detach().square().mean()
            for x, like in ((out, cp.shard(expected)), (alone, expected))
        )
        dist.all_reduce(error)
        assert error / cp.cp_size <= 1.1**2 * of_one


def test_products_are_ieee_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the settings themselves: not every CPU multiplies otherwise when it is told to."""
    seen, right, backend = [], LinearAttention.parts, torch.backends.mkldnn

    def parts(kernel: LinearAttention, *inputs: Tensor) -> Parts:
        precision = getattr(backend, "matmul").fp32_precision  # noqa: B009 - it has no types
        seen.append((precision, torch.is_autocast_enabled("cpu")))
        return right(kernel, *inputs)

    monkeypatch.setattr(LinearAttention, "parts", parts)
    layer = drawn("simple_gla", 8, B).mapped()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer.of(ContextParallel()).sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [("ieee", False)] * 2


@pytest.mark.nightly(unless=["1 ranks-4", "2 ranks-4", "3 ranks-17", "4 ranks-4", "4 ranks-1"])
@pytest.mark.parametrize("width", [1, 4, 17])  # 17 is wider than some ranks' parts
@on_ranks
def test_a_split_convolution_is_that_of_each_document(rank: int, width: int) -> None:
    cut = T // max(dist.get_world_size(), 2)
    cases: tuple[tuple[int, Offsets, str], ...] = (
        (T, None, ""), (T, DOCUMENTS, " silu"), (T - 7, (0, 20, 21, T - 7), " swish"),
        (T, (0, cut - 1, cut, cut + 1, T), ""),
    )  # fmt: skip
    for tokens, offsets, activation in cases:
        layer = drawn(f"causal_conv1d, {width}{activation}", tokens, B)
        compare(layer, offsets, *layouts(), "striped", rank=rank)
    cp, layer = ContextParallel(), drawn(f"causal_conv1d, {width}", T, B)
    with cp.whole():
        close(layer.of(cp), by_token(layer, None)[0], "whole")


def _attention(name: str = "gated_delta_rule", **changes: Any) -> Callable[[ContextParallel], Any]:
    arguments = {**drawn("gated_delta_rule", 8, B).rows, **changes}
    return lambda cp: getattr(cp, name)(**arguments)


def _ones(name: str, **shapes: tuple[int, ...]) -> Callable[[ContextParallel], Any]:
    arguments = {key: torch.ones(shape) for key, shape in shapes.items()}
    return lambda cp: getattr(cp, name)(**arguments)


#: What does not fit together; wrong values of each argument are in test_bad_input.py.
BAD: dict[str, tuple[Callable[[ContextParallel], Any], str]] = {
    "a rank's tokens": (_attention(k=torch.ones(B, 7, H, K)), "k must be"),
    "heads": (_ones("simple_gla", q=(B, 8, 2, K), k=(B, 8, 2, K), v=(B, 8, 3, K)), "HV, the 3 heads .* must be a multiple of H"),
    "a decay a channel": (_attention(g=torch.ones(B, 8, HV, K)), "g must be"),
    "a decay a head": (_attention("kda"), "g must be"),
    "states": (_attention(initial_state=torch.zeros(1, HV, K, V)), "state for each row"),
    "documents' states": (_attention(output_final_state=True, cu_seqlens=(0, 8)), "B must be 1"),
    "factors": (_ones("linear_recurrence", a=(1, 8, 2), b=(1, 8, 3)), "b must be"),
    "channels": (_ones("causal_conv1d", x=(1, 8, 2), weight=(3, 3)), "weight must be"),
    "asked of a layer": (lambda cp: cp.explain_recurrent("attention", torch.zeros(1, 8, 6)), "unknown layer 'attention'"),
    "asked of weights": (lambda cp: cp.explain_recurrent("causal_conv1d", *[torch.zeros(1, 8, 6)] * 2), "weight must be"),
    "no context": (lambda _: recurrent.linear_recurrence(None, **drawn("linear_recurrence", 8, B).rows), "cp must be a ContextParallel"),  # type: ignore[call-overload]  # wrong
}  # fmt: skip


def test_arguments_that_do_not_fit_are_refused() -> None:
    cp = ContextParallel()
    for call, message in BAD.values():
        refused(message, call, cp)
    of_weights = torch.zeros(1, 8, 6), torch.zeros(6, 4)
    assert "causal_conv1d over 1 ranks" in cp.explain_recurrent("causal_conv1d", *of_weights)


# Calls that are checked.


def _changed(cls: Any, name: str, change: Callable[[Any], Any], n: int | None = None) -> Any:
    """Patch a method so that its result is changed, or its argument of this number."""
    right = getattr(cls, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if n is None:
            return change(right(*args, **kwargs))
        return right(*args[:n], change(args[n]), *args[n + 1 :], **kwargs)

    return patch.object(cls, name, wrong)


def _last_head(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :, :-1], x[:, :, :, -1:] * 1.01], 3)


def _sent_twice(right: Any = RecurrentCall._gather) -> Any:
    return patch.object(RecurrentCall, "_gather", lambda *args: (right(*args), right(*args))[1])


def _one_gradient(n: int) -> Any:
    """Patch the gradient of one input."""

    def scale(x: Any) -> Any:
        entries, grads = x
        return entries, tuple(y * 1.01 if m == n else y for m, y in enumerate(grads))

    return _changed(EagerRuns, "input_grads", scale)


def _documents_joined() -> Any:
    def wrong(layout: Any, cu: Any, *rest: Any) -> Any:
        return chunks_of(layout, cu and (0, 0, 0, T), *rest)

    return patch.object(calls, "chunks_of", wrong)


#: Each fault with the pass that must be found wrong, and words of its message.
FAULTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "one head of the outputs": (lambda: _changed(LinearAttention, "read", _last_head), "forward", "out["),
    "the fold drops transitions": (lambda: patch.object(maps, "apply", lambda _, state, **__: state), "forward", "the state before"),
    "the fold adds from another slot": (lambda: _changed(RecurrentCall, "_fold", lambda x: x.flip(0), 2), "forward", "the state before"),
    "states go on through documents": (_documents_joined, "forward", ""),
    "final states": (lambda: _changed(RecurrentCall, "_fold", lambda x: (x[0], x[1] * 1.001)), "forward", "final state"),
    "more is sent": (_sent_twice, "forward", "bytes were sent, and the states that travel have"),
    "gradients of states, back": (lambda: patch.object(maps, "apply_adjoint", lambda _, grad, **__: grad * 0.99), "backward", "the gradient of"),
    "one rank's gradient of final states": (lambda: _changed(RecurrentCall, "_fold_back", lambda x: x / 2, 6), "backward", "of the final state"),
    **{f"d{name}": (partial(_one_gradient, n), "backward", f"d{name}[") for n, name in enumerate(("q", "k", "v", "g", "beta"))},
}  # fmt: skip


def checked(rank: int, documents: Offsets, *, compiled: bool = False) -> None:
    """Run both passes of a delta rule with initial and final states."""
    cp, generator = ContextParallel(), torch.Generator().manual_seed(rank)
    rows, name = 2 if documents is None else 1, "gated_delta_rule, norms, scale"
    layer = drawn(name, T, rows, states=documents or True)
    layer.rows["g"] = layer.rows["g"].clamp(min=-1) / 8
    call: Any = layer.mapped(lambda x: cp.shard(x).float(), Tensor.float).of
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = call(cp, cu_seqlens=documents)
    torch.autograd.backward(results, [torch.randn(y.shape, generator=generator) for y in results])


def tripped(rank: int, fault: str, compiled: bool) -> list[str]:
    """Return the first error of some calls under a fault, and make right calls after it."""
    messages = []
    with ring_torch.check():
        for documents in (None, (0, 11, 30, T)) * (1 if compiled else 4):
            with FAULTS[fault][0]() if fault else nullcontext():
                try:
                    checked(rank, documents, compiled=compiled)
                except WrongResultError as error:
                    messages.append(str(error))
                    break
        checked(rank, None)
    return messages


COMPILED_FAULTS = ("", "the fold drops transitions", "dbeta")


@pytest.mark.parametrize(
    ("fault", "compiled"), [*product(FAULTS, [False]), *product(COMPILED_FAULTS, [True])]
)
def test_a_fault_trips(fault: str, compiled: bool, pools: dict[int, LocalRanks]) -> None:
    by_rank = pools[2].run(tripped, fault, compiled)
    assert by_rank[0] == by_rank[1], "all ranks raise the same"
    assert bool(by_rank[0]) == bool(fault), "a document, row or head of the eight shows it"
    for first in by_rank[0][:1]:
        _, order, words = FAULTS[fault]
        assert f"of gated_delta_rule ({order}) is wrong. rank " in first and words in first


@on_two_ranks
def test_rounding_and_nan_are_no_faults() -> None:
    """A NaN spreads among the tokens of its chunk, also to those before it."""
    cp, generator = ContextParallel(), torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, 96, 2, 8, generator=generator).bfloat16()
    k = functional.normalize(k, dim=-1)
    g, a = -torch.rand(2, 96, 2, generator=generator), -torch.rand(2, generator=generator)
    with_nan = torch.randn(1, 64, 2, 4)
    with_nan[:, 13] = torch.nan
    layers: list[tuple[str, list[Any]]] = [
        ("simple_gla", [q, k, v]), ("kda", [q, k, v, g[..., None].expand(v.shape), g.exp()]),
        ("ssd", [v, -g, a, q, k]), ("linear_recurrence", [q.sigmoid(), v]), ("simple_gla", [with_nan] * 3),
        ("selective_scan", [v[..., 0], -g, a[:, None].expand(2, 8), q[:, :, 0], k[:, :, 0]]),
    ]  # fmt: skip
    with cp.whole():  # one rank is checked, too
        assert "1 ranks" in tripped(0, "one head of the outputs", False)[0]
    with ring_torch.check():
        for name, inputs in layers:
            own = [cp.shard(x) if x.ndim > 2 else x for x in inputs]
            own = [x.detach().clone().requires_grad_() for x in own]
            for _ in range(4):
                out = getattr(cp, name)(*own)
                out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
