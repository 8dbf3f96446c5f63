"""The benchmark of decoding, with tiny cases on the CPU and fake clocks: errors of every implementation are reported."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from weakref import ReferenceType, ref

import pytest
import torch

from ringattn import flash_attention
from scripts.bench import decode as bench_decode
from scripts.bench.decode import Case, Implementation, Layer
from scripts.bench.generation import Speed

CASES = [Case(1, 64, 4, 2, 16), Case(2, 96, 4, 4, 16, queries=3), Case(1, 2**20)]


def capture(call: Implementation, layers: list[Layer]) -> ReferenceType:
    """Run the call, and return a weak reference to it instead of a graph. Neither keeps its inputs alive."""
    call.attend(layers[0])
    return ref(call.attend)


def graph_us(graph: ReferenceType, *_) -> float:
    assert graph() is not None, "a replay would read tensors that have been freed"
    return 2.0


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tiny cases on the CPU. A graph takes 2 us, and an eager call takes 10 us."""
    monkeypatch.setattr(bench_decode, "CASES", CASES)
    monkeypatch.setattr(bench_decode, "MAX_LAYERS", 2)
    monkeypatch.setattr(bench_decode, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_decode, "capture", capture)
    monkeypatch.setattr(bench_decode, "graph_us", graph_us)
    monkeypatch.setattr(bench_decode, "eager_us", lambda *_: 10.0)
    monkeypatch.setattr(bench_decode, "kernel_us", lambda *_: 1.6)
    monkeypatch.setattr(bench_decode.command, "describe_run", lambda *_, **__: dict(date="today", machine="a CPU", command="c"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def run(output: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """The exit status, the rows and the report."""
    status = bench_decode.main(["--output", str(output), "--gib", "1", *arguments])
    return status, json.loads((output / "rows.json").read_text())["rows"], (output / "README.md").read_text()


def test_every_case_that_fits_is_measured(tmp_path: Path) -> None:
    status, rows, report = run(tmp_path)
    assert status == 0
    assert [(row["batch"], row["keys"]) for row in rows] == [(1, 64), (2, 96)]
    ours = rows[1]["implementations"]["ringattn"]
    assert ours["error"] < 1e-2
    assert ours["gb_per_s"] == pytest.approx(CASES[1].bytes / 2e-6 * 1e-9)
    assert "| B2 4/4 0k D16 Nq3 |" in report
    assert "| graph / kernels of ringattn |" in report
    assert "| 1.25 |" in report
    names = report.split("graph, us: ")[1].split(" |")[0]
    assert names == "ringattn / flash / cudnn / fa3 / fa4 / flashinfer"


def test_a_library_that_is_not_installed_has_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the other implementations stay in the order of the column."""
    implementations = bench_decode.implementations

    def two(case: Case, q: torch.Tensor) -> dict[str, Implementation]:
        ours = implementations(case, q)[bench_decode.OURS]
        return {bench_decode.OURS: ours, "fa4": ours}

    monkeypatch.setattr(bench_decode, "implementations", two)
    _, _, report = run(tmp_path, "--only", "B1")
    assert "| 2.0 / - / - / - / 2.0 / - |" in report
    assert "| 10.0 / - / - / - / 10.0 / - |" in report
    assert not bench_decode._is_installed("no_such_package.module")
    assert bench_decode._is_installed("torch.nn")


def test_missing_libraries_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench_decode, "_is_installed", lambda module: module == "flash_attn.cute")
    with pytest.raises(SystemExit):
        run(tmp_path, "--only", "B9")
    assert "not installed: fa3, flashinfer\n" in capsys.readouterr().out


class PagedDecode:
    """Stands for FlashInfer's class for paged caches: decodes with the pages that were planned."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool, backend: str) -> None:
        assert layout == "NHD"

    def plan(self, ends, pages, last, heads, key_heads, head_dim, page_size, q_data_type, kv_data_type) -> None:
        assert q_data_type == kv_data_type == torch.bfloat16
        assert all(length == page_size for length in last)
        self.tables = [pages[first:end] for first, end in itertools.pairwise(ends.tolist())]

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        entries = [[x[table].flatten(0, 1)[None] for x in cache] for table in self.tables]
        return torch.cat([flash_attention(q[i : i + 1, None], k, v)[:, 0] for i, (k, v) in enumerate(entries)])


def test_flashinfer_reads_the_cache_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "CASES", [Case(3, 128, 4, 2, 16), Case(1, 64, 4, 4, 16, queries=2)])
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PagedDecode))
    monkeypatch.setattr(bench_decode, "_is_installed", lambda module: module == "flashinfer")
    _, rows, _ = run(tmp_path)
    found = rows[0]["implementations"]["flashinfer"]
    assert found["error"] < 1e-2
    assert found["graph_us"] == 2.0
    assert "flashinfer" not in rows[1]["implementations"]  # its kernel has one query per sequence


def test_flashinfer_is_left_out_if_its_kernel_cannot_be_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setattr(bench_decode, "_is_installed", lambda module: module == "flashinfer")
    status, rows, _ = run(tmp_path, "--only", "B1")
    assert status == 0
    assert "flashinfer" not in rows[0]["implementations"]
    assert "flashinfer is left out: ImportError" in capsys.readouterr().out


def test_a_wrong_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = bench_decode.decode_attention
    monkeypatch.setattr(bench_decode, "decode_attention", lambda q, *a, **b: decode(q, *a, **b) * 1.1)
    status, rows, _ = run(tmp_path, "--only", "B1")
    assert status == 1
    assert len(rows) == 1
    assert rows[0]["implementations"]["ringattn"]["error"] > 0.05


def test_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="B9"):
        run(tmp_path, "--only", "B9")


def test_generation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no case matches, only tokens are generated. A failure of an implementation is reported."""
    speeds = {"ringattn": Speed(10.0, 20_000_000_000), "transformers": "ImportError: no transformers"}
    monkeypatch.setattr(bench_decode.generation, "measure", lambda *_: speeds)
    assert bench_decode.main(["--output", str(tmp_path), "--only", "-", "--model", "tiny"]) == 0
    report = (tmp_path / "README.md").read_text()
    assert "| ringattn | 100.0 | 10.00 | 2000 | today |" in report
    assert "| transformers | ImportError: no transformers | - | - | today |" in report
    speeds["ringattn"] = "RuntimeError: out of memory"
    assert bench_decode.main(["--output", str(tmp_path), "--only", "-", "--model", "tiny"]) == 1


def test_kernels_that_overlap_are_counted_once() -> None:
    """With programmatic dependent launch, the second kernel starts before the first one ends."""
    assert bench_decode.covered([(5.0, 9.0), (0.0, 6.0), (7.0, 8.0), (10.0, 11.0)]) == 10.0
