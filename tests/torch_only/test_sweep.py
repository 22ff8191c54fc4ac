"""The page of all transformers models covers three releases; a sample of its rows is checked."""

from __future__ import annotations

from zlib import crc32

import pytest
import torch
import transformers
from sweep import page, switches
from sweep.compare import compare, entries
from sweep.page import Result
from sweep.switches import NO_SWITCH, Row, switches_of, values_of
from sweep.tiny import bare_config, config_of, configs_in

from ring_torch import hf
from ring_torch.hf import batch as batch_by_hand
from ring_torch.hf.models.releases import TESTED_RELEASES
from ring_torch.local import LocalRanks

#: Models that run on two ranks again: some must be exact, and some refused.
CHOSEN = (
    "LlamaForCausalLM", "DeepseekV3ForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel",
    "Qwen2VLForConditionalGeneration", "T5ForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
)  # fmt: skip
REFUSED = ("LlamaForSequenceClassification", "RwkvForCausalLM", "MobileBertForMaskedLM")

#: Classes of CHOSEN that a release refuses; T5 has own attention there.
REFUSED_ON = {"5.14": ("T5ForConditionalGeneration", "Qwen3_5ForConditionalGeneration")}

#: Classes that are exact on the pinned release and not on the newest, with the result there.
#: Llama 4's own forward reads an output that its text model does not have.
NOT_ON_NEWEST = {"Llama4ForConditionalGeneration": "does not run"}

#: Classes whose switches run for each change.
SWITCHED = ("FalconForCausalLM", "Gemma4ForConditionalGeneration", "MvpForQuestionAnswering")
#: Classes of whose switches `test_hf` has rows, or Gemma 4 the like.
OF_ROWS = {"EsmForMaskedLM", "ModernBertForMaskedLM", "Gemma3ForCausalLM"}

SWITCHES = {x.name: x for x in page.read(switches.TABLE, Row)}
ROWS = page.read()
LISTED = page.of_release(ROWS, transformers.__version__)
BY_RELEASE = {release: page.of_release(ROWS, f"{release}.0") for release in TESTED_RELEASES}


ENTRIES = {entry.name: entry for entry in entries()}


def test_the_page_has_every_class_of_tested_releases() -> None:
    missing = ENTRIES.keys() - LISTED.keys()
    assert not missing, f"run nox -s sweep: {sorted(missing)} are not in {page.RESULTS.name}"
    if {result.version for result in LISTED.values()} == {transformers.__version__}:
        assert ENTRIES.keys() == LISTED.keys()
    assert list(dict.fromkeys(result.release for result in ROWS)) == list(TESTED_RELEASES)
    assert page.summary(ROWS) in page.PAGE.read_text()
    assert page.RESULTS.read_text() == page.written(ROWS)


def test_every_class_that_is_not_exact_has_a_numbered_reason() -> None:
    numbers = {n for x in ROWS if x.result != "exact" for n in page.reasons_of(x)}
    assert numbers == set(range(1, len(page.REASONS) + 1))
    reason = "it does what no number is for"
    with pytest.raises(ValueError, match="NewModel"):
        page.reasons_of(Result("5.24.0", "NewModel", "new", "refused", reason, "", ""))


@pytest.mark.parametrize("release", TESTED_RELEASES)
def test_none_is_wrong_and_none_hangs(release: str) -> None:
    results = BY_RELEASE[release]
    assert [result.name for result in results.values() if result.is_bad] == []
    chosen = [results[name] for name in CHOSEN if name not in REFUSED_ON.get(release, ())]
    assert {(x.result, x.loss, x.padding) for x in chosen} == {("exact", "exact", "exact")}
    for name in REFUSED_ON.get(release, ()):
        assert (results[name].result, results[name].loss) != ("exact", "exact")


def test_no_class_is_less_exact_on_the_newest_release() -> None:
    _, pinned, newest = (BY_RELEASE[release] for release in TESTED_RELEASES)
    exact = {name for name, x in pinned.items() if x.result == "exact"}
    assert len(exact) >= 394, "what was exact before is refused"
    less = {name: newest[name].result for name in exact if newest[name].result != "exact"}
    assert less == NOT_ON_NEWEST


@pytest.mark.parametrize("name", [*CHOSEN, *REFUSED])
def test_it_is_as_the_page_says(pool: LocalRanks, name: str) -> None:
    listed = LISTED[name]
    fields = ["result", "loss", "padding", "images", "by", "recurrent"]
    for outcome in pool.run(compare, name, listed.model_type):
        assert [getattr(outcome, x) for x in fields] == [getattr(listed, x) for x in fields], (
            outcome
        )


