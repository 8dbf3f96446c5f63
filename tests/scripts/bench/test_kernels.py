"""The benchmark's dry run: it writes its report of medians over rounds, and has no speed for a wrong result."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench import kernels as bench_kernels
from scripts.bench.kernels import peers

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "backward")


class DoubledGradient(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


def changed(change: Callable[[Tensor], Tensor]) -> peers.Prepare:
    """Our implementation with its keys changed."""

    def prepare(case, device):
        attend = peers.ringattn("auto")(case, device)
        return lambda q, k, v: attend(q, change(k), v)

    return prepare


def broken(case, device):
    raise RuntimeError("no kernel for this card")


def run(output: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """(exit status, rows, table) of a dry run."""
    status = bench_kernels.main(["--device", "cpu", "--output", str(output), *arguments])
    return status, json.loads((output / "rows.json").read_text())["rows"], (output / "README.md").read_text()


def test_the_dry_run_writes_a_table_and_pictures(tmp_path: Path) -> None:
    status, rows, table = run(tmp_path, "--lengths", "128", "384")
    assert status == 0
    for name in ("speed", "blocks", "memory"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert f"({name}.png)" in table
    kinds = {row["case"]["kind"] for row in rows}
    assert kinds == {"full", "causal", "window", "documents", "short documents", "blocks"}
    assert all(row[direction]["ms"] > 0 for row in rows for direction in DIRECTIONS)
    assert "wrong" not in table.split("## Errors")[0]


def test_cases_without_those_they_stand_beside(tmp_path: Path) -> None:
    status, rows, table = run(tmp_path, "--rounds", "1", "--only", "^documents|blocks 50|32/8")
    assert status == 0 and "## Speed" not in table
    assert {(row["case"]["kind"], row["case"]["kept"]) for row in rows} >= {("documents", 1.0), ("blocks", 0.5)}
    cells = [line.split("|")[-2] for line in table.split("## Errors")[0].splitlines() if line.startswith("| 16")]
    assert cells and not any("(" in cell for cell in cells)
    with pytest.raises(SystemExit, match="--only 'nothing': no case of speed, masks"):
        run(tmp_path / "none", "--only", "nothing")
    assert not (tmp_path / "none").exists()


def test_a_wrong_result_gets_no_speed_and_a_failure_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = changed(lambda k: torch.cat((k[:, :64], k[:, 64:] * 0.5), 1))
    gradient = changed(DoubledGradient.apply)
    for name, prepare in {"half": half, "gradient": gradient, "broken": broken}.items():
        monkeypatch.setitem(peers.IMPLEMENTATIONS, name, prepare)
    status, rows, table = run(tmp_path, "--suite", "masks")
    assert status == 0  # of ours
    found = {(row["implementation"], direction): row[direction] for row in rows for direction in DIRECTIONS}
    wrong = {("half", "forward"), ("half", "backward"), ("gradient", "backward")}
    assert {key for key, x in found.items() if x["status"] == "wrong"} == wrong
    assert all("ms" not in found[key] and "tflops" not in found[key] for key in wrong)
    assert found["gradient", "forward"]["status"] == found[peers.OURS, "backward"]["status"] == "ok"
    assert "no kernel for this card" in found["broken", "backward"]["error"]
    line = next(line for line in table.splitlines() if "| causal |" in line)
    assert "| wrong |" in line and "/ wrong" in line and "| failed |" in line


def test_a_figure_is_the_median_over_rounds_and_a_failure_in_them_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fragile` raises forward from the second round on: its 20 ms are no figure, and it has no third turn."""
    turns = []

    def fragile(case, device):
        attend = peers.ringattn("auto")(case, device)

        def until_the_second_round(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if len(turns) > 4:
                raise RuntimeError("out of memory")
            return attend(q, k, v)

        return until_the_second_round

    def median_ms(call: bench_kernels.Call, device: torch.device) -> float:
        turns.append(call)
        call()
        return milliseconds[len(turns) - 1]

    # by round: ours forward and backward, fragile forward (which raises before its 0.0) and backward; the second in reverse
    milliseconds = [9.0, 1.0, 20.0, 5.0] + [6.0, 0.0, 8.0, 2.0] + [3.0, 3.0, 4.0]
    monkeypatch.setattr(bench_kernels, "median_ms", median_ms)
    monkeypatch.setattr(peers, "IMPLEMENTATIONS", {peers.OURS: peers.ringattn("auto"), "fragile": fragile})
    monkeypatch.setattr(bench_kernels, "suite_cases", lambda *_: [bench_kernels.Case("causal", 128, 2, 16)])
    status, (ours, other), table = run(tmp_path, "--suite", "speed", "--rounds", "3")
    assert status == 0 and len(turns) == 11
    assert [ours[x]["ms"] for x in DIRECTIONS] == [3.0, 3.0] and other["backward"]["ms"] == 5.0
    assert [ours[x]["samples"] for x in DIRECTIONS] == [[9.0, 2.0, 3.0], [1.0, 8.0, 3.0]]
    assert other["backward"]["samples"] == [5.0, 6.0, 4.0]
    assert ours["forward"]["tflops"] == bench_kernels.Case("causal", 128, 2, 16).flops("forward") / 3.0 * 1e-9
    assert other["forward"] == {"status": "failed", "error": "RuntimeError: out of memory"}
    assert "| failed / 0 |" in table and "medians over rounds (3)" in table


def test_skipped_keys_exceed_the_tolerance() -> None:
    """Four keys of 1,024 are the share of a tile of 64 in 16,384."""
    case = bench_kernels.Case("full", 1024, 2, 64)
    q, k, v, dout = case.inputs(CPU)
    expected = bench_kernels.expected_results(case, q, k, v, dout)["out"]
    attend = peers.ringattn("auto")(case, CPU)
    right = bench_kernels.relative_error(attend(q, k, v), expected)
    skipped = bench_kernels.relative_error(attend(q, k[:, :-4], v[:, :-4]), expected)
    assert 4 * right < bench_kernels.TOLERANCE < skipped / 2
