"""Every public function refuses wrong values of every argument, with an error that names it."""

from __future__ import annotations

import inspect
from functools import partial
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
    subject,
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
NUMBER: Values = {**SIZE, "none": None}
PADDED: Values = {n: x for n, x in LENGTH.items() if n != "none"}
OFFSETS = {n: x for n, x in OPTIONS["cu_seqlens"].items() if n not in ("early end", "late end")}
TYPED = {n: x for n, x in NAME.items() if n != "typo"}
SHORT = {"cu_seqlens": Mask(cu_seqlens=(0, 7))}
#: Wrong values of the arguments that several functions have, by their names.
BY_NAME: dict[str, Values] = {
    **TENSORS, **MASK_OPTIONS, **NUMBERS, **UPSTREAM, **dict.fromkeys(PARTS, PART),
    **dict.fromkeys(("rank", "q_rank", "kv_rank", "step"), RANK),
    **dict.fromkeys(("q_pos", "k_pos", "batch", "heads", "queries", "keys"), POSITIONS),
    **dict.fromkeys(("own", "splits", "backward", "fetches_again", "color", "pictures"), FLAG),
    **dict.fromkeys(("tile", "block_q", "block_k", "v_head_dim"), SIZE),
    **dict.fromkeys(
        ("cp_size", "rings", "tokens", "hidden_size", "width", "num_q_heads", "num_kv_heads",
         "head_dim", "bytes_per_element"),
        NUMBER,
    ),
    "plan": PLAN, "program": PROGRAM, "layout": LAYOUT, "seq_len": LENGTH, "kv_seq_len": PADDED,
    "model": {"none": None, "word": "llama"}, "strategy": NAME, "precision": NAME,
    "outer": NAME, "name": TYPED, "pad_to": {**PADDED, "less": 4},
}  # fmt: skip


row = partial(subject, BY_NAME)
PLANNED: dict[str, Any] = {"mask": Mask(), "seq_len": 8, "cp_size": 2, "layout": "zigzag"}
SENT: dict[str, Any] = {"plan": plan, "model": model, "strategy": "ring"}
OF_A_RING: Values = {**NUMBER, "of a ring": 2}
POINTS = {key: [0] for key in ("batch", "heads", "queries", "keys")}
SUBJECTS: dict[str, Subject] = {
    "ring_core.Mask": row(Mask, {}, cu_seqlens=OFFSETS, predicate=PREDICATES),
    "ring_core.Mask.dense": row(CAUSAL.dense, {"q_pos": np.arange(3), "k_pos": np.arange(3)}),
    "ring_core.make_plan": row(
        make_plan, PLANNED, mask={**MASKS, **PREDICATE_MASKS, **SHORT},
        pad_to={**PADDED, "less": 4, "three": (8, 8, 8), "less of a pair": (8, 4)},
    ),
    "ring_core.Plan.items": row(plan.items, {"q_rank": 0, "kv_rank": 0}),
    "ring_core.ring_program": row(
        ring_program, {"plan": plan}, strategy={**NAME, "gather": "gather"}
    ),
    **{
        f"ring_core.RingProgram.{call.__name__}": row(call, {"rank": 0, "step": 0})
        for call in (program.items, program.remote_items)
    },
    "ring_core.gather_program": row(gather_program, {"plan": plan, "rank": 0}),
    "ring_core.longest_gather": row(longest_gather, {"plan": plan}),
    "ring_core.head_plan": row(
        head_plan, {"q_heads": 4, "kv_heads": 2, "ranks": 2}, q_heads={**NUMBER, "odd": 5},
        kv_heads={**NUMBER, "no divisor": 3}, ranks={**NUMBER, "more than heads": 5},
    ),
    "ring_core.RingProgram.table": row(program.table, {"step": 0}),
    **{
        f"ring_core.Plan.{call.__name__}": row(call, {"rank": 0})
        for call in (plan.positions, plan.q_positions, plan.k_positions)
    },
    "ring_core.Layout": row(Layout, {"name": "zigzag", "seq_len": 8, "cp_size": 2}, name=NAME),
    "ring_core.Layout.runs": row(plan.q_layout.runs, {"rank": 0}),
    "ring_core.divisor_of": row(divisor_of, {"layout": "contiguous", "cp_size": 2}),
    "ring_core.ChunkLayout": row(ChunkLayout, {}, chunks=CHUNKS),
    "ring_core.balanced_layout": row(
        balanced_layout, {"mask": CAUSAL, "seq_len": 8, "cp_size": 2},
        mask={**MASKS, "predicate": Mask(predicate=diagonals), **SHORT},
    ),
    "ring_core.pack_sequences": row(
        pack_sequences, {"lengths": [3, 5], "rings": 2, "tokens": 8},
        lengths={"none": None, "number": 8, "empty": [], "zero": [3, 0], "floats": [2.5], "longer": [9]},
    ),
    "ring_core.StrategyConfig": row(
        StrategyConfig, {"name": "ring"}, ulysses_size={"of another": 2}
    ),
    "ring_core.KernelConfig": row(
        KernelConfig, {}, fused_backward={n: x for n, x in FLAG.items() if n != "none"}
    ),
    "ring_core.merge": row(merge, PARTS),
    "ring_core.finalize": row(
        finalize, {"out": zeros(2, 8, 4, 16), "lse": zeros(2, 4, 8), "sinks": zeros(4)},
        out={**ARRAY, "number": 1.0, "shape": zeros(2, 8, 3, 16)},
        lse={**ARRAY, "number": 1.0, "shape": zeros(2, 8, 4)},
    ),
    "ring_core.reference.attention": row(
        reference.attention, inputs, seq_len=MASK_OPTIONS["seq_len"], mask=MASK_OPTIONS["mask"]
    ),
    "ring_core.reference.attention_grads": row(
        reference.attention_grads, {"dout": zeros(*Q), **inputs}, seq_len=MASK_OPTIONS["seq_len"],
        mask=MASK_OPTIONS["mask"],
    ),
    **{
        f"ring_core.reference.{call.__name__}": row(
            call, {"program": program, "dout": zeros(*Q), **inputs},
            dout={n: x for n, x in UPSTREAM["dout"].items() if n != "none"},
        )
        for call in (reference.simulate, reference.run)
    },
    "ring_core.philox.dropout_keep": row(
        dropout_keep, {"p": 0.5, "seed": 1, **POINTS},
        p={n: x for n, x in OPTIONS["dropout_p"].items() if n != "without a seed"},
        seed={**OPTIONS["dropout_seed"], "none": None},
    ),
    "ring_core.cost.Model": row(
        Model, {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}, batch=NUMBER
    ),
    "ring_core.cost.bytes_sent": row(bytes_sent, SENT, tile=OF_A_RING),
    "ring_core.cost.bytes_by_link": row(
        bytes_by_link, SENT | {"ranks_per_host": 1}, tile=OF_A_RING,
        ranks_per_host={**NUMBER, "more than ranks": 4},
    ),
    "ring_core.viz.describe": row(describe, {"program": program}),
    "ring_core.viz.plot": row(
        plot, {"program": program, "path": Path("x.svg")},
        path={"none": None, "number": 3.5, "list": ["x.svg"]},
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
