"""Every public function refuses wrong values of every argument, with an error that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wrong
from cases import diagonals
from wrong import COUNT, FEWER_KEYS, FLAG, KV, LAYOUT, NAME, NAN, OPTIONS, SIZE, Q, Subject, Values

import ring_core
from ring_core import (
    LAYOUTS,
    ChunkLayout,
    Layout,
    Mask,
    StrategyConfig,
    UnsupportedError,
    balanced_layout,
    checks,
    make_plan,
    reference,
    ring_program,
)
from ring_core.base.arguments import FOREIGN_OPTIONS, refuse_foreign_options
from ring_core.base.config import strategy_config
from ring_core.choose.balance import layout_for
from ring_core.cost import Model, bytes_by_link, bytes_sent
from ring_core.movement import halo, halo_ids, relayout, shift
from ring_core.pages import PageTable
from ring_core.philox import dropout_keep
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.recurrence import runs_of_documents
from ring_core.reference import attention, attention_grads
from ring_core.tripwire import every_of
from ring_core.viz import describe, plot

zeros = np.zeros
core: Any = ring_core  # without its types: arguments are wrong on purpose


def without(values: Values, *words: str) -> Values:
    return {word: value for word, value in values.items() if word not in words}


def bad(*shape: int) -> Values:
    """Return values that are no array of real numbers."""
    return {
        "word": "q", "words": np.full(shape, "1"), "complex": zeros(shape, "complex128"),
        "flags": zeros(shape, bool), "objects": np.full(shape, None), "ragged": [[1.0], [1.0, 2.0]],
        "dates": zeros(shape, "M8[s]"), "set": {1.0}, "number": 1.0,
    }  # fmt: skip


ARRAY: Values = {"none": None, **bad(*Q)}
TENSORS = {name: without(x, "half") for name, x in wrong.wrong_tensors(zeros, bad, "bool").items()}
UPSTREAM: dict[str, Values] = {
    "dout": {**ARRAY, "shape": zeros(KV), "empty": zeros((2, 0, 4, 16))},
    "dlse": {**bad(*Q), "shape": zeros((2, 8, 4))},
    "segment_ids": {**TENSORS["segment_ids"], "nan": np.full((2, 8), NAN), "beyond int32": np.full((2, 8), 2**40)},
}  # fmt: skip
#: The oracle has no layout, so there may be any padding.
OF_THE_ORACLE: dict[str, Values] = {
    "seq_len": without(OPTIONS["seq_len"], "too few", "one of a pair"), "mask": OPTIONS["mask"],
}  # fmt: skip
PREDICATES: Values = {
    "number": 3, "word": "causal", "mask": Mask(), "array": np.ones((8, 8), bool),
    "unhashable": type("Rule", (), {"__call__": lambda *_: True, "__hash__": None})(),
}  # fmt: skip
LENGTH: Values = {**COUNT, "indivisible": 7}
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
RANK: Values = {**without(SIZE, "zero"), "none": None, "too large": 2}
POSITIONS: Values = {
    **without(ARRAY, "dates", "number"),
    "floats": np.ones(3), "nan": np.array([NAN]), "square": zeros((2, 2), int),
}  # fmt: skip
PARTS = {f"{name}_{part}": zeros((2, 8, 4)[:n]) for part in "ab" for name, n in (("out", 3), ("lse", 2))}  # fmt: skip
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
inputs = {"q": zeros(Q), "k": zeros(KV), "v": zeros(KV)}
PADDED = without(LENGTH, "none")
SHORT = {"cu_seqlens": Mask(cu_seqlens=(0, 7))}
#: Wrong values of the arguments that several functions have, by their names.
BY_NAME: dict[str, Values] = {
    **OPTIONS, **TENSORS, **UPSTREAM, **OF_THE_ORACLE,
    **{part: {**ARRAY, "shape": zeros((2, 9))} for part in PARTS},
    **dict.fromkeys(("rank", "q_rank", "kv_rank", "step"), RANK),
    **dict.fromkeys(("q_pos", "k_pos", "batch", "heads", "queries", "keys"), POSITIONS),
    **dict.fromkeys(("own", "splits", "backward", "fetches_again", "color", "pictures"), FLAG),
    **dict.fromkeys(("tile", "block_q", "block_k", "v_head_dim"), SIZE),
    **dict.fromkeys(
        ("cp_size", "rings", "tokens", "hidden_size", "width", "num_q_heads", "num_kv_heads",
         "head_dim", "bytes_per_element"),
        COUNT,
    ),
    "plan": PLAN, "program": PROGRAM, "layout": LAYOUT, "seq_len": LENGTH, "kv_seq_len": PADDED,
    "model": {"none": None, "word": "llama"}, "strategy": NAME, "precision": NAME, "outer": NAME,
    "name": without(NAME, "typo"), "pad_to": {**PADDED, "less": 4},
}  # fmt: skip


row = partial(wrong.subject, BY_NAME)
PLANNED: dict[str, Any] = {"mask": Mask(), "seq_len": 8, "cp_size": 2, "layout": "zigzag"}
SENT: dict[str, Any] = {"plan": plan, "model": model, "strategy": "ring"}
OF_A_RING: Values = {**COUNT, "of a ring": 2}
POINTS = {key: [0] for key in ("batch", "heads", "queries", "keys")}
SUBJECTS: dict[str, Subject] = {
    "ring_core.Mask": row(
        Mask, {}, cu_seqlens=without(OPTIONS["cu_seqlens"], "early end", "late end"), predicate=PREDICATES
    ),
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
    "ring_core.gather_program": row(core.gather_program, {"plan": plan, "rank": 0}),
    "ring_core.longest_gather": row(core.longest_gather, {"plan": plan}),
    "ring_core.head_plan": row(
        core.head_plan, {"q_heads": 4, "kv_heads": 2, "ranks": 2}, q_heads={**COUNT, "odd": 5},
        kv_heads={**COUNT, "no divisor": 3}, ranks={**COUNT, "more than heads": 5},
    ),
    "ring_core.RingProgram.table": row(program.table, {"step": 0}),
    **{
        f"ring_core.Plan.{call.__name__}": row(call, {"rank": 0})
        for call in (plan.positions, plan.q_positions, plan.k_positions)
    },
    "ring_core.Layout": row(Layout, {"name": "zigzag", "seq_len": 8, "cp_size": 2}, name=NAME),
    "ring_core.Layout.runs": row(plan.q_layout.runs, {"rank": 0}),
    "ring_core.divisor_of": row(core.divisor_of, {"layout": "contiguous", "cp_size": 2}),
    "ring_core.ChunkLayout": row(ChunkLayout, {}, chunks=CHUNKS),
    "ring_core.balanced_layout": row(
        balanced_layout, {"mask": CAUSAL, "seq_len": 8, "cp_size": 2},
        mask={**MASKS, "predicate": Mask(predicate=diagonals), **SHORT},
    ),
    "ring_core.pack_sequences": row(
        core.pack_sequences, {"lengths": [3, 5], "rings": 2, "tokens": 8},
        lengths={"none": None, "number": 8, "empty": [], "zero": [3, 0], "floats": [2.5], "longer": [9]},
    ),
    "ring_core.StrategyConfig": row(
        StrategyConfig, {"name": "ring"}, ulysses_size={"of another": 2}
    ),
    "ring_core.KernelConfig": row(core.KernelConfig, {}, fused_backward=without(FLAG, "none")),
    "ring_core.merge": row(core.merge, PARTS),
    "ring_core.finalize": row(
        core.finalize, {"out": zeros(Q), "lse": zeros((2, 4, 8)), "sinks": zeros(4)},
        out={**ARRAY, "shape": zeros((2, 8, 3, 16))}, lse={**ARRAY, "shape": zeros((2, 8, 4))},
    ),
    "ring_core.reference.attention": row(attention, inputs, **OF_THE_ORACLE),
    "ring_core.reference.attention_grads": row(
        attention_grads, {"dout": zeros(Q), **inputs}, **OF_THE_ORACLE
    ),
    **{
        f"ring_core.reference.{call.__name__}": row(
            call, {"program": program, "dout": zeros(Q), **inputs}, dout=without(UPSTREAM["dout"], "none")
        )
        for call in (reference.simulate, reference.run)
    },
    "ring_core.philox.dropout_keep": row(
        dropout_keep, {"p": 0.5, "seed": 1, **POINTS}, p=without(OPTIONS["dropout_p"], "without a seed"),
        seed={**OPTIONS["dropout_seed"], "none": None},
    ),
    "ring_core.cost.Model": row(
        Model, {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}, batch=COUNT
    ),
    "ring_core.cost.bytes_sent": row(bytes_sent, SENT, tile=OF_A_RING),
    "ring_core.cost.bytes_by_link": row(
        bytes_by_link, SENT | {"ranks_per_host": 1}, tile=OF_A_RING,
        ranks_per_host={**COUNT, "more than ranks": 4},
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


MODULES = ("ring_core", *(f"ring_core.{x}" for x in ("cost", "philox", "reference", "viz")))
globals().update(wrong.checks_of(SUBJECTS, MODULES, FOR_BACKENDS))


def ours(*, mask: object = None, causal: bool = False) -> tuple[object, bool]:
    return mask, causal


def test_names_of_other_libraries_are_refused_by_the_name_here() -> None:
    call: Any = refuse_foreign_options(ours)
    with pytest.raises(TypeError, match="nonsense"):
        call(nonsense=1)
    assert call(causal=True) == (None, True)
    assert inspect.signature(call) == inspect.signature(ours)
    assert not FOREIGN_OPTIONS.keys() & inspect.signature(attention).parameters.keys()


EIGHT, SIX = np.ones((1, 8, 2, 4)), np.ones((1, 6, 2, 4))


def planned(mask: Any = CAUSAL, **sizes: Any) -> Any:
    return core.make_plan(mask, **{"seq_len": 64, "cp_size": 4} | sizes)


def grid(**changed: Any) -> RankGrid:
    return rank_grid(8, 6, **{"layout": "zigzag"} | changed)


class Traced:
    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError


OF_TWO, ON_TWO = ChunkLayout(((0, 3), (1, 2))), Layout("contiguous", 8, 2)
TABLE: Any = PageTable(cp_size=2, page_size=4, max_requests=2, max_tokens=17)
FIRST, _ = TABLE.add(2)
NAMES = "known: contiguous, zigzag, striped"
OF_MASKS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"window": 4}, r"window must be a pair .* got 4"),
    ({"window": (-1, 0)}, r"window=\(-1, 0\): each side must be an integer >= 0"),
    ({"window": (1 << 40, 0)}, r"each side must be an integer >= 0 and < 2\*\*40"),
    ({"chunk_size": 0}, "chunk_size must be an integer >= 1 or None, got 0"),
    ({"chunk_size": 1 << 40}, r"chunk_size .* the largest is 2\*\*40 - 1"),
    ({"cu_seqlens": (0, 6, 4, 10)}, "ascending; entry 2 is 4 after 6"),
    ({"cu_seqlens": (0, -1)}, "entry 1 is -1 after 0"),
    ({"cu_seqlens": (1, 6)}, "start at 0, got 1"),
    ({"cu_seqlens": (0,)}, "at least two"),
    ({"cu_seqlens": (0.0, 4.0)}, "integers"),
    ({"cu_seqlens": 5}, "one row"),
    ({"cu_seqlens": Traced()}, r"^cu_seqlens must be known on the host: .* only$"),
    ({"causal": 1}, "causal must be a bool"),
    ({"predicate": 3}, "callable"),
)
#: Calls that are refused, and what their errors say.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    **{f"mask {n}": (partial(core.Mask, **fields), message) for n, (fields, message) in enumerate(OF_MASKS)},
    "options of torch": (
        lambda: refuse_foreign_options(ours)(attn_mask=None, is_causal=True),  # type: ignore[call-arg]  # wrong on purpose
        r"attn_mask or is_causal.*use mask, .*; for is_causal, use causal",
    ),
    "scale of torch": (lambda: core.reference.attention(*[EIGHT] * 3, scale=1.0), "for scale, use softmax_scale"),
    "groups of torch": (lambda: core.reference.attention_grads(*[EIGHT] * 4, enable_gqa=True), "for enable_gqa, leave it out"),
    "fewer keys": (lambda: attention(EIGHT, SIX, SIX, causal=True), FEWER_KEYS),
    "gradients of fewer keys": (lambda: attention_grads(EIGHT, EIGHT, SIX, SIX, causal=True), FEWER_KEYS),
    "a length that is an array": (
        lambda: core.Layout("zigzag", np.zeros((2, 512)), 2), r"got a ndarray of shape \[2, 512\]; it is the number of"
    ),
    "no layout": (lambda: core.Layout("ring", 8, 2), f"unknown layout 'ring'; {NAMES}, or a ChunkLayout"),
    "a huge length": (lambda: Layout("contiguous", 1 << 40, 2), r"must be an integer < 2\*\*40"),
    "chunks of other ranks": (lambda: Layout(OF_TWO, 16, 4), r"chunks\(2x2\) has chunks for 2 ranks, and there are 4"),
    "a length of no chunks": (lambda: Layout(OF_TWO, 6, 2), r"multiple of 4, as the chunks\(2x2\) layout.*pad to 8"),
    **{
        f"{call.__name__} of rank {rank}": (partial(call, rank), r"^rank must be in 0\.\.1, got")
        for call in (ON_TWO.runs, ON_TWO.positions) for rank in (-1, 2)
    },
    "chunks that fall": (lambda: ChunkLayout(((1, 0),)), "chunks must ascend on every rank"),
    "chunks twice": (lambda: ChunkLayout(((0, 1), (1, 2))), r"chunks must be 0\.\.3, each once, got \[0, 1, 1, 2\]"),
    "a name of no layout": (
        lambda: layout_for("zigzak", CAUSAL, seq_len=64, cp_size=4), f"^unknown layout 'zigzak'; {NAMES}, chunks$"
    ),
    "chunks by name": (lambda: planned(layout="chunks"), r"unknown layout 'chunks'; .*what ring_core\.balanced_layout returns"),
    "documents of another length": (lambda: planned(Mask(cu_seqlens=(0, 20, 60))), "end at the sequence length 64, got 60"),
    "documents of two lengths": (lambda: planned(Mask(cu_seqlens=(0, 64)), kv_seq_len=128), "segment_ids"),
    "a long predicate": (lambda: planned(Mask(predicate=diagonals), seq_len=1 << 18), "^a predicate mask over 262144 x 262144 tokens has .* pairs to classify, more than .*; use causal"),
    "a ring that gathers": (lambda: core.ring_program(planned(), "gather"), "unknown strategy 'gather'; known: ring, balanced"),
    "a call of another plan": (
        lambda: reference.run(ring_program(planned(Mask(), seq_len=4, kv_seq_len=8)), *[EIGHT[:, :4]] * 3),
        "^the plan is for 4 queries and 8 keys, got q of 4 and k and v of 4$",
    ),
    "dlse alone": (
        lambda: reference.run(program, *[EIGHT] * 3, dlse=np.ones((1, 2, 8))),
        "^dlse was given without dout; pass zeros where out has no gradient$",
    ),
    "parts of other heads": (
        lambda: core.merge(np.ones((5, 4, 3)), zeros((5, 4)), np.ones((5, 4, 2)), zeros((5, 4))),
        r"out_a and out_b must have one shape, got \(5, 4, 3\) and \(5, 4, 2\)",
    ),
    "sinks of other heads": (
        lambda: core.finalize(np.ones((1, 2, 4, 3)), zeros((1, 4, 2)), zeros(3)), r"sinks must have shape \[4\] or \[4, n\], got \(3,\)"
    ),
    "fewer heads than ranks": (lambda: core.head_plan(4, 2, 8), "q has 4 heads, so at most 4 ranks can split them, not 8"),
    "heads in no groups": (lambda: core.head_plan(4, 3, 2), "kv_heads must divide q_heads, got 3 and 4"),
    "more padding than the least": (
        lambda: checks.check_seq_len(3, 4, 4, "zigzag", 2), "pads it to 4, 2 a rank, and q has 4 a rank"
    ),
    "a length of queries and keys": (
        lambda: checks.check_seq_len(7, 4, 8, "zigzag", 2), r"pair \(queries', keys'\) where 4 queries meet 8 keys"
    ),
    "pages of 24": (
        lambda: PageTable(cp_size=1, page_size=24, max_requests=1, max_tokens=1), "page_size must be a power of two, got 24"
    ),
    "more requests": (lambda: TABLE.add(1), "exceed max_requests=2"),
    "a request twice": (lambda: TABLE.extend([FIRST, FIRST], 1), "there once each"),
    "a request that is not there": (lambda: TABLE.extend([7], 1), r"got \[7\]"),
    "no request": (lambda: TABLE.extend([], 1), r"got \[\]"),
    "no token": (lambda: TABLE.extend([FIRST], 0), "n must be at least 1"),
    "a request cut beyond its end": (lambda: TABLE.truncate(FIRST, 1), r"length must be in 0\.\.0"),
    "more pages": (lambda: TABLE.extend([FIRST], 25), "need 4 pages of 4 tokens on rank 0, which has 3 of 3 free"),
    **{
        f"runs of documents {offsets}": (partial(runs_of_documents, ON_TWO, offsets), "cu_seqlens")
        for offsets in ((0, 4), (0, 9), (1, 8), (0, 5, 3, 8))
    },
    "a shift that is too far": (lambda: shift(ON_TWO, 1 << 40), "n must be an integer"),
    "a halo of no rank": (lambda: halo_ids(ON_TWO, 1, 0, 2), "rank must be in"),
    "a relayout of another length": (lambda: relayout(ON_TWO, Layout("striped", 16, 2)), "one sequence, got 8"),
    **{
        f"strategy {name!r}": (partial(strategy_config, name), message)
        for name, message in (
            ("rdma", r"known: auto, ring, balanced, gather, ulysses, hybrid$"), ("Ring", "known: auto, ring"),
            ("", "name must be that of a strategy, or 'auto', got ''"), (core.Mask(), "a name or a StrategyConfig, got Mask"),
        )
    },
    "a strategy of others": (
        lambda: strategy_config(StrategyConfig("ring"), ("auto", "rdma")), r"unknown strategy name 'ring'; known: auto, rdma$"
    ),
    **{
        f"{name} with {field}": (partial(core.StrategyConfig, name, **{field: value}), f"^strategy '{name}' has no {field}; leave")
        for name in ("auto", "ring", "balanced", "gather", "ulysses")
        for field, value in (("ulysses_size", 2), ("outer", "gather"))
    },
    **{
        f"hybrid with {field}={value}": (partial(core.StrategyConfig, "hybrid", **{field: value}), message)
        for field, values, message in (
            ("ulysses_size", (0, -1, True, 2.0), r"^ulysses_size must be "),
            ("outer", ("balanced", "ulysses", None), r"outer .*known: ring, gather"),
        )
        for value in values
    },
    "a grid with another outer": (lambda: grid(outer="balanced"), "outer 'balanced'"),
    "a grid of no groups": (lambda: grid(ulysses_size=0), "ulysses_size"),
    **{
        f"RING_CHECK={setting}": (partial(every_of, setting), "RING_CHECK must be 1")
        for setting in ("2", "yes", "every", "every:", "every:-1", "every:1.5", "-1")
    },
}  # fmt: skip
#: Calls without a mistake that a strategy, or a layout, cannot do.
UNSUPPORTED: dict[str, tuple[Callable[[], object], str]] = {
    "balance for a predicate": (
        lambda: balanced_layout(Mask(predicate=diagonals), seq_len=64, cp_size=4),
        r"cannot count a predicate; balance for the mask without it, or give a ring_core\.ChunkLayout your own chunks$",
    ),
    **{
        f"balanced over {layout}": (
            partial(ring_program, planned(layout=layout), "balanced"),
            f"the layout is '{layout}'. Instead: use layout='contiguous', or strategy='ring'",
        )
        for layout in LAYOUTS[1:]
    },
    "a halo of stripes": (lambda: halo(Layout("striped", 8, 2), 1, 0), r"relayout\(x, to='contiguous'\)"),
    **{
        f"a grid of {name}": (partial(grid, **changed), message)
        for name, changed, message in (
            ("3", {"ulysses_size": 3}, "ulysses_size=3: it does not divide 8 ranks.* one of 1, 2, 4$"),
            ("8", {"ulysses_size": 8}, "8: q has 6 heads, so at most 6 ranks can split them, not 8.* 1, 2, 4$"),
            ("unlike hosts", {"hosts": [*"aaabbbbb"]}, "unlike numbers of ranks: a 3, b 5.* by ulysses_size$"),
            ("mixed hosts", {"hosts": [*"abababab"]}, "not consecutive: a, b, a, .* by ulysses_size$"),
            ("stripes", {"layout": "striped"}, "'striped' gives .* outer='ring' .* use layout='zigzag'"),
            ("stripes, gather", {"layout": "striped", "outer": "gather"}, "'striped' gives .* outer='gather'"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *UNSUPPORTED])
def test_refusals_say_what_is_wrong_and_what_to_do(name: str) -> None:
    kind = UnsupportedError if name in UNSUPPORTED else ValueError
    call, message = (REFUSED | UNSUPPORTED)[name]
    with pytest.raises(kind, match=message):
        call()


KEY_MASKS, OTHER_MASKS = ((2, 1, 1, 8), (1, 1, 1, 8), (2, 1, 1, 4), (2, 8)), ((2, 2, 4, 9), (3, 3))


@pytest.mark.parametrize("shape", [*KEY_MASKS, *OTHER_MASKS])
def test_a_mask_of_keys_is_segment_ids(shape: tuple[int, ...]) -> None:
    """A mask of keys, in the shapes of BERT and Flax, is refused with advice; others are not."""
    advice = r"segment_ids, int32 \[B, T_local\].*-1 for padding"
    message = advice if shape in KEY_MASKS else r"got \([0-9, ]+\)$"
    with pytest.raises(ValueError, match=message):
        checks.check_dense_mask(checks.Tensor(shape, "bool"), (2, 4, 2, 8), 8, "cpu")
    sizes = checks.Sizes(2, 4, 4, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=message):
        checks.check_bias(checks.Tensor(shape, "float32"), sizes, 8, "cpu")
