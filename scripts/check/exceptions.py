"""Check that attention never hangs or returns wrong results if random ranks raise exceptions in random kernel calls.

    python -m scripts.check.exceptions --calls 1000 --ranks 2
    python -m scripts.check.exceptions --calls 1000 --ranks 4 --transport p2p

The script starts its own ranks, without torchrun. The ranks use the GPUs of the machine, or gloo on CPUs. Every rank calls the
state ring, the KV ring, Ulysses and decoding, forward and backward. There are four kinds of calls:

    no exception        the results must be exact
    same kernel         the same kernel raises an exception on all ranks; the next call must be exact
    different kernels   some kernel raises an exception on all ranks; the next call must be exact, but with gloo and NCCL,
                        every rank may instead raise a `RingFault`
    some ranks          only some ranks raise an exception; every rank must then raise a `RingFault` that names such a rank

Calls that end in a `RingFault` take several seconds, so the option `--faults` limits their number.

The script prints a table. The exit status is 1 after wrong numbers, a hanging rank, or a process that does not end.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import KVCache, Layout, Mask, decode_attention, flash_attention, ring_attention, ulysses_attention
from ringattn.comm import recovery, watchdog
from ringattn.comm.connect import Group, connect
from ringattn.comm.shared_gpus import SHARE_GPUS
from ringattn.comm.watchdog import RingFault
from ringattn.kernels import dispatch
from scripts import command
from scripts.accuracy import output_of
from scripts.gpus import new_group
from scripts.tables import markdown_table

OPERATIONS = "state", "kv", "ulysses", "decoding"
KINDS = NONE, SAME, DIFFERENT, SOME = "no exception", "same kernel", "different kernels", "some ranks"
HOP_TIMEOUT = 60  # seconds
# The largest accepted error, relative to the largest value. A message with wrong data would cause an error of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
MAX_SECONDS_LEFT = 60  # after the first rank has ended, all other ranks must end within this many seconds


class Injected(torch.OutOfMemoryError):
    """The exception that this script raises."""


class Injector:
    """Raise an exception in a selected kernel call of a rank.

    Args:
        state: an object whose attributes are the state of one rank.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    def arm(self, position: int | None, error: type[BaseException] = Injected) -> None:
        """Raise `error` in kernel call number `position`. The first number is 1."""
        self.state.count, self.state.position, self.state.error = 0, position, error

    @property
    def count(self) -> int:
        return self.state.count

    def wrap(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: object, **options: object) -> object:
            self.state.count = getattr(self.state, "count", 0) + 1
            if self.state.count == getattr(self.state, "position", None):
                raise self.state.error("injected")
            return kernel(*arguments, **options)

        return run

    @contextmanager
    def installed(self) -> Generator[None]:
        prepare, incremental = dispatch.prepare_decode, dispatch.IncrementalBackward
        names = "forward", "backward", "row_delta", "merge_states", "sum_partials", "merge_packed"
        wrapped = {name: self.wrap(getattr(dispatch, name)) for name in names}

        def prepare_wrapped(*arguments: Any, **options: Any) -> Callable[..., Any]:
            return self.wrap(prepare(*arguments, **options))

        wrapped["prepare_decode"] = prepare_wrapped
        methods = {name: self.wrap(getattr(incremental, name)) for name in ("add", "finish")}
        with ExitStack() as stack:
            for owner, functions in ((dispatch, wrapped), (incremental, methods)):
                for name, function in functions.items():
                    stack.enter_context(patch.object(owner, name, function))
            yield


