"""Compare the speed of decoding with a long KV cache between ringattn, PyTorch's SDPA and other libraries.

    python -m scripts.bench.decode                       # all cases that fit into --gib of keys and values
    python -m scripts.bench.decode --only 'B1 32/8'      # only cases with a matching name
    python -m scripts.bench.decode --model 1.4b          # also generate tokens, next to Hugging Face transformers
    python -m scripts.bench.decode --model 1.4b --only - # only generate tokens

All caches are bf16. A CUDA device is required. Before an implementation is timed, its result is compared with a float64
reference.

Every case is measured in two ways. The graph time is the GPU time per call in a replayed CUDA graph of up to 32 calls, one per
layer. Every layer reads its own KV cache, so the L2 cache does not contain the keys. The eager time is the wall time of the
same calls from Python. All implementations of a case are timed in turn in several rounds. There are no pauses between calls, so
that the GPU does not cool down. The table contains medians over all rounds except the first. The rate in GB/s counts all keys
and values once. The last column divides the graph time by the kernel time. The kernel time is the time in which at least one
kernel runs.

The implementations `flash` and `cudnn` are backends of SDPA. The implementation `fa3` is flash-attn's kernel for KV caches, and
`fa4` is flash-attn-4. The implementation `flashinfer` is FlashInfer's kernel for paged caches. FlashInfer plans its work once
per case, before the measurement. FlashInfer compiles its kernels with nvcc in the first call. The table contains "-" for
libraries that are not installed.

If a case has several queries, SDPA runs without a causal mask. With --model, the script also runs `scripts.bench.generation`,
in which a model with random weights continues a text of --context tokens. The script writes rows.json and README.md to
--output.
"""

import argparse
import importlib.util
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import KVCache, Layout, decode_attention
from ringattn.kernels import reference
from scripts import command
from scripts.accuracy import output_of
from scripts.bench import generation
from scripts.bench.stock_training import load_model_config
from scripts.tables import markdown_table

MAX_LAYERS = 32
TOLERANCE = 1e-2  # the largest accepted error of a row, relative to the norm of the row
OURS = "ringattn"
NAMES = (OURS, "flash", "cudnn", "fa3", "fa4", "flashinfer")  # all implementations, in the order of the report
DEVICE = torch.device("cuda")
LENGTHS = (2048, 8192, 32768, 131072, 524288, 1048576)
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute", "flashinfer": "flashinfer"}  # the optional ones
PAGE_SIZE = 64  # tokens per page of FlashInfer's cache
FLASHINFER_WORKSPACE = 128 * 2**20  # the number of bytes that FlashInfer's documentation recommends


class Layer(NamedTuple):
    """The KV cache of one layer. SDPA reads `keys` and `values`, which are views of the cache with the shape (B, Hkv, N, D)."""

    cache: KVCache
    keys: Tensor
    values: Tensor


