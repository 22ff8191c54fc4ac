"""The rows of ``gpu_options.py``: their sizes, their rivals, and what they ask of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import Mask

CAP = 20.0
STRIPE, FIRST = 512, 64
DROPOUT = 0.1
PADDED = {40: 64, 72: 96, 100: 128, 136: 160, 176: 192, 200: 256, 250: 256}  # head dims
Options = dict[str, Any]
Rule = Callable[[Any, Any], Any]
Score = Callable[[Any, Any, Any, Any], Any]


class Rival(NamedTuple):
    """A method beside ours; of another head dim or option where a row's own cannot be compared."""

    name: str
    method: str
    dim: int | None = None
    option: str | None = None


FA4, CUDNN, FLEX = (Rival(name, name) for name in ("fa4", "cudnn", "flex"))
PLAIN = (FA4, CUDNN)
MASKED = (FA4, FLEX)


@dataclass(frozen=True)
class Row:
    """Attention of some heads with an option, causal.

    Attributes:
        goal: Our time over that of the best other should be at most this; ``None`` if it is only
            to be known.
        sharpness: What queries are multiplied by where results are compared, so that scores are
            large enough for the option to matter.
    """

    name: str
    rivals: tuple[Rival, ...]
    option: str = "causal"
    dim: int = 128
    v_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    goal: float | None = None
    sharpness: float = 1.0

    def of(self, rival: Rival) -> Row:
        """This row as a rival runs it."""
        return replace(
            self, option=rival.option or self.option, dim=rival.dim or self.dim,
            v_dim=rival.dim or self.v_dim,
        )  # fmt: skip


ROWS = (
    Row("causal 32/8", (*PLAIN, FLEX), goal=1.02),
    Row("causal 16/16", PLAIN, heads=16, kv_heads=16, goal=1.02),
    Row("192/128, 16/16", (*PLAIN, Rival("cudnn, padded", "cudnn padded")), dim=192, heads=16,
        kv_heads=16, goal=1.03),
    Row("192/128, 32/8", (*PLAIN, Rival("cudnn, padded", "cudnn padded")), dim=192, goal=1.03),
    Row("256", PLAIN, dim=256, v_dim=256, goal=1.03),
    Row("192", PLAIN, dim=192, v_dim=192, goal=1.03),
    Row("160", PLAIN, dim=160, v_dim=160, goal=1.03),
    Row("112", (*PLAIN, Rival("fa4 at 128", "fa4", dim=128)), dim=112, v_dim=112),
    Row("96", PLAIN, dim=96, v_dim=96),
    Row("80", (*PLAIN, Rival("fa4 at 96", "fa4", dim=96)), dim=80, v_dim=80, goal=1.1),
    Row("64", PLAIN, dim=64, v_dim=64),
    Row("softcap", MASKED, "softcap", sharpness=3.0, goal=1.1),
    Row("alibi", (FA4, Rival("fa4, heads apart", "fa4 apart"), FLEX), "alibi", goal=1.03),
    Row("segment_ids", (FA4, Rival("fa4, heads apart", "fa4 apart"), FLEX), "segment_ids", goal=1.1),
    Row("cu_seqlens", MASKED, "cu_seqlens"),
    Row("predicate", (FA4, Rival("fa4, 64 keys", "fa4 64 keys"), FLEX), "predicate", goal=1.05),
    Row("sinks", (FA4, Rival("ring without sinks", "ring", option="causal")), "sinks",
        goal=1.05),
    Row("window", MASKED, "window"),
    Row("bias", (FA4, CUDNN, FLEX), "bias"),
    Row("dropout", (CUDNN, Rival("flash", "flash")), "dropout"),
    *(
        Row(f"{dim}, zeros added", (Rival(f"ring at {more}", "ring", dim=more),), dim=dim, v_dim=dim,
            goal=1.3)
        for dim, more in PADDED.items()
    ),
)  # fmt: skip


class Case(NamedTuple):
    """A row at a length on a device."""

    row: Row
    length: int
    device: str

    @property
    def window(self) -> int:
        """4,096 keys of 16,384."""
        return self.length // 4

    @property
    def document(self) -> int:
        """1,500 tokens, or a third of what there is."""
        return min(1500, self.length // 3)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where documents begin and end."""
        return (*range(0, self.length, self.document), self.length)

    @property
    def alibi_step(self) -> float:
        """The slope of head ``h`` is two to the minus ``h + 1`` times this."""
        return 8 / self.row.heads

    def random(self, *shape: int) -> Tensor:
        """The same numbers whenever a method asks for them, bfloat16."""
        made = torch.Generator(self.device).manual_seed(5)
        return torch.randn(shape, generator=made, device=self.device).bfloat16()

    def segments(self) -> Tensor:
        """``[1, T]``."""
        return (torch.arange(self.length, device=self.device) // self.document).int()[None]

    def slopes(self) -> Tensor:
        """``[H]``."""
        heads = torch.arange(1, self.row.heads + 1, device=self.device)
        return torch.exp2(-self.alibi_step * heads)

    def bias(self) -> Tensor:
        """``[T, T]``."""
        return self.random(self.length, self.length)

    def sinks(self) -> Tensor:
        """``[H]``, a parameter."""
        return self.random(self.row.heads).float().requires_grad_()

    def inputs(self, dtype: torch.dtype, sharpness: float = 1.0) -> list[Tensor]:
        """Random q, k, v and the gradient of the output, rounded to bfloat16 in any dtype."""
        made = torch.Generator(self.device).manual_seed(self.length)
        row = self.row
        shapes = (
            (row.heads, row.dim), (row.kv_heads, row.dim), (row.kv_heads, row.v_dim),
            (row.heads, row.v_dim),
        )  # fmt: skip
        found = [
            torch.randn(1, self.length, *shape, generator=made, device=self.device)
            for shape in shapes
        ]
        found[0] *= sharpness
        return [x.bfloat16().to(dtype).requires_grad_(n < 3) for n, x in enumerate(found)]


class Option(NamedTuple):
    """What a case asks of attention.

    Attributes:
        ours: Options of ``ring_attention``.
        shown: Whether the query at ``i`` sees the key at ``j``.
        score: What becomes of a score of head ``h``.
        random: Results of methods differ.
    """

    ours: Callable[[Case], Options]
    shown: Callable[[Case], Rule] = lambda _: lambda i, j: i >= j
    score: Callable[[Case], Score] | None = None
    random: bool = False


def striped(i: Any, j: Any) -> Any:
    """The predicate: a window, and the first keys of each stripe."""
    return (i >= j) & ((i - j < STRIPE) | (j % STRIPE < FIRST))


def _own_document(case: Case) -> Rule:
    return lambda i, j: (i >= j) & (i // case.document == j // case.document)


def _capped(_: Case) -> Score:
    return lambda score, _h, _i, _j: CAP * torch.tanh(score / CAP)


def _sloped(case: Case) -> Score:
    slopes = case.slopes()
    return lambda score, h, i, j: score - slopes[h] * (i - j)


def _biased(case: Case) -> Score:
    bias = case.bias()
    return lambda score, _h, i, j: score + bias[i, j]


CAUSAL: Options = {"causal": True}
OPTIONS = {
    "causal": Option(lambda _: CAUSAL),
    "softcap": Option(lambda _: CAUSAL | {"softcap": CAP}, score=_capped),
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
