"""Tables of what was measured, as docs show them: ``--table FILE`` of any benchmark prints one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.common.cases import OURS, PASSES

Row = dict[str, Any]
ALONE = "/alone"  # in a method's name: without its communication


def table(rows: Sequence[Row]) -> str:
    """The table of a benchmark's rows: their keys tell whose they are."""
    for key, (head, cells_of) in KINDS.items():
        if key in rows[0]:
            return markdown(head, map(cells_of, rows))
    return scaling(rows)


def markdown(head: str, lines: Iterable[Sequence[str]]) -> str:
    """A head, and lines of cells."""
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(f"| {' | '.join(cells)} |" for cells in lines)])


def scaling(rows: Sequence[Row]) -> str:
    """TFLOP/s per GPU, and scaling efficiency: that over one GPU's on the same sequence.

    Forward, then forward + backward. What one GPU was not asked to do alone is compared with its
    rate at 128k tokens. Where a method was timed without its communication, too, the share of
    exposed communication follows, of either.
    """
    head = "| GPUs | mask, length, heads | method |"
    head += " forward | scaling efficiency | forward + backward | scaling efficiency | GiB |"
    exposed = _exposed(rows)
    one = {(row["gpus"], row["setting"]): row for row in rows if row["method"] == "one"}
    lines = (_line(row, one, exposed) for row in rows)
    return markdown(head + " exposed communication |" * bool(exposed), lines)


def _line(row: Row, one: dict[Any, Row], exposed: dict[Any, str]) -> list[str]:
    cells = [str(row["gpus"]), row["setting"], f"`{row['method']}`"]
    if "forward" not in row:
        return [*cells, "refused or wrong" + " |" * (4 + bool(exposed))]
    mask, _, heads = row["setting"].split()
    shorter = one.get((row["gpus"], f"{mask} 128k {heads}"))
    base = one.get((row["gpus"], row["setting"]), shorter)
    for way in PASSES:
        rate = row[way]["tflops"]
        over = f"{rate / base[way]['tflops']:.2f}" if base and "forward" in base else ""
        cells += [f"{rate:.0f}", over]
    cells.append(f"{row['both']['peak_gib']:.2f}")
    return [*cells, exposed.get(_key(row), "")] if exposed else cells


def _key(row: Row) -> tuple[int, str, str]:
    return row["gpus"], row["setting"], row["method"]


def _exposed(rows: Sequence[Row]) -> dict[tuple[int, str, str], str]:
    """Shares of the time, forward and forward + backward, of rows timed ``alone``, too."""
    timed = {_key(row): row for row in rows if "forward" in row}
    found = {}
    for (gpus, setting, name), without in timed.items():
        key = (gpus, setting, name.replace(ALONE, ""))
        if ALONE in name and key in timed:
            shares = (1 - without[way]["ms"] / timed[key][way]["ms"] for way in PASSES)
            found[key] = " / ".join(f"{share:.2f}" for share in shares)
    return found


def summary(rows: Sequence[Row], settings: Sequence[str], methods: Sequence[str]) -> str:
    """TFLOP/s per GPU, forward / forward + backward, a line per setting."""
    by_name = {(row["setting"], row["method"]): row for row in rows}
    head = f"| mask, length, heads | {' | '.join(f'`{name}`' for name in methods)} |"
    lines = (
        [setting, *(" / ".join(f"{by_name[setting, name][way]['tflops']:.0f}" for way in PASSES)
                    for name in methods)]
        for setting in settings
    )  # fmt: skip
    return markdown(head, lines)


OPTIONS = "| | ours | forward, ms | others | ours to the best | forward + backward, ms | others | ours to the best | goal | met |"


def _options(row: Row) -> list[str]:
    """Milliseconds of ours and of the others, and the ratio to the best of these."""
    met = ["yes" if row["met"][way] else "no" for way in PASSES if way in row["met"]]
    return [
        row["row"], f"`{row['kernel']}`",
        *(cell for way in PASSES for cell in _beside_others(row, way)),
        "" if row["goal"] is None else f"{row['goal']:.2f}",
        ", ".join(dict.fromkeys(met) if len(set(met)) == 1 else met),
    ]  # fmt: skip


def _beside_others(row: Row, way: str) -> Iterator[str]:
    """Ours, each of the others, and the quartiles of the ratio to the best of them."""
    took = row["milliseconds"][way]
    others = (
        f"{name} {took[name][1]:.2f}" if name in took else f"{name} none"
        for name in row["error"] if name != OURS
    )  # fmt: skip
    yield f"{took[OURS][1]:.2f}" if OURS in took else "none"
    yield "<br>".join(others)
    yield _spread(row["ratio"][way].get(row["best"][way]))


def _spread(ratio: Sequence[float] | None) -> str:
    return "" if ratio is None else "{:.2f} **{:.2f}** {:.2f}".format(*ratio)


JAX_OPTIONS = "| | ours | forward, ms | `triton` | cuDNN | ours to cuDNN | forward + backward, ms | `triton` | cuDNN | ours to cuDNN |"


def _jax_options(row: Row) -> list[str]:
    """Milliseconds of ours and of the others, and the ratio to cuDNN."""
    cells = [row["setting"], f"`{row['kernel']}`"]
    for way in PASSES:
        took, names = row["milliseconds"][way], (OURS, "triton", "cudnn")
        cells += [f"{took[name][1]:.3g}" if name in took else "none" for name in names]
        cells.append(_spread(row["ratio"][way].get("cudnn")))
    return cells


JAX_ONE_GPU = "| tokens | forward | cuDNN | | forward + backward | cuDNN | |"


def _jax_one_gpu(row: Row) -> list[str]:
    """Ours beside cuDNN's, TFLOP/s and their ratio."""
    mask = "causal" if row["causal"] else "full"
    mask = f"window {row['window']:,}" if "window" in row else mask
    cells = [f"{row['length']:,} {mask}"]
    for way in PASSES:
        ours, theirs = row["triton"][way], row["cudnn"][way]
        cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
    return cells


JAX_RANKS = "| ranks | tokens | strategy | forward, ms | scaling efficiency | forward + backward, ms | scaling efficiency |"


def _jax_ranks(row: Row) -> list[str]:
    """Of ranks that one GPU emulated the slowest."""
    cells = [f"{row['ranks']}", f"{row['length']:,}", f"`{row['strategy']}`"]
    for way in PASSES:
        cells += [f"{max(row[f'ms {way}'].values()):.2f}", f"{row[f'efficiency {way}']:.2f}"]
    return cells


#: Heads and lines, of rows that have a key and none of those before it; others are of scaling.
KINDS: dict[str, tuple[str, Callable[[Row], list[str]]]] = {
    "row": (OPTIONS, _options),
    "milliseconds": (JAX_OPTIONS, _jax_options),
    "ranks": (JAX_RANKS, _jax_ranks),
    "causal": (JAX_ONE_GPU, _jax_one_gpu),
}
