import subprocess
from pathlib import Path

import pytest
import torch

from scripts.labs import counted_bytes
from scripts.labs.naive_attention import Sizes

SIZES = Sizes([256], 2, 64, torch.bfloat16)
CSV = """\
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","_forward_kernel","dram__bytes_read.sum","byte","1,024"
"0","7","_forward_kernel","lts__t_sectors_op_read.sum","sector","2,000"
"1","7","_{other}_kernel","dram__bytes_read.sum","byte","96"
"""


def test_counters_are_read_from_the_output_of_ncu() -> None:
    found = counted_bytes.read_counters(CSV.format(other="main"))
    assert found == {"forward": {"dram_read": 1024, "l2_read": 64_000}, "main": {"dram_read": 96}}


def test_both_backends_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """ncu is replaced by a function that writes its log."""
    commands = []

    def run(arguments: list[str], **_) -> subprocess.CompletedProcess:
        commands.append(arguments)
        other = "main" if arguments[-1] == "--backend=hopper" else "query_gradient"
        Path(arguments[arguments.index("--log-file") + 1]).write_text(CSV.format(other=other))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    rows = counted_bytes.count_on_gpu(256, SIZES)
    assert [row.kernel for row in rows[::3]] == ["triton forward", "hopper forward"]
    assert {row.kernel for row in rows} >= {"triton query_gradient", "hopper main"}
    assert "regex:_(forward|prepare|main|finish)_kernel" in commands[1]
    # q, k, v of 256 tokens of two heads are read once.
    dram = next(row for row in rows if row.kernel == "hopper forward" and row.counter == "DRAM reads")
    assert (dram.predicted, dram.counted) == (3 * 256 * 2 * 64 * 2, 1024)


def test_failure_of_ncu_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: done)
    with pytest.raises(RuntimeError, match=r"triton kernels: ==ERROR== ERR_NVGPUCTRPERM$"):
        counted_bytes.count_on_gpu(256, SIZES)


@pytest.mark.slow
def test_table_and_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "lab.png"
    counted_bytes.main(["--device", "cpu", "--lengths", "256", "512", "--output", str(path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()[2:6]]
    assert [row[0] for row in rows] == ["forward 256", "backward 256", "forward 512", "backward 512"]
    assert all(row[4] == "1.00" for row in rows)
    assert path.stat().st_size < 100_000
