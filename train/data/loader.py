"""Load the batches of training steps and plan their attention before the steps need them.

With packed documents, every step has a new mask. On GPUs, each rank therefore starts a loader process. The loader process packs
the sequences of the next steps, and plans their attention. The training process only copies the prepared batches and plans to
the GPU. A separate process has its own Python lock, so planning does not delay the launch of kernels.

    training process                                    loader process
    request(consumed) of the next AHEAD steps   ->      Preparation.prepare
    list of MicroStep                           <-

On CPUs, a loader process would compete with training for the cores. Therefore `Loader` prepares each step in the training
process.
"""

import gc
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

import ringattn
from ringattn import Layout
from ringattn.planning.rank_plan import Plan, Requests
from ringattn.train.data.batch import Batch
from ringattn.train.data.stream import Position, StreamDataset
from ringattn.train.parallel.mesh import Masks, MeshShape, causal_masks, choose_layout
from ringattn.train.parallel.ranks import ranks_per_host
from ringattn.train.settings.config import Config, ConfigError

ROOT = str(Path(ringattn.__file__).resolve().parents[1])  # the folder from which the package `ringattn` is imported
# Kill the loader process (signal 9) when the training process dies: option 1 of prctl(2) is PR_SET_PDEATHSIG. Waiting for the
# end of the input would not suffice, because another child may have inherited the input. Only messages may reach the standard
# output, so all prints of Python code go to the standard error.
START = f"""
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):  # the training process died before this call
        sys.exit(1)
output = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
from {__name__} import run_loader_process
run_loader_process(output)
"""
AHEAD = 3  # number of steps that are prepared in advance; each needs host memory for its batches and plan


class LoaderError(RuntimeError):
    """The loader process raised an error or has ended."""


Positions = Mapping[int, Position]  # by the number of the reader


class MicroStep(NamedTuple):
    """Holds the batch of one micro-step, with its masks, its layout and its attention plans."""

    batch: Batch
    masks: Masks
    layout: Layout
    plans: Sequence[Plan] = ()  # one per mask, on the CPU; empty if the first attention call creates the plan
    positions: Positions | None = None  # where the readers of a stream continue; only in the last micro-step


@dataclass(frozen=True)
class Preparation:
    """Prepares the micro-steps of one rank.

    Attributes:
        config: the settings.
        data: the training sequences.
        shape: the numbers of ranks.
        dp, ring: the indices of this rank along these axes of the mesh.
        is_fixed: as for `Plan`. True if attention runs in CUDA graphs.
    """

    config: Config
    data: Any  # `packing.TrainingData`
    shape: MeshShape
    dp: int
    ring: int
    is_fixed: bool = False

    @property
    def sequences_per_step(self) -> int:
        return self.shape.dp * self.config.trainer.accumulate * self.config.trainer.batch_size

    def batches(self, consumed: int) -> list[Batch]:
        """Return this rank's batches of one step, one per micro-step.

        In each micro-step, every data-parallel rank takes the next `trainer.batch_size` sequences. The ranks that share a
        sequence load the same batch.
        """
        trainer = self.config.trainer
        starts = [consumed + (self.dp + step * self.shape.dp) * trainer.batch_size for step in range(trainer.accumulate)]
        return [self.data.batch(range(start, start + trainer.batch_size)) for start in starts]

    def prepare(self, consumed: int, requests: Sequence[Requests] | None = None) -> list[MicroStep]:
        """Return the micro-steps of one step. With `requests` (one per mask) and `data.mask_documents`, also plan the
        attention.
        """
        micro_steps = []
        for batch in self.batches(consumed):
            masks = masks_of(self.config, batch)
            layout, plans = choose_layout(self.config, self.shape, masks), list[Plan]()
            if requests is not None and self.config.data.mask_documents:
                for mask, requested in zip(masks.values(), requests, strict=True):
                    plans.append(Plan(mask, layout.whole, self.ring, torch.device("cpu"), self.is_fixed))
                    plans[-1].prepare(requested)
            micro_steps.append(MicroStep(batch, masks, layout, plans))
        if isinstance(self.data, StreamDataset):
            micro_steps[-1] = micro_steps[-1]._replace(positions=self.data.positions)
        return micro_steps


