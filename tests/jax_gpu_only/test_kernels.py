"""The Triton kernels in Triton's interpreter, against the oracle: alone and in the ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import triton_interpreter as interpreter
from backends.jax_devices import JaxBackend
from backends.triton_compiler import STEPS, pretend
from backends.triton_interpreter import alone
from cases import CASES, Case, diagonals, prefix
from tolerances import assert_close

import ring_jax
from ring_core import KernelConfig, Mask, StrategyConfig, UnsupportedError
from ring_core.plan.tile_mask import BlockGeometry
from ring_core.triton.tile_configs import FLAGS_TOGETHER
from ring_jax_gpu import ContextParallel, ring_attention
from ring_jax_gpu.hopper import run
from ring_jax_gpu.hopper.ffi import InArray
from ring_jax_gpu.launch import UNLESS, KernelName, Launch, arguments_of, stages_of

SMALL = KernelConfig("triton", block_q=32, block_k=32)
CAUSAL = Mask(causal=True)

# Cases of several blocks on one device, with lengths that no block size divides.
_CASES = [
    Case("causal", CAUSAL),
    Case("full", Mask(), heads=(2, 2)),
    Case("window", Mask(causal=True, window=(40, 0)), lse_grad=True),
    Case("window-both", Mask(window=(50, 33))),
    Case("chunks", Mask(causal=True, chunk_size=37)),
    Case("documents", Mask(cu_seqlens=(0, 1, 40, 42, 70, 80))),
    Case("predicate", Mask(causal=True, predicate=diagonals), seq_len=150),
    Case("predicate-documents", Mask(predicate=prefix, cu_seqlens=(0, 43, 80))),
    Case("keys", CAUSAL, kv_seq_len=150),
    Case("fewer-keys", CAUSAL, kv_seq_len=45),
    Case("gqa", CAUSAL, heads=(4, 2), dims=(24, 8)),
    Case("bfloat16", CAUSAL, dtype="bfloat16", dims=(64, 64)),
    Case("wider", CAUSAL, dims=(40, 40), heads=(4, 2), lse_grad=True),
    Case("wider-k", Mask(window=(30, 9)), dims=(48, 16), seq_len=50),
    Case("wider-v", Mask(), dims=(16, 33), bias="masked", segments="padded", seq_len=50),
    Case("float16", Mask(), dtype="float16", dims=(16, 32)),
    Case("softcap", CAUSAL, softcap=1.5, softmax_scale=0.7, sinks=0),
    Case("negative-scale", CAUSAL, softmax_scale=-0.5),
    Case("no-scale", CAUSAL, softmax_scale=0.0),
    Case("segments", CAUSAL, segments="padded", batch=2, heads=(1, 1)),
    Case("segments-pair", Mask(), segments="pair"),
    Case("segments-chunks", Mask(chunk_size=100), segments="padded", seq_len=150),
    Case("segments-documents", Mask(cu_seqlens=(0, 50, 150)), segments="pair", seq_len=150),
    Case("alibi", CAUSAL, alibi=2, batch=2, heads=(1, 1)),
    Case("dropout", CAUSAL, dropout_p=0.3, batch=2),
    Case("bias", CAUSAL, bias="masked", batch=2, heads=(1, 1)),
    Case("very-negative-bias", CAUSAL, bias="very-negative", batch=2, segments="padded"),
    Case("bias-shared", CAUSAL, bias="shared", batch=2),
    Case("shown-heads", Mask(), shown="by-head", poison="k", lse_grad=True),
    Case("spread", CAUSAL, spread=40.0),
    Case("poison-q", CAUSAL, poison="q"),
    Case("poison-k", CAUSAL, poison="k"),
    Case("poison-v", CAUSAL, poison="v"),
    Case("v-inf", CAUSAL, poison="v-inf"),
    Case("bias-nan", CAUSAL, bias="shared", poison="bias"),
    Case("poison-padding", Mask(), segments="padded", poison="padding"),
    Case(
        "everything", CAUSAL, softcap=2.0, sinks=0, bias="masked", alibi=1, dropout_p=0.1,
        segments="padded", softmax_scale=0.4, heads=(4, 2), dims=(8, 6), lse_grad=True,
    ),
]  # fmt: skip
_HOPPER: dict[str, Any] = {"dims": (64, 64), "dtype": "bfloat16", "heads": (2, 1)}
_WIDE: dict[str, Any] = {"seq_len": 150, **_HOPPER}
LEFT = [
    Case("left-causal", CAUSAL, **_WIDE, batch=2),
    Case("left-window", Mask(window=(50, 33)), **_WIDE),
    Case("left-poison-v", CAUSAL, **_WIDE, poison="v"),
    Case("left-poison-k", CAUSAL, **_WIDE, poison="k"),
    Case("left-chunks", Mask(causal=True, window=(30, 0), chunk_size=37), **_WIDE),
    Case("left-segments", CAUSAL, **_WIDE, segments="documents", poison="k"),
]
SEVERAL_BLOCKS = [case if case.seq_len != 48 else replace(case, seq_len=80) for case in _CASES]


def test_programs_for_other_machines_are_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 16, 2, 16), jnp.float32)
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel="triton"))
    grad = jax.jit(jax.grad(lambda q: call(q).sum()))
    for traced in (call.trace(x), grad.trace(x)):
        with pytest.raises(UnsupportedError, match="'triton': runs on NVIDIA GPUs, and this"):
            traced.lower(lowering_platforms=("tpu",))
        with pytest.raises(UnsupportedError, match="'triton': is compiled for the GPU of this"):
            traced.lower(lowering_platforms=("cuda",))


@pytest.mark.nightly(only=[
    "full", "window", "predicate-documents", "keys", "wider", "wider-k", "float16", "no-scale",
    "segments-pair", "segments-chunks", "segments-documents", "dropout", "bias-shared", "poison-q",
    "poison-padding", "everything",
])  # fmt: skip
@pytest.mark.parametrize("case", SEVERAL_BLOCKS, ids=lambda case: case.name)
def test_several_blocks(case: Case) -> None:
    assert_close(case, alone(case, SMALL))


@pytest.mark.nightly(only=["gqa", "segments"])  # `everything` has both
@pytest.mark.parametrize(
    "name", ["causal", "gqa", "segments", "poison-k", "everything", "very-negative-bias"]
)
def test_fused_backward(name: str) -> None:
    (case,) = (case for case in SEVERAL_BLOCKS if case.name == name)
    assert_close(case, alone(case, replace(SMALL, fused_backward=True)))


@pytest.mark.nightly(unless=["window-both-sizes0", "segments-sizes1"])
@pytest.mark.parametrize("sizes", [(64, 16), (16, 64)])
@pytest.mark.parametrize("name", ["window-both", "segments", "predicate"])
def test_oblong_blocks(name: str, sizes: tuple[int, int]) -> None:
    (case,) = (case for case in SEVERAL_BLOCKS if case.name == name)
    assert_close(case, alone(case, replace(SMALL, block_q=sizes[0], block_k=sizes[1])))


@pytest.mark.nightly(only=[
    "documents-chunks-striped-cp4", "predicate-zigzag-cp2", "predicate-balanced-cp4",
    "documents-window-zigzag-cp4", "everything-zigzag", "keys64-predicate-contiguous",
    "shown-documents-zigzag", "shown-bias-balanced",
])  # fmt: skip
@pytest.mark.parametrize(
    "name",
    [
        "causal-zigzag-cp2", "window-large-contiguous-cp2", "window-small-striped-cp2",
        "causal-balanced-cp4", "documents-chunks-striped-cp4", "predicate-zigzag-cp2",
        "predicate-balanced-cp4", "documents-window-zigzag-cp4", "sinks-many-contiguous",
        "poison-k-contiguous", "batch-0-contiguous", "shortest-zigzag-cp2", "everything-zigzag",
        "keys64-predicate-contiguous", "shown-documents-zigzag", "shown-bias-balanced",
    ],
)  # fmt: skip
def test_in_the_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    assert_close(CASES[name], JaxBackend().run(CASES[name], kernel="triton"))


@pytest.mark.nightly(unless=["causal-zigzag-cp4"])
@pytest.mark.parametrize(
    "name",
    [
        "causal-zigzag-cp4",
        "documents-window-contiguous-cp4",
        "bias-zigzag",
        "shown-segments-striped",
    ],
)
def test_over_gathered_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    results = JaxBackend().run(CASES[name], kernel="triton", strategy="gather")
    assert_close(CASES[name], results)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", ["ulysses", StrategyConfig("hybrid", ulysses_size=2)], ids=["ulysses", "hybrid"]
)
def test_over_traded_heads(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes, sinks and dropout are those of a rank's heads, which are no range."""
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    case = Case(
        "traded", CAUSAL, "zigzag", 4, 24, heads=(12, 3), sinks=0, alibi=1, dropout_p=0.3,
        lse_grad=True,
    )  # fmt: skip
    assert_close(case, JaxBackend().run(case, kernel="triton", strategy=strategy))


