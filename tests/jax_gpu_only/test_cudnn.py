"""Kernel ``cudnn`` without cuDNN: when it is chosen, its calls, and what is made of results."""

from __future__ import annotations

import inspect
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from backends import cudnn
from cases import Case
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from tolerances import assert_close

from benchmarks.common.cases import JAX_ROWS
from ring_core import KernelConfig, Mask, Request, UnsupportedError
from ring_jax import kernels
from ring_jax_gpu import ContextParallel, cudnn as _cudnn, fmha, ring_attention

CAUSAL = Mask(causal=True)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "jax-options-h200.json"
half = partial(cudnn.case_of, dims=(16, 16))

CASES = [
    half("causal", CAUSAL), half("full", Mask(), batch=2), half("float16", CAUSAL, dtype="float16"),
    half("window", Mask(causal=True, window=(9, 0))),
    half("window-of-one", Mask(causal=True, window=(0, 0))),
    half("fewer-keys", CAUSAL, kv_seq_len=20), half("more-keys", Mask(), kv_seq_len=80),
    half("wider-v", CAUSAL, dims=(8, 40), seq_len=47), half("mixed", CAUSAL, dims=(192, 128)),
    half("odd", CAUSAL, dims=(13, 13)), half("odd-mixed", Mask(), dims=(189, 121)),
    half("odd-wider-v", CAUSAL, "zigzag", 2, dims=(7, 18)),
    half("sinks", CAUSAL, sinks=0), half("scale", CAUSAL, softmax_scale=0.7),
    half("bias", CAUSAL, bias="full", batch=2), half("bias-batch", Mask(), bias="batch", batch=2),
    half("bias-heads", CAUSAL, bias="heads", batch=2),
    half("bias-shared", Mask(), bias="shared", batch=2),
    half("bias-masked", CAUSAL, bias="masked", batch=2),
    half("bias-very-negative", CAUSAL, bias="very-negative", batch=2),
    half("bias-very-negative-float16", Mask(), dtype="float16", bias="very-negative"),
    half("bias-masked-float16", Mask(), dtype="float16", bias="masked"),
    half("batch-0", CAUSAL, batch=0), half("contiguous-cp3", CAUSAL, "contiguous", 3),
    half("zigzag-cp2", CAUSAL, "zigzag", 2), half("striped-cp3", CAUSAL, "striped", 3),
    half("full-cp4", Mask(), "zigzag", 4, batch=2),
    half("bias-cp2", CAUSAL, "zigzag", 2, bias="full"),
    half("bias-masked-cp2", CAUSAL, "zigzag", 2, bias="masked"),
    half("gathered-contiguous", CAUSAL, "contiguous", 2), half("gathered-zigzag", CAUSAL, "zigzag", 2),
]  # fmt: skip


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.stand_in(monkeypatch)


@pytest.mark.nightly(only=[f"cudnn-{name}" for name in (
    "window-of-one", "odd-mixed", "bias-batch", "bias-heads", "bias-masked-float16", "full-cp4",
    "bias-very-negative-float16", "gathered-contiguous",
)])  # fmt: skip
@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    strategy = "gather" if "gathered" in case.name else "auto"
    assert_close(case, cudnn.run(case, strategy=strategy))


@pytest.mark.usefixtures("formula")
def test_vmap() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1, 24, 2, 8)), "bfloat16") for _ in range(3))

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = ring_attention(q, k, v, axis_name=None, causal=True, kernel="cudnn")
        return (out * jnp.cos(v)).astype("float32").sum()

    grads = jax.grad(loss, (0, 1, 2))
    for mapped, *alone in zip(jax.vmap(grads)(q, k, v), *map(grads, q, k, v), strict=True):
        np.testing.assert_array_equal(mapped.astype("float32"), jnp.stack(alone).astype("float32"))


def refused(q_dim: int = 16, v_dim: int = 16, length: int = 64, **options: Any) -> str:
    """Return why a call is refused, over four devices if a layout is named."""
    q = jnp.zeros((1, length, 2, q_dim), options.pop("dtype", "bfloat16"))
    v = q if q_dim == v_dim else jnp.zeros((1, length, 2, v_dim), q.dtype)
    call: Any = partial(ring_attention, axis_name=None)
    if (layout := options.pop("layout", None)) is not None:
        call = over(4, layout).attention
    with pytest.raises(UnsupportedError) as error:
        call(q, q, v, kernel="cudnn", **options)
    return str(error.value)


