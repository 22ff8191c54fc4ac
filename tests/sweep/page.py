"""Stores the results of every model class in a file, and makes the tables of the page of them."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "transformers-models.md"
BAD = ("wrong", "hanging", "error")
REFUSED = "the model cannot be split: "  # beginning of shard_batch's refusals

#: Kinds of models that the page counts, by their auto class.
KINDS = {
    "AutoModelForCausalLM": "causal language models",
    "AutoModelForSeq2SeqLM": "encoder-decoders",
    "AutoModelForImageTextToText": "models of text and images",
}


_WHOLE = "run it whole on each device"

#: Reasons by the numbers that the page gives them: a pattern of the text of
#: :func:`ring_torch.hf.check_model` or of an error, which may be cut off in its last words; why a
#: class is refused or not run; and advice.
REASONS = (
    ("has no sequence of tokens", "it takes neither `input_ids` nor `inputs_embeds`, as models of images or sounds: there is no sequence of tokens to split", _WHOLE),
    (r"pools \(", "it makes one output of a whole sequence, of which a rank holds a part (classification, retrieval)", "take `hf.parallelize`, if it is the `ForSequenceClassification` of a causal model; else run the model without that head, pool `ContextParallel.unshard(hidden_states, grad='sum')`, divide the loss by `cp_size`"),
    ("makes a pooler_output", "its `pooler_output` is of one token, which one rank has", "build it with `add_pooling_layer=False`, or take the hidden states"),
    ("no attention func|calls no att|in a way of their own", "its layers attend in code of their own, not by an attention function of transformers' registry, so a rank would see its own tokens only", "take a class whose layers call the registry's attention function"),
    ("mix tok|recurrent or convolutional layers", "convolutions or recurrent layers mix tokens that lie on other ranks, and no hook exchanges them", _WHOLE),
    ("layers of type", "layers of a type other than full and sliding attention would see a rank's tokens only", _WHOLE),
    ("makes its masks itself|masks of its own|asks for a mask|another mask over|reads the att|no mask that could be read", "it makes, reads or changes a mask itself, not through `transformers.masking_utils`, and the mask of a split batch cannot be read", "call `ring_torch.ring_attention` with the mask as [an option](masks-and-options.md)"),
    ("it would count|would count from 0|nor module that makes pos|create_position_ids", "it counts positions itself, and would count a rank's tokens from 0", "its code has to take `position_ids`"),
    ("of transformers [0-9.]+ has no|get_seq_length", "this release lacks a name, or an argument, that a hook needs", "take a release on which the class is exact, or report it"),
    ("position bias of its own", "its attention adds a position bias that cannot be split", _WHOLE),
    ("encoder and a decoder|takes no encoder_attention_mask", "it is an encoder and a decoder, and not of tokens alone", "split its decoder or its encoder alone"),
    ("trigram_input|cuts its sequence into patches", "an embedding is made of neighbouring tokens, which may lie on other ranks", "of MobileBERT, set `config.trigram_input` to False before it is built"),
    ("experts take as many tokens as fit", "its experts take as many tokens as fit, counted among a rank's own", "take a model whose experts drop no tokens"),
    ("looks for one token", "it looks for one token of the whole sequence", _WHOLE),
    ("ImportError", "not run: it needs a library that the sweep does not install", "ask `check_model`"),
    ("does not build", "not run: the small config does not build it", "ask `check_model`"),
    ("does not run", "not run: the whole model does not run on tokens alone", "ask `check_model`"),
)  # fmt: skip

#: Notes of exact classes, by their letters.
NOTES = {
    "a": "its loss is to be computed on every rank from logits that `ContextParallel.unshard(x, grad='slice')` puts together",
    "b": "the same of `start_logits` and `end_logits`", "c": "it has no loss of such labels",
    "d": "images among its tokens are exact, too", "e": "images among its tokens are refused",
    "f": "images were not run", "g": "padding was not run",
    "h": "`hf.parallelize` splits it; all others `shard_batch` splits by hand, too",
    "i": "its recurrent layers are split, too",
    "j": "its recurrent layers run on whole sequences on every rank",
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Outcome of a model class on a version of transformers.

    Attributes:
        version: Version of transformers.
        name: Name of the class.
        model_type: Model type of the config that it is built from.
        result: ``exact``, ``refused``, ``wrong``, ``error``, ``does not build``, ``does not run``.
        reason: Why, in words; empty where exact.
        loss: ``exact``, ``none`` or why it was refused.
        padding: ``exact``, ``none``, or why it was refused, for rows with padding on either side.
        images: ``exact``, ``none``, or why it was refused, for a batch with an image in each row.
        by: Function that splits batches: ``shard_batch``, or only ``hf.parallelize``.
        kind: The first of :data:`KINDS` that makes it, or an empty string.
        recurrent: ``split`` or ``whole``, as ``hf.parallelize`` runs recurrent layers; ``none``
            where there are none, or the class is not exact.
    """

    version: str
    name: str
    model_type: str
    result: str = ""
    reason: str = ""
    loss: str = "none"
    padding: str = "none"
    images: str = "none"
    by: str = "shard_batch"
    kind: str = ""
    recurrent: str = "none"

    @property
    def key(self) -> tuple[object, ...]:
        """Order of the table's rows."""
        return _number(self.release), self.model_type, self.name

    @property
    def release(self) -> str:
        """Return the version without its last number, as ``5.23``."""
        return self.version.rpartition(".")[0]

    @property
    def is_bad(self) -> bool:
        """Return True if it was built and ran, and is neither exact nor refused."""
        return self.result in BAD

    @property
    def is_checked(self) -> bool:
        """Return True if it was refused before it was called."""
        return self.reason.startswith(REFUSED)


