"""Time ring attention on several GPUs beside the same kernels without communication and beside PyTorch's context_parallel.

    torchrun --nproc-per-node 4 -m scripts.bench.ring
    torchrun --nproc-per-node 4 -m scripts.bench.ring --cases causal-16k causal-64k --variants nvlink-auto local --rounds 5

bf16, B = 1, zigzag; documents in the layout that balances them. Every ring is first held to float64 at a small case of the same
mask and heads, all rows, output and gradients: no speed is reported of a wrong one. Variants are timed in turn, in rounds,
because clocks drift with heat; a figure is the median over rounds of calls back to back, on the slowest rank. `local` is the
automatic schedule where every message is there already, as rows of this rank: what the ring would take if communication cost
nothing; `ulysses-4-local` is what `ulysses-4` would take, its heads exchanged among four ranks. With `-graph` calls are
replayed from a CUDA graph, so that the host's time does not count: at 4,096 rows a rank it is about as long as the GPU's.
Backwards run in the calling thread, those of context_parallel too: autograd's own, woken for every call, takes half as long
again. FLOPs count 4 H pairs D forward, of the pairs that the mask allows, and 2.5 times that backward, shared out over the
GPUs. Memory is the peak of torch's allocator over a forward and backward, with the inputs; the receive_buffer of the NVLink transport
comes on top (`receive_buffer_bytes`). Of every ring its hops, the bytes that its busiest rank sends, and the time that it takes longer
than `local` are told too. Rank 0 writes README.md, ring.json and a picture to --output, see `ring_report.py`.
"""

import argparse
import contextlib
import datetime
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import Layout, Mask, ring_attention, ulysses_attention
from ringattn.comm.connect import connect
from ringattn.comm.nvlink import Slots
from ringattn.comm.nvlink_all_to_all import receive_buffer_bytes
from ringattn.comm.transport import MessageTransport, RingPass, Templates, Tensors, Transport
from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals
from ringattn.load_balance import balanced_layout
from ringattn.planning import rank_plan as planning
from ringattn.planning import workload
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, Schedule
from ringattn.planning.ulysses_degree import head_chunks_for_overlap
from ringattn.ring import Ring
from scripts.bench import gpus, ring_report
from scripts.bench.cases import TOLERANCE, Case, largest_error

ROOT = Path(__file__).connect().parents[2]

HEAD_DIM = 128
CHECKED_LENGTH = 1536  # a rank's rows in the check
NAMES = ("out", "dq", "dk", "dv")
Step = Callable[[], object]


