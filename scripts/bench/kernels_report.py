"""Tables and pictures of what `benchmark_kernels.py` measured."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scripts.bench.cases import TOLERANCE, Case

DIRECTIONS = ("forward", "backward")
MIB = 2**20
Rows = dict[Case, list[dict]]  # of a case: one row an implementation


def describe(found: dict) -> str:
    """One direction of a row in a line of progress."""
    if found["status"] == "failed":
        return f"failed: {found['error']}"
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.get("errors", {}).items())
    speed = f"{found['ms']:.3f} ms, {found['tflops']:.0f} TFLOP/s" if found["status"] == "ok" else found["status"]
    return f"{speed} ({errors})" if errors else speed


def to_json(head: dict, rows: Rows) -> str:
    flat = [{**row, "case": asdict(case)} for case, found in rows.items() for row in found]
    return json.dumps({**head, "rows": flat}, indent=1) + "\n"


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for found in rows.values() for row in found))


def _find(rows: Rows, case: Case, name: str) -> dict:
    return next(row for row in rows[case] if row["implementation"] == name)


def _cell(row: dict, key: str, form: Callable[[float], str]) -> str:
    """`forward / backward` of one figure; where there is none, the status, or "-" if nothing was to be measured."""
    parts = []
    for direction in DIRECTIONS:
        status, value = row[direction]["status"], row[direction].get(key)
        if value is not None:
            parts.append(form(value))
        else:
            parts.append(status if status in ("wrong", "failed") else "-")
    return parts[0] if parts[0] == parts[1] and parts[0] in ("wrong", "failed", "-") else " / ".join(parts)


def _ratio(rows: Rows, row: dict, base: Case | None, key: str) -> str:
    """` (forward / backward)` of a figure beside the same implementation's of another case; nothing where one is missing."""
    if base is None:
        return ""
    other, parts = _find(rows, base, row["implementation"]), []
    for direction in DIRECTIONS:
        value, of = row[direction].get(key), other[direction].get(key)
        parts.append(f"{value / of:.2f}" if value is not None and of else "-")
    return "" if parts == ["-", "-"] else f" ({' / '.join(parts)})"


