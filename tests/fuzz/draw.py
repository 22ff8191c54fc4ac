"""Draws a random trial for a seed: any mask, shape, dtype and layout with any options.

The same seed gives the same trial for the same limits, on any machine. Seeds that share a program
differ only in the values of their arrays, so a compiling backend compiles once for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from cases import RINGS, Case, Lattice, Segments, diagonals, prefix

from ring_core import ChunkLayout, Mask, StrategyConfig, divisor_of

Rng = np.random.Generator
Choice = str | StrategyConfig


@dataclass(frozen=True)
class Trial:
    """Case and the options of the backend's ``run``."""

    case: Case
    way: tuple[tuple[str, Choice], ...] = ()  # keyword arguments of the backend's ``run``

    def __str__(self) -> str:
        """Return the case as Python for the table of cases, and the options."""
        return expression(self.case) + "".join(f" {name}={value!r}" for name, value in self.way)


def given(record: Case | Mask) -> dict[str, Any]:
    """Return what is unlike its default, without a name and a mask."""
    every = (x for x in fields(record) if x.init and x.name not in ("name", "mask"))
    return {x.name: value for x in every if (value := getattr(record, x.name)) != x.default}


def expression(case: Case) -> str:
    """Return Python code that makes the case."""
    rules = (
        f"{x}={getattr(value, '__name__', None) or repr(value)}"
        for x, value in given(case.mask).items()
    )
    parts = [repr(case.name), f"Mask({', '.join(rules)})"]
    for name, value in given(case).items():
        text = f"ChunkLayout({value.chunks})" if isinstance(value, ChunkLayout) else repr(value)
        parts.append(f"{name}={text}")
    return f"Case({', '.join(parts)})"


@dataclass(frozen=True)
class Limits:
    """Choices that a backend supports, and limits on the size of a case."""

    ring_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ways: dict[str, tuple[Choice, ...]]
    tokens: int = 72
    pairs: int = 24_000  # query-key pairs, over batch and heads
    values: int = 1  # number of seeds that share a program


LIMITS = {
    "core": Limits(
        (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 11, 16), ("float64", "float32", "bfloat16"), {}
    ),
    "torch": Limits(
        (1, 2, 2, 2, 3, 4, 4),
        ("float64", "float32", "float32", "bfloat16", "float16"),
        {
            "kernel": ("auto", "eager", "eager", "sdpa"),
            "strategy": (
                "auto",
                "ring",
                "gather",
                "ulysses",
                "hybrid",
                StrategyConfig("hybrid", outer="gather"),
            ),
        },
        tokens=64,
        pairs=12_000,
    ),
    "jax": Limits(
        (1, 2, 3, 4, 5, 8),
        ("float64", "float32", "float32", "bfloat16", "float16"),
        {"strategy": ("auto", "ulysses", "gather", StrategyConfig("hybrid", ulysses_size=2))},
        tokens=64,
        pairs=20_000,
        values=25,
    ),
    "jax-gpu": Limits(
        (1, 1, 2, 3, 4),
        ("float32", "float32", "bfloat16", "float16"),
        {
            "kernel": ("triton", "small blocks", "small blocks", "fused"),
            "strategy": ("auto", "ulysses", "gather"),
        },
        tokens=48,
        pairs=2_500,  # kernels are interpreted
        values=4,
    ),
}


