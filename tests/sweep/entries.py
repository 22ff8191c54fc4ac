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
        autos: The ``AutoModelFor*`` classes that make it.
    """

    name: str
    model_type: str
    autos: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Return the first of :data:`KINDS` that makes it, or an empty string."""
        return next((kind for kind in KINDS if kind in self.autos), "")


def entries() -> list[Entry]:
    """Return all model classes, sorted by model type and name."""
    by_class: dict[str, tuple[str, list[str]]] = {}
    for auto, mapping in sorted(_mappings().items()):
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                by_class.setdefault(name, (model_type, []))[1].append(auto)
    all_entries = [Entry(name, kind, tuple(autos)) for name, (kind, autos) in by_class.items()]
    return sorted(all_entries, key=lambda entry: (entry.model_type, entry.name))


def _mappings() -> dict[str, dict[str, str | tuple[str, ...]]]:
    """Return the names of classes by model type, for each auto class."""
    return {
        name: dict(auto._model_mapping._model_mapping)
        for name, auto in vars(modeling_auto).items()
        if name.startswith("AutoModelFor") and hasattr(auto, "_model_mapping")
    }
