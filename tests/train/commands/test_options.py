"""Tests of the commands train/generate.py and train/evaluate.py on a finished run and on a folder in Hugging Face's format."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from ringattn.train import setup
from ringattn.train.commands import evaluate, evaluate_needle, evaluate_recall, export, generate, prepare
from ringattn.train.commands.arguments import apply_overrides, help_text, run_program
from ringattn.train.commands.options import run_command, write_table_and_plot
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.parallel.memory import capacity
from ringattn.train.settings.config import Config, ConfigError
from tests.train.hub_models import write_folder
from tests.train.launch import ROOT, SMALL, launch_ranks, write_corpus

DEVICE = "trainer.device=cpu"


@pytest.fixture
def run_script(corpus: str, blank_pictures: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs one of the commands with its arguments, in this process, and returns the exit status."""

    def run_arguments(module: ModuleType, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        return run_command(module.run_command_line, module.Options, module.__doc__)

    return run_arguments


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains a finished run, "done", and its text."""
    directory = tmp_path_factory.mktemp("finished")
    text = f"data.path={write_corpus(directory / 'corpus')}", 'data.split="train[:50%]"', 'data.eval_split="train[50%:]"'
    small = [setting for setting in SMALL if not setting.startswith("data.eval_fraction")]
    settings = "name=done", "trainer.steps=2", "trainer.eval_tokens=512", "optim.warmup_steps=1"
    succeeded, _, stderr = launch_ranks(1, directory, *small, *text, *settings)
    assert succeeded, stderr
    return directory


@pytest.fixture
def finished(directory: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a finished run, relative to the working directory."""
    monkeypatch.chdir(directory)
    return Path("outputs/done")


def contents(directory: Path) -> dict[Path, tuple[bytes, int]]:
    """The content and the time of the last change of every file."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def test_overrides_of_lists_are_read_from_the_command_line():
    config = apply_overrides(Config(), {"model.layer_types": "[sliding,full]", "model.window": "8"})
    assert (config.model.layer_types, config.model.window) == (["sliding", "full"], 8)
    assert apply_overrides(config, {"model.layer_types": "null"}).model.layer_types is None


def close_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard output a pipe that nobody reads."""
    closed = Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr(sys, "stdout", Mock(write=closed, flush=closed))


@pytest.mark.parametrize("module", [evaluate, export, generate, prepare])
def test_reader_of_the_help_may_exit(module, monkeypatch, capfd):
    close_output(monkeypatch)
    monkeypatch.setattr(logging, "shutdown", Mock())  # It would close the log of pytest.
    monkeypatch.setattr(os, "_exit", exit_process := Mock())
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    module.main()
    assert exit_process.call_args.args == (1,)
    assert capfd.readouterr().err == ""


def test_only_the_first_rank_shows_the_help_and_errors(monkeypatch, capfd):
    for rank, num_shown in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["command", "--help"])
        assert run_program(prepare.run_command_line, prepare.Options, prepare.__doc__) == 0
        monkeypatch.setattr(sys, "argv", ["command", "nothing"])
        assert run_program(prepare.run_command_line, prepare.Options, prepare.__doc__) == 1
        output = capfd.readouterr()
        assert (output.out.count("output=..."), output.err.count("error: nothing is not of the form")) == (num_shown, num_shown)


def test_an_evaluation_is_written_although_the_reader_of_the_output_has_exited(tmp_path, monkeypatch):
    close_output(monkeypatch)
    with pytest.raises(BrokenPipeError):
        write_table_and_plot(tmp_path / "new", "evaluation", "table", lambda path: path.touch())
    assert (tmp_path / "new" / "evaluation.md").read_text() == "table"
    assert (tmp_path / "new" / "evaluation.png").exists()


def test_a_full_disk_leaves_the_earlier_table_next_to_the_earlier_picture(tmp_path):
    (tmp_path / "evaluation.md").write_text("old")
    plot = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(ConfigError, match="No space left on device; choose another folder with output="):
        write_table_and_plot(tmp_path, "evaluation", "new", plot)
    assert (tmp_path / "evaluation.md").read_text() == "old"


@pytest.mark.slow
def test_finished_run_is_inspected_without_a_change(finished, run_script, capfd):
    """A finished run is sampled and then evaluated at three lengths. All its files stay equal."""
    before = contents(finished)
    assert len(before) > 5
    assert run_script(generate, "run=done", "prompt=def f(", "tokens=20", DEVICE) == 0
    text = capfd.readouterr().out
    assert text.startswith("def f(")
    assert len(text) > len("def f(") + 2
    assert run_script(evaluate, "run=done", "data.seq_len=32,64,300", DEVICE) == 0
    table = capfd.readouterr().out
    assert contents(finished) == before

    folder = Path("outputs/done-evaluation")
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.md", "evaluation.png"]
    assert (folder / "evaluation.md").read_text().strip() == table.strip()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    assert header == ["sequence length", "target tokens", "loss", "difference to 32 tokens"]
    assert [row[:2] for row in rows] == [["32", "512"], ["64", "512"], ["300", "512"]]
    assert all(4 < float(row[2].split(" ± ")[0]) < 8 for row in rows)
    for row in rows[1:]:
        (loss, _), (first, error) = row[2].split(" ± "), rows[0][2].split(" ± ")
        difference, difference_error = row[3].split(" ± ")
        assert float(difference) == pytest.approx(float(loss) - float(first), abs=1.5e-4)
        assert 0 < float(difference_error) < float(error)