class Problem:
    def __init__(self, operation: str, rank: int, ranks: int, device: torch.device, seed: int) -> None:
        self.operation, self.rank = operation, rank
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        seq_len, heads, dim = (256 * ranks, 2 * ranks, 64) if device.type == "cuda" else (16 * ranks, 2 * ranks, 8)
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, seq_len, heads, dim, generator=generator).to(device, self.dtype) for _ in range(4))
        is_ulysses = operation == "ulysses"
        self.layout = Layout.contiguous(seq_len, 1).split(ranks) if is_ulysses else Layout.zigzag(seq_len, ranks)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out = output_of(flash_attention(*exact, mask=Mask.full()))
        self.cache = KVCache(seq_len, rank, ranks)
        if operation == "decoding":
            self.cache.prefill(self.layout.shard(k, rank), self.layout.shard(v, rank), self.layout)
            self.inputs, self.expected = [q[:, -1:]], [out[:, -1:].detach()]
        else:
            self.inputs = [self.layout.shard(x, rank).clone() for x in (q, k, v, dout)]
            whole = out.detach(), *torch.autograd.grad(out, exact, dout.double())
            self.expected = [self.layout.shard(x, rank) for x in whole]

    def forward(self, group: Group | None, transport: str) -> list[Tensor]:
        """Return [out, q, k, v], or [out] for decoding."""
        if self.operation == "decoding":
            return [decode_attention(self.inputs[0], self.cache, group=group)]
        inputs = [x.detach().requires_grad_() for x in self.inputs[:3]]
        options = {"layout": self.layout, "mask": Mask.full(), "transport": transport}
        if self.operation == "ulysses":
            return [output_of(ulysses_attention(*inputs, ulysses_group=group, **options)), *inputs]
        return [output_of(ring_attention(*inputs, group=group, schedule=self.operation, **options)), *inputs]

    def backward(self, out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(out, inputs, self.inputs[3])) if inputs else []

    def error(self, results: list[Tensor]) -> float:
        """Return the largest error, relative to the largest expected value of its tensor. NaN counts as infinite."""
        errors = [(x.double() - y).abs().max() / y.abs().max() for x, y in zip(results, self.expected, strict=True)]
        return torch.stack(errors).nan_to_num(nan=float("inf")).max().item()


class Event(NamedTuple):
    operation: str
    kind: str
    in_backward: bool
    positions: list[int]  # for each rank, a random number that selects the kernel call, or -1 for no exception


def different_may_fail(transport: str) -> bool:
    """Return whether a call may raise `RingFault` if its ranks raise exceptions in different kernels. With gloo, a rank may
    wait for a message that another rank will never send. NCCL can recover only if all ranks have sent the same messages.
    """
    return transport == "p2p" or not torch.cuda.is_available()


def draw_events(calls: int, ranks: int, faults: int, few_different: bool, seed: int) -> list[Event]:
    """Plan random calls. The plan is the same on all ranks."""
    rng = random.Random(seed)
    may_fail = set(rng.sample(range(1, calls), min(faults, calls - 1)))
    events = []
    for i in range(calls):
        kinds = [SOME, DIFFERENT] if i in may_fail else [NONE, NONE, SAME] + [DIFFERENT] * (not few_different)
        kind = rng.choice(kinds)
        # A decoding call may raise `RingFault` if its ranks raise exceptions in different kernels.
        operation = rng.choice(OPERATIONS[:3] if kind == DIFFERENT and i not in may_fail else OPERATIONS)
        positions = [-1 if kind == NONE else rng.randrange(1000)] * ranks
        if kind in (DIFFERENT, SOME):
            positions = [rng.randrange(1000) for _ in range(ranks)]
        if kind == SOME:
            for rank in rng.sample(range(ranks), rng.randrange(1, ranks)):
                positions[rank] = -1
        events.append(Event(operation, kind, operation != "decoding" and rng.random() < 0.5, positions))
    return events


