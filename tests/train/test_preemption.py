"""Tests of how a run stops on SIGTERM and at its time limit, and of the lock on its directory."""

import errno
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import datasets
import filelock
import pytest
import torch
import torch.distributed as dist

from ringattn.train import preemption, step, trainer
from ringattn.train.preemption import (
    StoppedEarly,
    TrainingStopped,
    acquire_run_directory,
    handle_stop_signals,
    stop_requested,
)
from ringattn.train.reports import metrics
from ringattn.train.settings.config import Config, ConfigError, with_settings
from ringattn.train.step import until_stopped
from tests.distributed import run_ranks
from tests.train.checkpoint.test_formats import unpack
from tests.train.jobs import job, one_rank
from tests.train.launch import ROOT, SMALL, descendants, receive_signal, start, wait_for_end, wait_until, write_corpus

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def no_request(monkeypatch):
    """No test starts with a request that an earlier test has made."""
    monkeypatch.setattr(preemption, "_received_signals", set())


def test_repeated_sigterm_is_one_request(capfd):
    """torchrun forwards a SIGTERM that its ranks may also have received directly. The console shows it at once, even if the
    main thread waits.
    """
    previous = signal.getsignal(signal.SIGTERM)
    with one_rank(), handle_stop_signals():
        assert not stop_requested(None)
        os.kill(os.getpid(), signal.SIGTERM)
        while not (shown := capfd.readouterr().err):
            time.sleep(0.001)
        assert shown == "SIGTERM: the run ends after this step or micro-step, and saves a checkpoint\n"
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""
    assert stop_requested(None)
    assert signal.getsignal(signal.SIGTERM) is previous


def ignore(number: int, frame: object) -> None:
    pass


