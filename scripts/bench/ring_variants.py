"""Define the problems and the timed calls of `scripts.bench.ring`.

- Variants such as `nvlink-auto` and `p2p-kv` call `ring_attention` with the named transport and schedule.
- Variants such as `ulysses-4` call `ulysses_attention`. `ulysses-4` has groups of 4 ranks, and a ring across the groups.
- The variants `local` and `ulysses-4-local` run the kernels of a ring and of `ulysses-4` without communication.
- The variant `context_parallel` is PyTorch's context_parallel with cuDNN.
- Variants such as `local-graph` are replayed from a CUDA graph.
"""

import contextlib
from collections.abc import Callable, Generator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import Layout, ring_attention, ulysses_attention
from ringattn.comm.connect import connect
from ringattn.comm.nvlink import Slots
from ringattn.comm.transport import MessageTransport, RingPass, Templates, Tensors, Transport
from ringattn.load_balance import balanced_layout
from ringattn.planning.rank_plan import get_plan
from ringattn.planning.schedule import Message, Schedule
from ringattn.planning.ulysses_degree import head_chunks_for_overlap
from ringattn.ring import Ring
from ringattn.spec import AttentionSpec
from scripts.accuracy import output_of
from scripts.bench.cases import Case, random_inputs
from scripts.gpus import world_group

HEAD_DIM = 128
Call = Callable[[], object]


def _case(kind: str, length: int, heads: int = 16, key_heads: int = 16) -> Case:
    return Case(kind, length, heads, HEAD_DIM, key_heads=key_heads)


CASES = {
    "causal-8k": _case("causal", 2**13),
    "causal-16k": _case("causal", 2**14),
    "causal-32k": _case("causal", 2**15),
    "causal-64k": _case("causal", 2**16),
    "causal-128k": _case("causal", 2**17),
    "causal-256k": _case("causal", 2**18),
    "causal-512k": _case("causal", 2**19),
    "grouped-16k": _case("causal", 2**14, 32, 8),
    "grouped-64k": _case("causal", 2**16, 32, 8),
    "grouped-256k": _case("causal", 2**18, 32, 8),
    "documents-64k": _case("documents", 2**16),
    "window-256k": _case("window", 2**18),
    "causal-1m": _case("causal", 2**20),
}
VARIANTS = (
    "local",
    "local-graph",
    "nvlink-auto",
    "nvlink-auto-graph",
    "nvlink-kv",
    "nvlink-state",
    "p2p-auto",
    "p2p-auto-graph",
    "p2p-kv",
    "p2p-state",
    "ulysses-2",
    *(f"ulysses-{degree}{suffix}" for degree in (4, 8) for suffix in ("-local", "-local-graph", "", "-graph")),
    "context_parallel",
)


class Calls(NamedTuple):
    """The timed calls of a variant. The calls run inside the context manager `context()`."""

    forward: Call
    both: Call  # runs a forward and a backward pass, and returns out, dq, dk and dv
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def is_ring(variant: str) -> bool:
    return variant.split("-")[0] in ("nvlink", "p2p")


def transport_of(variant: str) -> str:
    return variant.split("-")[0]


def communicates(variant: str) -> bool:
    return "local" not in variant and variant != "context_parallel"


def ulysses_degree(variant: str) -> int:
    return int(variant.split("-")[1]) if variant.startswith("ulysses-") else 1


def choose_variants(wanted: list[str] | None, ranks: int) -> list[str]:
    """Return the requested variants. By default, return all variants whose Ulysses degree divides the number of ranks.

    Raises:
        SystemExit: the degree of a requested variant does not divide the number of ranks.
    """
    if wrong := [variant for variant in wanted or () if ranks % ulysses_degree(variant)]:
        raise SystemExit(f"error: --variants {' '.join(wrong)}: the Ulysses degree must divide the {ranks} ranks")
    return wanted or [variant for variant in VARIANTS if ranks % ulysses_degree(variant) == 0]


