"""Table of test cases: every backend runs them and is compared with the float64 oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ring_core import (
    ChunkLayout,
    Layout,
    LayoutName,
    LayoutSpec,
    Mask,
    Plan,
    RingProgram,
    StrategyConfig,
    balanced_layout,
    divisor_of,
    make_plan,
    reference,
    ring_program,
)
from ring_core.base.config import RingStrategy

Arrays = dict[str, npt.NDArray[Any]]
Segments = Literal["documents", "pair", "padded", "scattered"]
Shown = Literal["rows", "shared", "by-sequence", "by-head", "each"]
Bias = Literal["full", "shared", "heads", "batch", "masked", "very-negative"]
Numbers = Literal["equal", "one-hot", "large", "tiny"]
Poison = Literal["padding", "q", "k", "v", "q-inf", "k-inf", "v-inf", "bias"]
#: Kinds of views that inputs may be, and the inputs, of which each is one of another kind.
VIEWS = ("strided", "permuted", "heads_first", "sliced", "expanded", "broadcast", "offset")
VIEWED = ("q", "k", "v", "dout", "sinks", "dlse", "q_ids", "k_ids", "bias", "alibi_slopes", "shown")
#: Runs of the table that leave cases to nightly builds: `again` is torch with other strategies.
Run = Literal["torch", "again", "jax", "jax-cuda"]

#: Layout and strategy of each ring, by the word that case names use for it.
RINGS: dict[str, tuple[LayoutName, RingStrategy]] = {
    "contiguous": ("contiguous", "ring"), "zigzag": ("zigzag", "ring"),
    "striped": ("striped", "ring"), "balanced": ("contiguous", "balanced"),
}  # fmt: skip

#: Scales at which inputs, or their products, are below the dtype's smallest normal number.
TINY = {"float64": 2.0**-1040, "float32": 2.0**-135, "bfloat16": 2.0**-129, "float16": 2.0**-18}

#: Values that additive masks use for padding: a large negative number, next to which ``lse`` has
#: no digits left, and the lowest finite value of the dtype.
VERY_NEGATIVE = {
    "float64": (-1e300, float(np.finfo(np.float64).min)),
    "float32": (-1e10, float(np.finfo(np.float32).min)),
    "bfloat16": (-1e10, -(2 - 2.0**-7) * 2.0**127),
    "float16": (-1e4, float(np.finfo(np.float16).min)),
}

#: Regions of queries ``i`` and keys ``j`` with very negative scores, as additive masks have.
REGIONS: dict[str, Callable[[Any, Any], Any]] = {
    "part of a row": lambda i, j: (i + j) % 3 == 0,
    "whole rows": lambda i, j: (i >= i.max() * 3 // 4) & (j >= 0),
    "all rows": lambda i, j: (i >= 0) & (j >= 0),
    "left padding": lambda i, j: (j <= j.max() // 3) & (i >= 0),
    "right padding": lambda i, j: (j >= j.max() * 2 // 3) & (i >= 0),
}

#: Token (or query) dimension of the inputs and results that have one.
TOKEN_AXES = {
    **dict.fromkeys(("q", "k", "v", "q_ids", "k_ids", "dout", "out", "dq", "dk", "dv"), 1),
    **dict.fromkeys(("bias", "dlse", "lse", "dbias"), 2),
    "shown": -2,
}
#: Padding values of inputs, if not NaN. Gradients that arrive in padding are dropped.
PADDING = {"q_ids": 0, "k_ids": 0, "dout": 1e3, "dlse": 1e3, "shown": True}


@dataclass(frozen=True)
class Case:
    """Test case: one forward and backward on global arrays; ``name`` is its pytest id."""

    name: str
    mask: Mask
    layout: LayoutSpec = "contiguous"
    cp_size: int = 1
    seq_len: int = 48
    kv_seq_len: int | None = None
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (8, 8)
    dtype: str = "float32"
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: int | None = None  # sinks per head; 0 stands for shape [H]
    bias: Bias | None = None
    shown: Shown | None = None  # shape of a mask given as an array, beside the rules of ``mask``
    alibi: Literal[1, 2] | None = None  # number of dimensions of the slopes
    dropout_p: float = 0.0
    segments: Segments | None = None
    lse_grad: bool = False
    spread: float = 1.0  # factor by which the last quarter of the keys is larger
    poison: Poison | None = None  # NaN in padding, at a pair's bias, or NaN or one -inf in a token
    strategy: RingStrategy = "ring"
    views: int | None = None  # turn, from 1 to 7: inputs are views of kinds that differ by turn
    numbers: Numbers | None = None  # equal keys; one key per row; logits beyond 10,000; denormals
    nightly: frozenset[Run] = frozenset()  # runs that leave it to nightly builds
    low: float = field(default=0.0, compare=False)  # lowers the bias in this region
    region: str = field(default="all rows", compare=False)

    @property
    def keys(self) -> int:
        """Return the number of keys."""
        return self.seq_len if self.kv_seq_len is None else self.kv_seq_len

    @property
    def plan(self) -> Plan:
        """Return the plan with the least padding; recomputed if a mutant has emptied the cache."""
        return make_plan(
            self.mask,
            seq_len=self.seq_len,
            cp_size=self.cp_size,
            layout=self.layout,
            kv_seq_len=self.kv_seq_len,
            pad_to=(self._padded_len(self.seq_len), self._padded_len(self.keys)),
        )

    def _padded_len(self, length: int) -> int:
        return Layout.padded(self.layout, length, self.cp_size).padded_len

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Return the ``seq_len`` argument of a call, which is given only if there is padding."""
        plan = self.plan
        padded = plan.q_layout.pad_to is not None or plan.k_layout.pad_to is not None
        return (self.seq_len, self.keys) if padded else None

    def padded(self, name: str) -> npt.NDArray[Any]:
        """Return an input padded for its layout; no result may depend on the padding."""
        x = self.inputs[name]
        if (axis := TOKEN_AXES.get(name)) is None:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, self._padded_len(x.shape[axis]) - x.shape[axis]
        return np.pad(x, widths, constant_values=PADDING.get(name, np.nan))

    def without_padding(self, name: str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Check the padding of a result in natural order, and return the result without it."""
        if (axis := TOKEN_AXES.get(name)) is None:
            return x
        length = self.keys if name in ("dk", "dv") else self.seq_len
        tokens, padding = np.split(x, [length], axis=axis)
        np.testing.assert_array_equal(padding, -np.inf if name == "lse" else 0.0)
        return tokens

    @property
    def program(self) -> RingProgram:
        """Return the ring program of the case's plan."""
        return ring_program(self.plan, self.strategy)

    @property
    def ring(self) -> str:
        """Return the name in :data:`RINGS` of the layout and strategy."""
        return "balanced" if self.strategy == "balanced" else str(self.layout)

    def moved[S: str | StrategyConfig](self, strategy: S) -> S | str:
        """Return ``balanced`` if the case asks for that strategy, otherwise ``strategy``."""
        return "balanced" if self.strategy == "balanced" else strategy

    @property
    def dropout_seed(self) -> int | None:
        """Return a seed with nonzero bits in both of its 32-bit words."""
        return 0x1234_5678_9ABC_DEF0 if self.dropout_p else None

    @cached_property
    def inputs(self) -> Arrays:
        """Return the global inputs, rounded to the case's dtype and stored in float64."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        shapes = {
            "q": (self.batch, self.seq_len, heads, dim),
            "k": (self.batch, self.keys, kv_heads, dim),
            "v": (self.batch, self.keys, kv_heads, v_dim),
            "dout": (self.batch, self.seq_len, heads, v_dim),
            "dlse": (self.batch, heads, self.seq_len),
        }
        arrays: Arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        arrays["k"][:, -(self.keys // 4) :] *= self.spread
        self._renumber(arrays)
        if not self.lse_grad:
            del arrays["dlse"]
        if self.sinks is not None:
            arrays["sinks"] = rng.standard_normal((heads, self.sinks) if self.sinks else (heads,))
        if self.bias is not None:
            arrays["bias"] = self._bias(rng)
        if self.alibi is not None:
            arrays["alibi_slopes"] = 2.0 ** -rng.integers(1, 5, (self.batch, heads)[-self.alibi :])
        arrays = {name: round_to(x, self.dtype) for name, x in arrays.items()}
        if self.segments is not None:
            arrays.update(self._segments(rng))
        if self.shown is not None:
            arrays["shown"] = self._shown(rng)
        self._put_poison(arrays)
        return {name: self._as_viewed(name, x) for name, x in arrays.items()}

    def _as_viewed(self, name: str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an input with the values that its view shows, where that has strides of 0."""
        shown = {"expanded": x[..., :1], "broadcast": x[(slice(0, 1),) * (x.ndim - 1)]}
        part = shown.get(self.view_of(name) or "")
        return x if part is None else np.broadcast_to(part, x.shape)

    def view_of(self, name: str) -> str | None:
        """Return the kind of view that an input is given as, where a framework has views."""
        if self.views is None or name not in VIEWED:
            return None
        return VIEWS[(VIEWED.index(name) + self.views) % len(VIEWS)]

    def _put_poison(self, arrays: Arrays) -> None:
        """Put NaN, or an infinity, where ``poison`` asks, in place."""
        if self.poison == "padding":
            for name, side in (("q", "q_ids"), ("k", "k_ids"), ("v", "k_ids")):
                arrays[name][arrays[side] < 0] = np.nan if name != "v" else np.inf
        elif self.poison == "bias":
            arrays["bias"][..., 2 * self.seq_len // 3, self.keys // 3] = np.nan
        elif self.poison is not None:
            token = arrays[self.poison[0]][:, 2 * arrays[self.poison[0]].shape[1] // 3]
            if self.poison.endswith("-inf"):
                token[..., 0] = -np.inf
            else:
                token[:] = np.nan

    def _renumber(self, arrays: Arrays) -> None:
        """Replace input values in place as ``numbers`` asks."""
        if self.numbers == "equal":
            arrays["k"][:] = arrays["k"][:, :1]
        elif self.numbers == "one-hot":
            for name in "qk":
                index = np.arange(arrays[name].shape[1]) % self.dims[0]
                arrays[name][:] = 64 * np.eye(self.dims[0])[index][None, :, None]
        elif self.numbers == "large":  # multiples of 64, which do not round
            for name in "qk":
                arrays[name] = 64 * np.round(2 * arrays[name])
        elif self.numbers == "tiny":
            for name in ("q", "k", "v", "dout"):
                arrays[name] *= TINY[self.dtype]

    def _bias(self, rng: np.random.Generator) -> npt.NDArray[Any]:
        batch = 1 if self.bias in ("shared", "heads", "very-negative") else self.batch
        heads = 1 if self.bias in ("shared", "batch", "very-negative") else self.heads[0]
        shape = (batch, heads, self.seq_len, self.keys)
        bias = rng.standard_normal(shape)
        if self.bias == "masked":
            bias[rng.random(shape) < 0.3] = -np.inf
            bias[:, :, self.seq_len // 2] = -np.inf
        if self.bias == "very-negative":
            low, least = VERY_NEGATIVE[self.dtype]
            bias[:, :, self.seq_len // 2, 1::2] = low  # part of a row
            bias[:, :, -(self.seq_len // 4) :] = low  # whole rows, as padding on the right has
            bias[..., : self.keys // 8] = least  # all that the first rows see, if causal
        if self.low:
            lowered = np.maximum(VERY_NEGATIVE[self.dtype][1], bias + self.low)
            i, j = np.ogrid[: self.seq_len, : self.keys]
            bias = np.where(REGIONS[self.region](i, j), lowered, bias)
        return bias

    def everywhere(self) -> list[Case]:
        """Return the case with each low number that its dtype holds, in each region of its bias."""
        least = VERY_NEGATIVE[self.dtype][1]
        lows = (low for low in (-1e4, -1e6, -1e10, least) if low >= least)
        return [
            replace(self, name=f"{self.name}: {low:.3g} in {region}", low=low, region=region)
            for low, region in product(lows, REGIONS)
        ]

    def _shown(self, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Return a mask with a row that sees nothing, and that hides a key which is poisoned."""
        lead = {
            "rows": (), "shared": (1, 1), "by-sequence": (self.batch, 1), "by-head": (1, self.heads[0]),
            "each": (self.batch, self.heads[0]),
        }[self.shown or "rows"]  # fmt: skip
        shown = rng.random((*lead, self.seq_len, self.keys)) < 0.4
        shown[..., self.seq_len // 2, :] = False
        if lead[1:] == self.heads[:1]:  # each head hides all of another part from the later rows
            for head, part in enumerate(np.array_split(np.arange(self.keys), self.heads[0])):
                shown[:, head, self.seq_len // 2 :, part[0] : part[-1] + 1] = False
        if self.poison in ("k", "v"):
            shown[..., 2 * self.keys // 3] = False
        return shown

    def _segments(self, rng: np.random.Generator) -> Arrays:
        q_ids = np.sort(rng.integers(0, 4, (self.batch, self.seq_len)), axis=1).astype(np.int32)
        if self.segments == "padded":
            q_ids[:, -(self.seq_len // 4) :] = -1
            q_ids[:, self.seq_len // 3] = -7
        k_ids = q_ids
        if self.segments == "scattered":
            lengths = (self.seq_len, self.keys)
            q_ids, k_ids = (rng.integers(-1, 3, (self.batch, n)).astype(np.int32) for n in lengths)
        if self.segments == "pair":
            k_ids = rng.integers(0, 5, (self.batch, self.keys)).astype(np.int32)
        return {"q_ids": q_ids, "k_ids": k_ids}

    @property
    def options(self) -> dict[str, Any]:
        """Return the oracle's keyword arguments."""
        arrays = self.inputs
        by_name = {name: arrays.get(name) for name in ("sinks", "bias", "alibi_slopes")}
        if (shown := arrays.get("shown")) is not None:  # the oracle knows no such mask
            shown = shown.reshape((1,) * (4 - shown.ndim) + shown.shape)
            by_name["bias"] = np.where(shown, arrays.get("bias", 0.0), -np.inf)
        ids = (arrays["q_ids"], arrays["k_ids"]) if self.segments else None
        return {
            "segment_ids": ids, "softmax_scale": self.softmax_scale, "softcap": self.softcap,
            "dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed, **by_name,
        }  # fmt: skip

    @cached_property
    def expected(self) -> Arrays:
        """Return the oracle's results by name."""
        x = self.inputs
        out, lse = reference.attention(x["q"], x["k"], x["v"], mask=self.mask, **self.options)
        grads = reference.attention_grads(
            x["dout"], x["q"], x["k"], x["v"], dlse=x.get("dlse"), mask=self.mask, **self.options
        )
        results = {"out": out, "lse": lse, **grads._asdict()}
        if self.bias is None:  # of a mask that is an array
            del results["dbias"]
        return {name: x for name, x in results.items() if x is not None}

    @property
    def rules(self) -> dict[str, Any]:
        """Return the options of a call for what is visible: the mask, or an array and its rules."""
        rules = ("causal", "window", "chunk_size", "cu_seqlens")
        has_array = self.shown is not None
        return {x: getattr(self.mask, x) for x in rules} if has_array else {"mask": self.mask}


def round_to(x: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Round to the dtype's nearest numbers, stored in float64."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    return x.astype(dtype).astype(np.float64)


def diagonals(q_pos: Any, k_pos: Any) -> Any:
    """Mask predicate with empty, partial and full blocks, and rows that see few keys."""
    return ((q_pos - k_pos) % 7 < 3) & ((q_pos // 16 + k_pos // 16) % 3 != 1)


def prefix(q_pos: Any, k_pos: Any) -> Any:
    """Mask predicate of a prefix LM: every query sees the first 20 tokens."""
    return (k_pos < 20) | (k_pos <= q_pos)


def crossed(q_pos: Any, k_pos: Any) -> Any:
    """Mask predicate with a bitwise operation, which sums and quotients cannot express."""
    return (q_pos ^ k_pos) % 5 < 2


@dataclass(frozen=True)
class Lattice:
    """Mask predicate of two periods: visible diagonals, and visible squares of ``block``."""

    period: int
    width: int
    block: int
    squares: int

    def __call__(self, q_pos: Any, k_pos: Any) -> Any:
        """Return True where a query sees a key."""
        diagonal = (q_pos - k_pos) % self.period < self.width
        return diagonal & ((q_pos // self.block + 2 * (k_pos // self.block)) % self.squares != 0)


def masks(seq_len: int, cp_size: int) -> dict[str, Mask]:
    """Return the table's masks; windows are smaller than, equal to and larger than a shard."""
    shard, t = seq_len // cp_size, seq_len
    documents = (0, 1, t // 3, t // 3 + 2, t // 2 + 1, t)
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "window-small": Mask(causal=True, window=(2, None)),
        "window-shard": Mask(causal=True, window=(shard, 0)),
        "window-large": Mask(causal=True, window=(shard + 3, 0)),
        "window-both": Mask(window=(3, 4)),
        "window-right": Mask(window=(0, shard + 1)),
        "window-left": Mask(window=(5, None)),
        "window-self": Mask(window=(0, 0)),
        "chunks": Mask(causal=True, chunk_size=7),
        "chunks-full": Mask(chunk_size=max(1, shard)),
        "documents": Mask(causal=True, cu_seqlens=documents),
        "documents-full": Mask(cu_seqlens=documents),
        "documents-window": Mask(causal=True, window=(4, 0), cu_seqlens=documents),
        "documents-chunks": Mask(causal=True, chunk_size=9, cu_seqlens=(0, t // 2 - 1, t)),
        "predicate": Mask(causal=True, predicate=diagonals),
        "predicate-documents": Mask(predicate=prefix, cu_seqlens=(0, t // 2 + 3, t)),
    }


RING_SIZES = {1: 46, 2: 52, 3: 54, 4: 48, 8: 64}  # and the tokens of their mask cases
#: Masks that run per change in all rings. Others do in one ring in turn, but on three ranks in all
#: and on eight in none.
OFTEN = ("causal", "window-shard", "documents")
#: Cases that JAX runs per change; few, as compiling one takes seconds. Of options those in
#: `everything`, and of masks those in other cases, are not among them.
IN_JAX = (
    "documents-contiguous-cp1", "chunks-full-balanced-cp3", "causal-zigzag-cp8", "float64-balanced",
    "float16-zigzag", "v-dim-striped", "sinks-many-contiguous", "poison-padding-striped",
    "spread-contiguous", "batch-0-contiguous", "everything-balanced", "poison-bias-zigzag",
    "shown-bias-balanced", "shown-sinks-striped", "k-inf-full-contiguous",
    "nothing-float16-contiguous", "documents-window-chunks-cp3", "padded45-keys-alone-contiguous",
    "padded299-tiles-zigzag", "views1-few-contiguous",
)  # fmt: skip
#: Cases that JAX runs on GPUs besides, and besides the options in the contiguous ring.
ON_GPUS = (
    "keys16-causal-contiguous", "keys16-window-zigzag", "keys80-causal-striped", "keys80-chunks-zigzag",
    "keys80-predicate-balanced", "shortest-zigzag-cp8", "large-float16-contiguous", "softcap-large-contiguous",
    "k-inf-alone-contiguous", "documents-random-cp3", "options-random-cp2", "padded45-dropout-contiguous",
    "padded6-predicate-zigzag-cp4", "views2-few-contiguous", "sinks-many-zigzag",
)  # fmt: skip


def _mask_cases() -> Iterator[Case]:
    """Yield cases of every mask in every ring of every size."""
    for (size, (cp_size, seq_len)), (turn, (ring, (layout, strategy))) in product(
        enumerate(RING_SIZES.items()), enumerate(RINGS.items())
    ):
        for n, (name, mask) in enumerate(masks(seq_len, cp_size).items(), turn):
            often, first = name in OFTEN, ring == "contiguous"  # on one rank all rings are equal
            in_turn, on_gpus = often or n % 4 == 1, often and ring == "zigzag"
            per_change: dict[Run, tuple[bool, ...]] = {  # by the sizes of rings
                "torch": (first, in_turn, True, in_turn, often),
                "again": (False, in_turn, in_turn, often, often),
                "jax-cuda": (first, on_gpus, in_turn, on_gpus, on_gpus),
            }
            nightly = frozenset(run for run, on in per_change.items() if not on[size])
            yield Case(
                f"{name}-{ring}-cp{cp_size}", mask, layout, cp_size, seq_len,
                strategy=strategy, lse_grad=cp_size == 3, nightly=nightly | {"jax"},
            )  # fmt: skip


def _on_rings(name: str, number: int, *gpus: str, **fields: Any) -> list[Case]:
    """Return a case in every ring; on GPUs JAX runs the rings ``gpus`` per change.

    The two torch runs alternate over rings and numbers. ``balanced`` always belongs to the first,
    the only one in which ranks help each other.
    """
    cases = []
    for n, (ring, (layout, strategy)) in enumerate(RINGS.items(), number):
        nightly: set[Run] = {"again" if ring == "balanced" or n % 2 == 0 else "torch", "jax"}
        nightly |= set() if ring in gpus else {"jax-cuda"}
        case = Case(
            f"{name}-{ring}", layout=layout, strategy=strategy, nightly=frozenset(nightly), **fields
        )
        cases.append(case)
    return cases


#: All options together.
EVERYTHING: dict[str, Any] = {
    "softcap": 2.0, "sinks": 0, "bias": "masked", "alibi": 1, "dropout_p": 0.1, "segments": "padded",
    "heads": (4, 2), "dims": (8, 6), "batch": 2, "lse_grad": True,
}  # fmt: skip


def _option_cases() -> Iterator[Case]:
    """Yield cases of every option, alone and combined."""
    causal, window = Mask(causal=True), Mask(causal=True, window=(9, 0))
    options: dict[str, dict[str, Any]] = {
        "float64": {"dtype": "float64"},
        "bfloat16": {"dtype": "bfloat16"},
        "float16": {"dtype": "float16"},
        "mha": {"heads": (3, 3)},
        "gqa": {"heads": (6, 2), "batch": 2},
        "mqa": {"heads": (8, 1), "batch": 2},
        "v-dim": {"dims": (8, 4), "heads": (2, 2)},
        "scale": {"softmax_scale": 0.7, "heads": (2, 2)},
        "scale-negative": {"softmax_scale": -0.5},
        "scale-zero": {"softmax_scale": 0.0},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": 0, "lse_grad": True},
        "sinks-many": {"sinks": 3, "dtype": "bfloat16"},
        "bias": {"bias": "full", "batch": 2},
        "bias-shared": {"bias": "shared", "batch": 2},
        "bias-masked": {"bias": "masked", "lse_grad": True},
        "alibi": {"alibi": 1},
        "alibi-batch": {"alibi": 2, "batch": 2},
        "dropout": {"dropout_p": 0.3, "batch": 2},
        "segments": {"segments": "documents", "batch": 2},
        "segments-padded": {"segments": "padded", "lse_grad": True},
        "segments-pair": {"segments": "pair"},
        "poison-padding": {"segments": "padded", "poison": "padding"},
        "poison-q": {"poison": "q"},
        "poison-k": {"poison": "k"},
        "poison-v": {"poison": "v"},
        "spread": {"spread": 40.0},
        "batch-0": {"batch": 0},
        "bias-float64": {"bias": "full", "dtype": "float64", "alibi": 1, "dropout_p": 0.2},
        "everything": EVERYTHING | {"softmax_scale": 0.4},
        "bias-very-negative": {"bias": "very-negative", "heads": (4, 2), "lse_grad": True},
        "bias-very-negative-segments": {"bias": "very-negative", "segments": "padded", "batch": 2},
        "bias-very-negative-float64": {"bias": "very-negative", "dtype": "float64"},
        "bias-very-negative-bfloat16": {"bias": "very-negative", "dtype": "bfloat16"},
        "bias-very-negative-float16": {"bias": "very-negative", "dtype": "float16", "batch": 2},
        "bias-very-negative-sinks": {"bias": "very-negative", "sinks": 0},
        "poison-bias": {"bias": "full", "poison": "bias"},
        "shown-bias": {"shown": "by-head", "bias": "full", "batch": 2, "lse_grad": True},
        "shown-sinks": {"shown": "by-sequence", "sinks": 0, "batch": 2},
        "shown-documents": {"shown": "shared", "mask": Mask(cu_seqlens=(0, 7, 48))},
        "shown-segments": {"shown": "each", "segments": "documents", "batch": 2},
        "shown": {"shown": "rows", "mask": Mask(), "poison": "k", "lse_grad": True},
    }  # fmt: skip
    for n, (name, fields) in enumerate(options.items()):
        cp_size = (2, 4, 3)[n % 3]
        values = {"mask": window if n % 4 == 3 else causal, **fields}
        in_jax = any(f"{name}-{ring}" in IN_JAX for ring in RINGS)
        gpus = () if in_jax else ("contiguous",)
        yield from _on_rings(name, n, *gpus, cp_size=cp_size, seq_len=24 * cp_size, **values)


def _length_cases() -> Iterator[Case]:
    """Yield cases with more or fewer keys than queries, and the shortest sequences."""
    masks = {
        "causal": Mask(causal=True), "window": Mask(window=(11, 3)),
        "chunks": Mask(causal=True, chunk_size=13), "predicate": Mask(predicate=diagonals),
    }  # fmt: skip
    options: dict[str, Any] = {"alibi": 1, "dropout_p": 0.2, "bias": "full", "sinks": 0}
    for n, (keys, (name, mask)) in enumerate(product((16, 64, 80), masks.items())):
        sizes = {"cp_size": 4, "seq_len": 48, "kv_seq_len": keys}
        yield from _on_rings(f"keys{keys}-{name}", n + n // 4, mask=mask, **sizes, **options)
    for cp, (ring, (layout, strategy)) in product((2, 3, 8), RINGS.items()):
        length = cp * (1 + (layout == "zigzag"))
        name = f"shortest-{ring}-cp{cp}"
        yield Case(name, Mask(causal=True), layout, cp, length, strategy=strategy, nightly=IN_TORCH)


def _padding_cases() -> Iterator[Case]:
    """Yield cases of lengths that the layout does not divide, from one token a rank on."""
    for cp, (ring, (layout, strategy)) in product((2, 3, 4), RINGS.items()):
        for length in range(1, 3 * cp + 1):
            if length % divisor_of(layout, cp) == 0:
                continue
            masks = {
                "causal": Mask(causal=True),
                "full": Mask(),
                "documents": Mask(causal=True, cu_seqlens=(0, length // 2, length)),
                "window": Mask(window=(2, 1)),
                "predicate": Mask(predicate=crossed),
                "chunks": Mask(causal=True, chunk_size=3),
            }
            name, mask = [*masks.items()][(length + cp) % len(masks)]
            # Even lengths run under another strategy, but those of `balanced`, which has no other.
            as_it_is = length % 2 or strategy == "balanced"
            nightly: frozenset[Run] = IN_TORCH | frozenset({"again"} if as_it_is else {"torch"})
            yield Case(
                f"padded{length}-{name}-{ring}-cp{cp}", mask, layout, cp, length,
                strategy=strategy, lse_grad=True, nightly=nightly,
            )  # fmt: skip
    options: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": 0, "lse_grad": True},
        "bias": {"bias": "masked", "batch": 2},
        "bias-very-negative": {"bias": "very-negative", "segments": "padded"},
        "alibi": {"alibi": 2, "batch": 2},
        "dropout": {"dropout_p": 0.3, "batch": 2},
        "segments": {"segments": "documents", "lse_grad": True},
        "keys": {"kv_seq_len": 61, "bias": "full", "dropout_p": 0.2},
        "keys-alone": {"kv_seq_len": 64, "alibi": 1},
        "everything": EVERYTHING,
        "bfloat16": {"dtype": "bfloat16", "sinks": 2},
        "shown": {"shown": "by-head", "mask": Mask()},
    }  # fmt: skip
    sizes: dict[str, Any] = {"mask": Mask(causal=True), "cp_size": 4, "seq_len": 45}
    for n, (name, fields) in enumerate(options.items()):
        yield from _on_rings(f"padded45-{name}", n, **sizes | fields)
    tiles = Mask(causal=True, predicate=diagonals, cu_seqlens=(0, 150, 299))
    for case in _on_rings("padded299-tiles", 0, mask=tiles, cp_size=2, seq_len=299):
        yield replace(case, nightly=IN_TORCH)
    yield Case(
        "padded41-random", Mask(causal=True, window=(11, 0)), RANDOM[3], 3, 41, nightly=IN_TORCH
    )


def _number_cases() -> Iterator[Case]:
    """Yield cases of large, equal and infinite numbers, and masks that show nothing."""
    causal, nothing = Mask(causal=True), Mask(predicate=Lattice(3, 0, 8, 2))
    numbers: dict[str, dict[str, Any]] = {
        "equal": {"numbers": "equal", "lse_grad": True},
        "one-hot": {"numbers": "one-hot", "dims": (16, 8)},
        "large": {"numbers": "large", "dims": (16, 16), "lse_grad": True},
        "large-bfloat16": {"numbers": "large", "dims": (16, 16), "dtype": "bfloat16"},
        "large-float16": {"numbers": "large", "dims": (16, 16), "dtype": "float16"},
        "large-softcap": {"numbers": "large", "dims": (16, 16), "softcap": 2.0**-7},
        "softcap-large": {"softcap": 1e6},
        "sinks-large": {"numbers": "large", "dims": (4, 4), "sinks": 0},
        "q-inf": {"poison": "q-inf"},
        "k-inf": {"poison": "k-inf"},
        "v-inf": {"poison": "v-inf"},
        "q-inf-alone": {"poison": "q-inf", "mask": Mask(window=(0, 0)), "heads": (6, 3)},
        "k-inf-alone": {"poison": "k-inf", "mask": Mask(window=(0, 0)), "heads": (6, 3)},
        "q-inf-full": {"poison": "q-inf", "mask": Mask(), "seq_len": 4, "heads": (6, 3)},
        "k-inf-full": {"poison": "k-inf", "mask": Mask(), "seq_len": 4, "heads": (6, 3)},
        "nothing": {"mask": nothing, "lse_grad": True},
        "nothing-sinks": {"mask": nothing, "sinks": 0, "lse_grad": True},
        "nothing-float16": {"mask": nothing, "dtype": "float16"},
    }
    for name, fields in numbers.items():
        values = {"mask": causal, "cp_size": 4, **fields}
        yield Case(f"{name}-contiguous", nightly=IN_TORCH, **values)


#: Chunks assigned to ranks at random, by ring size; some ranks have neighbouring chunks.
RANDOM = {
    2: ChunkLayout(((0, 1, 4), (2, 3, 5))),
    3: ChunkLayout(((1, 5), (0, 2), (3, 4))),
    4: ChunkLayout(((0, 1, 5), (2, 7, 11), (3, 4, 10), (6, 8, 9))),
}


def _chunk_cases() -> Iterator[Case]:
    """Yield cases of chunk layouts: balanced for a mask, and random."""
    for n, name, random in (
        (2, "documents", "predicate"), (3, "documents-window", "documents"), (4, "documents-full", "causal"),
    ):  # fmt: skip
        mask = masks(48, n)[name]
        layout = balanced_layout(mask, seq_len=48, cp_size=n)
        yield Case(f"{name}-chunks-cp{n}", mask, layout, n, nightly=IN_TORCH)
        mask = masks(48, n)[random]
        yield Case(f"{random}-random-cp{n}", mask, RANDOM[n], n, lse_grad=n == 3, nightly=IN_TORCH)
    window, others = (
        Mask(causal=True, window=(11, 0)),
        ChunkLayout(((0, 4), (1, 5), (2, 6), (3, 7))),
    )
    options: dict[str, Any] = {"bias": "full", "alibi": 1, "nightly": IN_TORCH}
    yield Case("keys80-random-cp4", window, others, 4, 48, 80, **options)
    options |= {"dropout_p": 0.2, "sinks": 0, "segments": "padded", "batch": 2}
    yield Case("options-random-cp2", window, RANDOM[2], 2, **options)


def _view_cases() -> Iterator[Case]:
    """Yield cases whose inputs are views: all inputs, or the few that fused kernels take.

    In seven turns each input is a view of each kind.
    """
    every: dict[str, Any] = {"bias": "full", "alibi": 2, "segments": "documents", "lse_grad": True}
    sizes: dict[str, Any] = {
        "mask": Mask(causal=True),
        "cp_size": 2,
        "seq_len": 32,
        "batch": 2,
        "heads": (4, 2),
    }
    for turn in range(1, 1 + len(VIEWS)):
        for name, fields in (("", every), ("-few", {})):
            yield from _on_rings(f"views{turn}{name}", turn, sinks=0, views=turn, **sizes, **fields)


#: The runs that leave a case to nightly builds which every run of torch has per change.
IN_TORCH: frozenset[Run] = frozenset({"jax", "jax-cuda"})


def _cases() -> dict[str, Case]:
    """Return all cases by name, with those that JAX runs per change."""
    cases = [*_mask_cases(), *_option_cases(), *_length_cases(), *_number_cases()]
    cases += [*_chunk_cases(), *_padding_cases(), *_view_cases()]
    by_name = {case.name: case for case in cases}
    for name in (*IN_JAX, *ON_GPUS):
        runs = IN_TORCH if name in IN_JAX else {"jax-cuda"}
        by_name[name] = replace(by_name[name], nightly=by_name[name].nightly - runs)
    return by_name


#: All cases by name. At least two cases of each mask, option, layout, strategy, dtype and ring size
#: run per change.
CASES = _cases()