@pytest.mark.parametrize(("handler", "stops"), [(ignore, True), (signal.SIG_IGN, False)], ids=["closed terminal", "nohup"])
def test_sighup_is_a_request_unless_it_was_ignored(handler, stops):
    previous = signal.signal(signal.SIGHUP, handler)
    try:
        with one_rank(), handle_stop_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop_requested(None) == stops
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_signal_is_noticed_while_the_main_thread_is_in_a_long_call():
    """During a save, fsync may take longer than torchrun waits. Python calls the handler only afterwards."""
    receive, send = os.pipe()
    noticed: list[bool] = []

    def send_signal() -> None:
        """Send the signal, and end the call of the main thread when the signal has been noticed."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.1)  # until the main thread is in the call; otherwise it notices the signal itself
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not stop_requested(None) and time.monotonic() < deadline:
            time.sleep(0.001)
        noticed.append(stop_requested(None))
        os.write(send, b".")

    with one_rank(), handle_stop_signals():
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the signal must not end the call
        sender = threading.Thread(target=send_signal)
        sender.start()
        os.read(receive, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        sender.join()
    assert noticed == [True]


def test_stop_signals_miss_child_processes():
    """torchrun signals the process group of each rank. Without compiler processes, compilations would fail."""
    with one_rank(), handle_stop_signals(), subprocess.Popen(["sleep", "100"]) as child:
        for number in preemption.HANDLED_SIGNALS:
            os.kill(child.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
        child.kill()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_time_limit_counts_from_the_launch(monkeypatch):
    monkeypatch.setattr(preemption, "LAUNCH_TIME", time.monotonic() - 100)
    assert [stop_requested(limit) for limit in (None, 1e4, 99)] == [False, False, True]


def receive_sigterm(step: int, rank: int):
    """A replacement for `take_step` in which one rank receives SIGTERM before one step."""
    take_step = trainer.take_step

    def take_step_with_signal(run, number, *arguments):
        if number == step and dist.get_rank() == rank:
            receive_signal(signal.SIGTERM)
        return take_step(run, number, *arguments)

    return take_step_with_signal


def small_job(corpus: str, ring: int) -> Config:
    config = job(corpus, 1, ring=ring)
    config = with_settings(config, {"trainer.steps": 4, "trainer.eval_every": 2, "trainer.accumulate": 1})
    return config


def stop_and_resume(corpus: str, directory: Path) -> None:
    """On every rank: stop after step 2, resume, and take the same steps without an interruption."""
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    take_step, trainer.take_step = trainer.take_step, receive_sigterm(2, rank=1)
    with pytest.raises(TrainingStopped):
        trainer.train(small_job(corpus, 2), directory / "stopped")
    assert [path.name for path in (directory / "stopped" / "checkpoints").iterdir()] == ["step_00000002"]
    records = metrics.read(directory / "stopped" / "metrics.jsonl")
    assert "eval_loss" not in records[1], "a run that should stop does not evaluate"
    trainer.take_step = take_step
    preemption._received_signals.clear()
    for name in ("stopped", "whole"):
        trainer.train(small_job(corpus, 2), directory / name)


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_and_resuming_is_exact(tmp_path):
    run_ranks(stop_and_resume, 2, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)
    stopped, whole = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("stopped", "whole"))
    assert [record["loss"] for record in stopped] == [record["loss"] for record in whole]
    assert len(whole) == 4
    losses = [{name: loss for name, loss in records[1].items() if "loss" in name} for records in (stopped, whole)]
    assert losses[0] == losses[1], "the next launch makes up for the evaluation"
    assert "eval_loss" in losses[0], "the next launch makes up for the evaluation"


@pytest.mark.slow
def test_sigterm_in_the_last_step_only_stops_the_evaluation(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "take_step", receive_sigterm(4, rank=0))
    config = small_job(corpus, 1)
    with one_rank():
        with pytest.raises(TrainingStopped):
            trainer.train(config, tmp_path / "run")
        preemption._received_signals.clear()
        monkeypatch.setattr(trainer, "is_evaluated", lambda run, step: False)
        summary = trainer.train(config, tmp_path / "without evaluation")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
    assert summary["steps"] == 4
    assert (tmp_path / "without evaluation" / "summary.json").exists()


def job_of_micro_steps(corpus: str, steps: int = 4, **parallel: object) -> Config:
    config = small_job(corpus, parallel.pop("ring", 1))
    trainer = {"steps": steps, "accumulate": 6, "eval_every": 0, "eval_tokens": 61}
    values = {"model.layers": 1, "parallel.ulysses": parallel.pop("ulysses", 1)}
    return with_settings(config, values | {f"trainer.{name}": value for name, value in trainer.items()})


def receive_sigterm_in_micro_step(number: int, rank: int = 0) -> list[int]:
    """Let one rank receive SIGTERM in this micro-step of the launch, counted from 1. Return the micro-steps that begin."""
    begun, compute_loss = [], step.compute_loss

    def compute_loss_with_signal(*arguments):
        begun.append(len(begun) + 1)
        if begun[-1] == number and dist.get_rank() == rank:
            receive_signal(signal.SIGTERM)
        return compute_loss(*arguments)

    step.compute_loss = compute_loss_with_signal
    return begun


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "cache")
        trainer.train(job_of_micro_steps(write_corpus(directory / "corpus")), directory / "run")
    return directory / "run"


@pytest.mark.parametrize(
    ("micro_step", "every", "saved", "begun"),
    [
        (14, 0, 2, 15),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                (1, 0, None, 2),
                (16, 1, 2, 17),  # This launch has already saved step 2.
                *((6, 0, 1, 6), (23, 0, 4, 24)),  # The request comes too late to stop the step.
                *((7, 0, 1, 8), (10, 1, 1, 11), (15, 2, 2, 16), (22, 0, 3, 23)),
            )
        ),
    ],
)
def test_request_stops_between_micro_steps_without_a_trace(
    micro_step, every, saved, begun, whole, corpus, tmp_path, monkeypatch
):
    """The loss of every step, and the final parameters, are the same as without the request."""
    config = job_of_micro_steps(corpus)
    config = with_settings(config, {"trainer.checkpoint_every": every})
    saves, save = [], trainer.save_checkpoint
    monkeypatch.setattr(trainer, "save_checkpoint", lambda run, path, *rest: saves.append(rest[0]) or save(run, path, *rest))
    monkeypatch.setattr(step, "compute_loss", step.compute_loss)
    with one_rank():
        micro_steps = receive_sigterm_in_micro_step(micro_step)
        with pytest.raises(TrainingStopped):
            trainer.train(config, tmp_path / "run")
        assert len(micro_steps) == begun
        assert (saves or [None])[-1] == saved
        assert len(saves) == len(set(saves))
        assert [each["step"] for each in metrics.read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, (saved or 0) + 1))
        preemption._received_signals.clear()
        trainer.train(config, tmp_path / "run")
    runs = [metrics.read(path / "metrics.jsonl") for path in (tmp_path / "run", whole)]
    losses = [[(each["step"], each["loss"], each["grad_norm"], each["total_tokens"]) for each in records] for records in runs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    states = [path / "checkpoints" / "step_00000004" for path in (tmp_path / "run", whole)]
    shards = [sorted(path.glob("*.distcp")) for path in states]
    assert shards[0]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def stop_between_micro_steps(corpus: str, directory: Path, parallel: dict[str, int]) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    micro_steps = receive_sigterm_in_micro_step(9, rank=dist.get_world_size() - 1)
    with pytest.raises(TrainingStopped):
        trainer.train(job_of_micro_steps(corpus, **parallel), directory / "run")
    assert len(micro_steps) == 10, "all ranks stop before the same micro-step"
    preemption._received_signals.clear()
    for name in ("run", "whole"):
        trainer.train(job_of_micro_steps(corpus, **parallel), directory / name)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"ring": 2}, id="ring", marks=pytest.mark.slow),
        pytest.param({"ring": 1}, id="data-parallel", marks=pytest.mark.slow),
        pytest.param({"ring": 2, "ulysses": 2}, id="Ulysses", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_before_the_same_micro_step(parallel, tmp_path):
    run_ranks(stop_between_micro_steps, 2, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path, parallel)
    stopped, whole = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [each["loss"] for each in stopped] == [each["loss"] for each in whole]
    assert len(whole) == 4


def leave_evaluation() -> None:
    """On every rank: rank 1 is asked to stop in the first batch."""
    run, batches = SimpleNamespace(device=torch.device("cpu"), config=Config()), []
    with pytest.raises(StoppedEarly):
        for batch in until_stopped(run, range(9)):
            batches.append(batch)
            if dist.get_rank() == 1:
                preemption._received_signals.add(signal.SIGTERM)
    assert batches == [0, 1]


def test_all_ranks_leave_an_evaluation_before_the_same_batch(tmp_path):
    run_ranks(leave_evaluation, 2, tmp_path / "store")


def exceed_time_limit(step: int):
    """A replacement for `take_step` in which the time limit passes before one step."""
    take_step = trainer.take_step

    def take_step_after_limit(run, number, *arguments):
        if number == step:
            preemption.LAUNCH_TIME -= 1e6
        return take_step(run, number, *arguments)

    return take_step_after_limit


@pytest.mark.slow
@pytest.mark.parametrize(("step", "message"), [(2, "step 2 is saved"), (4, "before ")], ids=["in a job", "between two jobs"])
def test_time_limit_stops_a_sweep(step, message, corpus, tmp_path, run_command_line, monkeypatch, capfd):
    """If the limit passes in the last step of a job, this job is complete, and the next one does not start."""
    monkeypatch.setattr(preemption, "LAUNCH_TIME", preemption.LAUNCH_TIME)
    monkeypatch.setattr(trainer, "take_step", exceed_time_limit(step))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=4", "trainer.time_limit_s=1e5"]
    assert run_command_line("-m", *settings, "data.seed=0,1") == 0
    (stopped,) = [text for text in capfd.readouterr().out.splitlines() if text.startswith("stopped ")]
    assert message in stopped
    directory = tmp_path / "outputs" / "a"
    assert [path.name for path in directory.glob("*/checkpoints/*")] == [f"step_0000000{step}"]
    assert (directory / "seed=0" / "summary.json").exists() == (step == 4)
    assert "stopped" in (directory / "sweep.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_ranks"),
    [
        pytest.param(signal.SIGTERM, True, id="SIGTERM to torchrun and its ranks"),
        pytest.param(signal.SIGINT, False, id="Ctrl-C"),
        pytest.param(signal.SIGHUP, False, id="SIGHUP to torchrun"),
        pytest.param(signal.SIGKILL, False, id="torchrun is killed"),
    ],
)
def test_signal_to_torchrun_saves_a_checkpoint(number, to_ranks, tmp_path):
    """A scheduler sends SIGTERM to torchrun and to its ranks. A terminal sends SIGINT to torchrun, which forwards it.

    If torchrun is killed, its ranks notice it.
    """
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=100000"]
    directory, log = tmp_path / "outputs" / "a", tmp_path / "output.log"
    with start(2, tmp_path, *settings, "trainer.checkpoint_every=0") as process:
        wait_until(lambda: metrics.read(directory / "metrics.jsonl"), process, tmp_path)
        ranks = descendants(process.pid)
        for pid in (process.pid, *(ranks if to_ranks else ())):
            os.kill(pid, number)
        process.wait(100)
        wait_for_end(ranks)
    steps = len(metrics.read(directory / "metrics.jsonl"))
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    assert f"step {steps} is saved" in log.read_text()
    assert (directory / "loss.png").exists()
    name = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}.get(number, "SIGTERM")
    assert log.read_text().count(f"{name}: the run ends") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("generate.py", ["tokens=1000000"]),
        ("evaluate.py", ["evaluate=recall", "data.seq_len=64", "trainer.eval_tokens=1000000000"]),
    ],
    ids=["generation", "evaluation"],
)
def test_worker_of_a_command_ends_if_torchrun_is_killed(script, arguments, tmp_path):
    model = unpack(2, tmp_path / "run")
    with start(1, tmp_path, f"run={model}", "trainer.device=cpu", *arguments, script=ROOT / "train" / script) as process:
        wait_until(lambda: "weights " in (tmp_path / "output.log").read_text(), process, tmp_path)
        (worker,) = descendants(process.pid)
        process.kill()
        process.wait()
        try:
            wait_for_end([worker])
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("is_stuck", [False, True])
def test_second_ctrl_c_ends_the_process_at_once(is_stuck):
    """The process ends even while it waits in a call that never returns to Python."""
    context = multiprocessing.get_context("forkserver")
    started, noticed = context.Event(), context.Event()
    process = context.Process(target=ignore_requests, args=(started, noticed, is_stuck))
    process.start()
    assert started.wait(100)
    os.kill(process.pid, signal.SIGINT)
    assert is_stuck or noticed.wait(100)
    process.join(0.5)
    assert process.exitcode is None
    os.kill(process.pid, signal.SIGINT)
    process.join(100)
    assert process.exitcode == (130 if is_stuck else -signal.SIGINT)


def ignore_requests(started: Event, noticed: Event, is_stuck: bool) -> None:
    with one_rank(), handle_stop_signals():
        started.set()
        if is_stuck:
            threading.Event().wait(1000)
        while not stop_requested(None):
            time.sleep(0.01)
        noticed.set()
        time.sleep(1000)


@pytest.mark.slow
def test_launch_begins_when_the_process_starts():
    """The seconds in which Python and torch start count as well."""
    code = "import time; start = time.monotonic(); time.sleep(1); from ringattn.train import preemption; "
    code += "print(start - preemption.LAUNCH_TIME)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert 0 <= float(output) < 30  # Python starts in less than a second, unless the machine is busy


def request_on_rank_1() -> None:
    if dist.get_rank() == 1:
        preemption._received_signals.add(signal.SIGTERM)
    assert preemption.any_rank_stop_requested(None)


def test_request_of_one_rank_between_two_jobs_is_enough(tmp_path):
    run_ranks(request_on_rank_1, 2, tmp_path / "store")


def test_second_launch_in_the_same_directory_is_an_error(corpus, tmp_path, run_command_line, only_error):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=1"]
    (tmp_path / "outputs" / "a").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "outputs" / "a" / ".lock"):
        assert run_command_line(*settings) == 1
        assert "outputs/a" in only_error()
    assert run_command_line(*settings) == 0


def keep_lock(directory: Path) -> None:
    with one_rank(), acquire_run_directory(directory):
        (directory / "locked").touch()
        time.sleep(100)


def test_lock_is_released_when_its_process_is_killed(tmp_path):
    holder = multiprocessing.get_context("forkserver").Process(target=keep_lock, args=(tmp_path,))
    holder.start()
    while not (tmp_path / "locked").exists():
        time.sleep(0.01)
    with one_rank():
        with pytest.raises(ConfigError, match=str(tmp_path)), acquire_run_directory(tmp_path):
            pass
        holder.kill()
        holder.join()
        with acquire_run_directory(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=errno.errorcode.get)
def test_training_does_not_require_a_file_system_with_locks(number, tmp_path, monkeypatch, caplog):
    """Without locks, nothing prevents a second launch. A marker file would, but it would outlive a process that is killed."""

    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unsupported)
    launches = []
    with one_rank(), acquire_run_directory(tmp_path), acquire_run_directory(tmp_path):
        launches.append("second")
    assert launches == ["second"]
    assert "do not launch this run twice" in caplog.text


@pytest.mark.parametrize(
    ("create", "reason"),
    [(Path.mkdir, "it is a folder"), (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "No such device")],
    ids=["folder", "socket"],
)
def test_lock_that_cannot_be_used_is_reported(create, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # The path of a socket must be short.
    create(Path(".lock"))
    with one_rank(), pytest.raises(ConfigError, match=rf"\.lock cannot be locked \({reason}.*remove it"):
        acquire_run_directory(Path()).__enter__()


def test_lock_that_is_a_link_is_replaced(tmp_path):
    """The lock on the target of the link would not be the lock of this directory."""
    (tmp_path / "target").write_text("own")
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    another = pytest.raises(ConfigError, match="another process")
    with one_rank(), acquire_run_directory(tmp_path), another, acquire_run_directory(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "own"