class Steps(NamedTuple):
    """What to time, and the context to do it in."""

    forward: Step
    both: Step  # forward and backward
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class RingCase:
    """One attention problem over all ranks."""

    kind: str  # causal | documents | window
    length: int
    heads: int = 16
    key_heads: int = 16

    @cached_property
    def mask(self) -> Mask:
        return Case(self.kind, self.length, self.heads, HEAD_DIM).mask

    def layout(self, ranks: int, ulysses: int = 1) -> Layout:
        """Zigzag; for documents what balances them, as training does with parallel.layout=auto."""
        if self.kind == "documents":
            layout = balanced_layout(self.mask, self.length, ranks // ulysses)
        else:
            layout = Layout.zigzag(self.length, ranks // ulysses)
        return layout.split(ulysses) if ulysses > 1 else layout

    def flops(self, backward: bool) -> float:
        pairs = Case(self.kind, self.length, self.heads, HEAD_DIM).pairs
        return 4.0 * self.heads * pairs * HEAD_DIM * (3.5 if backward else 1)

    def shard(self, ulysses: int = 1, seed: int = 0) -> list[Tensor]:
        """This rank's q, k, v, dout: standard normal; all but dout require gradients."""
        generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())
        rows = self.layout(dist.get_world_size(), ulysses).rows(dist.get_rank())
        heads = self.heads, self.key_heads, self.key_heads, self.heads
        shards = [torch.randn(1, rows, h, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16) for h in heads]
        return [x.requires_grad_() for x in shards[:3]] + shards[3:]


CASES = {
    "causal-8k": RingCase("causal", 2**13),
    "causal-16k": RingCase("causal", 2**14),
    "causal-64k": RingCase("causal", 2**16),
    "causal-256k": RingCase("causal", 2**18),
    "grouped-16k": RingCase("causal", 2**14, 32, 8),
    "grouped-64k": RingCase("causal", 2**16, 32, 8),
    "grouped-256k": RingCase("causal", 2**18, 32, 8),
    "documents-64k": RingCase("documents", 2**16),
    "window-256k": RingCase("window", 2**18),
    "causal-1m": RingCase("causal", 2**20),
}
VARIANTS = (
    "local",
    "local-graph",
    "nvlink-auto",
    "nvlink-auto-graph",
    "nvlink-kv",
    "nvlink-state",
    "p2p-auto",
    "p2p-kv",
    "p2p-state",
    "ulysses-2",
    "ulysses-4-local",
    "ulysses-4-local-graph",
    "ulysses-4",
    "ulysses-4-graph",
    "context_parallel",
)


def differentiated(attend: Callable[[], Tensor], shard: list[Tensor], around: Callable = contextlib.nullcontext) -> Steps:
    """Attention alone, and with its gradients by autograd: (out, dq, dk, dv)."""
    *inputs, dout = shard

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def both() -> tuple[Tensor, ...]:
        with torch.autograd.set_multithreading_enabled(False):
            out = attend()
            return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Steps(forward, both, around)


def ring_step(case: RingCase, variant: str, shard: list[Tensor]) -> Steps:
    """`ring_attention`."""
    transport, schedule = variant.split("-")
    layout, group = case.layout(dist.get_world_size()), dist.group.WORLD
    options = {"layout": layout, "mask": case.mask, "group": group, "transport": transport, "schedule": schedule}
    return differentiated(lambda: ring_attention(*shard[:3], **options), shard)


def ulysses_of(variant: str) -> int:
    """How many ranks exchange heads."""
    return int(variant.split("-")[1]) if variant.startswith("ulysses-") else 1


@cache
def _mesh(ulysses: int) -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size() // ulysses, ulysses), mesh_dim_names=("ring", "ulysses"))


def ulysses_step(case: RingCase, ulysses: int, shard: list[Tensor]) -> Steps:
    """`ulysses_attention`: heads exchanged among `ulysses` ranks, a ring over the others."""
    layout, mesh = case.layout(dist.get_world_size(), ulysses), _mesh(ulysses)
    options = {"ulysses_group": mesh["ulysses"].get_group(), "ring_group": mesh["ring"].get_group(), "mask": case.mask}
    return differentiated(lambda: ulysses_attention(*shard[:3], layout=layout, **options), shard)


def local_ulysses_step(case: RingCase, ulysses: int) -> Steps:
    """The same without communication: what a rank computes with its share of the heads, part by part."""
    ring_group = _mesh(ulysses)["ring"].get_group()
    layout, device = case.layout(dist.get_world_size(), ulysses).whole, torch.device("cuda", torch.cuda.current_device())
    line = Standstill(connect(ring_group.group_name, device))
    rows, heads = layout.rows(line.rank), (case.heads // ulysses, case.key_heads // ulysses)
    parts = head_chunks_for_overlap(rows, *heads)
    shapes = [(1, rows, n // parts, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    ring = Ring(planning.get_plan(case.mask, layout, line.rank, device), line, HEAD_DIM**-0.5)

    def both() -> list[tuple[Tensor, ...]]:
        results = [ring.forward(q, k, v) for _ in range(parts)]
        return [ring.backward(q, k, v, out, lse, dout) for out, lse in results]

    return Steps(lambda: [ring.forward(q, k, v) for _ in range(parts)], both)


class Standstill(MessageTransport):
    """A ring that moves nothing: travellers that come are rows of this rank's own, results are zeros."""

    def __init__(self, line: Transport) -> None:
        self.rank, self.size, self.interconnect = line.rank, line.size, line.interconnect
        self.rows: dict[tuple, Tensor] = {}
        self.holds: dict[Schedule, bool] = {}

    def begin(self, schedule: Schedule, like: Templates) -> RingPass:
        steps = schedule.by_rank[self.rank]

        def arrived(t: int) -> list[Tensors]:
            return [tuple(self._rows(x, i, m) for i, x in enumerate(like[m.kind])) for m in steps[t].incoming]

        if schedule not in self.holds:
            self.holds[schedule] = Slots(schedule, like).keeps_results
        return SimpleNamespace(exchange=lambda t, _: partial(arrived, t), end=lambda: None, keeps_results=self.holds[schedule])

    def _rows(self, x: Tensor, i: int, message: Message) -> Tensor:
        """What comes for tensor `i`, like x. Every result has memory of its own, as it would if it came from elsewhere."""
        kind, rows = message.kind, len(message.rows)
        if kind == "block" and rows <= x.shape[1]:
            return x[:, :rows]
        key = (message.src if kind == "result" else None), i, rows, x.shape, x.dtype
        if key not in self.rows:
            shape = x.shape[0], rows, *x.shape[2:]
            make = torch.zeros if kind == "result" else torch.randn
            self.rows[key] = make(shape, dtype=x.dtype, device=x.device)
        return self.rows[key]


def local_step(case: RingCase, shard: list[Tensor]) -> Steps:
    """The same without communication."""
    layout, (q, k, v, dout) = case.layout(dist.get_world_size()), [x.detach() for x in shard]
    line = Standstill(connect(dist.group.WORLD.group_name, q.device))
    ring = Ring(planning.get_plan(case.mask, layout, line.rank, q.device), line, HEAD_DIM**-0.5)

    def both() -> tuple[Tensor, ...]:
        out, lse = ring.forward(q, k, v)
        return out, *ring.backward(q, k, v, out, lse, dout)

    return Steps(lambda: ring.forward(q, k, v), both)


def peer_step(case: RingCase, shard: list[Tensor]) -> Steps:
    """PyTorch's context_parallel with cuDNN."""
    from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method

    set_rotate_method("allgather")
    mesh, (q, k, v, dout) = init_device_mesh("cuda", (dist.get_world_size(),)), [x.detach().transpose(1, 2) for x in shard]
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    @contextlib.contextmanager
    def spread():
        buffer = torch.zeros(case.length, device="cuda")
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
                yield

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # context_parallel replaces this attribute

    return differentiated(attend, [q, k, v, dout], spread)


def captured(step: Step) -> Step:
    """Replays of a call, which return the same tensors every time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay(step: Step = step) -> object:  # which keeps what the graph reads
        graph.replay()
        return results

    return replay


def steps_of(case: RingCase, variant: str, shard: list[Tensor]) -> Steps | None:
    """What to time; None for what a peer cannot do."""
    if variant.endswith("-graph"):
        steps = steps_of(case, variant.removesuffix("-graph"), shard)
        return Steps(captured(steps.forward), captured(steps.both))
    if variant == "local":
        return local_step(case, shard)
    if variant == "context_parallel":
        return peer_step(case, shard) if case.kind == "causal" and case.heads == case.key_heads else None
    if variant.startswith("ulysses") and variant.endswith("-local"):
        return local_ulysses_step(case, ulysses_of(variant))
    if variant.startswith("ulysses"):
        return ulysses_step(case, ulysses_of(variant), shard)
    return ring_step(case, variant, shard)


def check(case: RingCase, variant: str) -> dict[str, float]:
    """Largest error of GROUP rows of any head against float64, relative to them, by name; over all ranks."""
    ranks = dist.get_world_size()
    small = RingCase(case.kind, CHECKED_LENGTH * ranks, case.heads, case.key_heads)
    layout, shard = small.layout(ranks, ulysses_of(variant)), small.shard(ulysses_of(variant), seed=1)
    got = steps_of(small, variant, shard).both()
    whole = [layout.unshard(x.detach(), dist.group.WORLD) for x in shard]
    exact = [layout.shard(x, dist.get_rank()) for x in expected(small, *whole)]
    worst = torch.stack([largest_error(x, y) for x, y in zip(got, exact, strict=True)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(NAMES, worst.tolist(), strict=True))


def expected(case: RingCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence in float64, one key head after the other."""
    block = Intervals.of(*case.mask.intervals(case.length), case.length, q.device), HEAD_DIM**-0.5
    group, parts = case.heads // case.key_heads, []
    for head in range(case.key_heads):
        queries = slice(head * group, (head + 1) * group)
        tensors = [x.double() for x in (q[:, :, queries], k[:, :, head : head + 1], v[:, :, head : head + 1])]
        gradient = dout[:, :, queries].double()
        out, lse = reference.forward(*tensors, *block, final=True)
        delta = reference.row_delta(out, gradient)
        parts.append((out, *reference.backward(*tensors, gradient, lse, delta, *block)))
    return [torch.cat(x, 2) for x in zip(*parts, strict=True)]


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    x = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def milliseconds(step: Step, calls: int) -> float:
    """A call's mean time of `calls` back to back, on the slowest rank."""
    step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return slowest(start.elapsed_time(end) / calls)


def peak_bytes(step: Step) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(slowest(torch.cuda.max_memory_allocated()))


def is_ring(variant: str) -> bool:
    return variant.split("-")[0] in ("nvlink", "p2p")


def messages(case: RingCase, schedule: str, ranks: int, interconnect: Interconnect) -> dict[str, dict]:
    """Of the forward, and of forward and backward together: schedules, hops that have messages, bytes of the busiest rank."""
    plan = planning.get_plan(case.mask, case.layout(ranks), 0, torch.device("cpu"))
    q, k = (torch.empty(1, 1, h, HEAD_DIM, dtype=torch.bfloat16, device="meta") for h in (case.heads, case.key_heads))
    count = plan.passes(q, k, k)
    q, k = (workload.head_chunk(x, count) for x in (q, k))
    names, hops, sent, found = [], 0, [0] * ranks, {}
    for part, work in (("forward", workload.forward_work(q, k, k)), ("both", workload.backward_work(q, k, k))):
        names.append(plan.choose_schedule(schedule, work, interconnect))
        traveller, result = getattr(work.row_bytes, names[-1])
        one_pass = plan.schedule(names[-1], result > 0, interconnect.all_pairs)
        hops += count * sum(bool(step.messages) for step in one_pass.steps)
        sent = [a + count * b for a, b in zip(sent, one_pass.bytes_sent(traveller, result), strict=True)]
        found[part] = {"schedule": " / ".join(names), "hops": hops, "bytes_sent": max(sent)}
    return found


def add_communication(case: RingCase, found: dict[str, dict], ranks: int, fabrics: dict[str, Interconnect]) -> None:
    """Add to the timed rings what they send, and the microseconds that they take longer than without communication.

    Args:
        found: the rows by variant.
        fabrics: of every ring, by variant.
    """
    for variant, interconnect in fabrics.items():
        row, base = found[variant], found.get(ring_report.base_of(variant), {})
        if "both" not in row:
            continue
        for part, sent in messages(case, variant.split("-")[1], ranks, interconnect).items():
            row[part] |= sent
            if part in base:
                row[part]["exposed_us"] = 1e3 * (row[part]["ms"] - base[part]["ms"])


def measure(case: RingCase, variants: list[str], rounds: int) -> dict[str, dict]:
    """By variant: errors, milliseconds and TFLOP/s a GPU forward and in all, peak bytes, and what a ring sends."""
    found, steps = {}, {}
    for variant in variants:
        shard = case.shard(ulysses_of(variant))
        found[variant] = row = {}
        if "local" not in variant and variant != "context_parallel":
            row["errors"] = check(case, variant)
            if not max(row["errors"].values()) <= TOLERANCE:
                continue
        if timed := steps_of(case, variant, shard):
            steps[variant] = timed
            with timed.around():
                row["peak_bytes"] = peak_bytes(timed.both)
    times = {(variant, i): [] for variant in steps for i in range(2)}
    for _ in range(rounds):
        for (variant, i), samples in times.items():
            rate = 4e14 * dist.get_world_size()
            calls = max(1, min(60, round(0.2 * rate / case.flops(bool(i)))))  # some 200 ms
            with steps[variant].around():
                samples.append(milliseconds(steps[variant][i], calls))
    for (variant, i), samples in times.items():
        name, ms = ("forward", "both")[i], statistics.median(samples)
        tflops = case.flops(bool(i)) / dist.get_world_size() / ms * 1e-9
        found[variant][name] = {"ms": ms, "tflops": tflops, "samples": samples}
    group, device = dist.group.WORLD.group_name, torch.device("cuda", torch.cuda.current_device())
    fabrics = {variant: connect(group, device, variant.split("-")[0]).interconnect for variant in found if is_ring(variant)}
    add_communication(case, found, dist.get_world_size(), fabrics)
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / f"{datetime.date.today()}-ring", help="a directory"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[1:], help="default: from 16k")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all that the ranks can")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be positive")
    return arguments


def pick_variants(wanted: list[str] | None, ranks: int) -> list[str]:
    """Those wanted, or (None) all whose groups exchange heads among as many ranks as there can be."""
    if wrong := [variant for variant in wanted or () if ranks % ulysses_of(variant)]:
        raise SystemExit(f"--variants {' '.join(wrong)}: {ranks} ranks cannot be cut into groups of so many")
    return wanted or [variant for variant in VARIANTS if ranks % ulysses_of(variant) == 0]


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    device = gpus.join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    variants = pick_variants(arguments.variants, ranks)
    command = shlex.join(["torchrun", "--nproc-per-node", str(ranks), "-m", "scripts.bench.ring", *argv])
    machine = f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    head, rows = {"date": str(datetime.date.today()), "machine": machine, "command": command}, {}
    for name in arguments.cases:
        rows[name] = {"case": asdict(CASES[name]), **measure(CASES[name], variants, arguments.rounds)}
        torch.cuda.empty_cache()
        if rank == 0:
            ring_report.write(arguments.output, head, rows)
            print(ring_report.table({name: rows[name]}), flush=True)
    if any(variant.startswith("nvlink") for variant in variants):
        head["receive_buffer_bytes"] = receive_buffer_bytes(connect(dist.group.WORLD.group_name, device, "nvlink"))
    if rank == 0:
        ring_report.write(arguments.output, head, rows)
    dist.destroy_process_group()
    wrong = [row for found in rows.values() for row in found.values() if "errors" in row and "both" not in row]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
