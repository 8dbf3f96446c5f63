"""The benchmark of kernels, with tiny cases on the CPU and a fake clock: no speed is reported for a wrong result."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench import kernels as bench_kernels
from scripts.bench import peers
from scripts.bench.cases import Case
from scripts.bench.kernels_report import DIRECTIONS

HEADER = {"date": "2026-11-24", "machine": "a CPU", "command": "python -m scripts.bench.kernels"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tiny cases on the CPU, where every call takes one millisecond."""

    def median_ms(call: bench_kernels.Call) -> float:
        call()
        return 1.0

    for name, value in dict(
        DEVICE=torch.device("cpu"), LENGTH=256, HEADS=4, HEAD_DIMS=(16,), MEMORY_LENGTHS=(128, 256), BACKWARD_LENGTHS=(128, 256)
    ).items():
        monkeypatch.setattr(bench_kernels, name, value)
    monkeypatch.setattr(bench_kernels, "warm_up", lambda call: None)
    monkeypatch.setattr(bench_kernels, "median_ms", median_ms)
    monkeypatch.setattr(bench_kernels, "extra_bytes", lambda call: 2**20)
    monkeypatch.setattr(bench_kernels.command, "describe_run", lambda *_, **__: dict(HEADER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "IMPLEMENTATIONS", {peers.OURS: peers.ringattn("auto")})


class DoubledGradient(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


def with_changed_keys(change: Callable[[Tensor], Tensor]) -> peers.Prepare:
    """Return our implementation, applied to changed keys."""

    def prepare(case, device):
        attend = peers.ringattn("auto")(case, device)
        return lambda q, k, v: attend(q, change(k), v)

    return prepare


def broken(case, device):
    raise RuntimeError("no kernel for this GPU")


def run(output: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """Return the exit status, the rows and the report of a benchmark."""
    status = bench_kernels.main(["--output", str(output), *arguments])
    return status, json.loads((output / "rows.json").read_text())["rows"], (output / "README.md").read_text()


@pytest.mark.slow
def test_all_suites_are_reported(tmp_path):
    status, rows, report = run(tmp_path, "--lengths", "128", "384", "--rounds", "1")
    assert status == 0
    assert all(f"| {dims} | full | 256 | 16 |" in report for dims in ("192/128", "96"))
    assert "| window 1,024 |" in report
    for name in ("speed", "blocks", "memory"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        assert f"({name}.png)" in report
    kinds = {row["case"]["kind"] for row in rows}
    assert kinds == {"full", "causal", "window", "documents", "short documents", "blocks"}
    assert all(row[direction]["ms"] > 0 for row in rows for direction in DIRECTIONS)
    assert "wrong" not in report.split("## Errors")[0]


@pytest.mark.parametrize(("suite", "names"), {
    "head-dims": [
        "causal D256 8", "full D256 8", "causal D192/128 16", "full D192/128 16", "causal, 32/8 heads D192/128 32",
        "full, 32/8 heads D192/128 32", "causal D96 16", "full D96 16", "causal, 32/8 heads D96 32", "full, 32/8 heads D96 32",
    ],
    "windows": [
        "causal D16 4", "window 128 D16 4", "window 512 D16 4", "window 1,024 D16 4", "window 4,096 D16 4", "documents D16 4",
        "causal, 64/8 heads D64 S1024", "window 128, 64/8 heads D64 S1024", "window 512, 64/8 heads D64 S1024",
        "window 1,024, 64/8 heads D64 S1024", "causal, 16/16 heads D128 S1024", "window 128, 16/16 heads D128 S1024",
        "window 512, 16/16 heads D128 S1024", "window 1,024, 16/16 heads D128 S1024", "causal, 8/4 heads D256 S1024",
        "window 1,024, 8/4 heads D256 S1024",
    ],
}.items())  # fmt: skip
def test_cases_of_a_suite(suite, names):
    cases = bench_kernels.suite_cases(suite, [])
    assert [bench_kernels.case_name(case).replace("S256", str(case.heads)) for case in cases] == names


def test_backward_is_measured_at_two_lengths(monkeypatch):
    monkeypatch.setattr(bench_kernels, "HEAD_DIMS", (8, 16))
    names = [bench_kernels.case_name(case) for case in bench_kernels.suite_cases("backward", [])]
    kinds = "causal D16", "full D16", "documents D16", "causal D8", "causal, 8/2 heads D16"
    assert names == [f"{kind} S{length}" for length in (128, 256) for kind in kinds]


def test_decoding_is_measured_by_its_own_script(tmp_path, monkeypatch):
    """The suite runs only on request. Its exit status counts, also if other suites run."""
    calls = []
    monkeypatch.setattr(bench_kernels.decode, "main", lambda argv: calls.append(argv) or 1)
    arguments = ["--output", str(tmp_path), "--rounds", "2", "--only", "causal D16"]
    assert bench_kernels.main([*arguments, "--suite", "decode"]) == 1
    assert calls == [["--output", str(tmp_path / "decode"), "--rounds", "2", "--only", "causal D16"]]
    assert not (tmp_path / "README.md").exists()
    assert bench_kernels.main([*arguments, "--suite", "decode", "speed"]) == 1
    assert (tmp_path / "README.md").exists()


def test_kernels_are_compiled_first_on_request(tmp_path, monkeypatch):
    """The requested cases are compiled by the requested number of processes, before the first measurement."""
    compiled = []
    monkeypatch.setattr(bench_kernels.compile_first, "compile_first", lambda *call: compiled.append(call))
    monkeypatch.setattr(bench_kernels.compile_first, "use_disk_cache", lambda: compiled.append("cache"))
    arguments = "--suite", "masks", "--only", "^causal", "--rounds", "1"
    run(tmp_path, *arguments)
    assert not compiled
    run(tmp_path, *arguments, "--compile-workers", "3")
    assert compiled == ["cache", ([Case("causal", 256, 4, 16)], [peers.OURS], 3)]


def test_the_deterministic_implementation_runs_on_request(tmp_path, monkeypatch):
    """Both passes run under torch's setting, and the setting is restored."""
    used = []

    def recording(case, device):
        attend = peers.ringattn("auto")(case, device)
        return lambda q, k, v: used.append(torch.are_deterministic_algorithms_enabled()) or attend(q, k, v)

    monkeypatch.setitem(peers.IMPLEMENTATIONS, peers.DETERMINISTIC, recording)
    _, rows, _ = run(tmp_path, "--suite", "heads")
    assert {row["implementation"] for row in rows} == {peers.OURS}
    assert not used
    _, rows, _ = run(tmp_path, "--suite", "heads", "--peers", peers.DETERMINISTIC)
    assert {row["implementation"] for row in rows} == {peers.DETERMINISTIC}
    assert used.count(True) > 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_fp8_is_measured_on_request(tmp_path, monkeypatch):
    """The forward of FP8 has a larger tolerance than the other implementations, and without rounding it has no backward."""
    monkeypatch.setattr(bench_kernels, "FP8_CASES", ((64, 2),))
    for name in (peers.FP8, peers.FP8_ROUNDED):
        monkeypatch.setitem(peers.IMPLEMENTATIONS, name, {peers.FP8: peers.fp8, peers.FP8_ROUNDED: peers.fp8_rounded}[name])
    names = [peers.OURS, peers.FP8, peers.FP8_ROUNDED]
    status, rows, report = run(tmp_path, "--suite", "fp8", "--peers", *names)
    assert status == 0
    assert "## FP8" in report
    assert [row["implementation"] for row in rows] == names * 2
    assert {row["case"]["kind"] for row in rows} == {"causal", "full"}
    for row in rows:
        rounds = row["implementation"] != peers.OURS
        assert (row["forward"]["errors"]["out"] > 0.02) == rounds
        assert row["forward"]["status"] == "ok"
        assert row["backward"]["status"] == ("unsupported" if row["implementation"] == peers.FP8_ROUNDED else "ok")
    _, rows, _ = run(tmp_path, "--suite", "heads", "--rounds", "1")
    assert {row["implementation"] for row in rows} == {peers.OURS}


def test_case_without_the_one_it_is_compared_with_has_no_ratio(tmp_path):
    status, rows, report = run(tmp_path, "--rounds", "1", "--only", "^documents|blocks 50|8/2")
    assert status == 0
    assert "## Speed" not in report
    assert {(row["case"]["kind"], row["case"]["kept"]) for row in rows} == {("documents", 1), ("blocks", 0.5), ("causal", 1)}
    lines = [text for text in report.split("## Errors")[0].splitlines() if text.startswith("| 16")]
    assert lines
    assert not any("(" in text for text in lines)


def test_pattern_without_a_case_is_rejected_before_anything_is_written(tmp_path):
    with pytest.raises(SystemExit, match="--only 'nothing' matches no case of speed, masks"):
        run(tmp_path / "none", "--only", "nothing")
    assert not (tmp_path / "none").exists()


def test_wrong_result_has_no_speed_and_a_failure_does_not_stop_the_run(tmp_path, monkeypatch):
    halved = with_changed_keys(lambda k: torch.cat((k[:, :64], k[:, 64:] * 0.5), 1))
    gradient = with_changed_keys(DoubledGradient.apply)
    for name, prepare in {"halved": halved, "gradient": gradient, "broken": broken}.items():
        monkeypatch.setitem(peers.IMPLEMENTATIONS, name, prepare)
    status, rows, report = run(tmp_path, "--suite", "masks")
    assert status == 0  # the status of our own kernels
    found = {(row["implementation"], direction): row[direction] for row in rows for direction in DIRECTIONS}
    wrong = {("halved", "forward"), ("halved", "backward"), ("gradient", "backward")}
    assert {key for key, x in found.items() if x["status"] == "wrong"} == wrong
    assert all("ms" not in found[key] and "tflops" not in found[key] for key in wrong)
    assert found["gradient", "forward"]["status"] == found[peers.OURS, "backward"]["status"] == "ok"
    assert "no kernel for this GPU" in found["broken", "backward"]["error"]
    text = next(text for text in report.splitlines() if "| causal |" in text)
    assert "| wrong |" in text
    assert "/ wrong" in text
    assert "| failed |" in text


def test_unsupported_mask_is_left_out_of_the_table(tmp_path, monkeypatch):
    def causal_only(case, device):
        if case.kind != "causal":
            raise peers.Unsupported(case.kind)
        return peers.ringattn("auto")(case, device)

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "causal_only", causal_only)
    status, _, report = run(tmp_path, "--suite", "masks", "--only", "window|^causal")
    assert status == 0
    text = next(text for text in report.splitlines() if "| window |" in text)
    assert text.split("|")[-3].strip() == "-"


def test_our_own_failure_is_the_exit_status(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.IMPLEMENTATIONS, peers.OURS, broken)
    status, _, _ = run(tmp_path, "--suite", "speed")
    assert status == 1


def test_figure_is_the_median_over_rounds_in_alternating_order(tmp_path, monkeypatch):
    """`fragile` raises an exception in its second forward, so its first time is not reported."""
    timed = []

    def fragile(case, device):
        attend = peers.ringattn("auto")(case, device)

        def until_the_second_round(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if len(timed) > 4:
                raise RuntimeError("out of memory")
            return attend(q, k, v)

        return until_the_second_round

    def median_ms(call: bench_kernels.Call) -> float:
        timed.append(call)
        call()
        return milliseconds[len(timed) - 1]

    # Round 1: ours forward, ours backward, fragile forward, fragile backward.
    # Round 2 in reverse: fragile backward, fragile forward (which raises), ours backward, ours forward.
    # Round 3: ours forward, ours backward, fragile backward.
    milliseconds = [9.0, 1.0, 20.0, 5.0, 6.0, 0.0, 8.0, 2.0, 3.0, 3.0, 4.0]
    monkeypatch.setattr(bench_kernels, "median_ms", median_ms)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "fragile", fragile)
    monkeypatch.setattr(bench_kernels, "suite_cases", lambda *_: [Case("causal", 128, 2, 16)])
    status, (ours, other), report = run(tmp_path, "--suite", "speed", "--rounds", "3")
    assert status == 0
    assert len(timed) == 11
    assert [ours[x]["ms"] for x in DIRECTIONS] == [3.0, 3.0]
    assert other["backward"]["ms"] == 5.0
    assert [ours[x]["samples"] for x in DIRECTIONS] == [[9.0, 2.0, 3.0], [1.0, 8.0, 3.0]]
    assert other["backward"]["samples"] == [5.0, 6.0, 4.0]
    assert ours["forward"]["tflops"] == Case("causal", 128, 2, 16).flops("forward") / 3.0 * 1e-9
    assert other["forward"] == {"status": "failed", "error": "RuntimeError: out of memory"}
    assert "| failed / 0 |" in report
    assert "medians of all rounds (3)" in report


@pytest.mark.parametrize("arguments", ["--lengths 100", "--lengths 0", "--rounds 0", "--suite nothing"])
def test_impossible_arguments_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_kernels.parse(arguments.split())
    option = arguments.split()[0]
    assert option in capsys.readouterr().err.splitlines()[-1]


def test_machine_without_a_gpu_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_kernels.main([])
    assert "a CUDA device is required" in capsys.readouterr().err
