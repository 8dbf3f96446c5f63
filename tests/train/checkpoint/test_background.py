"""Background saves: the same files as in the foreground, errors on all ranks, and kills in the middle of a save."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from ringattn.train import preemption, trainer
from ringattn.train.checkpoint import background, storage
from ringattn.train.checkpoint.background import HostCopies, Saver
from ringattn.train.checkpoint.storage import CheckpointError, DiskFullError
from ringattn.train.parallel.memory.capacity import COPIES, GIB, Capacity, Needs
from ringattn.train.reports import metrics
from ringattn.train.settings.config import Config, ConfigError, with_settings
from tests.distributed import run_ranks
from tests.train.checkpoint.test_storage import open_full_device
from tests.train.jobs import job, one_rank
from tests.train.launch import SMALL, launch_ranks, write_corpus

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_is_stop_requested", False)


def tensors(factor: float = 1.0) -> dict[str, Tensor]:
    return {
        "model.w": factor * torch.arange(7.0),
        "model.matrix": factor * torch.ones(3, 4, dtype=torch.bfloat16),
        "optim.step": torch.full((), factor),
        "rng": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
    }


def contents(checkpoint: Path) -> tuple[dict[str, bytes], object, dict[str, object]]:
    """The shards, the index and meta.json of a checkpoint, without the random identifier of a save."""
    index, meta = storage._read_index(checkpoint), storage.read_meta(checkpoint)
    shards = {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}
    return shards, (index.state_dict_metadata, index.storage_data), {**meta, "index": None, "files": sorted(meta["files"])}


def test_pinned_memory_leaves_no_trace_in_a_checkpoint(tmp_path, monkeypatch):
    expected = storage.save(tmp_path / "pageable", 1, tensors(), {}, 1)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: True)
    assert contents(storage.save(tmp_path / "pinned", 1, tensors(), {}, 1)) == contents(expected)


def test_copies_equal_the_tensors_and_reuse_their_memory():
    copies = HostCopies(CPU)
    copies.reserve(1024)
    first = copies.copy(tensors())
    addresses = {name: copy.data_ptr() for name, copy in first.items()}
    for factor in (2.0, 3.0):
        source = tensors(factor)
        copy = copies.copy(source)
        assert {name: x.data_ptr() for name, x in copy.items()} == addresses
        for name, tensor in source.items():
            assert copy[name].dtype == tensor.dtype
            assert torch.equal(copy[name], tensor)
    large = {"model.w": torch.arange(5000.0)}
    assert torch.equal(copies.copy(large)["model.w"], large["model.w"])


def test_files_are_those_of_a_save_in_the_foreground(tmp_path):
    """This holds even if tensors change at once, as in the next step."""
    with one_rank():
        expected = storage.save(tmp_path / "foreground", 3, tensors(), {"sequences": 1}, 2)
        with Saver(CPU, 16, 60) as saver:
            state = tensors()
            saver.save(tmp_path / "background", 3, state, {"sequences": 1}, 2)
            for tensor in state.values():
                tensor.zero_()
    assert contents(tmp_path / "background" / "step_00000003") == contents(expected)


@pytest.mark.gpu
def test_copies_of_a_gpu_do_not_see_the_next_step(tmp_path):
    """The tensors are overwritten by kernels that run after the copy, while the thread writes."""
    device = torch.device("cuda", 0)
    state = {f"model.{i}": torch.full((1 << 22,), float(i), device=device) for i in range(8)}
    with one_rank():
        expected = storage.save(tmp_path / "foreground", 1, state, {}, 2)
        with Saver(device, sum(x.nbytes for x in state.values()), 60) as saver:
            for _ in range(2):
                saver.save(tmp_path / "background", 1, state, {}, 2)
                assert saver._copies._block.is_pinned()
                torch._foreach_add_(list(state.values()), 1)
                saver.wait()
                assert contents(tmp_path / "background" / expected.name) == contents(expected)
                torch._foreach_sub_(list(state.values()), 1)


def block_saves(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Let saves wait for the returned event. The returned list contains what happened."""
    event, happened, save = threading.Event(), list[str](), storage.save

    def save_later(directory: Path, step: int, *rest: object) -> Path:
        assert event.wait(20)
        path = save(directory, step, *rest)
        happened.append(f"saved {step}")
        return path

    monkeypatch.setattr(storage, "save", save_later)
    return event, happened