def masks_of(config: Config, batch: Batch) -> Masks:
    """Return the causal masks of a batch for all layers, with its documents if `data.mask_documents` is set."""
    return causal_masks(config.model, batch.documents if config.data.mask_documents else None)


class Loader:
    """Prepares each step in this process, when the step is needed."""

    def __init__(self) -> None:
        self._preparation: Preparation | None = None
        self._positions = dict[int, Positions | None]()

    def begin(self, preparation: Preparation) -> None:
        """Drop all steps that were prepared before. Call this method before `get`."""
        self._preparation = preparation
        self._positions.clear()

    @property
    def preparation(self) -> Preparation:
        assert self._preparation is not None, "`begin` must be called first"
        return self._preparation

    def get(self, consumed: int) -> list[MicroStep]:
        """Return the micro-steps of the next step. Earlier steps have used `consumed` sequences.

        Raises:
            LoaderError: the loader process failed, or the stream cannot be read.
        """
        micro_steps, size = self._prepare(consumed), self.preparation.sequences_per_step
        # Keep the reader positions of the previous step for a checkpoint that may follow.
        known = {count: positions for count, positions in self._positions.items() if count >= consumed - size}
        self._positions = known | {consumed + size: micro_steps[-1].positions}
        return micro_steps

    def _prepare(self, consumed: int) -> list[MicroStep]:
        try:
            return self.preparation.prepare(consumed)
        except ConfigError as error:  # Other ranks may not have this error.
            raise LoaderError(str(error)) from error

    def positions(self, consumed: int) -> Positions:
        """Return the position of each reader when its stream has yielded `consumed` sequences."""
        return self._positions.get(consumed) or self.preparation.data.start

    def learn(self, requests: Sequence[Requests]) -> None:
        """Record which schedules and tables a step has used. The loader prepares the same schedules and tables for later
        steps.
        """

    def close(self) -> None:
        """End the loader process."""


