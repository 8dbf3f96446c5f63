r"""Predict the time, bytes and exposed communication of one attention layer, forward and backward, on 2 to 4,096 GPUs.

    python -m scripts.tools.plan_ring --length 1048576 --heads 32 --kv-heads 8
    python -m scripts.tools.plan_ring --length 262144 --ranks 8 16 32 --ulysses auto --network-gbs 50 --plot plan.png
    python -m scripts.tools.plan_ring --measured rows.json

The model: a ring pass is a list of steps. In each the busiest rank computes while the busiest link carries the next blocks, and
the longer of the two counts; what communication takes longer is exposed. A step costs a GPU some time besides its FLOPs, for
rounds of tiles that do not fill it and for adding up what arrives. Hosts start steps ahead of the GPUs, but no pass is shorter
than its hosts take to start all of it (a CUDA graph takes next to nothing). Steps, bytes and pairs come from the schedules
that `ringattn` would run, where planning them takes seconds, and from closed forms beyond. Heads are exchanged (Ulysses) in
parts: the first one's arrival and the last one's return are exposed, the others only where they take longer than attention. A
ring that leaves the node goes at the network's speed, as every hop waits for its slowest link.

--measured compares with a JSON list of objects that have ranks, seq_len, heads, kv_heads, dim, forward_ms and
forward_backward_ms, and ulysses where it is not 1: mask, layout, schedule and cluster are those of the other arguments.
"""

import argparse
import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from ringattn import Layout, Mask
from ringattn.layout import KINDS
from ringattn.planning.cost_model import FLOPS_PER_HBM_BYTE, MERGE_FLOPS_PER_BYTE, STEP_OVERHEAD, Interconnect
from ringattn.planning.rank_plan import SCHEDULES, get_plan
from ringattn.planning.ulysses_degree import (
    all_to_all_seconds,
    best_ulysses_degree,
    exposed_seconds,
    head_chunks_for_overlap,
    key_copies,
)
from ringattn.planning.workload import Work, backward_work, forward_work, head_chunk, head_chunks_for_memory

