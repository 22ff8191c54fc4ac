"""Wrong values for arguments, which every function has to refuse with an error that names them.

A backend's table has for each public function valid arguments, and the wrong values to try for
each of them. :func:`problems` tries them, one at a time.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import public_api
import pytest
from refused import refused

from ring_core import ChunkLayout, KernelConfig, Mask, StrategyConfig
from ring_core.base.arguments import FOREIGN_OPTIONS

NAN, INF = float("nan"), float("inf")
Values = Mapping[str, Any]

#: Values that are no switch.
FLAG: Values = {
    "none": None, "one": 1, "word": "yes", "nan": NAN, "array": np.ones(2), "no hash": (True, []),
}  # fmt: skip

#: Values that are no name of anything.
NAME: Values = {
    "typo": "zigzak", "empty": "", "number": 3, "flag": True, "none": None, "bytes": b"contiguous",
    "list": ["contiguous"], "array": np.array(["contiguous", "zigzag"]), "class": Mask,
    "no hash": ("contiguous", []),
}  # fmt: skip

#: Values that are no layout, or none of a few ranks.
LAYOUT: Values = {
    **NAME, "chunks": "chunks", "chunks of others": ChunkLayout(((4,), (3,), (2,), (1,), (0,))),
    "tuples": ((0,), (1,)), "kind": ChunkLayout,
}  # fmt: skip

#: Values that are no size.
SIZE: Values = {
    "zero": 0, "negative": -8, "float": 8.0, "nan": NAN, "flag": True, "word": "8", "list": [8],
    "array": np.array([8, 8]), "numpy float": np.float64(8), "huge": 2**70,
    "no hash": (8, []),
}  # fmt: skip

#: Values that are no size that a call needs, no number of steps, and none of rows.
COUNT: Values = {**SIZE, "none": None}
STEPS: Values = {n: x for n, x in SIZE.items() if n not in {"zero", "negative"}} | {"none": None}
ROWS: Values = {n: x for n, x in SIZE.items() if n != "zero"} | {"none": None}

#: Values that fill no row of floats.
FILL: Values = {
    "word": "0", "none": None, "list": [0], "array": np.zeros(2), "complex": 0.5j,
    "too large": 10**400, "beyond half": 1e300,
}  # fmt: skip

#: Values that are no dimension of a tensor of four.
DIM: Values = {
    "too large": 4, "too small": -5, "float": 1.0, "flag": True, "word": "1", "none": None,
    "list": [1], "huge": 2**70,
}  # fmt: skip

#: Wrong values of arguments of movements, by their names.
MOVED: dict[str, Values] = {
    "layout": LAYOUT, "to": LAYOUT, "dim": DIM, "pad": FLAG, "fill": FILL, "n": STEPS, "left": ROWS, "right": ROWS,
}  # fmt: skip

#: Values that are no probability, scale or bound.
REAL: Values = {
    "nan": NAN, "infinite": INF, "flag": True, "word": "0.5", "complex": 0.5j, "list": [0.5],
    "array": np.array([0.5, 0.5]), "too large": 10**400, "no hash": (0.5, []),
}  # fmt: skip

#: Wrong values of the options that are no tensors, the same for every backend.
OPTIONS: dict[str, Values] = {
    "layout": LAYOUT,
    "seq_len": {
        **{n: x for n, x in SIZE.items() if n != "none"}, "too few": 3, "too many": 9,
        "pair of floats": (8.0, 8), "three": (8, 8, 8), "one of a pair": (8, 3), "empty": (),
        "no hash in a pair": ((8, []), 8),
    },
    "causal": FLAG,
    "window": {
        "number": 4, "negative": (-1, 0), "three": (1, 2, 3), "one": (1,), "float": (1.0, 0),
        "nan": (NAN, 0), "flags": (True, False), "word": "12", "array": np.array([1, 2]),
        "huge": (2**63, 0), "flag": True, "nested": ((1, 2), 0),
        "no hash": ((1, []), 0),
    },
    "chunk_size": {n: x for n, x in SIZE.items() if n != "none"},
    "cu_seqlens": {
        "number": 8, "empty": (), "one": (0,), "late start": (1, 8), "early end": (0, 7),
        "late end": (0, 9), "falling": (0, 5, 3, 8), "negative": (0, -3, 8), "float": (0.0, 8.0),
        "nan": (0, NAN, 8), "flags": (False, True), "a flag": (False, 8), "flags in a list": [False, 8],
        "no hash": ((0, []), 8), "words": ("0", "8"), "word": "08",
        "ragged": ((0, 8), 8), "two rows": ((0, 8), (0, 8)), "huge": (0, 2**63),
        "beyond": (0, 2**70), "iterator": iter((0, 8)), "set": {0, 8},
    },
    "mask": {
        "array": np.ones((8, 9), bool), "flag": True, "word": "causal", "class": Mask,
        "rule": (lambda i, j: i >= j), "documents end elsewhere": Mask(cu_seqlens=(0, 5)),
    },
    "softmax_scale": REAL,
    "softcap": {**REAL, "zero": 0.0, "negative": -1.0},
    "dropout_p": {**REAL, "one": 1.0, "negative": -0.1, "none": None, "without a seed": 0.1},
    "dropout_seed": {
        "negative": -1, "2**64": 2**64, "float": 1.0, "nan": NAN, "flag": True, "word": "1",
        "list": [1], "complex": 1j,
    },
    "deterministic": FLAG,
    "return_lse": FLAG,
    "kernel": {**NAME, "setting": KernelConfig("flash"), "class": KernelConfig},
    "strategy": {**NAME, "kind": StrategyConfig}, "transport": NAME,
}  # fmt: skip


Q, KV = (2, 8, 4, 16), (2, 8, 2, 16)  # shapes of a right call
FEWER_KEYS = r"q has \d tokens but k \d: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"
#: Makes zeros of a shape, and of a dtype by its name if it is not float32.
Zeros = Callable[..., Any]


def wrong_tensors(
    zeros: Zeros, bad: Callable[..., Values], other_integers: str
) -> dict[str, Values]:
    """Return wrong values of each tensor of a call; ``bad`` makes those that are wrong everywhere.

    ``other_integers`` is a dtype that segment ids cannot have.
    """
    ids, others = zeros((2, 8), "int32"), zeros((2, 8), other_integers)
    return {
        "q": {
            "none": None, **bad(*Q), "3 dimensions": zeros((8, 4, 16)), "half": zeros(Q, "float16"),
            "5 dimensions": zeros((1, *Q)), "batch": zeros((1, 8, 4, 16)), "heads": zeros((2, 8, 3, 16)),
            "no heads": zeros((2, 8, 0, 16)), "head dim": zeros((2, 8, 4, 8)), "empty": zeros((2, 0, 4, 16)),
            "no head dim": zeros((2, 8, 4, 0)),
        },
        **{
            name: {
                "none": None, **bad(*KV), "3 dimensions": zeros((8, 2, 16)), "half": zeros(KV, "float16"),
                "5 dimensions": zeros((1, *KV)), "batch": zeros((1, 8, 2, 16)), "heads": zeros((2, 8, 3, 16)),
                "no heads": zeros((2, 8, 0, 16)), "length": zeros((2, 9, 2, 16)), "empty": zeros((2, 0, 2, 16)),
                "head dim": zeros((2, 8, 2, 0)),
            }
            for name in ("k", "v")
        },
        "segment_ids": {
            **{n: x for n, x in bad(2, 8).items() if n != "integers"}, "floats": zeros((2, 8)),
            "other integers": others, "shape": zeros((2, 9), "int32"), "row": zeros((8,), "int32"),
            "scalar": zeros((), "int32"), "triple": (ids,) * 3, "one of two": (ids, None), "empty pair": (),
            "pair of others": (ids, others),
        },
        "sinks": {
            **bad(4), "heads": zeros((3,)), "none a head": zeros((4, 0)), "scalar": zeros(()),
            "3 dimensions": zeros((4, 1, 1)),
        },
        "bias": {
            **bad(2, 4, 8, 8), "square": zeros((8, 8)), "batch": zeros((3, 4, 8, 8)),
            "heads": zeros((2, 3, 8, 8)), "rows": zeros((2, 4, 4, 8)), "columns": zeros((2, 4, 8, 9)),
        },
        "alibi_slopes": {
            **bad(4), "heads": zeros((2,)), "batch": zeros((3, 4)), "scalar": zeros(()),
            "3 dimensions": zeros((1, 2, 4)),
        },
    }  # fmt: skip


#: Right values of options that are known on the host, which are wrong as tensors.
STATIC: dict[str, Any] = {
    "seq_len": 8, "window": [1, 0], "chunk_size": 4, "mask": [[0.0] * 8] * 8,
    **dict.fromkeys(("softmax_scale", "softcap", "dropout_p"), 0.5),
    **dict.fromkeys(("causal", "deterministic", "return_lse"), True),
    **dict.fromkeys(("kernel", "strategy", "transport"), 1),
}  # fmt: skip


def wrong_call(
    tensors: dict[str, Values], tensor: Callable[[Any], Any], **more: Values
) -> dict[str, Values]:
    """Return wrong values of each argument of a call: of these tensors, and of all options."""
    values = tensors | {name: x for name, x in OPTIONS.items() if name != "layout"}
    for name, x in STATIC.items():
        values[name] = {**values[name], "tensor": tensor(x)}
    return values | {name: {**values[name], **x} for name, x in more.items()}


def bad_calls(zeros: Zeros, array: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return wrong arguments of a call, and what the error says of them in either framework.

    Of masks and layouts these are in the tests of core.
    """
    ids = zeros((2, 8), "int32")
    return {
        "3 dimensions": ({"q": zeros((8, 4, 16))}, r"q must have 4 dimensions .* got shape \(8, 4, 16\)"),
        "heads": ({"q": zeros((2, 8, 3, 16))}, "3 heads of q must be a multiple of the 2 heads"),
        "dtypes": ({"v": zeros(KV, "bfloat16")}, "share a dtype, got float32 for q and bfloat16 for v"),
        "batch": ({"k": zeros((1, 8, 2, 16))}, "share a batch size, got 2 for q and 1 for k"),
        "lengths": ({"v": zeros((2, 9, 2, 16))}, "same sequence length and heads"),
        "head dims": ({"k": zeros((2, 8, 2, 8))}, "same head dim, got 16 and 8"),
        "complex": ({"q": zeros(Q, "complex64")}, "q must be float16, .* got complex64"),
        "integer": ({"q": zeros(Q, "int32")}, "q must be float16, .* got int32"),
        "empty sequence": ({n: zeros((2, 0, 2, 16)) for n in "qkv"}, "sequence length 0"),
        "cu_seqlens end": ({"cu_seqlens": (0, 7)}, "cu_seqlens must end at the sequence length 8, got 7"),
        "mask twice": ({"mask": Mask(), "causal": True}, "mask was given together with causal"),
        "mask type": ({"mask": zeros((8, 8))}, "mask must be a ring_core.Mask"),
        "ids shape": ({"segment_ids": zeros((2, 9), "int32")}, r"shape \[2, 8\], got \(2, 9\)"),
        "ids triple": ({"segment_ids": (ids,) * 3}, "pair"),
        "ids type": ({"segment_ids": 3}, f"segment_ids must be a {array}"),
        "sinks": ({"sinks": zeros((3,))}, r"sinks must have shape \[4\] or \[4, n\]"),
        "sinks integer": ({"sinks": zeros((4,), "int32")}, "sinks must be floating point"),
        "bias": ({"bias": zeros((2, 4, 8, 9))}, r"bias must have shape \[2 or 1, 4 or 1, 8, 8\]"),
        "slopes": ({"alibi_slopes": zeros((2,))}, r"alibi_slopes must have shape \[4\] or \[2, 4\]"),
        "dropout": ({"dropout_p": 1.0, "dropout_seed": 1}, r"dropout_p must be in \[0, 1\), got 1.0"),
        "dropout without seed": ({"dropout_p": 0.1}, "needs dropout_seed"),
        "seed": ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed must be an integer"),
        "scale": ({"softmax_scale": float("inf")}, "softmax_scale must be a finite number"),
        "softcap": ({"softcap": -1.0}, "softcap must be a finite number > 0"),
        "deterministic": ({"deterministic": 1}, "deterministic must be True or False"),
        "return_lse": ({"return_lse": None}, "return_lse must be True or False"),
        "kernel type": ({"kernel": 3}, "kernel must be a name or a KernelConfig"),
    }  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Public function with valid arguments, and wrong values of each, by a word for them.

    Its table has each argument of the function and no other.
    """

    call: Callable[..., Any]
    right: Mapping[str, Any]
    wrong: Mapping[str, Values]

    def __post_init__(self) -> None:
        without = (set(inspect.signature(self.call).parameters) - {"self"}) ^ set(self.wrong)
        assert not without, without


def subject(
    by_name: Mapping[str, Values],
    call: Callable[..., Any],
    right: Mapping[str, Any],
    **wrong: Values,
) -> Subject:
    """Return a row, in which arguments have the wrong values given here, or those of their name."""
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    return Subject(call, right, {name: wrong.get(name, by_name.get(name, {})) for name in names})


def cases(subjects: Mapping[str, Subject]) -> list[tuple[str, str]]:
    """Return all pairs of a function and one of its arguments."""
    return [(name, argument) for name, subject in subjects.items() for argument in subject.wrong]


def problems(subject: Subject, argument: str) -> Iterator[str]:
    """Yield a message for each wrong value of an argument that is not refused by name."""
    names = {argument, *ALSO.get(argument, ())}
    for word, value in subject.wrong[argument].items():
        try:
            result = subject.call(**{**subject.right, argument: value})
        except (ValueError, TypeError) as error:
            text = str(error)
            if not any(
                re.search(rf"(?<![A-Za-z_]){re.escape(n)}(?![A-Za-z_])", text) for n in names
            ):
                yield f"{argument} {word}: {type(error).__name__} without the name: {text[:300]}"
        except Exception as error:  # noqa: BLE001 - any other error is the finding
            yield f"{argument} {word}: {type(error).__name__}: {str(error)[:300]}"
        else:
            yield f"{argument} {word}: a result: {str(result)[:100]}"


#: Other words by which an error may name an argument.
ALSO = {
    "seq_len": ("sequence length",), "kv_seq_len": ("sequence length",), "cp_size": ("ranks",),
    "mask": ("cu_seqlens",), "name": ("layout", "hardware"), "to": ("layout",),
}  # fmt: skip


def forgotten(
    modules: tuple[str, ...], tables: Mapping[str, Subject], for_backends: set[str]
) -> set[str]:
    """Return public functions and classes that no table has, without those in ``for_backends``."""
    public = {
        f"{module}.{name}"
        for module in modules
        for name in public_api._public_names(importlib.import_module(module))
        if inspect.isroutine(value := getattr(importlib.import_module(module), name))
        or (inspect.isclass(value) and not issubclass(value, Exception))
    }
    assert for_backends <= public, for_backends - public
    return public - for_backends - set(tables)


#: Right values of options that are numbers or switches, which floats of 16 bits hold exactly.
RIGHT: Values = {
    "seq_len": 8, "kv_seq_len": 8, "pad_to": 8, "cp_size": 2, "chunk_size": 3, "causal": True,
    "softmax_scale": 0.5, "softcap": 2.0, "dropout_p": 0.0, "dropout_seed": 3, "deterministic": False,
    "return_lse": True, "dim": 1, "pad": False, "fill": 0, "n": 2, "left": 1, "right": 1, "every": 2,
    "label_smoothing": 0.125, "ignore_index": -1, "count": 3.0, "tokens_at_once": 3,
    "balanced": False, "block_q": 64, "fused_backward": True, "width": 32,
    "backward": True, "hop_us": 2.0, "scale": 0.5, "output_final_state": False,
    "use_qk_l2norm": False, "dt_softplus": False, "delta_softplus": False,
}  # fmt: skip


def in_numpy(value: Any) -> Iterator[Any]:
    """Yield the scalars of numpy, and arrays without dimensions, that are equal to a number."""
    kinds: list[Any] = [np.bool_]
    if not isinstance(value, bool):
        kinds = [np.float16, np.float32, np.float64, np.longdouble]
    if isinstance(value, int) and not isinstance(value, bool):
        kinds = [np.int8, np.int32, np.int64, *([np.uint8, np.uint64] if value >= 0 else [])]
    for kind in kinds:
        yield kind(value)
        yield np.array(value, kind)


def unlike_in_numpy(subject: Subject, argument: str) -> Iterator[str]:
    """Yield a message for each scalar of numpy that is not taken as Python's number is."""

    def result(value: Any) -> str:
        return re.sub("0x[0-9a-f]+", "", repr(subject.call(**{**subject.right, argument: value})))

    expected = result(RIGHT[argument])
    for value in in_numpy(RIGHT[argument]):
        try:
            text = result(value)
        except Exception as error:  # noqa: BLE001 - any error is the finding
            text = f"{type(error).__name__}: {error}"
        if text != expected:
            yield f"{argument} {value!r}: {text[:200]}, not {expected[:200]}"


