"""Kernel ``cudnn`` without cuDNN: when it is chosen, its calls, and what is made of results."""

from __future__ import annotations

import inspect
import json
import re
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
HALF: dict[str, Any] = {"dtype": "bfloat16", "dims": (16, 16), "heads": (4, 2)}
CASES = [
    Case("cudnn-causal", CAUSAL, **HALF),
    Case("cudnn-full", Mask(), **HALF, batch=2),
    Case("cudnn-float16", CAUSAL, **{**HALF, "dtype": "float16"}),
    Case("cudnn-window", Mask(causal=True, window=(9, 0)), **HALF),
    Case("cudnn-window-of-one", Mask(causal=True, window=(0, 0)), **HALF),
    Case("cudnn-fewer-keys", CAUSAL, **HALF, kv_seq_len=20),
    Case("cudnn-more-keys", Mask(), **HALF, kv_seq_len=80),
    Case("cudnn-wider-k", CAUSAL, **{**HALF, "dims": (24, 16)}),
    Case("cudnn-wider-v", CAUSAL, **{**HALF, "dims": (8, 40)}, seq_len=47),
    Case("cudnn-mixed", CAUSAL, **{**HALF, "dims": (192, 128)}),
    Case("cudnn-odd", CAUSAL, **{**HALF, "dims": (13, 13)}),
    Case("cudnn-odd-mixed", Mask(), **{**HALF, "dims": (189, 121)}),
    Case("cudnn-odd-wider-v", CAUSAL, "zigzag", 2, **{**HALF, "dims": (7, 18)}),
    Case("cudnn-sinks", CAUSAL, **HALF, sinks=0),
    Case("cudnn-scale", CAUSAL, **HALF, softmax_scale=0.7),
    Case("cudnn-bias", CAUSAL, **HALF, bias="full", batch=2),
    Case("cudnn-bias-batch", Mask(), **HALF, bias="batch", batch=2),
    Case("cudnn-bias-heads", CAUSAL, **HALF, bias="heads", batch=2),
    Case("cudnn-bias-shared", Mask(), **HALF, bias="shared", batch=2),
    Case("cudnn-bias-masked", CAUSAL, **HALF, bias="masked", batch=2),
    Case("cudnn-bias-very-negative", CAUSAL, **HALF, bias="very-negative", batch=2),
    Case("cudnn-bias-very-negative-cp2", CAUSAL, "zigzag", 2, **HALF, bias="very-negative"),
    Case(
        "cudnn-bias-very-negative-float16",
        Mask(),
        **{**HALF, "dtype": "float16"},
        bias="very-negative",
    ),
    Case("cudnn-bias-masked-float16", Mask(), **{**HALF, "dtype": "float16"}, bias="masked"),
    Case("cudnn-batch-0", CAUSAL, **HALF, batch=0),
    Case("cudnn-contiguous-cp3", CAUSAL, "contiguous", 3, **HALF),
    Case("cudnn-zigzag-cp2", CAUSAL, "zigzag", 2, **HALF),
    Case("cudnn-zigzag-cp4", CAUSAL, "zigzag", 4, **HALF, batch=2),
    Case("cudnn-striped-cp3", CAUSAL, "striped", 3, **HALF),
    Case("cudnn-full-cp4", Mask(), "zigzag", 4, **HALF),
    Case("cudnn-mixed-cp2", CAUSAL, "zigzag", 2, **{**HALF, "dims": (24, 16)}),
    Case("cudnn-bias-cp2", CAUSAL, "zigzag", 2, **HALF, bias="full"),
    Case("cudnn-bias-masked-cp2", CAUSAL, "zigzag", 2, **HALF, bias="masked"),
]


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.stand_in(monkeypatch)


@pytest.mark.nightly(
    only=[
        "cudnn-window-of-one",
        "cudnn-wider-k",
        "cudnn-odd-mixed",
        "cudnn-bias-batch",
        "cudnn-bias-heads",
        "cudnn-bias-masked-float16",
        "cudnn-zigzag-cp4",
        "cudnn-full-cp4",
        "cudnn-mixed-cp2",
        "cudnn-bias-very-negative-cp2",  # `bias-cp2` and `bias-very-negative` run
        "cudnn-bias-very-negative-float16",
    ]
)
@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    assert_close(case, cudnn.run(case))


