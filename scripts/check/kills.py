"""Check that a training run survives `kill -9` at random moments.

    python -m scripts.check.kills --kills 100 --seed 1

The script first trains a reference run without interruptions. Every further run is killed and restarted `--kills-per-run`
times. A kill comes at a random moment, during a save, or during an evaluation. At the end of a run, the script compares its
results with the reference. Runs are killed and restarted in five ways:

    worker         one worker is killed; torchrun ends the run, and the same command is launched again
    torchrun       torchrun is killed; the workers must notice it and end, and the same command is launched again
    restart        one worker is killed, and torchrun restarts all workers (--max-restarts)
    two launchers  like "restart", with two torchruns that each start half of the workers
    fork           all ranks are killed, and the same command is launched again. The ranks are forked from this script instead
                   of started by torchrun. Forked ranks start within a second.

Every run must take the same steps as the reference, with equal losses in all steps and evaluations. The last checkpoint must
contain the same bytes as the last checkpoint of the reference. After a kill, a run must resume from its newest complete
checkpoint. All processes of a run must have ended 60 seconds after the end of the run. The exit status is 1 if any run fails a
check.
"""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.train.commands import run as command_line
from ringattn.train.reports import metrics
from scripts import command

WAYS = ("worker", "torchrun", "restart", "two launchers", "fork")
STEPS = 120
EVAL_EVERY = 10  # steps
# The moments at which the script kills a run, and their probabilities.
MOMENTS = {"at a random moment": 0.4, "inside a save": 0.3, "inside an evaluation": 0.3}
# The time limit of a launch, in seconds.
TIMEOUT = 900
# All processes must end within MAX_SECONDS_LEFT seconds after torchrun.
MAX_SECONDS_LEFT = 60
# The name of an environment variable that marks all processes of a run.
MARKER = "RINGATTN_CHECK_KILLS"
SETTINGS = (
    *("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=1", "data=text", "data.seq_len=64"),
    *("data.eval_fraction=0.1", f"trainer.eval_every={EVAL_EVERY}", "trainer.eval_tokens=4096"),
    *("trainer.batch_size=2", f"trainer.steps={STEPS}", "trainer.checkpoint_every=7"),
    *("trainer.log_every=1000", "trainer.sample_tokens=0", "trainer.device=cpu", "logger=off"),
)


class ForkedRank:
    """A fork of this process that trains as one rank. The class has the interface of subprocess.Popen."""

    def __init__(self, arguments: list[str], folder: Path, log: Path, **variables: str) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                for stream in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
                os.environ |= variables
                sys.argv = arguments
                command_line.main()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@dataclass
class Run:
    folder: Path  # the working directory, in which the run writes outputs/<name>
    name: str
    way: str
    ranks: int = 2
    settings: tuple[str, ...] = ()
    store: dist.TCPStore | None = None  # of the latest launch, unless torchrun serves it

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def launch(self) -> list[subprocess.Popen[bytes] | ForkedRank]:
        """Start the run in the background, and return the processes of torchrun or of the forked ranks."""
        script = [
            str(command.ROOT / "train" / "run.py"),
            *SETTINGS,
            *self.settings,
            f"data.path={self.folder}/corpus/*.txt",
            f"name={self.name}",
        ]
        if self.way == "fork":
            self.store = store = command.serve_store()
            variables = [command.rank_variables(store, rank, self.ranks) for rank in range(self.ranks)]
            return [ForkedRank(script, self.folder, self.log, **each) for each in variables]
        restarts = ["--max-restarts=1000"] if self.way in ("restart", "two launchers") else []
        if self.way == "two launchers":
            self.store = command.serve_store()
            rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}", f"--rdzv-id={self.name}"]
            rendezvous += ["--rdzv-conf=is_host=false", "--local-addr=127.0.0.1"]
            options, launchers = ["--nnodes=2", f"--nproc_per_node={self.ranks // 2}", *rendezvous, *restarts], 2
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *script]
        else:
            torchrun, launchers = command.torchrun(self.ranks, *restarts, *script), 1
        environment = command.child_environment(OMP_NUM_THREADS="1") | {MARKER: str(self.directory)}
        # The workers of a launcher use one thread per core, so the launchers must not use the same cores.
        cores = sorted(os.sched_getaffinity(0))
        take_cores = [partial(os.sched_setaffinity, 0, cores[i::launchers] or cores) for i in range(launchers)]
        with open(self.log, "a") as log:
            return [
                subprocess.Popen(torchrun, cwd=self.folder, env=environment, stdout=log, stderr=log, preexec_fn=take)
                for take in take_cores
            ]

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_member = f"{MARKER}={self.directory}".encode() in (path / "environ").read_bytes().split(b"\0")
                is_dead = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:  # the process has ended, or it belongs to another user
                continue
            if is_member and not is_dead:
                found.append(int(path.name))
        return found

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "checkpoints").glob("step_*"))


