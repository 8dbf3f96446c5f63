"""Draw the computations and the messages in each step of a ring pass.

python -m scripts.tools.draw_schedule docs/ring.png
"""

import sys

from ringattn import Layout, Mask
from ringattn.planning.rank_plan import needs, split_points
from ringattn.planning.schedule import Message, Schedule, build_schedule
from scripts import command
from scripts.plots import plt, save_plot

COLOURS = [plt.get_cmap("Set2")(i) for i in range(8)]


def draw(axes: plt.Axes, schedule: Schedule, title: str) -> None:
    """Draw the schedule of a state ring. Steps go from left to right, and ranks go from top to bottom.

    Boxes are local steps, and arrows are messages. Colours show the owner of the queries.
    """
    for t, step in enumerate(schedule.steps):
        for rank, owner, _ in step.local_steps:
            axes.add_patch(plt.Rectangle((t - 0.3, rank - 0.3), 0.6, 0.6, facecolor=COLOURS[owner], edgecolor="black"))
            axes.text(t, rank, f"Q{owner} K{rank}", ha="center", va="center", fontsize=8)
        for message in step.messages:
            draw_message(axes, t, message)
    axes.plot([], [], color="grey", linestyle="-", label="queries in flight")
    axes.plot([], [], color="grey", linestyle=":", label="states (m, l, o) in flight")
    axes.set(title=title, xlabel="step", xlim=(-0.7, len(schedule.steps) - 0.3), ylim=(schedule.ranks - 0.4, -0.6))
    axes.set_xticks(range(len(schedule.steps)))
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False, fontsize=9)


def draw_message(axes: plt.Axes, t: int, message: Message) -> None:
    is_block = message.kind == "block"
    shift = -0.08 if is_block else 0.08
    axes.annotate(
        "",
        xy=(t + 0.52, message.dst + shift),
        xytext=(t + 0.32 if is_block else t - 0.5, message.src + shift),
        arrowprops={
            "arrowstyle": "->",
            "color": COLOURS[message.owner],
            "linestyle": "-" if is_block else ":",
            "linewidth": 1.8,
            "zorder": 0,
        },
    )


def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("output", type=command.png_file, help="the PNG file to write")
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 9), help="ranks of the ring (default: 4)")
    args = parser.parse_args(argv)
    size = 64 * args.ranks, args.ranks
    panels = {
        "state ring, causal (zigzag)": (Mask.causal(), Layout.zigzag(*size)),
        "state ring, window of one shard": (Mask.causal(window=64), Layout.contiguous(*size)),
    }
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(5, 3), layout="constrained")
    for panel, (title, (mask, layout)) in zip(axes, panels.items(), strict=True):
        points = split_points(mask, layout, "queries")
        draw(panel, build_schedule(needs(mask, layout), results=True, split_points=points), title)
    try:
        save_plot(figure, args.output)
    except (OSError, ValueError) as error:
        parser.error(f"cannot write {args.output}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
