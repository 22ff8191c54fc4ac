"""Recurrent layers split over the sequence, compared with the recurrence token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, on_two_ranks
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import ChunkLayout, LayoutSpec, RankMismatchError, UnsupportedError, WrongResultError
from ring_torch import ContextParallel, recurrent
from ring_torch.local import LocalRanks
from ring_torch.recurrent import calls, maps
from ring_torch.recurrent.calls import RecurrentCall
from ring_torch.recurrent.chunks import chunks_of
from ring_torch.recurrent.kernels import LinearAttention, Parts
from ring_torch.recurrent.runs import EagerRuns

T = 48
CHUNKS = {
    1: ChunkLayout(((0, 1, 2),)), 2: ChunkLayout(((0, 1, 5), (2, 3, 4))),
    3: ChunkLayout(((0, 5), (1, 3), (2, 4))), 4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
    8: ChunkLayout(tuple((n, 8 + n, 23 - n) for n in range(8))),
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)
B, H, HV, K, V = 2, 2, 4, 3, 2

Offsets = tuple[int, ...] | None


RANKS = [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.nightly)]


@pytest.fixture(params=RANKS, ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


def layouts(size: int) -> list[LayoutSpec]:
    return ["contiguous", "zigzag", CHUNKS[size]]


@dataclass
class Layer:
    """A layer with whole inputs: those that are sharded, and those that every rank holds."""

    name: str
    rows: dict[str, Any]  # tensors
    shared: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> Layer:
        rows, shared = (
            {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
            for tensors in (self.rows, self.shared)
        )
        return replace(self, rows=rows, shared=shared)


def numbers(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.randn, generator=generator, dtype=torch.float64)


def drawn(name: str, tokens: int, rows: int, *, states: Offsets | bool = False) -> Layer:
    """Draw a layer; keys have norms of at most 1, and some decays are 1, exp(-50) and 0."""
    randn = numbers(len(name))
    kind, _, variant = name.partition(", ")
    heads = (rows, tokens, HV)
    g = -randn(*heads, *((K,) if kind == "kda" else ())).abs()
    g[:, 3::7], g[:, 5::11], g[:, 17:18] = 0, -50, -inf
    k = functional.normalize(randn(rows, tokens, H, K), dim=-1) * randn(rows, tokens, H, 1).tanh()
    beta = randn(*heads).sigmoid()
    beta[:, 2::9], beta[:, 4::9] = 0, 1
    attention = {"q": randn(rows, tokens, H, K), "k": k, "v": randn(*heads, V), "g": g}
    count = rows if isinstance(states, bool) else len(states or (0, 0)) - 1
    layer = {
        "linear_recurrence": lambda: Layer(kind, {
            "a": randn(rows, tokens, 2, 3).sigmoid() * (randn(rows, tokens, 2, 3) > -1),
            "b": randn(rows, tokens, 2, 3),
        }),
        "simple_gla": lambda: Layer(kind, dict(attention)),
        "gated_delta_rule": lambda: Layer(kind, {**attention, "beta": beta}),
        "kda": lambda: Layer(kind, {**attention, "beta": beta}),
        "ssd": lambda: Layer(kind, {
            "x": randn(*heads, V), "dt": randn(*heads).abs(), "B": randn(rows, tokens, H, K),
            "C": randn(rows, tokens, H, K),
        }, {"A": -randn(HV).exp()}),
        "selective_scan": lambda: Layer(kind, {
            "u": randn(rows, tokens, HV), "delta": randn(rows, tokens, HV).abs(),
            "B": randn(rows, tokens, K), "C": randn(rows, tokens, K),
        }, {"A": -randn(HV, K).exp()}),
        "causal_conv1d": lambda: Layer(kind, {"x": randn(rows, tokens, 5)}, {
            "weight": randn(5, int(variant.split()[0]))
        }),
    }[kind]()  # fmt: skip
    if variant == "no decay":
        del layer.rows["g"]
    elif variant == "g_gamma":
        del layer.rows["g"]
        layer.shared["g_gamma"] = -randn(HV).abs()
    elif variant == "both decays":
        layer.shared["g_gamma"] = -randn(HV).abs()
    elif variant == "norms, scale":
        layer.options |= {"use_qk_l2norm": True, "scale": 0.7}
        layer.rows["k"] = layer.rows["k"] * 5
        if "beta" in layer.rows:  # with keys of norm 1 it may reach 2
            layer.rows["beta"] = layer.rows["beta"] * 2
    elif variant == "groups, all options":
        layer.rows |= {"B": randn(rows, tokens, H, K), "C": randn(rows, tokens, H, K)}
        layer.rows["z"] = randn(rows, tokens, HV)
        layer.shared |= {"D": randn(HV), "delta_bias": randn(HV)}
        layer.options["delta_softplus"] = True
    elif variant == "all options":
        layer.rows["z"] = randn(*heads, V)
        layer.shared |= {"D": randn(HV, V), "dt_bias": randn(HV)}
        layer.options |= {"dt_softplus": True, "dt_limit": (0.3, 1.5)}
    elif variant == "D a head":
        layer.shared["D"] = randn(HV)
    elif variant.endswith(("silu", "swish")):
        layer.shared["bias"] = randn(5)
        layer.options["activation"] = variant.split()[1]
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


def step_of_recurrence(x: dict[str, Tensor], s: Any, _: dict[str, Any]) -> tuple[Tensor, Tensor]:
    s = x["a"] * s + x["b"]
    return s, s


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
    "linear_recurrence": step_of_recurrence, "ssd": step_of_ssd, "selective_scan": step_of_scan,
    **dict.fromkeys(("simple_gla", "gated_delta_rule", "kda"), step_of_attention),
}  # fmt: skip
#: The shape of its state, of one row.
STATES = {
    "linear_recurrence": (2, 3), "ssd": (HV, V, K), "selective_scan": (HV, K),
    **dict.fromkeys(("simple_gla", "gated_delta_rule", "kda"), (HV, K, V)),
}  # fmt: skip


def by_token(layer: Layer, offsets: Offsets) -> tuple[Tensor, Tensor | None]:
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
        return (functional.silu(out) if "activation" in layer.options else out), None
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
    return torch.stack(outs, 1), torch.cat(finals)


def close(actual: Tensor, expected: Tensor, what: object) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def gradients(ends: list[tuple[Tensor, Any]], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    outs, grads = zip(*ends, strict=True)
    return torch.autograd.grad(outs, leaves, grads, materialize_grads=True)


def compare(
    layer: Layer, layout: LayoutSpec, offsets: Offsets, *, rank: int,
    call: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Compare outputs, states and all gradients of a layer with the recurrence."""
    what = (layer.name, [*layer.shared], layer.options, layout, offsets)
    cp = ContextParallel(layout=layout)
    randn = numbers(99)
    whole = layer.leaves()
    out, final = by_token(whole, offsets)
    out_grad = randn(*out.shape)
    # Each rank has a gradient of its own for the final states, which are equal on all.
    final_grads = [] if final is None else [randn(*final.shape) for _ in range(cp.cp_size)]
    wants_final = bool(layer.options.get("output_final_state"))
    leaves = [*whole.rows.values(), *whole.shared.values()]
    ends: list[tuple[Any, Any]] = [
        (out, out_grad),
        *([(final, sum(final_grads))] if wants_final else []),
    ]
    expected = gradients(ends, leaves)

    tokens = out.shape[1]
    mine = replace(layer, rows={
        name: cp.shard(x, pad=True, fill=torch.nan) for name, x in layer.rows.items()
    }).leaves()  # fmt: skip
    padded = cp.layout_of(tokens, pad=True).padded_len > tokens
    options = {**layer.options, "cu_seqlens": offsets, "seq_len": tokens if padded else None}
    function = partial(getattr(cp, layer.name), **options)
    results = (call or (lambda f, **x: f(**x)))(function, **mine.rows, **mine.shared)
    actual_out, actual_final = results if wants_final else (results, None)
    shard = partial(cp.shard, pad=True)
    close(actual_out, shard(out.detach()), what)
    # Gradients of padding may be anything, too.
    my_grad = cp.shard(out_grad, pad=True, fill=torch.nan)
    my_ends = [(actual_out, my_grad)]
    if actual_final is not None and final is not None:
        close(actual_final, final.detach(), what)
        my_ends.append((actual_final, final_grads[rank]))
    my_leaves = [*mine.rows.values(), *mine.shared.values()]
    grads = gradients(my_ends, my_leaves)
    names = [*mine.rows, *mine.shared]
    for name, grad, like in zip(names, grads, expected, strict=True):
        total = grad
        if name in mine.shared:
            if cp.cp_size > 1:
                dist.all_reduce(total)
        else:
            like = shard(like)  # noqa: PLW2901 - this rank's part
        close(total, like, (*what, name))


