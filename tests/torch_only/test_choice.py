"""Kernels and transports are chosen or refused: by name, with every reason, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_core import KernelConfig, Mask, Plan, Request, UnsupportedError, make_plan, refusals
from ring_torch import _window, kernels, ring_attention
from ring_torch._call import _prepare
from ring_torch._comm import Ring
from ring_torch._transport import choose_transport
from ring_torch.kernels import cudnn, fa2, fa3, fa4
from ring_torch.kernels.triton import TritonKernel
from ring_torch.local import LocalRanks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CAUSAL = Mask(causal=True)
BFLOAT16 = Request("cuda", "bfloat16", 64, 64, grad=True)


def plan(mask: Mask = CAUSAL, schedule: Any = "plain", cp_size: int = 4) -> Plan:
    return make_plan(mask, seq_len=16 * cp_size, cp_size=cp_size, schedule=schedule)


def chosen(
    transport: str, plan: Plan, device: torch.device = CPU, *, size: int = 4, probe: bool = True
) -> str:
    """The transport of a call with four query heads of 8 for each key head, in bfloat16."""
    ring = Ring(None, 0, size)
    return choose_transport(transport, ring, plan, device, widths=(32, 16, 2), probe=probe)


@pytest.mark.parametrize("dim", [192, 256])
def test_fa3_is_deterministic_for_some_head_dims(dim: int) -> None:
    request = replace(BFLOAT16, head_dim=dim, v_head_dim=dim, deterministic=True)
    reasons = refusals(fa3.FA3.capabilities, request, plan())
    wanted = () if dim == 192 else ("is deterministic for head dims up to 192, not 256",)
    assert reasons == wanted
    assert not refusals(fa3.FA3.capabilities, replace(request, deterministic=False), plan())


UNGATHERED = {
    "striped": (plan(schedule="striped"), "schedule 'striped' deals tokens out one by one"),
    "balanced": (plan(schedule="balanced"), "schedule 'balanced' moves queries"),
    "predicate": (
        plan(Mask(predicate=lambda q, k: q >= k)),
        "a predicate mask is planned in tiles",
    ),
}


@pytest.mark.parametrize("name", UNGATHERED)
@pytest.mark.parametrize("transport", ["gather", "pull"])
def test_a_named_transport_never_falls_back(transport: str, name: str) -> None:
    """Every reason is named at once, with what would work instead."""
    refused, words = UNGATHERED[name]
    with pytest.raises(UnsupportedError) as caught:
        chosen(transport, refused)
    message = str(caught.value)
    assert message.startswith(f"transport '{transport}': {words}")
    assert ("need CUDA tensors and a nccl group" in message) == (transport == "pull")
    assert message.endswith("Instead: use transport='p2p' or 'auto'")
    for works in ("p2p", "auto"):
        assert chosen(works, refused) == "p2p"


def test_without_gpus_keys_travel_in_messages() -> None:
    assert chosen("gather", plan()) == "gather"
    assert chosen("auto", plan()) == "p2p"
    with pytest.raises(UnsupportedError, match="need CUDA tensors and a nccl group"):
        chosen("pull", plan())


@pytest.mark.parametrize("transport", ["auto", "p2p", "gather", "pull"])
def test_alone_nothing_travels(transport: str) -> None:
    assert chosen(transport, plan(), size=1) == "p2p"


REASON = "the ranks' GPUs do not reach each other's memory"


@pytest.mark.parametrize("reaches", [True, False])
def test_pull_needs_gpus_that_reach_each_other(
    reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(
        _window, "window_of", lambda _: SimpleNamespace(refusals=() if reaches else (REASON,))
    )
    assert chosen("pull", plan(), GPU, probe=False) == "pull"  # nobody is asked
    expected = "pull" if reaches else "p2p"
    assert chosen("auto", plan(), GPU) == expected
    if not reaches:
        with pytest.raises(UnsupportedError, match=REASON):
            chosen("pull", plan(), GPU)


def test_auto_gathers_no_more_than_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences on each of many ranks are for who asks for them; a window's halo is not."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(_window, "window_of", lambda _: SimpleNamespace(refusals=()))
    many, halo = plan(cp_size=32), plan(Mask(window=(3, 3)), cp_size=32)
    assert chosen("auto", many, GPU, size=32) == "p2p"
    assert chosen("pull", many, GPU, size=32) == "pull"
    assert chosen("auto", halo, GPU, size=32) == "pull"


def _refused_on_every_rank(_: int) -> None:
    x = torch.zeros(1, 4, 2, 8)
    for options in ({"transport": "gather", "schedule": "striped"}, {"transport": "pull"}):
        with pytest.raises(UnsupportedError, match=f"transport '{options['transport']}': "):
            ring_attention(x, x, x, causal=True, **options)  # type: ignore[call-overload]
    ring_attention(x, x, x, causal=True, transport="gather")  # ranks are still in step


def test_a_refused_transport_sends_nothing() -> None:
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
    """Let torch show a GPU of some compute capability; libraries are looked for anew."""

    def show(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    def forget() -> None:
        for module in (fa4, fa3, cudnn, fa2):
            module._missing.cache_clear()

    forget()
    show(9, 0)
    yield show
    forget()


def _absent(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("module", "package"), [(fa4, "flash-attn-4"), (fa2, "flash-attn")])
def test_what_is_not_installed_says_how_to(
    module: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "version", _absent)
    name = module.__name__.rpartition(".")[2]
    with pytest.raises(UnsupportedError) as caught:
        kernels.choose(KernelConfig(name), BFLOAT16, plan())
    message = str(caught.value)
    assert message.startswith(f"kernel '{name}': {package} is not installed")
    assert message.endswith(f"pip install {package}. Instead: use kernel='auto'")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_4_under_an_older_one_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    monkeypatch.setattr(fa4, "_interface", SimpleNamespace)
    message = fa4.FA4.missing()
    assert message is not None and "flash-attn 2.8 has put an older flash_attn/cute" in message
    assert message.endswith("pip install --force-reinstall --no-deps flash-attn-4")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_4_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no cutlass")

    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    monkeypatch.setattr(fa4, "_interface", broken)
    assert fa4.FA4.missing() == "flash-attn-4 4.1 does not load: no cutlass"


@pytest.mark.usefixtures("gpu")
def test_auto_says_why_not_the_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "version", _absent)
    monkeypatch.setattr(TritonKernel, "missing", lambda _: None)
    choice = kernels.choose(KernelConfig(), replace(BFLOAT16, softcap=True, bias=True), plan())
    assert choice.kernel.capabilities.name == "triton"
    passed_over = {can.name: why for can, why in choice.passed_over}
    assert {"has no bias"} <= set(passed_over["fa4"])
    assert {"has no softcap", "has no bias"} <= set(passed_over["cudnn"])
    choice = kernels.choose(KernelConfig(), BFLOAT16, plan())
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
    """What was prepared for a good value does not let a bad one pass."""
    good, bad, words = EQUAL[name]
    x = torch.zeros(1, 8, 2, 16)
    call: Any = ring_attention
    call(x, x, x, **{name: good})
    with pytest.raises(ValueError, match=words):
        call(x, x, x, **{name: bad})


def test_float_offsets_are_refused_after_equal_ints() -> None:
    x = torch.zeros(1, 8, 2, 8)
    ring_attention(x, x, x, cu_seqlens=(0, 5, 8))
    with pytest.raises(ValueError, match="cu_seqlens must be one row"):
        ring_attention(x, x, x, cu_seqlens=(0.0, 5.0, 8.0))  # type: ignore[arg-type]
