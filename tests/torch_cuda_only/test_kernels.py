"""Every GPU kernel, strategy and transport on the whole case table: right, or refused.

cuDNN and FlashAttention-4, with its options, also run at every kind of head dim.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases import CASES, Case, crossed, diagonals, prefix
from tolerances import assert_close

from ring_core import LayoutSpec, Mask
from ring_torch import ring_attention
from ring_torch.kernels import KERNELS
from ring_torch.local import LocalRankError

NAMES = ("fa4", "fa3", "cudnn", "fa2", "sdpa", "triton", "eager")
MOVES = (("ring", "p2p"), ("gather", "symm_mem"))
WAYS = [(kernel, *move) for move in MOVES for kernel in NAMES]
RING = [case for case in CASES.values() if case.cp_size > 1 and case.dtype == "float32"]


@pytest.fixture(scope="module")
def tally() -> Iterator[dict[str, dict[str, int]]]:
    """Count the cases that each kernel ran and refused, and write them to ``RING_TALLY``.

    Each of several workers writes its own file, whose name ends with the worker's.
    """
    counts: dict[str, dict[str, int]] = {}
    yield counts
    if path := os.environ.get("RING_TALLY"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        Path(path + worker).write_text(json.dumps(counts, indent=2))


@lru_cache(maxsize=2)
def as_kernels_take_it(name: str) -> Case:
    """Return the case, and its expected results, in bfloat16 with head dims of GPU kernels."""
    case = CASES[name]
    dim, v_dim = case.dims
    return replace(case, dtype="bfloat16", dims=(8 * dim, 8 * v_dim))


#: Heads in groups with gradients in two parts, and keys fetched one by one, by copy engines.
OTHER_WAYS = {
    "in-groups": ("causal-zigzag-cp4", "window-both-contiguous-cp3", "documents-chunks-cp2"),
    "by-copies": (
        "full-contiguous-cp2", "causal-zigzag-cp2", "window-small-contiguous-cp2", "window-both-zigzag-cp2",
        "window-right-zigzag-cp2", "chunks-zigzag-cp2", "documents-window-zigzag-cp2",
        "documents-chunks-cp2", "mha-zigzag", "v-dim-contiguous", "segments-pair-zigzag",
        "sinks-many-zigzag", "bias-masked-zigzag", "window-both-contiguous-cp3", "causal-zigzag-cp4",
    ),
}  # fmt: skip
ROWS = [
    *(("", case, way) for way in (*WAYS, ("sdpa", "gather", "p2p")) for case in RING),
    *(
        (how, CASES[name], (kernel, "gather", "symm_mem"))
        for kernel in ("fa4", "cudnn", "fa2", "triton", "eager")
        for how, names in OTHER_WAYS.items()
        for name in names
    ),
]


@pytest.mark.parametrize(
    ("how", "case", "way"), ROWS, ids=["-".join((case.name, *way, how)) for how, case, way in ROWS]
)
def test_case(how: str, case: Case, way: tuple[str, str, str], backend: Any, tally: Any) -> None:
    kernel, (case, count) = way[0], (as_kernels_take_it(case.name), {"passed": 0, "refused": 0})
    if how == "in-groups":
        case = replace(case, heads=(8, 4))
    if not how:
        count = tally.setdefault("/".join(way), count)
    words = f"kernel '{kernel}'", f"strategy '{case.moved(way[1])}'"
    if (results := run_or_refused(backend, case, (how or None, *way), *words)) is None:
        count["refused"] += 1
        return
    if case.poison and not exact_nan(kernel):
        pick = finite if case.poison.endswith("-inf") else near
        results = {name: pick(results[name], x) for name, x in case.expected.items()}
    assert_close(case, results)
    count["passed"] += 1


def run_or_refused(backend: Any, case: Case, ways: tuple[Any, ...], *words: str) -> Any:
    """Return the results of a case, or ``None`` if it is refused in some of these words."""
    try:
        return backend.run(case, *ways)
    except LocalRankError as error:
        if "UnsupportedError" in str(error) and any(x in str(error) for x in words):
            return None
        raise


def exact_nan(kernel: str) -> bool:
    """Return True if the kernel passes a NaN only to rows that see it."""
    return all(k.capabilities.exact_nan for k in KERNELS if k.capabilities.name == kernel)


def near(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return results in which a NaN at a finite expected number is replaced by that number.

    Such a NaN comes from another key of the same tile.
    """
    return np.where(np.isfinite(expected) & np.isnan(actual), expected, actual)