@pytest.mark.nightly(
    unless=[
        *(f"2 ranks-{name}" for name in VARIANTS),
        *(f"4 ranks-{name}" for name in KINDS),
        *(f"{n} ranks-{name}" for n in (1, 3) for name in ("kda", "ssd, all options")),
    ]
)
@pytest.mark.parametrize("name", VARIANTS)
@on_ranks
def test_a_split_layer_is_the_recurrence(rank: int, name: str) -> None:
    size = dist.get_world_size()
    for layout in layouts(size):
        compare(drawn(name, T, B), layout, None, rank=rank)
        compare(drawn(name, T, B, states=True), layout, None, rank=rank)
        compare(drawn(name, T, B), layout, DOCUMENTS, rank=rank)
        compare(drawn(name, T, 1, states=DOCUMENTS), layout, DOCUMENTS, rank=rank)


def _cuts(rank: int) -> None:
    """Let documents end at every offset around a cut between ranks, and runs be short."""
    for layout in layouts(2):
        run = ContextParallel(layout=layout).layout_of(T).run_length
        for at in range(max(1, run - 3), min(run + 4, T)):
            for offsets in ((0, at, T), (0, at, at + 1, T)):
                compare(drawn("gated_delta_rule", T, 1, states=offsets), layout, offsets, rank=rank)


