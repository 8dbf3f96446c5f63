"""Tests of the comparison of calls: ranks that make different calls end with a message that names the difference."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringattn import KVCache, Layout, Mask, decode_attention, ring_attention, ulysses_attention
from ringattn.comm import watchdog
from ringattn.comm.calls import WINDOW, CallLog, decode_log, describe_difference, shorten
from ringattn.spec import AttentionSpec
from tests.distributed import start_ranks

SEQ_LEN = 24


def attend(batch: int = 1, heads: int = 4, key_heads: int = 4, dims: tuple[int, int] = (8, 8), dtype=torch.float32, **options):
    """Call ring_attention, or ulysses_attention with `ulysses`, and return the sum of the output."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    operation = ulysses_attention if options.pop("ulysses", False) else ring_attention
    kind, mask = options.pop("kind", "zigzag"), options.pop("mask", Mask.causal())
    if operation is ulysses_attention:
        layout, groups = Layout.contiguous(SEQ_LEN, 1).split(ranks), {"ulysses_group": dist.group.WORLD}
    else:
        layout, groups = Layout(kind, SEQ_LEN, ranks), {"group": dist.group.WORLD}
    shapes = (heads, dims[0]), (key_heads, dims[0]), (key_heads, dims[1])
    q, k, v = (torch.ones(batch, layout.rows(rank), n, d, dtype=dtype, requires_grad=True) for n, d in shapes)
    return operation(q, k, v, layout=layout, mask=mask, **groups, **options).float().sum()


def decode(cached: int = 12, heads: int = 4, queries: int = 1, kind: str | None = None, **options) -> None:
    """Call decode_attention. With `kind`, the tokens are stored by `prefill` in a layout of this kind."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    cache = KVCache(64, rank, ranks, block=options.pop("block", 1))
    if kind is None:
        cache.append(*torch.ones(2, 1, cached, 2, 8))
    else:
        cache.prefill(*torch.ones(2, 1, cached // ranks, 2, 8), Layout(kind, cached, ranks))
    q = torch.ones(options.pop("batch", 1), queries, heads, 8, dtype=options.pop("dtype", torch.float32))
    decode_attention(q, cache, group=dist.group.WORLD, **options)


def bounds(**options) -> dict:
    """Options of a decoding call with bounds."""
    lo, hi = torch.tensor([[[0]], [[3]]], dtype=torch.int32)
    return {"bounds": (lo, hi)} | options


def attend_lse(**options) -> None:
    """Call ulysses_attention and its backward pass, with a gradient of lse."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout.contiguous(SEQ_LEN, 1).split(ranks)
    q = torch.ones(1, layout.rows(rank), 4, 8, requires_grad=True)
    groups = {"ulysses_group": dist.group.WORLD}
    out = ulysses_attention(q, q, q, layout=layout, mask=Mask.causal(), **groups, **options)
    (sum(x.sum() for x in out) if isinstance(out, tuple) else out.sum()).backward()


