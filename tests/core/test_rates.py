"""Measured kernel times: valid tables, and the kernel they choose for a call."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ring_core import Mask, Request, RingProgram, make_plan, ring_program
from ring_core.choose import rates
from ring_core.choose.rates import UNKNOWN, Case, Expected, Option, Rates, Times, expected

LENGTH = 1024
CAUSAL = Mask(causal=True)
CALL = Request("cuda", "bfloat16", 128, 128, grad=True, q_heads=32, kv_heads=8)
ORDER = ("a", "b", "c")


def program(mask: Mask = CAUSAL, length: int = LENGTH, cp_size: int = 1) -> RingProgram:
    return ring_program(make_plan(mask, seq_len=length, cp_size=cp_size))


def case(
    option: Option = "causal",
    dims: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (32, 8),
    capability: int = 90,
    **kernels: float | tuple[float | None, float | None],
) -> Case:
    """Make a case from kernels' times: one time for both passes, or a pair."""
    both_times = {name: x if isinstance(x, tuple) else (x, x) for name, x in kernels.items()}
    times = tuple((name, Times(*x)) for name, x in both_times.items())
    pairs = LENGTH * (LENGTH + 1) // 2
    return Case("torch", capability, "a GPU", (), LENGTH, pairs, heads, dims, option, times)


def found(*cases: Case, mask: Mask = CAUSAL, **options: Any) -> Expected:
    request = replace(CALL, **options)
    return expected(cases, request, program(mask), ORDER, grad=request.grad)


def fastest(*cases: Case, mask: Mask = CAUSAL, **options: Any) -> str:
    times = found(*cases, mask=mask, **options)
    return times.fastest(ORDER, grad=options.get("grad", True))


def test_the_fastest_is_taken() -> None:
    assert fastest(case(a=3.0, b=2.0, c=1.0)) == "c"
    assert fastest(case(a=3.0, b=2.0)) == "b"


def test_a_tie_is_for_the_first_in_order() -> None:
    """A kernel later in the order is taken only if it is 5 % faster than all before it."""
    assert fastest(case(a=1.04, b=1.0)) == "a"
    assert fastest(case(a=1.06, b=1.0)) == "b"
    assert fastest(case(c=1.0, b=1.03, a=1.09)) == "b"  # in whatever order they stand


def test_without_times_the_order_decides() -> None:
    assert found() == UNKNOWN and fastest() == "a"
    assert fastest(case(c=1.0)) == "a"  # nothing to compare it with
    assert fastest(case(x=1.0, y=0.5)) == "a"


def test_a_kernel_without_a_time_is_behind_those_with_one() -> None:
    assert fastest(case(b=1.0, c=2.0)) == "b"
    assert fastest(case(a=(1.0, None), b=2.0, c=2.5)) == "b"
    assert fastest(case(a=(1.0, None), b=2.0, c=2.5), grad=False) == "a"


def test_each_pass_has_its_own_times() -> None:
    row = case(a=(3.26, 9.29), b=(2.36, 9.40))
    assert (fastest(row), fastest(row, grad=False)) == ("a", "b")


def test_another_generation_of_gpus_has_no_times() -> None:
    table = Rates((case(capability=90, a=2.0, b=1.0),))
    assert table.cases_of("torch", 90) == table.cases_of("torch", 91) == table.cases
    for other in (
        table.cases_of("torch", 100),
        table.cases_of("jax", 90),
        table.cases_of("torch", None),
    ):
        assert other == ()
    host = Rates((case(capability=0, a=1.0),))
    assert host.cases_of("torch", 0) == host.cases and host.cases_of("torch", 90) == ()


def test_times_are_of_halves_on_a_gpu_and_of_float32_on_the_host() -> None:
    gpu, host = case(a=2.0, b=1.0), case(capability=0, a=2.0, b=1.0)
    for dtype, names in (("float16", "ba"), ("bfloat16", "ba"), ("float32", "ab")):
        assert [fastest(row, dtype=dtype) for row in (gpu, host)] == list(names)