def wait(launchers: list[subprocess.Popen[bytes] | ForkedRank], run: Run) -> bool:
    """Wait until all launchers have ended. Return whether all launchers have exited with status 0."""
    deadline = time.monotonic() + TIMEOUT
    while any(launcher.poll() is None for launcher in launchers):
        if time.monotonic() > deadline:
            raise AssertionError(f"the run has not ended after {TIMEOUT} s, see {run.log}")
        time.sleep(0.05)
    return all(launcher.returncode == 0 for launcher in launchers)


def wait_for_moment(
    run: Run, launchers: list[subprocess.Popen[bytes] | ForkedRank], rng: random.Random, seconds: float, moment: str
) -> None:
    """Wait until `moment`, one of MOMENTS, or until the run ends."""
    start = time.monotonic()
    delay, number = rng.uniform(0.0, seconds), rng.randint(1, 5)
    seen: set[str] = set()
    while any(launcher.poll() is None for launcher in launchers):
        if moment == "at a random moment":
            if time.monotonic() - start > delay:
                return
            time.sleep(0.05)
            continue
        if not (run.directory / "metrics.jsonl").exists():  # the run has not taken its first step
            time.sleep(0.05)
            continue
        seen |= saves(run) if moment == "inside a save" else evaluations(run)
        if len(seen) >= number:
            return
        time.sleep(0.001)


def saves(run: Run) -> set[str]:
    return {path.name for path in (run.directory / "checkpoints").glob(".step_*.tmp")}


def evaluations(run: Run) -> set[str]:
    """Return the step of an unfinished evaluation, if any."""
    *_, last = [{"step": 1}, *metrics.read(run.directory / "metrics.jsonl")]
    return {str(last["step"])} if last["step"] % EVAL_EVERY == 0 and "eval_loss" not in last else set()


