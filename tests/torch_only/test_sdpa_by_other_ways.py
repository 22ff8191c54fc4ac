"""Attention that a replaced model reaches by another way than a plain call of torch's SDPA.

Classes, each with the members that a model may have: another name of torch's function; a module
that writes attention out, or attends to windows, next to one that calls it; code that is run again
in the backward; modules that torch or the user compiled; masks of torch's own layers. Each is exact
or refused by name.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ring_torch import ContextParallel, replace_sdpa

BATCH, T, DIM, HEADS = 2, 32, 12, 2
OWN = T // 2  # tokens of a rank
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
EXACT = "exact"


class Layer(nn.Module):
    """Attention layer that computes attention by a function it is given."""

    def __init__(self, attend: Any = functional.scaled_dot_product_attention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.attend = attend

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = [
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        ]
        out: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Model(nn.Module):
    """A layer on the ring if ``has_own``, a tested one, and one that attends within a rank."""

    def __init__(self, tested: nn.Module, *, has_own: bool) -> None:
        super().__init__()
        self.own, self.tested, self.text = Layer() if has_own else nn.Identity(), tested, Layer()

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        out: Tensor = self.tested(self.own(x)) + self.text(text).mean()
        return out


def _outcome(
    make: Callable[[ContextParallel | None], nn.Module], *, has_own: bool = True, how: str = "eager",
) -> str:  # fmt: skip
    """Compare a model on the ring with one process; return ``exact``, or the error's message."""
    cp = ContextParallel(layout="contiguous")
    models = []
    for context in (None, cp):
        torch.manual_seed(0)
        models.append(Model(make(context), has_own=has_own).double())
    whole, model = models
    x, text = (torch.randn(BATCH, n, DIM, dtype=torch.float64) for n in (T, 5))
    call: Any = model
    try:
        replace_sdpa(model, cp, local=("text",))
        if how == "compiled":
            torch.compiler.reset()
            call = torch.compile(model, backend="aot_eager")
        with torch.inference_mode() if how == "inference" else nullcontext():
            out = call(cp.shard(x), text)
        expected = whole(x, text)
        if how != "inference":
            out.square().sum().backward()
            expected.square().sum().backward()
            cp.reduce_gradients(model)
    except Exception as error:  # noqa: BLE001 - whatever a user would get
        return f"{type(error).__name__}: {error}"
    finally:
        assert not torch.overrides._get_current_function_mode_stack()
    torch.testing.assert_close(cp.unshard(out.detach().clone()), expected.detach())
    if how != "inference":
        for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            if not name.startswith("text"):
                torch.testing.assert_close(a.grad, b.grad, msg=name)
    return EXACT


# Other names ----------------------------------------------------------------------------------


def _script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripts
        return torch.jit.script(function)


@_script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@_script
def scripted_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.mT), -1), v)


@_script
def scripted_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