def finite(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return results, with the expected number where either is not finite: libraries differ."""
    return np.where(np.isfinite(expected) & np.isfinite(actual), actual, expected)


DIMS = [
    *((dim, dim) for dim in (40, 64, 80, 96, 112, 128, 136, 160, 192, 256)),
    (192, 128), (160, 128), (128, 64), (64, 128), (128, 192),
]  # fmt: skip
DIMS_OF_CUDNN = [
    *((dim, dim) for dim in (40, 64, 72, 96, 100, 128, 136, 160, 192, 250, 256)),
    (192, 128), (189, 121), (160, 128), (128, 64), (64, 128), (256, 128),
]  # fmt: skip
HEADS = [(2, 2), (8, 2)]
LENGTH, TOKENS = 330, 418
CAUSAL, WINDOW = Mask(causal=True), Mask(window=(60, 30))
DOCUMENTS = (0, 97, 98, 230, LENGTH)
#: Masks, and the number of keys if it differs from the number of queries.
MASKS: dict[str, tuple[Mask, int | None]] = {
    "full": (Mask(), None), "causal": (CAUSAL, None), "window": (WINDOW, 450),
    "nothing-seen": (CAUSAL, 250), "documents": (Mask(causal=True, cu_seqlens=DOCUMENTS), None),
    "documents-window": (Mask(window=(40, 10), cu_seqlens=DOCUMENTS), None),
}  # fmt: skip
Pair = tuple[int, int]


def case_of(
    name: str, mask: Mask, dims: Pair, heads: Pair, length: int, keys: int | None = None, **more: Any
) -> Case:  # fmt: skip
    """Return a case of two sequences in bfloat16, on one rank unless ``more`` says otherwise."""
    case = Case(
        f"{name}-{dims[0]}-{dims[1]}-{heads[0]}-{heads[1]}", mask, "contiguous", 1, length, keys, 2,
        heads, dims, "bfloat16",
    )  # fmt: skip
    return replace(case, **more)


OF_FA4 = [
    case_of(f"head-dims-{name}{end}", mask, dims, heads, LENGTH + more, keys and keys + more, **fields)
    for end, more, names, fields in (
        ("", 0, [*MASKS], {}),
        ("-cp2", 2, ["causal", "window"], {"layout": "zigzag", "cp_size": 2}),
    )
    for dims, heads, name in product(DIMS, HEADS, names)
    for mask, keys in (MASKS[name],)
]  # fmt: skip
OF_CUDNN = [
    case_of(f"cudnn-{name}", mask, dims, heads, LENGTH, keys)
    for dims, heads, (name, mask, keys) in product(
        DIMS_OF_CUDNN, HEADS, [("full", Mask(), None), ("causal", CAUSAL, None), ("keys", Mask(), 450)]
    )
]  # fmt: skip
#: Masks and fields of cases with options.
OPTIONS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "softcap": (CAUSAL, {"softcap": 2.0}),
    "alibi": (CAUSAL, {"alibi": 1}),
    "alibi-batch-window-softcap": (WINDOW, {"alibi": 2, "softcap": 5.0}),
    "alibi-full": (Mask(), {"alibi": 2, "kv_seq_len": 600}),
    "segments": (CAUSAL, {"segments": "documents"}),
    "segments-padded": (Mask(), {"segments": "padded"}),
    "segments-scattered": (WINDOW, {"segments": "scattered", "kv_seq_len": 600}),
    "segments-pair-softcap-alibi": (CAUSAL, {"segments": "pair", "softcap": 5.0, "alibi": 1}),
    "predicate": (Mask(predicate=diagonals), {}),
    "predicate-bits": (Mask(causal=True, predicate=crossed), {}),
    "predicate-prefix-softcap": (Mask(predicate=prefix), {"softcap": 5.0}),
    "predicate-segments-alibi": (Mask(predicate=diagonals), {"segments": "documents", "alibi": 2}),
    "sinks": (CAUSAL, {"sinks": 0}),
    "sinks-more-softcap": (WINDOW, {"sinks": 3, "softcap": 5.0}),
    "sinks-alibi": (CAUSAL, {"sinks": 0, "alibi": 1, "kv_seq_len": 248}),
    "sinks-segments": (CAUSAL, {"sinks": 0, "segments": "padded"}),
}
OF_OPTIONS = [
    case_of(f"fa4-{name}", mask, dims, heads, TOKENS, **fields)
    for dims, heads, (name, (mask, fields)) in product(DIMS[:-1], HEADS, OPTIONS.items())
]
RANKS: tuple[tuple[int, LayoutSpec], ...] = ((2, "zigzag"), (4, "contiguous"))
SEVERAL = [
    case_of(
        f"fa4-{name}-cp{ranks}", mask, (128, 128), (8, 2), 416, cp_size=ranks, layout=layout, **fields
    )
    for (name, (mask, fields)), (ranks, layout) in product(OPTIONS.items(), RANKS)
]  # fmt: skip

#: Cases, how they are called, and the words of a refusal on other GPUs than Hopper's. No plan
#: gathers a predicate.
AT_HEAD_DIMS: list[tuple[Case, tuple[Any, ...], str]] = [
    *((case, (None, "fa4"), "kernel 'fa4'") for case in OF_FA4),
    *((case, (None, "cudnn"), "on Hopper from cuDNN") for case in OF_CUDNN),
    *((case, (None, "fa4"), "on Hopper only") for case in OF_OPTIONS),
    *(
        (case, (None, "fa4", strategy), "on Hopper only")
        for case, strategy in product(SEVERAL, ("ring", "gather"))
        if strategy == "ring" or case.mask.predicate is None
    ),
]


@pytest.mark.parametrize(
    ("case", "ways", "words"), AT_HEAD_DIMS,
    ids=["-".join((case.name, *ways[1:])) for case, ways, _ in AT_HEAD_DIMS],
)  # fmt: skip
def test_head_dims(case: Case, ways: tuple[Any, ...], words: str, backend: Any) -> None:
    """On Hopper it is right, elsewhere it may be refused in these words."""
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    results = run_or_refused(backend, case, ways, *([] if is_hopper else [words]))
    if results is not None:
        assert_close(case, results)


@pytest.mark.parametrize("option", ["none", "sinks", "segment_ids", "alibi_slopes", "fewer keys"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (40, 100)])
def test_without_a_backward(dims: tuple[int, int], option: str) -> None:
    """Without a backward ``lse`` is not written; the output is the same, in a second call too."""
    torch.manual_seed(0)
    shapes = ((2, LENGTH, *x) for x in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    made: Any = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(shape, **made) for shape in shapes)
    choices: dict[str, Any] = {
        "none": {}, "sinks": {"sinks": torch.ones(4, device="cuda")},
        "segment_ids": {"segment_ids": torch.arange(LENGTH, device="cuda").int().repeat(2, 1) // 90},
        "alibi_slopes": {"alibi_slopes": torch.ones(4, device="cuda")},
        "fewer keys": {"causal": False, "mask": Mask(causal=True)},
    }  # fmt: skip
    if option == "fewer keys":  # the first queries see nothing
        k, v = k[:, 80:], v[:, 80:]
    options = {"causal": True, "kernel": "fa4"} | choices[option]
    call = partial(ring_attention, q, k, v, **options)
    expected = call()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(call(), expected)


def test_a_score_that_is_no_number() -> None:
    """NaN scores show in ``out`` and ``lse``, with block lists too; rows that see nothing are 0."""
    q = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    k = q.clone()
    k[:, 10] = torch.nan
    ids = torch.zeros(1, 512, dtype=torch.int32, device="cuda")
    ids[:, 256:384], ids[:, 384:] = 1, -1
    out, lse = ring_attention(q, k, q, segment_ids=ids, kernel="fa4", return_lse=True)
    assert out[:, :256].isnan().all() and lse[:, :, :256].isnan().all()
    assert out[:, 256:384].isfinite().all() and lse[:, :, 256:384].isfinite().all()
    assert (out[:, 384:] == 0).all() and (lse[:, :, 384:] == -torch.inf).all()
