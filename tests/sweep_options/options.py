"""Fields of TrainingArguments, of TRL's configs and of PEFT's, each with a value to try.

A value is that of the table's rows, where a person may have written another; of a new field it
follows from its default. :data:`VALUES` has those that need other options, or are objects.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import peft
import transformers
import trl_trained
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from sweep_options import adapters, values
from sweep_options.values import Try

CONFIGS = [config for _, config, *_ in (trl_trained.TRAINERS | trl_trained.SAMPLERS).values()]
TRAINERS = {x.__name__: x for x in (transformers.TrainingArguments, *CONFIGS)}
ADAPTERS = {
    x.__name__: x for x in (peft.PeftConfig, *PEFT_TYPE_TO_CONFIG_MAPPING.values())
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Option with a value to try.

    Attributes:
        kind: ``trainer`` or ``peft``.
        owner: Name of the config class.
        option: Name of the field.
        attempt: The value.
    """

    kind: str
    owner: str
    option: str
    attempt: Try

    @property
    def key(self) -> tuple[str, str, str]:
        """Owner, option and value, by which a row of the table is known."""
        return self.owner, self.option, repr(self.attempt.value)


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the fields of a config class by name, but for those of its base as they are there."""
    names = {x.name: x for x in dataclasses.fields(cls)}
    bases = (peft.PeftConfig, transformers.TrainingArguments)
    base = next((x for x in bases if cls is not x and issubclass(cls, x)), None)
    inherited = {} if base is None else {x.name: x.default for x in dataclasses.fields(base)}
    return {n: x for n, x in names.items() if n not in inherited or x.default != inherited[n]}


def installed() -> Iterator[tuple[str, str, str]]:
    """Yield kind, owner and name of every option of the installed packages."""
    for kind, owners in (("trainer", TRAINERS), ("peft", ADAPTERS)):
        for owner, cls in owners.items():
            yield from ((kind, owner, name) for name in fields_of(cls))


def _of_rows() -> dict[tuple[str, str], list[Try]]:
    """Return the values of the table's rows by owner and option, but for objects."""
    by_option: defaultdict[tuple[str, str], list[Try]] = defaultdict(list)
    for row in map(json.loads, values.RESULTS.read_text().splitlines()):
        with suppress(ValueError, SyntaxError):
            by_option[row["owner"], row["option"]].append(Try(ast.literal_eval(row["value"])))
    return by_option


def entries() -> Iterator[Entry]:
    """Yield every option of the installed packages with each of its values."""
    of_rows = _of_rows()
    for kind, owner, name in installed():
        cls = (TRAINERS | ADAPTERS)[owner]
        table = adapters.VALUES if kind == "peft" else values.VALUES
        chosen = table.get(f"{owner}.{name}", table.get(name, ...))
        if chosen is ...:
            chosen = of_rows.get((owner, name)) or other_value(cls, name)
        several = isinstance(chosen, list) and isinstance(chosen[0], Try)
        for value in chosen if several else [chosen]:
            attempt = value if isinstance(value, Try) else Try(value)
            if owner in adapters.SINGLE:
                attempt = dataclasses.replace(attempt, limit=max(attempt.limit, values.SINGLE))
            yield Entry(kind, owner, name, attempt)


def other_value(cls: type, name: str) -> Any:
    """Return a value that is not a field's default; ``None`` if none follows from this."""
    option = fields_of(cls)[name]
    default = option.default
    if default is dataclasses.MISSING and option.default_factory is not dataclasses.MISSING:
        default = option.default_factory()
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default * 2 or 1
    return default / 2 or 0.3 if isinstance(default, float) else None