def plainly_named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def calling_on(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plainly_named(q, k, v)


own_operator = torch.library.custom_op("ring_tests::mix", plainly_named, mutates_args=())
deep_operator = torch.library.custom_op("ring_tests::deep", calling_on, mutates_args=())


@torch.library.custom_op("ring_tests::doubled", mutates_args=())
def other_operator(x: Tensor) -> Tensor:
    return 2 * x


other_operator.register_fake(torch.empty_like)
other_operator.register_autograd(lambda _, grad: 2 * grad)


def _registered(name: str, key: str, function: Any) -> Any:
    """Return a call of an operator of a library with a kernel in Python."""
    torch.library.define(f"ring_tests_{name}", "(Tensor q, Tensor k, Tensor v) -> Tensor")
    torch.library.impl(f"ring_tests_{name}", key)(function)
    return operator.attrgetter(f"ring_tests_{name.replace('::', '.')}")(torch.ops)


IMPLICIT = "CompositeImplicitAutograd"
_registered("flash_attn::fwd", IMPLICIT, plainly_named)
halves = _registered("lib::e", IMPLICIT, lambda q, *_: q / 2)
aten = torch.ops.aten
UNSEEN, INSIDE = "whose attention Python does not see", "attends inside torch"

NAMES: dict[str, tuple[Any, str]] = {
    "an operator": (aten.scaled_dot_product_attention, EXACT),
    "an overload": (aten.scaled_dot_product_attention.default, EXACT),
    "by torch._C": (lambda *x: torch._C._nn.scaled_dot_product_attention(*x), EXACT),  # noqa: PLW0108 - looked up when called
    "a fused one": (lambda *x: aten._scaled_dot_product_flash_attention_for_cpu(*x)[0], INSIDE),
    "the plain one": (lambda *x: torch._scaled_dot_product_attention_math(*x)[0], UNSEEN),
    "another library's": (lambda *x: torch.ops.ring_tests_flash_attn.fwd(*x), INSIDE),  # noqa: PLW0108 - looked up when called
    "a script": (scripted, UNSEEN),
    "a script, by a global name": (lambda *x: scripted(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "a script in a list": ([scripted], UNSEEN),
    "a script that writes it out": (scripted_by_hand, UNSEEN),
    "an operator of one's own": (own_operator, UNSEEN),
    "an operator by a global name": (lambda *x: own_operator(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "an operator by torch.ops": (lambda *x: torch.ops.ring_tests.mix(*x), UNSEEN),  # noqa: PLW0108 - looked up when called
    "an operator whose kernel calls on": (lambda *x: torch.ops.ring_tests.deep(*x), INSIDE),  # noqa: PLW0108 - looked up when called
    "a library's": (_registered("lib::a", IMPLICIT, plainly_named), INSIDE),
    "a library's, explicit": (_registered("lib::b", "CompositeExplicitAutograd", plainly_named), INSIDE),
    "a library's, of a device": (_registered("lib::c", "CPU", plainly_named), INSIDE),
    "a library's that writes it out": (
        _registered("lib::d", IMPLICIT, lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
        "writes attention out",
    ),
    "beside operators of another thing": (
        lambda q, k, v: functional.scaled_dot_product_attention(
            torch.ops.ring_tests.doubled(q), k, halves(v, q, k)
        ), EXACT,
    ),
    "beside a script of another thing": (
        lambda q, k, v: functional.scaled_dot_product_attention(scripted_gelu(q), k, v), EXACT,
    ),
}  # fmt: skip


@pytest.mark.nightly(
    unless=["an operator-eager", "an overload-compiled", "a script-eager", "a fused one-eager"]
)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", NAMES)
@on_ranks
def test_every_name_of_attention(name: str, how: str) -> None:
    """A name that the mode sees is answered or refused; what it cannot see is refused by a look."""
    attend, expected = NAMES[name]

    def make(_: object) -> nn.Module:
        layer = Layer(attend)
        if isinstance(attend, list):
            layer.attend = attend[0]
            vars(layer)["kept"] = attend
        return layer

    assert expected in _outcome(make, how=how)


# Attention that is written out ------------------------------------------------------------------


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def _bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), flat[0], flat[1].mT)
    return torch.bmm(functional.softmax(scores, -1), flat[2]).view(q.shape)


def _sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = torch.einsum("ibnd,jbnd->ijbn", q, k).softmax(1)
    return torch.einsum("ijbn,jbnd->ibnd", scores, v).permute(1, 2, 0, 3)


def _additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1)
    return (weights[..., None] * v[:, :, None]).sum(3)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "matmul": lambda: Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "einsum": lambda: Layer(_einsum),
    "bmm": lambda: Layer(_bmm),
    "sequence first": lambda: Layer(_sequence_first),
    "additive": lambda: Layer(_additive),
    "without softmax": lambda: Layer(lambda q, k, v: (q @ k.mT).sigmoid() @ v),
    "by operators": lambda: Layer(
        lambda q, k, v: aten.matmul(
            aten._softmax.default(aten.matmul.default(q, k.mT), -1, False), v
        )
    ),
    "a graph": lambda: torch.fx.symbolic_trace(Layer(_einsum)),
}


@pytest.mark.nightly(unless=["eager-False-matmul", "compiled-True-einsum", "eager-True-additive"])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("how", ["eager", "inference", "compiled"])
@on_ranks
def test_written_attention_is_refused(name: str, has_own: bool, how: str) -> None:
    outcome = _outcome(lambda _: WRITTEN[name](), has_own=has_own, how=how)
    assert "UnsupportedError: replace_sdpa: " in outcome
    assert "writes attention out" in outcome


class Router(nn.Module):
    """A router with as many experts as a rank has tokens, or as channels."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], experts: int = OWN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, DIM))
        self.scales, self.logits = nn.Parameter(torch.randn(experts, DIM)), logits

    def forward(self, x: Tensor) -> Tensor:
        gates = self.logits(x.flatten(0, 1), self.weight).softmax(-1)
        return x * (gates @ self.scales).view_as(x)


class Of(nn.Module):
    """A module that computes a function of its part and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], part: Any = None) -> None:
        super().__init__()
        self.function, self.part = function, part

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.part, x)