@pytest.mark.nightly(only=["contiguous"])
@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_over_gathered_keys(layout: Any) -> None:
    case = Case(f"cudnn-gathered-{layout}", CAUSAL, layout, 2, **HALF)
    assert_close(case, cudnn.run(case, strategy="gather"))


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


def _refused(q_dim: int = 16, v_dim: int = 16, length: int = 64, **options: Any) -> str:
    q = jnp.zeros((1, length, 2, q_dim), options.pop("dtype", "bfloat16"))
    v = jnp.zeros((1, length, 2, v_dim), q.dtype)
    with pytest.raises(UnsupportedError) as error:
        ring_attention(q, q, v, axis_name=None, kernel="cudnn", **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
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
        ({"window": (3, 3)}, "takes whole rectangles and causal squares only"),
        ({"mask": jnp.ones((64, 64), bool)}, "has no masks that are arrays"),
        ({"bias": jnp.zeros((1, 1, 64, 64))}, "takes a bias in bfloat16, not float32"),
        ({"length": 63, "bias": jnp.zeros((1, 1, 63, 63), "bfloat16")}, "even numbers"),
        (
            {"causal": True, "window": (9, 0), "bias": jnp.zeros((1, 1, 64, 64), "bfloat16")},
            "has no window beside a bias",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    assert reason in _refused(**options)


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        ("contiguous", {"strategy": "balanced"}, "has no ranks that help each other"),
        ("zigzag", {"strategy": "gather"}, "takes one rectangle a rank and step"),
        ("zigzag", {"window": (20, 0)}, "takes one rectangle a rank and step"),
        ("contiguous", {"window": (20, 0)}, "takes whole rectangles and causal squares only"),
    ],
)
def test_refusals_of_a_plan(layout: Any, options: dict[str, Any], reason: str) -> None:
    x = jnp.zeros((1, 64, 2, 256), "bfloat16")
    mesh = jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4])
    cp = ContextParallel(mesh, axis_name="cp", layout=layout)
    with pytest.raises(UnsupportedError, match=reason):
        cp.attention(x, x, x, causal=True, kernel="cudnn", **options)


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        (90, None, "cuDNN is not installed"),
        (75, 91000, "needs compute capability 8.0, not 7.5"),
        (80, 91000, "takes head dims up to 128, on Hopper up to 256, not 256"),
        (100, 91000, "takes head dims up to 128, on Hopper up to 256, not 256"),
    ],
)
def test_refusals_of_a_gpu(
    capability: int, version: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cudnn, "compute_capability", lambda: capability)
    monkeypatch.setattr(fmha, "cudnn_version", lambda: version)
    assert reason in _refused(256, 256)


def _explained(dims: tuple[int, int], bias: bool, **options: Any) -> list[str]:
    cp = ContextParallel(jax.make_mesh((1,), ("cp",), devices=jax.devices()[:1]), axis_name="cp")
    q, v = (jnp.zeros((1, 8, 2, dim), "bfloat16") for dim in dims)
    if bias:
        options["bias"] = jnp.zeros((1, 2, 8, 8), "bfloat16")
    return cp.explain(q, q, v, causal=True, **options).splitlines()


@pytest.mark.parametrize(
    ("dims", "option", "name"),
    [
        ((128, 128), "", "triton"), ((64, 64), "", "cudnn"), ((96, 96), "", "triton"),
        ((136, 136), "", "cudnn"), ((192, 128), "", "cudnn"), ((256, 256), "", "cudnn"),
        ((64, 192), "", "cudnn"), ((64, 64), "bias", "cudnn"), ((256, 256), "bias", "cudnn"),
        ((64, 64), "window", "triton"), ((128, 128), "window", "triton"),
        ((192, 192), "window", "cudnn"), ((256, 256), "window", "cudnn"),
    ],
)  # fmt: skip
def test_what_auto_takes(dims: tuple[int, int], option: str, name: str) -> None:
    options: dict[str, Any] = {"window": (3, 0)} if option == "window" else {}
    first, second, *_ = _explained(dims, option == "bias", **options)
    assert first == f"kernel {name} (cuda)"
    assert second == "kernel xla (any other device)"


