"""Hooks of the processes that run tests and of the process that prints the summary.

With xdist, the process that prints the summary runs no tests, and the others start after it has loaded this file. This file
therefore does not load tests/worker.py, which needs several seconds to import torch, Triton and hypothesis.
"""

from collections import Counter
from pathlib import PurePath

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the settings and fixtures of the processes that run tests."""
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.worker")


# The number of slow tests that this run leaves out, by folder. With xdist, every worker process counts the same tests.
left_out: Counter[str] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the slow tests that `-m "not slow"` leaves out, by folder."""
    folders = (PurePath(item.nodeid.partition("::")[0]).parent for item in items if item.get_closest_marker("slow"))
    left_out.update("/".join(folder.parts[:2]) for folder in folders)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker process of xdist: send the counts to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """With xdist, in the process that prints the summary: receive the counts of a worker process that has finished."""
    left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - left_out)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print which tests this run left out, below everything that pytest prints itself."""
    if left_out and not hasattr(config, "workeroutput"):
        folders = ", ".join(f"{count} in {folder}" for folder, count in sorted(left_out.items()))
        print(f"left out {left_out.total()} slow tests ({folders}); run them with: make test-all")