def test_recall_of_a_finished_run_is_evaluated_without_a_change(finished, run_script, capfd):
    """A model that was trained on text is evaluated at two lengths. All files of the run stay equal."""
    before = contents(finished)
    arguments = "data.seq_len=32,64", "output=recall", "trainer.batch_size=22"
    assert run_script(evaluate, "run=done", "evaluate=recall", *arguments, DEVICE) == 0
    assert contents(finished) == before
    assert sorted(path.name for path in Path("recall").iterdir()) == ["recall.md", "recall.png"]
    text = Path("recall/recall.md").read_text()
    output = capfd.readouterr()
    assert output.out == text
    assert "| 32 tokens | 64 tokens |" in text
    assert "evaluate: 100%" in output.err
    rows = [row.strip("|").split("|") for row in text.splitlines() if "% |" in row]
    assert [row[0].strip() for row in rows] == [f"{position}%" for position in range(0, 101, 10)]
    # After two steps of training on text, the model cannot recall anything.
    assert all(float(cell.strip(" %")) < 30 for row in rows for cell in row[1:])


def test_evaluation_repeats_the_evaluation_of_the_training(finished, run_script, capfd, monkeypatch):
    titles = []
    monkeypatch.setattr(evaluate, "plot_losses", lambda losses, output, title: titles.append(title))
    assert run_script(evaluate, f"run={finished}/checkpoints/step_00000002", "output=here", DEVICE) == 0
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    (row,) = [line for line in Path("here/evaluation.md").read_text().splitlines() if line.startswith("| 64 |")]
    assert float(row.split("|")[3].split("±")[0]) == pytest.approx(last["eval_loss"], abs=1e-4)
    assert "evaluate: 100%" in capfd.readouterr().err
    assert re.fullmatch(r"done: [\d,]+ parameters, [\d,]+ target tokens, 1 rank", titles[0])


def test_finished_run_is_inspected_with_fp8_attention(finished, run_script, capfd):
    """The table says that it was computed with FP8, and the losses hardly differ."""

    def losses(*arguments: str) -> tuple[str, list[float]]:
        assert run_script(evaluate, "run=done", "output=fp8", DEVICE, *arguments) == 0
        lines = capfd.readouterr().out.splitlines()
        return lines[0], [float(line.split("|")[3].split("±")[0]) for line in lines if line.startswith("| 64 |")]

    (_, exact), (title, fp8) = losses(), losses("trainer.fp8_attention=inference")
    assert "with FP8 attention" in title
    assert fp8 == pytest.approx(exact, abs=0.002)
    text = "run=done", "prompt=def f(", "tokens=20", DEVICE, "trainer.fp8_attention=inference"
    assert run_script(generate, *text) == 0
    assert capfd.readouterr().out.startswith("def f(")


def test_other_text_is_evaluated(finished, run_script, capfd):
    """The path of the text belongs to all of its files, although the run used only some files of its own text."""
    Path("other.txt").write_text("abc" * 100)
    assert run_script(evaluate, "run=done", "data.path=other.txt", "data=text", "trainer.eval_tokens=9999", DEVICE) == 0
    output = capfd.readouterr().out
    assert "other.txt data.split=train," in output
    assert "| 64 | 300 |" in output
    assert "one document" in output


@pytest.mark.slow
def test_generation_depends_on_its_options(finished, run_script, capfd):
    def text(*arguments: str) -> str:
        assert run_script(generate, "run=done", "prompt=a=b", "tokens=30", DEVICE, *arguments) == 0
        return capfd.readouterr().out

    assert text("seed=1") == text("seed=1") != text("seed=2")
    assert text("seed=1", "top_p=1e-6") == text("temperature=0") != text("seed=1")