class Implementation(NamedTuple):
    """An implementation of decoding. Call `attend` inside `context()`."""

    attend: Callable[[Layer], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    heads_first: bool = False  # whether the output is (B, Hq, Nq, D) instead of (B, Nq, Hq, D)
    is_causal: bool = True


@dataclass(frozen=True)
class Case:
    """A decoding problem with `queries` new tokens per sequence."""

    batch: int
    keys: int
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    queries: int = 1

    @property
    def name(self) -> str:
        extra = [f"D{self.head_dim}"] * (self.head_dim != 128) + [f"Nq{self.queries}"] * (self.queries > 1)
        return " ".join([f"B{self.batch}", f"{self.heads}/{self.key_heads}", f"{self.keys // 1024}k", *extra])

    @property
    def bytes(self) -> int:
        return 4 * self.batch * self.keys * self.key_heads * self.head_dim


CASES = [Case(batch, keys, 32, key_heads) for batch in (1, 8) for key_heads in (8, 32) for keys in LENGTHS]
CASES += [Case(batch, 8192) for batch in (12, 17, 32)] + [Case(64, 4096), Case(64, 4096, head_dim=64)]
CASES += [Case(1, 32768, 8, 1), Case(1, 32768, head_dim=64), Case(1, 32768, head_dim=256)]
CASES += [Case(1, 32768, queries=queries) for queries in (4, 16)]


def make_layers(case: Case, num_layers: int, device: torch.device) -> list[Layer]:
    """Return layers whose caches contain the same random keys and values."""
    shape = case.batch, case.keys, case.key_heads, case.head_dim
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    layers = []
    for _ in range(num_layers):
        cache = KVCache(case.keys)
        cache.prefill(k, v, Layout.contiguous(case.keys, 1))
        layers.append(Layer(cache, *(x.transpose(1, 2) for x in cache.shard[:2])))
    return layers


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that should contain the module is missing
        return False


def implementations(case: Case, q: Tensor) -> dict[str, Implementation]:
    queries = q.transpose(1, 2)

    def sdpa(layer: Layer) -> Tensor:
        return F.scaled_dot_product_attention(queries, layer.keys, layer.values, enable_gqa=case.heads != case.key_heads)

    def attend(layer: Layer) -> Tensor:
        return decode_attention(q, layer.cache)

    found = {OURS: Implementation(attend)}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        found[name] = Implementation(sdpa, partial(sdpa_kernel, backend), heads_first=True, is_causal=case.queries == 1)
    if _is_installed(MODULES["fa3"]):
        from flash_attn_interface import flash_attn_with_kvcache

        lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=q.device)

        def flash_attn_3(layer: Layer) -> Tensor:
            return flash_attn_with_kvcache(q, *layer.cache.shard[:2], cache_seqlens=lengths, causal=True)

        found["fa3"] = Implementation(flash_attn_3)
    if _is_installed(MODULES["fa4"]):
        from flash_attn.cute import flash_attn_func

        # On sm_90, flash-attn-4 cannot split the keys. The value 0 lets flash-attn-4 choose the number of splits.
        num_splits = 1 if torch.cuda.get_device_capability(q.device)[0] == 9 else 0

        def flash_attn_4(layer: Layer) -> Tensor:
            result = flash_attn_func(q, *layer.cache.shard[:2], causal=True, num_splits=num_splits)
            return result[0] if isinstance(result, tuple) else result

        found["fa4"] = Implementation(flash_attn_4)
    if _is_installed(MODULES["flashinfer"]) and case.queries == 1:
        try:
            found["flashinfer"] = flashinfer(case, q)
        except Exception as error:  # the library and its compiler raise exceptions of any type
            print(f"flashinfer is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


def flashinfer(case: Case, q: Tensor) -> Implementation:
    """Return FlashInfer's kernel for paged caches and one query per sequence."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device)
    # Tensor cores make decoding faster only for several query heads per key head.
    grouped = case.heads > case.key_heads
    kernel = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped, backend="fa2")
    num_pages = case.batch * case.keys // PAGE_SIZE
    ends = torch.arange(0, num_pages + 1, case.keys // PAGE_SIZE, dtype=torch.int32)
    pages, last = torch.arange(num_pages, dtype=torch.int32), torch.full((case.batch,), PAGE_SIZE, dtype=torch.int32)
    sizes = case.heads, case.key_heads, case.head_dim, PAGE_SIZE
    kernel.plan(ends, pages.to(q.device), last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
    paged: dict[int, tuple[Tensor, ...]] = {}  # the paged cache of each layer, by the address of the layer's keys

    def attend(layer: Layer) -> Tensor:
        address = layer.keys.data_ptr()
        if address not in paged:
            shape = num_pages, PAGE_SIZE, case.key_heads, case.head_dim
            paged[address] = tuple(x.view(shape) for x in layer.cache.shard[:2])
        return kernel.run(q[:, 0], paged[address])[:, None]

    return Implementation(attend)


def with_bounds(case: Case, q: Tensor) -> Implementation:
    """Return ringattn with sequence lengths in GPU memory, as CUDA graphs require."""
    hi = torch.arange(case.keys - case.queries + 1, case.keys + 1, dtype=torch.int32, device=q.device)[None]
    bounds = torch.zeros_like(hi), hi

    def attend(layer: Layer) -> Tensor:
        return decode_attention(q, layer.cache, bounds=bounds)

    return Implementation(attend)


def exact_output(case: Case, q: Tensor, cache: KVCache, causal: bool) -> Tensor:
    """Return the float64 output (2, Nq, D) of one query head in two sequences."""
    k, v, _ = cache.shard
    ends = [case.keys - case.queries + 1 + i if causal else case.keys for i in range(case.queries)]
    hi = torch.tensor([ends], dtype=torch.int32, device=q.device)
    outputs: list[Tensor] = []
    for entry in (0, case.batch - 1):
        query, key, value = (x[entry : entry + 1, :, :1].double() for x in (q, k, v))
        out = output_of(reference.decode(query, key, value, torch.zeros_like(hi), hi, case.head_dim**-0.5, final=True))
        outputs.append(out[0, :, 0])
    return torch.stack(outputs)


def row_error(out: Tensor, exact: Tensor) -> float:
    """Return the largest relative error of any row. A NaN counts as an infinite error."""
    got = torch.stack([out[0, :, 0], out[-1, :, 0]]).double()
    return ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).nan_to_num(float("inf")).max().item()


def capture(call: Implementation, layers: list[Layer]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), call.context():
        call.attend(layers[0])
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                call.attend(layer)
    return graph


def graph_us(graph: torch.cuda.CUDAGraph, layers: int, replays: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / (replays * layers) * 1e3


def kernel_us(call: Implementation, layers: list[Layer]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler, call.context():
        for layer in layers:
            call.attend(layer)
        torch.cuda.synchronize()
    spans = [
        (x.time_range.start, x.time_range.end)
        for x in profiler.events() or []
        if x.device_type == torch.autograd.DeviceType.CUDA
    ]
    return covered(spans) / len(layers)


def covered(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def eager_us(call: Implementation, layers: list[Layer], num_calls: int) -> float:
    with call.context():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(num_calls):
            call.attend(layers[i % len(layers)])
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_calls * 1e6


def check(call: Implementation, layer: Layer, case: Case, q: Tensor) -> float:
    with call.context():
        out = call.attend(layer)
    return row_error(out.transpose(1, 2) if call.heads_first else out, exact_output(case, q, layer.cache, call.is_causal))


def measure(case: Case, max_bytes: int, rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    layers = make_layers(case, max(1, min(MAX_LAYERS, max_bytes // case.bytes - 1)), device)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, dtype=torch.bfloat16, device=device)
    calls: dict[str, Implementation] = {}
    captured: dict[str, Implementation] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, call in implementations(case, q).items():
        try:
            rows[name] = {"error": check(call, layers[0], case, q)}
            # Keep the input tensors alive for the replays of the graph.
            captured[name] = with_bounds(case, q) if name == OURS else call
            graphs[name] = capture(captured[name], layers)
            calls[name] = call
        except Exception as error:  # the kernels of other libraries raise exceptions of any type
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    # At 3 TB/s, a measurement takes about 10 ms.
    estimate = case.bytes / 3e6 + 10
    replays, eager_calls = max(2, int(1e4 / (estimate * len(layers)))), max(10, min(200, int(1e4 / max(estimate, 50))))
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for _ in range(rounds + 1):
        for name, (graph_times, eager_times) in samples.items():
            graph_times.append(graph_us(graphs[name], len(layers), replays))
            eager_times.append(eager_us(calls[name], layers, eager_calls))
    with suppress(Exception):  # the profiler may be unavailable
        rows[OURS]["kernel_us"] = kernel_us(captured[OURS], layers)
    for name, times in samples.items():
        graph_time, eager_time = (statistics.median(x[1:]) for x in times)
        rows[name] |= {"graph_us": graph_time, "eager_us": eager_time, "gb_per_s": case.bytes / graph_time * 1e-3}
    return rows


def cells(case: Case, rows: dict[str, dict[str, Any]]) -> list[str]:
    line = [case.name]
    for key, digits in (("graph_us", 1), ("gb_per_s", 0), ("eager_us", 1)):
        figures = [rows.get(name, {}).get(key) for name in NAMES]
        line.append(" / ".join("-" if x is None else f"{x:.{digits}f}" for x in figures))
    peers = [row for name, row in rows.items() if name != OURS and "graph_us" in row]
    ours = rows[OURS]
    if "graph_us" in ours and peers:
        line.append(f"{ours['gb_per_s'] / max(row['gb_per_s'] for row in peers):.2f}")
        line.append(f"{ours['eager_us'] / min(row['eager_us'] for row in peers):.2f}")
    else:
        line += ["-", "-"]
    line.append(f"{ours['graph_us'] / ours['kernel_us']:.2f}" if ours.get("kernel_us") and "graph_us" in ours else "-")
    return [*line, f"{ours['error']:.1e}" if "error" in ours else ours["failed"]]


def report(results: dict[Case, dict[str, Any]], date: str) -> str:
    columns = (
        f"case | graph, us: {' / '.join(NAMES)} | GB/s | eager, us | GB/s of ringattn / best | eager of ringattn / best | "
    )
    columns += "graph / kernels of ringattn | error | date"
    lines = [[*cells(case, rows), date] for case, rows in results.items()]
    return markdown_table(columns, lines) + "\n"


def report_generation(model: str, context: int, speeds: dict[str, generation.Speed | str], date: str) -> str:
    lines = [
        [name, speed, "-", "-", date]
        if isinstance(speed, str)
        else [name, f"{speed.tokens_per_s:.1f}", f"{speed.ms_per_token:.2f}", f"{speed.gb_per_s:.0f}", date]
        for name, speed in speeds.items()
    ]
    table = markdown_table("implementation | tokens/s | ms per token | GB/s | date", lines)
    return f"Generation with configs/model/{model}.yaml after {context:,} tokens:\n\n{table}\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--output", type=Path, default=command.RESULTS / "decode", help="default: outputs/benchmarks/decode")
    parser.add_argument("--only", metavar="REGEX", default="", help="only cases with a matching name: 'B1 32/8 2k'")
    parser.add_argument("--gib", type=command.at_least(1), default=32, help="memory for keys and values; default: 32")
    parser.add_argument("--rounds", type=command.at_least(1), default=5, help="rounds of timing; default: 5")
    parser.add_argument(
        "--model", metavar="NAME", help="also generate tokens with this model of configs/model, for example 1.4b"
    )
    parser.add_argument("--context", type=command.at_least(2), default=131072, help="tokens before generation; default: 131072")
    parser.add_argument("--tokens", type=command.at_least(1), default=64, help="generated tokens; default: 64")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    return args


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    missing = [name for name, module in MODULES.items() if not _is_installed(module)]
    print(f"not installed: {', '.join(missing) or 'none'}", flush=True)
    packages = ["flashinfer-python"] if "flashinfer" not in missing else []
    header = command.describe_run("scripts.bench.decode", argv, gpus=1, packages=packages)
    results: dict[Case, dict[str, Any]] = {}
    for case in CASES:
        if not re.search(args.only, case.name) or 2 * case.bytes > args.gib * 2**30:
            continue
        results[case] = measure(case, args.gib * 2**30, args.rounds, DEVICE)
        print(" | ".join(cells(case, results[case])), flush=True)
        rows = [asdict(case) | {"implementations": found} for case, found in results.items()]
        (args.output / "rows.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    if not results and not args.model:
        sys.exit(f"error: --only {args.only!r} matches no case that fits into {args.gib} GiB")
    sections = [f"# Decoding, {header['date']}\n\n    {header['command']}\n\n{header['machine']}\n"]
    if results:
        sections.append(report(results, header["date"]))
    failed = False
    if args.model:
        speeds = generation.measure(load_model_config(args.model), args.context, args.tokens, DEVICE)
        sections.append(report_generation(args.model, args.context, speeds, header["date"]))
        print(sections[-1], flush=True)
        failed = isinstance(speeds[OURS], str)
    (args.output / "README.md").write_text("\n".join(sections))
    return int(failed or any(not rows[OURS].get("error", 1.0) <= TOLERANCE for rows in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
