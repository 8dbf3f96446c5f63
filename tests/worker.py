"""Settings, hooks and fixtures of the processes that run tests.

The tests use the CUDA device if there is one, and otherwise the CPU with Triton's interpreter.
"""

import gc
import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import settings

from tests.processes import freeze_objects, use_one_thread

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

# Each test process uses one core, and so does every process that it starts.
use_one_thread()
os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_TRITON = importlib.util.find_spec("triton") is not None
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    if HAS_TRITON:
        from tests.interpreter import patch_language_once_per_launch

        patch_language_once_per_launch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU on machines without one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without 20 collections of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze_objects()


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _without_triton(report: Report, path: Path) -> Report:
    """Report a failed import of Triton as a skipped test on machines without Triton."""
    if not HAS_TRITON and report.failed and "No module named 'triton" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(path), 0, "Skipped: needs Triton")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip the modules that import Triton."""
    return _without_triton((yield), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip the tests that import Triton while they run, also in processes that they start."""
    return _without_triton((yield), item.path)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def release_gpu_memory() -> Iterator[None]:
    """Return the GPU memory that a test no longer uses, because several test processes share one GPU."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def exit_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make os._exit raise an exception in the test process, which would otherwise end without a report."""
    process, exit_process = os.getpid(), os._exit

    def fail(status: int) -> None:
        if os.getpid() != process:
            exit_process(status)  # a process that was forked by the test
        raise AssertionError(f"os._exit({status}) was called in the process of the tests")

    monkeypatch.setattr(os, "_exit", fail)


# At its first use, `with torch.device(...)` remembers the functions that it affects. These must be the original functions, not
# the replacements from the fixture `poison`.
with torch.device("meta"):
    torch.empty(0)


def _poisoned(allocate):
    def wrapper(*args, **kwargs):
        x = allocate(*args, **kwargs)
        if x.is_floating_point():
            with torch.no_grad():  # a leaf that requires a gradient must not be modified in place otherwise
                x.fill_(float("nan"))
        elif x.dtype == torch.uint8:
            x.fill_(255)  # every floating-point number of these bytes is NaN
        return x

    return wrapper


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading an element before it is written changes the result."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
