"""The Triton kernels in Triton's interpreter, against the oracle: alone and in the ring."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import triton_interpreter as interpreter
from backends.jax_devices import assert_vmapped
from backends.triton_compiler import STEPS, launches_in, pretend
from backends.triton_interpreter import TritonBackend, alone
from blocks import CAUSAL, several_blocks
from cases import CASES, Case, diagonals
from loops import CASES as LOOPS, assert_equal_bits, in_loop, unrolled
from pages import check_jax_matrix
from refused import refused
from tolerances import assert_close

from ring_core import KernelConfig, Mask, StrategyConfig, UnsupportedError
from ring_core.plan.tile_mask import BlockGeometry
from ring_core.triton.tile_configs import FLAGS_TOGETHER
from ring_jax.tools.cli import main
from ring_jax_gpu import ContextParallel, operands, ring_attention
from ring_jax_gpu.block_index import block_index
from ring_jax_gpu.hopper import run
from ring_jax_gpu.hopper.ffi import InArray
from ring_jax_gpu.launch import KernelName, Launch, stages_of

SMALL = KernelConfig("triton", block_q=32, block_k=32)
SIXTEEN = KernelConfig("triton", block_q=16, block_k=16)
CONFIGS = {
    "small": SMALL, "fused": replace(SMALL, fused_backward=True),
    "64x16": replace(SMALL, block_q=64, block_k=16), "16x64": replace(SMALL, block_q=16, block_k=64),
}  # fmt: skip
BLOCKS = several_blocks(
    80, 150, "predicate-bits", "bias-large", "shown-rows", "negative-left", "negative-part", "negative-rows",
)  # fmt: skip
FUSED = ("causal", "gqa", "segments", "poison-k", "everything", "bias-very-negative")
RUNS = [
    *((name, "small") for name in BLOCKS), *((name, "fused") for name in FUSED),
    *product(("window-both", "segments", "predicate"), ("64x16", "16x64")),
]  # fmt: skip


@pytest.mark.nightly(unless=[*(f"{name}-{config}" for name, config in (
    *((name, "small") for name in (
        "chunks", "documents", "predicate", "fewer-keys", "gqa", "bfloat16", "wider-v",
        "negative-scale", "bias", "bias-very-negative", "shown-heads", "spread", "poison-k",
        "poison-v", "v-inf", "bias-nan",
    )),
    ("causal", "fused"), ("poison-k", "fused"), ("everything", "fused"),
    ("bias-very-negative", "fused"), ("window-both", "64x16"), ("segments", "16x64"),
))])  # fmt: skip
@pytest.mark.parametrize(("name", "config"), RUNS)
def test_several_blocks(name: str, config: str) -> None:
    assert_close(BLOCKS[name], alone(BLOCKS[name], CONFIGS[config]))


GATHERED = (
    "causal-zigzag-cp4", "documents-window-contiguous-cp4", "bias-zigzag", "shown-segments-striped",
)  # fmt: skip
_HOPPER: dict[str, Any] = {"dims": (64, 64), "dtype": "bfloat16", "heads": (2, 1)}
_DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 3, 10, 41, 72, 96))
#: Cases of the ring that are not in the table.
OTHERS = [
    # Slopes, sinks and dropout are those of a rank's heads, which are no range.
    Case(
        "traded", CAUSAL, "zigzag", 4, 24, heads=(12, 3), sinks=0, alibi=1, dropout_p=0.3, lse_grad=True,
    ),
    Case("blocks", Mask(causal=True, window=(120, 0)), "zigzag", 2, 300),
    Case("hopper-documents", _DOCUMENTS, "striped", 2, 96, **_HOPPER),
]  # fmt: skip
RING = [
    *product((
        "causal-zigzag-cp2", "window-large-contiguous-cp2", "window-small-striped-cp2",
        "causal-balanced-cp4", "documents-chunks-striped-cp4", "predicate-zigzag-cp2",
        "predicate-balanced-cp4", "documents-window-zigzag-cp4", "sinks-many-contiguous",
        "poison-k-contiguous", "batch-0-contiguous", "shortest-zigzag-cp2", "everything-zigzag",
        "keys64-predicate-contiguous", "shown-documents-zigzag", "shown-bias-balanced", "blocks",
        "hopper-documents",
    ), ["auto"]),
    *product(GATHERED, ["gather"]), ("traded", "ulysses"), ("traded", "hybrid"),
]  # fmt: skip


@pytest.mark.nightly(only=[
    "documents-chunks-striped-cp4-auto", "predicate-zigzag-cp2-auto", "predicate-balanced-cp4-auto",
    "documents-window-zigzag-cp4-auto", "everything-zigzag-auto", "shown-bias-balanced-auto",
    "keys64-predicate-contiguous-auto", "shown-documents-zigzag-auto", "traded-ulysses",
    "traded-hybrid", *(f"{name}-gather" for name in GATHERED[1:]),
])  # fmt: skip
@pytest.mark.parametrize(("name", "strategy"), RING)
def test_in_the_ring(name: str, strategy: Any) -> None:
    """Packed documents are right without Hopper's single backward kernel, too.

    The dQ and the dK/dV kernel each get the documents of their own side.
    """
    case = (CASES | {case.name: case for case in OTHERS})[name]
    config: Any = SMALL if name == "blocks" else "triton"
    if strategy == "hybrid":
        strategy = StrategyConfig("hybrid", ulysses_size=2)
    with launched() as launches:
        assert_close(case, TritonBackend().run(case, kernel=config, strategy=strategy))
    if name == "hopper-documents":
        assert all(call.kwargs["launch"].hopper for call in launches.call_args_list)


@pytest.mark.nightly(unless=["window"])
@pytest.mark.parametrize("name", LOOPS)
def test_in_a_loop(name: str) -> None:
    """A ring rolled into a loop is exact, and bitwise equal to its unrolled stages."""
    looped = in_loop(TritonBackend(), LOOPS[name], SIXTEEN)
    assert_close(LOOPS[name], looped)
    if name != "window":  # per change; it compiles all unrolled stages, too
        assert_equal_bits(looped, unrolled(TritonBackend(), LOOPS[name], SIXTEEN))


def launched() -> Any:
    """Return a patch that records the launches of kernels."""
    return mock.patch.object(interpreter, "interpret", wraps=interpreter.interpret)


def test_outside_of_programs() -> None:
    """Under ``jax.disable_jit`` each kernel is launched in a program of its own."""
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16))

    def loss(x: Any) -> Any:
        return (ring_attention(x, x, x, axis_name=None, causal=True, kernel=SMALL) ** 2).sum()

    expected = jax.grad(loss)(x)
    with jax.disable_jit(), launched() as launches:
        np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=1e-5, atol=1e-5)
    kernels = [call.kwargs["launch"].kernel for call in launches.call_args_list]
    assert kernels == ["fwd", "bwd_dq", "bwd_dkv"]


def test_vmap() -> None:
    """A vmapped call is right: its entries run one by one."""
    assert_vmapped(ring_attention, KernelConfig("triton"), 40)


@pytest.mark.nightly(unless=["shape1"])
@pytest.mark.parametrize("shape", [(2, 1, 96, 96), (1, 2, 96, 96)])
def test_hidden_blocks_are_on_no_list(shape: tuple[int, ...]) -> None:
    """Lists of the forward, of dQ and of dK/dV have visible blocks only; no dbias is computed."""
    rng, square = np.random.default_rng(0), np.arange(96) // 24  # no multiple of a block
    mask = (square[:, None] == square) & (rng.random(shape) < 0.7)
    mask[..., 3, :] = False
    qkv = [jnp.asarray(rng.standard_normal((2, 96, 2, 16), np.float32)) for _ in range(3)]
    visited: list[int] = []

    def listed(kinds: Any) -> Any:
        blocks, counts = block_index(kinds)
        jax.debug.callback(lambda x: visited.append(int(x)), counts.sum())
        return blocks, counts

    def loss(qkv: Any) -> Any:
        options: Any = {"mask": jnp.asarray(mask), "softmax_scale": 0.3}  # traced in no other test
        return jnp.sum(ring_attention(*qkv, axis_name=None, kernel=SIXTEEN, **options))

    lists = mock.patch.object(operands, "block_index", listed)
    with lists, mock.patch.object(operands.StepWork, "bwd_dbias") as bwd_dbias:
        jax.block_until_ready(jax.grad(loss)(qkv))
        jax.effects_barrier()
    live = mask.any(axis=1).reshape(-1, 6, 16, 6, 16).any(axis=(2, 4))
    assert visited == [live.sum()] * 3 and not live.all()
    bwd_dbias.assert_not_called()


_WIDE: dict[str, Any] = {"seq_len": 150, **_HOPPER}
LEFT = [
    Case("left-causal", CAUSAL, **_WIDE, batch=2),
    Case("left-window", Mask(window=(50, 33)), **_WIDE),
    Case("left-poison-v", CAUSAL, **_WIDE, poison="v"),
    Case("left-poison-k", CAUSAL, **_WIDE, poison="k"),
    Case("left-chunks", Mask(causal=True, window=(30, 0), chunk_size=37), **_WIDE),
    Case("left-segments", CAUSAL, **_WIDE, batch=2, segments="documents", poison="k"),
]


@pytest.mark.nightly(unless=[
    "left-window-last", "left-poison-v-later", "left-poison-k-first", "left-segments-only",
])  # fmt: skip
@pytest.mark.parametrize("step", ["only", *STEPS])
@pytest.mark.parametrize("case", LEFT, ids=lambda case: case.name)
def test_what_the_kernels_for_hopper_leave(
    case: Case, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step != "only":
        pretend(monkeypatch, step)
        length = case.seq_len + 1 + [*STEPS].index(step)  # avoids another step's cached program
        case = replace(case, name=f"{length}-{case.name}", seq_len=length)

    def call(kernel: Any, parameters: Any, constants: Any, *, programs: int, **_: Any) -> Any:
        arrays = {name: x for name, x in parameters.items() if isinstance(x, InArray)}
        memory = {
            name: np.ascontiguousarray(x.array.swapaxes(1, 2) if x.layout else x.array)
            for name, x in arrays.items()
        }
        arguments = {name: interpreter.HostArray(x) for name, x in memory.items()}
        with np.errstate(all="ignore"):
            kernel[(programs, 1, 1)](**{**parameters, **arguments, **constants})
        return {
            name: memory[name].swapaxes(1, 2) if x.layout else memory[name]
            for name, x in arrays.items()
            if x.changed
        }

    def leave(*arrays: Any, launch: Launch, names: Any, num_changed: int) -> list[Any]:
        assert launch.hopper
        x: Any = {name: np.array(array) for name, array in zip(names, arrays, strict=True)}
        is_q_major = launch.kernel == "fwd"
        batch, heads, length, _ = x["q"].shape if is_q_major else run._keys(x).shape
        size = 64 if is_q_major else 128
        per_head = -(-length // size)
        many = programs = batch * heads * per_head
        flags = {"only_per_head": per_head}
        if is_q_major:
            flags["only_many"], programs = many, -(-many // FLAGS_TOGETHER)

        def left_out(flag: int, **changed: Any) -> Any:
            copies: Any = {name: np.array(array) for name, array in (x | changed).items()}
            copies["only"] = np.full(many, flag, np.int32)
            return run._run_left_out(launch, copies, flags, programs, size, call)

        flag = 1 if is_q_major else 2
        if not is_q_major:  # the kernel for Hopper has added to dQ where a flag is 1
            np.testing.assert_array_equal(left_out(1)["dq"], x["dq"])
        results = left_out(flag)
        return [results[name] for name in names[len(names) - num_changed :]]

    monkeypatch.setattr(interpreter, "interpret", leave)
    assert_close(case, alone(case, KernelConfig("triton")))


BOTH = "the forward and the backward"
#: Head dims, those at which kernels are launched, options, and passes with a kernel for Hopper.
LAUNCHES: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any], str]] = [
    *((x, y, {"causal": True}, "") for x, y in (
        ((192, 128), (256, 128)), ((160, 160), (256, 256)), ((24, 24), (24, 24)),
        ((128, 64), (128, 64)),
    )),
    *((x, y, {"causal": True}, BOTH) for x, y in (
        ((96, 96), (128, 128)), ((80, 80), (128, 128)), ((48, 48), (64, 64)), ((64, 64), (64, 64)),
    )),
    *(((64, 64), (64, 64), options, passes) for options, passes in (
        ({"softmax_scale": 0.5}, BOTH), ({"softcap": 2.0}, BOTH), ({"softmax_scale": -1.0}, ""),
        ({"segment_ids": jnp.zeros((1, 256), int)}, BOTH), ({"deterministic": True}, "the forward"),
        ({"dropout_p": 0.1, "dropout_seed": 1}, "the backward"),
        ({"mask": Mask(predicate=lambda q, k: k <= q)}, ""),
        ({"mask": Mask(causal=True, cu_seqlens=(0, 9, 256))}, BOTH),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "padded", "options", "passes"), LAUNCHES)
def test_explain_says_what_hopper_would_run(
    dims: tuple[int, int], padded: tuple[int, int], options: dict[str, Any], passes: str
) -> None:
    """Head dims that are no power of two are launched at the next one."""
    call = {"dims": dims, "tokens": [256, 256], "options": options}
    launches = {x["launch"].kernel: x["launch"] for x, _ in launches_in(call)}
    for launch in launches.values():
        consts = dict(launch.consts)
        assert (consts["D"], consts["DV"]) == padded
    assert launches["fwd"].hopper == ("forward" in passes)
    assert launches["bwd_dkv"].hopper == ("backward" in passes)
    text = explained(dims, kernel="triton", **options)
    says = "  triton on Hopper, with Triton 3.9 or newer: "
    assert (says in text) == bool(passes) and passes in text


def explained(dims: tuple[int, int], dtype: str = "bfloat16", **options: Any) -> str:
    cp = ContextParallel(jax.make_mesh((1,), ("cp",), devices=jax.devices()[:1]), axis_name="cp")
    q, v = (jnp.zeros((1, 256, 2, dim), dtype) for dim in dims)
    return cp.explain(q, q, v, **options)


def test_explain_names_a_kernel_for_each_platform(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained((4, 4), "float32", causal=True, sinks=jnp.zeros(2)).split("\n")
    assert lines[:2] == ["kernel triton (cuda)", "kernel xla (any other device)"]
    assert lines[2].startswith("  not cudnn (cuda): takes bfloat16 or float16")
    assert lines[3].startswith("  not pallas (tpu): needs ring-jax-tpu ")
    text = explained((512, 512), "float16", causal=True)
    assert text.startswith("kernel xla (any device)\n  not ")
    for name in ("triton", "cudnn"):
        assert f"\n  not {name} (cuda): takes head dims up to 256" in text
    assert main(["matrix"]) == 0
    check_jax_matrix(capsys.readouterr().out, "triton")


def test_refusals_say_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockGeometry, "tiles", None)  # as where there are too many

    def call(dim: int, blocks: dict[str, Any], **options: Any) -> Any:
        q, kernel = jnp.zeros((1, 64, 2, dim), "bfloat16"), KernelConfig("triton", **blocks)
        return ring_attention(q, q, q, axis_name=None, kernel=kernel, **options)

    refused_here = partial(refused, error=UnsupportedError)
    refused_here("block_q=64", call, 16, {"block_q": 96})
    refused_here("head dims up to 256, not 512", call, 512, {})
    fused = {"fused_backward": True}
    refused_here("rules out.* leave out fused_backward", call, 16, fused, deterministic=True)
    mask = Mask(predicate=diagonals)
    refused_here("more than 64 MiB. Instead: use kernel='xla'", call, 16, {}, mask=mask)
    assert explained((16, 16), mask=mask).startswith("kernel xla (any device)\n")


def test_programs_for_other_machines_are_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 16, 2, 16), jnp.float32)
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel="triton"))
    grad = jax.jit(jax.grad(lambda q: call(q).sum()))
    reasons = {"tpu": "runs on NVIDIA GPUs, and this", "cuda": "is compiled for the GPU of this"}
    for traced, (platform, reason) in product((call.trace(x), grad.trace(x)), reasons.items()):
        lower = partial(traced.lower, lowering_platforms=(platform,))
        refused(f"'triton': {reason}", lower, error=UnsupportedError)
    twice = jax.make_jaxpr(jax.grad(lambda q: grad(q).sum()))
    refused("the derivative of a gradient", twice, x, error=UnsupportedError)


def launch_of(kernel: KernelName, blocks: int, dim: int, stages: int) -> Launch:
    consts = dict.fromkeys(("BLOCK_Q", "BLOCK_K"), blocks) | {"FUSED": False}
    consts |= dict.fromkeys(("D", "DV", "PADDED", "PADDED_V"), dim)
    return Launch(kernel, (), tuple(consts.items()), (1, 1, 1), 8, stages)


def test_fewer_stages_where_shared_memory_is_small() -> None:
    launch = launch_of("fwd", 128, 128, 3)
    assert [stages_of(launch, 2, arch) for arch in (90, 80, 120)] == [3, 2, 1]
    large = launch_of("bwd_dkv", 256, 256, 2)
    refused("227 KiB of shared memory", stages_of, large, 2, 90, error=UnsupportedError)