def over(size: int, layout: Any = "zigzag") -> ContextParallel:
    mesh = jax.make_mesh((size,), ("cp",), devices=jax.devices()[:size])
    return ContextParallel(mesh, axis_name="cp", layout=layout)


WIDE: dict[str, Any] = {"q_dim": 256, "v_dim": 256}
BIAS = {"bias": jnp.zeros((1, 2, 8, 8), "bfloat16")}
WINDOW = {"causal": True, "window": (20, 0)}
ONE_RECTANGLE = "takes one rectangle a rank and step"
CAUSAL_SQUARES = "takes whole rectangles and causal squares only"
#: Options of a call, which are those of a plan where they have a layout, and why it is refused.
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
    ({"q_dim": 264}, "up to 256, not 264"),
    ({"deterministic": True}, "has no deterministic=True"),
    ({"softcap": 5.0}, "has no softcap"),
    ({"softmax_scale": -1.0}, "has no softmax_scale <= 0"),
    ({"return_lse": True}, "has no gradient through lse"),
    ({"segment_ids": jnp.zeros((1, 64), jnp.int32)}, "has no segment_ids"),
    ({"alibi_slopes": jnp.ones(2)}, "has no alibi_slopes"),
    ({"dropout_p": 0.1, "dropout_seed": 1}, "has no dropout_p"),
    ({"mask": Mask(predicate=lambda q, k: q >= k)}, "has no predicate masks"),
    ({"cu_seqlens": (0, 20, 64)}, "has no blocks of several documents"),
    ({"window": (3, 3)}, CAUSAL_SQUARES),
    ({"mask": jnp.ones((64, 64), bool)}, "has no masks that are arrays"),
    ({"bias": jnp.zeros((1, 1, 64, 64))}, "takes a bias in bfloat16, not float32"),
    ({"length": 63, "bias": jnp.zeros((1, 1, 63, 63), "bfloat16")}, "even numbers"),
    (WINDOW | {"bias": jnp.zeros((1, 1, 64, 64), "bfloat16")}, "has no window beside a bias"),
    (WIDE | {"causal": True, "layout": "contiguous", "strategy": "balanced"}, "has no ranks that help each other"),
    (WIDE | {"causal": True, "layout": "zigzag", "strategy": "gather"}, ONE_RECTANGLE),
    (WIDE | WINDOW | {"layout": "zigzag"}, ONE_RECTANGLE),
    (WIDE | WINDOW | {"layout": "contiguous"}, CAUSAL_SQUARES),
]  # fmt: skip


@pytest.mark.parametrize(("options", "reason"), REFUSALS)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    assert reason in refused(**options)


def test_refusals_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = "takes head dims up to 128, on Hopper up to 256, not 256"
    for capability, version, reason in (
        (90, None, "cuDNN is not installed"),
        (75, 91000, "needs compute capability 8.0, not 7.5"), (80, 91000, dims), (100, 91000, dims),
    ):  # fmt: skip
        monkeypatch.setattr(_cudnn, "compute_capability", lambda capability=capability: capability)
        monkeypatch.setattr(fmha, "cudnn_version", lambda version=version: version)
        assert reason in refused(256, 256)


def explained(dims: tuple[int, int] = (256, 256), **options: Any) -> list[str]:
    q, v = (jnp.zeros((1, 8, 2, dim), "bfloat16") for dim in dims)
    return over(1).explain(q, q, v, causal=True, **options).splitlines()


@pytest.mark.parametrize(
    ("dims", "options", "name", "reason"),
    [
        ((128, 128), {}, "triton", ""), ((64, 64), {}, "cudnn", ""), ((96, 96), {}, "triton", ""),
        ((136, 136), {}, "cudnn", ""), ((192, 128), {}, "cudnn", ""), ((256, 256), {}, "cudnn", ""),
        ((64, 192), {}, "cudnn", ""), ((64, 64), BIAS, "cudnn", ""), ((256, 256), BIAS, "cudnn", ""),
        *(((x, x), {"window": (3, 0)}, "triton" if x < 192 else "cudnn", "") for x in (64, 128, 192, 256)),
        ((256, 256), {"softcap": 3.0}, "triton", "  not cudnn (cuda): has no softcap"),
        ((256, 256), {"kernel": KernelConfig(block_q=64)}, "triton", "has no choice of block_q and block_k"),
    ],
)  # fmt: skip
def test_what_auto_takes(
    dims: tuple[int, int], options: dict[str, Any], name: str, reason: str
) -> None:
    first, second, third, *_ = explained(dims, **options)
    assert [first, second] == [f"kernel {name} (cuda)", "kernel xla (any other device)"]
    assert reason in third


