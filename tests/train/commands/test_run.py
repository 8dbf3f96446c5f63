"""Tests of the training command: errors in one line, sweeps, and what happens to the other ranks if one rank fails."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ringattn.comm.p2p import P2PTransport
from ringattn.train import trainer
from ringattn.train.commands import run
from ringattn.train.commands.launch_settings import resolve_settings
from ringattn.train.parallel.memory.capacity import InsufficientMemory
from ringattn.train.settings.config import check
from tests.train.launch import ROOT, SMALL, launch, launch_ranks, own_errors, write_corpus
from tests.train.settings.test_resolution import write_checkpoint

pytestmark = pytest.mark.timeout(300)

# For each kind of mistake: the overrides, and what the message must name. test_config.py has the mistakes that `check` finds.
MISTAKES = {
    "unknown option": (["model.width=3"], ["model.width", "vocab_size, layers, dim"]),
    "unknown option, added with +": (["+model.width=3"], ["model.width"]),
    "unknown group": (["color=red"], ["color", "name, model, data"]),
    "unknown file of a group": (["model=huge"], ["model", "1.4b", "8b", "tiny"]),
    "wrong type": (["model.layers=two"], ["model.layers", "two", "Integer"]),
    "no value": (["trainer.steps"], ["trainer.steps", "EQUAL"]),
    "~ without quotes": (["data.path=~/c/*.txt"], ["data.path=~/c/*.txt", "quote"]),
    "brackets without quotes": (["data.split=train[:10]"], ["data.split=train[:10]", "'['", "quote"]),
    "reference to a missing key": (["data.column=${foo}"], ["data.column", "foo"]),
    "invalid setting": (["model.window=0"], ["model.window=0", "from 1 to"]),
    "seed of more than 64 bits": (["trainer.seed=99999999999999999999"], ["trainer.seed=99999999999999999999"]),
    "no GPU": (["trainer.device=cuda"], ["trainer.device=cuda", "trainer.device=cpu"]),
    "kernels for GPUs": (["parallel.kernel=triton"], ["parallel.kernel=triton", "parallel.kernel=auto"]),
    "fastest mesh on CPUs": (["parallel=fastest", "trainer.tokens_per_step=128"], ["parallel=fastest", "GPU", "parallel.ring"]),
    "fastest mesh and a ring": (["parallel=fastest", "parallel.ring=1"], ["parallel.ring=1", "parallel.mesh=fastest"]),
    "fastest mesh of too few tokens": (["parallel=fastest", "trainer.tokens_per_step=64"], ["tokens_per_step=64", "of 128"]),
    "missing data file": (["data.path=/missing/*.txt"], ["data.path=/missing/*.txt"]),
    "no data path": (["data.path=null"], ["data.source=text", "data.path"]),
    "corpus shorter than a sequence": (["data.seq_len=100000"], ["data.seq_len=100000", "100,001"]),
    "held-out text that is trained on": (["data.eval_split=train", "data.eval_fraction=0.01"], ["data.eval_split=train"]),
    "missing held-out files": (["data.eval_path=/missing", "data.eval_fraction=0.01"], ["data.eval_path=/missing"]),
    "weights of neither format": (["trainer.init_from=/missing"], ["trainer.init_from=/missing", "step_"]),
    "weights of a missing checkpoint": (["trainer.init_from=/x/step_00000001"], ["/x/step_00000001"]),
    "folder that is not a checkpoint": (["trainer.resume=."], ["step_"]),
    "missing checkpoint": (["trainer.resume=/missing"], ["/missing"]),
    "no name": (["name=null"], ["name=null"]),
    "name with a slash": (["name=../../x"], ["error: name=../../x must", "hydra.run.dir"]),
    "deleted group": (["~model"], ["~model", "deletes"]),
    "number in place of a boolean": (["model.qkv_bias=2"], ["model.qkv_bias=2", "true or false"]),
    "model that does not fit into memory": (["model.vocab_size=1000000000"], ["GiB", "this host"]),
    "unknown option of the command": (["--nonsense"], ["--nonsense", "--hydra-help"]),
    "empty name": (["name="], ["name="]),
    "file in place of the directory": (["hydra.run.dir=corpus/00.txt"], ["directory", "corpus/00.txt"]),
    "mistyped option": (["lr=3"], ["unknown option lr: did you mean optim.lr?"]),
    "option of an unknown group": (["+x.y=1"], ["x"]),
    "prompt that is not UTF-8": (["trainer.sample_tokens=1", "trainer.sample_prompt='a\udcff'"], ["sample_prompt=a?", "UTF-8"]),
    "W&B without a login": (["logger.wandb=online"], ["logger.wandb=online", "wandb login"]),
}


@pytest.mark.parametrize(
    ("overrides", "named"),
    # Every third mistake is quick, because Hydra composes the settings for each of them.
    [pytest.param(*x, id=name, marks=pytest.mark.slow if i % 3 else ()) for i, (name, x) in enumerate(MISTAKES.items())],
)
def test_mistake_is_reported_without_a_traceback(overrides, named, corpus, run_command_line, only_error, monkeypatch):
    if "trainer.device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert run_command_line(*SMALL, f"data.path={corpus}", *overrides) == 1
    error = only_error()
    assert [part for part in named if part not in error] == []


@pytest.mark.parametrize("mode", [[], ["-m"]], ids=["job", "sweep"])
def test_no_directory_is_created_for_an_invalid_name(mode, run_command_line, only_error, tmp_path):
    before = set(tmp_path.parent.iterdir())
    assert run_command_line(*mode, "name=../../escaped") == 1
    assert "hydra.run.dir" in only_error()
    assert set(tmp_path.parent.iterdir()) == before
    assert not (tmp_path / "outputs").exists()


def test_hydra_selects_another_location(corpus, run_command_line, tmp_path):
    arguments = [*SMALL, f"data.path={corpus}", "trainer.steps=1"]
    assert run_command_line(*arguments, "hydra.run.dir=other/place") == 0
    assert (tmp_path / "other" / "place" / "summary.json").exists()
    assert not (tmp_path / "outputs").exists()


def test_reader_of_the_table_of_a_sweep_may_exit(run_command_line, monkeypatch, capfd):
    monkeypatch.setattr(run, "run_hydra", lambda run_job: 0)
    monkeypatch.setattr(run, "Jobs", lambda: Mock(outcomes=["first", "second"], directory=None, has_errors=lambda: False))
    monkeypatch.setattr(run, "sweep_table", lambda outcomes: "table")
    monkeypatch.setattr(sys, "stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    assert run_command_line() == 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_sweep_over_names_is_an_error(corpus, run_command_line, capfd):
    """Jobs with different names would have directories outside the directory of the sweep."""
    assert run_command_line("-m", *SMALL, f"data.path={corpus}", "name=a,b") == 1
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert [re.search("name=(.)", text)[1] for text in errors] == ["a", "b"]


@pytest.mark.slow
def test_sweep_continues_after_an_invalid_job(tmp_path):
    """The jobs of a sweep run on two ranks, one after another, each in its own directory. A table compares them at the end."""
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=3"]
    succeeded, stdout, stderr = launch_ranks(2, tmp_path, "-m", *settings, "data.seq_len=64,1,128")
    assert not succeeded
    assert "Traceback" not in stderr
    errors = [text for text in stderr.splitlines() if text.startswith("error:")]
    assert len(errors) == 1, "only rank 0 reports an error"
    assert "data.seq_len=1" in errors[0], "only rank 0 reports an error"

    (sweep,) = (tmp_path / "outputs").iterdir()
    directories = [f"seq_len={seq_len}" for seq_len in (1, 128, 64)]
    assert sorted(path.name for path in sweep.iterdir()) == ["multirun.yaml", *directories, "sweep.md", "sweep.png"]
    for seq_len in (64, 128):
        job = f"seq_len={seq_len}"
        summary = json.loads((sweep / job / "summary.json").read_text())
        assert (summary["seq_len"], summary["ranks"], summary["ring"]) == (seq_len, 2, 2)
        assert not (sweep / job / ".hydra").exists()
    table = (sweep / "sweep.md").read_text()
    assert table.strip() in stdout
    cells = [text.split(" | ") for text in table.splitlines()[4:]]
    assert [(row[0], row[1] == "failed") for row in cells] == [
        ("| data.seq_len=64", False),
        ("| data.seq_len=1", True),
        ("| data.seq_len=128", False),
    ]


@pytest.mark.slow
def test_sweep_resumes_its_jobs_only_with_their_settings(corpus, tmp_path, run_command_line, only_error, capfd):
    """The jobs of the second sweep have another order. The third sweep differs in settings that all jobs have in common."""
    settings = [*SMALL, f"data.path={corpus}", "name=a", "model.layers=1", "optim.lr=0.01", "parallel.layout=zigzag"]
    assert run_command_line("-m", *settings, "data.seed=0,1", "trainer.steps=1") == 0
    more = ["data.seed=2,1", "trainer.steps=2", "trainer.checkpoint_every=7"]
    capfd.readouterr()
    assert run_command_line("-m", *settings, *more) == 0
    assert re.findall(r"resumed .*/(.*)/checkpoints/(\w+),", capfd.readouterr().out) == [("seed=1", "step_00000001")]
    sweep = tmp_path / "outputs" / "a"
    assert sorted(path.parent.name for path in sweep.glob("*/summary.json")) == ["seed=0", "seed=1", "seed=2"]
    table = (sweep / "sweep.md").read_text().splitlines()
    assert [row.split(" | ")[3] for row in table[4:]] == ["256", "256"], "two steps of two sequences of 64 tokens"

    saved = {path: path.read_bytes() for path in sweep.glob("seed=1/checkpoints/*/*")}
    others = ["optim.lr=0.5", "parallel.layout=striped", "data.seed=1,3", "trainer.steps=3"]
    assert run_command_line("-m", *settings, *others) == 1
    error = only_error()
    assert "seed=1/checkpoints" in error
    assert "optim.lr=0.01 (now 0.5)" in error
    assert "parallel.layout=zigzag (now striped)" in error
    assert "trainer.steps" not in error
    assert all(path.read_bytes() == content for path, content in saved.items())
    assert (sweep / "seed=3" / "summary.json").exists()


def record_messages(rank: int) -> None:
    """Write the receiver of every message of this rank to a file."""
    exchange = P2PTransport.exchange

    def exchange_and_record(transport, sends, receives):
        with open(f"receivers.{rank}", "a") as file:
            file.writelines(f"{receiver}\n" for _, receiver in sends)
        return exchange(transport, sends, receives)

    P2PTransport.exchange = exchange_and_record


@pytest.mark.slow
def test_jobs_of_a_sweep_use_the_state_ring_of_eight_ranks(tmp_path):
    """Both jobs have the same mask, so the second job could use the plans of the first job without logging its choice."""
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "parallel=state_ring", "parallel.layout=zigzag"]
    settings += ["trainer.steps=2", "data.mask_documents=false", "optim.lr=0.01,0.02"]
    succeeded, stdout, stderr = launch_ranks(8, tmp_path, "-m", *settings, prepare=record_messages)
    assert succeeded, stderr
    for direction, tensors in (
        ("forward", "(q) and the results (m, l, o)"),
        ("backward", "(q, dout, lse, delta) and the results (dq)"),
    ):
        choice = f"{direction}: state ring of 8 ranks over gloo; {tensors} are relayed by neighbours; as requested"
        assert stdout.count(choice) == 2, "each job logs its choice once"
    assert stdout.count("schedule state, route relay") == 2
    # A rank sends its block and relays those of six other ranks. The results of all seven other ranks follow.
    passes = 2 * 2 * 2 * 2  # jobs, steps, layers, directions
    for rank in range(8):
        receivers = (tmp_path / f"receivers.{rank}").read_text().split()
        assert receivers == [str((rank + 1) % 8)] * (passes * (7 + 7))


@pytest.mark.slow
def test_context_sweep_trains_on_the_same_tokens_at_every_length(corpus, run_command_line, tmp_path):
    """The experiment is a sweep without the option -m. A relaunch of a completed sweep writes the same table."""
    arguments = [*SMALL, f"data.path={corpus}", "data.seq_len=32,128", "data.eval_fraction=0.1", "name=a"]
    sizes = ["trainer.batch_size=1", "trainer.tokens_per_step=256", "trainer.total_tokens=512", "trainer.eval_tokens=256"]
    for _ in range(2):
        assert run_command_line(*arguments, "experiment=context-sweep", *sizes) == 0
        summaries = [json.loads(path.read_text()) for path in sorted((tmp_path / "outputs" / "a").glob("*/summary.json"))]
        assert [summary["seq_len"] for summary in summaries] == [128, 32]
        assert len({(s["eval_targets"], s["eval_target_tokens"]) for s in summaries}) == 1
        assert {(s["tokens_per_step"], s["total_tokens"], s["steps"]) for s in summaries} == {(256, 512, 2)}
        assert all(
            s["estimated_memory_gib"] > 0 and s["eval_loss_by_length"][str(s["seq_len"])] == s["eval_loss"] for s in summaries
        )
    assert (tmp_path / "outputs" / "a" / "sweep.md").read_text().count("| 512 | 256 |") == 2
    assert (tmp_path / "outputs" / "a" / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sweep_over_lengths_has_the_same_tokens_per_step(corpus, run_command_line, tmp_path):
    """SMALL has two sequences per step, so a step at the longest length has 256 tokens. The same command again resumes."""
    arguments = ["-m", *SMALL, f"data.path={corpus}", "data.seq_len=32,128", "name=a"]
    for steps in (1, 2):
        assert run_command_line(*arguments, f"trainer.steps={steps}") == 0
        table = (tmp_path / "outputs" / "a" / "sweep.md").read_text()
        assert table.count(f"| {256 * steps} | 256 |") == 2


@pytest.mark.parametrize(
    ("varied", "rejected", "tokens"),
    [
        pytest.param("data.seq_len=32,100000,64", ["the corpus has"], 128, id="corpus is too short"),
        pytest.param("data.seq_len=32,64,0", ["data.seq_len=0: must be"], 128, id="invalid value", marks=pytest.mark.slow),
        pytest.param(
            "data.seq_len=32,64 data.path=/missing,corpus/*.txt",
            ["matches no file"] * 2,
            128,
            id="missing files",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data.seq_len=32,999999 model.vocab_size=300,1000000000",
            ["would need about", "the corpus has", "would need about"],
            64,
            id="too little memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "optim.lr=0.1,1000 data.seq_len=48", ["optim.lr=1000.0: must be"], 96, id="one length", marks=pytest.mark.slow
        ),
    ],
)
def test_sweep_checks_all_jobs_before_the_first_one(varied, rejected, tokens, corpus, run_command_line, capfd, tmp_path):
    """Jobs that cannot run are reported first, and their lengths do not count for the tokens of a step."""
    arguments = [*SMALL, "data=text", f"data.path={corpus}", "trainer.steps=1", "name=a", "model.layers=1"]
    assert run_command_line("-m", *arguments, *varied.split()) == 1
    output = capfd.readouterr()
    errors = [text for text in output.err.splitlines() if text.startswith("error: ")]
    assert all(reason in error and " cannot run: " in error for error, reason in zip(errors, rejected, strict=True)), errors
    rows = (tmp_path / "outputs" / "a" / "sweep.md").read_text().splitlines()
    cells = [row.split(" | ") for row in rows if row.startswith("| ") and "overrides" not in row]
    assert sum(row[1] in ("failed", "out of memory") for row in cells) == len(rejected)
    assert {row[4] for row in cells if row[1] not in ("failed", "out of memory")} == {str(tokens)}


def run_out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@pytest.mark.slow
def test_sweep_continues_after_a_job_that_runs_out_of_memory(corpus, run_command_line, only_error, monkeypatch, tmp_path):
    take_step = trainer.take_step

    def take_step_of_short_sequences(job, *arguments):
        return run_out_of_memory() if job.config.data.seq_len == 64 else take_step(job, *arguments)

    monkeypatch.setattr(trainer, "take_step", take_step_of_short_sequences)
    arguments = [*SMALL, f"data.path={corpus}", "trainer.steps=1", "name=a", "model.layers=1"]
    assert run_command_line("-m", *arguments, "data.seq_len=32,64,128") == 1
    assert "seq_len=64" in (error := only_error())
    assert "9.00 GiB" in error
    rows = [row.split(" | ") for row in (tmp_path / "outputs" / "a" / "sweep.md").read_text().splitlines()[4:]]
    assert [row[1] == "out of memory" for row in rows] == [False, True, False]


@pytest.mark.slow
def test_estimate_that_exceeds_the_memory_is_a_row_of_the_sweep(corpus, run_command_line, only_error, tmp_path):
    arguments = [*SMALL, f"data.path={corpus}", "trainer.steps=1", "name=a", "model.vocab_size=1000000000,300"]
    assert run_command_line("-m", *arguments) == 1
    assert "GiB" in only_error()
    rows = [row.split(" | ") for row in (tmp_path / "outputs" / "a" / "sweep.md").read_text().splitlines()[4:]]
    assert [row[1] == "out of memory" for row in rows] == [True, False]


def exhaust_memory_on_rank_1(rank: int) -> None:
    """Let rank 1 run out of memory in its first step."""
    if rank == 1:
        trainer.take_step = run_out_of_memory


@pytest.mark.slow
def test_one_of_several_ranks_runs_out_of_memory(tmp_path):
    """The launch ends, because rank 0 waits for rank 1. The table contains the job that ran out of memory."""
    arguments = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=3", "name=a", "data.seq_len=64,128"]
    succeeded, _, stderr = launch_ranks(2, tmp_path, "-m", *arguments, prepare=exhaust_memory_on_rank_1)
    assert not succeeded
    assert "rank 1 failed:" in stderr
    (row,) = (tmp_path / "outputs" / "a" / "sweep.md").read_text().splitlines()[4:]
    assert "out of memory" in row
    assert (tmp_path / "outputs" / "a" / "seq_len=64" / run.MEMORY_MARKER).exists()


def test_restarted_ranks_do_not_repeat_a_job_that_ran_out_of_memory(tmp_path):
    """A later launch by the user tries the job again."""
    run.check_earlier_attempt(tmp_path, attempt=2)
    (tmp_path / run.MEMORY_MARKER).touch()
    with pytest.raises(InsufficientMemory, match="out of memory"):
        run.check_earlier_attempt(tmp_path, attempt=2)
    run.check_earlier_attempt(tmp_path, attempt=1)
    run.check_earlier_attempt(tmp_path, attempt=2)


def fail_on_rank_1(rank: int) -> None:
    """Let rank 1 raise an error in its first step."""
    if rank == 1:
        trainer.take_step = Mock(side_effect=RuntimeError("an unexpected error"))


@pytest.mark.slow
def test_only_the_first_failure_is_reported(tmp_path):
    """Rank 1 fails in its first step. Rank 0 then waits for it in vain and fails as well, without a message."""
    arguments = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=3"]
    succeeded, _, stderr = launch_ranks(2, tmp_path, *arguments, prepare=fail_on_rank_1)
    assert not succeeded
    assert stderr.count("Traceback (most recent call last)") == 1
    assert "rank 1 failed:" in stderr
    assert "RuntimeError: an unexpected error" in stderr


def kill_rank_1(rank: int) -> None:
    """Let rank 1 be killed after its first step."""
    take_step = trainer.take_step

    def take_last_step(*arguments):
        result = take_step(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    if rank == 1:
        trainer.take_step = take_last_step


@pytest.mark.slow
def test_other_ranks_report_a_killed_rank(tmp_path):
    arguments = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=100000", "trainer.checkpoint_every=0"]
    succeeded, _, stderr = launch_ranks(2, tmp_path, *arguments, prepare=kill_rank_1)
    assert not succeeded
    assert "Traceback" not in stderr
    assert re.search(r"^rank 0 failed: .*rank", stderr, re.MULTILINE)


@pytest.fixture
def compose_on_gpus(monkeypatch, tmp_path) -> Callable[..., tuple[DictConfig, str]]:
    """A function that returns the settings and the recipe that Hydra composes on this number of GPUs."""

    def compose_settings(gpus: int, *arguments: str) -> tuple[DictConfig, str]:
        monkeypatch.chdir(tmp_path)
        OmegaConf.register_new_resolver("launch_time", lambda: "now", replace=True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: gpus)
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        configs = []
        assert run.run_hydra(lambda settings: configs.append((settings, HydraConfig.get().runtime.choices.recipe))) == 0
        return configs[0]

    return compose_settings


@pytest.mark.parametrize(
    ("gpus", "arguments", "recipe"),
    [
        (0, ["trainer.steps=7"], "cpu"),
        (1, ["trainer.steps=7"], "gpu"),
        (1, ["trainer.steps=7", "trainer.device=cpu"], "cpu"),
        (1, ["trainer.steps=7", "recipe=cpu"], "cpu"),
        (1, ["trainer.steps=7", "experiment=124m-64k"], "cpu"),
    ],
)
def test_device_selects_the_recipe(gpus, arguments, recipe, compose_on_gpus):
    """The command line overrides every setting of a recipe."""
    settings, chosen = compose_on_gpus(gpus, *arguments)
    assert chosen == recipe
    assert settings.trainer.steps == 7
    assert settings.data.seq_len == (65536 if "experiment=124m-64k" in arguments else {"cpu": 512, "gpu": 32768}[recipe])


@pytest.mark.parametrize(
    ("gpus", "arguments", "seq_len", "steps"),
    [
        (1, [], 32_768, 500),
        (2, [], 65_536, 500),
        (4, [], 131_072, 500),
        (8, [], 262_144, 500),
        (8, ["parallel.ring=2"], 65_536, 500),
        (4, ["parallel=ulysses"], 131_072, 500),
        (4, ["data.seq_len=1000", "trainer.steps=9"], 1000, 9),
        (4, ["data=stdlib"], 131_072, 500),
    ],
    ids=lambda value: "" if isinstance(value, list) and not value else None,
)
def test_context_grows_with_the_gpus_that_share_a_sequence(gpus, arguments, seq_len, steps, compose_on_gpus):
    settings, _ = compose_on_gpus(gpus, *arguments)
    assert (settings.data.seq_len, settings.trainer.steps) == (seq_len, steps)
    assert settings.data.source == ("stdlib" if "data=stdlib" in arguments else "packages")
    config = run.to_config(settings)
    check(config, world_size=gpus)


def test_a_resumed_run_keeps_its_context_on_another_number_of_gpus(compose_on_gpus, tmp_path):
    saved, resumed = (run.to_config(compose_on_gpus(gpus)[0]) for gpus in (4, 2))
    write_checkpoint(tmp_path / "run", saved)
    config = resolve_settings(resumed, [], tmp_path / "run")
    assert (config.data.seq_len, config.trainer.steps) == (131_072, 500)


@pytest.mark.slow
def test_torchrun_runs_the_script(tmp_path):
    """The command of the README, on two ranks. test_preemption.py has a quick test with torchrun."""
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=2"]
    result = launch(2, tmp_path, *settings)
    assert result.returncode == 0, result.stderr
    assert own_errors(result.stderr).count("error") == 0, result.stderr
    assert result.stdout.count("step 2/2") == 1, "only rank 0 writes to the console"


@pytest.mark.slow
def test_script_does_not_import_other_packages_called_kernels_or_train(tmp_path):
    """The script imports its modules as parts of the installed package."""
    for name in ("kernels", "train"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text("raise ImportError('another package')")
    result = subprocess.run(
        [sys.executable, str(ROOT / "train" / "run.py"), "--cfg", "job", "trainer.steps=7"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert "steps: 7" in result.stdout
    assert not (tmp_path / "outputs").exists()


def test_configs_are_found_from_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(run.CONFIGS).is_absolute()
    assert (run.CONFIGS / "train.yaml").exists()
