"""Time losses and log-probabilities without logits, of Ring and other libraries, on one GPU.

    python -m benchmarks.torch.heads --json heads.json
    python -m benchmarks.torch.heads --tokens 8192 --only ring
    python -m benchmarks.torch.heads --step --json step.json

Each row is a forward and a backward, with gradients of the hidden states and of the head: median
milliseconds, bytes held beyond inputs and gradients at most, and the largest error of a gradient,
relative to plain float64 on a shorter sequence. Liger's rows need ``liger-kernel`` and a GPU. With
``--step`` a row is a forward and a backward of a model of transformers of two layers, with each
``logits=`` of ``hf.parallelize``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common.report import Report, environment, parser_of
from ring_torch import ContextParallel, linear_cross_entropy
from ring_torch.training import token_log_probs

SHORT = 1024  # tokens that are compared with float64
LIGER_CLASSES = 4096  # classes that Liger's log-probabilities take at a time, its default
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden [N, dim], weight [V, dim], labels [N]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of whole logits."""
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels
    )


def losses() -> dict[str, Loss]:
    """Return the losses to compare, by name; all are the mean of -log(p), some plus entropies."""
    cp = ContextParallel()

    def of_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return -token_log_probs(cp, hidden, weight, labels).mean()

    def of_entropies(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        own, entropies = token_log_probs(cp, hidden, weight, labels, entropy=True)
        return -own.mean() - 0.01 * entropies.mean()

    rows: dict[str, Loss] = {
        "ring linear_cross_entropy": partial(linear_cross_entropy, cp),
        "ring token_log_probs": of_log_probs,
        "ring token_log_probs, entropy": of_entropies,
        "plain logits": plain,
    }
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        rows["torch linear_cross_entropy"] = partial(
            functional.linear_cross_entropy, options=options()
        )
    if find_spec("liger_kernel") is not None and torch.cuda.is_available():
        fused = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
        policy = import_module("liger_kernel.chunked_loss.fused_linear_ppo")
        chunked = policy._ChunkedSelectiveLogProbFunction  # noqa: SLF001 - its losses alone use it
        for name, dtype in (("", None), (", float32 sums", torch.float32)):
            module = fused(accum_dtype=dtype)
            rows[f"liger cross entropy{name}"] = partial(_weight_first, module)
        rows["liger log-probabilities"] = partial(_mean_of_chunked, chunked)
    return rows


def _weight_first(module: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return Liger's loss, which takes the head first."""
    loss: Tensor = module(weight, hidden, labels)
    return loss


def _mean_of_chunked(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of Liger's log-probabilities, without a bias and at temperature 1."""
    log_probs: Tensor = function.apply(hidden, weight, labels, None, 1.0, LIGER_CLASSES)
    return -log_probs.mean()


def inputs_of(
    tokens: int, dim: int, classes: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a head and labels; logits have a deviation of about 2."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, dim, device=device) * 2 / dim**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (tokens,), device=device)


def error_of(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], *, entropy: bool) -> float:
    """Return the largest relative error of a gradient, of the first tokens."""
    hidden, weight, labels = inputs[0][:SHORT].detach(), inputs[1].detach(), inputs[2][:SHORT]
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = plain(exact[0], exact[1], labels)
    if entropy:
        log_p = functional.linear(exact[0], exact[1]).log_softmax(-1)
        expected = expected + 0.01 * (log_p.exp() * log_p).sum(-1).mean()
    pairs = zip(
        torch.autograd.grad(loss(leaves[0], leaves[1], labels), leaves),
        torch.autograd.grad(expected, exact),
        strict=True,
    )
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def step_of(logits: Any, sizes: tuple[int, int, int, torch.dtype, str]) -> tuple[Loss, Any]:
    """Return the loss of a parallelized model of two layers, and its inputs."""
    transformers, hf = import_module("transformers"), import_module("ring_torch.hf")
    tokens, dim, classes, dtype, device = sizes
    config = transformers.LlamaConfig(
        vocab_size=classes, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=2,
        num_attention_heads=max(dim // 128, 1), use_cache=False, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype)
    name = "activation_checkpointing_enable"  # older releases of transformers have another
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    hf.parallelize(model.train(), ContextParallel(), logits=logits)
    ids = torch.randint(classes, (1, tokens), device=device)

    def loss(_: Tensor, __: Tensor, labels: Tensor) -> Tensor:
        for weight in model.parameters():
            weight.grad = None
        total: Tensor = model(input_ids=labels, labels=labels).loss
        return total

    head = model.get_output_embeddings().weight
    return loss, (model.get_input_embeddings().weight, head, ids)


def figures(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> dict[str, Any]:
    """Return milliseconds of a forward and backward, and the memory that they need at most."""
    is_gpu = inputs[0].is_cuda
    times = list[float]()
    peak = 0
    for _ in range(repeats + 1):
        inputs[0].grad = inputs[1].grad = None
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss(*inputs).backward()
        if is_gpu:
            torch.cuda.synchronize()
            gradients = sum(x.nbytes for x in inputs[:2])
            peak = torch.cuda.max_memory_allocated() - before - gradients
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times[1:]), "peak_bytes": peak}  # the first run compiles


def step_row(
    logits: str, sizes: tuple[int, int, int, torch.dtype, str], repeats: int
) -> dict[str, Any]:
    """Return the figures of a step; without milliseconds if it needs more than the GPU has."""
    row: dict[str, Any] = {"name": f"step, logits={logits!r}", "tokens": sizes[0], "ms": None}
    try:
        row |= figures(*step_of(logits, sizes), repeats)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return row


def main() -> int:
    """Measure, print, and write the figures; return 0."""
    parser = parser_of(__doc__, tables=False)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=152064)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--step", action="store_true", help="time whole models, by their logits")
    parser.add_argument("--only", default="", help="names that begin so")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    sizes = options.tokens, options.dim, options.classes, getattr(torch, options.dtype), device
    report = Report(options.json, lambda: environment(gpu, "torch", "triton", "liger-kernel"))
    rows: dict[str, Loss] = {}
    inputs: Any = None
    if not options.step:
        rows, inputs = losses(), inputs_of(*sizes)
    for logits in ("local", "none") if options.step else ():
        report.add(step_row(logits, sizes, options.repeats))
        print(report.rows[-1])
    for name, loss in rows.items():
        if not name.startswith(options.only):
            continue
        row: dict[str, Any] = {"name": name, "tokens": options.tokens, "dim": options.dim}
        row |= {"classes": options.classes, "dtype": options.dtype}
        try:
            row |= figures(loss, inputs, options.repeats)
            row["error"] = error_of(loss, inputs, entropy="entropy" in name and "cross" not in name)
        except torch.OutOfMemoryError:
            row["ms"] = None  # whole logits need more than the GPU has
        report.add(row)
        print({x: row.get(x) for x in ("name", "ms", "peak_bytes", "error")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