@pytest.mark.parametrize(
    ("dims", "name"),
    [((64, 64), "a"), ((72, 8), "b"), ((128, 128), "b"), ((192, 128), "c"), ((512, 512), "c")],
)
def test_the_narrowest_case_that_is_wide_enough(dims: tuple[int, int], name: str) -> None:
    rows = (
        case(dims=(64, 64), a=1.0, b=2.0, c=2.0), case(dims=(128, 128), a=2.0, b=1.0, c=2.0),
        case(dims=(256, 256), a=2.0, b=2.0, c=1.0),
    )  # fmt: skip
    for order in (rows, rows[::-1]):
        assert fastest(*order, head_dim=dims[0], v_head_dim=dims[1]) == name


def test_a_case_that_compares_nothing_does_not_count() -> None:
    rows = case(dims=(96, 96), b=9.0), case(dims=(128, 128), a=2.0, b=1.0)
    times = found(*rows, head_dim=96, v_head_dim=96)
    assert times.case == rows[1]
    times = found(rows[0], head_dim=96, v_head_dim=96)
    assert times.case == rows[0]  # but it says how long that takes


def test_the_heads_of_a_key_head_decide_between_equal_dims() -> None:
    rows = case(heads=(16, 16), a=1.0, b=2.0), case(heads=(32, 8), a=2.0, b=1.0)
    assert fastest(*rows) == "b"
    assert fastest(*rows, q_heads=8, kv_heads=8) == "a"


