"""Lists every class that an ``AutoModelFor*`` of the installed transformers can make."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from sweep.page import KINDS


@dataclass(frozen=True)
class Entry:
    """Model class.

    Attributes:
        name: Name of the class.
        model_type: Model type of the config that it is built from.
        kind: The first of :data:`KINDS` that makes it, or an empty string.
    """

    name: str
    model_type: str
    kind: str


def entries() -> list[Entry]:
    """Return all model classes, sorted by model type and name."""
    by_class: dict[str, tuple[str, set[str]]] = {}
    for auto, value in sorted(vars(modeling_auto).items()):
        if not auto.startswith("AutoModelFor") or not hasattr(value, "_model_mapping"):
            continue
        for model_type, names in value._model_mapping._model_mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                by_class.setdefault(name, (model_type, set()))[1].add(auto)
    return sorted(
        (
            Entry(name, model_type, next((kind for kind in KINDS if kind in autos), ""))
            for name, (model_type, autos) in by_class.items()
        ),
        key=lambda entry: (entry.model_type, entry.name),
    )
