"""Kernels and transports are chosen, or refused with every reason and what to do instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import prefix
from on_ranks import on_four_ranks, on_ranks

from ring_core import (
    KernelConfig,
    Mask,
    Request,
    RingProgram,
    StrategyConfig,
    UnsupportedError,
    make_plan,
    refusals,
    ring_program,
)
from ring_core.base.caches import LengthCaches
from ring_torch import ContextParallel, kernels, prepare, ring_attention, strategies, transports
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4, flash_attn, sdpa
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.measured import measured
from ring_torch.kernels.triton import TritonKernel
from ring_torch.prepare import _prepare
from ring_torch.strategies import choose_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ulysses import ULYSSES, Ulysses
from ring_torch.transports import symm_buffer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CAUSAL = Mask(causal=True)
BFLOAT16 = Request("cuda", "bfloat16", 64, 64, grad=True)


def program(mask: Mask = CAUSAL, cp_size: int = 4, **layout: Any) -> RingProgram:
    return ring_program(make_plan(mask, seq_len=16 * cp_size, cp_size=cp_size, **layout))


def chosen(
    move: tuple[str, str],
    over: RingProgram,
    device: torch.device = CPU,
    *,
    size: int = 4,
    probe: bool = True,
) -> tuple[str, str]:
    """Return the chosen strategy and transport for bfloat16, with 4 query heads per K/V head."""
    ring = Ranks(None, 0, size)
    request = Request(device.type, "bfloat16", 8, 8, q_heads=4, kv_heads=1)
    spec, way = choose_strategy(*move, ring, over, device, request=request, probe=probe)
    return spec.name, way.name


@pytest.mark.parametrize("dim", [192, 256])
def test_fa3_is_deterministic_for_some_head_dims(dim: int) -> None:
    request = replace(BFLOAT16, head_dim=dim, v_head_dim=dim, deterministic=True)
    reasons = refusals(flash_attn.FA3.capabilities, request, program())
    expected = () if dim == 192 else ("is deterministic for head dims up to 192, not 256",)
    assert reasons == expected
    assert not refusals(
        flash_attn.FA3.capabilities, replace(request, deterministic=False), program()
    )


UNGATHERED = {
    "striped": (program(layout="striped"), "layout 'striped' assigns tokens one by one"),
    "predicate": (
        program(Mask(predicate=lambda q, k: q >= k)),
        "a predicate mask is planned in tiles",
    ),
}
AUTO, RING = ("auto", "auto"), ("ring", "p2p")
MESSAGES, COPIES = ("gather", "p2p"), ("gather", "symm_mem")


@pytest.mark.parametrize("name", UNGATHERED)
@pytest.mark.parametrize("move", [MESSAGES, COPIES, ("gather", "auto"), ("auto", "symm_mem")])
def test_a_named_strategy_never_falls_back(move: tuple[str, str], name: str) -> None:
    """The error lists every reason, and what would work instead."""
    refused, expected_message = UNGATHERED[name]
    with pytest.raises(UnsupportedError) as caught:
        chosen(move, refused)
    message = str(caught.value)
    assert message.startswith(f"strategy '{move[0]}' over transport '")
    assert expected_message in message
    assert ("need CUDA tensors and a nccl group" in message) == (move[1] == "symm_mem")
    assert message.endswith("use strategy='ring' or 'auto' and transport='p2p' or 'auto'")
    for works in (RING, AUTO, ("ring", "auto"), ("auto", "p2p")):
        assert chosen(works, refused) == RING


@pytest.mark.parametrize("strategy", ["ring", "balanced"])
def test_steps_are_sent_in_messages(strategy: Any) -> None:
    with pytest.raises(
        UnsupportedError, match="or 'auto', or strategy='ulysses' or strategy='gather'"
    ):
        chosen((strategy, "symm_mem"), program())
    for transport in ("auto", "p2p"):
        choice = chosen((strategy, transport), ring_program(program().plan, strategy))
        assert choice == (strategy, "p2p")


def test_balanced_is_of_contiguous_shards() -> None:
    x = torch.zeros(1, 4, 2, 8)
    remedies = "use layout='contiguous', or strategy='ring'"
    with pytest.raises(UnsupportedError, match=remedies):
        ring_attention(x, x, x, causal=True, layout="zigzag", strategy="balanced")


def test_a_field_that_means_nothing_is_refused() -> None:
    assert StrategyConfig("gather") == StrategyConfig("gather", outer="ring")
    for fields in ({"ulysses_size": 2}, {"outer": "gather"}):
        with pytest.raises(ValueError, match=f"strategy 'ring' has no {next(iter(fields))}"):
            StrategyConfig("ring", **fields)
    x = torch.zeros(1, 4, 2, 8)
    out = ring_attention(x, x, x, causal=True, strategy=StrategyConfig("ring"))
    assert out.shape == x.shape


REASON = "the ranks' GPUs do not reach each other's memory"


@pytest.mark.parametrize("reaches", [True, False])
def test_copies_need_gpus_that_reach_each_other(
    reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(
        symm_buffer,
        "symm_buffer_of",
        lambda _: SimpleNamespace(refusals=() if reaches else (REASON,)),
    )
    assert chosen(COPIES, program(), GPU, probe=False) == COPIES  # no probe
    assert chosen(AUTO, program(), GPU) == (COPIES if reaches else RING)
    assert chosen(("gather", "auto"), program(), GPU) == (COPIES if reaches else MESSAGES)
    if not reaches:
        with pytest.raises(UnsupportedError, match=REASON):
            chosen(COPIES, program(), GPU)


def test_auto_gathers_no_more_than_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` gathers no whole sequences on many ranks, as that takes memory; a halo it does."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(symm_buffer, "symm_buffer_of", lambda _: SimpleNamespace(refusals=()))
    many, halo = program(cp_size=32), program(Mask(window=(3, 3)), cp_size=32)
    assert chosen(AUTO, many, GPU, size=32) == RING
    assert chosen(COPIES, many, GPU, size=32) == COPIES
    assert chosen(AUTO, halo, GPU, size=32) == COPIES


def test_auto_trades_heads_where_that_moves_few_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ulysses needs Triton and peers' memory, and is not chosen with a bias: that travels, too."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    reasons: list[str] = []
    monkeypatch.setattr(symm_buffer, "symm_buffer_of", lambda _: SimpleNamespace(refusals=reasons))
    monkeypatch.setattr(transports, "has_triton", lambda: True)
    equal = replace(BFLOAT16, q_heads=4, kv_heads=4)

    def taken(request: Request = equal, move: tuple[str, str] = AUTO) -> tuple[str, str]:
        ring = Ranks(None, 0, 4)
        spec, way = choose_strategy(*move, ring, program(), GPU, request=request, probe=True)
        return spec.name, way.name

    traded = ("ulysses", "symm_mem")
    assert taken() == taken(equal, ("auto", "symm_mem")) == traded
    assert taken(replace(equal, kv_heads=1)) == taken(replace(equal, bias=True)) == COPIES
    assert taken(equal, ("gather", "auto")) == COPIES
    monkeypatch.setattr(transports, "has_triton", lambda: False)
    assert taken() == COPIES
    reasons.append(REASON)
    assert taken() == RING


@on_four_ranks
def test_auto_runs_the_trade_that_it_chose(rank: int) -> None:
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
    anywhere = replace(ULYSSES, is_automatic=lambda _: True)
    results = []
    with patch.object(strategies, "STRATEGIES", (anywhere, *strategies.STRATEGIES[1:])):
        for way in ("auto", "ulysses"):
            cp = ContextParallel()
            assert "55 % of the bytes of a gather" in cp.explain(q, k, v, causal=True, strategy=way)
            out = cp.attention(q, k, v, causal=True, strategy=way)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_four_ranks
def test_a_compiled_call_with_a_window_gathers(rank: int) -> None:
    """Only a gather leaves out what the window hides."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
    anywhere = [replace(spec, is_automatic=lambda _: True) for spec in (ULYSSES, GATHER)]
    cp, results = ContextParallel(), []
    with (
        patch.object(strategies, "STRATEGIES", (*anywhere, *strategies.STRATEGIES[2:])),
        patch.object(Ulysses, "forward", None),
    ):
        compiled = torch.compile(cp.attention, backend="eager", fullgraph=True)
        for call, way in ((compiled, "auto"), (cp.attention, "gather")):
            out = call(q, k, v, causal=True, window=(3, 0), strategy=way)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks
def test_a_refused_strategy_sends_nothing() -> None:
    x = torch.zeros(1, 4, 2, 8)
    for options in ({"strategy": "gather", "layout": "striped"}, {"transport": "symm_mem"}):
        with pytest.raises(UnsupportedError, match=f"^strategy '.*{next(iter(options.values()))}'"):
            ring_attention(x, x, x, causal=True, **options)  # type: ignore[call-overload]  # wrong on purpose
    ring_attention(x, x, x, causal=True, strategy="gather")  # the ranks' calls still match


@pytest.mark.parametrize("name", ["fa4", "fa3", "cudnn", "fa2"])
def test_kernels_for_gpus_refuse_the_host(name: str) -> None:
    x = torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError) as caught:
        ring_attention(x, x, x, kernel=name)
    assert str(caught.value) == (
        f"kernel '{name}': runs on cuda, not on cpu. Instead: use kernel='eager' or 'auto'"
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Let torch report a GPU of a given compute capability, and look for libraries again."""

    def show(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    def forget() -> None:
        for kernel in kernels.KERNELS:
            if isinstance(kernel, FlashKernel) and hasattr(kernel.unavailable, "cache_clear"):
                kernel.unavailable.cache_clear()

    forget()
    show(9, 0)
    yield show
    forget()


def _absent(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("module", "name", "package"),
    [(fa4, "fa4", "flash-attn-4"), (flash_attn, "fa2", "flash-attn")],
)
def test_what_is_not_installed_says_how_to(
    module: Any, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "version", _absent)
    with pytest.raises(UnsupportedError) as caught:
        kernels.choose(KernelConfig(name), BFLOAT16, program())
    message = str(caught.value)
    assert message.startswith(f"kernel '{name}': {package} is not installed")
    assert message.endswith(f"pip install {package}. Instead: use kernel='auto'")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_4_under_an_older_one_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    older = SimpleNamespace(flash_attn_func=lambda q: q)
    monkeypatch.setattr(fa4.library, "public_module", lambda: older)
    message = fa4.FA4.unavailable_reason()
    assert message is not None and "flash-attn 2.8 has put an older flash_attn/cute" in message
    assert message.endswith("pip install --force-reinstall --no-deps flash-attn-4")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_4_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no cutlass")

    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    monkeypatch.setattr(fa4.library, "public_module", broken)
    assert fa4.FA4.unavailable_reason() == "flash-attn-4 4.1 does not load: no cutlass"


@pytest.mark.usefixtures("gpu")
def test_auto_says_why_not_the_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "version", _absent)
    monkeypatch.setattr(TritonKernel, "unavailable_reason", lambda _: None)
    choice = kernels.choose(KernelConfig(), replace(BFLOAT16, softcap=True, bias=True), program())
    assert choice.kernel.capabilities.name == "triton"
    rejected = {can.name: why for can, why in choice.rejected}
    assert {"has no bias"} <= set(rejected["fa4"])
    assert {"has no softcap", "has no bias"} <= set(rejected["cudnn"])
    choice = kernels.choose(KernelConfig(), BFLOAT16, program())
    assert "  not fa4 (cuda): flash-attn-4 is not installed" in choice.describe()


ORDERS = {  # by compute capability and head dim
    (9, 0, 128): "fa4 fa3 cudnn triton fa2 sdpa sdpa eager",
    (9, 0, 129): "fa4 fa3 cudnn fa2 sdpa sdpa triton eager",
    (10, 0, 128): "fa4 fa3 cudnn fa2 sdpa sdpa triton eager",
    (8, 0, 128): "fa2 fa4 fa3 cudnn sdpa sdpa triton eager",
}


@pytest.mark.parametrize(("major", "minor", "dim"), ORDERS)
def test_the_order_of_kernels(major: int, minor: int, dim: int, gpu: Any) -> None:
    gpu(major, minor)
    names = [kernel.capabilities.name for kernel in kernels.in_order("cuda", dim)]
    assert " ".join(names) == ORDERS[major, minor, dim]


def test_equal_calls_are_prepared_once() -> None:
    x = torch.zeros(1, 8, 2, 16)
    _prepare.cache_clear()
    for _ in range(3):
        ring_attention(x, x, x, causal=True, window=(3, 0))
    assert (_prepare.cache_info().misses, _prepare.cache_info().hits) == (1, 2)
    ring_attention(x, x, x, causal=True, window=(2, 0))
    assert _prepare.cache_info().misses == 2


EQUAL = {
    "causal": (True, 1, "causal must be a bool"),
    "window": ((1, 0), (True, 0), "window"),
    "cu_seqlens": ((0, 5, 8), (0.0, 5.0, 8.0), "cu_seqlens must be one row"),
    "chunk_size": (2, 2.0, "chunk_size must be an integer"),
    "deterministic": (False, 0, "deterministic must be True or False"),
    "dropout_p": (0.0, False, "dropout_p must be in"),
    "return_lse": (True, 1, "return_lse must be True or False"),
    "softcap": (1.0, True, "softcap must be a finite number"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_value_of_another_type_is_another_call(name: str) -> None:
    """A call prepared for ``True`` is not reused for ``1``, which is refused."""
    good, bad, message = EQUAL[name]
    x = torch.zeros(1, 8, 2, 16)
    call: Any = ring_attention
    call(x, x, x, **{name: good})
    with pytest.raises(ValueError, match=message):
        call(x, x, x, **{name: bad})


@pytest.fixture
def installed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let GPU kernels count as installed, on a GPU of a given major compute capability."""

    def show(*names: str, major: int = 9) -> None:
        gpu(major, 0)
        missing = "is not there"
        monkeypatch.setattr(
            FlashKernel, "unavailable_reason",
            lambda kernel: None if kernel.capabilities.name in names else missing,
        )  # fmt: skip
        monkeypatch.setattr(TritonKernel, "unavailable_reason", lambda _: None)

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    return show


STRIPES = Mask(predicate=lambda q, k: (q >= k) & (k % 2 == 0))
WINDOW = Mask(causal=True, window=(3, 0))
WIDE = replace(BFLOAT16, head_dim=256, v_head_dim=256)
OPTIONAL = ("softcap", "alibi", "bias", "dropout", "segment_ids")
#: Calls like the stored rows of options on an H200: request, mask, and what ``auto`` takes with
#: flash-attn-4, and of those that torch and Triton bring.
CHOSEN: dict[str, tuple[Request, Mask, str, str]] = {
    "causal": (BFLOAT16, CAUSAL, "fa4", "cudnn"),
    "wide": (WIDE, CAUSAL, "fa4", "cudnn"),
    "unlike": (replace(BFLOAT16, head_dim=192, v_head_dim=128), CAUSAL, "fa4", "cudnn"),
    "window": (BFLOAT16, WINDOW, "fa4", "triton"),
    "wide window": (WIDE, WINDOW, "fa4", "sdpa"),
    "documents": (BFLOAT16, Mask(causal=True, cu_seqlens=(0, 7, 16)), "fa4", "triton"),
    "predicate, both passes": (BFLOAT16, STRIPES, "fa4", "triton"),
    "predicate, forward": (replace(BFLOAT16, grad=False), STRIPES, "fa4", "triton"),
    **{
        name: (replace(BFLOAT16, **dict[str, Any]({name: True})), CAUSAL,
            "triton" if name in ("bias", "dropout") else "fa4", "triton")
        for name in OPTIONAL
    },
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CHOSEN)
def test_auto_takes_the_fastest_on_hopper(name: str, grad: bool, installed: Any) -> None:
    request, mask, *expected = CHOSEN[name]
    for libraries, kernel in zip(
        (("fa4", "cudnn", "sdpa"), ("cudnn", "sdpa")), expected, strict=True
    ):
        installed(*libraries)
        choice = kernels.choose(
            KernelConfig(), replace(request, grad=grad), program(mask, cp_size=1)
        )
        assert choice.kernel.capabilities.name == kernel


def measure(path: Path, device: str, *orders: tuple[str, int, str]) -> str:
    """Write orders of kernels as if they had been measured, by option and head dim."""
    rows = [
        {"option": option, "head_dim": dim, "milliseconds": {x: 1.0 + n for n, x in enumerate(names.split())}}
        for option, dim, names in orders
    ]  # fmt: skip
    path.write_text(json.dumps({"device": device, "rows": rows}))
    return str(path)


@pytest.mark.parametrize("fastest", ["sdpa", "eager"])
def test_an_order_of_ones_own(
    fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measure(tmp_path / "rates.json", "cpu", ("causal", 16, fastest))
    monkeypatch.setenv("RING_RATES", path)
    monkeypatch.setattr(prepare, "_prepare", LengthCaches(_prepare.__wrapped__))
    x = torch.zeros(1, 64, 2, 16)
    lines = ContextParallel().explain(x, x, x, causal=True).splitlines()
    assert lines[0] == f"kernel {fastest}"


ORDERS_OF_ONES_OWN = {  # by option and head dim of the call: the order of the file
    ("causal", 16): "a", ("causal", 48): "b", ("causal", 512): "c", ("window", 64): "d",
    ("documents", 64): "e", ("bias", 64): "f", ("bias and window", 64): "f", ("alibi", 64): "",
}  # fmt: skip


@pytest.mark.parametrize(("option", "dim"), ORDERS_OF_ONES_OWN)
def test_the_measured_order_of_a_call(
    option: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = ("causal", 16, "a"), ("causal", 64, "b"), ("causal", 128, "c"), ("window", 128, "d")
    path = measure(tmp_path / "x", "sm_90", *orders, ("documents", 32, "e"), ("bias", 64, "f"))
    monkeypatch.setenv("RING_RATES", path)
    request = replace(
        BFLOAT16, head_dim=dim, v_head_dim=8, bias="bias" in option, alibi=option == "alibi"
    )
    mask = Mask(
        causal=True, window=(3, 0) if "window" in option else None,
        chunk_size=4 if option == "documents" else None,
    )  # fmt: skip
    expected = ORDERS_OF_ONES_OWN[option, dim]
    assert measured().order("sm_90", request, mask) == [*expected]
    assert measured().order("cpu", request, mask) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": "cpu", "rows": [{"option": "no", "head_dim": 1, "milliseconds": {}}]}', None]
)  # fmt: skip
def test_a_table_that_is_none_is_an_error(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nothing.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("RING_RATES", str(path))
    monkeypatch.setattr(prepare, "_prepare", LengthCaches(_prepare.__wrapped__))
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(
        ValueError, match=r"nothing\.json is no table of rates: .*bench --rates FILE"
    ):
        ring_attention(x, x, x)


CALL = Request(device="cuda", dtype="bfloat16", head_dim=128, v_head_dim=128, grad=True)
DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 100, 300, 512))
PREDICATE = Mask(predicate=prefix)
REFUSED: dict[str, tuple[Mask, dict[str, Any], tuple[int, int], str]] = {
    "segments on Blackwell": (CAUSAL, {"segment_ids": True}, (10, 0), "on Hopper only"),
    "a predicate on Blackwell": (PREDICATE, {}, (10, 0), "on Hopper only"),
    "ALiBi on Blackwell": (CAUSAL, {"alibi": True}, (10, 0), "on Hopper only"),
    "segments that repeat": (
        CAUSAL, {"segment_ids": True, "deterministic": True}, (9, 0), "is not deterministic"
    ),
    "a predicate that repeats": (PREDICATE, {"deterministic": True}, (9, 0), "not deterministic"),
    "segments and documents": (DOCUMENTS, {"segment_ids": True}, (9, 0), "no segment_ids together"),
    "ALiBi and documents": (DOCUMENTS, {"alibi": True}, (9, 0), "no alibi_slopes together"),
}  # fmt: skip


def _limits(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, options: dict[str, Any], gpu: tuple[int, int]
) -> tuple[str, ...]:
    monkeypatch.setattr(fa4, "capability", lambda: gpu)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    program = ring_program(make_plan(mask, seq_len=512, cp_size=1))
    assert fa4.FA4.limits is not None
    return fa4.FA4.limits(replace(CALL, **options), program)


@pytest.mark.parametrize("name", REFUSED)
def test_fa4_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, options, gpu, why = REFUSED[name]
    (reason,) = _limits(monkeypatch, mask, options, gpu)
    assert why in reason


@pytest.mark.parametrize(
    ("dims", "gpu", "version", "takes"),
    [
        ((128, 128), (8, 0), 90000, True), ((192, 128), (9, 0), 91900, True),
        ((256, 256), (9, 0), 91800, False), ((128, 64), (10, 0), 91900, False),
    ],
)  # fmt: skip
def test_cudnn(
    dims: tuple[int, int], gpu: tuple[int, int], version: int, takes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sdpa, "capability", lambda: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    request = replace(CALL, head_dim=dims[0], v_head_dim=dims[1])
    program = ring_program(make_plan(CAUSAL, seq_len=512, cp_size=1))
    limits = sdpa.CUDNN.limits
    assert limits is not None and (limits(request, program) == ()) is takes