# For each kind of difference: the call of all ranks except the last, the call of the last rank, and a part of the message.
DIFFERENCES: dict[str, tuple[Callable, Callable, str]] = {
    "mask": (attend, lambda: attend(mask=Mask.full()), "is_causal"),
    "window": (attend, lambda: attend(mask=Mask.causal(window=5)), "window = "),
    "documents": (attend, lambda: attend(mask=Mask.causal(documents=[10, 14])), "documents"),
    "layout": (attend, lambda: attend(kind="contiguous"), "layout = zigzag"),
    "schedule": (lambda: attend(schedule="kv"), lambda: attend(schedule="state"), "schedule = kv"),
    "scale": (attend, lambda: attend(scale=0.5), "scale"),
    "dropout": (attend, lambda: attend(dropout_p=0.5), "dropout_p"),
    "seed": (lambda: attend(dropout_p=0.5, seed=1), lambda: attend(dropout_p=0.5, seed=2), "seed = 1"),
    "batch": (attend, lambda: attend(batch=2), "batch size"),
    "heads": (attend, lambda: attend(heads=8), "heads = 4"),
    "key heads": (attend, lambda: attend(key_heads=2), "key heads"),
    "head dim": (attend, lambda: attend(dims=(16, 8), scale=1.0), "head dim = 8"),
    "value dim": (attend, lambda: attend(dims=(8, 16)), "value head dim"),
    "dtype": (attend, lambda: attend(dtype=torch.float64), "dtype"),
    # In the KV ring, the first messages of both directions have the same size. Messages of different sizes could make gloo
    # abort a process before this process has published its call.
    "direction": (lambda: attend(schedule="kv"), lambda: attend(schedule="kv").backward(), "the call = "),
    "backward": (lambda: attend().backward(), lambda: attend(scale=0.5).backward(), "scale"),
    "Ulysses": (lambda: attend(ulysses=True), lambda: attend(ulysses=True, mask=Mask.full()), "is_causal"),
    "Ulysses backward": (lambda: attend(ulysses=True).backward(), lambda: attend(ulysses=True), "the call = "),
    "decoding window": (decode, lambda: decode(window=3), "window"),
    "decoding length": (decode, lambda: decode(cached=13), "tokens in the cache = 12"),
    "decoding block": (decode, lambda: decode(block=3), "block"),
    "first head": (lambda: attend(dropout_p=0.5), lambda: attend(dropout_p=0.5, first_head=4), "first_head = 0"),
    "FP8": (attend, lambda: attend(precision="fp8"), "FP8"),
    "route": (attend, lambda: attend(route="direct"), "route = auto"),
    "relay": (attend, lambda: attend(route="relay"), "first call with transport='p2p'"),
    "transport": (attend, lambda: attend(transport="p2p"), "first call with transport='p2p'"),
    "sizes": (lambda: attend(schedule="kv"), lambda: attend(schedule="kv", batch=3), "batch size = 1"),
    "many sizes": (lambda: (attend(), attend(batch=2)), lambda: (attend(batch=2), attend()), "batch size = 1"),
    "operation": (attend, lambda: attend(ulysses=True), "the call = "),
    "ring or decoding": (attend, decode, "the call = "),
    "Ulysses or decoding": (lambda: attend(ulysses=True), decode, "the call = "),
    "Ulysses lse": (attend_lse, lambda: attend_lse(return_lse=True), "return_lse = False"),
    "Ulysses recomputation": (attend_lse, lambda: attend_lse(recompute_all_to_all=True), "recompute_all_to_all = False"),
    "Ulysses key heads": (
        lambda: attend(ulysses=True, key_heads=1),
        lambda: attend(ulysses=True, key_heads=dist.get_world_size()),
        "key heads = 1",
    ),
    "Ulysses heads": (lambda: attend(ulysses=True), lambda: attend(ulysses=True, heads=8), "heads = 4"),
    "Ulysses dropout": (lambda: attend(ulysses=True), lambda: attend(ulysses=True, dropout_p=0.5), "dropout_p = 0.0"),
    "decoding queries": (decode, lambda: decode(queries=2), "queries"),
    "decoding heads": (decode, lambda: decode(heads=2), "queries"),
    "decoding scale": (decode, lambda: decode(scale=0.1), "scale"),
    "decoding sinks": (lambda: decode(window=4), lambda: decode(window=4, sinks=2), "sinks = None"),
    "decoding bounds": (decode, lambda: decode(**bounds()), "sinks = None"),
    "decoding bounds and sinks": (
        lambda: decode(**bounds()),
        lambda: decode(**bounds(sinks=torch.ones(1, dtype=torch.int32))),
        "sinks = no tensor",
    ),
    "decoding layout": (
        lambda: decode(cached=16, kind="zigzag"),
        lambda: decode(cached=16, kind="contiguous"),
        "layout of prefill = zigzag",
    ),
}


def make_different_calls(kind: str, directory: Path, interval: float) -> None:
    """Make equal calls on all ranks, and then different calls. The watchdog must end this process."""
    watchdog.HEARTBEAT_INTERVAL = interval
    rank = dist.get_rank()
    os.dup2(os.open(directory / f"stderr_of_rank_{rank}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    common, other, _ = DIFFERENCES[kind]
    common()
    dist.barrier()
    try:
        for _ in range(100):
            (other if rank == dist.get_world_size() - 1 else common)()
            time.sleep(0.01)
    except RuntimeError as error:  # a RingFault of the watchdog
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    time.sleep(1000)


def check_difference(kind: str, ranks: int, directory: Path, interval: float) -> None:
    processes = start_ranks(make_different_calls, ranks, directory, kind, directory, interval).processes
    deadline = time.monotonic() + 200  # less than the timeout of a hop
    for process in processes:
        process.join(deadline - time.monotonic())
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert all(statuses)
    texts = [(directory / f"stderr_of_rank_{rank}").read_text() for rank in range(ranks)]
    named = [text for text in texts if "the ranks make different calls: " in text]
    assert named, texts
    assert all(DIFFERENCES[kind][2] in text and f"on rank {ranks - 1}" in text for text in named), texts


# The other kinds are slow, because every test starts two processes.
QUICK_DIFFERENCES = list(DIFFERENCES)[::24]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK_DIFFERENCES else pytest.mark.slow) for kind in DIFFERENCES]
)
def test_a_second_call_that_differs_is_named(kind: str, tmp_path: Path) -> None:
    check_difference(kind, 2, tmp_path, interval=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DIFFERENCES)[::12])
