import argparse
import importlib
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ringattn.train.commands.errors import is_out_of_memory
from scripts.labs import measure
from scripts.plots import plt

CPU = torch.device("cpu")


def test_peak_memory_is_the_sum_of_the_tensors_that_exist_together() -> None:
    def call() -> None:
        first = torch.empty(1000)
        del first
        torch.add(torch.ones(3000), torch.ones(3000))

    # The tensors of 3,000 numbers exist together with their sum, but not with the tensor of 1,000 numbers.
    assert measure.peak_bytes(call, CPU) == 3 * 3000 * 4


def test_memory_that_exists_before_the_call_is_not_counted() -> None:
    before = torch.empty(10_000)
    assert measure.peak_bytes(lambda: before[:100].clone(), CPU) == 400


def test_the_profiler_prints_no_messages_of_its_own(capfd: pytest.CaptureFixture) -> None:
    measure.peak_bytes(lambda: torch.ones(10), CPU)
    assert capfd.readouterr() == ("", "")


def test_time_is_that_of_one_call() -> None:
    assert 10 <= measure.milliseconds(lambda: time.sleep(0.01), CPU) < 5_000  # microseconds would be 10,000


@pytest.mark.skipif(not measure.MEMORY_FILE.exists(), reason="the limit exists only on Linux")
def test_allocation_beyond_the_limit_fails() -> None:
    def allocate() -> None:
        torch.empty(2**27, dtype=torch.uint8)

    with measure.limited_memory(2**26, CPU):
        with pytest.raises(RuntimeError) as raised:
            allocate()
        torch.empty(2**24, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    allocate()


@pytest.mark.parametrize("name", ["softmax_share", "tile_sizes"])
def test_memory_that_runs_out_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    lab = importlib.import_module(f"scripts.labs.{name}")
    fail = Mock(side_effect=torch.OutOfMemoryError("3 GiB are missing\nmore"))
    monkeypatch.setattr(lab, "random_inputs", fail)
    with pytest.raises(SystemExit):
        lab.main(["--device", "cpu"])
    assert capsys.readouterr().err.endswith("the memory is too small, use shorter lengths: 3 GiB are missing\n")
    fail.side_effect = RuntimeError("another error")
    with pytest.raises(RuntimeError, match="another error"):
        lab.main(["--device", "cpu"])


def test_device_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = measure.new_parser("A lab.", "lab")
    assert measure.parse(parser, []) == argparse.Namespace(device=CPU, output=measure.OUTPUT / "lab.png")
    with pytest.raises(SystemExit):
        measure.parse(parser, ["--device", "cuda"])
    assert "--device cuda" in capsys.readouterr().err


def test_folder_of_the_picture_is_created(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lab.png"
    measure.write_picture(plt.figure(), path)
    assert path.stat().st_size > 0