def test_one_save_is_in_flight_and_the_next_one_waits(tmp_path, monkeypatch):
    event, happened = block_saves(monkeypatch)
    with one_rank(), Saver(CPU, 1024, 60) as saver:
        saver.save(tmp_path, 1, tensors(1.0), {}, 9)
        happened.append("step 2")
        assert storage.latest(tmp_path) is None
        threading.Timer(0.1, event.set).start()
        saver.save(tmp_path, 2, tensors(2.0), {}, 9)
        assert happened[:2] == ["step 2", "saved 1"]
        saver.wait()
        assert happened == ["step 2", "saved 1", "saved 2"]
    for step in (1, 2):
        loaded = {name: torch.zeros_like(x) for name, x in tensors().items()}
        storage.load(tmp_path / f"step_0000000{step}", loaded)
        assert torch.equal(loaded["model.w"], step * torch.arange(7.0))


def test_saver_without_memory_saves_in_the_foreground(tmp_path):
    before = threading.active_count()
    with one_rank(), Saver(CPU, None, 60) as saver:
        assert threading.active_count() == before
        saver.save(tmp_path, 1, tensors(), {}, 1)
        assert storage.latest(tmp_path) is not None


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == background.__name__]


def test_error_requests_a_stop_and_is_raised_once(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").write_text("")
    with one_rank():
        with Saver(CPU, 1024, 60) as saver:
            saver.save(tmp_path / "file", 1, tensors(), {}, 1)
            with pytest.raises(CheckpointError, match="NotADirectoryError"):
                saver.wait()
            assert preemption.stop_requested(None)
            saver.wait()
        with pytest.raises(CheckpointError), Saver(CPU, 1024, 60) as saver:
            saver.save(tmp_path / "file", 1, tensors(), {}, 1)
        assert not errors_of(caplog)
        with pytest.raises(ZeroDivisionError), Saver(CPU, 1024, 60) as saver:
            saver.save(tmp_path / "file", 1, tensors(), {}, 1)
            _ = 1 / 0
    (message,) = errors_of(caplog)
    assert "NotADirectoryError" in message


@pytest.mark.parametrize(
    ("wanted", "available", "saves_early", "expected"),
    [
        (None, 200, True, True),
        (None, 200, False, False),
        (None, 199, True, False),
        (True, 200, False, True),
        (False, 200, True, False),
    ],
)
def test_choice_depends_on_the_memory_and_on_the_saves(wanted, available, saves_early, expected, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(background, "_available_memory", lambda: available)
    with one_rank():
        assert background.choose(wanted, 100, saves_early) == expected
    assert len(caplog.messages) == (available == 199)


def test_memory_of_the_plan_and_the_limit_of_a_container_are_not_available(monkeypatch):
    monkeypatch.setattr(background, "_available_memory", lambda: 10_000)
    monkeypatch.setattr(background, "host_memory", lambda: 500)
    with one_rank():
        assert [background.choose(None, 100, True, planned) for planned in (0, 300, 301)] == [True, True, False]


def test_the_memory_plan_and_the_run_use_the_same_check(monkeypatch):
    """With 30 GiB of offloaded data, copies of 40 GiB require 110 GiB of host memory."""
    monkeypatch.setattr(background, "_available_memory", lambda: float("inf"))
    needs = Needs({}, {"activations": 30.0 * GIB, COPIES: 40.0 * GIB})
    with one_rank():
        for host, fits in ((109, False), (110, True)):
            monkeypatch.setattr(background, "host_memory", lambda host=host: host * GIB)
            expectation = nullcontext() if fits else pytest.raises(ConfigError, match=r"of the 79\.0 GiB available; use more")
            with expectation as planned:
                Capacity(80.0 * GIB, host * GIB).check(needs)
            with expectation as started:
                background.choose(True, 40 * GIB, True, needs.offloaded)
            assert fits or str(planned.value) == str(started.value)
            assert Capacity(80.0 * GIB, host * GIB).fits(needs) == fits


def test_background_saves_without_memory_are_an_error(monkeypatch):
    monkeypatch.setattr(background, "_available_memory", lambda: 2**30)
    with one_rank(), pytest.raises(ConfigError, match=r"background_saves=true: .* need 1.0 GiB .* of the 1.0 GiB available"):
        background.choose(True, 2**30, True)


def test_ranks_save_their_shards_and_all_raise_the_error_of_one(tmp_path):
    run_ranks(check_ranks, 2, tmp_path / "ranks", tmp_path)


def check_ranks(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"model.w": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]), "optim.step": torch.tensor(3.0)}
    expected = storage.save(directory / "foreground", 1, state, {}, 2)
    with Saver(CPU, 1024, 60) as saver:
        save, has_reduced = storage.save, threading.Event()
        if dist.get_rank() == 0:
            storage.save = lambda *arguments: has_reduced.wait(60) and save(*arguments)
        saver.save(directory / "background", 1, state, {}, 2)
        # A collective of a step: rank 1 calls it during its save, and rank 0 before its save.
        time.sleep(0.2 * dist.get_rank())
        dist.all_reduce(torch.ones(1))
        has_reduced.set()
        saver.wait()
        assert contents(directory / "background" / expected.name) == contents(expected)
        if dist.get_rank() == 1:
            FileSystem.create_stream = open_full_device
        saver.save(directory / "background", 2, state, {}, 2)
        with pytest.raises(DiskFullError, match=r"step_00000002 .*remains is .*step_00000001"):
            saver.wait()
        assert preemption.stop_requested(None)
    assert isinstance(state["model.w"], DTensor)


