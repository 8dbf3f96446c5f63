"""Compare the estimated memory and the predicted time of training steps with measurements.

    python -m scripts.bench.memory
    python -m scripts.bench.memory --cases '124m 65536 1' '1.4b 65536 2 parallel.ulysses=2'

Each case trains a few steps with one document per sequence. By default, the script skips cases that need more GPUs than this
machine has. The measured peak memory comes from torch's allocator. If a job fails, the table contains its error message. The
script writes README.md to --output.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts import command, gpus
from scripts.bench.training import run_job
from scripts.tables import markdown_table

CASES = (
    "52m 16384 1",
    "52m 32768 1",
    "52m 131072 1",
    "124m 32768 1",
    "124m 131072 1",
    "124m 262144 1",
    "350m 65536 1",
    "1.4b 16384 1",
    "124m 32768 1 memory.activations=recompute",
    "124m 32768 1 trainer.accumulate=2",
    "52m 32768 2",
    "52m 65536 2",
    "52m 65536 2 parallel.ring=1",
    "124m 131072 2",
    "1.4b 65536 2",
    "1.4b 65536 2 parallel.ulysses=2",
    "1.4b 131072 2 memory.activations=recompute",
    "qwen3-0.6b 65536 2",
    "8b 16384 2",
    "52m 131072 4",
    "1.4b 131072 4",
    "8b 32768 4",
    "8b 131072 4",
)
COLUMNS = (
    "model | tokens per sequence | GPUs | settings | estimated GiB | peak GiB | estimated / peak | predicted s/step | "
    "measured s/step | predicted / measured | date"
)
Row = dict[str, Any]


def job_command(case: str, steps: int, output: Path) -> list[str]:
    model, seq_len, ranks, *settings = case.split()
    settings += [
        "recipe=cpu",
        f"model={model}",
        f"data.seq_len={seq_len}",
        "data.mask_documents=false",
        "data.split=train",
        *command.ONLY_STEPS,
        f"trainer.steps={steps}",
        f"hydra.run.dir={output}",
    ]
    return command.torchrun(int(ranks), str(command.ROOT / "train" / "run.py"), *settings)


def measure(case: str, steps: int) -> Row:
    """Train one case in a subprocess. Return the run's summary with the predicted seconds per step, or {"failed": error
    message}.
    """
    summary, text = run_job(partial(job_command, case, steps))
    if "failed" in summary:
        return {"case": case} | summary
    predicted = re.search(r"^prediction +about (\S+) s per step", text, re.MULTILINE)
    return {"case": case, "predicted": float(predicted[1]) if predicted else None} | summary


def results_table(date: str, rows: list[Row]) -> str:
    lines = []
    for row in rows:
        model, seq_len, ranks, *settings = row["case"].split()
        cells = [model, f"{int(seq_len):,}", ranks, " ".join(f"`{setting}`" for setting in settings)]
        if "failed" in row:
            lines.append([*cells, f"failed: {row['failed']}", *[""] * 5, date])
            continue
        estimate, peak = row["estimated_memory_gib"], row["peak_memory_gib"]
        predicted, seconds = row["predicted"], row["seconds_per_step"]
        cells += [f"{estimate:.2f}", f"{peak:.2f}", f"{estimate / peak:.2f}"]
        cells += [
            f"{predicted:.3g}" if predicted else "-",
            f"{seconds:.3g}",
            f"{predicted / seconds:.2f}" if predicted else "-",
        ]
        lines.append([*cells, date])
    return markdown_table(COLUMNS, lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    count = torch.cuda.device_count()
    cases = [case for case in CASES if int(case.split()[2]) <= count]
    parser.add_argument("--cases", nargs="+", default=cases, help="model, tokens, GPUs and settings; default: see above")
    parser.add_argument("--steps", type=command.at_least(2), default=6, help="steps per job; default: 6")
    parser.add_argument("--output", type=Path, default=command.RESULTS / "memory", help="default: outputs/benchmarks/memory")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    ranks = max((int(case.split()[2]) for case in args.cases), default=1)
    gpus.require_gpus(ranks)
    header = command.describe_run("scripts.bench.memory", argv, gpus=ranks)
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in args.cases:
        rows.append(measure(case, args.steps))
        table = results_table(header["date"], rows)
        title = f"# Memory and time of training steps, {header['date']}"
        (args.output / "README.md").write_text(f"{title}\n\n{header['machine']}.\n\n    {header['command']}\n\n{table}")
        print(table.splitlines()[-1], flush=True)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
