"""Kernels and transports are chosen, or refused with every reason and what to do instead."""

from __future__ import annotations

import re
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
from ring_core.choose.rates import Case, Rates, Times, to_text
from ring_torch import ContextParallel, kernels, prepare, ring_attention, strategies, transports
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4, flash_attn
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.triton import TritonKernel
from ring_torch.local import LocalRanks
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


def test_without_gpus_keys_travel_in_messages() -> None:
    assert chosen(MESSAGES, program()) == chosen(("gather", "auto"), program()) == MESSAGES
    assert chosen(AUTO, program()) == RING
    with pytest.raises(UnsupportedError, match="need CUDA tensors and a nccl group"):
        chosen(COPIES, program())


@pytest.mark.parametrize("move", [AUTO, RING, MESSAGES, COPIES])
def test_alone_nothing_travels(move: tuple[str, str]) -> None:
    assert chosen(move, program(), size=1) == RING


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


def _of_one_choice(rank: int) -> bool:
    """Return True if ``auto`` gives the same bits as ``strategy="ulysses"``."""
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
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _compiled_gathers(rank: int) -> bool:
    """Return True if a compiled ``auto`` call with a window gives the same bits as a gather."""
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
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_auto_runs_the_trade_that_it_chose() -> None:
    """A compiled call with a window gathers: only a gather leaves out what the window hides."""
    with LocalRanks(4) as ranks:
        assert all(ranks.run(_of_one_choice))
        assert all(ranks.run(_compiled_gathers))


def _refused_on_every_rank(_: int) -> None:
    x = torch.zeros(1, 4, 2, 8)
    for options in ({"strategy": "gather", "layout": "striped"}, {"transport": "symm_mem"}):
        with pytest.raises(UnsupportedError, match=f"^strategy '.*{next(iter(options.values()))}'"):
            ring_attention(x, x, x, causal=True, **options)  # type: ignore[call-overload]  # wrong on purpose
    ring_attention(x, x, x, causal=True, strategy="gather")  # the ranks' calls still match


def test_a_refused_strategy_sends_nothing() -> None:
    with LocalRanks(2) as ranks:
        ranks.run(_refused_on_every_rank)


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
    monkeypatch.setattr(fa4.library, "_public_module", lambda: older)
    message = fa4.FA4.unavailable_reason()
    assert message is not None and "flash-attn 2.8 has put an older flash_attn/cute" in message
    assert message.endswith("pip install --force-reinstall --no-deps flash-attn-4")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_4_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no cutlass")

    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    monkeypatch.setattr(fa4.library, "_public_module", broken)
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


def test_the_order_of_kernels(gpu: Any) -> None:
    names = [kernel.capabilities.name for kernel in kernels.in_order("cuda")]
    assert names == ["fa4", "fa3", "cudnn", "fa2", "sdpa", "sdpa", "triton", "eager"]
    gpu(8, 0)
    names = [kernel.capabilities.name for kernel in kernels.in_order("cuda")]
    assert names == ["fa2", "fa4", "fa3", "cudnn", "sdpa", "sdpa", "triton", "eager"]


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


