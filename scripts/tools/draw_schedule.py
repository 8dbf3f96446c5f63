"""Draw a ring pass from its schedule: who computes what at each step, and what flies meanwhile.

python -m scripts.tools.draw_schedule docs/ring.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ringattn import Layout, Mask
from ringattn.planning.rank_plan import cuts, needs
from ringattn.planning.schedule import Schedule, circulate

COLOURS = plt.get_cmap("Set2").colors


def draw(axes: plt.Axes, schedule: Schedule, title: str, traveller: str, result: str) -> None:
    """One panel: steps to the right, ranks downwards, a box a visit in its owner's colour, an arrow a message."""
    for t, step in enumerate(schedule.steps):
        for rank, owner, _ in step.visits:
            axes.add_patch(plt.Rectangle((t - 0.3, rank - 0.3), 0.6, 0.6, facecolor=COLOURS[owner], edgecolor="black"))
            axes.text(t, rank, f"Q{owner} K{rank}", ha="center", va="center", fontsize=8)
        for message in step.messages:
            solid = message.kind == "traveller"
            axes.annotate(
                "",
                xy=(t + 0.52, message.dst + (-0.08 if solid else 0.08)),
                xytext=(t + 0.32 if solid else t - 0.5, message.src + (-0.08 if solid else 0.08)),
                arrowprops={
                    "arrowstyle": "->",
                    "color": COLOURS[message.owner],
                    "linestyle": "-" if solid else ":",
                    "linewidth": 1.8,
                    "zorder": 0,
                },
            )
    axes.plot([], [], color="grey", linestyle="-", label=traveller)
    axes.plot([], [], color="grey", linestyle=":", label=result)
    axes.set(title=title, xlabel="step", xlim=(-0.7, len(schedule.steps) - 0.3), ylim=(schedule.ranks - 0.4, -0.6))
    axes.set_xticks(range(len(schedule.steps)))
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the picture to write")
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 9), help="ranks of the ring (default: 4)")
    arguments = parser.parse_args()
    size = 64 * arguments.ranks, arguments.ranks
    panels = {
        "state ring, causal (zigzag)": (Mask.causal(), Layout.zigzag(*size)),
        "state ring, window of one shard": (Mask.causal(window=64), Layout.contiguous(*size)),
    }
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(5, 3), layout="constrained")
    for panel, (title, of) in zip(axes, panels.items(), strict=True):
        schedule = circulate(needs(*of), results=True, cuts=cuts(*of, "queries"))
        draw(panel, schedule, title, "queries fly", "states (m, l, o) fly")
    try:
        figure.savefig(arguments.output, dpi=130)
    except (OSError, ValueError) as error:
        parser.error(f"no picture at {arguments.output}: {error}")


if __name__ == "__main__":
    main()
