"""Write the tables and plots of `scripts.bench.kernels` from its measurements.

    python -m scripts.bench.kernels_report outputs/benchmarks/kernels

The benchmark `scripts.bench.kernels` writes the report after every suite. The command above writes the report again from
rows.json, and needs no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.accuracy import GROUP_TOLERANCE
from scripts.bench.cases import Case
from scripts.plots import plot_points, plt, save_plot, set_length_axis
from scripts.tables import markdown_table

DIRECTIONS = ("forward", "backward")
MIB = 2**20
Rows = dict[Case, list[dict[str, Any]]]  # the rows of each case, one row per implementation
Format = Callable[[float], str]


def describe(found: dict[str, Any]) -> str:
    if found["status"] == "failed":
        return f"failed: {found['error']}"
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.get("errors", {}).items())
    speed = f"{found['ms']:.3f} ms, {found['tflops']:.0f} TFLOP/s" if found["status"] == "ok" else found["status"]
    return f"{speed} ({errors})" if errors else speed


def save_rows(output: Path, header: dict[str, Any], suites: dict[str, list[Case]], rows: Rows) -> None:
    by_suite = {suite: [asdict(case) for case in cases] for suite, cases in suites.items()}
    flat = [{**row, "case": asdict(case)} for case, found in rows.items() for row in found]
    (output / "rows.json").write_text(json.dumps({**header, "suites": by_suite, "rows": flat}, indent=1) + "\n")


def load_rows(path: Path) -> tuple[dict[str, Any], dict[str, list[Case]], Rows]:
    """Read the rows that `save_rows` has written. Cases that an interrupted run has not measured are left out."""
    header = json.loads(path.read_text())
    rows: Rows = {}
    for row in header.pop("rows"):
        rows.setdefault(Case(**row["case"]), []).append(row)
    suites = {suite: [Case(**case) for case in cases] for suite, cases in header.pop("suites").items()}
    return header, {suite: [case for case in cases if case in rows] for suite, cases in suites.items()}, rows


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for found in rows.values() for row in found))


def _find(rows: Rows, case: Case, name: str) -> dict[str, Any]:
    return next(row for row in rows[case] if row["implementation"] == name)


def _cell(row: dict[str, Any], key: str, form: Format) -> str:
    parts = []
    for direction in DIRECTIONS:
        status, value = row[direction]["status"], row[direction].get(key)
        if value is not None:
            parts.append(form(value))
        else:
            parts.append(status if status in ("wrong", "failed") else "-")
    return parts[0] if parts[0] == parts[1] and parts[0] in ("wrong", "failed", "-") else " / ".join(parts)


def _ratio(rows: Rows, row: dict[str, Any], base: Case | None, key: str) -> str:
    if base is None:
        return ""
    other = _find(rows, base, row["implementation"])
    parts: list[str] = []
    for direction in DIRECTIONS:
        value, reference = row[direction].get(key), other[direction].get(key)
        parts.append(f"{value / reference:.2f}" if value is not None and reference else "-")
    return "" if parts == ["-", "-"] else f" ({' / '.join(parts)})"


class Report:
    def __init__(self, header: dict[str, Any], rows: Rows) -> None:
        self.header, self.rows, self.names = header, rows, _names(rows)

    def table(
        self,
        cases: Iterable[Case],
        cell: Callable[[Case, dict[str, Any]], str],
        extra: dict[str, Callable[[Case], str]] | None = None,
    ) -> str:
        """Return a table with one line per case and one column per implementation. The dict `extra` maps additional columns to
        functions that return their text.
        """
        extra = extra or {}
        lines = []
        for case in cases:
            cells = [case.dims, case.label, f"{case.length:,}", case.heads]
            cells += [column(case) for column in extra.values()]
            cells += [cell(case, _find(self.rows, case, name)) for name in self.names]
            lines.append([*cells, self.header["date"]])
        return markdown_table(" | ".join(("D", "mask", "S", "H", *extra, *self.names, "date")), lines)

    def figures(self, cases: list[Case], key: str, form: Format) -> str:
        return self.table(cases, lambda _, row: _cell(row, key, form))

    def speed(self, cases: list[Case]) -> str:
        return (
            f"## Speed\n\nTFLOP/s, forward / backward\n\n{self.figures(cases, 'tflops', '{:.0f}'.format)}\n"
            f"GB/s of inputs and results, once\n\n{self.figures(cases, 'gb_per_s', '{:.0f}'.format)}\n"
            f"Extra memory, MiB\n\n{self.figures(cases, 'extra_bytes', lambda x: f'{x / MIB:,.1f}')}"
        )

    def heads(self, cases: list[Case]) -> str:
        base = next((case for case in cases if case.key_heads == case.heads), None)

        def cell(_case: Case, row: dict[str, Any]) -> str:
            return _cell(row, "tflops", "{:.0f}".format) + _ratio(self.rows, row, base, "tflops")

        note = "TFLOP/s, forward / backward (in brackets: relative to as many key heads as query heads)"
        return f"## Grouped heads\n\n{note}\n\n{self.table(cases, cell)}"

    def head_dims(self, cases: list[Case]) -> str:
        note = "TFLOP/s, forward / backward. 192/128 means a head dim of 192 for queries and keys and of 128 for values."
        return f"## Head dims\n\n{note}\n\n{self.figures(cases, 'tflops', '{:.0f}'.format)}"

    def fp8(self, cases: list[Case]) -> str:
        note = "TFLOP/s, forward / backward. `fp8` includes the rounding of the inputs, and `fp8-rounded` does not."
        return f"## FP8\n\n{note}\n\n{self.figures(cases, 'tflops', '{:.0f}'.format)}"

    def windows(self, cases: list[Case]) -> str:
        return self.masks(cases, "Windows and packed documents")

    def backward(self, cases: list[Case]) -> str:
        return self.masks(cases, "Cases of the backward")

    def masks(self, cases: list[Case], title: str = "Masks") -> str:
        def cell(case: Case, row: dict[str, Any]) -> str:
            key = "causal", case.head_dim, case.length, case.key_heads
            same = (x for x in cases if (x.kind, x.head_dim, x.length, x.key_heads) == key)
            base = next((x for x in same if x.key_heads is None or x != case), None)
            return _cell(row, "tflops", "{:.0f}".format) + _ratio(self.rows, row, base, "tflops")

        extra: dict[str, Callable[[Case], str]] = {"pairs of N x N": lambda case: f"{case.pairs / case.length**2:.1%}"}
        note = (
            "TFLOP/s of the (query, key) pairs that the mask allows, forward / backward\n"
            "(in brackets: relative to the causal rate of the same implementation)"
        )
        return f"## {title}\n\n{note}\n\n{self.table(cases, cell, extra)}"

    def blocks(self, cases: list[Case]) -> str:
        dense = next((case for case in cases if case.kind == "full"), None)

        def cell(_case: Case, row: dict[str, Any]) -> str:
            return _cell(row, "ms", "{:.3f}".format) + _ratio(self.rows, row, dense, "ms")

        note = "Milliseconds, forward / backward (in brackets: relative to the full mask of the same implementation)"
        return f"## Block-sparse masks, random blocks of 128 x 128\n\n{note}\n\n{self.table(cases, cell)}"

    def memory(self, cases: list[Case]) -> str:
        extra: dict[str, Callable[[Case], str]] = {"N x N": lambda case: f"{case.score_bytes / MIB:,.0f}"}
        note = "Peak extra memory in MiB, forward / backward, and the N x N bf16 scores of the same heads"
        cells = self.table(cases, lambda _, row: _cell(row, "extra_bytes", lambda x: f"{x / MIB:,.1f}"), extra)
        return f"## Memory\n\n{note}\n\n{cells}"

    def errors(self) -> str:
        names = ("out", "dq", "dk", "dv")
        lines: list[list[str]] = []
        for implementation in self.names:
            largest: dict[str, float] = {}
            for case in self.rows:
                for direction in DIRECTIONS:
                    for name, error in _find(self.rows, case, implementation)[direction].get("errors", {}).items():
                        largest[name] = max(error, largest.get(name, 0.0))
            cells = [f"{largest[name]:.1e}" if name in largest else "-" for name in names]
            lines.append([implementation, *cells, self.header["date"]])
        note = "Largest error against float64 over all cases: the norm of the errors of 64 rows, divided by their norm. "
        note += f"Results with an error above {GROUP_TOLERANCE} are wrong."
        return f"## Errors\n\n{note}\n\n{markdown_table(' | out | dq | dk | dv | date', lines)}"


def write(output: Path, header: dict[str, Any], suites: dict[str, list[Case]], rows: Rows) -> None:
    plots = {"speed": plot_speed, "blocks": plot_blocks, "memory": plot_memory}
    report = Report(header, rows)
    setting = f"{header['machine']}; bf16, B = 1. Times and rates are medians of all rounds ({header['rounds']})."
    sections = [f"# Attention kernels, {header['date']}\n\n    {header['command']}\n\n{setting}\n"]
    for suite, cases in suites.items():
        sections.append(getattr(report, suite.replace("-", "_"))(cases))
        if suite in plots and (figure := plots[suite](cases, rows)):
            save_plot(figure, output / f"{suite}.png")
            sections.append(f"![{suite}]({suite}.png)\n")
    (output / "README.md").write_text("\n".join([*sections, report.errors()]))


def _two_panels(title: str) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        axes.set_title(direction)
        clean_axes(axes)
    return figure, list(panels)


def _add_legend(figure: plt.Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _plot_implementations(
    axes: plt.Axes, cases: list[Case], rows: Rows, direction: str, key: str, x: Callable[[Case], float], scale: float = 1.0
) -> None:
    for index, name in enumerate(_names(rows)):
        figures = [(x(case), _find(rows, case, name)[direction].get(key)) for case in cases]
        plot_points(axes, [(a, b * scale) for a, b in figures if b is not None], index, name)


def plot_speed(cases: list[Case], rows: Rows) -> plt.Figure | None:
    """Plot TFLOP/s of causal attention against the sequence length. Return None unless two lengths were measured."""
    dim = max(case.head_dim for case in cases)
    curve = sorted((x for x in cases if x.kind == "causal" and x.head_dim == dim), key=lambda case: case.length)
    if len(curve) < 2:
        return None
    figure, panels = _two_panels(f"Causal attention, bf16, D {dim}, H {curve[0].heads}, B 1")
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _plot_implementations(axes, curve, rows, direction, "tflops", lambda case: case.length)
        set_length_axis(axes, (case.length for case in curve), "sequence length N")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s")
    _add_legend(figure)
    return figure


def plot_memory(cases: list[Case], rows: Rows) -> plt.Figure:
    figure, panels = _two_panels(f"Peak extra memory, causal, bf16, D {cases[0].head_dim}, H {cases[0].heads}, B 1")
    lengths = [case.length for case in cases]
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _plot_implementations(axes, cases, rows, direction, "extra_bytes", lambda case: case.length, 1 / MIB)
        scores = [case.score_bytes / MIB for case in cases]
        axes.plot(lengths, scores, linestyle="--", color="black", label="N x N bf16 scores")
        tensors = [case.bytes(direction) / MIB for case in cases]
        axes.plot(lengths, tensors, linestyle=":", color="grey", label="tensors passed and returned")
        set_length_axis(axes, lengths, "sequence length N")
        axes.set_yscale("log")
        axes.set_ylabel("MiB")
    _add_legend(figure)
    return figure


def plot_blocks(cases: list[Case], rows: Rows) -> plt.Figure | None:
    """Plot the time of block-sparse attention against the fraction of computed blocks. Return None unless full attention was
    measured.
    """
    sparse = [case for case in cases if case.kind == "blocks"]
    dense = next((case for case in cases if case.kind == "full"), None)
    if dense is None:
        return None
    figure, panels = _two_panels(f"Block-sparse attention, bf16, N {dense.length:,}, D {dense.head_dim}, H {dense.heads}, B 1")
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for index, name in enumerate(_names(rows)):
            base = _find(rows, dense, name)[direction].get("ms")
            times = [(case.kept, _find(rows, case, name)[direction].get("ms")) for case in sparse]
            plot_points(axes, [(kept, ms / base) for kept, ms in times if ms is not None and base], index, name)
        axes.plot([0, 1], [0, 1], linestyle="--", color="black", label="time = fraction of blocks")
        axes.set(xlabel="fraction of blocks computed", ylabel="time / time of a full mask", xlim=(0, 1.02), ylim=(0, None))
    _add_legend(figure)
    return figure


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("directory", type=Path, help="a directory with rows.json")
    args = parser.parse_args(argv)
    if not (args.directory / "rows.json").is_file():
        parser.error(f"{args.directory / 'rows.json'}: no such file")
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    write(args.directory, *load_rows(args.directory / "rows.json"))


if __name__ == "__main__":
    main(sys.argv[1:])