SHAPE = "seq_len", "heads", "kv_heads", "dim", "ranks"
TIMES = "forward_ms", "forward_backward_ms"
SIZE = 2  # bytes of a bf16 number
EXACT_RANKS, EXACT_ROWS = 16, 2**23  # ranks, and positions x ranks, up to which the schedules themselves are planned
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes, each with its own way to the network. Seconds, bytes and FLOPs a second.

    The FLOPs are those of an H200 on a long sequence without a ring; launches were fitted to rings of four.
    """

    forward_flops: float = 650e12
    backward_flops: float = 588e12
    forward_sums: float = 650e12 / MERGE_FLOPS_PER_BYTE["forward"]  # bytes of partial results that a GPU adds up
    backward_sums: float = 588e12 / MERGE_FLOPS_PER_BYTE["backward"]
    nvlink: float = 330e9
    nvlink_latency: float = 12e-6
    node: int = 8  # GPUs of a node
    network: float = 40e9  # of one GPU
    network_latency: float = 60e-6
    forward_launch: float = 250e-6  # of a host, to start a step
    backward_launch: float = 460e-6
    forward_ends: float = STEP_OVERHEAD["forward"]  # of a GPU, for the beginning and the end of a step
    backward_ends: float = STEP_OVERHEAD["backward"]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name.endswith(("latency", "launch", "ends"))
            if not (value > 0 or may_be_zero and value == 0):
                raise ValueError(f"{name} = {value:g}: must be {'at least 0' if may_be_zero else 'above 0'}")

    def interconnect(self, span: int, flops: float) -> Interconnect:
        """What joins a ring over `span` neighbouring GPUs."""
        near, far = self.fabrics(flops)
        return near if span <= self.node else far

    def fabrics(self, flops: float) -> tuple[Interconnect, Interconnect]:
        """What joins the GPUs of a node, and those of several."""
        near = Interconnect("nvlink", True, self.nvlink, self.nvlink_latency, flops)
        return near, Interconnect("network", False, self.network, self.network_latency, flops)


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

    def __post_init__(self) -> None:
        for name in ("seq_len", "heads", "kv_heads", "dim", "ranks", "ulysses", "batch", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key heads must divide the {self.heads} query heads: choose another number")
        if self.seq_len < self.ranks:
            raise ValueError(f"{self.seq_len} tokens are too few for {self.ranks} ranks: give --ranks of at most as many")
        if self.ranks % self.ulysses or self.heads % self.ulysses:
            raise ValueError(
                f"--ulysses {self.ulysses} must divide the {self.ranks} ranks and the {self.heads} heads: choose another, "
                "or 'auto'"
            )

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

    @property
    def sent_heads(self) -> tuple[int, int]:
        """Of queries and of keys, which are copied where several ranks of an exchange need them."""
        return self.heads, self.kv_heads * key_copies(self.heads, self.kv_heads, self.ulysses)

    @property
    def parts(self) -> int:
        """In how many parts a rank's heads are exchanged and attended with."""
        if self.ulysses == 1:
            return 1
        return head_chunks_for_overlap(self.batch * (self.seq_len // self.ring), *(heads // self.ulysses for heads in self.sent_heads))

    def _shapes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k with the heads of a part that a rank of the ring has."""
        rows, shares = self.seq_len // self.ring, self.ulysses * self.parts
        return tuple(meta(self.batch, rows, heads // shares, self.dim) for heads in self.sent_heads)

    @property
    def num_head_chunks(self) -> int:
        """Of a part."""
        q, k = self._shapes()
        return head_chunks_for_memory(q, k, k, self.pairs(self.seq_len) / self.ring)

    def works(self) -> tuple[Work, Work]:
        """Of a pass of the forward and of one of the backward."""
        count = self.passes
        q, k = (head_chunk(x, count) for x in self._shapes())
        return forward_work(q, k, k), backward_work(q, k, k)


def meta(*shape: int) -> torch.Tensor:
    """Of bf16 numbers and no memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@dataclass(frozen=True)
class Cost:
    """One direction, on the busiest rank."""

    compute: float  # seconds
    seconds: float
    bytes: float  # sent
    steps: int = 0
    summed: float = 0.0  # bytes of partial results, whose adding up is not in the seconds yet

    @property
    def exposed(self) -> float:
        """Seconds in which no computation hides that a message, or the host, is late."""
        return self.seconds - self.compute

    def started_by(self, launch: float) -> "Cost":
        """With a host that takes `launch` seconds for a step."""
        return replace(self, seconds=max(self.seconds, self.steps * launch))

    def ended(self, ends: float, sums: float) -> "Cost":
        """With a GPU that takes `ends` seconds for a step besides its work, and adds up `sums` bytes a second."""
        more = self.steps * ends + self.summed / sums
        return replace(self, compute=self.compute + more, seconds=self.seconds + more, summed=0.0)

    def times(self, count: int) -> "Cost":
        """That of as many passes, one after the other."""
        return Cost(*(count * x for x in astuple(self)))

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(x + y for x, y in zip(astuple(self), astuple(other), strict=True)))


def predict(layer: Layer, cluster: Cluster) -> tuple[Cost, Cost]:
    """The forward and the backward of a layer."""
    flops = cluster.forward_flops, cluster.backward_flops
    launches = cluster.forward_launch, cluster.backward_launch
    ends = cluster.forward_ends, cluster.backward_ends
    sums = cluster.forward_sums, cluster.backward_sums
    directions = []
    for work, speed, launch, end, sum_speed in zip(layer.works(), flops, launches, ends, sums, strict=True):
        part = ring_pass(layer, work, cluster.interconnect(layer.ranks, speed)).times(layer.passes)
        part = part.ended(end, sum_speed).started_by(launch)
        directions.append(part.times(layer.parts) + exchange(layer, cluster, part.seconds))
    return tuple(directions)


def ring_pass(layer: Layer, work: Work, interconnect: Interconnect) -> Cost:
    """A pass of the layer's schedule; of the faster one for "auto"."""
    names = ("kv", "state") if layer.schedule == "auto" else (layer.schedule,)
    exact = layer.ring <= EXACT_RANKS and layer.seq_len * layer.ring <= EXACT_ROWS
    steps = planned if exact else closed_form
    return min((steps(layer, name, work, interconnect) for name in names), key=lambda cost: cost.seconds)


def planned(layer: Layer, name: str, work: Work, interconnect: Interconnect) -> Cost:
    """The schedule that would run, step by step."""
    mask = Mask(layer.mask == "causal", layer.window)
    own = get_plan(mask, Layout(layer.layout, layer.seq_len, layer.ring), 0, torch.device("cpu"))
    hops = own.costs(name, work, interconnect)
    traveller, result = getattr(work.row_bytes, name)
    sent = own.schedule(name, result > 0, interconnect.all_pairs).bytes_sent(traveller, result)
    seconds = (sum(getattr(hop, name) for hop in hops) for name in ("compute", "seconds"))
    return Cost(*seconds, layer.batch * max(sent), len(hops), own.merge_bytes(work))


def closed_form(layer: Layer, name: str, work: Work, interconnect: Interconnect) -> Cost:
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
    communication = sent / interconnect.bytes_per_second + sum(size > 0 for size in sizes) * interconnect.latency
    visiting = FLOPS_PER_HBM_BYTE * work.query_bytes * (rows + hops * moving) if name == "state" else 0
    compute = layer.batch * (pairs * work.pair_flops + visiting) / interconnect.flops / (hops + 1)
    summed = layer.batch * hops * moving * (work.row_bytes.state[1] + work.row_bytes.kv[1])
    return Cost((hops + 1) * compute, hops * max(compute, communication) + compute, hops * sent, hops + 1, summed)


def exchange(layer: Layer, cluster: Cluster, attention: float) -> Cost:
    """What all exchanges of heads of one direction, q, k, v and the output or their gradients, take besides attention.

    Args:
        attention: seconds of a part.
    """
    rows = layer.batch * layer.seq_len / layer.ranks
    to_each = rows * 2 * sum(layer.sent_heads) * layer.dim * SIZE / layer.ulysses
    host = min(layer.ranks, cluster.node)
    seconds = all_to_all_seconds(to_each / layer.parts, layer.ulysses, host, *cluster.fabrics(cluster.forward_flops))
    return Cost(0.0, exposed_seconds(layer.parts, attention, seconds), (layer.ulysses - 1) * to_each)


def with_ulysses(layer: Layer, text: str, cluster: Cluster) -> Layer:
    """The layer with U of a number, or of "auto": `best_ulysses_degree`.

    Raises:
        ValueError: no number, or one that does not divide the ranks and the heads.
    """
    if text == "auto":
        q, k = (meta(layer.batch, layer.seq_len, heads, layer.dim) for heads in (layer.heads, layer.kv_heads))
        flops = 3.5 / (1 / cluster.forward_flops + 2.5 / cluster.backward_flops)  # of two products, then five
        mask, (near, far) = Mask(layer.mask == "causal", layer.window), cluster.fabrics(flops)
        joined = dict(ranks=layer.ranks, host=cluster.node, near=near, far=far)
        best = best_ulysses_degree(q, k, k, mask=mask, layout=layer.layout, schedule=layer.schedule, **joined)
        return replace(layer, ulysses=best)
    if not text.isdecimal():
        raise ValueError(f"--ulysses {text}: give a number of ranks, or 'auto'")
    return replace(layer, ulysses=int(text))


HEADER = (
    "| ranks | Ulysses x ring | rows a rank | forward, ms | forward + backward, ms | sent a rank, MiB | exposed, ms "
    "| of the time | TFLOP/s a rank |\n|---|---|---|---|---|---|---|---|---|"
)


def table_row(layer: Layer, forward: Cost, both: Cost) -> str:
    """One line of the table."""
    flops = sum(work.pair_flops for work in layer.works()) * layer.passes * layer.parts * layer.ulysses
    flops *= layer.batch * layer.pairs(layer.seq_len)
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


def read_measured(path: Path) -> list[dict]:
    """The rows of a file.

    Raises:
        OSError: none that can be read.
        ValueError: one without SHAPE or TIMES.
    """
    try:
        rows = json.loads(path.read_text())
        if all(isinstance(row[name], int | float) for row in rows for name in (*SHAPE, *TIMES)):
            return rows
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"{path} is no JSON list of objects with the numbers {', '.join((*SHAPE, *TIMES))}: write one")


