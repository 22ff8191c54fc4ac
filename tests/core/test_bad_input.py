"""Every public function refuses wrong values of every argument, with an error that names it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import diagonals
from wrong import (
    FLAG,
    LAYOUT,
    NAME,
    NAN,
    OPTIONS,
    SIZE,
    Subject,
    Values,
    checks_of,
)

from ring_core import (
    ChunkLayout,
    KernelConfig,
    Layout,
    Mask,
    StrategyConfig,
    balanced_layout,
    divisor_of,
    finalize,
    gather_program,
    head_plan,
    longest_gather,
    make_plan,
    merge,
    pack_sequences,
    reference,
    ring_program,
)
from ring_core.base.arguments import FOREIGN_OPTIONS, refuse_foreign_options
from ring_core.cost import (
    Model,
    bytes_by_link,
    bytes_sent,
)
from ring_core.philox import dropout_keep
from ring_core.reference import attention, attention_grads
from ring_core.viz import describe, plot

Q, KV = (2, 8, 4, 16), (2, 8, 2, 16)


def zeros(*shape: int, dtype: Any = np.float64) -> Any:
    return np.zeros(shape, dtype)


#: Values that are no array of real numbers.
ARRAY: Values = {
    "none": None, "word": "q", "words": np.full(Q, "1"), "complex": zeros(*Q, dtype=np.complex128),
    "flags": zeros(*Q, dtype=bool), "objects": np.full(Q, None), "ragged": [[1.0], [1.0, 2.0]],
    "dates": zeros(*Q, dtype="M8[s]"), "set": {1.0},
}  # fmt: skip
QUERIES: Values = {
    **ARRAY, "number": 1.0, "3 dimensions": zeros(8, 4, 16), "5 dimensions": zeros(1, *Q),
    "batch": zeros(1, 8, 4, 16), "heads": zeros(2, 8, 3, 16), "no heads": zeros(2, 8, 0, 16),
    "head dim": zeros(2, 8, 4, 8), "no head dim": zeros(2, 8, 4, 0), "empty": zeros(2, 0, 4, 16),
}  # fmt: skip
KEYS: Values = {
    **ARRAY, "number": 1.0, "3 dimensions": zeros(8, 2, 16), "5 dimensions": zeros(1, *KV),
    "batch": zeros(1, 8, 2, 16), "heads": zeros(2, 8, 3, 16), "no heads": zeros(2, 8, 0, 16),
    "length": zeros(2, 9, 2, 16), "head dim": zeros(2, 8, 2, 0), "empty": zeros(2, 0, 2, 16),
}  # fmt: skip
VALUES: Values = {n: x for n, x in KEYS.items() if n != "head dim"} | {
    "head dim": zeros(2, 8, 2, 0)
}
ids = zeros(2, 8, dtype=np.int32)
TENSORS: dict[str, Values] = {
    "q": QUERIES,
    "k": KEYS,
    "v": VALUES,
    "segment_ids": {
        **{n: x for n, x in ARRAY.items() if n != "none"}, "floats": zeros(2, 8), "number": 3,
        "nan": np.full((2, 8), NAN), "shape": zeros(2, 9, dtype=np.int32), "row": ids[0],
        "triple": (ids, ids, ids), "one of two": (ids, None), "beyond int32": np.full((2, 8), 2**40),
    },
    "sinks": {
        **{n: x for n, x in ARRAY.items() if n != "none"}, "number": 1.0, "heads": zeros(3),
        "none a head": zeros(4, 0), "3 dimensions": zeros(4, 1, 1),
    },
    "bias": {
        **{n: x for n, x in ARRAY.items() if n != "none"}, "number": 1.0, "square": zeros(8, 8),
        "batch": zeros(3, 4, 8, 8), "heads": zeros(2, 3, 8, 8), "rows": zeros(2, 4, 4, 8),
        "columns": zeros(2, 4, 8, 9),
    },
    "alibi_slopes": {
        **{n: x for n, x in ARRAY.items() if n != "none"}, "number": 1.0, "heads": zeros(2),
        "batch": zeros(3, 4), "3 dimensions": zeros(1, 2, 4),
    },
}  # fmt: skip
UPSTREAM: dict[str, Values] = {
    "dout": {**ARRAY, "number": 1.0, "shape": zeros(*KV), "empty": zeros(2, 0, 4, 16)},
    "dlse": {
        **{n: x for n, x in ARRAY.items() if n != "none"}, "number": 1.0, "shape": zeros(2, 8, 4),
    },
}  # fmt: skip
MASK_OPTIONS = {n: OPTIONS[n] for n in ("causal", "window", "chunk_size", "cu_seqlens", "mask")} | {
    # The oracle has no layout, so there may be any padding.
    "seq_len": {
        n: x for n, x in OPTIONS["seq_len"].items() if n not in ("too few", "one of a pair")
    }
}
NUMBERS = {n: OPTIONS[n] for n in ("softmax_scale", "softcap", "dropout_p", "dropout_seed")}
PREDICATES: Values = {
    "number": 3, "word": "causal", "mask": Mask(), "array": np.ones((8, 8), bool),
    "unhashable": type("Rule", (), {"__call__": lambda *_: True, "__hash__": None})(),
}  # fmt: skip
LENGTH: Values = {**SIZE, "none": None, "indivisible": 7}
CAUSAL = Mask(causal=True)
plan = make_plan(CAUSAL, seq_len=8, cp_size=2, layout="zigzag")
program = ring_program(plan)
PLAN: Values = {"none": None, "mask": CAUSAL, "word": "zigzag", "class": type(plan)}
PROGRAM: Values = {**PLAN, "plan": plan, "class": type(program)}
CHUNKS: Values = {
    "none": None, "number": 2, "word": "01", "empty": (), "row": (0, 1), "none a rank": ((), ()),
    "uneven": ((0, 1), (2,)), "twice": ((0, 1), (1, 2)), "missing": ((0, 1), (2, 4)),
    "negative": ((-1,), (0,)), "falling": ((1, 0), (2, 3)), "floats": ((0.0,), (1.0,)),
    "flags": ((False,), (True,)), "words": (("0",), ("1",)), "nan": ((NAN,), (0,)),
    "array": np.array([[0], [1]]), "set": {(0,), (1,)},
}  # fmt: skip
MASKS: Values = {"none": None, "word": "causal", "array": np.ones((8, 8)), "class": Mask}
RANK: Values = {
    **{n: x for n, x in SIZE.items() if n != "zero"}, "none": None, "too large": 2
}  # fmt: skip
POSITIONS: Values = {
    n: ARRAY[n] for n in ("none", "word", "words", "complex", "flags", "objects", "ragged", "set")
} | {"floats": np.ones(3), "nan": np.array([NAN]), "square": zeros(2, 2, dtype=np.int64)}  # fmt: skip
PARTS = {
    "out_a": zeros(2, 8, 4), "lse_a": zeros(2, 8), "out_b": zeros(2, 8, 4), "lse_b": zeros(2, 8),
}  # fmt: skip
PART: Values = {**ARRAY, "shape": zeros(2, 9), "number": 1.0}
PREDICATE_MASKS: Values = {
    f"a predicate that {word}": Mask(predicate=rule)  # type: ignore[arg-type]  # wrong on purpose
    for word, rule in {
        "returns nothing": lambda _i, _j: None,
        "returns words": lambda _i, _j: "yes",
        "returns distances": lambda i, j: i - j,
        "returns another shape": lambda _i, _j: np.ones(5, bool),
        "takes one argument": lambda i: i,
    }.items()
}
model = Model(4, 2, 16)
inputs = {"q": zeros(*Q), "k": zeros(*KV), "v": zeros(*KV)}

SUBJECTS: dict[str, Subject] = {
    "ring_core.Mask": Subject(
        Mask, {},
        {
            **{n: OPTIONS[n] for n in ("causal", "window", "chunk_size")},
            "cu_seqlens": {
                n: x for n, x in OPTIONS["cu_seqlens"].items() if n not in ("early end", "late end")
            },
            "predicate": PREDICATES,
        },
    ),
    "ring_core.Mask.dense": Subject(
        CAUSAL.dense, {"q_pos": np.arange(3), "k_pos": np.arange(3)},
        {"q_pos": POSITIONS, "k_pos": POSITIONS},
    ),
    "ring_core.make_plan": Subject(
        make_plan, {"mask": Mask(), "seq_len": 8, "cp_size": 2, "layout": "zigzag"},
        {
            "mask": {**MASKS, **PREDICATE_MASKS, "cu_seqlens": Mask(cu_seqlens=(0, 7))},
            "seq_len": LENGTH, "cp_size": {**SIZE, "none": None}, "layout": LAYOUT,
            "kv_seq_len": {n: x for n, x in LENGTH.items() if n != "none"},
            "pad_to": {
                **{n: x for n, x in LENGTH.items() if n != "none"}, "less": 4, "three": (8, 8, 8),
                "less of a pair": (8, 4),
            },
        },
    ),
    "ring_core.Plan.items": Subject(
        plan.items, {"q_rank": 0, "kv_rank": 0}, {"q_rank": RANK, "kv_rank": RANK}
    ),
    "ring_core.ring_program": Subject(
        ring_program, {"plan": plan}, {"plan": PLAN, "strategy": {**NAME, "gather": "gather"}}
    ),
    "ring_core.RingProgram.items": Subject(
        program.items, {"rank": 0, "step": 0}, {"rank": RANK, "step": RANK}
    ),
    "ring_core.RingProgram.remote_items": Subject(
        program.remote_items, {"rank": 0, "step": 0}, {"rank": RANK, "step": RANK}
    ),
    "ring_core.gather_program": Subject(
        gather_program, {"plan": plan, "rank": 0},
        {"plan": PLAN, "rank": RANK, "own": FLAG, "splits": FLAG, "tile": SIZE},
    ),
    "ring_core.longest_gather": Subject(
        longest_gather, {"plan": plan}, {"plan": PLAN, "splits": FLAG, "tile": SIZE}
    ),
    "ring_core.head_plan": Subject(
        head_plan, {"q_heads": 4, "kv_heads": 2, "ranks": 2},
        {
            "q_heads": {**SIZE, "none": None, "odd": 5}, "kv_heads": {**SIZE, "none": None, "no divisor": 3},
            "ranks": {**SIZE, "none": None, "more than heads": 5},
        },
    ),
    "ring_core.RingProgram.table": Subject(program.table, {"step": 0}, {"step": RANK}),
    "ring_core.Plan.positions": Subject(plan.positions, {"rank": 0}, {"rank": RANK}),
    "ring_core.Plan.q_positions": Subject(plan.q_positions, {"rank": 0}, {"rank": RANK}),
    "ring_core.Plan.k_positions": Subject(plan.k_positions, {"rank": 0}, {"rank": RANK}),
    "ring_core.Layout": Subject(
        Layout, {"name": "zigzag", "seq_len": 8, "cp_size": 2},
        {
            "name": NAME, "seq_len": LENGTH, "cp_size": {**SIZE, "none": None},
            "pad_to": {n: x for n, x in {**LENGTH, "less": 4}.items() if n != "none"},
        },
    ),
    "ring_core.Layout.runs": Subject(plan.q_layout.runs, {"rank": 0}, {"rank": RANK}),
    "ring_core.divisor_of": Subject(
        divisor_of, {"layout": "contiguous", "cp_size": 2},
        {"layout": LAYOUT, "cp_size": {**SIZE, "none": None}},
    ),
    "ring_core.ChunkLayout": Subject(ChunkLayout, {}, {"chunks": CHUNKS}),
    "ring_core.balanced_layout": Subject(
        balanced_layout, {"mask": CAUSAL, "seq_len": 8, "cp_size": 2},
        {
            "mask": {
                **MASKS, "predicate": Mask(predicate=diagonals), "cu_seqlens": Mask(cu_seqlens=(0, 7)),
            },
            "seq_len": LENGTH, "cp_size": {**SIZE, "none": None},
            "kv_seq_len": {n: x for n, x in LENGTH.items() if n != "none"},
        },
    ),
    "ring_core.pack_sequences": Subject(
        pack_sequences, {"lengths": [3, 5], "rings": 2, "tokens": 8},
        {
            "lengths": {"none": None, "number": 8, "empty": [], "zero": [3, 0], "floats": [2.5], "longer": [9]},
            **{name: {**SIZE, "none": None} for name in ("rings", "tokens", "hidden_size")},
        },
    ),
    "ring_core.StrategyConfig": Subject(
        StrategyConfig, {"name": "ring"},
        {
            "name": {n: x for n, x in NAME.items() if n != "typo"}, "ulysses_size": {"of another": 2}, "outer": NAME,
        },
    ),
    "ring_core.KernelConfig": Subject(
        KernelConfig, {},
        {
            "name": {n: x for n, x in NAME.items() if n != "typo"},
            "block_q": SIZE, "block_k": SIZE,
            "fused_backward": {n: x for n, x in FLAG.items() if n != "none"},
        },
    ),
    "ring_core.merge": Subject(merge, PARTS, dict.fromkeys(PARTS, PART)),
    "ring_core.finalize": Subject(
        finalize, {"out": zeros(2, 8, 4, 16), "lse": zeros(2, 4, 8), "sinks": zeros(4)},
        {
            "out": {**ARRAY, "number": 1.0, "shape": zeros(2, 8, 3, 16)},
            "lse": {**ARRAY, "number": 1.0, "shape": zeros(2, 8, 4)},
            "sinks": TENSORS["sinks"],
        },
    ),
    "ring_core.reference.attention": Subject(
        reference.attention, inputs, {**TENSORS, **MASK_OPTIONS, **NUMBERS}
    ),
    "ring_core.reference.attention_grads": Subject(
        reference.attention_grads, {"dout": zeros(*Q), **inputs},
        {**TENSORS, **MASK_OPTIONS, **NUMBERS, **UPSTREAM},
    ),
    **{
        f"ring_core.reference.{call.__name__}": Subject(
            call, {"program": program, "dout": zeros(*Q), **inputs},
            {
                **TENSORS, **NUMBERS, "program": PROGRAM, "precision": NAME, "dlse": UPSTREAM["dlse"],
                "dout": {n: x for n, x in UPSTREAM["dout"].items() if n != "none"},
            },
        )
        for call in (reference.simulate, reference.run)
    },
    "ring_core.philox.dropout_keep": Subject(
        dropout_keep, {"p": 0.5, "seed": 1, **{key: [0] for key in ("batch", "heads", "queries", "keys")}},
        {
            "p": {n: x for n, x in OPTIONS["dropout_p"].items() if n != "without a seed"},
            "seed": {**OPTIONS["dropout_seed"], "none": None},
            **dict.fromkeys(("batch", "heads", "queries", "keys"), POSITIONS),
        },
    ),
    "ring_core.cost.Model": Subject(
        Model, {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        {
            **{key: {**SIZE, "none": None} for key in ("num_q_heads", "num_kv_heads", "head_dim")},
            "v_head_dim": SIZE, **{key: {**SIZE, "none": None} for key in ("batch", "bytes_per_element")},
        },
    ),
    "ring_core.cost.bytes_sent": Subject(
        bytes_sent, {"plan": plan, "model": model, "strategy": "ring"},
        {
            "plan": PLAN, "model": {"none": None, "word": "llama"}, "strategy": NAME, "backward": FLAG, "fetches_again": FLAG,
            "tile": {**SIZE, "none": None, "of a ring": 2},
        },
    ),
    "ring_core.cost.bytes_by_link": Subject(
        bytes_by_link, {"plan": plan, "model": model, "strategy": "ring", "ranks_per_host": 1},
        {
            "plan": PLAN, "model": {"none": None, "word": "llama"}, "strategy": NAME, "backward": FLAG, "fetches_again": FLAG,
            "ranks_per_host": {**SIZE, "none": None, "more than ranks": 4}, "tile": {**SIZE, "none": None, "of a ring": 2},
        },
    ),
    "ring_core.viz.describe": Subject(describe, {"program": program}, {"program": PROGRAM, "color": FLAG, "pictures": FLAG, "width": {**SIZE, "none": None}}),
    "ring_core.viz.plot": Subject(
        plot, {"program": program, "path": Path("x.svg")},
        {"program": PROGRAM, "path": {"none": None, "number": 3.5, "list": ["x.svg"]}},
    ),
}  # fmt: skip

#: Public names used only by backends: kernels, loops, commands and their checks.
FOR_BACKENDS = {
    f"ring_core.{name}"
    for name in (
        "Capabilities", "GatherProgram", "HeadPlan", "Plan", "Request", "RingProgram", "Run", "Step", "WorkItem",
        "gather_memory", "gather_refusals", "refusals", "require", "support_matrix",
        "cost.CountedCall", "cost.LinkBytes", "cost.StrategyBytes", "philox.philox", "philox.seed_key", "philox.dropout_threshold",
        "reference.Grads", "reference.Simulation", "viz.computing_ranks", "viz.kv_messages",
    )
}  # fmt: skip


MODULES = (
    "ring_core",
    "ring_core.cost",
    "ring_core.philox",
    "ring_core.reference",
    "ring_core.viz",
)
globals().update(checks_of(SUBJECTS, MODULES, FOR_BACKENDS))


def ours(*, mask: object = None, causal: bool = False) -> tuple[object, bool]:
    return mask, causal


def test_words_name_the_option_here() -> None:
    call = refuse_foreign_options(ours)
    with pytest.raises(
        ValueError, match=r"attn_mask or is_causal.*use mask, .*; for is_causal, use causal"
    ):
        call(attn_mask=None, is_causal=True)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(TypeError, match="nonsense"):
        call(nonsense=1)  # type: ignore[call-arg]  # wrong on purpose
    assert call(causal=True) == (None, True)
    assert inspect.signature(call) == inspect.signature(ours)


def test_no_name_is_an_option_here() -> None:
    """No foreign name is an option here: a right call would be refused."""
    assert not FOREIGN_OPTIONS.keys() & inspect.signature(attention).parameters.keys()


def test_the_oracle_refuses_them() -> None:
    x = np.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="for scale, use softmax_scale"):
        attention(x, x, x, scale=1.0)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(ValueError, match="for enable_gqa, leave it out"):
        attention_grads(x, x, x, x, enable_gqa=True)  # type: ignore[call-arg]  # wrong on purpose


EIGHT, SIX = np.ones((1, 8, 2, 4)), np.ones((1, 6, 2, 4))
FEWER_KEYS = r"q has 8 tokens but k 6: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def test_causal_with_fewer_keys_is_refused() -> None:
    with pytest.raises(ValueError, match=FEWER_KEYS):
        attention(EIGHT, SIX, SIX, causal=True)
    with pytest.raises(ValueError, match=FEWER_KEYS):
        attention_grads(EIGHT, EIGHT, SIX, SIX, causal=True)


def test_a_causal_mask_with_fewer_keys_keeps_the_rule() -> None:
    """An explicit mask aligns the last query with the last key; here the first two see nothing."""
    out, lse = attention(EIGHT, SIX, SIX, mask=Mask(causal=True))
    assert np.isneginf(lse[..., :2]).all() and np.isfinite(lse[..., 2:]).all()
    assert (out[:, :2] == 0).all()
    np.testing.assert_allclose(out[:, 2:], 1)


def test_causal_with_as_many_keys_or_more_is_right() -> None:
    attention(EIGHT, EIGHT, EIGHT, causal=True)
    attention(SIX, EIGHT, EIGHT, causal=True)