def refusals_of(
    call: Callable[..., Any], right: Mapping[str, Any],
    bad: Mapping[str, tuple[dict[str, Any], str]], calls: Iterable[Callable[..., Any]],
) -> dict[str, Callable[..., None]]:  # fmt: skip
    """Return the tests of a table of bad calls, and of calls with the same options, by name."""

    @pytest.mark.parametrize("name", bad)
    def test_bad_input(name: str) -> None:
        arguments, message = bad[name]
        refused(message, call, **{**right, **arguments})

    @pytest.mark.parametrize("like", calls)
    def test_options_of_other_libraries_are_refused_by_their_names_here(
        like: Callable[..., Any],
    ) -> None:
        """Other names stay a type error."""
        for name in FOREIGN_OPTIONS:
            said = rf"no option is called {name}\. Instead: for {name}, "
            refused(said, like, **right, **{name: None})
        refused("nonsense", like, **right, nonsense=1, error=TypeError)

    tests = test_bad_input, test_options_of_other_libraries_are_refused_by_their_names_here
    return {test.__name__: test for test in tests}


def entered(context: Callable[..., Any]) -> Callable[..., None]:
    """Return a call that enters a context, which validates its argument then."""

    def enter(every: Any) -> None:
        with context(every):
            pass

    return enter