class AheadLoader(Loader):
    """Prepares the next steps in a loader process."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: Sequence[Requests] | None = None
        self._pending: deque[int] = deque()  # the steps that the process prepares, in order
        # One thread is enough for small arrays. Tokenizers from a tokenizer.json use several threads (Rayon).
        # Import the package from the same path, and nothing from the current directory.
        threads = str(max(len(os.sched_getaffinity(0)) // ranks_per_host(), 1))
        env = (
            {"RAYON_NUM_THREADS": threads}
            | os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        )
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        if dist.is_initialized():
            env["RANK"] = str(dist.get_rank())
        command = [sys.executable, "-c", START, str(os.getpid())]
        connection, theirs = socket.socketpair()
        with theirs:
            # In its own process group, the loader process is not killed by a stop signal to the group of the training process.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs.fileno(), env=env, process_group=0)
        assert self._process.stdin is not None
        self._requests_file = self._process.stdin
        # A thread receives the messages, so that the loader process never waits for the training process.
        self._received: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        threading.Thread(target=_receive_all, args=(connection, self._received), daemon=True).start()
        # The finalizer ends the process even if an error prevents the call of `close`.
        self._end = weakref.finalize(self, _end, self._process, self._requests_file)

    def begin(self, preparation: Preparation) -> None:
        earlier = self._preparation
        super().begin(preparation)
        if earlier is None or replace(earlier, data=preparation.data) != preparation:
            self._requests = None  # Requests depend on the masks and the mesh, but not on the data.
        while self._pending:
            with suppress(LoaderError):
                self._receive()
        # Send requests in a thread, because a large message blocks until the loader process has imported its modules.
        self._sending = threading.Thread(target=self._write, args=(_encode(preparation),), daemon=True)
        self._sending.start()

    def learn(self, requests: Sequence[Requests]) -> None:
        self._requests = requests

    def close(self) -> None:
        self._end()

    def _prepare(self, consumed: int) -> list[MicroStep]:
        # After a jump to another step, drop the steps that were requested before.
        while self._pending and self._pending[0] != consumed:
            self._receive()
        while len(self._pending) <= AHEAD:
            step = self._pending[-1] + self.preparation.sequences_per_step if self._pending else consumed
            self._pending.append(step)
            self._sending.join()
            self._write(_encode((step, self._requests)))
        return self._receive()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # The process has ended, which `_receive` reports.
            _write(self._requests_file, data)

    def _receive(self) -> list[MicroStep]:
        self._pending.popleft()
        if (data := self._received.get()) is None:
            self._received.put(None)  # for the next call
            raise LoaderError(
                f"the loader process ended with exit status {self._process.wait()}: see its error above, or free memory of the "
                "host if the status is -9, which means that the process was killed"
            )
        if isinstance(message := _decode(data), str):
            raise LoaderError(f"the loader process failed: {message}")
        return message


def start_loader(device: torch.device) -> Loader:
    """Return the loader of a run on `device`. On a GPU, the loader starts a process."""
    return AheadLoader() if device.type == "cuda" else Loader()


def _end(process: subprocess.Popen[bytes], requests: IO[bytes]) -> None:
    process.kill()
    process.wait()
    with suppress(BrokenPipeError):  # Closing flushes requests that are still in the buffer.
        requests.close()


# A message consists of a header, a pickle, and the memory of each array. The header contains the sizes of all parts of the
# message. Every part starts at a multiple of 16 bytes, because arrays must be aligned.
def _encode(message: Any) -> bytes:
    buffers: list[pickle.PickleBuffer] = []
    parts = [pickle.dumps(message, protocol=5, buffer_callback=buffers.append), *(x.raw() for x in buffers)]
    header = struct.pack(f"<{1 + len(parts)}q", len(parts), *map(len, parts))
    return b"".join(x for part in (header, *parts) for x in (part, bytes(-len(part) % 16)))


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(struct.pack("<q", len(data)))
    file.write(data)
    file.flush()


def _read(read_into: Callable[[memoryview], int]) -> bytearray | None:
    """Read one message, or return None at the end of the input."""
    message = bytearray(8)
    for is_header in (True, False):
        view = memoryview(message)
        while view:
            count = read_into(view)
            if not count:
                return None
            view = view[count:]
        if is_header:
            message = bytearray(struct.unpack("<q", message)[0])
    return message


def _decode(data: bytearray) -> Any:
    view = memoryview(data)
    (count,) = struct.unpack_from("<q", view)
    start, parts = 8 * (1 + count), list[memoryview]()
    for size in struct.unpack_from(f"<{count}q", view, 8):
        start += -start % 16
        parts.append(view[start : start + size])
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])


def _receive_all(connection: socket.socket, received: queue.SimpleQueue[bytearray | None]) -> None:
    try:
        with connection:
            while (data := _read(lambda view: connection.recv_into(view, 0, socket.MSG_WAITALL))) is not None:
                received.put(data)
    finally:
        received.put(None)  # None marks the end of the received messages.


def run_loader_process(output: IO[bytes]) -> None:
    """Write each requested step to `output`, until there are no more requests."""
    # Ignore stop signals, because the training process must first complete its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    # A plan for 64 ranks consists of thousands of small objects, so frequent garbage collection would be slow.
    gc.freeze()
    gc.set_threshold(100_000)
    preparation: Preparation | None = None
    source = os.fdopen(sys.stdin.fileno(), "rb", closefd=False)
    while (data := _read(source.readinto)) is not None:
        try:
            message = _decode(data)
            if isinstance(message, Preparation):
                preparation = message
                continue
            assert preparation is not None
            steps = preparation.prepare(*message)
        except Exception as error:
            steps = f"{type(error).__name__}: {error}"
        try:
            _write(output, _encode(steps))
        except OSError:  # The training process has ended.
            return