def _table(
    cases: list[Case], rows: Rows, cell: Callable[[Case, dict], str], extra: dict[str, Callable] | None = None
) -> list[str]:
    """A line a case, a column an implementation; `extra` columns are functions of the case."""
    names, extra = _names(rows), extra or {}
    head = ["D", "mask", "S", "H", *extra, *names]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case in cases:
        cells = [str(case.head_dim), case.label, f"{case.length:,}", str(case.heads)]
        cells += [column(case) for column in extra.values()]
        cells += [cell(case, _find(rows, case, name)) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _speed(cases: list[Case], rows: Rows) -> list[str]:
    def table(key: str, form: Callable[[float], str]) -> list[str]:
        return _table(cases, rows, lambda case, row: _cell(row, key, form))

    lines = ["## Speed", "", "TFLOP/s, forward / backward", "", *table("tflops", "{:.0f}".format)]
    lines += ["GB/s of inputs and results once", "", *table("gb_per_s", "{:.0f}".format)]
    return [*lines, "Extra memory, MiB", "", *table("extra_bytes", lambda x: f"{x / MIB:,.1f}")]


def _heads(cases: list[Case], rows: Rows) -> list[str]:
    base = next((case for case in cases if case.key_heads == case.heads), None)

    def cell(case: Case, row: dict) -> str:
        return _cell(row, "tflops", "{:.0f}".format) + _ratio(rows, row, base, "tflops")

    note = "TFLOP/s, forward / backward (beside as many key heads as query heads)"
    return ["## Grouped heads", "", note, "", *_table(cases, rows, cell)]


def _masks(cases: list[Case], rows: Rows) -> list[str]:
    def cell(case: Case, row: dict) -> str:
        base = next((x for x in cases if x.kind == "causal" and x.head_dim == case.head_dim), None)
        return _cell(row, "tflops", "{:.0f}".format) + _ratio(rows, row, base, "tflops")

    extra = {"pairs of N x N": lambda case: f"{case.pairs / case.length**2:.1%}"}
    note = "TFLOP/s of the work that the mask leaves, forward / backward (beside the causal rate of the same implementation)"
    return ["## Masks", "", note, "", *_table(cases, rows, cell, extra)]


def _blocks(cases: list[Case], rows: Rows) -> list[str]:
    dense = next((case for case in cases if case.kind == "full"), None)

    def cell(case: Case, row: dict) -> str:
        return _cell(row, "ms", "{:.3f}".format) + _ratio(rows, row, dense, "ms")

    note = "Milliseconds, forward / backward (beside the dense time, the first line, of the same implementation)"
    return ["## Block-sparse, blocks of 128 kept at random", "", note, "", *_table(cases, rows, cell)]


def _memory(cases: list[Case], rows: Rows) -> list[str]:
    extra = {"N x N": lambda case: f"{case.score_bytes / MIB:,.0f}"}
    note = "Peak extra memory in MiB, forward / backward, beside the N x N bf16 scores of the same heads"
    table = _table(cases, rows, lambda case, row: _cell(row, "extra_bytes", lambda x: f"{x / MIB:,.1f}"), extra)
    return ["## Memory", "", note, "", *table]


def _errors(rows: Rows) -> list[str]:
    """The largest error of every implementation over all cases."""
    lines = [
        "## Errors",
        "",
        f"Largest of any case, of 64 rows relative to their size, against float64; over {TOLERANCE} is wrong",
    ]
    lines += ["", "| | out | dq | dk | dv |", "|---|---|---|---|---|"]
    for name in _names(rows):
        largest = {}
        for case in rows:
            for direction in DIRECTIONS:
                for tensor, error in _find(rows, case, name)[direction].get("errors", {}).items():
                    largest[tensor] = max(error, largest.get(tensor, 0.0))
        cells = [f"{largest[x]:.1e}" if x in largest else "-" for x in ("out", "dq", "dk", "dv")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def write(output: Path, head: dict, suites: dict[str, list[Case]], rows: Rows) -> None:
    """README.md, and a picture for every suite that has one, of the suites measured so far."""
    setting = f"{head['machine']}; bf16, B = 1. Times and rates are medians over rounds ({head['rounds']})."
    lines = [f"# Attention kernels, {head['date']}", "", f"    {head['command']}", "", setting, ""]
    sections = {"speed": _speed, "masks": _masks, "heads": _heads, "blocks": _blocks, "memory": _memory}
    pictures = {"speed": plot_speed, "blocks": plot_blocks, "memory": plot_memory}
    for suite, cases in suites.items():
        lines += sections[suite](cases, rows)
        if suite in pictures and (figure := pictures[suite](cases, rows)):
            figure.savefig(output / f"{suite}.png", dpi=150)
            plt.close(figure)
            lines += [f"![{suite}]({suite}.png)", ""]
    (output / "README.md").write_text("\n".join(lines + _errors(rows)))


def _panels(title: str) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        axes.set_title(direction)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def _legend(figure: plt.Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _lines(axes: plt.Axes, cases: list[Case], rows: Rows, direction: str, key: str, x: Callable, scale: float = 1.0) -> None:
    """A line an implementation through the cases that it has a figure for."""
    for index, name in enumerate(_names(rows)):
        points = [(x(case), _find(rows, case, name)[direction].get(key)) for case in cases]
        points = [(a, b * scale) for a, b in points if b is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{index}", label=name)


def _length_axis(axes: plt.Axes, cases: list[Case]) -> None:
    lengths = sorted({case.length for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")


def plot_speed(cases: list[Case], rows: Rows) -> plt.Figure | None:
    """TFLOP/s over the length, for causal attention with the largest head; None without two lengths."""
    dim = max(case.head_dim for case in cases)
    curve = sorted((x for x in cases if x.kind == "causal" and x.head_dim == dim), key=lambda case: case.length)
    if len(curve) < 2:
        return None
    figure, panels = _panels(f"Causal attention, bf16, D {dim}, H {curve[0].heads}, B 1")
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _lines(axes, curve, rows, direction, "tflops", lambda case: case.length)
        _length_axis(axes, curve)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s")
    _legend(figure)
    return figure


def plot_memory(cases: list[Case], rows: Rows) -> plt.Figure:
    """Extra memory over the length, beside N x N and the inputs."""
    figure, panels = _panels(f"Peak extra memory, causal, bf16, D {cases[0].head_dim}, H {cases[0].heads}, B 1")
    lengths = [case.length for case in cases]
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _lines(axes, cases, rows, direction, "extra_bytes", lambda case: case.length, 1 / MIB)
        scores = [case.score_bytes / MIB for case in cases]
        axes.plot(lengths, scores, linestyle="--", color="black", label="N x N bf16 scores")
        tensors = [case.bytes(direction) / MIB for case in cases]
        axes.plot(lengths, tensors, linestyle=":", color="grey", label="tensors given and returned")
        _length_axis(axes, cases)
        axes.set_yscale("log")
        axes.set_ylabel("MiB")
    _legend(figure)
    return figure


def plot_blocks(cases: list[Case], rows: Rows) -> plt.Figure | None:
    """Time over the fraction of blocks kept, beside the dense time of the same implementation; None without that."""
    sparse = [case for case in cases if case.kind == "blocks"]
    dense = next((case for case in cases if case.kind == "full"), None)
    if dense is None:
        return None
    figure, panels = _panels(f"Block-sparse attention, bf16, N {dense.length:,}, D {dense.head_dim}, H {dense.heads}, B 1")
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for index, name in enumerate(_names(rows)):
            base = _find(rows, dense, name)[direction].get("ms")
            points = [(case.kept, _find(rows, case, name)[direction].get("ms")) for case in sparse]
            points = [(kept, ms / base) for kept, ms in points if ms is not None and base]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{index}", label=name)
        axes.plot([0, 1], [0, 1], linestyle="--", color="black", label="time = fraction kept")
        axes.set(xlabel="fraction of blocks kept", ylabel="time / dense time", xlim=(0, 1.02), ylim=(0, None))
    _legend(figure)
    return figure
