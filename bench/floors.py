"""Times of a GPU run as shares of the memory's peak, from the JSON files of a results folder.

python bench/floors.py bench/results/device
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path


def lines(folder: Path) -> Iterator[str]:
    """One line for every row that was measured on a GPU whose peak is known."""
    for path in sorted(folder.glob("*.json")):
        for run in json.loads(path.read_text()):
            for row in run.get("rows", []):
                if row.get("hbm_share"):
                    share, median_ms = row["hbm_share"], row["median_ms"]
                    times = f"{median_ms:.3f} ms, floor {share * median_ms:.3f} ms"
                    yield f"{share:5.0%} of the memory's peak: {times}, {row['provider']}, {row['case']}"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit((__doc__ or "").strip())
    found = list(lines(Path(sys.argv[1])))
    print("\n".join(found) if found else "not measured on a GPU")


if __name__ == "__main__":
    main()
