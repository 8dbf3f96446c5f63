"""Write the tables and the plot of `scripts.bench.ring` from the files ring.json of one or several runs.

    python -m scripts.bench.ring_report outputs/benchmarks/ring
    python -m scripts.bench.ring_report outputs/benchmarks/ring --join short/ring.json long/ring.json

The command writes README.md, and lengths.png if causal attention was measured at several lengths. With --join, the command
first joins the rows of several files from one machine in a new ring.json. Each case must occur in only one file, because ratios
are computed within a run.
"""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.plots import plot_points, plt, save_plot, set_length_axis
from scripts.tables import markdown_table

PLOTTED = ("local", "nvlink-auto", "nvlink-state", "ulysses-4", "ulysses-8", "context_parallel")
PARTS = ("forward", "both")  # "both" is a forward pass followed by a backward pass
# The results of each case by name.
Rows = dict[str, dict[str, dict[str, Any]]]
COMMUNICATION_NOTE = """\
In a pair of figures, the first is for the forward, and the second is for the forward + backward. The column "hops" gives the
number of steps in which messages are sent. The exposed time is the difference between the time of a call and the time of
`local`, which does not communicate. For variants that end with `-graph`, the exposed time is the difference from `local-graph`.
Because of noise, the exposed time can be negative. `local` runs the kernels of the ring that `schedule="auto"` chooses. For a
ring with another value of `schedule`, the difference therefore also contains merges and slower kernels.
"""


def base_of(variant: str) -> str:
    """Return the variant that runs the same kernels without communication."""
    graph = "-graph" if variant.endswith("-graph") else ""
    if variant.startswith("ulysses-"):
        return f"ulysses-{variant.split('-')[1]}-local{graph}"
    return f"local{graph}"


def _variants(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in found.items() if name != "case"}


def _ratios(row: dict[str, Any], other: dict[str, Any], form: str) -> str:
    return " / ".join(format(other[part]["ms"] / row[part]["ms"], form) for part in PARTS if part in other) or "-"


def speed_table(header: dict[str, Any], rows: Rows) -> str:
    columns = (
        "case | variant | forward, TFLOP/s per GPU | forward + backward, TFLOP/s per GPU | "
        "relative to local | relative to context_parallel | peak memory per GPU, GiB | largest error | date"
    )
    lines = []
    for name, found in rows.items():
        for variant, row in _variants(found).items():
            cells = [name, variant]
            if "both" in row:
                cells += [f"{row[part]['tflops']:.0f}" for part in PARTS]
                cells.append(_ratios(row, found.get(base_of(variant), {}), ".0%"))
                cells.append(_ratios(row, found.get("context_parallel", {}), ".2f"))
                cells.append(f"{row['peak_bytes'] / 2**30:.1f}")
                cells.append(f"{max(row['errors'].values()):.1e}" if "errors" in row else "-")
            else:
                cells += ["wrong" if "errors" in row else "-", *[""] * 5]
            lines.append([*cells, header["date"]])
    return markdown_table(columns, lines)


def communication_table(header: dict[str, Any], rows: Rows) -> str:
    columns = (
        "case | variant | schedule, forward / backward | hops | MiB sent by the busiest rank | exposed, us | "
        "exposed per hop, us | date"
    )
    lines = []
    for name, found in rows.items():
        for variant, row in _variants(found).items():
            if "hops" in row.get("both", {}):
                cells = (
                    row["both"]["schedule"],
                    _both_parts(row, lambda x: str(x["hops"])),
                    _both_parts(row, lambda x: f"{x['bytes_sent'] / 2**20:,.1f}"),
                    _both_parts(row, lambda x: f"{round(x['exposed_us']):,}"),
                    _both_parts(row, lambda x: f"{x['exposed_us'] / x['hops']:,.1f}"),
                )
                lines.append([name, variant, *cells, header["date"]])
    return markdown_table(columns, lines) if lines else ""


def _both_parts(row: dict[str, Any], form: Callable[[dict[str, Any]], str]) -> str:
    try:
        return " / ".join(form(row[part]) for part in PARTS)
    except (KeyError, ZeroDivisionError):
        return "-"


def plot_lengths(rows: Rows) -> plt.Figure | None:
    """Plot TFLOP/s per GPU of causal attention against the sequence length. Return None unless two lengths were measured."""
    curve = [found for found in rows.values() if found["case"]["kind"] == "causal"]
    curve = [found for found in curve if found["case"]["heads"] == found["case"]["key_heads"]]
    lengths = {found["case"]["length"] for found in curve}
    if len(lengths) < 2:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, variant in enumerate(PLOTTED):
        timed = [found for found in curve if "both" in found.get(variant, {})]
        plot_points(axes, [(found["case"]["length"], found[variant]["both"]["tflops"]) for found in timed], index, variant)
    set_length_axis(axes, lengths, "length of the whole sequence")
    axes.set(ylabel="TFLOP/s per GPU, forward + backward", ylim=(0, None))
    axes.set_title(f"Causal ring attention, bf16, H {curve[0]['case']['heads']}, B 1")
    clean_axes(axes)
    axes.legend(frameon=False)
    return figure


def report_text(header: dict[str, Any], rows: Rows) -> str:
    commands = textwrap.indent(header["command"], " " * 4)
    parts = [f"# Ring attention, {header['date']}\n\n{header['machine']}.\n\n{commands}\n\n{speed_table(header, rows)}"]
    if communication := communication_table(header, rows):
        parts.append(f"## Communication\n\n{COMMUNICATION_NOTE}\n{communication}")
    return "\n".join(parts)


def write(output: Path, header: dict[str, Any], rows: Rows) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "ring.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    text = report_text(header, rows)
    if figure := plot_lengths(rows):
        save_plot(figure, output / "lengths.png")
        text += "\n## Over lengths\n\nCausal, as many key heads as query heads.\n\n![TFLOP/s over lengths](lengths.png)\n"
    (output / "README.md").write_text(text)


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    header = json.loads(path.read_text())
    return header, header.pop("rows")


def join(paths: list[Path]) -> tuple[dict[str, Any], Rows]:
    """Join the rows of several files ring.json. The joined header lists all commands.

    Raises:
        ValueError: the files come from different machines, or contain the same case.
    """
    headers, parts = zip(*map(read, paths), strict=True)
    machines = dict.fromkeys(header["machine"] for header in headers)
    if len(machines) > 1:
        raise ValueError(f"the runs must be of one machine, but are of {'; '.join(machines)}")
    rows: Rows = {}
    for path, part in zip(paths, parts, strict=True):
        if repeated := [name for name in part if name in rows]:
            raise ValueError(f"{path}: {', '.join(repeated)} is also in an earlier run; pass only one run of each case")
        rows |= part
    header = headers[0] | {
        "date": ", ".join(sorted({header["date"] for header in headers})),
        "command": "\n".join(header["command"] for header in headers),
        "receive_buffer_bytes": max(header.get("receive_buffer_bytes", 0) for header in headers),
    }
    return header, rows


def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("directory", type=Path, help="the directory with ring.json; with --join, the directory to write to")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RING.JSON", help="the runs to join")
    args = parser.parse_args(argv)
    try:
        header, rows = join(args.join) if args.join else read(args.directory / "ring.json")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    write(args.directory, header, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
