"""Compare zarrckpt with its peers and with the machine's limits, and write tables and a plot.

    python -m benchmarks                         all sets but dlio, about 1 GB: half an hour
    python -m benchmarks --only local s3         some of the sets
    python -m benchmarks --quick --only startup  small and rough, to check that it runs

Every ratio is taken within one run: the contenders take turns round by round, and the medians are compared. The tables
name peers that are not installed (``pip install 'zarrckpt[bench]'`` installs all).
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
from pathlib import Path

from benchmarks.measure import Options
from benchmarks.report import machine, markdown, write_page
from benchmarks.results import Results

SETS = {
    "local": "local",
    "s3": "s3",
    "streaming": "streaming",
    "reshard": "reshard",
    "planning": "planning",
    "async": "async_stall",
    "memory": "memory",
    "small-keys": "small_keys",
    "subchunks": "subchunks",
    "runs": "runs",
    "reuse": "reuse",
    "one-file": "one_file",
    "startup": "startup",
    "dlio": "dlio",
}
DEFAULT = [name for name in SETS if name != "dlio"]  # it needs packages that fit no extra
PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "speed.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SETS), default=DEFAULT, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--quick", action="store_true", help="a state of 20 MB, one round, small sizes elsewhere")
    parser.add_argument("--gigabytes", type=float, help="size of the state (default 1.0)")
    parser.add_argument("--rounds", type=int, help="rounds; the median is reported (default 5)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "mix"), default="float32")
    parser.add_argument("--folder", help="where files are written (default: a temporary folder)")
    parser.add_argument("--json", metavar="FILE", help="also write all measurements to this file")
    parser.add_argument(
        "--page", type=Path, help=f"the page to write (default: {PAGE.name}; none with --quick or --only)"
    )
    args = parser.parse_args()
    options = Options(
        gigabytes=args.gigabytes or (0.02 if args.quick else 1.0),
        rounds=args.rounds or (1 if args.quick else 5),
        dtype=args.dtype,
        folder=args.folder,
        quick=args.quick,
    )
    heading = f"{options.gigabytes:g} GB of {options.dtype}, median of {options.rounds}; {machine()}."
    results = Results()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and ranks end with this process
    for name in args.only:
        began = time.perf_counter()
        results.add(importlib.import_module(f"benchmarks.{SETS[name]}").run(options))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"machine": heading, **results.as_json()}, indent=1))
    print(markdown(results, heading))
    page = args.page or (None if args.quick or args.only != DEFAULT else PAGE)
    if page is not None:
        write_page(results, heading, page)


if __name__ == "__main__":
    main()