OPTIONS: dict[Option, tuple[Mask, dict[str, bool]]] = {
    "window": (Mask(causal=True, window=(9, 0)), {}),
    "documents": (Mask(causal=True, cu_seqlens=(0, 100, LENGTH)), {}),
    "predicate": (Mask(predicate=lambda q, k: q >= k), {}),
    **{
        name: (CAUSAL, {name: True})
        for name in ("segment_ids", "softcap", "alibi", "bias", "dropout")
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_has_cases_of_its_own(option: Option) -> None:
    mask, options = OPTIONS[option]
    causal, own = case(a=1.0, b=2.0), case(option, a=2.0, b=1.0)
    assert fastest(causal, own) == "a"
    assert fastest(causal, own, mask=mask, **options) == "b"
    assert fastest(causal, mask=mask, **options) == "a"
    assert fastest(causal, case(option, b=1.0), mask=mask, **options) == "a"


def test_chunks_are_documents() -> None:
    rows = case(a=1.0, b=2.0), case("documents", a=2.0, b=1.0)
    assert fastest(*rows, mask=Mask(chunk_size=7)) == "b"


def test_head_dims_weigh_more_than_the_option() -> None:
    """A causal case with the call's head dim decides if the option has none with it."""
    rows = case("window", a=1.0, b=2.0), case(dims=(256, 256), a=2.0, b=1.0)
    window = Mask(causal=True, window=(9, 0))
    assert fastest(*rows, mask=window) == "a"
    assert fastest(*rows, mask=window, head_dim=256) == "b"


def test_of_several_options_the_slowest_counts() -> None:
    rows = case("softcap", a=2.0, b=1.0), case("alibi", a=10.0, b=20.0)
    assert fastest(*rows, softcap=True, alibi=True) == "a"
    # A case of more work is slow only for its work.
    slow = replace(rows[0], pairs=rows[0].pairs // 40)
    assert fastest(slow, rows[1], softcap=True, alibi=True) == "b"


def test_expected_times_grow_with_the_work_of_the_busiest_rank() -> None:
    times = found(case(a=(2.0, 8.0), b=1.0), batch=3, q_heads=16, kv_heads=4)
    assert times.factor == 1.5
    assert times.time("a") == "about 3 ms forward, 12 ms with backward"
    assert times.time("c") == "was not timed for such calls"
    assert times.time_and_source("c") == UNKNOWN.time_and_source("a") == ""
    request, row = replace(CALL, v_head_dim=64), case(a=(2.0, None))
    half = expected([row], request, program(length=LENGTH // 2), ORDER, grad=False)
    few = (LENGTH // 2) * (LENGTH // 2 + 1) / (LENGTH * (LENGTH + 1))
    assert half.factor == pytest.approx(few * 0.75)
    ring = expected([row], CALL, program(cp_size=4), ORDER, grad=False)
    assert ring.factor == pytest.approx(7 / 16, rel=1e-2)  # the last rank of a plain ring
    assert ring.case and ring.case.describe() == "a GPU, causal, head dim 128"


def test_an_empty_batch() -> None:
    times = found(case(a=(2.0, None), b=1.0), batch=0)
    assert times.time("a") == "about < 0.01 ms forward"


def as_json(**changed: Any) -> dict[str, Any]:
    written = rates.to_text(Rates((case(a=(1.0, None), b=2.0),)))
    row: dict[str, Any] = json.loads(written)["rates"][0]
    return row | changed


def file_of(path: Path, *cases: Any, schema: Any = rates.SCHEMA) -> str:
    path.write_text(json.dumps({"schema": schema, "rates": cases}))
    return str(path)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    table = Rates((case(a=(1.0, None), b=2.0), case("bias", c=3.0)))
    path.write_text(rates.to_text(table))
    assert rates.read(str(path)) == table
    assert rates.read(str(path)).digest == table.digest != Rates(table.cases[:1]).digest


MALFORMED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "versions of the schema": ({"schema": 2}, {}, 'it has no "schema": 1'),
    "a field that is not there": ({}, {"speed": 1}, "a case has framework, capability, gpu"),
    "framework": ({}, {"framework": "mxnet"}, "framework is one of torch, jax, got 'mxnet'"),
    "option": ({}, {"option": "sinks"}, "option is one of causal, window"),
    "capability": ({}, {"capability": "90"}, "capability is an integer"),
    "gpu": ({}, {"gpu": 5}, "gpu is a name"),
    "versions": ({}, {"versions": []}, "versions are names and versions"),
    "tokens": ({}, {"tokens": 0}, "integers >= 1"),
    "heads": ({}, {"heads": [8]}, "heads are two numbers"),
    "dims": ({}, {"dims": [8, 1.5]}, "integers >= 1"),
    "kernels": ({}, {"kernels": {}}, "kernels are names and times"),
    "one time": ({}, {"kernels": {"a": [1.0]}}, "a has milliseconds"),
    "no time": ({}, {"kernels": {"a": [None, None]}}, "a has milliseconds"),
    "less than nothing": ({}, {"kernels": {"a": [1.0, -2.0]}}, "a has milliseconds"),
    "no number": ({}, {"kernels": {"a": [1.0, True]}}, "a has milliseconds"),
    "infinity": ({}, {"kernels": {"a": [1.0, float("inf")]}}, "a has milliseconds"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(name: str, tmp_path: Path) -> None:
    file, changed, expected_message = MALFORMED[name]
    path = file_of(tmp_path / "rates.json", as_json(**changed), **file)
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))} is no table of rates: "
    ) as caught:
        rates.read(path)
    message = str(caught.value)
    assert expected_message in message
    assert message.endswith("or unset RING_RATES for the package's own")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 1, "rates": [3]}'])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no table of rates"):
        rates.read(str(path))
    with pytest.raises(ValueError, match="No such file"):
        rates.read(str(tmp_path / "other.json"))


def test_the_variable_names_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates.default().cases
    monkeypatch.setenv(rates.RATES_VARIABLE, file_of(tmp_path / "rates.json", as_json()))
    assert rates.default() == Rates((case(a=(1.0, None), b=2.0),))


def test_the_packages_own_table() -> None:
    """The packaged table is in canonical form and has one case for each kind of call."""
    path = Path(rates.__file__).with_name("rates.json")
    table = rates.read(str(path))
    assert rates.to_text(table) == path.read_text()
    calls = [(x.framework, x.capability, x.heads, x.dims, x.option) for x in table.cases]
    assert len(set(calls)) == len(calls)