def write_hub_folder(folder: Path) -> Path:
    """Write a model with a tokenizer whose tokens are bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    write_folder(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)} | {"<|endoftext|>": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_hugging_face_folder_is_inspected(corpus, run_script, capfd, tmp_path):
    """The model and the tokenizer come from the folder."""
    folder = write_hub_folder(tmp_path / "model")
    before = contents(folder)
    assert run_script(generate, f"run={folder}", "prompt=ä b", "tokens=5", DEVICE) == 0
    assert capfd.readouterr().out.startswith("ä b")
    text = "data=text", f"data.path={corpus}", "data.seq_len=64", "trainer.eval_tokens=128"
    assert run_script(evaluate, f"run={folder}", *text, DEVICE) == 0
    assert Path("outputs/model-evaluation/evaluation.png").exists()
    assert contents(folder) == before


MISTAKES = {
    "missing run": (generate, ["run=missing"], ["run=missing", "the runs in outputs/ are done)", "config.json"]),
    "no run": (generate, [], ["run=", "--help"]),
    "no value": (generate, ["run=done", "seed"], ["seed", "name=value"]),
    "unknown option": (generate, ["run=done", "length=3"], ["length", "prompt, tokens"]),
    "setting without an effect": (generate, ["run=done", "optim.lr=3"], ["optim.lr", "trainer.device"]),
    "unknown setting": (generate, ["run=done", "model.width=3"], ["model.width", "dim"]),
    "wrong type": (generate, ["run=done", "tokens=many"], ["tokens=many", "integer"]),
    "wrong type of a setting": (generate, ["run=done", "trainer.compile=maybe"], ["trainer.compile", "maybe"]),
    "prompt that is not UTF-8": (generate, ["run=done", "prompt=a\udcff"], ["prompt=a", "UTF-8"]),
    "no tokens": (generate, ["run=done", "tokens=0"], ["tokens=0", "at least 1"]),
    "many tokens": (generate, ["run=done", f"tokens={10**12}"], [f"tokens={10**12}", "below 2**31"]),
    "nan": (generate, ["run=done", "temperature=nan"], ["temperature=nan", "finite"]),
    "tiny temperature": (generate, ["run=done", "temperature=1e-300"], ["temperature=1e-300", "at least 1e-30"]),
    "no nucleus": (generate, ["run=done", "top_p=0"], ["top_p=0", "above 0"]),
    "large seed": (generate, ["run=done", f"seed={2**64}"], ["seed=", "2**63"]),
    "other shapes": (generate, ["run=done", "model.dim=64"], ["shape"]),
    "other heads": (generate, ["run=done", "model.heads=2"], ["model.heads=4 (now 2)"]),
    "no length": (evaluate, ["run=done", "data.seq_len=64,"], ["data.seq_len", "Integer"]),
    "length of 0": (evaluate, ["run=done", "data.seq_len=64,0"], ["data.seq_len=0", "from 1 to"]),
    "length beyond the text": (evaluate, ["run=done", "data.seq_len=10000000"], ["data.seq_len=10000000", "more text"]),
    "unknown evaluation": (evaluate, ["run=done", "evaluate=speed"], ["evaluate=speed", "loss, recall"]),
    "recall with a text": (evaluate, ["run=done", "evaluate=recall", "data.path=a"], ["data.path", "evaluate=recall"]),
    "recall in short sequences": (
        evaluate,
        ["run=done", "evaluate=recall", "data.seq_len=64,3"],
        ["data.seq_len=3", "at least 4"],
    ),
    "held-out text of training": (evaluate, ["run=done", "data.eval_path=a.txt"], ["data.eval_path=a.txt", "use data.path"]),
    "missing text": (evaluate, ["run=done", "data.path=/missing/*.txt"], ["data.path=/missing/*.txt"]),
    "file in place of a folder": (evaluate, ["run=done", "output=outputs/done/metrics.jsonl"], ["metrics.jsonl", "output="]),
}


@pytest.mark.parametrize(("module", "arguments", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_reported_in_one_line(module, arguments, named, finished, run_script, only_error):
    before = contents(finished)
    assert run_script(module, *arguments, *([DEVICE] if arguments else [])) == 1
    error = only_error()
    assert [part for part in named if part not in error] == []
    assert contents(finished) == before


@pytest.mark.parametrize(("kind", "module"), [("loss", evaluate), ("recall", evaluate_recall), ("needle", evaluate_needle)])
def test_folder_that_cannot_be_written_is_reported_before_the_model_is_loaded(
    kind, module, finished, run_script, only_error, monkeypatch
):
    monkeypatch.setattr(module, "build_for_inference", build := Mock())
    assert run_script(evaluate, "run=done", f"evaluate={kind}", "output=outputs/done/metrics.jsonl/new", DEVICE) == 1
    assert "metrics.jsonl is not a writable folder; choose another folder with output=" in only_error()
    assert not build.called


@pytest.mark.parametrize(
    ("module", "arguments", "purpose"),
    [(generate, ["tokens=1000000"], "keys and values"), (evaluate, ["evaluate=recall", "data.seq_len=1000000"], "activations")],
    ids=["generate", "evaluate"],
)
def test_too_little_memory_is_reported_before_it_is_used(
    module, arguments, purpose, finished, run_script, only_error, monkeypatch
):
    monkeypatch.setattr(capacity, "host_memory", lambda: 2.0**25)
    monkeypatch.setattr(setup, "shard_model", build := Mock())
    assert run_script(module, "run=done", *arguments, DEVICE) == 1
    error = only_error()
    assert re.search(rf"each rank would need about [\d.]+ GiB \({purpose} .*fewer tokens, a smaller model or batch", error)
    assert not build.called


def test_run_without_held_out_text_requires_a_text(corpus, run_command_line, run_script, only_error):
    assert run_command_line(*SMALL, f"data.path={corpus}", "name=bare", "trainer.steps=1") == 0
    assert run_script(evaluate, "run=bare", DEVICE) == 1
    assert "data.path=" in only_error()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["64", "16,32"])
def test_held_out_fraction_is_evaluated(lengths, corpus, run_command_line, run_script, capfd):
    """At every sequence length, the evaluation uses the target tokens of the training."""
    fraction = "data.eval_fraction=0.02"
    assert run_command_line(*SMALL, f"data.path={corpus}", fraction, "name=part", "trainer.steps=1") == 0
    capfd.readouterr()
    assert run_script(evaluate, "run=part", f"data.seq_len={lengths}", DEVICE) == 0
    table = capfd.readouterr().out
    last = json.loads(Path("outputs/part/metrics.jsonl").read_text().splitlines()[-1])
    assert all(f"| {length} | {last['eval_target_tokens']:,} |" in table for length in lengths.split(","))
    if lengths == "64":
        assert f"{last['eval_loss']:.4f}" in Path("outputs/part-evaluation/evaluation.md").read_text()


@pytest.mark.parametrize(
    ("held_out", "change"),
    [
        (["data.eval_fraction=0.1"], "data.join=folder"),
        (["data.eval_fraction=0.1"], "another file"),
        (['data.split="train[:75%]"', 'data.eval_split="train[75%:]"'], "another file"),
    ],
)
def test_changed_held_out_text_is_an_error(held_out, change, corpus, run_command_line, run_script, only_error, tmp_path):
    """The text may contain documents on which the model was trained."""
    for name in "abcd":
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "a.txt").write_text(f"{name} abc" * 500)
    text = f"data.path={tmp_path}/text", *held_out
    small = [setting for setting in SMALL if not setting.startswith("data.eval_fraction")]
    assert run_command_line(*small, *text, "name=part", "trainer.steps=1") == 0
    arguments = "run=part", "data.seq_len=64", "trainer.eval_tokens=64", DEVICE
    assert run_script(evaluate, *arguments) == 0
    if change == "another file":
        (tmp_path / "text" / "z.txt").write_text("new" * 10_000)
    assert run_script(evaluate, *arguments, *([change] if "=" in change else [])) == 1
    assert "have changed since the training" in only_error()


def test_folder_without_a_tokenizer_is_an_error(corpus, run_script, only_error, tmp_path):
    write_folder(tmp_path / "model")
    assert run_script(generate, "run=model", DEVICE) == 1
    assert "model/tokenizer.json: No such file" in only_error()


def test_folder_without_a_tokenizer_is_inspected_with_another_tokenizer(corpus, run_script, capfd, tmp_path):
    """For example, the export of a model whose tokens are bytes has no tokenizer."""
    write_folder(tmp_path / "model")
    assert run_script(generate, "run=model", "prompt=a b", "tokens=5", "data.tokenizer=bytes", DEVICE) == 0
    assert capfd.readouterr().out.startswith("a b")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_script_explains_every_option(name, tmp_path):
    """The script runs in any directory and imports this package, not the folders of train/ or other packages."""
    command = [sys.executable, str(ROOT / "train" / f"{name}.py"), "--help"]
    for other in ("kernels", "train"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "__init__.py").write_text("raise ImportError('another package')")
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=250
    )
    module = {"generate": generate, "evaluate": evaluate}[name]
    assert result.returncode == 0
    assert result.stdout.strip() == help_text(module.Options, module.__doc__).strip()
    assert "run=...  (required)" in result.stdout


def test_pieces_are_yielded_when_their_characters_are_complete():
    """The euro sign has three bytes. A byte that starts no character is yielded with the next one."""
    tokens = [*"€a".encode(), 0xFF, ord("b"), 0xE2]
    pieces = list(generate.decode_stream(BytesTokenizer(), list(b"x"), tokens))
    assert pieces == ["x", "", "", "€", "a", "", "\N{REPLACEMENT CHARACTER}b", "\N{REPLACEMENT CHARACTER}"]


def test_no_optimizer_is_built(finished, run_script, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("an optimizer was built")

    monkeypatch.setattr(torch.optim.AdamW, "__init__", fail)
    assert run_script(generate, "run=done", "tokens=2", DEVICE) == 0