def join_group(rank: int) -> torch.device:
    """Join the process group of all ranks, and return the device of this rank. Several ranks may share a GPU."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:gloo" if os.environ.get(SHARE_GPUS) == "1" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    torch.set_num_threads(1)
    return device


def run_rank(directory: Path, first: int, arguments: argparse.Namespace) -> None:
    watchdog.HEARTBEAT_INTERVAL, watchdog.GRACE, watchdog.DEAD_AFTER, recovery.PATIENCE = 0.05, 2.0, 1.0, 2.0
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join_group(rank)
    group, injector = new_group(), Injector(SimpleNamespace())
    # Consecutive calls have different inputs, so a late message would cause a wrong result.
    problems = {x: [Problem(x, rank, ranks, device, seed=i) for i in range(3)] for x in OPERATIONS}
    few_different = different_may_fail(arguments.transport)
    events = draw_events(arguments.calls, ranks, arguments.faults, few_different, arguments.seed)
    counts: dict[tuple[str, bool], int] = {}

    def attempt(problem: Problem, event: Event | None) -> str:
        results: list[Tensor] = []
        for is_backward in (False, True):
            key, position = (problem.operation, is_backward), None
            if event is not None and is_backward == event.in_backward and event.positions[rank] >= 0:
                position = 1 + event.positions[rank] % counts[key]
            injector.arm(position)
            if is_backward:
                results[1:] = problem.backward(results[0], results[1:])
            else:
                results = problem.forward(group, arguments.transport)
            counts.setdefault(key, injector.count)
        error = problem.error([x.detach() for x in results])
        return "exact" if error <= TOLERANCE[problem.dtype] else f"wrong: error {error:.3g}"

    with injector.installed(), open(directory / f"rank_{rank}", "a", buffering=1) as log:
        for operation in OPERATIONS:
            attempt(problems[operation][0], None)
        for i in range(first, len(events)):
            event, problem = events[i], problems[events[i].operation][i % 3]
            may_fail = event.kind == SOME or (event.kind == DIFFERENT and (few_different or event.operation == "decoding"))
            # If some ranks raise an exception, every rank must raise an error by the next call. The next call injects no
            # exception.
            outcome = ""
            for each in (event, event._replace(positions=[-1] * ranks))[: 1 + may_fail]:
                try:
                    outcome = attempt(problem, each)
                except Injected:
                    outcome = "injected"
                except RingFault as fault:
                    outcome = f"fault: {fault}"
                log.write(json.dumps([i, outcome]) + "\n")
            if outcome.startswith("fault"):
                transport = "auto" if event.operation == "decoding" else arguments.transport
                if connect(group.group_name, device, transport).waits_on_gpu:
                    time.sleep(MAX_SECONDS_LEFT)  # the watchdog ends this process
                group = new_group()
    dist.barrier()
    os._exit(0)


class Episode:
    def __init__(self, directory: Path, first: int, arguments: argparse.Namespace) -> None:
        self.directory, self.first, self.arguments = directory, first, arguments
        directory.mkdir()
        self.store = command.serve_store()  # until the processes have ended
        variables = {watchdog.TIMEOUT: str(HOP_TIMEOUT)}
        if arguments.ranks > torch.cuda.device_count() > 0:
            variables[SHARE_GPUS] = "1"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "scripts.check.exceptions", *sys.argv[1:], "--rank-of", f"{directory}:{first}"],
                env=command.child_environment() | variables | command.rank_variables(self.store, rank, arguments.ranks),
                cwd=command.ROOT,
                stderr=open(directory / f"stderr_{rank}", "w"),  # noqa: SIM115 - the process writes to it
            )
            for rank in range(arguments.ranks)
        ]

    def wait(self, end: float) -> int:
        """Wait until all ranks have ended. Return the number of killed ranks."""
        first_end = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if first_end is None and any(process.poll() is not None for process in self.processes):
                first_end = now
            if now > end or (first_end is not None and now > first_end + MAX_SECONDS_LEFT):
                break
            time.sleep(0.1)
        left = [process for process in self.processes if process.poll() is None]
        for process in left:
            process.kill()
            process.wait()
        return len(left)

    def outcomes(self) -> dict[int, list[list[str]]]:
        outcomes: dict[int, list[list[str]]] = {}
        for rank in range(self.arguments.ranks):
            path = self.directory / f"rank_{rank}"
            for line in path.read_text().splitlines() if path.exists() else ():
                i, outcome = json.loads(line)
                outcomes.setdefault(i, [[] for _ in self.processes])[rank].append(outcome)
        return outcomes

    def ended_by_watchdog(self) -> dict[int, str]:
        texts = {rank: (self.directory / f"stderr_{rank}").read_text() for rank in range(self.arguments.ranks)}
        lines = {rank: [x for x in text.splitlines() if x.startswith("ringattn: ")] for rank, text in texts.items()}
        return {rank: found[-1] for rank, found in lines.items() if found}


def judge(event: Event, by_rank: list[list[str]], endings: dict[int, str]) -> str:
    """`endings` contains the messages of watchdogs that ended ranks."""
    faults = [[x for x in outcomes if x.startswith("fault")] for outcomes in by_rank]
    for rank, ending in endings.items():
        faults[rank] = faults[rank] or [f"fault: {ending}"]
    if any(x.startswith("wrong") for outcomes in by_rank for x in outcomes):
        return "wrong"
    if all(faults):
        culprits = [rank for rank, position in enumerate(event.positions) if position >= 0]
        named = all(any(f"rank {r} left call" in x[0] and "Injected: injected" in x[0] for r in culprits) for x in faults)
        return "all ranks raised" if named and event.kind in (SOME, DIFFERENT) else "wrong error"
    if any(faults) or not all(by_rank):
        return "wrong"
    injected = [outcomes[0] == "injected" for outcomes in by_rank]
    return "as expected" if injected == [event.kind != NONE and x >= 0 for x in event.positions] else "wrong"


def run_all(arguments: argparse.Namespace) -> bool:
    """Run all episodes and print the table. Return True if all calls passed and all processes ended."""
    few_different = different_may_fail(arguments.transport)
    events = draw_events(arguments.calls, arguments.ranks, arguments.faults, few_different, arguments.seed)
    results, end, first, left = Counter(), time.monotonic() + arguments.timeout, 0, 0
    restarts = 0
    with tempfile.TemporaryDirectory() as folder:
        while first < len(events) and time.monotonic() < end:
            episode = Episode(Path(folder) / str(first), first, arguments)
            left += episode.wait(end)
            outcomes, endings = episode.outcomes(), episode.ended_by_watchdog()
            last = max(outcomes, default=first)
            # `outcomes` is empty if the watchdogs ended every rank during the first call.
            for i in range(first, last + 1):
                by_rank = outcomes.get(i, [[] for _ in range(arguments.ranks)])
                result = judge(events[i], by_rank, endings if i == last else {})
                results[events[i].kind, result] += 1
                if result.startswith("wrong"):
                    print(f"call {i} ({events[i]}): {by_rank}, {endings}", flush=True)
            if last == first and not outcomes:
                for rank in range(arguments.ranks):
                    print((episode.directory / f"stderr_{rank}").read_text()[-2000:])
                break
            restarts, first = restarts + 1, last + 1
    columns = "as expected", "all ranks raised", "wrong error", "wrong"
    rows = [[kind, *(results[kind, column] for column in columns)] for kind in KINDS]
    print(markdown_table(" | ".join(("calls with", *columns)), rows))
    done = sum(results.values())
    device = f"{torch.cuda.get_device_name()}, transport {arguments.transport}" if torch.cuda.is_available() else "gloo on CPUs"
    print(f"{device}: {done} of {len(events)} calls, {restarts} starts of {arguments.ranks} ranks, {left} processes left")
    return done == len(events) and not left and not any("wrong" in column for (_, column), n in results.items() if n)


def main() -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--calls", type=command.at_least(2), default=1000)
    parser.add_argument("--ranks", type=command.at_least(2), default=2)
    parser.add_argument("--transport", choices=("auto", "nvlink", "p2p"), default="auto")
    parser.add_argument("--faults", type=command.at_least(0), default=12, help="calls that may end in a RingFault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=command.at_least(1), default=540, help="seconds after which the script gives up")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        directory, first = arguments.rank_of.rsplit(":", 1)
        run_rank(Path(directory), int(first), arguments)
    sys.exit(0 if run_all(arguments) else 1)


if __name__ == "__main__":
    main()