def print_measured(rows: list[tuple[Layer, dict]], cluster: Cluster) -> None:
    """Measured beside predicted times, and measured over predicted."""
    print("| Ulysses x ring | length | heads | forward, ms | predicted | ratio | forward + backward, ms | predicted | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layer, row in rows:
        forward, backward = predict(layer, cluster)
        cells = [f"{layer.ulysses} x {layer.ring}", f"{layer.seq_len:,}", f"{layer.heads} / {layer.kv_heads} x {layer.dim}"]
        for name, cost in zip(TIMES, (forward, forward + backward), strict=True):
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


UNITS = (  # option, field of `Cluster`, unit of the option, meaning
    ("--forward-tflops", "forward_flops", 1e12, "of a GPU"),
    ("--backward-tflops", "backward_flops", 1e12, "of a GPU"),
    ("--forward-sums-gbs", "forward_sums", 1e9, "GB/s of partial results that a GPU adds up"),
    ("--backward-sums-gbs", "backward_sums", 1e9, "GB/s of partial results that a GPU adds up"),
    ("--nvlink-gbs", "nvlink", 1e9, "GB/s a GPU sends"),
    ("--nvlink-us", "nvlink_latency", 1e-6, "of a message"),
    ("--network-gbs", "network", 1e9, "GB/s a GPU sends"),
    ("--network-us", "network_latency", 1e-6, "of a message"),
    ("--forward-launch-us", "forward_launch", 1e-6, "of a step"),
    ("--backward-launch-us", "backward_launch", 1e-6, "of a step"),
    ("--forward-ends-us", "forward_ends", 1e-6, "of a step"),
    ("--backward-ends-us", "backward_ends", 1e-6, "of a step"),
)


def command_line() -> argparse.ArgumentParser:
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
    add("--ulysses", default="1", help="ranks that exchange heads, or 'auto' for what takes least time (default: 1)")
    add("--node", type=int, default=default.node, help="GPUs of a node (default: %(default)s)")
    for option, name, unit, meaning in UNITS:
        add(option, dest=name, type=float, default=getattr(default, name) / unit, help=f"{meaning} (default: %(default)g)")
    add("--plot", type=Path, help="a picture of the table to write")
    add("--measured", type=Path, help="JSON rows to compare with, in place of the table")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = command_line()
    try:
        run(parser.parse_args(arguments))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run(given: argparse.Namespace) -> None:
    """Print what is asked for.

    Raises:
        OSError: a file that cannot be read or written.
        ValueError: arguments or rows that describe nothing that could run.
    """
    if given.plot and given.measured:
        raise ValueError("--plot draws the table, which --measured leaves out: give one of them")
    cluster = Cluster(node=given.node, **{name: getattr(given, name) * unit for _, name, unit, _ in UNITS})
    how = dict(batch=given.batch, mask=given.mask, window=given.window, layout=given.layout, schedule=given.schedule)

    if given.measured:
        measured = read_measured(given.measured)
        layers = [Layer(*(row[name] for name in SHAPE), **how) for row in measured]
        layers = [with_ulysses(x, str(row.get("ulysses", 1)), cluster) for x, row in zip(layers, measured, strict=True)]
        print_measured(list(zip(layers, measured, strict=True)), cluster)
        return
    layers = [Layer(given.length, given.heads, given.kv_heads, given.dim, ranks, **how) for ranks in given.ranks]
    rows = print_plan([with_ulysses(layer, given.ulysses, cluster) for layer in layers], cluster)
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
