"""Time head dims, masks and options on one GPU, beside other kernels: ``nox -s bench_options``.

Batch 1, bfloat16, causal; ``common/cases.py`` has the rows. Methods: ``ring`` is ``ring_attention``
with the kernel it chooses, ``fa4`` flash-attn-4, ``cudnn`` and ``flash`` torch's SDPA on these
backends, ``flex`` compiled FlexAttention, whose block mask is made once.

First out, dQ, dK and dV of each are compared with float32 attention at 1,024 tokens: a method that
errs more than twice as much as the best of the others has no time. Times are CUDA events around
calls that are queued, in rounds in which all take turns, each round in an order of its own; a ratio
is one of times in one round. Each is kept as its quartiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ring_torch
from benchmarks.common import harness
from benchmarks.common.cases import OPTIONS_GATE as GATE_LENGTH, OURS, ROWS, Rival, Row
from benchmarks.common.harness import Errors, Run, Times, command
from benchmarks.torch import described
from benchmarks.torch.methods import Method, dense, flash, padded, sdpa
from benchmarks.torch.timing import event_ms
from ring_core import Mask

CAP = 20.0  # of softcap
STRIPE, FIRST = 512, 64  # keys of a stripe and of its start, in the predicate
DROPOUT = 0.1
MOST_CALLS, ROUND_MS = 20, 20.0  # calls of a turn at most, and milliseconds
DEVICE = "cuda"
Rule = Callable[[Any, Any], Any]
Score = Callable[[Any, Any, Any, Any], Any]
flex: Any = torch.compile(flex_attention, dynamic=False)


class Option(NamedTuple):
    """An option of attention, as arguments and as a definition.

    Attributes:
        ours: Arguments of ``ring_attention``.
        shown: A rule that is True where the query at ``i`` sees the key at ``j``.
        score: A function that changes scores of head ``h``; ``None`` if they stay.
        random: True if results of methods differ by chance, as with dropout.
    """

    ours: dict[str, Any]
    shown: Rule = lambda i, j: i >= j
    score: Score | None = None
    random: bool = False


class Case(NamedTuple):
    """A row of the table of options, at a length and on a device."""

    row: Row
    length: int
    device: str

    def random(self, *shape: int) -> Tensor:
        """Return random bfloat16 numbers, which are the same in every call."""
        made = torch.Generator(self.device).manual_seed(5)
        return torch.randn(shape, generator=made, device=self.device).bfloat16()

    def inputs(self, dtype: torch.dtype, sharpness: float = 1.0) -> list[Tensor]:
        """Return random q, k, v and dout, rounded to bfloat16; q is times ``sharpness``."""
        made = torch.Generator(self.device).manual_seed(self.length)
        tensors = [
            torch.randn(1, self.length, *shape, generator=made, device=self.device)
            for shape in self.row.shapes
        ]
        tensors[0] *= sharpness
        return [x.bfloat16().to(dtype).requires_grad_(n < 3) for n, x in enumerate(tensors)]

    @property
    def option(self) -> Option:
        """The row's option."""
        name, length, heads = self.row.option, self.length, self.row.heads
        document, window = min(1500, length // 3), length // 4
        ids = torch.arange(length, device=self.device) // document
        slopes = torch.exp2(-8 / heads * torch.arange(1, heads + 1, device=self.device))
        bias = self.random(*[length if name == "bias" else 0] * 2)
        sinks = self.random(heads).float().requires_grad_()
        together: Rule = lambda i, j: (i >= j) & (i // document == j // document)  # noqa: E731 - a rule
        options = {
            "causal": Option({}),
            "softcap": Option({"softcap": CAP}, score=lambda s, *_: CAP * torch.tanh(s / CAP)),
            "alibi": Option({"alibi_slopes": slopes}, score=lambda s, h, i, j: s - slopes[h] * (i - j)),
            "segment_ids": Option({"segment_ids": ids.int()[None]}, together),
            "cu_seqlens": Option({"cu_seqlens": (*range(0, length, document), length)}, together),
            "predicate": Option({"causal": False, "mask": Mask(predicate=striped)}, striped),
            "sinks": Option({"sinks": sinks}),
            "window": Option({"window": (window, 0)}, lambda i, j: (i >= j) & (i - j <= window)),
            "bias": Option({"bias": bias[None, None]}, score=lambda s, _h, i, j: s + bias[i, j]),
            "dropout": Option({"dropout_p": DROPOUT, "dropout_seed": 7}, random=True),
        }  # fmt: skip
        option = options[name]
        return option._replace(ours={"causal": True} | option.ours)


def striped(i: Any, j: Any) -> Any:
    """Return True where a key is visible: in a window, or among the first of its stripe."""
    return (i >= j) & ((i - j < STRIPE) | (j % STRIPE < FIRST))


def exact(case: Case) -> Method:
    """Return a case's method by definition, with which others are compared."""
    option = case.option
    i = torch.arange(case.length, device=case.device)[:, None]
    j, heads = i.T, torch.arange(case.row.heads, device=case.device)[:, None, None]
    definition = partial(dense, visible=option.shown(i, j), sinks=option.ours.get("sinks"))
    if score := option.score:
        definition = partial(definition, score=lambda scores: score(scores, heads, i, j))
    return Method(definition)


def _ring(case: Case) -> Method:
    options = case.option.ours

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
        explained = ring_torch.ContextParallel().explain(q, k, v, **options)
        return explained.splitlines()[0].removeprefix("kernel ").partition(":")[0]

    sinks = tuple(x for name, x in options.items() if name == "sinks")
    return Method(partial(ring_torch.ring_attention, **options), sinks, chosen=kernel)


def _fa4(case: Case) -> Method:
    """Return FlashAttention-4, which takes the options of our call under names of its own."""
    options = {**case.option.ours}
    of_mask = options.keys() & {"causal", "window", "cu_seqlens"}
    mask = Mask(**{name: options.pop(name) for name in of_mask})
    if "sinks" in options:
        options["learnable_sink"] = options.pop("sinks").detach()
    return Method(flash(mask, **options))


def _sdpa(case: Case, backend: SDPBackend, *, pads: bool = False) -> Method:
    """Return torch's SDPA on one backend.

    Its mask cannot be causal beside a bias, so the bias is ``-inf`` for later keys.
    """
    bias = None
    if case.row.option == "bias":
        later = torch.ones(case.length, case.length, dtype=torch.bool, device=case.device).triu(1)
        bias = case.random(*later.shape).masked_fill_(later, -torch.inf)[None, None]
    dropout = DROPOUT if case.row.option == "dropout" else 0.0
    attend = partial(sdpa, attn_mask=bias, is_causal=bias is None, dropout_p=dropout)
    return Method(padded(attend) if pads else attend, around=partial(sdpa_kernel, backend))


def _flex(case: Case) -> Method:
    """Return compiled FlexAttention; its block mask is made once."""
    (_, shown, score, _), size = case.option, case.length
    blocks = create_block_mask(
        lambda _b, _h, i, j: shown(i, j), None, None, size, size, device=case.device
    )
    modified = None
    if score is not None:
        modified = lambda s, _b, h, i, j: score(s, h, i, j)  # noqa: E731 - FlexAttention takes a function

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
        out: Any = flex(*heads_first, score_mod=modified, block_mask=blocks, enable_gqa=True)
        return out.transpose(1, 2)

    return Method(attend)


#: Methods on one GPU, by name.
METHODS: dict[str, Callable[[Case], Method]] = {
    "ring": _ring, "fa4": _fa4, "flex": _flex,
    "cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn padded": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION, pads=True),
    "flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
}  # fmt: skip


def _run(method: Method, *x: Tensor) -> Any:
    """Run a pass of a method: forward + backward if there is a gradient of the output."""
    with method.around():
        return method.both(*x) if len(x) == 4 else method.forward(*x)


def errors(row: Row, device: str, methods: Mapping[str, Callable[[Case], Method]]) -> Errors:
    """Return the largest relative RMS error of out, dq, dk and dv, or why a method has none.

    It is ``None`` where results are random: then the method only has to run.
    """

    def error(rival: Rival) -> float | None:
        case = Case(row.of(rival), GATE_LENGTH, device)
        results = _run(methods[rival.method](case), *case.inputs(torch.bfloat16, row.sharpness))
        if case.option.random:
            return None
        expected = exact(case).both(*case.inputs(torch.float32, row.sharpness))
        pairs = zip(results[:4], expected, strict=True)
        return max(float((a.float() - b).square().mean().sqrt() / b.std()) for a, b in pairs)

    return {rival.name: x for rival, x in harness.attempted(row.entrants, error).items()}


def _milliseconds(run: Run, calls: int) -> float:
    return max(event_ms(run, calls), 1e-3)


def rounds(runs: Mapping[str, Run], count: int) -> Times:
    """Return milliseconds per call of each method, in every round."""

    def calls(run: Run) -> int:  # that fill a turn
        took = min(_milliseconds(run, 2) for _ in range(2))
        return max(1, min(MOST_CALLS, round(ROUND_MS / took)))

    return harness.take_turns(runs, count, calls, _milliseconds)


def measured(row: Row, length: int, count: int) -> dict[str, Any]:
    """Measure a row, and return it with the kernel that ours took."""
    torch.compiler.reset()  # otherwise it stops compiling after a few masks

    def run_of(way: str, rival: Rival) -> Run:
        case = Case(row.of(rival), length, DEVICE)
        x = case.inputs(torch.bfloat16)[: 4 if way == "both" else 3]
        run = partial(_run, METHODS[rival.method](case), *x)
        run()
        return run

    wrong = errors(row, DEVICE, METHODS)
    result = harness.timed_row(row, wrong, run_of, partial(rounds, count=count))
    if OURS not in result["milliseconds"]["both"]:
        return result | {"kernel": None}
    case = Case(row, length, DEVICE)
    return result | {"kernel": METHODS[OURS](case).chosen(*case.inputs(torch.bfloat16)[:3])}


@command(__doc__, harness.ARGUMENTS)
def main(options: Any) -> int:
    """Measure each row, and write it; return the exit code."""
    return harness.run_rows(options, ROWS, measured, described())
