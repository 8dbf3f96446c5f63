"""Profile some steps of a run with torch.profiler, and record the memory of a GPU during these steps."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ringattn.train.settings.config import TrainerConfig

log = logging.getLogger(__name__)

# PyTorch documents the functions that record the memory of a GPU, but their names are private.
_memory: Any = torch.cuda.memory

# The first and the last profiled step of a launch with `trainer.profile=true`
DEFAULT_STEPS = 3, 5
# The number of latest allocations in a memory snapshot
MAX_MEMORY_EVENTS = 200_000


def profiled_steps(trainer: TrainerConfig, done: int) -> range:
    """Return the steps that this launch profiles. Earlier launches have completed `done` steps."""
    if (bounds := trainer.profiled_range) is not None:
        return range(max(bounds[0], done + 1), bounds[1] + 1)
    if not trainer.is_profiled:
        return range(0)
    first, last = (min(done + step, trainer.steps) for step in DEFAULT_STEPS)
    return range(first, last + 1)


class Profiler:
    """Writes a trace of some steps to the folder profile/ of the run. On a GPU, also writes a memory snapshot."""

    def __init__(self, trainer: TrainerConfig, directory: Path, device: torch.device, done: int = 0) -> None:
        self._steps = profiled_steps(trainer, done)
        self._folder, self._is_cuda = directory / "profile", device.type == "cuda"
        self._profile: profile | None = None
        if trainer.is_profiled and not self._steps:
            log.warning("trainer.profile=%s: these steps were taken by earlier launches, so none is profiled", trainer.profile)

    @contextmanager
    def profile_step(self, step: int) -> Generator[None]:
        """Profile the work in the `with` block if `step` is a profiled step. Write the files after the last profiled step."""
        if step not in self._steps:
            yield
            return
        if self._profile is None:
            self._start()
        with record_function(f"step {step}"):
            yield
        self._last = step
        if step == self._steps[-1]:
            self.close()

    def _start(self) -> None:
        if self._is_cuda:
            _memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
        self._last = self._steps[0]

    def close(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        name = f"steps-{self._steps[0]}-{self._last}-rank{rank}"
        trace = self._folder / f"trace-{name}.json.gz"
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        log.info(f"{'profile':<12}{trace}: open it at https://ui.perfetto.dev or in chrome://tracing")
        if self._is_cuda:
            snapshot = self._folder / f"memory-{name}.pickle"
            _memory._dump_snapshot(str(snapshot))
            _memory._record_memory_history(enabled=None)
            log.info(f"{'profile':<12}{snapshot}: open it at https://pytorch.org/memory_viz")
