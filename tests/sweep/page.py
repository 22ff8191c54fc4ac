"""What became of every class, kept in a file and shown on a page of the documentation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sweep.entries import entries

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "transformers-models.md"
REFUSED = "the model cannot be split: "  # what shard_batch says first

_WIDTH = 200  # of a reason; check_model says all of it
_TOP = """---
runs: none
---

# Models of transformers

{exact} classes of models of transformers {version} are exact on a ring, {refused} are refused by name, none is wrong and
none hangs: `nox -s sweep` builds every class that an `AutoModelFor*` makes ({all}) from a small config with random
weights, and compares two ranks with one in float64: outputs, the gradient of every weight, and the loss with its
gradients, without padding and with padding on the right and on the left. A class is exact where the largest difference is below 1e-7 of the largest number. Models of text and images
are run on text, and where `images` says so on an image in each row, too. `ring_torch.hf.check_model(model)` says of a model of your own what this page says of these.

{counts}
"""


_LOSS = (
    "By: *shard_batch* is of models whose batches can be split by hand, and by `hf.parallelize` as well; "
    "*hf.parallelize* of those that need its hooks.\n"
    "Loss: *exact* is the model's own, added over ranks; *none* is of models that have no loss of such "
    "labels. The others are to be computed on every rank from outputs that "
    "`ContextParallel.unshard(x, grad='slice')` puts together.\n"
    "Padding: *none* is of models that take no mask."
)


@dataclass(frozen=True)
class Result:
    """What became of a class, as in :class:`sweep.compare.Outcome`."""

    version: str
    name: str
    model_type: str
    result: str
    reason: str
    loss: str
    padding: str
    images: str = "none"
    by: str = "shard_batch"

    @property
    def is_bad(self) -> bool:
        """Neither exact nor refused by name, though it was built and ran."""
        return self.result in ("wrong", "hanging", "error")

    @property
    def is_checked(self) -> bool:
        """Whether it was refused before it was called."""
        return self.reason.startswith(REFUSED)


def read(path: Path = RESULTS) -> list[Result]:
    """All results of a file."""
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def rendered(results: list[Result]) -> str:
    """The page."""
    by = defaultdict(list)
    for each in results:
        by[each.result].append(each)
    top = _TOP.format(
        version=results[0].version, all=len(results), exact=len(by["exact"]),
        refused=len(by["refused"]), counts=_counts(by["exact"]),
    )  # fmt: skip
    without = [x for x in by["refused"] if "has no sequence of tokens" in x.reason]
    refused = [x for x in by["refused"] if x not in without]
    apart = [x for x in results if x.result not in ("exact", "refused")]
    return "\n".join(
        [
            top,
            "## Exact",
            "",
            _LOSS,
            "",
            *_table(
                ("type", "class", "by", "loss", "images"),
                ((x.model_type, x.name, x.by, _loss(x), _images(x)) for x in by["exact"]),
            ),
            "",
            "## Refused",
            "",
            *_table(("type", "class", "why"), ((x.model_type, x.name, _why(x)) for x in refused)),
            "",
            "## Refused: no sequence of tokens",
            "",
            ", ".join(f"`{x.name}`" for x in without),
            "",
            "## Not run",
            "",
            "The small config does not build these, or the whole model does not run on tokens alone.",
            "",
            *_table(
                ("type", "class", "why"),
                ((x.model_type, x.name, f"{x.result}: {_why(x)}") for x in apart),
            ),
            "",
        ]
    )


def _counts(exact: list[Result]) -> str:
    """How many types of each kind are exact."""
    kinds = {
        "causal language models": "AutoModelForCausalLM",
        "encoder-decoders": "AutoModelForSeq2SeqLM",
        "models of text and images": "AutoModelForImageTextToText",
    }
    autos = {entry.name: entry.autos for entry in entries()}
    rows = []
    for kind, auto in kinds.items():
        every = {x.model_type for x in exact if auto in autos.get(x.name, ())}
        if auto == "AutoModelForSeq2SeqLM":
            every = {x.model_type for x in exact if auto in autos[x.name] and x.by != "shard_batch"}
        rows.append(f"{len(every)} types of {kind}")
    images = sum(x.images == "exact" for x in exact)
    return f"Exact are {', '.join(rows)}; {images} classes with images among their tokens."


def _images(result: Result) -> str:
    if result.images in ("exact", "none"):
        return result.images
    return "refused" if result.images.startswith("refused") else "not run"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for kind, name, *texts in rows:
        yield f"| {kind} | `{name}` | {' | '.join(texts)} |"


def _padding(result: Result) -> str:
    return result.padding if result.padding in ("exact", "none") else result.padding.split(":")[0]


def _loss(result: Result) -> str:
    if result.loss in ("exact", "none"):
        return result.loss
    if "start_positions" in result.loss:
        return "of `start_logits` and `end_logits`, put together"
    return "of its logits, put together"


def _why(result: Result) -> str:
    text = result.reason.removeprefix(REFUSED).removeprefix("ValueError: ")
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
    for mark in "|*<_[":
        text = text.replace(mark, f"\\{mark}")
    return text