def test_every_switch_of_an_exact_class_has_a_verdict() -> None:
    """A field that a release brings needs a value, or a reason to be none, and then a verdict."""
    exact = {name for name, x in LISTED.items() if x.result == "exact"} & ENTRIES.keys()
    untried, lacking = set(), {}
    for name in exact:
        for config in configs_in(
            bare_config(ENTRIES[name].model_type, getattr(transformers, name))
        ):
            untried |= {
                f"{config.model_type}.{field}"
                for field, values in values_of(type(config))
                if not values and not switches.TOWERS.search(config.model_type)
            }
        labels = {x.label for x in switches_of(ENTRIES[name])}
        if labels != ({*SWITCHES[name].verdicts} if name in SWITCHES else set()):
            lacking[name] = labels
    assert untried == set(), "give them a value in tests/sweep/switches.py"
    if {x.version for x in SWITCHES.values()} == {transformers.__version__}:
        assert lacking == {}, "run nox -s sweep"
    assert not any(NO_SWITCH.fullmatch(x) for x in switches.VALUES)


def test_no_switch_is_wrong_or_refused_in_a_call() -> None:
    assert [name for name, row in SWITCHES.items() if row.is_bad] == []
    verdicts = {f"{y} {x}" for row in SWITCHES.values() for x, y in row.verdicts.items()}
    for switch in ("alibi", "use_prompt"):
        assert any(x.startswith("refused") and switch in x for x in verdicts)


@pytest.mark.nightly(unless=SWITCHED)
@pytest.mark.parametrize("name", [x for x in SWITCHES if x not in OF_ROWS])
def test_its_switches_are_as_in_the_table(pool: LocalRanks, name: str) -> None:
    if name not in LISTED or LISTED[name].result != "exact":
        pytest.skip("this release does not have it, or refuses it")
    listed = SWITCHES[name]
    for switch in switches_of(ENTRIES[name]):
        changes = {"kind": switch.kind, "values": switch.values}
        for outcome in pool.run(compare, name, ENTRIES[name].model_type, changes):
            verdict = switches.verdict(outcome, LISTED[name])
            assert not Row("", name, {switch.label: verdict}).is_bad, verdict
            if listed.version == transformers.__version__:
                expected = listed.verdicts[switch.label]
                assert verdict == expected or verdict[:7] == expected[:7] == "not run"


def _careless(rank: int, name: str, model_type: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_by_hand, "check_model", lambda _: hf.ModelReport())
        return compare(rank, name, model_type)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LlamaForSequenceClassification", "nothing to sum"), ("RwkvForCausalLM", "logits"),
        ("FNetForMaskedLM", "gradient"), ("RobertaForMaskedLM", "logits"),
        ("MobileBertForMaskedLM", "logits"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_seen(pool: LocalRanks, name: str, message: str) -> None:
    """Without the refusal results are wrong, so the comparison detects what it is for."""
    outcomes = pool.run(_careless, name, LISTED[name].model_type)
    seen = "refused" if message == "nothing to sum" else "wrong"
    assert {outcome.result for outcome in outcomes} == {seen}
    assert any(message in outcome.reason for outcome in outcomes)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about empty weights
def test_check_model_says_in_advance_what_the_page_says(request: pytest.FixtureRequest) -> None:
    """``check_model`` agrees with the page on all models with ``--all``, else on one in 40."""
    others, part = [], 1 if request.config.getoption("--all") else 40
    for name, entry in ENTRIES.items():
        listed = LISTED[name]
        if name not in (*CHOSEN, *REFUSED) and crc32(name.encode()) % part:
            continue
        if listed.version != transformers.__version__ or listed.result.startswith("does not"):
            continue
        cls = getattr(transformers, name)
        with torch.device("meta"):  # where no forward can run
            model = cls._from_config(config_of(entry.model_type, cls), attn_implementation="eager")
        report = hf.check_model(model)
        is_exact = listed.result == "exact" or not listed.is_checked  # only a call shows these
        assert bool(report.reasons) is not report.exact
        if report.exact != is_exact or (
            listed.result == "exact" and bool(report.hooks) != (listed.by == "hf.parallelize")
        ):
            others.append(name)
    assert others == []