def test_a_second_call_that_differs_on_one_of_four_ranks_is_named(kind: str, tmp_path: Path) -> None:
    check_difference(kind, 4, tmp_path, interval=watchdog.HEARTBEAT_INTERVAL)


def test_equal_logs_have_no_difference_and_the_first_difference_is_described() -> None:
    """The description names the call, the setting, both values and both ranks."""
    logs = CallLog(), CallLog()
    for log in logs:
        for _ in range(5):
            log.record(("a",), lambda: {"scale": 1})
        assert log.entries[-1][0] == 5
    entries = [log.entries for log in logs]
    assert describe_difference((0, 3), (entries[0], entries[1][:-1])) is None
    assert decode_log(logs[0].encode()) == entries[0]
    for log, scale in zip(logs, (1, 2), strict=True):
        log.record(("b", scale), lambda scale=scale: {"scale": scale})
        log.record(("a",), lambda: pytest.fail("the settings are described already"))
    text = describe_difference((0, 3), tuple(log.entries for log in logs))
    assert text.startswith("call 6 ")
    assert "scale = 1 on rank 0 and scale = 2 on rank 3" in text


def test_a_difference_in_the_length_of_a_cache_is_described() -> None:
    """The settings of the calls are equal, but one cache holds another number of tokens."""
    logs = CallLog(), CallLog()
    for log, cached in zip(logs, (12, 13), strict=True):
        log.record(("a",), lambda: {"scale": 1}, cached)
    text = describe_difference((0, 1), tuple(log.entries for log in logs))
    assert "tokens in the cache = 12 on rank 0 and tokens in the cache = 13 on rank 1" in text


@pytest.mark.parametrize("ahead", [0, 1000])
def test_a_difference_that_both_logs_have_forgotten_is_reported(ahead: int) -> None:
    """The fingerprints contain all calls. With `ahead`, a rank is so far ahead that the newest calls of both ranks do not
    overlap.
    """
    logs = CallLog(), CallLog()
    for log, extra in zip(logs, (0, ahead), strict=True):
        log.record(("x", 0), lambda: {"window": 5})
        for _ in range(300 + extra):
            log.record(("y",), lambda: {"window": 9})
    entries = [decode_log(log.encode()) for log in logs]
    assert describe_difference((0, 1), tuple(entries)) is None
    logs[1]._fingerprint ^= 1
    for log in logs:
        for _ in range(300 + 2 * ahead):
            log.record(("y",), lambda: {"window": 9})
    text = describe_difference((0, 1), tuple(decode_log(log.encode()) for log in logs))
    assert re.match("an earlier call differs between rank 0 and rank 1, before call \\d+ of the group", text)


def test_a_mask_that_is_created_in_every_call_is_described_once() -> None:
    """The log compares documents by their values."""
    q, descriptions = torch.ones(1, 24, 2, 4), []
    transport = SimpleNamespace(size=2, watchdog=SimpleNamespace(record_call=lambda key, describe: log.record(key, describe)))
    log, layout = CallLog(), Layout.contiguous(24, 1)
    for lengths in ([10, 14], [10, 14], [10, 14], [14, 10]):
        spec = AttentionSpec.create(Mask.causal(documents=lengths), layout, scale=1.0)
        spec.record_call(transport, "forward", q, q, q)
        descriptions.append(len(log._settings))
    assert descriptions == [1, 1, 1, 2]


def test_a_log_is_bounded() -> None:
    """Packed documents bring new settings in every step. The oldest settings are forgotten."""
    log = CallLog()
    for step in range(1000):
        log.record((step,), lambda step=step: {"documents": shorten([step] * 1000)})
    assert len(log.entries) == WINDOW + 1000 // WINDOW - 1
    assert len(log._settings) <= 64
    assert len(shorten([1] * 1000)) < 120
    assert shorten([1] * 1000) != shorten([1] * 999 + [2])
