"""Tables and a picture of what `benchmark_ring.py` measured: from its ring.json again, or from those of several runs.

    python -m scripts.bench.ring_report outputs/ring
    python -m scripts.bench.ring_report outputs/ring --join short/ring.json long/ring.json

Writes README.md to the directory, over what stands there, and lengths.png if two lengths of causal attention were measured.
With --join it first writes ring.json, of the rows of all runs: they must be of one machine, and no case may be in two of them,
because ratios are taken within a run.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = ("local", "nvlink-auto", "nvlink-state", "ulysses-4", "context_parallel")
PARTS = ("forward", "both")  # what is timed; both: forward and backward
Rows = dict[str, dict[str, dict]]  # of a case's name: the case itself as "case", and a row a variant


def base_of(variant: str) -> str:
    """The variant that does the same without communication."""
    graph = "-graph" if variant.endswith("-graph") else ""
    if variant.startswith("ulysses-"):
        return f"ulysses-{variant.split('-')[1]}-local{graph}"
    return f"local{graph}"


def _variants(found: dict[str, dict]) -> dict[str, dict]:
    return {name: row for name, row in found.items() if name != "case"}


def table(rows: Rows) -> str:
    """Speed, in Markdown: a row a case and variant."""
    lines = [
        "| case | variant | forward, TFLOP/s a GPU | forward+backward | of local | of torch | peak, GiB | worst error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        for variant, row in _variants(found).items():
            if "both" not in row:
                lines.append(f"| {name} | {variant} | {'wrong' if 'errors' in row else '-'} | | | | | |")
                continue
            shares = []
            for base in (base_of(variant), "context_parallel"):
                other = found.get(base, {})
                parts = [other[x]["ms"] / row[x]["ms"] for x in PARTS if x in other]
                shares.append(" / ".join(f"{x:.2f}" if base == "context_parallel" else f"{x:.0%}" for x in parts) or "-")
            error = f"{max(row['errors'].values()):.1e}" if "errors" in row else "-"
            lines.append(
                f"| {name} | {variant} | {row['forward']['tflops']:.0f} | {row['both']['tflops']:.0f} | {' | '.join(shares)} "
                f"| {row['peak_bytes'] / 2**30:.1f} | {error} |"
            )
    return "\n".join(lines) + "\n"


def communication_table(rows: Rows) -> str:
    """What the rings sent and how much of its time nothing hid, in Markdown; "" if no ring was timed."""
    lines = [
        "| case | variant | schedule forward / backward | hops | MiB sent by the busiest rank | exposed, us | us a hop |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        for variant, row in _variants(found).items():
            if "hops" in row.get("both", {}):
                cells = (
                    row["both"]["schedule"],
                    _cell(row, lambda x: str(x["hops"])),
                    _cell(row, lambda x: f"{x['bytes_sent'] / 2**20:,.1f}"),
                    _cell(row, lambda x: f"{round(x['exposed_us']):,}"),
                    _cell(row, lambda x: f"{x['exposed_us'] / x['hops']:,.1f}"),
                )
                lines.append(f"| {name} | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _cell(row: dict, form: Callable[[dict], str]) -> str:
    """`forward / forward+backward`; "-" where there was nothing to compare with, or no hop."""
    try:
        return " / ".join(form(row[part]) for part in PARTS)
    except (KeyError, ZeroDivisionError):
        return "-"


def plot_lengths(rows: Rows) -> plt.Figure | None:
    """TFLOP/s a GPU over the length, causal, with as many key heads as query heads; None without two lengths."""
    curve = [found for found in rows.values() if found["case"]["kind"] == "causal"]
    curve = [found for found in curve if found["case"]["heads"] == found["case"]["key_heads"]]
    lengths = sorted({found["case"]["length"] for found in curve})
    if len(lengths) < 2:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, variant in enumerate(CURVES):
        timed = [found for found in curve if "both" in found.get(variant, {})]
        points = sorted((found["case"]["length"], found[variant]["both"]["tflops"]) for found in timed)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{index}", label=variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n >> 20}m" if n % 2**20 == 0 else f"{n >> 10}k" for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="length of the whole sequence", ylabel="TFLOP/s a GPU, forward+backward", ylim=(0, None))
    axes.set_title(f"Causal ring attention, bf16, H {curve[0]['case']['heads']}, B 1")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def text(head: dict, rows: Rows) -> str:
    """README.md but for the picture."""
    commands = textwrap.indent(head["command"], " " * 4)
    parts = [f"# Ring attention, {head['date']}\n\n{head['machine']}.\n\n{commands}\n\n{table(rows)}"]
    if communication := communication_table(rows):
        note = (
            "Forward / forward+backward. Hops are the steps that have messages. Exposed is what a call takes longer than\n"
            "`local` (a graph: than `local-graph`), which knows no communication; noise can make it negative. `local` runs\n"
            "the kernels of the automatic schedule: of a ring with another, merges and kernels that take longer count too.\n"
        )
        parts.append(f"## Communication\n\n{note}\n{communication}")
    return "\n".join(parts)


def write(output: Path, head: dict, rows: Rows) -> None:
    """ring.json, README.md and, if there is anything to draw, lengths.png."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "ring.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    readme = text(head, rows)
    if figure := plot_lengths(rows):
        figure.savefig(output / "lengths.png", dpi=150)
        plt.close(figure)
        readme += "\n## Over lengths\n\nCausal, as many key heads as query heads.\n\n![TFLOP/s over lengths](lengths.png)\n"
    (output / "README.md").write_text(readme)


def read(path: Path) -> tuple[dict, Rows]:
    """The head and the rows of a ring.json."""
    head = json.loads(path.read_text())
    return head, head.pop("rows")


def join(paths: list[Path]) -> tuple[dict, Rows]:
    """The runs of several ring.json as one, with all their commands.

    Raises:
        ValueError: runs of different machines, or a case that is in two of them.
    """
    heads, parts = zip(*map(read, paths), strict=True)
    machines = dict.fromkeys(head["machine"] for head in heads)
    if len(machines) > 1:
        raise ValueError(f"runs of different machines cannot be joined: {'; '.join(machines)}")
    rows = {}
    for path, part in zip(paths, parts, strict=True):
        if twice := [name for name in part if name in rows]:
            raise ValueError(f"{path}: {', '.join(twice)} measured in an earlier run too: leave one out, ratios need one run")
        rows |= part
    head = {
        "date": ", ".join(sorted({head["date"] for head in heads})),
        "machine": heads[0]["machine"],
        "command": "\n".join(head["command"] for head in heads),
        "inbox_bytes": max(head.get("inbox_bytes", 0) for head in heads),
    }
    return head, rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where ring.json is, or with --join is to be")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RING.JSON", help="runs to put together")
    arguments = parser.parse_args(argv)
    try:
        head, rows = join(arguments.join) if arguments.join else read(arguments.directory / "ring.json")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    write(arguments.directory, head, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