def saving_job(corpus: str, **parallel: object) -> Config:
    values = {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 9, "eval_every": 0, "eval_tokens": 61}
    return with_settings(job(corpus, 1, **parallel), {f"trainer.{name}": value for name, value in values.items()})


@pytest.mark.slow
def test_run_saves_the_same_checkpoints_as_in_the_foreground(corpus, tmp_path, monkeypatch):
    foreground = storage.save
    with one_rank():
        for wanted, folder in ((None, "background"), (False, "foreground")):
            groups = []
            monkeypatch.setattr(storage, "save", lambda *args, into=groups: into.append(args[5:]) or foreground(*args))
            trainer.train(with_settings(saving_job(corpus), {"trainer.background_saves": wanted}), tmp_path / folder)
            assert [bool(each) for each in groups] == [wanted is None] * 4
    first, second = (tmp_path / name for name in ("background", "foreground"))
    for step in range(1, 5):
        shards = [contents(path / "checkpoints" / f"step_0000000{step}")[0] for path in (first, second)]
        assert shards[0] == shards[1]
        assert shards[0]
    records = metrics.read(first / "metrics.jsonl")
    assert all("checkpoint_s" in each for each in records)


def fail_in_save_of_step_10() -> None:
    """Let the save of step 10 fail on the last rank, while step 11 is running."""
    write, take_step, is_step_11 = storage._write_tensors, trainer.take_step, threading.Event()

    def write_or_fail(directory: Path, *rest: object) -> object:
        if directory.name == ".step_00000010.tmp":
            assert is_step_11.wait(200)
            if dist.get_rank() == dist.get_world_size() - 1:
                FileSystem.create_stream = open_full_device
        return write(directory, *rest)

    def take_step_and_tell(run, step, consumed):
        if step == 11:
            is_step_11.set()
        if step == 12:  # The error would otherwise be noticed some steps later if the disk is slow.
            time.sleep(0.5)
        return take_step(run, step, consumed)

    storage._write_tensors, trainer.take_step = write_or_fail, take_step_and_tell


def train_until_error(corpus: str, directory: Path, ranks: int) -> None:
    """All ranks raise the error long before the next save would wait for this one."""
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    fail_in_save_of_step_10()
    config = with_settings(saving_job(corpus, ring=ranks), {"trainer.steps": 100, "trainer.checkpoint_every": 10})
    with pytest.raises(DiskFullError, match="there is no earlier checkpoint"):
        trainer.train(config, directory / "run")
    assert 10 <= len(metrics.read(directory / "run" / "metrics.jsonl")) <= 13
    assert not list((directory / "run" / "checkpoints").glob("*"))