def test_float_offsets_are_refused_after_equal_ints() -> None:
    x = torch.zeros(1, 8, 2, 8)
    ring_attention(x, x, x, cu_seqlens=(0, 5, 8))
    with pytest.raises(ValueError, match="cu_seqlens must be one row"):
        ring_attention(x, x, x, cu_seqlens=(0.0, 5.0, 8.0))  # type: ignore[arg-type]  # wrong on purpose


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
CHOSEN: dict[str, tuple[Request, Mask, str]] = {
    "causal": (BFLOAT16, CAUSAL, "fa4"),
    "wide": (replace(BFLOAT16, head_dim=256, v_head_dim=256), CAUSAL, "fa4"),
    "unlike": (replace(BFLOAT16, head_dim=192, v_head_dim=128), CAUSAL, "fa4"),
    "predicate, both passes": (BFLOAT16, STRIPES, "fa4"),
    "predicate, forward": (replace(BFLOAT16, grad=False), STRIPES, "fa4"),
    "softcap": (replace(BFLOAT16, softcap=True), CAUSAL, "fa4"),
    "bias": (replace(BFLOAT16, bias=True), CAUSAL, "triton"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_auto_takes_the_fastest_by_the_table(name: str, installed: Any) -> None:
    installed("fa4", "cudnn")
    request, mask, kernel = CHOSEN[name]
    choice = kernels.choose(KernelConfig(), request, program(mask, cp_size=1))
    assert choice.kernel.capabilities.name == kernel


def test_without_flash_attn_4_the_fastest_of_the_others(installed: Any) -> None:
    installed("cudnn")
    for request in (BFLOAT16, replace(BFLOAT16, head_dim=256, v_head_dim=256)):
        assert (
            kernels.choose(KernelConfig(), request, program()).kernel.capabilities.name == "cudnn"
        )


def test_a_gpu_that_was_not_timed_keeps_the_order(installed: Any) -> None:
    installed("fa4", "fa3", "cudnn", "fa2", major=10)
    choice = kernels.choose(KernelConfig(), replace(BFLOAT16, grad=False), program())
    assert choice.kernel.capabilities.name == "fa4"
    assert choice.describe() == "kernel fa4"
    installed("fa4", "fa3", "cudnn", "fa2", major=8)
    assert kernels.choose(KernelConfig(), BFLOAT16, program()).describe() == "kernel fa2"


def test_a_gpu_of_another_maker_was_not_timed(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("fa4")
    assert kernels.capability_number("cuda") == 90
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert kernels.capability_number("cuda") is kernels.capability_number("mps") is None


def test_explain_has_times(installed: Any) -> None:
    installed("fa4", "cudnn")
    request = replace(BFLOAT16, head_dim=256, v_head_dim=256, q_heads=32, kv_heads=8)
    whole = ring_program(make_plan(CAUSAL, seq_len=16384, cp_size=1))
    lines = kernels.choose(KernelConfig(), request, whole).describe().splitlines()
    times = r"about \d+\.?\d* ms forward, \d+\.?\d* ms with backward"
    case = r" \(by NVIDIA H200, causal, head dim 256\)"
    assert re.fullmatch(f"kernel fa4: {times}{case}", lines[0])
    assert re.fullmatch(rf"  not cudnn \(cuda\): {times}", lines[1])
    assert re.fullmatch(rf"  not triton \(cuda\): {times}", lines[2])
    named = kernels.choose(KernelConfig("triton"), request, whole).describe()
    assert re.match(f"kernel triton: {times} \\(by ", named)
    capped = kernels.choose(KernelConfig(), replace(request, softcap=True), whole).describe()
    assert "  not cudnn (cuda): has no softcap" in capped


def test_explain_says_what_a_predicate_compiles(installed: Any) -> None:
    installed("fa4")
    lines = kernels.choose(KernelConfig(), BFLOAT16, program(STRIPES)).describe().splitlines()
    assert lines[0].startswith("kernel fa4: ")
    assert (
        lines[1] == "  a predicate that is new to it: about 10 s to compile, forward and backward"
    )
    eager = kernels.choose(KernelConfig("eager"), BFLOAT16, program(STRIPES)).describe()
    assert eager == "kernel eager\n  a predicate that is new to it: nothing to compile"


def _times(path: Path, **kernels: tuple[float, float]) -> str:
    times = tuple((name, Times(*x)) for name, x in kernels.items())
    case = Case("torch", 0, "a host", (), 64, 2080, (2, 2), (16, 16), "causal", times)
    path.write_text(to_text(Rates((case,))))
    return str(path)


@pytest.mark.parametrize("fastest", ["sdpa", "eager"])
def test_a_table_of_ones_own(fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowest = {"sdpa": "eager", "eager": "sdpa"}[fastest]
    path = _times(tmp_path / "rates.json", **{fastest: (1.0, 2.0), slowest: (2.0, 4.0)})
    monkeypatch.setenv("RING_RATES", path)
    monkeypatch.setattr(prepare, "_prepare", _prepare.__wrapped__)
    x = torch.zeros(1, 64, 2, 16)
    lines = ContextParallel().explain(x, x, x, causal=True).splitlines()
    source = "(by a host, causal, head dim 16)"
    assert lines[0] == f"kernel {fastest}: about 1 ms forward, 2 ms with backward {source}"
    devices = {"sdpa": "cpu", "eager": "any device"}[slowest]
    assert f"  not {slowest} ({devices}): about 2 ms forward, 4 ms with backward" in lines


def test_a_table_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_RATES", str(tmp_path / "nothing.json"))
    monkeypatch.setattr(prepare, "_prepare", _prepare.__wrapped__)
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"nothing\.json is no table of rates"):
        ring_attention(x, x, x)