def _in_windows(layer: Any, x: Tensor) -> Tensor:
    """Attend within windows that a rank holds whole."""
    y = layer(x.unflatten(1, (-1, 8)).flatten(0, 1))
    out: Tensor = y.unflatten(0, (x.shape[0], -1)).flatten(1, 2)
    return out


def _of_token(_: Any, x: Tensor) -> Tensor:
    """Attend between the parts of each token, as between its heads or its frames."""
    q: Tensor = x.unflatten(-1, (6, -1))
    return x + ((q @ q.mT).softmax(-1) @ q).flatten(2)


def _angles(product: Any, x: Tensor) -> Tensor:
    """Multiply positions by as many frequencies as a rank has tokens, as rotary angles."""
    angles: Tensor = product(x.new_zeros(x.shape[1]), torch.arange(OWN).to(x))
    return x * angles[:, :DIM].cos()


def _to_prompt(prompt: Tensor, x: Tensor) -> Tensor:
    """Attend to keys that every rank holds whole."""
    keys = prompt.expand(x.shape[0], -1, -1) * 1.0
    return x + (x @ keys.mT).softmax(-1) @ keys


def _towers(images: Any, x: Tensor) -> Tensor:
    """Attend to several sequences of a batch, each of them split, beside one that is longer."""
    out: Tensor = x + images(torch.cat([x[:, : OWN // 4]] * 3)).mean() * 0
    return out


class ByItself(nn.Module):
    """A module that uses Ring by itself: attention, or the keys of all ranks, a chunk at a time."""

    def __init__(self, cp: ContextParallel | None, in_chunks: bool) -> None:
        super().__init__()
        self.cp, self.in_chunks = cp, in_chunks

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1))
        if self.cp is None:
            q = q.transpose(1, 2)
            out = functional.scaled_dot_product_attention(q, q, q, scale=1.0)
        elif self.in_chunks:
            k, q = self.cp.unshard(q, grad="sum").transpose(1, 2), q.transpose(1, 2)
            scores = torch.cat([q @ part.mT for part in k.chunk(2, dim=2)], dim=-1)
            out = scores.softmax(-1) @ k
        else:
            return x + self.cp.attention(q, q, q, softmax_scale=1.0).flatten(2)
        return x + out.transpose(1, 2).flatten(2)


EXACT_MODULES: dict[str, Callable[[ContextParallel | None], nn.Module]] = {
    "router": lambda _: Router(functional.linear),
    "router by matmul": lambda _: Router(lambda x, w: x @ w.mT),
    "router by einsum": lambda _: Router(lambda x, w: torch.einsum("td,ed->te", x, w)),
    "router by a computed weight": lambda _: Router(lambda x, w: x @ (2 * w).T),
    "windows": lambda _: Of(_in_windows, WRITTEN["matmul"]()), "of a token": lambda _: Of(_of_token),
    "angles": lambda _: Of(_angles, lambda t, f: (f[None, :, None] @ t[None, None]).mT[0]),
    "angles by einsum": lambda _: Of(_angles, lambda t, f: torch.einsum("i,j->ij", t, f)),
    "prompt": lambda _: Of(_to_prompt, nn.Parameter(torch.randn(5, DIM))),
    "towers": lambda _: Of(_towers, Layer()),
    "by itself": lambda cp: ByItself(cp, False),
    "by itself, in chunks": lambda cp: ByItself(cp, True),
}  # fmt: skip


@pytest.mark.nightly(unless=[
    "router by matmul-eager", "by itself, in chunks-eager", "by itself-eager", "windows-compiled",
])  # fmt: skip
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", EXACT_MODULES)
@on_ranks
def test_products_that_are_not_over_tokens_stay(name: str, how: str) -> None:
    """Routers, windows, angles, and modules that use Ring by themselves are right on shards."""
    assert _outcome(EXACT_MODULES[name], how=how) == EXACT


def _both(layers: Any, x: Tensor) -> Tensor:
    out: Tensor = layers["near"](x) + layers["far"](x)
    return out


def _shared(near: nn.Module | None = None) -> nn.Module:
    """Return a module with one layer in two places, or with another one in the first."""
    layer = Layer()
    places = {"near": nn.Sequential(near or layer), "far": nn.Sequential(layer)}
    return Of(_both, nn.ModuleDict(places))


def _folded(*folds: int) -> Callable[[], nn.Module]:
    """Return what makes a module of windows that are folded into the batch, or frames."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        for size in folds:
            x = layer(x.view(-1, size, DIM)).view_as(x)
        return x

    return lambda: Of(forward, Layer())


#: Models, their local modules, and what becomes of them.
MEANINGS: tuple[tuple[Callable[[], nn.Module], tuple[str, ...], str], ...] = (
    (_shared, ("part.near",), "it is also part.far.0, of own keys"),
    (_shared, ("part.near", "part.far"), EXACT), (_shared, ("*",), EXACT),
    *((_folded(*folds), (), "windows or frames") for folds in ((OWN, 4), (4,), (4, 8))),
    (_folded(OWN), (), EXACT),
    # A module within a rank may call a script.
    (lambda: _shared(Layer(scripted)), ("part.near",), EXACT),
)  # fmt: skip


@pytest.mark.parametrize("n", range(len(MEANINGS)))
@on_ranks
def test_modules_of_two_meanings(n: int) -> None:
    """A module whose names fall into two scopes, and calls of two lengths of the same tokens."""
    (make, local, expected), cp = MEANINGS[n], ContextParallel(layout="contiguous")
    model = make()
    with nullcontext() if expected == EXACT else pytest.raises(ValueError, match=expected):
        replace_sdpa(model, cp, local=local)
        model(cp.shard(torch.randn(BATCH, T, DIM)))


# Code that is run again, and operators that run functions ----------------------------------------


class Again(torch.autograd.Function):
    """A checkpoint of one's own, as DeepSpeed's and Megatron's."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Any:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad)


class Reversible(Again):
    """Runs its function twice in the backward, once without gradients."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.no_grad():
            ctx.function(ctx.saved_tensors[0])
        return Again.backward(ctx, grad)


class WithContext(Again):
    """The newer form, whose forward is not given its node."""

    @staticmethod
    def forward(function: Any, x: Tensor, *parameters: Tensor) -> Any:  # type: ignore[override]
        del parameters
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.function, x, *parameters = inputs
        ctx.parameters = parameters
        ctx.save_for_backward(x)


def _hooks(function: Any, x: Tensor, *_: Tensor) -> Any:
    """Compute saved tensors again when the first of them is asked for."""
    saved: list[Tensor] = []
    count = iter(range(100))

    def unpack(index: int) -> Tensor:
        if not saved:
            keep = torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.__iadd__([t])[-1], lambda t: t
            )
            with torch.enable_grad(), keep:
                function(x.detach().requires_grad_())
        return saved[index]

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(count), unpack):
        return function(x)


def _scan(function: Any, x: Tensor, *_: Tensor) -> Any:
    def step(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return carry + 1, function(y)

    return torch._higher_order_ops.scan(step, torch.zeros(1), torch.stack([x, x]))[1][1]


def _while(function: Any, x: Tensor, *_: Tensor) -> Any:
    start = torch.tensor(0), x.detach()
    body = torch.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, function(y)), start)[1]
    return x + body


INSIDE_CHECKPOINT = "inside torch.utils.checkpoint within its own forward"
#: For each way to run a function: what it comes to, in graphs too if not said below.
RUNS: dict[str, tuple[Any, str]] = {
    "own checkpoint": (Again.apply, EXACT),
    "reversible": (Reversible.apply, EXACT),
    "nested": (lambda f, x, *p: Again.apply(lambda y: Again.apply(f, y, *p), x, *p), EXACT),
    "setup_context": (WithContext.apply, "with setup_context"),
    "own hooks": (_hooks, EXACT),
    "checkpoint": (lambda f, x, *_: checkpoint(f, x, use_reentrant=False), INSIDE_CHECKPOINT),
    "reentrant": (lambda f, x, *_: checkpoint(f, x, use_reentrant=True), INSIDE_CHECKPOINT),
    "without gradients": (lambda f, x, *_: torch.no_grad()(f)(x), EXACT),
    "cond": (lambda f, x, *_: torch.cond(x.sum() > -1e9, f, lambda y: y * 1.0, (x,)), EXACT),
    "scan": (_scan, "scan runs a function"),
    "while_loop": (_while, EXACT),
    "map": (lambda f, x, *_: torch._higher_order_ops.map(f, torch.stack([x, x]))[1], EXACT),
}
#: Torch's graphs save other tensors than eager code, so hooks of one's own may mean anything.
IN_GRAPHS = {"checkpoint": EXACT, "reentrant": EXACT, "own hooks": ""}


class Runs(Layer):
    """A layer whose attention is run by another function; ``closure`` hides the method in one."""

    def __init__(self, run: Any, *, closure: bool) -> None:
        super().__init__()
        self.run, self.closure = run, closure

    def forward(self, x: Tensor) -> Tensor:
        function = (lambda y: self.mix(y)) if self.closure else self.mix  # noqa: PLW0108 - looked up when called
        out: Tensor = self.run(function, x, *self.parameters())
        return x + out


@pytest.mark.nightly(unless=[
    "eager-False-own checkpoint", "eager-True-own hooks", "compiled-False-checkpoint",
    "eager-False-cond",
])  # fmt: skip
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled"])
@on_ranks
def test_functions_that_are_run_again(name: str, closure: bool, how: str) -> None:
    run, expected = RUNS[name]
    outcome = _outcome(lambda _: Runs(run, closure=closure), how=how)
    assert (expected if how == "eager" else IN_GRAPHS.get(name, expected)) in outcome


# Graphs and compiled functions -------------------------------------------------------------------


def _exported() -> torch.export.ExportedProgram:
    shapes = {1: torch.export.Dim("tokens", min=2, max=64)}
    return torch.export.export(
        Layer().double(), (torch.randn(2, T, DIM).double(),), dynamic_shapes=(shapes,)
    )


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "traced": lambda: torch.fx.symbolic_trace(Layer()),
    "traced and copied": lambda: copy.deepcopy(torch.fx.symbolic_trace(Layer())),
    "exported": lambda: _exported().module(),
    "unflattened": lambda: torch.export.unflatten(_exported()),
    "compiled inside": lambda: Layer(torch.compile(plainly_named, backend="aot_eager")),
}


@pytest.mark.parametrize("name", GRAPHS)
@on_ranks
def test_graphs_and_compiled_functions(name: str) -> None:
    assert _outcome(lambda _: GRAPHS[name]()) == EXACT


@on_ranks
def test_a_graph_that_is_written_anew_stays_on_the_ring() -> None:
    cp, x = ContextParallel(), torch.randn(BATCH, T, DIM)
    graph = torch.fx.symbolic_trace(Layer())
    expected = cp.shard(graph(x).detach())
    replace_sdpa(graph, cp)
    graph.recompile()
    for module in (graph, copy.deepcopy(graph)):
        torch.testing.assert_close(module(cp.shard(x)), expected)
        shard = cp.shard(x).requires_grad_()
        grads = [
            torch.autograd.grad(out.square().sum(), shard)[0]
            for out in (module(shard), checkpoint(module, shard, use_reentrant=False))
        ]
        torch.testing.assert_close(*grads)


# Torch's own layers -----------------------------------------------------------------------------


@on_ranks
def test_masks_of_torchs_own_layers() -> None:
    """``is_causal`` is a hint to torch, which reads the mask in all branches but one."""
    cp, x = ContextParallel(), torch.randn(BATCH, T, DIM)
    index = torch.arange(T)
    window = (index[:, None] - index >= 4) | (index > index[:, None])
    causal = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    padding = (index >= 30).expand(BATCH, T)
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    model = copy.deepcopy(whole)
    replace_sdpa(model, cp)
    shard, own = cp.shard(x), causal[:OWN, :OWN]
    numbers = torch.zeros(T, T).masked_fill(window, -torch.inf)
    options: dict[str, Any]
    for training in (True, False):
        whole.train(training)
        model.train(training)
        for mask, need_weights, pad in (
            (window, True, None), (window, False, padding), (window, False, None),
            (causal, True, padding), (causal, False, None), (numbers, True, padding),
        ):  # fmt: skip
            options = {"attn_mask": mask, "need_weights": need_weights, "key_padding_mask": pad}
            with torch.set_grad_enabled(training):
                expected = cp.shard(whole(x, x, x, is_causal=True, **options)[0])
                out = model(shard, shard, shard, is_causal=True, **options)[0]
            torch.testing.assert_close(out, expected)
    # A mask of a rank's own tokens can only be causal, and then is that of the whole sequence.
    options = {"is_causal": True, "key_padding_mask": padding}
    expected = cp.shard(whole(x, x, x, attn_mask=causal, **options)[0])
    options = {"is_causal": True, "key_padding_mask": cp.shard(padding)}
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        torch.testing.assert_close(call(shard, shard, shard, attn_mask=own, **options)[0], expected)
    with pytest.raises(ValueError, match="a row for each"):
        model(shard, shard, shard, attn_mask=window[:OWN, :OWN], **options)
    # Within a rank torch's meaning is kept.
    near = nn.ModuleDict({"local": copy.deepcopy(whole)})
    replace_sdpa(near, cp, local=("local",))
    for mask in (own, window[:OWN, :OWN]):
        outs = [
            f(shard, shard, shard, attn_mask=mask, **options)[0] for f in (whole, near["local"])
        ]
        torch.testing.assert_close(*outs)
    # Torch's encoder looks at the padding before it looks at the mask.
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    expected = encoder(x, mask=causal, src_key_padding_mask=padding)
    replace_sdpa(encoder, cp)
    out = cp.unshard(encoder(shard, mask=causal, src_key_padding_mask=padding).detach())
    torch.testing.assert_close(out[:, :30], expected[:, :30])
