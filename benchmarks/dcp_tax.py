"""What spreading a sequence over ranks costs where one rank could do it all: long-llama, 32,000 tokens.

    python benchmarks/dcp_tax.py

Two ranks with a thread each, and four on as many cores as two, beside one rank with two threads, by
turns. Bounds: 1.1 and 1.35 times the step of one rank.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from kvspan.cli.main import main as kvspan

MODEL = Path(__file__).parent / "models" / "long-llama"
LAYOUTS = {
    "-tp 1 --num-threads 2": 1.0,
    "-tp 2 -dcp 2 --num-threads 1": 1.1,
    "-tp 4 -dcp 2 --num-threads 1": 1.35,
    "-tp 4 -dcp 4 --num-threads 1": 1.35,
}
"""Flags -> the most that its step may take, in steps of the first."""


def main() -> int:
    """Measures, and says which bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", default="32000")
    parser.add_argument("--batch", default="4")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--breakdown", action="store_true")
    asked = parser.parse_args()
    flags = [str(MODEL), "--load-format", "dummy", "--context", asked.context, "--batch", asked.batch]
    flags += ["--rounds", asked.rounds, *(["--breakdown"] if asked.breakdown else [])]
    flags += [part for layout in LAYOUTS for part in ("--layout", layout)]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        if code := kvspan(["bench", "decode", *flags, "--json", file.name]):
            return code
        results = json.loads(Path(file.name).read_text())["results"]
    for r in results:
        holds = r["worst_ratio"] <= LAYOUTS[r["layout"]]
        print(
            f"{r['layout']}: {r['worst_ratio']:.2f} at the worst, {LAYOUTS[r['layout']]} at most", holds
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
