"""The report of the ring benchmark: tables that are checked by hand, a repeated report, and joined runs."""

import json
from pathlib import Path

import pytest

from scripts.bench import ring_report

HEADER = {"date": "2026-11-22", "machine": "2 x GPU", "command": "torchrun -m scripts.bench.ring", "ranks": 2}


def timed(forward_ms: float, both_ms: float, **more) -> dict:
    parts = (("forward", forward_ms, 100.0), ("both", both_ms, 200.0))
    return {"peak_bytes": 2**30, **{part: {"ms": ms, "tflops": tflops, "samples": [ms]} for part, ms, tflops in parts}, **more}


def ring(forward_ms: float, both_ms: float, local: tuple[float, float] | None) -> dict:
    """Return the row of a ring with one hop in the forward and three hops in total."""
    row = timed(forward_ms, both_ms, errors={"out": 1e-3, "dq": 2e-3})
    for i, (part, schedule, hops) in enumerate((("forward", "kv", 1), ("both", "kv / state", 3))):
        row[part] |= {"schedule": schedule, "hops": hops, "bytes_sent": 3 * hops * 2**19}
        if local:
            row[part]["exposed_us"] = 1e3 * (row[part]["ms"] - local[i])
    return row


def case(kind: str, length: int, heads: int = 16, key_heads: int = 16) -> dict:
    return {"case": {"kind": kind, "length": length, "heads": heads, "key_heads": key_heads}}


def rows() -> ring_report.Rows:
    return {
        "causal-16k": {
            **case("causal", 2**14),
            "local": timed(1.0, 4.0),
            "nvlink-auto": ring(1.25, 4.003, (1.0, 4.0)),
            "nvlink-auto-graph": ring(1.0, 3.0, None),
            "p2p-kv": {"errors": {"out": 0.5}},
            "context_parallel": timed(2.0, 8.0),
        },
        "causal-1m": {
            **case("causal", 2**20),
            "local": timed(8.0, 40.0),
            "nvlink-auto": ring(8.0, 39.9997, (8.0, 40.0)),
            "context_parallel": {},
        },
        "grouped-64k": {**case("causal", 2**16, 32, 8), "local": timed(1.0, 1.0)},
    }


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in curve.removeprefix("|").removesuffix("|").split("|")] for curve in table.splitlines()]


def test_table_of_speed() -> None:
    lines = cells(ring_report.speed_table(HEADER, rows()))
    assert len({len(curve) for curve in lines}) == 1
    assert lines[2] == ["causal-16k", "local", "100", "200", "100% / 100%", "2.00 / 2.00", "1.0", "-", "2026-11-22"]
    assert lines[3][4:-1] == ["80% / 100%", "1.60 / 2.00", "1.0", "2.0e-03"]
    assert lines[4][4:6] == ["-", "2.00 / 2.67"]
    assert lines[5][:3] == ["causal-16k", "p2p-kv", "wrong"]
    assert lines[9][:3] == ["causal-1m", "context_parallel", "-"]


def test_table_of_communication() -> None:
    """250 us are exposed over one hop, and 3 us over three. A ring may be faster than local. Without local, there is a "-"."""
    header, _, *lines = cells(ring_report.communication_table(HEADER, rows()))
    assert header[2:5] == ["schedule, forward / backward", "hops", "MiB sent by the busiest rank"]
    assert [curve[:-1] for curve in lines] == [
        ["causal-16k", "nvlink-auto", "kv / state", "1 / 3", "1.5 / 4.5", "250 / 3", "250.0 / 1.0"],
        ["causal-16k", "nvlink-auto-graph", "kv / state", "1 / 3", "1.5 / 4.5", "-", "-"],
        ["causal-1m", "nvlink-auto", "kv / state", "1 / 3", "1.5 / 4.5", "0 / 0", "0.0 / -0.1"],
    ]


def test_plot_has_one_curve_per_variant() -> None:
    figure = ring_report.plot_lengths(rows())
    (axes,) = figure.axes
    drawn = {curve.get_label(): list(curve.get_xdata()) for curve in axes.lines}
    assert drawn == {"local": [2**14, 2**20], "nvlink-auto": [2**14, 2**20], "context_parallel": [2**14]}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16k", "1m"]
    ring_report.plt.close(figure)
    one_length = {name: found for name, found in rows().items() if name != "causal-1m"}
    assert ring_report.plot_lengths(one_length) is None


def test_report_can_be_rewritten_from_its_json(tmp_path: Path) -> None:
    ring_report.write(tmp_path / "new", {**HEADER, "receive_buffer_bytes": 5}, rows())
    names = ("README.md", "ring.json")
    first = [(tmp_path / "new" / name).read_text() for name in names]
    assert "## Communication" in first[0]
    assert "(lengths.png)" in first[0]
    assert f"    {HEADER['command']}\n" in first[0]
    for name in ("README.md", "lengths.png"):
        (tmp_path / "new" / name).unlink()
    ring_report.main([str(tmp_path / "new")])
    assert [(tmp_path / "new" / name).read_text() for name in names] == first
    assert (tmp_path / "new" / "lengths.png").stat().st_size > 5_000


def test_sections_without_measurements_are_left_out(tmp_path: Path) -> None:
    """Without hops there is no section about communication, and with one length there is no plot."""
    row = timed(1.0, 4.0, errors={"out": 0.0})
    found = {**case("causal", 2**14), "local": timed(1.0, 4.0), "nvlink-auto": row}
    ring_report.write(tmp_path, HEADER, {"causal-16k": found})
    text = (tmp_path / "README.md").read_text()
    assert "Communication" not in text
    assert "lengths" not in text
    assert not (tmp_path / "lengths.png").exists()


def save(path: Path, names: list[str], **header) -> str:
    found = {name: row for name, row in rows().items() if name in names}
    path.write_text(json.dumps({**HEADER, **header, "rows": found}))
    return str(path)


def test_runs_are_joined(tmp_path: Path) -> None:
    short = save(tmp_path / "a.json", ["causal-16k"], command="first", receive_buffer_bytes=3)
    long = save(tmp_path / "b.json", ["causal-1m", "grouped-64k"], command="second", date="2026-11-23")
    ring_report.main([str(tmp_path / "both"), "--join", short, long])
    header, joined = ring_report.read(tmp_path / "both" / "ring.json")
    assert joined == rows()
    assert header["date"] == "2026-11-22, 2026-11-23"
    assert header["machine"] == "2 x GPU"
    assert header["command"] == "first\nsecond"
    assert header["receive_buffer_bytes"] == 3
    text = (tmp_path / "both" / "README.md").read_text()
    assert "\n    first\n    second\n" in text
    assert "(lengths.png)" in text


@pytest.mark.parametrize(
    ("other", "machine", "message"),
    [
        ("causal-1m", "4 x GPU", "must be of one machine, but are of 2 x GPU; 4 x GPU"),
        ("causal-16k", "2 x GPU", "b.json: causal-16k is also in an earlier run"),
    ],
)
def test_runs_that_cannot_be_compared_are_not_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture, other: str, machine: str, message: str
) -> None:
    runs = [save(tmp_path / "a.json", ["causal-16k"]), save(tmp_path / "b.json", [other], machine=machine)]
    with pytest.raises(SystemExit):
        ring_report.main([str(tmp_path / "both"), "--join", *runs])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
