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

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ring_torch
from benchmarks.common import turns
from benchmarks.common.cases import OPTIONS_GATE as GATE_LENGTH, OURS, ROWS, Row
from benchmarks.common.report import reason_of
from benchmarks.common.turns import Errors, Run, Times
from benchmarks.torch.methods import (
    Method,
    dense,
    described,
    flash,
    padded,
    sdpa,
    through_autograd,
)
from ring_core import Mask

CAP = 20.0  # of softcap
STRIPE, FIRST = 512, 64  # keys of a stripe and of its start, in the predicate
DROPOUT = 0.1
MASKS = ("causal", "window", "cu_seqlens")  # options that make the mask
MOST_CALLS, ROUND_MS = 20, 20.0  # calls of a turn at most, and milliseconds
DEVICE = "cuda"
Options = dict[str, Any]
Rule = Callable[[Any, Any], Any]
Score = Callable[[Any, Any, Any, Any], Any]
flex: Any = torch.compile(flex_attention, dynamic=False)


class Case(NamedTuple):
    """A row of the table of options, at a length and on a device."""

    row: Row
    length: int
    device: str

    @property
    def window(self) -> int:
        """Keys before its own that a query sees: 4,096 for 16,384 tokens."""
        return self.length // 4

    @property
    def document(self) -> int:
        """Tokens of a document: 1,500, or a third of the sequence if that is less."""
        return min(1500, self.length // 3)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Boundaries of documents, as ``cu_seqlens``."""
        return (*range(0, self.length, self.document), self.length)

    def random(self, *shape: int) -> Tensor:
        """Return random bfloat16 numbers, which are the same in every call."""
        made = torch.Generator(self.device).manual_seed(5)
        return torch.randn(shape, generator=made, device=self.device).bfloat16()

    def segments(self) -> Tensor:
        """Return the segment ids of documents, int32 ``[1, T]``."""
        return (torch.arange(self.length, device=self.device) // self.document).int()[None]

    def slopes(self) -> Tensor:
        """Return ALiBi's slopes ``[H]``: ``2 ** (-8 * (h + 1) / H)`` of head ``h``."""
        heads = torch.arange(1, self.row.heads + 1, device=self.device)
        return torch.exp2(-8 / self.row.heads * heads)

    def bias(self) -> Tensor:
        """Return a random bias for all heads, ``[T, T]``."""
        return self.random(self.length, self.length)

    def sinks(self) -> Tensor:
        """Return random sinks, float32 ``[H]``, a parameter."""
        return self.random(self.row.heads).float().requires_grad_()

    def inputs(self, dtype: torch.dtype, sharpness: float = 1.0) -> list[Tensor]:
        """Return random q, k, v and dout, rounded to bfloat16; q is times ``sharpness``."""
        made = torch.Generator(self.device).manual_seed(self.length)
        tensors = [
            torch.randn(1, self.length, *shape, generator=made, device=self.device)
            for shape in self.row.shapes
        ]
        tensors[0] *= sharpness
        return [x.bfloat16().to(dtype).requires_grad_(n < 3) for n, x in enumerate(tensors)]


class Option(NamedTuple):
    """An option of attention, as arguments and as a definition.

    Attributes:
        ours: Arguments of ``ring_attention``.
        shown: Returns a rule that is True where the query at ``i`` sees the key at ``j``.
        score: Returns a function that changes scores of head ``h``; ``None`` if they stay.
        random: True if results of methods differ by chance, as with dropout.
    """

    ours: Callable[[Case], Options]
    shown: Callable[[Case], Rule] = lambda _: lambda i, j: i >= j
    score: Callable[[Case], Score | None] = lambda _: None
    random: bool = False


def striped(i: Any, j: Any) -> Any:
    """Return True where a key is visible: in a window, or among the first of its stripe."""
    return (i >= j) & ((i - j < STRIPE) | (j % STRIPE < FIRST))


def _own_document(case: Case) -> Rule:
    return lambda i, j: (i >= j) & (i // case.document == j // case.document)


def _sloped(case: Case) -> Score:
    slopes = case.slopes()
    return lambda score, h, i, j: score - slopes[h] * (i - j)


def _biased(case: Case) -> Score:
    bias = case.bias()
    return lambda score, _h, i, j: score + bias[i, j]


CAUSAL: Options = {"causal": True}
OPTIONS = {
    "causal": Option(lambda _: CAUSAL),
    "softcap": Option(lambda _: CAUSAL | {"softcap": CAP}, score=lambda _: lambda s, *_: CAP * torch.tanh(s / CAP)),
    "alibi": Option(lambda case: CAUSAL | {"alibi_slopes": case.slopes()}, score=_sloped),
    "segment_ids": Option(lambda case: CAUSAL | {"segment_ids": case.segments()}, _own_document),
    "cu_seqlens": Option(lambda case: CAUSAL | {"cu_seqlens": case.offsets}, _own_document),
    "predicate": Option(lambda _: {"mask": Mask(predicate=striped)}, lambda _: striped),
    "sinks": Option(lambda case: CAUSAL | {"sinks": case.sinks()}),
    "window": Option(
        lambda case: CAUSAL | {"window": (case.window, 0)},
        lambda case: lambda i, j: (i >= j) & (i - j <= case.window),
    ),
    "bias": Option(lambda case: CAUSAL | {"bias": case.bias()[None, None]}, score=_biased),
    "dropout": Option(lambda _: CAUSAL | {"dropout_p": DROPOUT, "dropout_seed": 7}, random=True),
}  # fmt: skip


def exact(case: Case) -> Method:
    """Return a case's method by definition, with which others are compared."""
    option = OPTIONS[case.row.option]
    i = torch.arange(case.length, device=case.device)[:, None]
    j, heads = i.T, torch.arange(case.row.heads, device=case.device)[:, None, None]
    definition: Callable[..., Tensor] = partial(dense, visible=option.shown(case)(i, j))
    if score := option.score(case):
        definition = partial(definition, score=lambda scores: score(scores, heads, i, j))
    if case.row.option == "sinks":
        definition = partial(definition, sinks=case.sinks())
    return through_autograd(definition)


def _ring(case: Case) -> Method:
    options = OPTIONS[case.row.option].ours(case)
    attend = partial(ring_torch.ring_attention, **options)
    return through_autograd(attend, *(x for name, x in options.items() if name == "sinks"))


def _fa4(case: Case) -> Method:
    """Return FlashAttention-4, which takes the options of our call under names of its own."""
    options = {**OPTIONS[case.row.option].ours(case)}
    mask = Mask(**{name: options.pop(name) for name in MASKS if name in options})
    if "sinks" in options:
        options["learnable_sink"] = options.pop("sinks").detach()
    return through_autograd(flash(mask, **options))


def ring_kernel(case: Case) -> str:
    """Return the name of the kernel that ours takes."""
    q, k, v, _ = case.inputs(torch.bfloat16)
    options = OPTIONS[case.row.option].ours(case)
    explained = ring_torch.ContextParallel().explain(q, k, v, **options)
    return explained.splitlines()[0].removeprefix("kernel ").partition(":")[0]


def _sdpa(case: Case, backend: SDPBackend, *, pads: bool = False) -> Method:
    """Return torch's SDPA on one backend.

    Its mask cannot be causal beside a bias, so the bias is ``-inf`` for later keys.
    """
    bias = None
    if case.row.option == "bias":
        later = torch.ones(case.length, case.length, dtype=torch.bool, device=case.device).triu(1)
        bias = case.bias().masked_fill_(later, -torch.inf)[None, None]
    dropout = DROPOUT if case.row.option == "dropout" else 0.0
    attend = partial(sdpa, attn_mask=bias, is_causal=bias is None, dropout_p=dropout)
    around = partial(sdpa_kernel, backend)
    return through_autograd(padded(attend) if pads else attend)._replace(around=around)


def _flex(case: Case) -> Method:
    """Return compiled FlexAttention; its block mask is made once."""
    option = OPTIONS[case.row.option]
    shown, score = option.shown(case), option.score(case)
    blocks = create_block_mask(
        lambda _b, _h, i, j: shown(i, j), None, None, case.length, case.length, device=case.device
    )
    modified = None
    if score is not None:
        modified = lambda s, _b, h, i, j: score(s, h, i, j)  # noqa: E731 - FlexAttention takes a function

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
        out = flex(*heads_first, score_mod=modified, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return through_autograd(attend)


#: Methods on one GPU, by name.
METHODS: dict[str, Callable[[Case], Method]] = {
    "ring": _ring, "fa4": _fa4, "flex": _flex,
    "cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn padded": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION, pads=True),
    "flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
}  # fmt: skip


def errors(row: Row, device: str, methods: Mapping[str, Callable[[Case], Method]]) -> Errors:
    """Return the largest relative RMS error of out, dq, dk and dv, or why a method has none.

    It is ``None`` where results are random: then the method only has to run.
    """
    found: Errors = {}
    for rival in row.entrants:
        case = Case(row.of(rival), GATE_LENGTH, device)
        try:
            results = _run(methods[rival.method](case), *case.inputs(torch.bfloat16, row.sharpness))
            found[rival.name] = None if OPTIONS[row.option].random else _error(case, results)
        except Exception as error:  # noqa: BLE001 - a library's own; the row says so
            found[rival.name] = reason_of(error)
    return found


def _run(method: Method, *x: Tensor) -> Any:
    """Run a pass of a method: forward + backward if there is a gradient of the output."""
    with method.around():
        return method.both(*x) if len(x) == 4 else method.forward(*x)


def _error(case: Case, results: Sequence[Tensor]) -> float:
    expected = exact(case).both(*case.inputs(torch.float32, case.row.sharpness))
    pairs = zip(results[:4], expected, strict=True)
    return max(float((a.float() - b).square().mean().sqrt() / b.std()) for a, b in pairs)


def rounds(runs: Mapping[str, Run], count: int) -> Times:
    """Return milliseconds per call of each method, in every round."""
    return turns.take_turns(runs, count, _calls, _milliseconds)


def _calls(run: Run) -> int:
    """Return how many calls fill a turn."""
    took = min(_milliseconds(run, 2) for _ in range(2))
    return max(1, min(MOST_CALLS, round(ROUND_MS / took)))


def _milliseconds(run: Run, calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    took: float = start.elapsed_time(stop)
    return max(took / calls, 1e-3)


def measured(row: Row, length: int, count: int) -> dict[str, Any]:
    """Measure a row, and return it with the kernel that ours took."""
    torch.compiler.reset()  # otherwise it stops compiling after a few masks

    def programs(way: str, names: list[str]) -> dict[str, Run | str]:
        runs: dict[str, Run | str] = {}
        for rival in (x for x in row.entrants if x.name in names):
            case = Case(row.of(rival), length, DEVICE)
            x = case.inputs(torch.bfloat16)[: 4 if way == "both" else 3]
            try:
                run = partial(_run, METHODS[rival.method](case), *x)
                run()
            except Exception as error:  # noqa: BLE001 - as above
                runs[rival.name] = reason_of(error)
            else:
                runs[rival.name] = run
        return runs

    wrong = errors(row, DEVICE, METHODS)
    result = turns.timed_row(row, wrong, programs, partial(rounds, count=count))
    ran = OURS in result["milliseconds"]["both"]
    return result | {"kernel": ring_kernel(Case(row, length, DEVICE)) if ran else None}


def _environment() -> dict[str, Any]:
    return described(cudnn=torch.backends.cudnn.version())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each row, and write it; return the exit code."""
    return turns.run_rows(__doc__, ROWS, measured, _environment, argv)


if __name__ == "__main__":
    sys.exit(main())
