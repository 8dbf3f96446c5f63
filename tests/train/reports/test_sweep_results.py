"""Tests of the table, the picture and the W&B run of a sweep."""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from ringattn.train.reports.sweep_results import Jobs, Outcome, log_to_wandb, plot_sweep, sweep_table, table_rows
from ringattn.train.settings.config import Config, LoggerConfig
from tests.train.wandb_files import read_segments

SUMMARY = {"final_loss": 2.5, "eval_loss": 2.75, "tokens_per_s": 12345.6, "tflops_per_rank": 0.0123, "mfu": None}
SUMMARY |= {"total_tokens": 20_000, "tokens_per_step": 1000, "peak_memory_gib": 1.0, "estimated_memory_gib": 0.75}
SHORT = SUMMARY | {"eval_loss_by_length": {"64": 3.0, "256": 2.5}}
LONG = SUMMARY | {"eval_loss_by_length": {"64": 3.25, "256": 2.25, "512": 2.0}, "tokens_per_s": 5000.0, "peak_memory_gib": 2.0}


def jobs_of_lengths(**results: dict | str) -> list[Outcome]:
    """One job per result. The lengths of the sequences are 256, 512, 1024 and so on."""
    lengths = [256 * 2**i for i in range(len(results))]
    parts = zip(lengths, results.values(), strict=True)
    return [Outcome(["name=a", f"data.seq_len={n}"], {"seq_len": str(n)}, result, Config(name="a")) for n, result in parts]


@pytest.fixture
def figure(monkeypatch) -> list[Figure]:
    """The figures that the test has saved."""
    figures: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), savefig(self, *args, **kwargs)))
    return figures


def test_table():
    outcomes = [
        Outcome(["a=1", "b=2"], result=SUMMARY),
        Outcome(["a=1", "b=3"]),
        Outcome(["a=1", "b=4"], result="stopped"),
    ]
    assert sweep_table(outcomes).splitlines() == [
        "Common to all: a=1",
        "",
        "| overrides | final loss (mean of the last tenth) | eval loss | tokens | tokens/step | tokens/s | TFLOP/s per rank | "
        "MFU | peak GiB per rank | estimated GiB per rank |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| b=2 | 2.5000 | 2.7500 | 20,000 | 1,000 | 12,346 | 0.0123 | - | 1.00 | 0.75 |",
        "| b=3 | failed | - | - | - | - | - | - | - | - |",
        "| b=4 | stopped | - | - | - | - | - | - | - | - |",
    ]


def test_table_has_the_losses_by_length():
    names, *rows = table_rows(jobs_of_lengths(short=SHORT, long=LONG, failed="out of memory"))
    assert names[-3:] == ["eval loss at 64 tokens", "eval loss at 256 tokens", "eval loss at 512 tokens"]
    assert [row[-3:] for row in rows] == [["3.0000", "2.5000", "-"], ["3.2500", "2.2500", "2.0000"], ["-", "-", "-"]]
    assert rows[2][1] == "out of memory"
    assert {len(row) for row in rows} == {len(names)}


def test_table_states_whether_the_losses_can_be_compared():
    """Jobs with the same target tokens have the same checksum. Jobs of earlier versions have none."""
    targets = {"eval_targets": 7, "eval_target_tokens": 16384, "eval_loss_error": 0.25}
    same = sweep_table(jobs_of_lengths(a=SHORT | targets, b=LONG | targets, failed="failed"))
    assert "means over the same 16,384 tokens; ±" in same
    assert "| 2.7500 ± 0.2500 |" in same
    for other in (LONG | targets | {"eval_targets": 8}, LONG):
        assert "cannot be compared" in sweep_table(jobs_of_lengths(a=SHORT | targets, b=other))
    assert "same" not in sweep_table(jobs_of_lengths(a=SHORT, b=LONG)), "jobs of an earlier version"