def test_auto_says_why_not() -> None:
    _, _, line, *_ = _explained((256, 256), bias=False, softcap=3.0)
    assert line == "  not cudnn (cuda): has no softcap"
    assert _explained((256, 256), False, kernel="triton")[0] == "kernel triton (cuda)"
    settings = KernelConfig(block_q=64)
    assert (
        "has no choice of block_q and block_k" in _explained((256, 256), False, kernel=settings)[2]
    )


@pytest.mark.parametrize("capability", [80, 100])
def test_cudnn_leads_on_one_generation_of_gpus(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "compute_capability", lambda: capability)
    first, second, *rest = _explained((256, 256), bias=False)
    assert (first, second) == ("kernel triton (cuda)", "kernel xla (any other device)")
    assert "cudnn" not in " ".join(rest)


def _lowered(dims: tuple[int, int], **options: Any) -> str:
    """Lower forward and backward for a GPU without having one."""
    q, k, v = (
        jax.ShapeDtypeStruct((2, 64, *shape), "bfloat16")
        for shape in ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    bias = options.pop("bias", None)

    def both(*x: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            bias_option = {"bias": bias[0]} if bias else {}
            return ring_attention(q, k, v, axis_name=None, **bias_option, **options)

        out, pull = jax.vjp(call, *x)
        return out, pull(out)

    arrays = [q, k, v, *([] if bias is None else [jax.ShapeDtypeStruct(bias, "bfloat16")])]
    return str(jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text())


def _calls(text: str) -> list[tuple[str, str]]:
    """Return the cuDNN calls in a program: their names and the types of operands and results."""
    return re.findall(r"custom_call @(__cudnn\$\w+)\(.*?: (\(.*?\) -> .*)", text)


@pytest.mark.parametrize("platforms", [("cpu",), ("tpu",), ("cpu", "cuda")])
@pytest.mark.parametrize("kernel", ["cudnn", "auto"])
def test_exports_for_other_platforms(kernel: str, platforms: tuple[str, ...]) -> None:
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel=kernel))
    # JAX promises nothing of what cuDNN's calls mean in other versions, and asks for this.
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{x}")
        for x in ("", "Backward")
    ]
    for function in (call, jax.jit(jax.grad(lambda q: call(q).sum()))):
        export = jax.export.export(function, platforms=platforms, disabled_checks=checks)
        if kernel == "auto":
            exported = export(x)
            assert exported.platforms == platforms
            assert ("@__cudnn$" in exported.mlir_module()) == ("cuda" in platforms)
            continue
        with pytest.raises(UnsupportedError, match="'cudnn': runs on NVIDIA GPUs, and this"):
            export(x)


def test_without_programs() -> None:
    x = jnp.ones((1, 64, 2, 64), "bfloat16")
    with (
        jax.disable_jit(),
        pytest.raises(UnsupportedError, match="'cudnn': runs on NVIDIA GPUs, and this"),
    ):
        ring_attention(x, x, x, axis_name=None, kernel="cudnn")


def test_lowered_for_a_gpu() -> None:
    (forward, of_forward), (backward, of_backward) = _calls(_lowered((256, 256), causal=True))
    assert (forward, backward) == ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    assert "tensor<2x64x4x256xbf16>, tensor<2x64x2x256xbf16>" in of_forward  # heads behind tokens
    assert "tensor<2x4x64xf32>" in of_forward.partition("->")[2]  # lse
    assert "tensor<2x4x64xf32>" in of_backward.partition("->")[0]


def test_lowered_with_a_bias() -> None:
    text = _lowered((64, 64), bias=(1, 4, 64, 64))
    names = [name for name, _ in _calls(text)]
    assert names == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert "tensor<1x4x64x64xbf16>" in _calls(text)[1][1].partition("->")[2]
    assert "gather" not in text and "scatter" not in text


def test_lowered_masks() -> None:
    for options, attributes in (
        ({"causal": True}, ("CAUSAL", 0)),
        ({}, ("NO_MASK", 0)),
        ({"causal": True, "window": (9, 0)}, ("CAUSAL", 10)),
    ):
        text = _lowered((256, 256), **options).replace("\\22", '"')
        assert set(re.findall(r'"mask_type": "(\w+)"', text)) == {attributes[0]}
        assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {str(attributes[1])}


