"""The table of options covers what is installed; a sample of its rows is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from zlib import crc32

import pytest
import transformers
from packaging.version import Version
from sweep.page import written
from sweep_options.table import RESULTS, VERDICTS, Ranks, Row, entries, installed, judged, read

from ring_torch.hf.models.releases import TESTED_RELEASES
from ring_torch.hf.trainer_settings import TESTED_OF_TRL

_, PINNED, _ = TESTED_RELEASES
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version(PINNED),
    reason=f"the table is of transformers {PINNED} and newer",
)

ROWS = read()
ENTRIES = {entry.key: entry for entry in entries()}

#: Rows that are run in each change; at night one in 60 of the others, too.
CHOSEN = (
    ("TrainingArguments", "neftune_noise_alpha"), ("SFTConfig", "packing"), ("DPOConfig", "ld_alpha"), ("CPOConfig", "simpo_gamma"),
    ("TrainingArguments", "eval_use_gather_object"), ("LoraConfig", "alora_invocation_tokens"),
    ("LoraConfig", "velora_config"), ("AdaLoraConfig", "orth_reg_weight"), ("LilyConfig", "r"),
    ("PromptTuningConfig", "num_virtual_tokens"),
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with closing(Ranks()) as started:
        yield started


def test_the_table_has_every_option_of_the_installed_packages() -> None:
    """A release that brings an option fails here, until the sweep has tried it."""
    listed = {(x.kind, x.owner, x.option) for x in ROWS.values()}
    missing = sorted({*installed()} - listed)
    assert not missing, f"run nox -s sweep_options: {RESULTS.name} lacks {missing}"


def test_the_table_has_every_trainer_of_trl_that_is_not_refused() -> None:
    owners = {x.owner for x in ROWS.values() if x.verdict == "exact"}
    classes = [x.rpartition(".")[2] for x in TESTED_OF_TRL]
    assert [x for x in classes if x.replace("Trainer", "Config") not in owners] == []


def test_none_is_wrong_and_none_unexplained() -> None:
    assert {x.verdict for x in ROWS.values()} == {*VERDICTS}
    assert [x for x in ROWS.values() if x.verdict != "exact" and not x.reason] == []
    assert RESULTS.read_text() == written(ROWS.values())


def _sample() -> Iterator[object]:
    for key, entry in ENTRIES.items():
        is_chosen = (entry.owner, entry.option) in CHOSEN
        if is_chosen or crc32(repr(key[1:]).encode()) % 60 == 0:
            marks = [] if is_chosen else [pytest.mark.nightly]
            yield pytest.param(entry, id="-".join(key[1:]), marks=marks)


@pytest.mark.parametrize("entry", [*_sample()])
def test_it_is_as_the_table_says(ranks: Ranks, entry: Row) -> None:
    row = judged(ranks, entry)
    assert (row.verdict, row.reason) == (entry.verdict, entry.reason)