def test_picture_shows_every_job(figure, tmp_path):
    """The three panels on the left have the varied value on the x axis. The losses have one line per job."""
    plot_sweep(jobs_of_lengths(short=SHORT, long=LONG, failed="out of memory"), tmp_path / "sweep.png")
    speed, _, memory, losses = figure[0].axes
    points = [list(zip(*line.get_data(), strict=True)) for line in speed.lines]
    assert points[0] == [(256, 12345.6), (512, 5000.0)]
    assert list(speed.lines[1].get_xdata()) == [1024, 1024]
    assert [text.get_text() for text in speed.texts] == ["out of memory"]
    assert {line.get_label(): list(line.get_ydata()) for line in memory.lines[:2]} == {
        "measured": [1.0, 2.0],
        "estimated": [0.75, 0.75],
    }
    lines = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in losses.containers}
    assert lines == {
        "seq_len=256": [[64, 3.0], [256, 2.5]],
        "seq_len=512": [[64, 3.25], [256, 2.25], [512, 2.0]],
    }
    assert [label.get_text() for label in losses.get_xticklabels()] == ["64", "256", "512"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_picture_has_a_title_and_separators_in_large_numbers(figure, tmp_path):
    """The title contains the numbers that all complete jobs have in common."""
    common = {"parameters": 12_345_678, "ranks": 4, "tokens_per_s": 3e7}
    outcomes = jobs_of_lengths(short=SHORT | common, long=LONG | common | {"total_tokens": 7}, failed="failed")
    plot_sweep(outcomes, tmp_path / "sweep.png")
    assert figure[0].get_suptitle() == "a: 12,345,678 parameters, 4 ranks"
    assert "10,000,000" in [label.get_text() for label in figure[0].axes[0].get_yticklabels()]
    plot_sweep(jobs_of_lengths(failed="failed"), tmp_path / "sweep.png")
    assert figure[1].get_suptitle() == "a"


def test_picture_has_no_estimated_memory_on_cpus(figure, tmp_path):
    """The estimate would be 0 next to the memory of the process, which includes Python and its libraries."""
    for device, labels in (("cpu", ["measured"]), ("cuda", ["measured", "estimated"])):
        plot_sweep(jobs_of_lengths(short=SHORT | {"device": device}), tmp_path / "sweep.png")
        assert [line.get_label() for line in figure[-1].axes[2].lines] == labels


def test_legends_cover_no_data(figure, tmp_path):
    """The error bars of many jobs fill the fourth panel, and measured memory may be largest anywhere."""
    jobs = {f"job{i}": SHORT | {"peak_memory_gib": gib, "eval_loss_error": 1.0} for i, gib in enumerate((5, 1, 5, 1, 5))}
    plot_sweep(jobs_of_lengths(**jobs), tmp_path / "sweep.png")
    memory, (losses,) = figure[0].axes[2], figure[0].legends
    assert [text.get_text() for text in losses.get_texts()] == [f"seq_len={256 * 2**i}" for i in range(5)]
    assert not any(losses.get_window_extent().overlaps(axes.bbox) for axes in figure[0].axes)
    extent = memory.get_legend().get_window_extent()
    assert memory.transData.transform((256, 5))[1] < extent.y0
    assert extent.y1 <= memory.bbox.y1


def test_picture_shows_mfu_if_it_is_known(figure, tmp_path):
    plot_sweep(jobs_of_lengths(short=SHORT | {"mfu": 0.4}, long=LONG | {"mfu": 0.3}), tmp_path / "sweep.png")
    assert list(figure[0].axes[1].lines[0].get_ydata()) == [0.4, 0.3]


@pytest.mark.parametrize("varied", [{"model": "tiny"}, {"lr": "0.1", "seed": "1"}, {}], ids=["text", "two settings", "nothing"])
def test_picture_shows_job_names_without_a_numeric_value(varied, figure, tmp_path):
    outcomes = [Outcome([], varied, SHORT), Outcome([], varied, "failed")]
    plot_sweep(outcomes, tmp_path / "sweep.png")
    assert [label.get_text() for label in figure[0].axes[0].get_xticklabels()] == [outcomes[0].name] * 2


def test_picture_without_results(figure, tmp_path):
    plot_sweep(jobs_of_lengths(failed="out of memory"), tmp_path / "sweep.png")
    assert len(figure[0].axes) == 4


def test_only_a_sweep_writes_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Jobs(jobs_of_lengths(short=SHORT)).write_results()
    assert list(tmp_path.iterdir()) == []
    Jobs(jobs_of_lengths(short=SHORT), tmp_path).write_results()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.md", "sweep.png"]


@pytest.mark.parametrize(
    ("results", "failed"), [([SHORT, "stopped"], False), ([SHORT, "failed"], True), (["out of memory"], True)]
)
def test_failed_jobs(results, failed):
    assert Jobs([Outcome([], result=result) for result in results]).has_errors() == failed


def with_wandb(outcomes: list[Outcome], choice: str) -> list[Outcome]:
    for outcome in outcomes:
        outcome.config = Config(name="a", logger=LoggerConfig(wandb=choice))
    return outcomes


@pytest.mark.slow
def test_wandb_receives_the_table_and_the_picture_in_one_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    outcomes = with_wandb(jobs_of_lengths(short=SHORT, failed="out of memory"), "offline")
    Jobs(outcomes, tmp_path).write_results()
    for _ in range(2):  # The second launch of the sweep continues the run.
        log_to_wandb(outcomes, tmp_path)

    segments = read_segments(tmp_path)
    run = ("a", "a", (tmp_path / "wandb_id").read_text())
    assert [(segment.name, segment.group, segment.id) for segment in segments] == [run, run]
    for segment in segments:
        (logged,) = segment.history
        assert (logged["sweep/_type"], logged["sweep/nrows"]) == ("table-file", 2)
        assert logged["sweep_chart/_type"] == "image-file"
    (table, *_) = tmp_path.glob("wandb/offline-run-*/files/media/table/sweep_*.json")
    assert json.loads(table.read_text())["data"][1][1] == "out of memory"
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))


@pytest.mark.parametrize("choice", ["off", "auto", None])
def test_wandb_is_not_used_if_it_is_off(choice, tmp_path, monkeypatch):
    """With "auto", the environment variable switches W&B off. Without settings, no job has started W&B."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    outcomes = with_wandb(jobs_of_lengths(short=SHORT), choice or "offline")
    log_to_wandb(outcomes if choice else [replace(outcomes[0], config=None)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_wandb_is_only_a_warning(tmp_path, caplog):
    """The picture is missing, so W&B raises an error."""
    log_to_wandb(with_wandb(jobs_of_lengths(short=SHORT), "offline"), tmp_path)
    assert "sweep.md" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"