def _one_token_documents(rank: int, name: str) -> None:
    for layout in layouts(2):
        offsets = tuple(range(T + 1))
        compare(drawn(name, T, 1, states=offsets), layout, offsets, rank=rank)


@pytest.mark.nightly(
    unless=["4 ranks-linear_recurrence", "4 ranks-gated_delta_rule", "4 ranks-ssd, all options"]
)
@pytest.mark.parametrize("name", [*KINDS, "selective_scan, groups, all options"])
@on_ranks
def test_padding_may_hold_anything(rank: int, name: str) -> None:
    size = dist.get_world_size()
    for layout in layouts(size):
        for tokens in (T - 7, 19, 18):  # ranks with little, and with nothing but padding
            compare(drawn(name, tokens, B, states=True), layout, None, rank=rank)
            offsets = (0, 3, 11, tokens)
            compare(drawn(name, tokens, 1, states=offsets), layout, offsets, rank=rank)


@pytest.mark.nightly(unless=["3 ranks-0"])
@pytest.mark.parametrize("seed", range(4))
@on_ranks
def test_any_documents_in_any_layout(rank: int, seed: int) -> None:
    """Any chunks, length, padding and documents, empty ones too."""
    size = dist.get_world_size()
    random = Random(seed)
    for _ in range(6):
        chunks = random.randint(1, 4)
        order = random.sample(range(size * chunks), size * chunks)
        shares = tuple(tuple(sorted(order[n::size])) for n in range(size))
        names: list[LayoutSpec] = ["contiguous", "zigzag", ChunkLayout(shares)]
        layout = random.choice(names)
        tokens = random.randint(1, 90)
        offsets = (0, *sorted(random.choices(range(tokens + 1), k=random.randint(0, 6))), tokens)
        name = random.choice(VARIANTS)
        compare(drawn(name, tokens, 1, states=offsets), layout, offsets, rank=rank)
        compare(drawn(name, tokens, B), layout, random.choice([None, offsets]), rank=rank)


def _long(rank: int, name: str) -> None:
    """Many chunks a run, and documents of one."""
    compare(drawn(name, 480, 1, states=True), "zigzag", None, rank=rank)
    offsets = (0, 100, 101, 350, 480)
    compare(drawn(name, 480, 1, states=offsets), "contiguous", offsets, rank=rank)


def _nan(rank: int, name: str) -> None:
    """A NaN in one document, in inputs and gradients, leaves all others as they are."""
    offsets = (0, 5, 21, 26, 37, T)
    for layout in layouts(2):
        cp = ContextParallel(layout=layout)
        results = []
        for has_nan in (False, True):
            layer = drawn(name, T, 1, states=offsets)
            whole = torch.arange(T)
            is_bad = (whole >= 21) & (whole < 37) & has_nan  # two documents, at cuts and inside
            rows = {
                key: torch.where(is_bad.view(1, -1, *(1,) * (x.ndim - 2)), torch.nan, x)
                for key, x in layer.rows.items()
            }
            mine = replace(layer, rows={key: cp.shard(x) for key, x in rows.items()}).leaves()
            out, final = getattr(cp, name.partition(",")[0])(
                **mine.rows, **mine.shared, **layer.options, cu_seqlens=offsets
            )
            weight = cp.shard(torch.where(is_bad, torch.nan, 1.0)[None])
            loss = (out * weight.view(1, -1, *(1,) * (out.ndim - 2))).sum() + final.sum()
            leaves = [*mine.rows.values(), *mine.shared.values()][: len(mine.rows)]
            state = next(x for key, x in mine.shared.items() if key.startswith("initial"))
            *grads, state_grad = torch.autograd.grad(loss, [*leaves, state])
            results.append(([out, *grads], [final, state_grad]))
        mine_is_bad = cp.shard(is_bad[None])[0]
        for clean, dirty in zip(*(x[0] for x in results), strict=True):
            assert torch.equal(clean[:, ~mine_is_bad], dirty[:, ~mine_is_bad]), (layout, rank)
        assert results[1][0][0][:, mine_is_bad].isnan().all()
        for clean, dirty in zip(*(x[1] for x in results), strict=True):
            assert torch.equal(clean[[0, 1, 4]], dirty[[0, 1, 4]]), (layout, rank)
        assert results[1][1][0][[2, 3]].isnan().any()