@pytest.mark.parametrize("change", [80, 100, "kernel", "jax"])
def test_where_cudnn_does_not_lead(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cudnn leads on one generation of GPUs, where JAX's binding is known and none is named."""
    if change == "jax":
        reason = "jax 9 calls cuDNN with other arguments"
        monkeypatch.setattr(fmha, "found_binding", lambda: reason)
        assert "jax 9 calls cuDNN" in refused()
    elif change != "kernel":
        monkeypatch.setattr(kernels, "compute_capability", lambda: change)
        assert "cudnn" not in " ".join(explained())
    assert explained(kernel="triton" if change == "kernel" else "auto")[0] == "kernel triton (cuda)"


def lowered(dims: tuple[int, int] = (256, 256), **options: Any) -> str:
    """Lower forward and backward for a GPU without having one."""
    spec = partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    q, k, v = (spec((2, 64, *x)) for x in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    bias = [spec(options.pop("bias"))] if "bias" in options else []

    def both(*x: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            more = {"bias": bias[0]} if bias else {}
            return ring_attention(q, k, v, axis_name=None, **more, **options)

        out, pull = jax.vjp(call, *x)
        return out, pull(out)

    traced = jax.jit(both).trace(q, k, v, *bias)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def calls(text: str) -> list[tuple[str, str]]:
    """Return the cuDNN calls in a program: their names and the types of operands and results."""
    return re.findall(r"custom_call @(__cudnn\$\w+)\(.*?: (\(.*?\) -> .*)", text)


HEADS_BEHIND = "tensor<2x64x4x256xbf16>, tensor<2x64x2x256xbf16>"  # behind tokens


@pytest.mark.parametrize(
    ("dims", "options", "kind", "types"),
    [
        # Types of operands of the forward and of the backward: lse is float32.
        ((256, 256), {"causal": True}, "Softmax", (HEADS_BEHIND, "tensor<2x4x64xf32>")),
        ((256, 256), {"causal": True, "window": (9, 0)}, "Softmax", (HEADS_BEHIND,) * 2),
        ((64, 64), {"bias": (1, 4, 64, 64)}, "ScaleBiasSoftmax", ("tensor<1x4x64x64xbf16>",) * 2),
        # DeepSeek's 192/128 is passed on if cuDNN can run it; other dims are padded with zeros.
        ((192, 128), {"causal": True}, "Softmax", ("2x192xbf16>, tensor<2x64x2x128xbf16>",) * 2),
        ((136, 72), {"causal": True}, "Softmax", ("2x136xbf16>, tensor<2x64x2x136xbf16>",) * 2),
        ((192, 128), {"version": 90900}, "Softmax", ("2x192xbf16>, tensor<2x64x2x192xbf16>",) * 2),
    ],
)  # fmt: skip
def test_lowered_for_a_gpu(
    dims: tuple[int, int], options: dict[str, Any], kind: str, types: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = dict(options)
    if (version := options.pop("version", None)) is not None:
        monkeypatch.setattr(fmha, "cudnn_version", lambda: version)
    text = lowered(dims, kernel="cudnn", **options).replace("\\22", '"')
    (forward, of_forward), (backward, of_backward) = calls(text)
    assert (forward, backward) == (f"__cudnn$fmha{kind}", f"__cudnn$fmha{kind}Backward")
    assert types[0] in of_forward.partition("->")[0] and types[1] in of_backward.partition("->")[0]
    assert "tensor<2x4x64xf32>" in of_forward.partition("->")[2]  # lse
    mask = "CAUSAL" if "causal" in options else "NO_MASK"
    assert set(re.findall(r'"mask_type": "(\w+)"', text)) == {mask}
    window = "10" if "window" in options else "0"
    assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {window}
    if "bias" in options:
        assert "tensor<1x4x64x64xbf16>" in of_backward.partition("->")[2]
        assert "gather" not in text and "scatter" not in text


@pytest.mark.parametrize("platforms", [("cpu",), ("tpu",), ("cpu", "cuda")])
@pytest.mark.parametrize("kernel", ["cudnn", "auto"])
def test_exports_for_other_platforms(kernel: str, platforms: tuple[str, ...]) -> None:
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel=kernel))
    # JAX promises nothing of what cuDNN's calls mean in other versions, and asks for this.
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    for function in (call, jax.jit(jax.grad(lambda q: call(q).sum()))):
        export = jax.export.export(function, platforms=platforms, disabled_checks=checks)
        if kernel == "auto":
            exported = export(x)
            assert exported.platforms == platforms
            assert ("@__cudnn$" in exported.mlir_module()) == ("cuda" in platforms)
            continue
        message = "'cudnn': runs on NVIDIA GPUs, and this"
        with pytest.raises(UnsupportedError, match=message):
            export(x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_programs_over_an_abstract_mesh(strategy: str, kind: AxisType) -> None:
    """No program may hold a primitive that JAX lowers for devices that are there alone.

    A call's kernels for other platforms are in its program, so that one such primitive, as JAX's
    own for cuDNN, keeps it from being lowered for any platform.
    """
    mesh: Any = AbstractMesh((4,), ("cp",), axis_types=(kind,))
    split = NamedSharding(mesh, PartitionSpec(None, "cp"))
    spec = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=split)
    q, k = (spec((1, 512, heads, 64)) for heads in (4, 2))
    cp = ContextParallel(mesh, "cp", layout="zigzag")

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = cp.attention(q, k, v, causal=True, strategy=strategy)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    for platform in ("cpu", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "cudnn" not in text and "while" in text
    if strategy == "ring":
        names = [name for name, _ in calls(traced.lower(lowering_platforms=("cuda",)).as_text())]
        passes = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
        assert sorted(names) == sorted(passes * 7)


def test_what_jax_calls_it_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding fits this jax and jax 0.11; an unknown signature is refused with a reason."""
    module: Any = fused_attention_stablehlo
    name = "_dot_product_attention_fwd_cuda_lowering"
    signature = inspect.signature(getattr(module, name))
    find = fmha.found_binding.__wrapped__
    binding = find()
    assert isinstance(binding, fmha.Binding)
    assert set(binding.unused) == set(signature.parameters) & {"score_mod_name", "score_mod_jaxpr"}

    def changed(*drop: str, more: tuple[str, ...] = ()) -> Any:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [name for name in signature.parameters if name not in drop]
        parameters = [inspect.Parameter(name, kind) for name in (*names, *more)]
        other: Any = lambda: None  # noqa: E731 - another object each time
        other.__signature__ = signature.replace(parameters=parameters)
        monkeypatch.setattr(module, name, other)
        return find()

    older = changed("score_mod_args", "score_mod_name", "score_mod_jaxpr")
    assert isinstance(older, fmha.Binding) and older.unused == ()
    for unknown in (changed("seed"), changed(more=("sink",)), changed("kv_offsets")):
        assert unknown == f"jax {jax.__version__} calls cuDNN with other arguments"
    monkeypatch.delattr(module, name)
    assert "calls cuDNN in another way" in find()


def test_it_leads_where_it_was_measured_to_be_faster() -> None:
    """Both passes count, and by less than 5 % nothing is faster: there ``triton`` comes first.

    At head dims 192/128 cuDNN's times are those of this package's calls: ``jax.nn`` pads there.
    """
    report = json.loads(RESULTS.read_text())
    by_name = {row.name: row for row in JAX_ROWS}
    rows = [row for row in report["rows"] if "triton" in row["milliseconds"]["both"]]
    assert rows
    for row in rows:
        took, call = row["milliseconds"]["both"], by_name[row["setting"]]
        own = took["ring" if row["setting"].startswith("192/128") else "cudnn"][1]
        options = {"bias": call.option == "bias", "grad": True}
        request = Request("cuda", "bfloat16", call.dim, call.v_dim, **options)
        mask = Mask(causal=True, window=(1024, 0) if call.option == "window" else None)
        assert _cudnn.CudnnKernel().leads(90, request, mask) is (1.05 * own < took["triton"][1])
        assert not _cudnn.CudnnKernel().leads(100, request, mask)
