"""The table of options of TrainingArguments, TRL's configs and PEFT's: what is tried and judged.

A value, what it needs and its limit are those of the table's rows, where a person writes them; of a
new field the value follows from its default.

Why an option has no effect, or is not run here, is a word that a person has written into its row: a
new option of that kind is "unexplained" until then. Of these words "sampling" says that completions
are recorded, "files" that TRL computes before there is a ring, "collator" that GKD's reads chats
alone, "adapters" that several trained ones are needed, "single" that a type has one value, "unused"
that this class does not read it, "precision" that the head is in float32 or wider, "model" that it
has no dropout, "TRL" that one device fails.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl_trained
from backends.torch_ranks import Pools
from hf_models import difference
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as lora
from sweep import page

from sweep_options.runs import Results, run

RESULTS = Path(__file__).parent / "results.jsonl"
SECONDS = 120.0  # limit for a run
SINGLE = 2e-4  # limit in float32
VERDICTS = ("exact", "refused", "no effect", "not run")
_CONFIGS = [config for _, config, *_ in (trl_trained.TRAINERS | trl_trained.SAMPLERS).values()]
#: Config classes by kind and name.
OWNERS: dict[str, dict[str, Any]] = {
    "trainer": {x.__name__: x for x in (transformers.TrainingArguments, *_CONFIGS)},
    "peft": {x.__name__: x for x in (peft.PeftConfig, *PEFT_TYPE_TO_CONFIG_MAPPING.values())},
}
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """Row of the table: an option with a value, what it needs, and what comes of it.

    Attributes:
        kind: ``trainer`` or ``peft``.
        owner: Name of the config class.
        option: Name of the field.
        value: The value tried, as Python writes it; ``None`` where none can be on this machine.
        verdict: ``exact``, ``refused`` by name, ``no effect`` (one rank computes the same with it,
            and so do two), ``not run`` on this machine; or ``wrong``, ``error``, ``unexplained``.
        reason: The refusal; or in a word why there is no effect, or why it is not run.
        given: Other options of the run, and of the one without the value that it is compared with.
            ``_model`` and ``_data`` name another model and another data set.
        limit: Allowed difference, relative to the largest number compared; more than that of
            float64 runs in float32, and where autocast or recomputation would not be in float64.
    """

    kind: str
    owner: str
    option: str
    value: str
    verdict: str = ""
    reason: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    limit: float = 1e-6

    @property
    def key(self) -> Key:
        """Order of the table's rows."""
        return self.kind, self.owner, self.option, self.value

    @property
    def is_bad(self) -> bool:
        """True for a verdict that is none of :data:`VERDICTS`."""
        return self.verdict not in VERDICTS


def read() -> dict[Key, Row]:
    """Return the rows of the table by their keys."""
    return {x.key: x for x in page.read(RESULTS, Row)}


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the fields of a config class by name, but for those of its base as they are there."""
    names = {x.name: x for x in fields(cls)}
    bases = (peft.PeftConfig, transformers.TrainingArguments)
    base = next((x for x in bases if cls is not x and issubclass(cls, x)), None)
    inherited = {} if base is None else {x.name: x.default for x in fields(base)}
    return {n: x for n, x in names.items() if n not in inherited or x.default != inherited[n]}


def installed() -> Iterator[tuple[str, str, str]]:
    """Yield kind, owner and name of every option of the installed packages."""
    for kind, owners in OWNERS.items():
        for owner, cls in owners.items():
            yield from ((kind, owner, name) for name in fields_of(cls))


def entries() -> Iterator[Row]:
    """Yield every option of the installed packages with each of its values."""
    listed: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read().values():
        listed[row.key[:3]].append(row)
    for kind, owner, name in installed():
        value = other_value(OWNERS[kind][owner], name)
        yield from listed[kind, owner, name] or [Row(kind, owner, name, repr(value))]


def other_value(cls: type, name: str) -> Any:
    """Return a value that is not a field's default; ``None`` if none follows from this."""
    option = fields_of(cls)[name]
    default = option.default
    if default is MISSING and option.default_factory is not MISSING:
        default = option.default_factory()
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default * 2 or 1
    return default / 2 or 0.3 if isinstance(default, float) else None


class Ranks(Pools):
    """One rank alone, and two ranks, which are started anew once they may be out of step."""

    def __init__(self) -> None:
        super().__init__(timeout=20, patience=SECONDS)
        self.whole: dict[str, Results] = {}

    def results(self, ranks: int, entry: Row, options: dict[str, Any]) -> list[Results]:
        """Return each rank's results of a run with these options."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, entry.kind, entry.owner, options, entry.limit, folder)
            answers = self[ranks].answers(run, *arguments, grace=30)
        results = [
            x if ok else {"error": str(x).strip()[-300:], "is refusal": False} for ok, x in answers
        ]
        # Ranks that refused a call together, or one that is alone, are not out of step.
        refusals = [x.get("is refusal") for x in results]
        if not all(ok for ok, _ in answers) or (
            ranks > 1 and any("error" in x for x in results) and not all(refusals)
        ):
            self.pop(ranks).close()
        return results

    def without(self, entry: Row) -> Results:
        """Return the results of one rank without the option; they are kept."""
        given = sorted(map(repr, entry.given.items()))
        key = repr((entry.kind, entry.owner, given, entry.limit))
        if key not in self.whole:
            self.whole[key] = self.results(1, entry, entry.given)[0]
        return self.whole[key]


def judged(ranks: Ranks, entry: Row) -> Row:
    """Run an option on one rank and on two, and judge it; a person's word for it is kept."""

    def row(verdict: str, reason: str = "") -> Row:
        return replace(entry, verdict=verdict, reason=" ".join(reason.split())[:300])

    options = entry.given | {entry.option: eval(entry.value, dict(vars(lora)))}
    word = entry.reason if entry.verdict in ("no effect", "not run") else ""
    if options[entry.option] is None and entry.option not in entry.given:
        return row("not run" if word else "unexplained", word)
    whole, without = ranks.results(1, entry, options)[0], ranks.without(entry)
    split = ranks.results(2, entry, options)
    errors = [x["error"] for x in split if "error" in x]
    ran = [] if errors or "error" in whole else split
    wrong = [x for each in ran for x in differences(each, whole, entry.limit)]
    if len(errors) == len(split) and all(x["is refusal"] for x in split):
        return row("refused", errors[0])
    if "error" in whole:
        return row("not run" if word else "unexplained", word or f"alone: {whole['error']}")
    if errors or wrong:
        return row("error" if errors else "wrong", errors[0] if errors else "; ".join(wrong[:4]))
    if "error" in without or [*differences(whole, without, 1e-9)]:
        return row("exact", "each rank draws for its own tokens" if whole["draws"] else "")
    return row("no effect" if word else "unexplained", word or "it changes nothing")


def differences(results: Results, whole: Results, limit: float) -> Iterable[str]:
    """Yield what differs by more than a limit, relative to the largest entry."""
    for name in {**whole, **results}:
        if name == "draws":
            continue
        x, y = (
            torch.as_tensor(z[name]).double().nan_to_num() if name in z else None
            for z in (results, whole)
        )
        # Metrics near 0 (rewards, mean logits) are differences of rounded numbers.
        smallest = 1.0 if limit > SINGLE else 0.1 if y is not None and y.ndim == 0 else 1e-6
        if x is None or y is None:
            yield f"{name} is missing"
        elif text := difference(x, y, limit, smallest):
            yield f"{name} {text}"
