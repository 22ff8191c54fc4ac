"""Try each option of Trainers and adapters on two ranks and on one, and record what comes of it.

Rows that the table has for the installed versions are not run again::

    nox -s sweep_options
    nox -s sweep_options -- --only LoraConfig peft --again
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

from tqdm import tqdm

from sweep_options.options import entries
from sweep_options.table import Pools, judged, read, written
from sweep_options.values import RESULTS


def main() -> int:
    """Run the chosen options, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="kinds, owners or names of options")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = read(options.results)
    pools = Pools()
    for entry in tqdm([*entries()], unit="option", file=sys.stdout, mininterval=5):
        is_chosen = not options.only or {*options.only} & {entry.kind, entry.owner, entry.option}
        row = rows.get(entry.key)
        if is_chosen and (options.again or row is None or row.is_bad):
            rows[entry.key] = row = judged(pools, entry, rows)
            if row.is_bad:
                tqdm.write(
                    f"{row.verdict.upper()} {row.owner}.{row.option}={row.value}: {row.reason}"
                )
            options.results.write_text(written(rows))
    pools.close()
    bad = [f"{x.owner}.{x.option}={x.value}" for x in rows.values() if x.is_bad]
    print(f"{len(rows)} options, {len(bad)} neither exact, refused nor without effect: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