def draw(seed: int, limits: Limits) -> Trial:
    """Return the trial of a seed."""
    rng = np.random.default_rng([seed // limits.values, 0])
    cp_size = pick(rng, limits.ring_sizes)
    layout, strategy = pick(rng, (*RINGS.values(), (_chunks(rng, cp_size), "ring")))
    unit = divisor_of(layout, cp_size)
    long = limits.values == 1 and rng.random() < 0.04  # several tiles of a predicate a rank
    tokens = 6 * limits.tokens if long else limits.tokens
    seq_len, keys = _lengths(rng, unit, tokens)
    case = Case(
        f"fuzz-{seed}", _mask(rng, seq_len, keys, cp_size), layout, cp_size, seq_len, keys,
        strategy=strategy, dtype=pick(rng, limits.dtypes), **_shape(rng, seq_len * (keys or seq_len), limits),
        **_options(rng),
    )  # fmt: skip
    way = tuple((name, pick(rng, values)) for name, values in limits.ways.items())
    return Trial(_values(np.random.default_rng([seed, 1]), case), way)


def _chunks(rng: Rng, cp_size: int) -> ChunkLayout:
    """Draw a chunk layout with up to three chunks a rank, assigned at random."""
    chunks = rng.permutation(cp_size * int(rng.integers(1, 4))).reshape(cp_size, -1)
    return ChunkLayout(tuple(tuple(sorted(numbers)) for numbers in chunks.tolist()))


def pick[T](rng: Rng, choices: Sequence[T]) -> T:
    """Return one of the choices, uniformly."""
    return choices[int(rng.integers(len(choices)))]


def _lengths(rng: Rng, unit: int, tokens: int) -> tuple[int, int | None]:
    """Draw the number of queries, and of keys if it differs."""
    most = max(1, tokens // unit)
    seq_len, keys = (unit * int(n) for n in rng.integers(1, most + 1, 2))
    return seq_len, keys if rng.random() < 0.25 else None


def _mask(rng: Rng, seq_len: int, keys: int | None, cp_size: int) -> Mask:
    shard = seq_len // cp_size
    sides = (None, None, 0, 1, 3, shard - 1, shard, shard + 1, seq_len // 2, 2 * seq_len)
    period = int(rng.integers(1, 9))
    lattice = Lattice(
        period, int(rng.integers(0, period + 1)), int(rng.integers(1, 24)), int(rng.integers(2, 5))
    )
    window, chunk = (pick(rng, sides), pick(rng, sides)), int(rng.integers(1, seq_len + 3))
    has_documents = keys is None and rng.random() < 0.3
    predicates: tuple[Any, ...] = (diagonals, prefix, lattice, lattice)
    return Mask(
        causal=bool(rng.random() < 0.5),
        window=window if rng.random() < 0.45 else None,
        chunk_size=pick(rng, (chunk, shard, 2 * shard)) if rng.random() < 0.25 else None,
        cu_seqlens=_documents(rng, seq_len) if has_documents else None,
        predicate=pick(rng, predicates) if rng.random() < 0.2 else None,
    )


def _documents(rng: Rng, seq_len: int) -> tuple[int, ...]:
    """Draw ``cu_seqlens``: random offsets, or one long document among short and empty ones."""
    cuts = rng.integers(0, seq_len + 1, int(rng.integers(0, 9)))
    if rng.random() < 0.3:
        cuts = np.cumsum(rng.integers(0, 4, seq_len))
        cuts = cuts[cuts <= pick(rng, (seq_len, seq_len // 2, seq_len // 4))]
    return (0, *sorted(cuts.tolist()), seq_len)


def _shape(rng: Rng, pairs: int, limits: Limits) -> dict[str, Any]:
    """Draw batch, heads and head dims within the limits."""
    kv_heads, group = int(rng.integers(1, 4)), pick(rng, (1, 1, 2, 3, 8))
    batch = 0 if rng.random() < 0.005 else int(rng.integers(1, 4))
    while batch * kv_heads * group * pairs > limits.pairs and (batch, kv_heads, group) != (1, 1, 1):
        batch, kv_heads, group = (max(1, n // 2) for n in (batch, kv_heads, group))
    dim = pick(rng, (1, 2, 4, 5, 8, 8, 16, 17, 32))
    v_dim = pick(rng, (1, 3, 8, 16)) if rng.random() < 0.3 else dim
    return {"batch": batch, "heads": (kv_heads * group, kv_heads), "dims": (dim, v_dim)}


def _options(rng: Rng) -> dict[str, Any]:
    chances: dict[str, tuple[float, tuple[Any, ...]]] = {
        "softmax_scale": (0.15, (0.05, 0.7, 1.0, 0.0, -0.5)),
        "softcap": (0.15, (0.1, 1.5, 30.0, 1e4)),
        "sinks": (0.2, (0, 1, 3)),
        "bias": (0.25, ("full", "shared", "heads", "batch", "masked", "very-negative")),
        "alibi": (0.15, (1, 2)),
        "dropout_p": (0.15, (0.1, 0.5, 0.9)),
        "segments": (0.25, ("documents", "pair", "padded", "scattered")),
        "lse_grad": (0.3, (True,)),
    }
    return {
        name: pick(rng, values)
        for name, (chance, values) in chances.items()
        if rng.random() < chance
    }


def _values(rng: Rng, case: Case) -> Case:
    """Add options that change only array values, so that one program runs all such cases."""
    if case.segments is not None:
        segments: tuple[Segments, ...] = ("pair", "scattered")
        if case.keys == case.seq_len:
            segments += ("documents", "padded")
        case = replace(case, segments=pick(rng, segments))
    values: dict[str, Any] = {}
    if rng.random() < 0.06:
        has_padding = case.segments in ("padded", "scattered")
        kinds = ("q", "k", "v", "q-inf", "k-inf", "v-inf", "padding" if has_padding else "k")
        values["poison"] = pick(rng, kinds)
    if rng.random() < 0.1:
        values["spread"] = pick(rng, (10.0, 40.0))
    if rng.random() < 0.06:  # large logits are exact where the scale is a power of two
        is_exact = case.dims[0] in (1, 4, 16) and case.softmax_scale is None
        values["numbers"] = pick(rng, ("equal", "one-hot", "large" if is_exact else "equal"))
    if values.get("poison") == "v-inf":  # 0 * inf is NaN if weights or slopes underflow
        values |= {"spread": 1.0, "numbers": None}
        values |= {"poison": "v"} if case.softcap is not None else {}
    if case.dtype in ("bfloat16", "float16"):
        # A backward knows `out`, and therefore `delta`, only rounded. If keys are equal, or a query
        # sees one key, `delta` cancels in dQ, and its rounding error exceeds the whole gradient.
        is_alike = values.get("numbers") in ("equal", "one-hot")
        values["numbers"] = None if is_alike else values.get("numbers")
        values["dropout_p"] = 0.5 if case.dropout_p else 0.0  # 1 / (1 - p) = 2 does not round
    return replace(case, **values)
