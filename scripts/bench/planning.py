"""Measure how long the host needs to plan attention, for several numbers of tokens, documents and ranks.

    python -m scripts.bench.planning

No GPU is required. The script plans both passes of one rank for a new random mask, as every training step does. Planning has
four parts: layouts, schedules, intervals of local steps, and work tiles of the Hopper kernels. The work tiles are for 16 heads
with head dim 128 and 132 SMs. The table contains medians of the CPU time, because other processes may slow down the machine.

The script prints a table and writes its rows as JSON. With --earlier and the JSON file of another commit, the table also
contains the times of that commit.
"""

import argparse
import datetime
import gc
import json
import platform
import random
import re
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringattn import Mask, balanced_layout
from ringattn.planning.cost_model import interconnect
from ringattn.planning.rank_plan import get_plan
from ringattn.planning.workload import backward_work, forward_work
from scripts import command
from scripts.tables import markdown_table

HEADS, HEAD_DIM, PROGRAMS = 16, 128, 132
PARTS = "layout", "schedules", "intervals", "tables"


def random_mask(seq_len: int, documents: int, seed: int) -> Mask:
    """Return a mask whose window exceeds the sequence. The window differs for each seed, so that no plan comes from a cache."""
    starts = sorted(random.Random(seed).sample(range(1, seq_len), documents - 1))
    lengths = [end - start for start, end in pairwise([0, *starts, seq_len])]
    return Mask.causal(window=seq_len + seed, documents=lengths)


def plan(seq_len: int, documents: int, ranks: int, seed: int) -> dict[str, float]:
    """Plan attention for rank `ranks // 2`. Return the seconds of each part."""
    mask, rank, times = random_mask(seq_len, documents, seed), ranks // 2, [time.process_time()]
    layout = balanced_layout(mask, seq_len, ranks)
    times.append(time.process_time())
    ahead = get_plan(mask, layout, rank, torch.device("cpu"))
    q = torch.empty(1, layout.rows(rank), HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    forward, backward = (
        ahead.choose_schedule("auto", x(q, q, q), interconnect("nvlink")) for x in (forward_work, backward_work)
    )
    schedules = ahead.schedule(forward, forward == "state", all_pairs=True), ahead.schedule(backward, True, all_pairs=True)
    times.append(time.process_time())
    pairs = [ahead.block_pairs(*x).values() for x in zip((forward, backward), schedules, strict=True)]
    transposed = [pair.intervals.transposed for pair in pairs[1]]
    times.append(time.process_time())
    for pair in pairs[0]:
        pair.intervals.work_tiles(128, 128, 1, HEADS, 1, PROGRAMS, skip_empty=True)
    for intervals in transposed:
        intervals.work_tiles(128, 64, 1, HEADS, 4, PROGRAMS, skip_empty=True, group=1)
    times.append(time.process_time())
    return dict(zip(PARTS, (after - before for before, after in pairwise(times)), strict=True))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seq_len in args.tokens:
        for documents in args.documents:
            for ranks in args.ranks:
                plan(seq_len, documents, ranks, args.rounds)  # fills the caches that do not depend on the mask
                rounds = [plan(seq_len, documents, ranks, seed) for seed in range(args.rounds)]
                total = statistics.median(sum(x.values()) for x in rounds)
                parts = {part: 1e3 * statistics.median(x[part] for x in rounds) for part in PARTS}
                rows.append({"tokens": seq_len, "documents": documents, "ranks": ranks, **parts, "total": 1e3 * total})
    return rows


def table(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> str:
    known = {(x["tokens"], x["documents"], x["ranks"]): x["total"] for x in earlier}
    cells = []
    for row in rows:
        case = row["tokens"], row["documents"], row["ranks"]
        before = f"{known[case]:,.1f}" if case in known else "-"
        cells.append((*(f"{x:,}" for x in case), *(f"{row[part]:.1f}" for part in PARTS), f"{row['total']:.1f}", before))
    return markdown_table(f"tokens | documents | ranks | {' | '.join(PARTS)} | total, ms | total before, ms", cells)


def machine() -> str:
    try:
        name = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, TypeError):
        name = platform.machine()
    return f"one core of {name}, torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}"


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    counts = {"tokens": [32768, 131072, 1048576], "documents": [1, 9, 1000], "ranks": [1, 4, 8, 64]}
    for name, default in counts.items():
        text = f"default: {' '.join(map(str, default))}"
        parser.add_argument(f"--{name}", nargs="+", type=command.at_least(1), default=default, help=text)
    parser.add_argument("--rounds", type=command.at_least(1), default=5, help="rounds of timing; default: 5")
    parser.add_argument("--earlier", type=Path, help="rows of an earlier commit, as JSON")
    parser.add_argument("--output", type=Path, default=command.RESULTS / "planning.json", help="where to write the rows")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = measure(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows))
    earlier = json.loads(args.earlier.read_text()) if args.earlier else []
    print(f"{datetime.date.today()}, {machine()}\n\n{table(rows, earlier)}")
    return 0


if __name__ == "__main__":
    # As in training, exclude the objects of imported modules from garbage collection.
    gc.freeze()
    sys.exit(main(sys.argv[1:]))
