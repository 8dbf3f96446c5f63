"""Measure the speed and the memory of preparing a text, and compare them with `datasets.map`.

    python -m scripts.bench.preparation --gb 1 --processes 1 8 16                    the speed
    python -m scripts.bench.preparation --gb 0.3 3 30 --processes 16 --only ours     the resident memory by size

The text is the source code of the installed packages as JSON lines, with log-normal document lengths. A BPE tokenizer with
--vocabulary tokens is trained on the text. The text is tokenised once into bytes and once with the BPE tokenizer. For
`datasets.map`, the script loads the file with `load_dataset` and encodes batches of 1,000 documents.

Times include the start of the processes. Memory is the peak of the summed proportional set sizes of all processes. The
proportional set size counts shared memory once, and leaves out the page cache. The column "opened" contains the time in which a
new process opens the folder and reads 65,536 tokens. Imports are not counted.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from scripts import command
from scripts.tables import markdown_table

SEQ_LEN = 65_536
MEAN_BYTES = 8.0, 1.2  # mean and standard deviation of the logarithm of the length of a document
SAMPLE_BYTES = 60 * 10**6  # of source code, from which the documents are cut

# By default, a small text uses fewer processes.
PREPARE = """
from ringattn.train.commands import prepare
from ringattn.train.data import workers
workers.MIN_BYTES = 1
prepare.main()
"""
MAP = """
import sys
import datasets, numpy as np
name, tokenizer, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
if tokenizer == "bytes":
    encode = lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]
else:
    from tokenizers import Tokenizer
    reader = Tokenizer.from_file(tokenizer)
    encode = lambda texts: [encoding.ids for encoding in reader.encode_batch(texts, add_special_tokens=False)]
rows = datasets.load_dataset("json", data_files=name, split="train")
rows.map(lambda batch: {"tokens": encode(batch["text"])}, batched=True, num_proc=processes, remove_columns=["text"])
"""
OPEN = f"""
import sys, time
from ringattn.train.data.packing import load
from ringattn.train.data.tokenizer import tokenizer_of
from ringattn.train.parallel.ranks import connect_ranks
from ringattn.train.settings.config import DataConfig
connect_ranks()
config = DataConfig(source="prepared", path=sys.argv[1], tokenizer=sys.argv[2], seq_len={SEQ_LEN}, eval_fraction=0.0)
begin = time.monotonic()
load(config, tokenizer_of(config)).batch([0])
print(time.monotonic() - begin)
"""


def source_code() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    random.Random(0).shuffle(files)
    texts, size = list[str](), 0
    for file in files:
        with suppress(OSError, UnicodeDecodeError):
            texts.append(file.read_text("utf-8"))
            size += len(texts[-1])
        if size > SAMPLE_BYTES:
            break
    return "\n".join(texts)


def write_lines(path: Path, size: int, sample: str) -> None:
    if path.exists():
        return
    generator, written = random.Random(size), 0
    with open(path.with_suffix(".partial"), "w") as file:
        while written < size:
            length = min(int(generator.lognormvariate(*MEAN_BYTES)), len(sample) // 2)
            start = generator.randrange(len(sample) - length)
            written += file.write(json.dumps({"text": sample[start : start + length]}) + "\n")
    path.with_suffix(".partial").replace(path)


def write_tokenizer(path: Path, vocabulary: int, sample: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if path.exists():
        return
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    parts = (sample[start : start + 10**5] for start in range(0, len(sample), 10**5))
    tokenizer.train_from_iterator(parts, trainer)
    tokenizer.save(str(path))


def memory_of(root: int) -> int:
    """Return the proportional set size (bytes) of a process and its descendants."""
    parents, found, added = dict[int, int](), set[int](), {root}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    while added:
        found |= added
        added = {process for process, parent in parents.items() if parent in added} - found
    return sum(map(_proportional_size, found))


def _proportional_size(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def run(arguments: list[str], cache: Path) -> tuple[float, float]:
    """Run a Python program with an empty cache of `datasets`. Return the seconds and the largest memory of the program in
    bytes.
    """
    shutil.rmtree(cache, ignore_errors=True)
    environment = command.child_environment(HF_HOME=str(cache), TOKENIZERS_PARALLELISM="false")
    begin, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]} has failed with exit status {process.returncode}")
    return seconds, peak


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    sample, cache = source_code(), folder / "cache"
    bpe = folder / f"bpe-{args.vocabulary}.json"
    if "bpe" in args.tokenizers:
        write_tokenizer(bpe, args.vocabulary, sample)
    for size, tokenizer, processes in product(args.gb, args.tokenizers, args.processes):
        lines = folder / f"{size}.jsonl"
        write_lines(lines, int(size * 1e9), sample)
        name = str(bpe) if tokenizer == "bpe" else "bytes"
        for program in args.only:
            shards, opened = folder / "shards", None
            shutil.rmtree(shards, ignore_errors=True)
            if program == "ours":
                settings = f"data.path={lines}", f"data.tokenizer={name}", f"data.num_proc={processes}"
                seconds, peak = run(["-c", PREPARE, f"output={shards}", "data=jsonl", *settings], cache)
                printed = subprocess.run(
                    [sys.executable, "-c", OPEN, str(shards), name],
                    env=command.child_environment(),
                    capture_output=True,
                    text=True,
                    check=True,
                )
                opened = float(printed.stdout)
            else:
                seconds, peak = run(["-c", MAP, str(lines), name, str(processes)], cache)
            speed = lines.stat().st_size / seconds / 1e6
            row = {"tokenizer": tokenizer, "GB": size, "processes": processes, "program": program, "seconds": seconds}
            yield row | {"MB/s": speed, "memory": peak, "opened": opened}
    shutil.rmtree(cache, ignore_errors=True)


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            *(row[name] for name in ("tokenizer", "GB", "processes", "program")),
            f"{row['seconds']:.1f}",
            f"{row['MB/s']:.1f}",
            f"{row['memory'] / 1e9:.2f}",
            "-" if row["opened"] is None else f"{row['opened']:.2f}",
        )
        for row in rows
    ]
    return markdown_table("tokenizer | text, GB | processes | program | seconds | MB/s | memory, GB | opened, s", cells)


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__ or "")
    parser.add_argument("--gb", nargs="+", type=float, default=[0.1], help="sizes of the text in GB; default: 0.1")
    parser.add_argument("--processes", nargs="+", type=command.at_least(1), default=[1, 2], help="default: 1 2")
    parser.add_argument("--tokenizers", nargs="+", choices=["bytes", "bpe"], default=["bytes", "bpe"])
    parser.add_argument("--vocabulary", type=command.at_least(300), default=128_000, help="of the BPE; default: 128,000")
    parser.add_argument("--only", nargs="+", choices=["ours", "map"], default=["ours", "map"], help="the programs")
    parser.add_argument("--folder", type=Path, default=command.RESULTS / "preparation", help="for texts, results and caches")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = list[dict[str, Any]]()
    for row in measure(args, args.folder):
        rows.append(row)
        print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
        (args.folder / "rows.json").write_text(json.dumps(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
