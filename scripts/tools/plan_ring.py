r"""Predict the time, the bytes and the exposed communication of one attention layer on 2 to 4,096 GPUs.

    python -m scripts.tools.plan_ring --length 1048576 --heads 32 --kv-heads 8
    python -m scripts.tools.plan_ring --length 262144 --ranks 8 16 32 --ulysses auto --network-gbs 50 --plot plan.png
    python -m scripts.tools.plan_ring --measured outputs/benchmarks/ring/ring.json

The predictions come from the cost model with which ringattn chooses schedules (`ringattn/planning`).

In each step of a ring pass, the GPUs compute while the links carry the next blocks. The time of a step is the longer of the
busiest rank's computation and the busiest link's transfer. Exposed time is time in which a GPU waits for a transfer. Each step
also costs a fixed GPU time, and the merge of partial results takes additional time. Without a CUDA graph, a pass takes at least
as long as the host needs to launch the steps. A ring that spans several nodes runs at the speed of the network.

A Ulysses all-to-all of one chunk of heads overlaps with attention of another chunk.

To save time, long sequences are scaled down to 32,768 positions, and large rings to 64 ranks. The error is less than 3%.

The option --measured compares predictions with the measurements of `scripts.bench.ring`, in the file ring.json. The comparison
leaves out packed documents, CUDA graphs and the transport p2p.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ringattn import Layout, Mask
from ringattn.choices import KINDS, SCHEDULES
from ringattn.planning import ulysses_degree, workload
from ringattn.planning.cost_model import MERGE_FLOPS_PER_BYTE, STEP_OVERHEAD, Interconnect
from ringattn.planning.rank_plan import Plan, get_plan
from ringattn.planning.schedule import Schedule
from ringattn.planning.ulysses_degree import MAX_PLANNED_POSITIONS, MAX_PLANNED_RANKS
from ringattn.planning.workload import Work
from scripts import command
from scripts.bench import ring_variants
from scripts.bench.cases import Case
from scripts.tables import markdown_table

MASKS = ("causal", "full")
BF16_BYTES = 2


@dataclass(frozen=True)
class Cluster:
    """Nodes with several GPUs. Each GPU has its own connection to the network.

    Times are in seconds, bandwidths in bytes per second, and speeds in FLOP/s. The default FLOP/s were measured on one H200
    with a long sequence. The default launch times were fitted to rings of four H200s (benchmarks/ring.md).
    """

    forward_flops: float = 650e12
    backward_flops: float = 588e12
    forward_merge: float = 650e12 / MERGE_FLOPS_PER_BYTE["forward"]  # bytes of partial results per second
    backward_merge: float = 588e12 / MERGE_FLOPS_PER_BYTE["backward"]
    nvlink: float = 330e9
    nvlink_latency: float = 12e-6
    node: int = 8  # the number of GPUs per node
    network: float = 40e9  # the bandwidth of the network per GPU
    network_latency: float = 60e-6
    forward_launch: float = 250e-6  # the time that a host needs to start one step
    backward_launch: float = 460e-6
    forward_overhead: float = STEP_OVERHEAD["forward"]  # the fixed GPU time of a step
    backward_overhead: float = STEP_OVERHEAD["backward"]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name.endswith(("latency", "launch", "overhead"))
            if not (value > 0 or (may_be_zero and value == 0)):
                raise ValueError(f"{name} = {value:g}: must be {'at least 0' if may_be_zero else 'above 0'}")

    def speed(self, name: str, direction: str) -> float:
        """Return a field ("flops", "merge", "launch" or "overhead") for a direction."""
        return getattr(self, f"{direction}_{name}")

    def interconnects(self, flops: float) -> tuple[Interconnect, Interconnect]:
        near = Interconnect("nvlink", True, self.nvlink, self.nvlink_latency, flops)
        return near, Interconnect("network", False, self.network, self.network_latency, flops)

    def ring_interconnect(self, ranks: int, flops: float) -> Interconnect:
        near, far = self.interconnects(flops)
        return near if ranks <= self.node else far


@dataclass(frozen=True)
class Layer:
    """An attention layer whose bf16 sequences are sharded over several ranks."""

    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    ranks: int
    ulysses: int = 1
    batch: int = 1
    mask: str = "causal"
    window: int | None = None
    layout: str = "zigzag"
    schedule: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seq_len", "heads", "kv_heads", "dim", "ranks", "ulysses", "batch", "window"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} = {value}: must be at least 1 and below 2**31")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key heads: the number must divide the {self.heads} query heads")
        if self.seq_len < self.ranks:
            raise ValueError(f"{self.seq_len} tokens are too few for {self.ranks} ranks: --ranks must be at most --length")
        if self.ranks % self.ulysses or self.heads % self.ulysses:
            raise ValueError(
                f"--ulysses {self.ulysses}: must divide the {self.ranks} ranks and the {self.heads} heads; "
                "'auto' chooses such a number"
            )

    @property
    def ring(self) -> int:
        return self.ranks // self.ulysses

    @property
    def tokens_per_ring_rank(self) -> int:
        return self.seq_len // self.ring

    @cached_property
    def pairs(self) -> float:
        return self.scaled_mask(scale := self.seq_len / self.positions).pairs(self.positions)[0] * scale**2

    @property
    def positions(self) -> int:
        """Return the number of planned positions. Each position may represent several tokens."""
        return min(self.seq_len, max(MAX_PLANNED_POSITIONS, self.ring))

    def scaled_mask(self, scale: float) -> Mask:
        return Mask(self.mask == "causal", self.window and max(1, round(self.window / scale)))

    @property
    def sent_heads(self) -> tuple[int, int]:
        """Return the numbers of query heads and key heads that an all-to-all sends."""
        return self.heads, self.kv_heads * ulysses_degree.key_copies(self.heads, self.kv_heads, self.ulysses)

    @property
    def overlap_chunks(self) -> int:
        """The number of head chunks. The all-to-all of one chunk overlaps with attention of another chunk."""
        if self.ulysses == 1:
            return 1
        heads = (count // self.ulysses for count in self.sent_heads)
        return ulysses_degree.head_chunks_for_overlap(self.batch * self.tokens_per_ring_rank, *heads)

    def memory_chunks_and_work(self) -> tuple[int, tuple[Work, Work]]:
        shares = self.ulysses * self.overlap_chunks
        q, k = (meta(self.batch, self.tokens_per_ring_rank, heads // shares, self.dim) for heads in self.sent_heads)
        chunks = workload.head_chunks_for_memory(q, k, k, self.pairs / self.ring)
        q, k = (workload.head_chunk(x, chunks) for x in (q, k))
        return chunks, (workload.forward_work(q, k, k), workload.backward_work(q, k, k))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@dataclass(frozen=True)
class Cost:
    compute: float  # seconds
    seconds: float
    bytes: float  # bytes that the rank sends

    @property
    def exposed(self) -> float:
        return self.seconds - self.compute

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.compute + other.compute, self.seconds + other.seconds, self.bytes + other.bytes)

    def __mul__(self, count: float) -> "Cost":
        return Cost(count * self.compute, count * self.seconds, count * self.bytes)


def predict(layer: Layer, cluster: Cluster) -> tuple[Cost, Cost]:
    memory_chunks, (forward, backward) = layer.memory_chunks_and_work()

    def cost(work: Work) -> Cost:
        chunk = ring_pass(layer, work, cluster) * memory_chunks
        return chunk * layer.overlap_chunks + all_to_all(layer, cluster, chunk.seconds)

    return cost(forward), cost(backward)


def planned_ring(layer: Layer) -> tuple[Plan, float, float]:
    """Plan a smaller ring. Return the plan, the real tokens per planned position, and the real ranks per planned rank."""
    ring, seq_len = layer.ring, layer.seq_len
    if layer.layout == "contiguous" and layer.mask == "causal" and layer.window:
        # Ranks beyond the window exchange no blocks, so a shorter ring has the same cost.
        reach = -(-(layer.window - 1) // layer.tokens_per_ring_rank) + 2
        ring, seq_len = min(ring, reach), min(seq_len, reach * layer.tokens_per_ring_rank)
    ranks = min(ring, MAX_PLANNED_RANKS)
    positions = min(seq_len, max(MAX_PLANNED_POSITIONS, ranks))
    scale = seq_len / positions
    layout = Layout(layer.layout, positions, ranks)
    return get_plan(layer.scaled_mask(scale), layout, 0, torch.device("cpu")), scale, ring / ranks


def ring_pass(layer: Layer, work: Work, cluster: Cluster) -> Cost:
    plan, scale, group = planned_ring(layer)
    # Each planned rank represents `group` real ranks, and each planned hop is `group` real hops.
    work = work.scaled(scale / group)
    interconnect = cluster.ring_interconnect(layer.ranks, cluster.speed("flops", work.direction))
    name = plan.choose_schedule(layer.schedule, work, interconnect)
    hops = plan.costs(name, work, interconnect)
    block, result = getattr(work.row_bytes, name)
    sent = max(bytes_sent(plan.schedule(name, result > 0, interconnect.all_pairs), block, result))
    overhead = len(hops) * cluster.speed("overhead", work.direction)
    overhead += plan.merge_bytes(work) / cluster.speed("merge", work.direction)
    compute = sum(hop.compute for hop in hops) + overhead
    seconds = max(sum(hop.seconds for hop in hops) + overhead, len(hops) * cluster.speed("launch", work.direction))
    return Cost(compute, seconds, layer.batch * sent) * group


def bytes_sent(schedule: Schedule, block_row: float, result_row: float) -> list[float]:
    """Return the bytes that each rank sends. The arguments `block_row` and `result_row` are bytes per row."""
    size = {"block": block_row, "result": result_row}
    sent = [0.0] * schedule.ranks
    for step in schedule.steps:
        for message in step.messages:
            sent[message.src] += len(message.rows) * size[message.kind]
    return sent


def all_to_all(layer: Layer, cluster: Cluster, attention: float) -> Cost:
    """Return the cost of the Ulysses all-to-alls of one pass.

    Args:
        attention: the time of attention per chunk of heads, in seconds.
    """
    rows = layer.batch * layer.seq_len / layer.ranks
    bytes_to_each = rows * 2 * sum(layer.sent_heads) * layer.dim * BF16_BYTES / layer.ulysses
    host, chunks = min(layer.ranks, cluster.node), layer.overlap_chunks
    interconnects = cluster.interconnects(cluster.forward_flops)
    seconds = ulysses_degree.all_to_all_seconds(bytes_to_each / chunks, layer.ulysses, host, *interconnects)
    exposed = ulysses_degree.exposed_seconds(chunks, attention, seconds)
    return Cost(0.0, exposed, (layer.ulysses - 1) * bytes_to_each)


def with_ulysses(layer: Layer, text: str, cluster: Cluster) -> Layer:
    """Set the Ulysses degree of a layer to `text`, a number or "auto".

    Raises:
        ValueError: `text` is neither a number nor "auto", or the number does not divide the ranks and the heads.
    """
    if text == "auto":
        q, k = (meta(layer.batch, layer.seq_len, heads, layer.dim) for heads in (layer.heads, layer.kv_heads))
        # the mean speed of the two matrix products of the forward and the five products of the backward
        flops = 3.5 / (1 / cluster.forward_flops + 2.5 / cluster.backward_flops)
        mask, (near, far) = layer.scaled_mask(1.0), cluster.interconnects(flops)
        ranks = dict(ranks=layer.ranks, host=cluster.node, near=near, far=far)
        best = ulysses_degree.best_ulysses_degree(
            q, k, k, layers={mask: 1}, layout=layer.layout, schedule=layer.schedule, **ranks
        )
        return replace(layer, ulysses=best)
    if not text.isdecimal():
        raise ValueError(f"--ulysses {text}: must be a number of ranks or 'auto'")
    return replace(layer, ulysses=int(text))


COLUMNS = (
    "ranks | Ulysses x ring | tokens per rank | forward, ms | forward + backward, ms | "
    "sent per rank, MiB | exposed, ms | exposed, share of the time | TFLOP/s per GPU"
)


def table_row(layer: Layer, forward: Cost, both: Cost) -> list[str]:
    # The forward pass has two matrix products per (query, key) pair, and the backward pass has five.
    flops = 2 * 7 * layer.heads * layer.dim * layer.batch * layer.pairs
    return [
        f"{layer.ranks:,}",
        f"{layer.ulysses} x {layer.ring:,}",
        f"{layer.seq_len / layer.ranks:,.0f}",
        f"{1e3 * forward.seconds:,.3g}",
        f"{1e3 * both.seconds:,.3g}",
        f"{both.bytes / 2**20:,.1f}",
        f"{1e3 * both.exposed:,.3g}",
        f"{both.exposed / both.seconds:.0%}",
        f"{flops / layer.ranks / both.seconds / 1e12:,.0f}",
    ]


def predict_all(layers: list[Layer], cluster: Cluster) -> list[tuple[Layer, Cost]]:
    """Print the table of predictions. Return the total cost of both passes for each layer."""
    costs: list[tuple[Layer, Cost]] = []
    lines: list[list[str]] = []
    for layer in layers:
        forward, backward = predict(layer, cluster)
        costs.append((layer, forward + backward))
        lines.append(table_row(layer, forward, forward + backward))
    print(markdown_table(COLUMNS, lines), end="")
    return costs


def read_measured(path: Path) -> list[tuple[str, Layer, dict[str, Any]]]:
    """Read the file ring.json of `scripts.bench.ring`. Return the name, the layer and the times of each predictable call.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a report of `scripts.bench.ring`, or contains no predictable call.
    """
    measured = list[tuple[str, Layer, dict[str, Any]]]()
    try:
        report = json.loads(path.read_text())
        for name, rows in report["rows"].items():
            case = Case(**rows.pop("case"))
            shape = case.length, case.heads, case.num_key_heads, case.head_dim, report["ranks"]
            for variant, row in rows.items():
                if case.documents or "both" not in row or not re.fullmatch(r"nvlink-\w+|ulysses-\d+", variant):
                    continue
                schedule = variant.split("-")[1] if ring_variants.is_ring(variant) else "auto"
                layer = Layer(*shape, ring_variants.ulysses_degree(variant), window=case.window, schedule=schedule)
                measured.append((f"{name}, {variant}", layer, row))
    except (ValueError, TypeError, KeyError, AttributeError):
        measured.clear()
    if not measured:
        raise ValueError(f"{path} must be a file ring.json of scripts.bench.ring with times of NVLink rings or Ulysses")
    return measured


def print_measured(measured: list[tuple[str, Layer, dict[str, Any]]], cluster: Cluster) -> None:
    columns = (
        "call | forward, ms | predicted, ms | measured / predicted"
        " | forward + backward, ms | predicted, ms | measured / predicted"
    )
    lines = []
    for name, layer, row in measured:
        forward, backward = predict(layer, cluster)
        cells = [name]
        for part, cost in (("forward", forward), ("both", forward + backward)):
            milliseconds = 1e3 * cost.seconds
            cells += [f"{row[part]['ms']:,.3g}", f"{milliseconds:,.3g}", f"{row[part]['ms'] / milliseconds:.2f}"]
        lines.append(cells)
    print(markdown_table(columns, lines), end="")


def plot(costs: list[tuple[Layer, Cost]], path: Path) -> None:
    from scripts.plots import plt, save_plot

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    ranks = [layer.ranks for layer, _ in costs]
    axes.loglog(ranks, [1e3 * cost.seconds for _, cost in costs], marker="o", label="forward + backward")
    axes.loglog(ranks, [1e3 * cost.compute for _, cost in costs], linestyle="--", label="computation alone")
    axes.set(xlabel="ranks", ylabel="milliseconds per layer", title=f"{costs[0][0].seq_len:,} tokens, predicted")
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.legend(frameon=False)
    save_plot(figure, path)


CLUSTER_OPTIONS = (  # option, field of `Cluster`, unit of the option, meaning
    ("--forward-tflops", "forward_flops", 1e12, "TFLOP/s of attention per GPU"),
    ("--backward-tflops", "backward_flops", 1e12, "TFLOP/s of attention per GPU"),
    ("--forward-merge-gbs", "forward_merge", 1e9, "GB/s of partial results that a GPU can merge"),
    ("--backward-merge-gbs", "backward_merge", 1e9, "GB/s of partial gradients that a GPU can add"),
    ("--nvlink-gbs", "nvlink", 1e9, "GB/s that a GPU can send inside its node"),
    ("--nvlink-us", "nvlink_latency", 1e-6, "microseconds per message"),
    ("--network-gbs", "network", 1e9, "GB/s that a GPU can send to other nodes"),
    ("--network-us", "network_latency", 1e-6, "microseconds per message"),
    ("--forward-launch-us", "forward_launch", 1e-6, "microseconds that a host takes to start a step"),
    ("--backward-launch-us", "backward_launch", 1e-6, "microseconds that a host takes to start a step"),
    ("--forward-overhead-us", "forward_overhead", 1e-6, "microseconds that a GPU takes to start and drain a step"),
    ("--backward-overhead-us", "backward_overhead", 1e-6, "microseconds that a GPU takes to start and drain a step"),
)


def new_parser() -> argparse.ArgumentParser:
    parser = command.new_parser(__doc__)
    cluster = Cluster()
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2**i for i in range(1, 13)], help="default: 2, 4, ... 4096")
    add("--length", type=int, default=1048576, help="tokens of the sequence (default: 1048576)")
    add("--heads", type=int, default=32, help="query heads (default: 32)")
    add("--kv-heads", type=int, default=8, help="key heads (default: 8)")
    add("--dim", type=int, default=128, help="head dim (default: 128)")
    add("--batch", type=int, default=1, help="sequences (default: 1)")
    add("--mask", choices=MASKS, default="causal", help="default: causal")
    add("--window", type=int, help="number of keys that a query may attend to; default: no window")
    add("--layout", choices=KINDS, default="zigzag", help="default: zigzag")
    add("--schedule", choices=SCHEDULES, default="auto", help="default: auto, the faster one for each direction")
    add("--ulysses", default="1", help="ranks per all-to-all, or 'auto' for the fastest number (default: 1)")
    add("--node", type=int, default=cluster.node, help="GPUs per node (default: %(default)s)")
    for option, name, unit, meaning in CLUSTER_OPTIONS:
        add(option, dest=name, type=float, default=getattr(cluster, name) / unit, help=f"{meaning} (default: %(default)g)")
    add("--plot", type=command.png_file, help="a PNG file for a plot of the table")
    add("--measured", type=Path, help="a file ring.json; compare its measurements with the prediction")
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the predictions, or compare them with measurements.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the arguments or the measurements describe an impossible layer or cluster.
    """
    cluster = Cluster(node=args.node, **{name: getattr(args, name) * unit for _, name, unit, _ in CLUSTER_OPTIONS})
    options: dict[str, Any] = dict(
        batch=args.batch, mask=args.mask, window=args.window, layout=args.layout, schedule=args.schedule
    )
    if args.measured:
        defaults = vars(new_parser().parse_args([]))
        clusters = {name for _, name, _, _ in CLUSTER_OPTIONS} | {"node", "measured"}
        if given := [name for name in defaults if name not in clusters and getattr(args, name) != defaults[name]]:
            option = given[0].replace("_", "-")
            raise ValueError(f"--{option} and --measured cannot be combined, because the file describes the measured layers")
        print_measured(read_measured(args.measured), cluster)
        return
    layers = [Layer(args.length, args.heads, args.kv_heads, args.dim, ranks, **options) for ranks in args.ranks]
    costs = predict_all([with_ulysses(layer, args.ulysses, cluster) for layer in layers], cluster)
    if args.plot:
        plot(costs, args.plot)


def main(argv: list[str]) -> None:
    parser = new_parser()
    try:
        run(parser.parse_args(argv))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