def read(path: Path = RESULTS, row: Any = Result) -> list[Any]:
    """Return the rows of a table, each a line of JSON."""
    return [row(**json.loads(line)) for line in path.read_text().splitlines()]


def written(rows: Iterable[Any]) -> str:
    """Return rows as lines of JSON, in the order of their keys."""
    return "".join(json.dumps(asdict(x)) + "\n" for x in sorted(rows, key=lambda x: x.key))


def of_release(results: Iterable[Result], version: str) -> dict[str, Result]:
    """Return the results of a version's release by name, or of the newest if it has none."""
    by: defaultdict[str, dict[str, Result]] = defaultdict(dict)
    for each in results:
        by[each.release][each.name] = each
    return by.get(version.rpartition(".")[0]) or by[max(by, key=_number)]


def summary(results: list[Result]) -> str:
    """Return how many classes each release has, by result, and what is exact on the newest."""
    releases = _releases(results)
    newest = [x for x in results if x.release == releases[-1] and x.result == "exact"]
    sums = []
    for release in releases:
        counts = Counter(x.result for x in results if x.release == release)
        numbers = counts.total(), counts["exact"], counts["refused"]
        others = numbers[0] - numbers[1] - numbers[2]
        sums.append((release, *map(str, (*numbers, others))))
    table = _table(("release", "classes", "exact", "refused", "not run"), sums)
    kinds = [
        f"{len({x.model_type for x in newest if x.kind == kind})} types of {described}"
        for kind, described in KINDS.items()
    ]
    images = sum(x.images == "exact" for x in newest)
    counted = f"{', '.join(kinds)}; {images} classes with images among their tokens"
    return f"{table}\n\nExact on {releases[-1]} are {counted}."


def classes(results: list[Result]) -> str:
    """Return the table of all classes, a row for each model type."""
    by_class: defaultdict[str, dict[str, Result]] = defaultdict(dict)
    for each in sorted(results, key=lambda x: _number(x.release)):
        by_class[each.name][each.release] = each
    oldest = _releases(results)[0]
    cells: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for name, by in sorted(by_class.items()):
        *_, latest = by.values()
        is_exact = any(x.result == "exact" for x in by.values())
        text = _exact(by, oldest) if is_exact else ", ".join(map(str, reasons_of(latest)))
        cells[latest.model_type][not is_exact].append(f"`{name}`{f' ({text})' * bool(text)}")
    rows = ((model, *("<br>".join(x) for x in of)) for model, of in sorted(cells.items()))
    return _table(("model", "exact", "refused or not run"), rows)


def notes() -> str:
    """Return the table of notes of exact classes."""
    return _table(("note", "what it means"), NOTES.items())


def reasons() -> str:
    """Return the table of reasons why classes are refused or not run."""
    rows = ((str(n), why, todo) for n, (_, why, todo) in enumerate(REASONS, 1))
    return _table(("reason", "why it is refused", "what to do"), rows)


def reasons_of(result: Result) -> list[int]:
    """Return the numbers of a result's reasons, in the order of its text.

    Raises:
        ValueError: The text matches none of :data:`REASONS`.
    """
    text = result.reason if result.result == "refused" else f"{result.result}: {result.reason}"
    places = [(re.search(pattern, text), n) for n, (pattern, *_) in enumerate(REASONS, 1)]
    numbers = [n for match, n in sorted((m.start(), n) for m, n in places if m)]
    if result.result == "refused":
        if not numbers:
            raise ValueError(f"no number for the reason of {result.name}: {text}")
        return numbers
    library = next(n for n, x in enumerate(REASONS, 1) if x[0] == "ImportError")
    return [library] if library in numbers else numbers[:1]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _releases(results: list[Result]) -> list[str]:
    return sorted({x.release for x in results}, key=_number)


def _exact(by: dict[str, Result], oldest: str) -> str:
    """Return since when a class is exact, unless since the oldest release, and its notes.

    ``by`` holds its results by release, from the oldest to the newest.
    """
    ordered = list(by.values())
    exact = [x for x in ordered if x.result == "exact"]
    best, since = exact[-1], exact[0].release
    notes = [f"since {since}"] * (since != oldest)
    notes += [f"to {best.release}"] * (best is not ordered[-1])
    notes += [", ".join(_letters(best))]
    notes += [f"{x.release}: {_difference(x, best)}" for x in ordered if _difference(x, best)]
    return "; ".join(filter(None, notes))


def _difference(result: Result, best: Result) -> str:
    """Return the notes that differ from those of the newest release on which a class is exact."""
    if result.result != "exact":
        later = _number(result.release) > _number(best.release)
        return ", ".join(map(str, reasons_of(result))) if later else ""
    letters = _letters(result)
    return (", ".join(letters) or "none of these") if letters != _letters(best) else ""


def _letters(x: Result) -> list[str]:
    """Return the letters of :data:`NOTES` that an exact class has on a release."""
    by_letter = {
        "a": x.loss not in ("exact", "none") and "start_positions" not in x.loss,
        "b": "start_positions" in x.loss, "c": x.loss == "none", "d": x.images == "exact",
        "e": x.images.startswith("refused"), "f": x.images.startswith("not run"),
        "g": x.padding not in ("exact", "none"), "h": x.by != "shard_batch",
        "i": x.recurrent == "split", "j": x.recurrent == "whole",
    }  # fmt: skip
    return [letter for letter, has in by_letter.items() if has]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