def kill_one(run: Run, launchers: list[subprocess.Popen[bytes] | ForkedRank], rng: random.Random) -> bool:
    """Kill the processes that `run.way` selects. Return False if the processes have already ended."""
    torchruns = {launcher.pid for launcher in launchers}
    workers = [pid for pid in run.processes() if pid not in torchruns]
    targets = sorted(torchruns) if run.way in ("torchrun", "fork") else sorted(workers)
    if not targets or all(launcher.poll() is not None for launcher in launchers):
        return False
    try:
        for target in targets if run.way == "fork" else [rng.choice(targets)]:
            os.kill(target, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def check_resumed_steps(run: Run, log: str, newest: str | None) -> None:
    resumed = re.search(r"^resumed +\S*/(step_\d{8})", log, re.MULTILINE)
    if resumed and newest and resumed[1] < newest:
        raise AssertionError(f"the run resumed from {resumed[1]} although {newest} was complete, see {run.log}")
    if newest and not resumed and "step" in log:
        raise AssertionError(f"the run started again although {newest} was complete, see {run.log}")


def check_no_process_left(run: Run) -> float:
    start = time.monotonic()
    while left := run.processes():
        if time.monotonic() - start > MAX_SECONDS_LEFT:
            raise AssertionError(f"processes {left} are left {MAX_SECONDS_LEFT} s after the launcher has ended, see {run.log}")
        time.sleep(0.05)
    return time.monotonic() - start


def results(run: Run) -> tuple[list[Any], dict[str, str]]:
    records = metrics.read(run.directory / "metrics.jsonl")
    last = run.directory / "checkpoints" / run.checkpoints()[-1]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*.distcp"))}
    names = ("step", "loss", "grad_norm", "lr", "eval_loss")
    return [[record.get(name) for name in names] for record in records], files


def run_with_kills(run: Run, kills: int, rng: random.Random, seconds: float, counts: dict[str, float]) -> None:
    launchers, done, newest = run.launch(), 0, None
    position = 0
    while done < kills:
        (moment,) = rng.choices(list(MOMENTS), list(MOMENTS.values()))
        wait_for_moment(run, launchers, rng, seconds, moment)
        before = run.checkpoints()
        if not kill_one(run, launchers, rng):
            break  # the run has finished before the next kill
        done += 1
        counts[run.way] += 1
        counts[moment] += 1
        if run.way in ("worker", "torchrun", "fork"):
            wait(launchers, run)
            counts["longest wait for processes, s"] = max(counts["longest wait for processes, s"], check_no_process_left(run))
            newest = max([*before, *run.checkpoints()], default=None)
            position = len(run.log.read_text())
            launchers = run.launch()
    if not wait(launchers, run):
        raise AssertionError(f"the run did not finish, see {run.log}")
    check_no_process_left(run)
    log = run.log.read_text()
    check_resumed_steps(run, log[position:], newest)
    if run.way in ("restart", "two launchers"):
        counts["restarts by torchrun"] += done


def write_corpus(directory: Path) -> str:
    directory.mkdir(parents=True)
    for i in range(40):
        (directory / f"{i:02}.txt").write_text(
            " ".join(f"{n} is {n % (i + 2)} more than a multiple of {i + 2}." for n in range(30))
        )
    return f"{directory}/*.txt"


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("--kills", type=command.at_least(1), default=20, help="how many kills (default: 20)")
    parser.add_argument("--kills-per-run", type=command.at_least(1), default=3, help="most kills per run (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and the victims (default: 0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways to kill and restart (default: all)")
    parser.add_argument("--ranks", type=command.at_least(1), default=2, help="ranks per run (default: 2)")
    parser.add_argument("--settings", nargs="+", default=(), help="more settings, such as trainer.device=cuda")
    args = parser.parse_args(argv)
    options = args.ranks, tuple(args.settings)
    folder = Path(tempfile.mkdtemp(prefix="ringattn-kills-"))
    write_corpus(folder / "corpus")
    # The first launch fills the cache of tokens. Time the second launch, which takes as long as later launches.
    for name in ("warm-up", "reference"):
        start, reference = time.monotonic(), Run(folder, name, args.ways[0], *options)
        if not wait(reference.launch(), reference):
            print(f"the run without kills failed, see {reference.log}", file=sys.stderr)
            return 1
    seconds, expected = time.monotonic() - start, results(reference)
    rng, number = random.Random(args.seed), 0
    counts: dict[str, float] = defaultdict(int)
    while sum(counts[way] for way in WAYS) < args.kills:
        number += 1
        run = Run(folder, f"run{number}", args.ways[number % len(args.ways)], *options)
        kills = min(rng.randint(1, args.kills_per_run), args.kills - sum(counts[way] for way in WAYS))
        try:
            run_with_kills(run, kills, rng, seconds, counts)
            if results(run) != expected:
                raise AssertionError(f"the losses or the last checkpoint differ from {reference.directory}")
        except AssertionError as error:
            print(f"{run.directory} ({run.way}): {error}", file=sys.stderr)
            return 1
        total = sum(counts[way] for way in WAYS)
        print(f"{run.name}: {run.way}, {total} of {args.kills} kills, the result equals the reference", flush=True)
    print(", ".join(f"{name}: {count:.3g}" for name, count in counts.items()))
    shutil.rmtree(folder)  # if a check fails, the logs of the runs are kept
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
