r"""Predict the time, bytes and exposed communication of one attention layer, forward and backward, on 2 to 4,096 GPUs.

    python scripts/plan_ring.py --length 1048576 --heads 32 --kv-heads 8
    python scripts/plan_ring.py --length 262144 --ranks 8 16 32 --ulysses auto --network-gbs 50 --plot plan.png
    python scripts/plan_ring.py --measured rows.json

The model: a ring pass is a list of steps. In each the busiest rank computes while the busiest link carries the next blocks, and
the longer of the two counts; what communication takes longer is exposed. A step costs a GPU some time besides its FLOPs, for
rounds of tiles that do not fill it and for adding up what arrives. Hosts start steps ahead of the GPUs, but no pass is shorter
than its hosts take to start all of it (a CUDA graph takes next to nothing). Steps, bytes and pairs come from the schedules
that `ringattn` would run, where planning them takes seconds, and from closed forms beyond. An exchange of heads (Ulysses) is
never hidden. A ring that leaves the node goes at the network's speed, as every hop waits for its slowest link.

--measured compares with a JSON list of objects that have ranks, seq_len, heads, kv_heads, dim, forward_ms and
forward_backward_ms: mask, layout, schedule and cluster are those of the other arguments.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ringattn import Layout, Mask  # noqa: E402
from ringattn.cost import FLOPS_A_BYTE, Fabric  # noqa: E402
from ringattn.layout import KINDS  # noqa: E402
from ringattn.plan import SCHEDULES, Work, backward_work, forward_work, part_of_heads, passes, plan  # noqa: E402
from ringattn.ulysses import fewest_bytes, key_copies  # noqa: E402

SIZE = 2  # bytes of a bf16 number
EXACT_RANKS, EXACT_ROWS = 16, 2**23  # ranks, and positions x ranks, up to which the schedules themselves are planned
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes, each with its own way to the network. Seconds, bytes and FLOPs a second."""

    forward_flops: float = 640e12
    backward_flops: float = 570e12
    nvlink: float = 330e9
    nvlink_latency: float = 12e-6
    node: int = 8  # GPUs of a node
    network: float = 40e9  # of one GPU
    network_latency: float = 60e-6
    forward_launch: float = 250e-6  # of a host, to start a step
    backward_launch: float = 460e-6
    forward_ends: float = 20e-6  # of a GPU, for the beginning and the end of a step, and what it has to add up
    backward_ends: float = 80e-6

    def fabric(self, span: int, flops: float) -> Fabric:
        """What joins a ring over `span` neighbouring GPUs."""
        inside = span <= self.node
        link = (self.nvlink, self.nvlink_latency) if inside else (self.network, self.network_latency)
        return Fabric("nvlink" if inside else "network", inside, *link, flops)