def test_head_dims_that_are_unequal() -> None:
    """DeepSeek's 192/128 is passed on if cuDNN can run it; other dims are padded with zeros."""
    for dims, shown_dims in (((192, 128), ("192", "128")), ((136, 72), ("136", "136"))):
        for _, types in _calls(_lowered(dims, causal=True)):
            assert f"2x64x2x{shown_dims[0]}xbf16>, tensor<2x64x2x{shown_dims[1]}xbf16>" in types


def test_zeros_where_cudnn_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmha, "cudnn_version", lambda: 90900)
    for _, types in _calls(_lowered((192, 128), kernel="cudnn")):
        assert "2x64x2x192xbf16>, tensor<2x64x2x192xbf16>" in types


def test_a_ring_lowered_for_a_gpu() -> None:
    mesh = jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4])
    cp = ContextParallel(mesh, axis_name="cp", layout="zigzag")
    x = jnp.zeros((1, 64, 2, 256), "bfloat16")

    def both(*x: Any) -> Any:
        out, pull = jax.vjp(lambda *x: cp.attention(*x, causal=True), *x)
        return out, pull(out)

    text = jax.jit(both).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    names = [name for name, _ in _calls(text)]
    assert names.count("__cudnn$fmhaSoftmax") == names.count("__cudnn$fmhaSoftmaxBackward") == 7
    assert "ring_triton" not in text


def test_what_jax_calls_it_with() -> None:
    """The binding fits this jax and jax 0.11; an unknown signature is refused with a reason."""
    module: Any = fused_attention_stablehlo
    name = "_dot_product_attention_fwd_cuda_lowering"
    signature = inspect.signature(getattr(module, name))
    find = fmha.found_binding.__wrapped__
    binding = find()
    assert isinstance(binding, fmha.Binding)
    assert set(binding.unused) == set(signature.parameters) & {"score_mod_name", "score_mod_jaxpr"}

    def changed(*drop: str, **more: Any) -> Any:
        kept = [x for x in signature.parameters.values() if x.name not in drop]
        added = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in more]
        kept = [x.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in kept]
        with pytest.MonkeyPatch.context() as patched:
            other: Any = lambda: None  # noqa: E731 - another object each time
            other.__signature__ = signature.replace(parameters=[*kept, *added])
            patched.setattr(module, name, other)
            return find()

    older = changed("score_mod_args", "score_mod_name", "score_mod_jaxpr")
    assert isinstance(older, fmha.Binding) and older.unused == ()
    for unknown in (changed("seed"), changed(sink=1), changed("kv_offsets")):
        assert unknown == f"jax {jax.__version__} calls cuDNN with other arguments"
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(module, name)
        assert "calls cuDNN in another way" in find()


def test_an_unknown_jax_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmha, "found_binding", lambda: "jax 9 calls cuDNN with other arguments")
    assert "jax 9 calls cuDNN" in _refused()
    assert _explained((256, 256), bias=False)[0] == "kernel triton (cuda)"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_programs_over_an_abstract_mesh(strategy: str, kind: AxisType) -> None:
    """No program may hold a primitive that JAX lowers for devices that are there alone.

    A call's kernels for other platforms are in its program, so that one such primitive, as JAX's
    own for cuDNN, keeps it from being lowered for any platform.
    """
    mesh: Any = AbstractMesh((4,), ("cp",), axis_types=(kind,))
    split = NamedSharding(mesh, PartitionSpec(None, "cp"))
    q, k = (
        jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16, sharding=split) for heads in (4, 2)
    )
    cp = ContextParallel(mesh, "cp", layout="zigzag")

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = cp.attention(q, k, v, causal=True, strategy=strategy)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    for platform in ("cpu", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "cudnn" not in text and "while" in text
    if strategy == "ring":
        assert "cudnn" in traced.lower(lowering_platforms=("cuda",)).as_text()


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
        cudnn = took["ring" if row["setting"].startswith("192/128") else "cudnn"][1]
        request = Request(
            "cuda", "bfloat16", call.dim, call.v_dim, bias=call.option == "bias", grad=True,
        )  # fmt: skip
        mask = Mask(causal=True, window=(1024, 0) if call.option == "window" else None)
        assert _cudnn.CudnnKernel().leads(90, request, mask) is (1.05 * cudnn < took["triton"][1])
        assert not _cudnn.CudnnKernel().leads(100, request, mask)