def test_error_in_the_background_ends_the_run(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_write_tensors", storage._write_tensors)
    monkeypatch.setattr(FileSystem, "create_stream", FileSystem.create_stream)
    monkeypatch.setattr(trainer, "take_step", trainer.take_step)
    with one_rank():
        train_until_error(corpus, tmp_path, 1)


@pytest.mark.slow
def test_error_of_one_rank_ends_the_run_on_all_ranks(corpus, tmp_path):
    run_ranks(train_until_error, 2, tmp_path / "store", corpus, tmp_path, 2)


# A rank is killed in this call, counted from 1, of this function of `storage`.
MOMENTS = {
    "middle of the shards": ("write", 40),
    "before the renaming": ("_publish", 1),
    "after the renaming": ("_list_checkpoints", 1),
}


def losses(run: Path) -> list[tuple[int, float, float | None]]:
    """The step, the loss and the loss on held-out text, for every record of the metrics."""
    return [(record["step"], record["loss"], record.get("eval_loss")) for record in metrics.read(run / "metrics.jsonl")]


def kill_in_save_of_step_10(moment: str, victim: int, rank: int) -> None:
    """Let rank `victim` kill itself in the save of step 10, after step 12 has begun."""
    if rank != victim:
        return
    name, number = MOMENTS[moment]
    owner = storage._HashingStream if name == "write" else storage
    function, take_step, count = getattr(owner, name), trainer.take_step, []
    write_tensors, is_step_12, is_step_10 = storage._write_tensors, threading.Event(), threading.Event()

    def take_step_and_tell(run, step, consumed):
        if step == 12:
            is_step_12.set()
        return take_step(run, step, consumed)

    def write_in_the_background(directory: Path, *rest: object) -> object:
        if directory.name == ".step_00000010.tmp":
            is_step_10.set()
            assert is_step_12.wait(200)
        return write_tensors(directory, *rest)

    def kill(*arguments: object) -> object:
        if is_step_10.is_set() and threading.current_thread() is not threading.main_thread():
            count.append(name)
            if len(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    trainer.take_step, storage._write_tensors = take_step_and_tell, write_in_the_background
    setattr(owner, name, kill)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "moments"),
    [(1, ("after the renaming",)), (2, ("middle of the shards", "before the renaming"))],
)
def test_run_killed_in_a_background_save_resumes_bitwise(ranks, moments, tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.accumulate=2", "data.eval_fraction=0.2"]
    settings += ["trainer.steps=20", "trainer.checkpoint_every=5", "trainer.eval_every=10"]
    settings = [each for each in settings if each != "data.eval_fraction=0"]
    whole = tmp_path / "outputs" / "whole"
    launch = partial(launch_ranks, ranks, tmp_path, *settings)
    succeeded, _, errors = launch("name=whole", "trainer.background_saves=false")
    assert succeeded, errors
    for index, moment in enumerate(moments):
        killed = tmp_path / "outputs" / f"run{index}"
        # Only rank 0 writes meta.json and renames the directory.
        victim = ranks - 1 if MOMENTS[moment][0] == "write" else 0
        succeeded, _, _ = launch(f"name=run{index}", prepare=partial(kill_in_save_of_step_10, moment, victim))
        assert not succeeded
        assert len(metrics.read(killed / "metrics.jsonl")) >= 11, "the save was in the background"
        complete = [path.name for path in sorted((killed / "checkpoints").glob("step_*"))]
        assert complete[-1] == ("step_00000010" if moment == "after the renaming" else "step_00000005"), moment
        succeeded, _, errors = launch(f"name=run{index}")
        assert succeeded, errors
        assert losses(killed) == losses(whole)
        last = Path("checkpoints") / "step_00000020"
        shards = [{path.name: path.read_bytes() for path in (run / last).glob("*.distcp")} for run in (killed, whole)]
        assert shards[0] == shards[1]
        assert len(shards[0]) == ranks
