"""Kernels and transports are chosen, or refused with every reason and what to do instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from cases import prefix
from on_ranks import on_four_ranks
from refused import refused

from ring_core import (
    KernelConfig,
    Mask,
    Request,
    RingProgram,
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
Move = tuple[str, str]  # strategy and transport
BFLOAT16 = Request("cuda", "bfloat16", 64, 64, grad=True)


def program(mask: Mask = CAUSAL, cp_size: int = 4, **layout: Any) -> RingProgram:
    return ring_program(make_plan(mask, seq_len=16 * cp_size, cp_size=cp_size, **layout))


def chosen(
    move: Move, over: RingProgram, device: torch.device = CPU, *, size: int = 4,
    probe: bool = True, **changes: Any,
) -> Move:  # fmt: skip
    """Return the chosen strategy and transport for bfloat16, with 4 query heads per K/V head."""
    request = Request(device.type, "bfloat16", 8, 8, **{"q_heads": 4, "kv_heads": 1} | changes)
    spec, way = choose_strategy(
        *move, Ranks(None, 0, size), over, device, request=request, probe=probe
    )
    return spec.name, way.name


UNGATHERED = {
    "layout 'striped' assigns tokens one by one": program(layout="striped"),
    "a predicate mask is planned in tiles": program(Mask(predicate=lambda q, k: q >= k)),
}
AUTO, RING = ("auto", "auto"), ("ring", "p2p")
MESSAGES, COPIES = ("gather", "p2p"), ("gather", "symm_mem")


@pytest.mark.parametrize("reason", UNGATHERED)
@pytest.mark.parametrize("move", [MESSAGES, COPIES, ("gather", "auto"), ("auto", "symm_mem")])
def test_a_named_strategy_never_falls_back(move: Move, reason: str) -> None:
    """The error lists every reason, and what would work instead."""
    refused = UNGATHERED[reason]
    with pytest.raises(UnsupportedError) as caught:
        chosen(move, refused)
    message = str(caught.value)
    assert message.startswith(f"strategy '{move[0]}' over transport '")
    assert reason in message
    assert ("need CUDA tensors and a nccl group" in message) == (move[1] == "symm_mem")
    assert message.endswith("use strategy='ring' or 'auto' and transport='p2p' or 'auto'")
    for works in (RING, AUTO, ("ring", "auto"), ("auto", "p2p")):
        assert chosen(works, refused) == RING


@pytest.mark.parametrize("strategy", ["ring", "balanced"])
def test_steps_are_sent_in_messages(strategy: Any) -> None:
    said = "or 'auto', or strategy='ulysses' or strategy='gather'"
    refused(said, chosen, (strategy, "symm_mem"), program(), error=UnsupportedError)
    for transport in ("auto", "p2p"):
        choice = chosen((strategy, transport), ring_program(program().plan, strategy))
        assert choice == (strategy, "p2p")


REASON = "the ranks' GPUs do not reach each other's memory"
TRADED = ("ulysses", "symm_mem")
MANY = program(cp_size=32), program(Mask(window=(3, 3)), cp_size=32)
EVEN: dict[str, Any] = {"q_heads": 4, "kv_heads": 4}
#: Moves over GPUs of NCCL, where they reach each other's memory and where not; the ring, more of
#: the request, and True where Triton is installed.
MOVES: tuple[tuple[Move, Move, Move, RingProgram, dict[str, Any], bool], ...] = (
    (AUTO, COPIES, RING, program(), {}, True), (("gather", "auto"), COPIES, MESSAGES, program(), {}, True),
    # Gathering whole sequences of many ranks takes memory; a halo does not.
    (AUTO, RING, RING, MANY[0], {}, True), (AUTO, COPIES, RING, MANY[1], {}, True),
    (("gather", "auto"), COPIES, MESSAGES, MANY[0], {}, True),
    # Trading heads moves few bytes, but needs Triton; and a bias travels, too.
    (AUTO, TRADED, RING, program(), EVEN, True), (AUTO, COPIES, RING, program(), EVEN, False),
    (AUTO, COPIES, RING, program(), EVEN | {"bias": True}, True),
    (("gather", "auto"), COPIES, MESSAGES, program(), EVEN, True),
)  # fmt: skip


@pytest.mark.parametrize("reaches", [True, False])
def test_moves_between_gpus(reaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = SimpleNamespace(refusals=() if reaches else (REASON,))
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(symm_buffer, "symm_buffer_of", lambda _: buffer)
    for move, there, otherwise, over, changes, triton in MOVES:
        monkeypatch.setattr(transports, "has_triton", lambda has=triton: has)
        took = chosen(move, over, GPU, size=over.plan.cp_size, **changes)
        assert took == (there if reaches else otherwise), (move, changes)
    assert chosen(COPIES, program(), GPU, probe=False) == COPIES  # no probe
    with nullcontext() if reaches else pytest.raises(UnsupportedError, match=REASON):
        assert chosen(COPIES, program(), GPU) == COPIES
        assert chosen(("auto", "symm_mem"), program(), GPU, **EVEN) == TRADED


@on_four_ranks
def test_auto_runs_what_it_chose(rank: int) -> None:
    """It trades heads; a compiled call with a window gathers: that leaves out what it hides."""
    torch.manual_seed(rank)
    leaves = [torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3)]
    cp = ContextParallel()
    compiled = torch.compile(cp.attention, backend="eager", fullgraph=True)
    anywhere = [replace(spec, is_automatic=lambda _: True) for spec in (ULYSSES, GATHER)]
    with patch.object(strategies, "STRATEGIES", (*anywhere, *strategies.STRATEGIES[2:])):
        for calls, ways, window in (
            ((cp.attention, cp.attention), ("auto", "ulysses"), None),
            ((compiled, cp.attention), ("auto", "gather"), (3, 0)),
        ):
            results = []
            for call, way in zip(calls, ways, strict=True):
                options: Any = {"causal": True, "window": window, "strategy": way}
                trades = "55 % of the bytes of a gather" in cp.explain(*leaves, **options)
                with nullcontext() if window is None else patch.object(Ulysses, "forward", None):
                    assert trades is (window is None)
                    out = call(*leaves, **options)
                results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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


#: Kernels, what they find where they look for their library, and their reason.
MISSING: tuple[tuple[str, Any, str, Any, str], ...] = (
    ("fa4", fa4, "version", _absent, "flash-attn-4 is not installed; pip install flash-attn-4"),
    ("fa2", flash_attn, "version", _absent, "flash-attn is not installed.*pip install flash-attn"),
    (
        "fa4", fa4.library, "public_module", lambda: SimpleNamespace(flash_attn_func=lambda q: q),
        "flash-attn 2.8 has put an older flash_attn/cute over it; .* --no-deps flash-attn-4",
    ),
    (
        "fa4", fa4.library, "public_module", Mock(side_effect=ImportError("no cutlass")),
        "flash-attn-4 4.1 does not load: no cutlass",
    ),
)  # fmt: skip


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "module", "function", "finds", "reason"), MISSING)
def test_what_is_missing_says_how_to_mend_it(
    name: str, module: Any, function: str, finds: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "version", lambda _: "4.1")
    monkeypatch.setattr(module, function, finds)
    wanted = rf"^kernel '{name}': .*{reason}\. Instead: use kernel='auto'$"
    config = KernelConfig(name)
    refused(wanted, kernels.choose, config, BFLOAT16, program(), error=UnsupportedError)


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


EQUAL: tuple[tuple[str, Any, Any, str], ...] = (
    ("causal", True, 1, "causal must be a bool"), ("window", (1, 0), (True, 0), "window"),
    ("cu_seqlens", (0, 5, 8), (0.0, 5.0, 8.0), "cu_seqlens must be one row"),
    ("chunk_size", 2, 2.0, "chunk_size must be an integer"),
    ("dropout_p", 0.0, False, "dropout_p must be in"),
)  # fmt: skip


def test_an_equal_value_of_another_type_is_another_call() -> None:
    """A call prepared for ``True`` is not reused for ``1``, which is refused."""
    x = torch.zeros(1, 8, 2, 16)
    call: Any = ring_attention
    for name, good, bad, message in EQUAL:
        call(x, x, x, **{name: good})
        refused(message, call, x, x, x, **{name: bad})


WINDOW = Mask(causal=True, window=(3, 0))
WIDE = replace(BFLOAT16, head_dim=256, v_head_dim=256)
#: Calls like the stored rows of options on an H200: request, mask, and what ``auto`` takes with
#: flash-attn-4, and of those that torch and Triton bring.
CHOSEN: dict[str, tuple[Request, Mask, str, str]] = {
    "causal": (BFLOAT16, CAUSAL, "fa4", "cudnn"),
    "wide": (WIDE, CAUSAL, "fa4", "cudnn"),
    "unlike": (replace(BFLOAT16, head_dim=192, v_head_dim=128), CAUSAL, "fa4", "cudnn"),
    "window": (BFLOAT16, WINDOW, "fa4", "triton"),
    "wide window": (WIDE, WINDOW, "fa4", "sdpa"),
    "documents": (BFLOAT16, Mask(causal=True, cu_seqlens=(0, 7, 16)), "fa4", "triton"),
    "predicate": (BFLOAT16, Mask(predicate=lambda q, k: (q >= k) & (k % 2 == 0)), "fa4", "triton"),
    **{
        name: (replace(BFLOAT16, **dict[str, Any]({name: True})), CAUSAL,
            "triton" if name in ("bias", "dropout") else "fa4", "triton")
        for name in ("softcap", "alibi", "bias", "dropout", "segment_ids")
    },
}  # fmt: skip


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CHOSEN)
def test_auto_takes_the_fastest_on_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request, mask, *expected = CHOSEN[name]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    monkeypatch.setattr(TritonKernel, "unavailable_reason", lambda _: None)
    for libraries, kernel in zip(
        (("fa4", "cudnn", "sdpa"), ("cudnn", "sdpa")), expected, strict=True
    ):
        monkeypatch.setattr(
            FlashKernel, "unavailable_reason",
            lambda x, names=libraries: None if x.capabilities.name in names else "is not there",
        )  # fmt: skip
        for grad in (True, False):
            asked = replace(request, grad=grad)
            choice = kernels.choose(KernelConfig(), asked, program(mask, cp_size=1))
            assert choice.kernel.capabilities.name == kernel


ORDERS_OF_ONES_OWN = {  # by option and head dim of the call: the order of the file
    ("causal", 16): "a", ("causal", 48): "b", ("causal", 512): "c", ("window", 64): "d",
    ("documents", 64): "e", ("bias", 64): "f", ("bias and window", 64): "f", ("alibi", 64): "",
}  # fmt: skip


def test_the_measured_order_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = (
        ("causal", 16, "a"), ("causal", 64, "b"), ("causal", 128, "c"), ("window", 128, "d"),
        ("documents", 32, "e"), ("bias", 64, "f"),
    )  # fmt: skip
    rows = [{"option": x, "head_dim": dim, "milliseconds": {name: 1.0}} for x, dim, name in orders]
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"device": "sm_90", "rows": rows}))
    monkeypatch.setenv("RING_RATES", str(path))
    for (option, dim), expected in ORDERS_OF_ONES_OWN.items():
        request = replace(
            BFLOAT16, head_dim=dim, v_head_dim=8, bias="bias" in option, alibi=option == "alibi"
        )
        mask = Mask(
            causal=True, window=(3, 0) if "window" in option else None,
            chunk_size=4 if option == "documents" else None,
        )  # fmt: skip
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
    refused(r"nothing\.json is no table of rates: .*bench --rates FILE", ring_attention, x, x, x)


DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 100, 300, 512))
PREDICATE, SEGMENTS = Mask(predicate=prefix), {"segment_ids": True}
#: Kernels, compute capabilities, masks, requests, and why not; `None` where they are taken.
LIMITS: tuple[tuple[Any, tuple[int, int], Mask, dict[str, Any], str | None], ...] = (
    (fa4.FA4, (10, 0), CAUSAL, SEGMENTS, "on Hopper only"),
    (fa4.FA4, (10, 0), PREDICATE, {}, "on Hopper only"),
    (fa4.FA4, (10, 0), CAUSAL, {"alibi": True}, "on Hopper only"),
    (fa4.FA4, (9, 0), CAUSAL, SEGMENTS | {"deterministic": True}, "is not deterministic"),
    (fa4.FA4, (9, 0), PREDICATE, {"deterministic": True}, "not deterministic"),
    (fa4.FA4, (9, 0), DOCUMENTS, SEGMENTS, "no segment_ids together"),
    (fa4.FA4, (9, 0), DOCUMENTS, {"alibi": True}, "no alibi_slopes together"),
    (flash_attn.FA3, (9, 0), CAUSAL, {"head_dim": 192, "deterministic": True}, None),
    (flash_attn.FA3, (9, 0), CAUSAL, {"head_dim": 256}, None),
    (
        flash_attn.FA3, (9, 0), CAUSAL, {"head_dim": 256, "deterministic": True},
        "is deterministic for head dims up to 192, not 256",
    ),
    (sdpa.CUDNN, (8, 0), CAUSAL, {"head_dim": 128, "cudnn": 90000}, None),
    (sdpa.CUDNN, (9, 0), CAUSAL, {"head_dim": 192, "v_head_dim": 128}, None),
    (sdpa.CUDNN, (9, 0), CAUSAL, {"head_dim": 256, "cudnn": 91800}, "from cuDNN 9.19 on"),
    (sdpa.CUDNN, (10, 0), CAUSAL, {"head_dim": 128, "v_head_dim": 64}, "above 128, and unlike ones, on Hopper"),
)  # fmt: skip


@pytest.mark.parametrize(("kernel", "gpu", "mask", "options", "why"), LIMITS)
def test_what_a_kernel_has_not(
    kernel: Any, gpu: tuple[int, int], mask: Mask, options: dict[str, Any], why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    version, asked = options.get("cudnn", 91900), {n: x for n, x in options.items() if n != "cudnn"}
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    for module in (fa4, sdpa):
        monkeypatch.setattr(module, "capability", lambda: gpu)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    over = ring_program(make_plan(mask, seq_len=512, cp_size=1))
    request = replace(BFLOAT16, **{"v_head_dim": asked.get("head_dim", 64)} | asked)
    limits = () if kernel.limits is None else kernel.limits(request, over)
    reasons = *refusals(kernel.capabilities, request, over), *limits
    assert [why in reason for reason in reasons if why] == [True] * (why is not None)
    assert bool(reasons) is (why is not None)