@dataclass(frozen=True)
class Layer:
    """One attention layer on one batch of bf16 sequences, and how it is cut."""

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

    @property
    def ring(self) -> int:
        return self.ranks // self.ulysses

    def pairs(self, queries: int) -> int:
        """(query, key) pairs of the first `queries` positions."""
        window = self.window or self.seq_len
        left = max(queries - window, 0)
        hidden = left * (left + 1) // 2  # keys that the window has passed
        if self.mask == "causal":
            return queries * (queries + 1) // 2 - hidden
        short = min(max(self.seq_len - window, 0), queries)  # queries that do not see the end
        return short * window + short * (short - 1) // 2 + (queries - short) * self.seq_len - hidden

    def _shapes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k with the heads that a rank of the ring has."""
        copies = key_copies(self.heads, self.kv_heads, self.ulysses)
        rows = self.seq_len // self.ring
        return tuple(
            torch.empty(self.batch, rows, heads // self.ulysses, self.dim, dtype=torch.bfloat16, device="meta")
            for heads in (self.heads, self.kv_heads * copies)
        )

    @property
    def passes(self) -> int:
        q, k = self._shapes()
        return passes(q, k, k, self.pairs(self.seq_len) / self.ring)

    def works(self) -> tuple[Work, Work]:
        """Of a pass of the forward and of one of the backward."""
        count = self.passes
        q, k = (part_of_heads(x, count) for x in self._shapes())
        return forward_work(q, k, k), backward_work(q, k, k)


@dataclass(frozen=True)
class Cost:
    """One direction, on the busiest rank."""

    compute: float  # seconds
    seconds: float
    bytes: float  # sent
    steps: int = 0

    @property
    def exposed(self) -> float:
        """Seconds in which no computation hides that a message, or the host, is late."""
        return self.seconds - self.compute

    def started_by(self, launch: float) -> "Cost":
        """With a host that takes `launch` seconds for a step."""
        return replace(self, seconds=max(self.seconds, self.steps * launch))

    def ended(self, ends: float) -> "Cost":
        """With a GPU that takes `ends` seconds for a step besides its work."""
        return replace(self, compute=self.compute + self.steps * ends, seconds=self.seconds + self.steps * ends)

    def times(self, count: int) -> "Cost":
        """That of as many passes, one after the other."""
        return Cost(count * self.compute, count * self.seconds, count * self.bytes, count * self.steps)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.compute + other.compute, self.seconds + other.seconds, self.bytes + other.bytes, self.steps + other.steps
        )


def predict(layer: Layer, cluster: Cluster) -> tuple[Cost, Cost]:
    """The forward and the backward of a layer."""
    flops = cluster.forward_flops, cluster.backward_flops
    launches = cluster.forward_launch, cluster.backward_launch
    ends = cluster.forward_ends, cluster.backward_ends
    return tuple(
        ring_pass(layer, work, cluster.fabric(layer.ranks, speed)).times(layer.passes).ended(end).started_by(launch)
        + exchange(layer, cluster)
        for work, speed, launch, end in zip(layer.works(), flops, launches, ends, strict=True)
    )


def ring_pass(layer: Layer, work: Work, fabric: Fabric) -> Cost:
    """A pass of the layer's schedule; of the faster one for "auto"."""
    names = ("kv", "state") if layer.schedule == "auto" else (layer.schedule,)
    exact = layer.ring <= EXACT_RANKS and layer.seq_len * layer.ring <= EXACT_ROWS
    steps = planned if exact else closed_form
    return min((steps(layer, name, work, fabric) for name in names), key=lambda cost: cost.seconds)


def planned(layer: Layer, name: str, work: Work, fabric: Fabric) -> Cost:
    """The schedule that would run, step by step."""
    mask = Mask(layer.mask == "causal", layer.window)
    own = plan(mask, Layout(layer.layout, layer.seq_len, layer.ring), 0, torch.device("cpu"))
    hops = own.costs(name, work, fabric)
    traveller, result = getattr(work.row_bytes, name)
    sent = own.schedule(name, result > 0, fabric.all_pairs).bytes_sent(traveller, result)
    return Cost(sum(hop.compute for hop in hops), sum(hop.seconds for hop in hops), layer.batch * max(sent), len(hops))