def test_several_blocks_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    case = Case("blocks-zigzag-cp2", Mask(causal=True, window=(120, 0)), "zigzag", 2, 300)
    config: Any = SMALL
    assert_close(case, JaxBackend().run(case, kernel=config))


def test_documents_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed documents are right without Hopper's single backward kernel.

    The dQ and the dK/dV kernel each get the documents of their own side.
    """
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    mask = Mask(causal=True, cu_seqlens=(0, 3, 10, 41, 72, 96))
    case = Case("documents-striped-cp2", mask, "striped", 2, 96, **_HOPPER)
    launches = mock.patch.object(interpreter, "interpret", wraps=interpreter.interpret)
    with launches as launched:
        assert_close(case, JaxBackend().run(case, kernel="triton"))
    assert all(call.kwargs["launch"].hopper for call in launched.call_args_list)


def test_outside_of_programs() -> None:
    """Under ``jax.disable_jit`` each kernel is launched in a program of its own."""
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16))

    def loss(x: Any) -> Any:
        return (ring_attention(x, x, x, axis_name=None, causal=True, kernel=SMALL) ** 2).sum()

    expected = jax.grad(loss)(x)
    launches = mock.patch.object(interpreter, "interpret", wraps=interpreter.interpret)
    with jax.disable_jit(), launches as launched:
        np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=1e-5, atol=1e-5)
    assert [call.kwargs["launch"].kernel for call in launched.call_args_list] == [
        "fwd", "bwd_dq", "bwd_dkv"
    ]  # fmt: skip


def test_vmap() -> None:
    """A vmapped call is right: its entries run one by one."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1, 40, 1, 8)), jnp.float32) for _ in range(3))
    ids = jnp.asarray(rng.integers(0, 2, (2, 1, 40)).cumsum(axis=2) // 10, jnp.int32)

    def loss(q: Any, k: Any, v: Any, ids: Any, kernel: str) -> Any:
        out = ring_attention(q, k, v, axis_name=None, segment_ids=ids, causal=True, kernel=kernel)
        return (out * jnp.cos(v)).sum()

    grads = jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(0, 0, 0, 0, None))
    for a, b in zip(grads(q, k, v, ids, "triton"), grads(q, k, v, ids, "xla"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.nightly(
    unless=[
        "left-causal-only",
        "left-window-last",
        "left-poison-v-later",
        "left-poison-k-first",
        "left-segments-only",
    ]
)
@pytest.mark.parametrize("step", ["only", *STEPS])
@pytest.mark.parametrize("case", LEFT, ids=lambda case: case.name)
def test_what_the_kernels_for_hopper_leave(
    case: Case, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step != "only":
        pretend(monkeypatch, step)
        length = case.seq_len + 1 + [*STEPS].index(step)  # avoids another step's cached program
        case = replace(case, name=f"{length}-{case.name}", seq_len=length)

    def call(
        kernel: Any, parameters: Any, constants: Any, *, programs: int, **_: Any
    ) -> dict[str, Any]:
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
        many = batch * heads * per_head
        x["only"] = np.full(many, 1 if is_q_major else 2, np.int32)
        flags = {"only_per_head": per_head}
        if is_q_major:
            flags["only_many"], programs = many, -(-many // FLAGS_TOGETHER)
        else:
            programs = many
        if not is_q_major:  # the kernel for Hopper has added to dQ where a flag is 1
            flagged: Any = {name: np.array(array) for name, array in x.items()}
            flagged["only"] = np.full(many, 1, np.int32)
            dq = run._run_left_out(launch, flagged, flags, programs, size, call)["dq"]
            np.testing.assert_array_equal(dq, x["dq"])
        if UNLESS in x:  # ids that do not ascend: a whole launch follows
            none = run._run_left_out(
                launch, x | {UNLESS: x[UNLESS] * 0}, flags, programs, size, call
            )
            for name, array in none.items():
                np.testing.assert_array_equal(array, x[name])
        left_out = run._run_left_out(launch, x, flags, programs, size, call)
        return [left_out[name] for name in names[len(names) - num_changed :]]

    monkeypatch.setattr(interpreter, "interpret", leave)
    assert_close(case, alone(case, KernelConfig("triton")))


def _refused(**options: Any) -> str:
    q = jnp.zeros((1, 64, 2, options.pop("dim", 16)), options.pop("dtype", "bfloat16"))
    with pytest.raises(UnsupportedError) as error:
        ring_attention(q, q, q, axis_name=None, **options)
    return str(error.value)


def test_refusals_say_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "block_q=64" in _refused(kernel=KernelConfig("triton", block_q=96))
    assert "head dims up to 256, not 512" in _refused(dim=512, kernel="triton")
    fused = KernelConfig(fused_backward=True)
    assert "leave out fused_backward" in _refused(kernel=fused, deterministic=True)
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    many_tiles = _refused(mask=Mask(predicate=diagonals), kernel="triton")
    assert "more than 64 MiB. Instead: use kernel='xla'" in many_tiles
    cp, x = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp"), jnp.zeros((1, 64, 2, 16))
    first, _ = cp.explain(x, x, x, mask=Mask(predicate=diagonals)).split("\n", 1)
    assert first == "kernel xla (any device)"


def _launch(kernel: KernelName, block_q: int, block_k: int, dim: int, stages: int) -> Launch:
    consts = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "D": dim, "DV": dim, "FUSED": False}
    consts |= {"PADDED": dim, "PADDED_V": dim}
    return Launch(kernel, (), tuple(consts.items()), (1, 1, 1), 8, stages)


def test_explain_names_a_kernel_for_each_platform() -> None:
    cp = ContextParallel(jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2]), axis_name="cp")
    x = jnp.zeros((1, 8, 2, 4))
    both = ["kernel triton (cuda)", "kernel xla (any other device)"]
    for options in ({}, {"sinks": jnp.zeros(2)}, {"deterministic": True}):
        first, second, not_cudnn, not_pallas, strategy, *_ = cp.explain(
            x, x, x, causal=True, **options
        ).split("\n")
        assert [first, second] == both
        assert not_cudnn.startswith("  not cudnn (cuda): takes bfloat16 or float16")
        assert not_pallas.startswith("  not pallas (tpu): needs ring-jax-tpu ")
        assert strategy == "strategy ring, transport xla"
    wide = x.astype("float16").repeat(128, axis=-1)
    text = cp.explain(wide, wide, wide, causal=True)
    assert text.startswith("kernel xla (any device)\n  not ")
    for name in ("triton", "cudnn"):
        assert f"\n  not {name} (cuda): takes head dims up to 256" in text
    named = KernelConfig("triton", fused_backward=True)
    assert cp.explain(x, x, x, kernel=named).startswith("kernel triton (cuda)\nstrategy ring")
    with pytest.raises(UnsupportedError, match="rules out"):
        cp.explain(x, x, x, kernel=named, deterministic=True)


def test_fewer_stages_where_shared_memory_is_small() -> None:
    launch = _launch("fwd", 128, 128, 128, 3)
    assert stages_of(launch, 2, 90) == 3
    assert stages_of(launch, 2, 80) == 2
    assert stages_of(launch, 2, 120) == 1


def test_blocks_that_have_no_room_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="227 KiB of shared memory"):
        stages_of(_launch("bwd_dkv", 256, 256, 256, 2), 2, 90)


def test_what_a_kernel_does_not_know_is_an_error() -> None:
    """An array that the kernel has no argument for raises: jax-triton would make it a constant."""
    from ring_core.triton.forward import fwd
    from ring_core.triton.scores import Constexprs

    consts = {name: 16 for name in Constexprs._fields if name != "TMA"}
    launch = Launch("fwd", (), tuple(consts.items()), (1, 1, 1), 4, 2)
    arrays = {"q": jnp.zeros((1, 1, 16, 16)), "q_idx": jnp.zeros(16)}
    with pytest.raises(AssertionError, match="q_idx"):
        arguments_of(fwd, launch, arrays, has_tma=False)


def test_the_derivative_of_a_gradient_is_refused_when_it_is_traced() -> None:
    q = jnp.ones((1, 16, 2, 16))

    def gradient(q: Any) -> Any:
        return jax.grad(lambda q: ring_attention(q, q, q, axis_name=None, kernel="triton").sum())(q)

    with pytest.raises(UnsupportedError, match="the derivative of a gradient"):
        jax.make_jaxpr(jax.grad(lambda q: gradient(q).sum()))(q)