def _checkpointed(rank: int, reentrant: bool) -> None:
    def call(function: Any, **inputs: Tensor) -> Any:
        names, tensors = [*inputs], [*inputs.values()]
        return checkpoint(
            lambda *x: function(**dict(zip(names, x, strict=True))), *tensors,
            use_reentrant=reentrant,
        )  # fmt: skip

    if not reentrant:  # reentrant checkpoints run in a backward, not in torch.autograd.grad
        for name in KINDS:
            compare(drawn(name, T, 1, states=DOCUMENTS), "zigzag", DOCUMENTS, rank=rank, call=call)
        return
    cp = ContextParallel()
    layer = drawn("gated_delta_rule", T, B)
    layer = replace(layer, rows={key: cp.shard(x) for key, x in layer.rows.items()})
    grads = []
    for run in (lambda f, **x: f(**x), call):
        mine = layer.leaves()
        out = run(cp.gated_delta_rule, **mine.rows)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        grads.append([x.grad for x in mine.rows.values()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


def _compiled(rank: int, name: str) -> None:
    """One graph, forward and backward, serves any documents."""
    torch._dynamo.reset()
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

    both: dict[str, Any] = {"rank": rank, "call": call}
    for layout in layouts(2)[1:2] if is_scan else ("zigzag", "striped"):
        compiled.clear()
        compare(drawn(name, T, B, states=is_scan), layout, None, **both)
        compare(drawn(name, T - 7, B), layout, None, **both)
        for offsets in (DOCUMENTS, (0, 2, 9, 9, 11, 30, 44, T)):
            compare(drawn(name, T, 1, states=is_scan and offsets), layout, offsets, **both)


class Collectives(TorchDispatchMode):
    """Dispatch mode that keeps the bytes of each all-gather, and counts other messages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the base has no types
        self.gathered: list[int] = []
        self.sends = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "allgather" in name:
            self.gathered.append(args[1].nbytes)
        self.sends += name == "c10d::send"
        return func(*args, **(kwargs or {}))


def _bytes(rank: int, tokens: int) -> list[list[int]]:
    """Return the bytes of each pass's gathers, of several calls."""
    gathered = []
    calls: list[tuple[str, LayoutSpec, Offsets]] = [
        ("gated_delta_rule", "zigzag", None), ("gated_delta_rule", "contiguous", None),
        ("simple_gla", "zigzag", None), ("kda", "zigzag", (0, tokens // 4, tokens // 2, tokens)),
        ("simple_gla", "contiguous", (0, tokens // 4, tokens // 2, 3 * tokens // 4, tokens)),
        # A rank has the end of a document and the beginning of another: one run a pass.
        ("simple_gla", "contiguous", (0, tokens // 3, 2 * tokens // 3, tokens)),
    ]  # fmt: skip
    for name, layout, offsets in calls:
        cp = ContextParallel(layout=layout)
        layer = drawn(name, tokens, B)
        rows = {key: cp.shard(x).float() for key, x in layer.rows.items()}
        mine = replace(layer, rows=rows).leaves()
        told: list[int] = []
        if rank == 0:  # one rank may ask: nothing is sent, and no call is counted
            with Collectives() as asked:
                text = cp.explain_recurrent(name, **mine.rows, cu_seqlens=offsets)
            assert asked.gathered == [] and asked.sends == 0
            assert f"{name} over 4 ranks, {layout}" in text and "kernel eager" in text
            told = [
                int(x.replace(",", "")) for x in re.findall(r"(?:=|states,) ([\d,]+) bytes", text)
            ]
        with Collectives() as forward:
            out = getattr(cp, name)(**mine.rows, cu_seqlens=offsets)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sends == backward.sends == 1  # the header of each pass
        gathered.append(forward.gathered + backward.gathered)
        if rank == 0:
            assert told == (gathered[-1] or [0, 0]), text
    return gathered


def test_a_convolution_tells_what_it_sends() -> None:
    cp, x, weight = ContextParallel(), torch.zeros(1, 8, 6), torch.zeros(6, 4)
    assert "causal_conv1d over 1 ranks" in cp.explain_recurrent("causal_conv1d", x, weight)
    with pytest.raises(ValueError, match="unknown layer 'attention'"):
        cp.explain_recurrent("attention", x)
    with pytest.raises(ValueError, match="weight must be"):
        cp.explain_recurrent("causal_conv1d", x, x)


@pytest.mark.parametrize("tokens", [48, 480])
def test_one_gather_a_pass_carries_what_the_page_says_whatever_the_length(
    pools: dict[int, LocalRanks], tokens: int
) -> None:
    states, floats = B * HV * K * V, 4
    maps = B * HV * K * (K + V)
    for gathered in pools[4].run(_bytes, tokens):
        assert gathered == [
            [floats * 2 * maps, floats * 2 * states],
            [floats * maps, floats * states],
            [floats * 2 * (B * HV + states), floats * 2 * states],
            [floats * 2 * maps, floats * 2 * states],
            [],  # no document crosses from rank to rank
            [floats * (B * HV + states), floats * states],
        ]


#: What differs on rank 1: changes of its tensors and options, and what the error says of it.
DIFFERENCES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "documents": (lambda _: {"cu_seqlens": (0, 8, T)}, "cu_seqlens is"),
    "scale": (lambda _: {"scale": 0.5}, "kernel is"),
    "final": (lambda _: {"output_final_state": True}, "output_final_state is"),
    "gradients": (lambda x: {"v": x["v"].requires_grad_()}, "needs_grad is"),
    "dtype": (lambda x: {"g": x["g"].float()}, "g is"),
    "heads": (lambda x: {name: x[name][:, :, :2] for name in "vg"}, "v is"),
    "layer": (lambda _: {"use_qk_l2norm": True}, "kernel is"),
}  # fmt: skip


@pytest.mark.nightly(unless=["documents", "final"])
@pytest.mark.parametrize("change", DIFFERENCES)
@on_two_ranks
def test_ranks_that_disagree_are_told(rank: int, change: str) -> None:
    group: Any = dist.new_group()
    cp, (changed, message) = ContextParallel(group), DIFFERENCES[change]
    own: dict[str, Any] = {key: cp.shard(x) for key, x in drawn("simple_gla", T, 1).rows.items()}
    own |= {"cu_seqlens": (0, 7, T)} | (changed(own) if rank == 1 else {})
    with pytest.raises(RankMismatchError, match=message):
        cp.simple_gla(**own)


def _second_derivative(_: int, name: str) -> None:
    cp = ContextParallel()
    layer = drawn(name, T, B)
    mine = replace(layer, rows={key: cp.shard(x) for key, x in layer.rows.items()}).leaves()
    out = getattr(cp, name.partition(",")[0])(**mine.rows, **mine.shared, **layer.options)
    leaves = [*mine.rows.values()]
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    # Nothing was sent: the group is as it was.
    dist.barrier()
    torch.autograd.grad(out.square().sum(), leaves)


def _precisions(rank: int) -> None:
    """16 bits: outputs in the values' dtype, states in float32, as close as inputs allow."""
    cp = ContextParallel()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name in ("gated_delta_rule", "ssd, all options"):
            layer = drawn(name, T, B, states=True)
            layer.rows = {key: x.to(dtype) for key, x in layer.rows.items()}
            layer.shared = {key: x.float() for key, x in layer.shared.items()}
            wide = replace(
                layer, rows={key: x.double() for key, x in layer.rows.items()},
                shared={key: x.double() for key, x in layer.shared.items()},
            )  # fmt: skip
            expected, final = by_token(wide, None)
            rows = {key: cp.shard(x) for key, x in layer.rows.items()}
            function = partial(getattr(cp, layer.name), **rows, **layer.shared, **layer.options)
            out, states = function()
            assert out.dtype == dtype
            assert states.dtype == torch.float32
            torch.testing.assert_close(states.double(), final, rtol=1e-5, atol=1e-5)
            rounding = torch.finfo(dtype).eps
            torch.testing.assert_close(
                out.double(), cp.shard(expected), rtol=rounding, atol=1e-5 + rounding / 16
            )
            # Splitting costs no digits: the error is that of one rank.
            with cp.whole():
                alone, _ = getattr(cp, layer.name)(**layer.rows, **layer.shared, **layer.options)
            errors = [
                (x.double() - like).square().mean()
                for x, like in ((out, cp.shard(expected)), (alone, expected))
            ]
            dist.all_reduce(errors[0])
            assert errors[0] / cp.cp_size <= 1.1**2 * errors[1]
            # Neither autocast nor torch's settings change what is computed.
            torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", torch.bfloat16):
                for same, plain in zip(function(), (out, states), strict=True):
                    assert torch.equal(same, plain)
            assert torch.get_float32_matmul_precision() == "medium"
            torch.set_float32_matmul_precision("highest")
    assert rank in (0, 1)


def test_products_are_ieee_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the settings themselves: not every CPU multiplies otherwise when it is told to."""
    seen, right, backend = [], LinearAttention.parts, torch.backends.mkldnn

    def parts(kernel: LinearAttention, *inputs: Tensor) -> Parts:
        precision = getattr(backend, "matmul").fp32_precision  # noqa: B009 - it has no types
        seen.append((precision, torch.is_autocast_enabled("cpu")))
        return right(kernel, *inputs)

    monkeypatch.setattr(LinearAttention, "parts", parts)
    rows = drawn("simple_gla", 8, B).leaves().rows
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            ContextParallel().simple_gla(**rows).sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [("ieee", False)] * 2


def _whole(_: int) -> None:
    cp = ContextParallel()
    layer = drawn("gated_delta_rule", T, B)
    rows: dict[str, Any] = {key: cp.shard(x) for key, x in layer.rows.items()}
    out = cp.gated_delta_rule(**rows)
    convolution = drawn("causal_conv1d, 3", T, B)
    with cp.whole():
        close(out, cp._split.shard(cp.gated_delta_rule(**layer.rows)), "delta rule")
        own = cp.causal_conv1d(**convolution.rows, **convolution.shared)
        close(own, by_token(convolution, None)[0], "convolution")


@pytest.mark.nightly(unless=["1 ranks-4", "2 ranks-4", "3 ranks-17", "4 ranks-4", "4 ranks-1"])
@pytest.mark.parametrize("width", [1, 4, 17])  # 17 is wider than some ranks' parts
@on_ranks
def test_a_split_convolution_is_that_of_each_document(rank: int, width: int) -> None:
    size = dist.get_world_size()
    cut = T // max(size, 2)
    cases: tuple[tuple[int, Offsets, str], ...] = (
        (T, None, ""), (T, DOCUMENTS, " silu"), (T - 7, (0, 20, 21, T - 7), " swish"),
        (T, (0, cut - 1, cut, cut + 1, T), ""),
    )  # fmt: skip
    for layout in (*layouts(size), "striped"):
        for tokens, offsets, activation in cases:
            layer = drawn(f"causal_conv1d, {width}{activation}", tokens, B)
            compare(layer, layout, offsets, rank=rank)


def test_functions_are_methods() -> None:
    names = {name for name in vars(recurrent) if name in vars(ContextParallel) and name[0] != "_"}
    assert names == {*STEPS, "causal_conv1d"}
    for name in names:
        assert getattr(ContextParallel, name) is getattr(recurrent, name)
    rows = drawn("linear_recurrence", 8, B).rows
    close(recurrent.linear_recurrence(ContextParallel(), **rows), by_token(
        Layer("linear_recurrence", rows), None)[0], "function")  # fmt: skip
    with pytest.raises(ValueError, match="cp must be a ContextParallel"):
        recurrent.linear_recurrence(None, **rows)  # type: ignore[call-overload]  # no context


def _striped(_: int) -> None:
    cp = ContextParallel(layout="striped")
    rows: dict[str, Any] = {key: cp.shard(x) for key, x in drawn("simple_gla", T, B).rows.items()}
    with pytest.raises(UnsupportedError, match="relayout"):
        cp.simple_gla(**rows)


def jobs() -> Iterator[Any]:
    """Yield what two ranks compute: a function, and its arguments."""
    compiled = [*KINDS, "selective_scan, groups, all options", "causal_conv1d, 4 silu"]
    for job, arguments in (
        (_cuts, []), (_precisions, []), (_whole, []), (_striped, []),
        (_one_token_documents, ["linear_recurrence", "kda"]), (_long, KINDS), (_nan, KINDS),
        (_checkpointed, [False, True]), (_second_derivative, KINDS), (_compiled, compiled),
    ):  # fmt: skip
        for argument in ([x] for x in arguments) if arguments else [[]]:
            name = "-".join([job.__name__[1:], *map(str, argument)])
            is_daily = job is not _compiled or {*argument} & {"gated_delta_rule", compiled[-1]}
            marks = [] if is_daily else [pytest.mark.nightly]
            yield pytest.param(job, argument, id=name, marks=marks)


@pytest.mark.parametrize(("job", "arguments"), [*jobs()])
def test_on_two_ranks(
    pools: dict[int, LocalRanks], job: Callable[..., None], arguments: list[Any]
) -> None:
    pools[2].run(job, *arguments)


def _attention(**changes: Any) -> dict[str, Any]:
    return {**drawn("gated_delta_rule", 8, B).rows, **changes}


#: What does not fit together; wrong values of each argument are in test_wrong_values.py.
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a rank's tokens": ("gated_delta_rule", _attention(k=torch.ones(B, 7, H, K)), "k must be"),
    "heads": (
        "simple_gla", {name: torch.ones(B, 8, 3 if name == "v" else 2, K) for name in "qkv"},
        "HV, the 3 heads .* must be a multiple of H",
    ),
    "a decay a channel": ("gated_delta_rule", _attention(g=torch.ones(B, 8, HV, K)), "g must be"),
    "a decay a head": ("kda", _attention(), "g must be"),
    "states": (
        "gated_delta_rule", _attention(initial_state=torch.zeros(1, HV, K, V)), "state for each row",
    ),
    "documents' states": (
        "gated_delta_rule", _attention(output_final_state=True, cu_seqlens=(0, 8)), "B must be 1",
    ),
    "factors": (
        "linear_recurrence", {"a": torch.ones(1, 8, 2), "b": torch.ones(1, 8, 3)}, "b must be",
    ),
    "channels": (
        "causal_conv1d", {"x": torch.ones(1, 8, 2), "weight": torch.ones(3, 3)}, "weight must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_do_not_fit_are_refused(case: str) -> None:
    name, arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        getattr(ContextParallel(), name)(**arguments)


CHECKED_DOCUMENTS = (0, 11, 30, 48)
SHAPES = {"q": (2, 4), "k": (2, 4), "v": (4, 3), "g": (4,), "beta": (4,)}


def _scaled(cls: Any, name: str, scale: Callable[[Any], Any]) -> Any:
    """Patch a method so that its result is changed."""
    right = getattr(cls, name)
    return patch.object(cls, name, lambda *args, **kwargs: scale(right(*args, **kwargs)))


def _last_head(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :, :-1], x[:, :, :, -1:] * 1.01], 3)


def _argument(cls: Any, name: str, n: int, change: Callable[[Any], Any]) -> Any:
    """Patch a method so that it gets another argument."""
    right = getattr(cls, name)

    def wrong(*args: Any) -> Any:
        return right(*args[:n], change(args[n]), *args[n + 1 :])

    return patch.object(cls, name, wrong)


def _sent_twice(right: Any = RecurrentCall._gather) -> Any:
    def wrong(self: Any, sent: Tensor) -> Any:
        right(self, sent)
        return right(self, sent)

    return patch.object(RecurrentCall, "_gather", wrong)


def _one_gradient(n: int) -> Any:
    """Patch the gradient of one input."""

    def scale(x: Any) -> Any:
        entries, grads = x
        return entries, tuple(y * 1.01 if m == n else y for m, y in enumerate(grads))

    return _scaled(EagerRuns, "input_grads", scale)


#: Each fault with the pass that must be found wrong, and words of its message.
FAULTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "one head of the outputs": (lambda: _scaled(LinearAttention, "read", _last_head), "forward", "out["),
    "the fold drops transitions": (
        lambda: patch.object(maps, "apply", lambda _, state, **__: state), "forward", "the state before",
    ),
    "the fold adds from another slot": (
        lambda: _argument(RecurrentCall, "_fold", 2, lambda x: x.flip(0)), "forward", "the state before",
    ),
    "states go on through documents": (
        lambda: patch.object(
            calls, "chunks_of", lambda layout, cu, *rest: chunks_of(layout, cu and (0, 0, 0, T), *rest)
        ), "forward", "",
    ),
    "final states": (
        lambda: _scaled(RecurrentCall, "_fold", lambda x: (x[0], x[1] * 1.001)), "forward", "final state",
    ),
    "more is sent": (_sent_twice, "forward", "bytes were sent, and the states that travel have"),
    "gradients of states, back": (
        lambda: patch.object(maps, "apply_adjoint", lambda _, grad, **__: grad * 0.99),
        "backward", "the gradient of",
    ),
    "one rank's gradient of final states": (
        lambda: _argument(RecurrentCall, "_fold_back", 6, lambda x: x / 2), "backward", "of the final state",
    ),
    **{
        f"d{name}": (partial(_one_gradient, n), "backward", f"d{name}[")
        for n, name in enumerate(SHAPES)
    },
}  # fmt: skip


def layer(rank: int, documents: tuple[int, ...] | None, *, compiled: bool = False) -> None:
    """Run both passes of a delta rule with initial and final states."""
    cp, generator = ContextParallel(), torch.Generator().manual_seed(7)
    rows, states = (2, 2) if documents is None else (1, 3)
    x = {name: torch.randn(rows, T, *shape, generator=generator) for name, shape in SHAPES.items()}
    x["g"], x["beta"] = -x["g"].abs() / 8, x["beta"].sigmoid()
    mine = {name: cp.shard(y).requires_grad_() for name, y in x.items()}
    initial = torch.randn(states, 4, 4, 3, generator=generator).requires_grad_()
    call: Any = cp.gated_delta_rule
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, final = call(
        **mine, use_qk_l2norm=True, initial_state=initial, output_final_state=True,
        cu_seqlens=documents,
    )  # fmt: skip
    generator.manual_seed(rank)
    grads = [torch.randn(y.shape, generator=generator) for y in (out, final)]
    torch.autograd.backward([out, final], grads)


def tripped(rank: int, fault: str, compiled: bool) -> list[str]:
    """Return the errors of some calls under a fault, and make right calls after it."""
    messages = []
    with ring_torch.check():
        for documents in (None, CHECKED_DOCUMENTS) * (1 if compiled else 4):
            with FAULTS[fault][0]() if fault else nullcontext():
                try:
                    layer(rank, documents, compiled=compiled)
                except WrongResultError as error:
                    messages.append(str(error))
        layer(rank, None)
    return messages


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_trips(fault: str, pools: dict[int, LocalRanks]) -> None:
    by_rank = pools[2].run(tripped, fault, False)
    assert by_rank[0] == by_rank[1], "all ranks raise the same"
    _, order, words = FAULTS[fault]
    assert by_rank[0], "a document, row or head of the eight shows it"
    first = by_rank[0][0]
    assert f"of gated_delta_rule ({order}) is wrong. rank " in first and words in first


@pytest.mark.parametrize("fault", ["", "the fold drops transitions", "dbeta"])
def test_compiled_calls_are_checked(fault: str, pools: dict[int, LocalRanks]) -> None:
    messages = pools[2].run(tripped, fault, True)[0]
    assert bool(messages) == bool(fault)


def _alone(_: int) -> list[str]:
    with ContextParallel().whole():
        return tripped(0, "one head of the outputs", False)


def test_one_rank_is_checked(pools: dict[int, LocalRanks]) -> None:
    assert "1 ranks" in pools[2].run(_alone)[0][0]


@on_two_ranks
def test_rounding_is_no_fault(rank: int) -> None:
    cp, generator = ContextParallel(), torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, 96, 2, 8, generator=generator).bfloat16()
    k = torch.nn.functional.normalize(k, dim=-1)
    g, a = -torch.rand(2, 96, 2, generator=generator), -torch.rand(2, generator=generator)
    layers: dict[str, list[Any]] = {
        "simple_gla": [q, k, v], "kda": [q, k, v, g[..., None].expand(v.shape), g.exp()],
        "ssd": [v, -g, a, q, k], "linear_recurrence": [q.sigmoid(), v],
        "selective_scan": [v[..., 0], -g, a[:, None].expand(2, 8), q[:, :, 0], k[:, :, 0]],
    }  # fmt: skip
    with ring_torch.check():
        for name, inputs in layers.items():
            own = [cp.shard(x) if x.ndim > 2 else x for x in inputs]
            own = [x.detach().clone().requires_grad_() for x in own]
            for _ in range(4):
                out = getattr(cp, name)(*own)
                out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    assert rank < 2


@on_two_ranks
def test_a_nan_is_no_fault(rank: int) -> None:
    """A NaN spreads among the tokens of its chunk, also to those before it: that is no fault."""
    cp, x = ContextParallel(), torch.randn(1, 64, 2, 4)
    x[:, 13] = torch.nan
    with ring_torch.check():
        for _ in range(4):
            cp.simple_gla(*[cp.shard(x).requires_grad_()] * 3).sum().backward()
    assert rank < 2


@on_two_ranks
def test_ranks_with_unlike_settings_are_told(rank: int) -> None:
    with ring_torch.check(every=1 + rank), pytest.raises(RankMismatchError, match="check is"):
        layer(rank, None)
