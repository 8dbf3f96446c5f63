"""Blocks whose activations are in host memory have the same gradients, bit for bit, as blocks that are recomputed."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import Mask, flash_attention
from ringattn.kernels import dispatch
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import shard
from ringattn.train.parallel.memory.activations import HostActivations
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.shard import checkpoint_activations
from ringattn.train.settings.config import ModelConfig

LAYERS, TOKENS = 4, 24
SMALL = dict(layers=LAYERS, dim=16, heads=4, kv_heads=2, window=10)
MODELS = {
    "dense": {},
    "experts and sinks": dict(experts=3, experts_per_token=2, ffn_dim=16, expert_bias=True, sinks=True),
    "mixed": dict(layer_types=["sliding", "full-nope"] * (LAYERS // 2)),
}


class LateStreams(TorchDispatchMode):
    """Streams that run a copy only when the compute stream waits for it. Copying freed memory raises an error.

    An object of this class replaces the result of `torch.get_device_module`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_copying = self.has_waited = False
        self.copies, self.done = [], 0

    def current_stream(self):
        return "compute"

    def Stream(self):
        return self

    def Event(self):
        return LateEvent(self)

    def wait_stream(self, stream: str) -> None:
        self.has_waited = stream == "compute"

    @contextmanager
    def stream(self, stream):
        assert self.has_waited, "the copies would start before the compute stream has written their tensors"
        self.is_copying = True
        yield
        self.is_copying = self.has_waited = False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if self.is_copying and function is torch.ops.aten.copy_.default:
            self.copies.append([(StorageWeakRef(x.untyped_storage()), x.storage_offset(), len(x)) for x in arguments[:2]])
            return arguments[0]
        return function(*arguments, **(options or {}))

    def run_until(self, count: int) -> None:
        for copy in self.copies[self.done : count]:
            target, source = (self.memory(*place) for place in copy)
            target.copy_(source)
        self.done = max(self.done, count)

    @staticmethod
    def memory(storage: StorageWeakRef, start: int, length: int) -> Tensor:
        assert not storage.expired(), "memory was freed before its copy ended"
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_with_weak_ptr(storage.cdata), start, (length,))


class LateEvent:
    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams

    def record(self) -> None:
        self.count = len(self.streams.copies)

    def wait(self) -> None:
        self.streams.run_until(self.count)


@pytest.fixture
def late_streams(monkeypatch):
    streams = LateStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    with streams:
        yield streams


def test_copies_that_run_late_return_the_stored_tensors(late_streams):
    """Tensors span several buffers. Two micro-steps have different lengths, and use the same host memory."""
    host = HostActivations(torch.device("cpu"), buffer_bytes=64)
    for step, length in enumerate([50, 41]):
        expected = []
        for block in range(3):
            tensors = [torch.full((1, length), 10.0 * step + block), torch.arange(7 * block).to(torch.bfloat16)]
            expected.append([x.clone() for x in tensors])
            host.store(block, tensors)
            del tensors
        host.finish_storing()
        for block in reversed(range(3)):
            host.prefetch(block - 1)
            torch.testing.assert_close(host.fetch(block), expected[block], rtol=0, atol=0)
    assert len(host._buffers) == -(-(3 * 200 + 2 * (7 + 14)) // 64)
    assert late_streams.done == len(late_streams.copies)


def test_tensors_are_freed_one_block_later(late_streams):
    """The GPU holds the tensors of at most one stored block. Small tensors stay on a GPU."""
    host = HostActivations(torch.device("cpu"))
    places = []
    for block in range(3):
        x = torch.zeros(8)
        places.append(StorageWeakRef(x.untyped_storage()))
        host.store(block, [x])
        del x
        assert [place.expired() for place in places] == [True] * block + [False]
    host.finish_storing()
    assert places[2].expired()
    host._is_cuda = True
    x = torch.zeros(8)
    host.store(0, [x])
    (fetched,) = host.fetch(0)
    assert fetched.data_ptr() == x.data_ptr()


def loss_and_gradients(options: dict, offloaded: int | None, micro_steps: int = 2, attention_blocks: int = 0) -> list[Tensor]:
    """Return the loss, and the gradients of all parameters after some micro-steps.

    `offloaded` blocks keep their activations in host memory, and all blocks are recomputed. With None, no block is recomputed.
    The first `attention_blocks` blocks also recompute attention.
    """
    config, device = ModelConfig(**SMALL | options), torch.device("cpu")
    model = GPT(config, 64)
    for module in (model, *model.blocks):
        module.init_weights(torch.Generator().manual_seed(0))
    host = HostActivations(device, buffer_bytes=1024)
    if offloaded is not None:
        plan = MemoryPlan(recomputed_blocks=LAYERS, attention_blocks=attention_blocks, offloaded_blocks=offloaded)
        with patch.object(shard, "HostActivations", lambda _: host):
            checkpoint_activations(model, plan, device, 0)
    attends = [partial(flash_attention, mask=Mask.causal(window)) for window in config.windows]
    generator = torch.Generator().manual_seed(1)
    for _ in range(micro_steps):
        tokens = torch.randint(64, (2, TOKENS), generator=generator)
        balance = None if config.experts is None else lambda routing: routing.square().sum()
        loss = model(tokens, torch.arange(TOKENS), attends, lambda hidden, head: (hidden @ head.T).square().mean(), balance)
        loss.backward()
    assert not host._stored
    assert not host._arriving
    return [loss.detach(), *(x.grad for x in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_recomputation(name):
    expected = loss_and_gradients(MODELS[name], None)
    for offloaded in (0, 1, LAYERS - 1):
        for result, wanted in zip(loss_and_gradients(MODELS[name], offloaded), expected, strict=True):
            assert wanted.abs().max() > 0
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offloaded", [0, 2])
def test_attention_may_run_again(name, offloaded, monkeypatch):
    """Three blocks, some of which are offloaded, run attention once in the forward and once in the backward pass."""
    expected, calls = loss_and_gradients(MODELS[name], None), []
    forward = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    results = loss_and_gradients(MODELS[name], offloaded, attention_blocks=3)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert len(calls) == 2 * (LAYERS + 3)


def test_tensors_of_the_next_block_arrive_during_a_backward_pass(monkeypatch):
    """A block's tensors are requested one block early, and not earlier."""
    arriving, fetch = [], HostActivations.fetch

    def record(host, block):
        arriving.append(set(host._arriving))
        return fetch(host, block)

    monkeypatch.setattr(HostActivations, "fetch", record)
    loss_and_gradients({}, LAYERS - 1, micro_steps=1)
    assert arriving == [{2, 1}, {1, 0}, {0}]


@pytest.mark.gpu
def test_copies_of_a_gpu_wait_for_kernels_and_never_stop_the_host():
    """Every kernel is late, and freed memory is overwritten at once, so a missing wait would change values."""
    device = torch.device("cuda")
    host, results = HostActivations(device), []
    host.reserve(6 * 2**27)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            for block in range(6):
                x = torch.empty(2**25, device=device)
                torch.cuda._sleep(10_000_000)
                host.store(block, [x.fill_(10 * step + block), torch.full((3,), block, device=device)])
                del x
                torch.full((2**25,), -1.0, device=device)
            host.finish_storing()
            for block in reversed(range(6)):
                host.prefetch(block - 1)
                x, small = host.fetch(block)
                torch.cuda._sleep(10_000_000)
                results += [x.eq(10 * step + block).all(), small.eq(block).all()]
                del x
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(results).all()
    # The GPU holds the tensors of two blocks and the tensor that overwrites memory.
    assert torch.cuda.max_memory_allocated() < before + 4 * 2**27
