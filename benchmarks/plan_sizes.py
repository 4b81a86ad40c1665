"""Objects, bytes between ranks and balance of a save, planned for large models on many ranks, without saving.

    python -m benchmarks.plan_sizes                   1B, 8B and 70B with Adam on 8, 64 and 512 ranks, FSDP
    python -m benchmarks.plan_sizes --layout hsdp-tp  other layouts: see ``LAYOUTS`` in tests/harness/large_models.py

Prints a row for each model and number of ranks, with and without merging of small pieces.
"""

from __future__ import annotations

import argparse
import itertools
import time

from harness.large_models import LAYOUTS, MODELS, Case

from zarrckpt._plan.global_state import gather_state
from zarrckpt._plan.plan import PlanOptions, Sizes, plan_save
from zarrckpt._save.plan_report import report_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layout", default="fsdp", choices=LAYOUTS)
    parser.add_argument("--models", nargs="+", default=["1B", "8B", "70B"], choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    args = parser.parse_args()
    print("| model | ranks | merging | objects | moved between ranks | max/mean written | puts, $ | planning, s |")
    print("|---|---|---|---|---|---|---|---|")
    for model, ranks in itertools.product(args.models, args.ranks):
        gathered = Case(model, args.layout, ranks).descriptions()
        for name, least in (("no", 0), ("default", None)):
            began = time.process_time()
            plan = plan_save(gather_state(gathered), PlanOptions(sizes=Sizes(min_piece=least)))
            seconds = time.process_time() - began
            report = report_of(plan, range(ranks))
            moved = 100 * report.moved_bytes / report.nbytes
            print(
                f"| {model} | {ranks} | {name} | {report.objects:,} | {moved:.1f} % | {report.balance:.3f} | "
                f"{report.put_cost():.3f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
