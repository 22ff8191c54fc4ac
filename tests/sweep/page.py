"""What became of every class, kept in a file and shown on a page of the documentation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sweep.entries import KINDS

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "transformers-models.md"
REFUSED = "the model cannot be split: "  # what shard_batch says first

_WIDTH = 200  # of a reason; check_model says all of it
_TOP = """---
runs: none
---

# Models of transformers

{sums} None is wrong and none hangs on any of them.

`nox -s sweep` builds every class that an `AutoModelFor*` makes from a small config with random
weights, and compares two ranks with one in float64: outputs, the gradient of every weight, and the loss with its
gradients, without padding and with padding on the right and on the left. A class is exact where the largest difference is below 1e-7 of the largest number. Models of text and images
are run on text, and where `images` says so on an image in each row, too. `ring_torch.hf.check_model(model)` says of a model of your own what this page says of these.

{counts}
"""


_EXACT = (
    "By: *shard_batch* is of models whose batches can be split by hand, and by `hf.parallelize` as well; "
    "*hf.parallelize* of those that need its hooks.\n"
    "Loss: *exact* is the model's own, added over ranks; *none* is of models that have no loss of such "
    "labels. The others are to be computed on every rank from outputs that "
    "`ContextParallel.unshard(x, grad='slice')` puts together.\n"
    "Releases: these three columns are of the newest release on which a class is exact; the last ones say what "
    "became of it on each, and what is otherwise there. `-` is of releases that have no such class."
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
    kind: str = ""

    @property
    def release(self) -> str:
        """Version without its last number, as ``5.23``."""
        return self.version.rpartition(".")[0]

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


def written(results: Iterable[Result]) -> str:
    """Return lines of JSON, in the order of releases, types and names."""
    ordered = sorted(results, key=lambda x: (_number(x.release), x.model_type, x.name))
    return "".join(json.dumps(asdict(x)) + "\n" for x in ordered)


def of_release(results: Iterable[Result], version: str) -> dict[str, Result]:
    """Return results of a version's release by name; of the newest where there are none of it."""
    by_name: defaultdict[str, dict[str, Result]] = defaultdict(dict)
    for result in results:
        by_name[result.release][result.name] = result
    return by_name.get(version.rpartition(".")[0]) or by_name[max(by_name, key=_number)]


def rendered(results: list[Result]) -> str:
    """The page."""
    releases = sorted({x.release for x in results}, key=_number)
    by_model: dict[tuple[str, str], dict[str, Result]] = {}
    for result in sorted(results, key=lambda x: (x.model_type, x.name)):
        by_model.setdefault((result.model_type, result.name), {})[result.release] = result
    exact: list[dict[str, Result]] = []
    refused: list[dict[str, Result]] = []
    without: list[dict[str, Result]] = []
    unlike: list[dict[str, Result]] = []
    for by_release in by_model.values():
        newest = by_release[max(by_release, key=_number)]
        if any(x.result == "exact" for x in by_release.values()):
            exact.append(by_release)
        elif newest.result != "refused":
            unlike.append(by_release)
        else:
            (without if "has no sequence of tokens" in newest.reason else refused).append(
                by_release
            )
    sums = " ".join(
        _sum([by_release[r] for by_release in by_model.values() if r in by_release], r)
        for r in releases
    )
    newest_exact = [x for x in results if x.release == releases[-1] and x.result == "exact"]
    return "\n".join(
        [
            _TOP.format(sums=sums, counts=_counts(newest_exact, releases[-1])),
            "## Exact",
            "",
            _EXACT,
            "",
            *_table(
                ("class", "by", "loss", "images", *releases), (_row(x, releases) for x in exact)
            ),
            "",
            "## Refused",
            "",
            *_table(("class", "releases", "why"), (_reason(x, releases) for x in refused)),
            "",
            "## Refused: no sequence of tokens",
            "",
            ", ".join(f"`{_newest(x).name}`" for x in without),
            "",
            "## Not run",
            "",
            "The small config does not build these, or the whole model does not run on tokens alone.",
            "",
            *_table(("class", "releases", "why"), (_reason(x, releases) for x in unlike)),
            "",
        ]
    )


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _newest(by_release: dict[str, Result]) -> Result:
    return by_release[max(by_release, key=_number)]


def _sum(results: list[Result], release: str) -> str:
    counts = Counter(x.result for x in results)
    other_count = len(results) - counts["exact"] - counts["refused"]
    return (
        f"Of {len(results)} classes of models of transformers {release} {counts['exact']} are exact on a "
        f"ring, {counts['refused']} are refused by name, and {other_count} are not run."
    )


def _row(by_release: dict[str, Result], releases: list[str]) -> tuple[str, ...]:
    """A class that is exact: what is so on the newest release where it is, and on each."""
    best = _newest({release: x for release, x in by_release.items() if x.result == "exact"})
    cells = (_cell(by_release.get(release), best) for release in releases)
    return (best.name, best.by, _loss(best), _images(best), *cells)


def _cell(result: Result | None, best: Result) -> str:
    """What became of a class on one release, where it is other than on the best."""
    if result is None:
        return "-"
    if result.result != "exact":
        return result.result
    pairs = {
        "loss": (_loss(result), _loss(best)), "images": (_images(result), _images(best)),
        "by": (result.by, best.by), "padding": (_padding(result), _padding(best)),
    }  # fmt: skip
    unlike = [f"{name}: {value}" for name, (value, two) in pairs.items() if value != two]
    return "; ".join(["exact", *unlike])


def _reason(by_release: dict[str, Result], releases: list[str]) -> tuple[str, ...]:
    newest = _newest(by_release)
    why = _why(newest)
    present = (
        "all" if len(by_release) == len(releases) else ", ".join(sorted(by_release, key=_number))
    )
    return (newest.name, present, why if newest.result == "refused" else f"{newest.result}: {why}")


def _counts(exact: list[Result], release: str) -> str:
    """How many types of each kind are exact."""
    rows = [
        f"{len({x.model_type for x in exact if x.kind == kind})} types of {words}"
        for kind, words in KINDS.items()
    ]
    images = sum(x.images == "exact" for x in exact)
    return f"Exact on {release} are {', '.join(rows)}; {images} classes with images among their tokens."


def _images(result: Result) -> str:
    if result.images in ("exact", "none"):
        return result.images
    return "refused" if result.images.startswith("refused") else "not run"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for name, *texts in rows:
        yield f"| `{name}` | {' | '.join(texts)} |"


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