def checks_of(
    subjects: Mapping[str, Subject], modules: tuple[str, ...], elsewhere: set[str],
    methods: type | None = None,
) -> dict[str, Callable[..., None]]:  # fmt: skip
    """Return the tests of a table, by name, for the globals of a test file.

    ``elsewhere`` are public names that need no row; ``methods`` is a class each of whose methods
    with arguments needs one.
    """

    @pytest.mark.parametrize(("name", "argument"), cases(subjects))
    def test_wrong_values_are_refused_by_name(name: str, argument: str) -> None:
        found = list(problems(subjects[name], argument))
        assert not found, "\n".join(found)

    @pytest.mark.parametrize(("name", "argument"), [x for x in cases(subjects) if x[1] in RIGHT])
    def test_scalars_of_numpy_are_numbers(name: str, argument: str) -> None:
        """All kinds of them are alike: integers, floats, switches, arrays without dimensions."""
        found = list(unlike_in_numpy(subjects[name], argument))
        assert not found, "\n".join(found)

    def test_every_public_function_has_a_row() -> None:
        without = forgotten(modules, subjects, elsewhere)
        owner = methods or object
        for name, value in vars(owner).items():
            if not name.startswith("_") and inspect.isroutine(value):
                path = f"{modules[0]}.{owner.__name__}.{name}"
                if path not in subjects and len(inspect.signature(value).parameters) > 1:
                    without.add(path)
        assert not without, without

    tests = (
        test_wrong_values_are_refused_by_name, test_scalars_of_numpy_are_numbers,
        test_every_public_function_has_a_row,
    )  # fmt: skip
    return {test.__name__: test for test in tests}