def closed_form(layer: Layer, name: str, work: Work, fabric: Fabric) -> Cost:
    """What any rank needs of a block travels as far as any is needed; the busiest rank has the same work at every step."""
    rows, hops = layer.seq_len / layer.ring, layer.ring - 1
    moving = rows
    pairs = layer.pairs(layer.seq_len) / layer.ring
    if layer.layout == "contiguous":  # the last rank sees most, and a window only the shards next to it
        pairs = max(pairs, layer.pairs(layer.seq_len) - layer.pairs(layer.seq_len - round(rows)))
        if layer.window and layer.mask == "causal":
            hops = min(hops, -(-(layer.window - 1) // max(1, round(rows))))
            moving = min(rows, layer.window - 1)
    sizes = getattr(work.row_bytes, name)
    sent = layer.batch * moving * sum(sizes)
    communication = sent / fabric.bytes_per_second + sum(size > 0 for size in sizes) * fabric.latency
    visiting = FLOPS_A_BYTE * work.query_bytes * (rows + hops * moving) if name == "state" else 0
    compute = layer.batch * (pairs * work.pair_flops + visiting) / fabric.flops / (hops + 1)
    return Cost((hops + 1) * compute, hops * max(compute, communication) + compute, hops * sent, hops + 1)


def exchange(layer: Layer, cluster: Cluster) -> Cost:
    """Both exchanges of heads of one direction: q, k and v, then the output; or their gradients."""
    if layer.ulysses == 1:
        return Cost(0.0, 0.0, 0)
    key_heads = layer.kv_heads * key_copies(layer.heads, layer.kv_heads, layer.ulysses)
    rows = layer.batch * layer.seq_len / layer.ranks
    to_each = rows * (2 * layer.heads + 2 * key_heads) * layer.dim * SIZE / layer.ulysses
    inside = min(layer.ulysses, cluster.node) - 1
    outside = layer.ulysses - 1 - inside
    near, far = (peers * to_each / speed for peers, speed in ((inside, cluster.nvlink), (outside, cluster.network)))
    latency = cluster.network_latency if outside else cluster.nvlink_latency
    return Cost(0.0, max(near, far) + 2 * latency, (inside + outside) * to_each)


def choose_ulysses(text: str, ranks: int, heads: int, kv_heads: int, dim: int) -> int:
    """U of a number, or of "auto": the one that moves fewest bytes.

    Raises:
        ValueError: a number that does not divide the ranks and the heads.
    """
    if text == "auto":
        return fewest_bytes(ranks, heads, kv_heads, dim, size=SIZE)
    ulysses = int(text)
    if ulysses < 1 or ranks % ulysses or heads % ulysses:
        raise ValueError(f"--ulysses {ulysses} must divide the {ranks} ranks and the {heads} heads: choose another, or 'auto'")
    return ulysses


HEADER = (
    "| ranks | Ulysses x ring | rows a rank | forward, ms | forward + backward, ms | sent a rank, MiB | exposed, ms "
    "| of the time | TFLOP/s a rank |\n|---|---|---|---|---|---|---|---|---|"
)


def table_row(layer: Layer, forward: Cost, both: Cost) -> str:
    """One line of the table."""
    flops = (
        sum(work.pair_flops for work in layer.works()) * layer.passes * layer.ulysses * layer.batch * layer.pairs(layer.seq_len)
    )
    cells = (
        f"{layer.ranks:,}",
        f"{layer.ulysses} x {layer.ring:,}",
        f"{layer.seq_len / layer.ranks:,.0f}",
        f"{1e3 * forward.seconds:,.3g}",
        f"{1e3 * both.seconds:,.3g}",
        f"{both.bytes / 2**20:,.1f}",
        f"{1e3 * both.exposed:,.3g}",
        f"{both.exposed / both.seconds:.0%}",
        f"{flops / layer.ranks / both.seconds / 1e12:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def print_plan(layers: list[Layer], cluster: Cluster) -> list[tuple[Layer, Cost]]:
    """The table; and what it says."""
    rows = []
    print(HEADER)
    for layer in layers:
        forward, backward = predict(layer, cluster)
        print(table_row(layer, forward, forward + backward))
        rows.append((layer, forward + backward))
    return rows


def print_measured(rows: list[tuple[Layer, dict]], cluster: Cluster) -> None:
    """Measured beside predicted times, and measured over predicted."""
    print("| ranks | length | heads | forward, ms | predicted | ratio | forward + backward, ms | predicted | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layer, row in rows:
        forward, backward = predict(layer, cluster)
        cells = [f"{layer.ranks}", f"{layer.seq_len:,}", f"{layer.heads} / {layer.kv_heads} x {layer.dim}"]
        for name, cost in (("forward_ms", forward), ("forward_backward_ms", forward + backward)):
            milliseconds = 1e3 * cost.seconds
            cells += [f"{row[name]:,.3g}", f"{milliseconds:,.3g}", f"{row[name] / milliseconds:.2f}"]
        print(f"| {' | '.join(cells)} |")


def plot(rows: list[tuple[Layer, Cost]], path: Path) -> None:
    """Time and its exposed part over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    ranks = [layer.ranks for layer, _ in rows]
    axes.loglog(ranks, [1e3 * cost.seconds for _, cost in rows], marker="o", label="forward + backward")
    axes.loglog(ranks, [1e3 * cost.compute for _, cost in rows], linestyle="--", label="computation alone")
    axes.set(xlabel="ranks", ylabel="milliseconds a layer", title=f"{rows[0][0].seq_len:,} tokens, predicted")
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Cluster()
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2**i for i in range(1, 13)], help="default: 2, 4, ... 4096")
    add("--length", type=int, default=1048576, help="tokens of the sequence (default: 1048576)")
    add("--heads", type=int, default=32, help="query heads (default: 32)")
    add("--kv-heads", type=int, default=8, help="default: 8")
    add("--dim", type=int, default=128, help="of a head (default: 128)")
    add("--batch", type=int, default=1, help="sequences (default: 1)")
    add("--mask", choices=MASKS, default="causal", help="default: causal")
    add("--window", type=int, help="keys that a query may see; default: all that the mask lets it")
    add("--layout", choices=KINDS, default="zigzag", help="default: zigzag")
    add("--schedule", choices=SCHEDULES, default="auto", help="default: auto, the faster in each direction")
    add("--ulysses", default="1", help="ranks that exchange heads, or 'auto' for what moves fewest bytes (default: 1)")
    add("--forward-tflops", type=float, default=default.forward_flops / 1e12, help="of a GPU (default: %(default)g)")
    add("--backward-tflops", type=float, default=default.backward_flops / 1e12, help="of a GPU (default: %(default)g)")
    add("--nvlink-gbs", type=float, default=default.nvlink / 1e9, help="GB/s a GPU sends (default: %(default)g)")
    add("--nvlink-us", type=float, default=default.nvlink_latency * 1e6, help="of a message (default: %(default)g)")
    add("--node", type=int, default=default.node, help="GPUs of a node (default: %(default)s)")
    add("--network-gbs", type=float, default=default.network / 1e9, help="GB/s a GPU sends (default: %(default)g)")
    add("--network-us", type=float, default=default.network_latency * 1e6, help="of a message (default: %(default)g)")
    add("--forward-launch-us", type=float, default=default.forward_launch * 1e6, help="of a step (default: %(default)g)")
    add("--backward-launch-us", type=float, default=default.backward_launch * 1e6, help="of a step (default: %(default)g)")
    add("--forward-ends-us", type=float, default=default.forward_ends * 1e6, help="of a step (default: %(default)g)")
    add("--backward-ends-us", type=float, default=default.backward_ends * 1e6, help="of a step (default: %(default)g)")
    add("--plot", type=Path, help="a picture of the table to write")
    add("--measured", type=Path, help="JSON rows to compare with, in place of the table")
    parsed = parser.parse_args(arguments)
    if parsed.plot and parsed.measured:
        parser.error("--plot draws the table, which --measured leaves out: give one of them")
    return parsed


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    cluster = Cluster(
        given.forward_tflops * 1e12,
        given.backward_tflops * 1e12,
        given.nvlink_gbs * 1e9,
        given.nvlink_us / 1e6,
        given.node,
        given.network_gbs * 1e9,
        given.network_us / 1e6,
        given.forward_launch_us / 1e6,
        given.backward_launch_us / 1e6,
        given.forward_ends_us / 1e6,
        given.backward_ends_us / 1e6,
    )
    how = dict(batch=given.batch, mask=given.mask, window=given.window, layout=given.layout, schedule=given.schedule)

    def layer(ranks: int, seq_len: int, *heads: int) -> Layer:
        return Layer(seq_len, *heads, ranks, choose_ulysses(given.ulysses, ranks, *heads), **how)

    if given.measured:
        names = "ranks", "seq_len", "heads", "kv_heads", "dim"
        measured = json.loads(given.measured.read_text())
        print_measured([(layer(*(row[name] for name in names)), row) for row in measured], cluster)
        return
    shape = given.length, given.heads, given.kv_heads, given.dim
    rows = print_plan([layer(ranks, *shape) for ranks in given.ranks], cluster)
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