def ring_layout(case: Case, ranks: int, ulysses: int = 1) -> Layout:
    if case.kind == "documents":
        layout = balanced_layout(case.mask, case.length, ranks // ulysses)
    else:
        layout = Layout.zigzag(case.length, ranks // ulysses)
    return layout.split(ulysses) if ulysses > 1 else layout


def random_shard(case: Case, ulysses: int = 1, seed: int = 0) -> list[Tensor]:
    """Return this rank's shards of random q, k, v and dout. All tensors except dout require gradients."""
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())
    return random_inputs(case, ring_layout(case, dist.get_world_size(), ulysses).rows(dist.get_rank()), generator)


def make_calls(case: Case, variant: str, shard: list[Tensor]) -> Calls | None:
    if variant.endswith("-graph"):
        calls = make_calls(case, variant.removesuffix("-graph"), shard)
        assert calls is not None
        return Calls(capture(calls.forward), capture(calls.both))
    if variant == "context_parallel":
        return context_parallel_calls(case, shard) if case.kind == "causal" and case.heads == case.num_key_heads else None
    if variant == "local":
        return local_calls(case, shard)
    if variant.endswith("-local"):
        return local_ulysses_calls(case, ulysses_degree(variant))
    if variant.startswith("ulysses"):
        return ulysses_calls(case, ulysses_degree(variant), shard)
    return ring_calls(case, variant, shard)


def _calls_with_autograd(
    attend: Callable[[], Tensor], shard: list[Tensor], context: Callable[..., Any] = contextlib.nullcontext
) -> Calls:
    *inputs, dout = shard

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def both() -> tuple[Tensor, ...]:
        # A backward pass in autograd's own thread would make a call about 50% slower.
        with torch.autograd.set_multithreading_enabled(False):
            out = attend()
            return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Calls(forward, both, context)


def ring_calls(case: Case, variant: str, shard: list[Tensor]) -> Calls:
    q, k, v, _ = shard
    layout, group = ring_layout(case, dist.get_world_size()), world_group()
    transport, schedule = transport_of(variant), variant.split("-")[1]

    def attend() -> Tensor:
        options = {"transport": transport, "schedule": schedule}
        return output_of(ring_attention(q, k, v, layout=layout, mask=case.mask, group=group, **options))

    return _calls_with_autograd(attend, shard)


@cache
def _mesh(ulysses: int) -> DeviceMesh:
    shape = dist.get_world_size() // ulysses, ulysses
    return init_device_mesh("cuda", shape, mesh_dim_names=("ring", "ulysses"))


def ulysses_calls(case: Case, ulysses: int, shard: list[Tensor]) -> Calls:
    layout, mesh = ring_layout(case, dist.get_world_size(), ulysses), _mesh(ulysses)
    groups = {"ulysses_group": mesh["ulysses"].get_group(), "ring_group": mesh["ring"].get_group()}
    q, k, v, _ = shard
    return _calls_with_autograd(lambda: output_of(ulysses_attention(q, k, v, layout=layout, mask=case.mask, **groups)), shard)


class LocalTransport(MessageTransport):
    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self.interconnect = transport.rank, transport.size, transport.interconnect
        self._tensors: dict[tuple[Any, ...], Tensor] = {}
        self._keeps_results: dict[Schedule, bool] = {}

    def begin(self, schedule: Schedule, templates: Templates) -> RingPass:
        steps = schedule.by_rank[self.rank]

        def received(t: int) -> list[Tensors]:
            messages = steps[t].incoming
            return [tuple(self._replacement(x, i, m) for i, x in enumerate(templates[m.kind])) for m in messages]

        if schedule not in self._keeps_results:
            self._keeps_results[schedule] = Slots(schedule, templates).keeps_results

        def exchange(t: int, _: list[Tensors]) -> Callable[[], list[Tensors]]:
            return partial(received, t)

        return SimpleNamespace(exchange=exchange, end=lambda: None, keeps_results=self._keeps_results[schedule])

    def release(self, events: tuple[Any, ...], meet: Callable[[], None]) -> None:
        """"""

    def _replacement(self, x: Tensor, i: int, message: Message) -> Tensor:
        kind, rows = message.kind, len(message.rows)
        if kind == "block" and rows <= x.shape[1]:
            return x[:, :rows]
        key = (message.src if kind == "result" else None), i, rows, x.shape, x.dtype
        if key not in self._tensors:
            shape = x.shape[0], rows, *x.shape[2:]
            create = torch.zeros if kind == "result" else torch.randn
            self._tensors[key] = create(shape, dtype=x.dtype, device=x.device)
        return self._tensors[key]


def local_calls(case: Case, shard: list[Tensor]) -> Calls:
    layout, (q, k, v, dout) = ring_layout(case, dist.get_world_size()), [x.detach() for x in shard]
    transport = LocalTransport(connect(world_group().group_name, q.device))
    ring = Ring(
        get_plan(case.mask, layout, transport.rank, q.device),
        transport,
        AttentionSpec.create(case.mask, layout, scale=HEAD_DIM**-0.5),
    )

    def both() -> tuple[Tensor, ...]:
        out, lse = ring.forward(q, k, v)
        return out, *ring.backward(q, k, v, out, lse, dout)

    return Calls(lambda: ring.forward(q, k, v), both)


def local_ulysses_calls(case: Case, ulysses: int) -> Calls:
    ring_group = _mesh(ulysses)["ring"].get_group()
    device = torch.device("cuda", torch.cuda.current_device())
    layout = ring_layout(case, dist.get_world_size(), ulysses).whole
    transport = LocalTransport(connect(ring_group.group_name, device))
    rows, heads = layout.rows(transport.rank), (case.heads // ulysses, case.num_key_heads // ulysses)
    chunks = head_chunks_for_overlap(rows, *heads)
    shapes = [(1, rows, n // chunks, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    ring = Ring(
        get_plan(case.mask, layout, transport.rank, device),
        transport,
        AttentionSpec.create(case.mask, layout, scale=HEAD_DIM**-0.5),
    )

    def forward() -> list[tuple[Tensor, ...]]:
        return [ring.forward(q, k, v) for _ in range(chunks)]

    def both() -> list[tuple[Tensor, ...]]:
        return [ring.backward(q, k, v, out, lse, dout) for out, lse in forward()]

    return Calls(forward, both)


def context_parallel_calls(case: Case, shard: list[Tensor]) -> Calls:
    from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method

    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    q, k, v, dout = (x.detach().transpose(1, 2) for x in shard)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    @contextlib.contextmanager
    def context() -> Generator[None]:
        buffer = torch.zeros(case.length, device="cuda")
        ring = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), ring:
            yield

    def attend() -> Tensor:
        # context_parallel replaces the function in the module, so the function must be looked up at every call.
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _calls_with_autograd(attend, [q, k, v, dout], context)


def capture(call: Call) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    # `_call` keeps the input tensors of the graph alive.
    def replay(_call: Call = call) -> object:
        graph.replay()
        return results

    return replay
