"""Check that a flipped bit in a checkpoint never changes a training run silently.

    python -m scripts.check.bit_flips --flips 300 --seed 1

Two ranks train a few steps and save a checkpoint. Then the script flips one random bit in a copy of the checkpoint, and resumes
the run from the copy. A run passes if it reports the damage in one line and leaves the checkpoint unchanged. If a run reports
no damage, its losses and tensors must equal those of a run from the original checkpoint. The exit status is 1 if any resumed
run fails.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ringattn.train.commands import run
from ringattn.train.reports import metrics
from scripts import command
from scripts.check.kills import write_corpus

SETTINGS = (
    *("model.layers=1", "model.dim=8", "model.heads=2", "model.kv_heads=1", "data=text", "data.seq_len=32", "logger=off"),
    *("data.eval_fraction=0", "trainer.batch_size=1", "trainer.sample_tokens=0", "trainer.device=cpu"),
)
STEPS = 2  # the steps of the checkpoint
KINDS = {"shards": "*.distcp", "meta.json": "meta.json", "index": ".metadata"}


def train(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run the training command in a fork of this process. Return the exit status and the output."""
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            # Undo pytest's redirection of sys.stdout and sys.stderr.
            streams = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115 - until exec or exit
            sys.stdout, sys.stderr = streams
            sys.argv = ["train/run.py", *arguments, f"hydra.run.dir={directory}"]
            patch("matplotlib.figure.Figure.savefig").start()  # the plots would take most of the time
            run.main()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, output.read().decode(errors="replace")


def resume(checkpoint: Path, directory: Path) -> tuple[int, str]:
    return train(directory, f"trainer.steps={STEPS + 2}", f"trainer.resume={checkpoint}")


def results(directory: Path) -> tuple[list[Any], dict[str, str]]:
    records = metrics.read(directory / "metrics.jsonl")
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records], checksums(
        directory / "checkpoints" / f"step_{STEPS + 2:08d}", "*.distcp"
    )


def checksums(checkpoint: Path, pattern: str = "*") -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(checkpoint.glob(pattern))}


def flip(checkpoint: Path, kind: str, rng: random.Random) -> str:
    files = sorted(checkpoint.glob(KINDS[kind]))
    (file,) = rng.choices(files, [path.stat().st_size for path in files])
    content = bytearray(file.read_bytes())
    position = rng.randrange(8 * len(content))
    content[position // 8] ^= 1 << position % 8
    file.write_bytes(content)
    return f"bit {position % 8} of byte {position // 8} of {file.name}"


def effect(original: Path, directory: Path, kind: str, rng: random.Random, expected: tuple[list[Any], dict[str, str]]) -> str:
    """Resume from a copy of a checkpoint with a flipped bit. Return "reported" or "without effect"."""
    checkpoint = directory / "checkpoints" / original.name
    shutil.copytree(original, checkpoint)
    position = flip(checkpoint, kind, rng)
    before = checksums(checkpoint)
    status, output = resume(checkpoint, directory)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if status == 1 and len(errors) == 1 and str(checkpoint) in errors[0] and "Traceback" not in output:
        if checksums(checkpoint) != before:
            raise AssertionError(f"{position}: the launch has changed {checkpoint}")
        return "reported"
    if status != 0:
        raise AssertionError(f"{position}: the launch failed without a message of one line:\n{output}")
    if results(directory) != expected:
        raise AssertionError(f"{position}: silent change of the run in {directory}")
    return "without effect"


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("--flips", type=command.at_least(1), default=30, help="how many bits to flip (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the positions (default: 0)")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="ringattn-bit-flips-"))
    os.environ["HF_HOME"] = str(folder / "cache")
    settings = [*SETTINGS, f"data.path={write_corpus(folder / 'corpus')}", f"trainer.steps={STEPS}"]
    script = [str(command.ROOT / "train" / "run.py"), *settings, f"hydra.run.dir={folder}/original"]
    subprocess.run(command.torchrun(2, *script), check=True, env=command.child_environment(), stdout=subprocess.DEVNULL)
    (original,) = (folder / "original" / "checkpoints").iterdir()
    reference = folder / "reference"
    shutil.copytree(original, reference / "checkpoints" / original.name)
    status, output = resume(reference / "checkpoints" / original.name, reference)
    if status != 0:
        print(f"the run without a flip failed:\n{output}", file=sys.stderr)
        return 1
    expected, rng, counts, failures = results(reference), random.Random(args.seed), Counter(), 0
    for number in range(args.flips):
        kind = list(KINDS)[number % len(KINDS)]
        try:
            counts[kind, effect(original, folder / f"run{number}", kind, rng, expected)] += 1
            shutil.rmtree(folder / f"run{number}")
        except AssertionError as error:
            print(error, file=sys.stderr)
            failures += 1
    for (kind, result), count in sorted(counts.items()):
        print(f"{kind}: {count} {result}")
    print(f"{args.flips} flips, {failures} failures")
    if not failures:
        shutil.rmtree(folder)  # if a flip fails the check, the runs are kept
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
