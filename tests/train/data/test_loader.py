"""Tests of the loader: which sequences a step reads, and that plans computed ahead equal plans computed on demand."""

import itertools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.planning.cost_model import interconnect
from ringattn.planning.rank_plan import Plan, Requests
from ringattn.planning.workload import backward_work, forward_work
from ringattn.train.data import loader
from ringattn.train.data.batch import Batch
from ringattn.train.data.loader import AheadLoader, Loader, LoaderError, Preparation
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import Config, DataConfig, ParallelConfig, with_settings
from scripts.command import child_environment
from tests.ringattn.test_runs import random_layout, random_mask
from tests.train.launch import wait_for_end

CPU = torch.device("cpu")


class Numbers:
    """A source of sequences that consist of the number of the sequence, with random documents."""

    def __init__(self, seq_len: int, failing: int | None = None) -> None:
        self.seq_len, self.failing = seq_len, failing

    def batch(self, indices: range) -> Batch:
        """See `PackedDataset.batch`."""
        if self.failing in indices:
            raise OSError(f"sequence {self.failing} cannot be read")
        cuts = [sorted(random.Random(i).sample(range(1, self.seq_len), 5)) for i in indices]
        tokens = torch.tensor(indices)[:, None].expand(-1, self.seq_len).contiguous()
        return Batch(tokens, tokens + 1, tuple(tuple(np.diff([0, *x, self.seq_len]).tolist()) for x in cuts))


def preparation(seq_len: int, failing: int | None = None, dp: tuple[int, int] = (0, 1)) -> Preparation:
    """Two micro-steps of two sequences each, for rank 1 of a ring of 2 x 2 ranks."""
    config = Config(data=DataConfig(seq_len=seq_len), parallel=ParallelConfig(layout="auto"))
    config = with_settings(config, {"trainer.batch_size": 2, "trainer.accumulate": 2})
    return Preparation(config, Numbers(seq_len, failing), MeshShape(dp[1], 2, 2), dp[0], ring=1)


def use(plan: Plan, batch: int) -> None:
    """Request from a plan what the kernels of a GPU request in the forward pass and in the backward pass of a call."""
    q = torch.empty(batch, plan.layout.rows(plan.rank), 4, 64, dtype=torch.bfloat16, device="meta")
    for work, results in ((forward_work(q, q, q), False), (backward_work(q, q, q), True)):
        name = plan.choose_schedule("auto", work, interconnect("nvlink"))
        for pair in plan.block_pairs(name, plan.schedule(name, results or name == "state", all_pairs=True)).values():
            if work.direction == "forward":
                pair.intervals.work_tiles(128, 64, batch, 4, 1, 8)
            else:
                pair.intervals.transposed.work_tiles(128, 64, batch, 4, 1, 8, True, 1)
                pair.intervals.transposed.ordered_work_tiles(128, 64, batch, 4, 1, 8, 1)


def contents(plan: Plan) -> Counter[str]:
    """Return everything that a plan contains, as texts. A plan that was computed ahead may contain unused schedules as well."""
    found = [plan.mask, plan.layout, plan.rank, plan.pairs, plan._choices]
    for (name, *options), schedule in plan._schedules.items():
        found += [name, options, schedule.ranks, schedule.steps]
        for local_step, pair in plan._block_pairs.get((name, schedule), {}).items():
            found += [local_step, pair.sides, pair.layout]
            for side in (pair.intervals, pair.intervals.transposed):
                found += [side.num_keys, side.of_keys, *(x.tolist() for x in (side.lo, side.hi, *side.host))]
                found += [(key, table.dtype, table.tolist()) for key, table in side._tables.items()]
    return Counter(map(str, found))


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 8))
@settings(max_examples=25)
def test_a_plan_that_is_sent_equals_the_plan(seed: int, seq_len: int, ranks: int) -> None:
    """For masks and layouts of all kinds. The first plan says what is requested, and the second plan is computed ahead."""
    generator = random.Random(seed)
    layout = random_layout(generator, seq_len, ranks)
    rank = generator.randrange(layout.ranks)
    used = Plan(random_mask(generator, seq_len), layout, rank, CPU)
    use(used, 3)
    mask = random_mask(generator, seq_len)
    ahead, on_demand = (Plan(mask, layout, rank, CPU) for _ in range(2))
    ahead.prepare(used.requests())
    received = loader._decode(bytearray(loader._encode(ahead))).to(CPU)
    # Everything else is computed on demand.
    use(received, 3)
    use(on_demand, 3)
    assert contents(on_demand) <= contents(received)


def test_a_copy_of_a_plan_is_aligned() -> None:
    """All tensors share one allocation, and start at multiples of 256 bytes, which kernels are compiled for."""
    plan = Plan(Mask.causal(documents=[100, 33, 68]), Layout.contiguous(201, 3), 2, CPU)
    use(plan, 1)
    (pairs, *_) = plan.to(CPU)._block_pairs.values()
    tensors = [x for pair in pairs.values() for x in (pair.intervals.lo, pair.intervals.hi, *pair.intervals._tables.values())]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1
    assert len(tensors) > 4
    assert all(x.is_contiguous() and 4 * x.storage_offset() % 256 == 0 for x in tensors)


@pytest.fixture(scope="module")
def ahead() -> Iterator[AheadLoader]:
    """A process that imports its modules once for two tests. The second test kills the process."""
    loader = AheadLoader()
    yield loader
    loader.close()


def test_a_process_prepares_the_same_steps(ahead: AheadLoader) -> None:
    """Steps 0 to 5, then two non-consecutive steps. From the fifth step on, attention is planned ahead, also for layers with
    another mask.
    """
    inline, config = Loader(), preparation(seq_len=5000)
    layers = {"model.layer_types": ["sliding", "full"], "model.window": 700}
    config = replace(config, config=with_settings(config.config, layers))
    for each in (inline, ahead):
        each.begin(config)
    planned = []
    for consumed in (0, 4, 8, 12, 16, 20, 100, 104):
        expected, found = inline.get(consumed), ahead.get(consumed)
        assert len(found) == 2
        for a, b in zip(expected, found, strict=True):
            assert b.batch.tokens.numpy().flags.aligned
            assert torch.equal(a.batch.tokens, b.batch.tokens)
            assert torch.equal(a.batch.labels, b.batch.labels)
            assert (a.batch.documents, a.masks, a.layout) == (b.batch.documents, b.masks, b.layout)
            on_demand = [Plan(mask, a.layout.whole, 1, CPU) for mask in a.masks.values()]
            for plan, other in itertools.zip_longest(on_demand, b.plans):
                use(plan, 2)
                assert other is None or contents(plan) <= contents(other)
        planned.append(len(found[0].plans))
        ahead.learn([plan.requests() for plan in on_demand])
    assert planned == [0] * 4 + [2] * 4


def test_another_preparation_replaces_everything_of_the_earlier_one(ahead: AheadLoader) -> None:
    """Otherwise, steps that were requested ahead would have the sequences of the earlier data, and the plans of its masks. The
    earlier data cannot be read from sequence 10 on.
    """
    earlier = preparation(seq_len=300, failing=10)
    layers = {"model.layer_types": ["sliding", "full"], "model.window": 100}
    ahead.begin(replace(earlier, config=with_settings(earlier.config, layers)))
    (first, _) = ahead.get(0)
    ahead.learn([Requests((), ()) for _ in first.masks])
    ahead.begin(replace(ahead.preparation, data=Numbers(300)))
    assert [len(each.plans) for each in ahead.get(4)] == [2, 2]  # the same masks
    ahead.begin(preparation(seq_len=200))
    for step in ahead.get(8):
        assert step.batch.tokens.shape == (2, 200)
        assert len(step.plans) == 0


def test_a_step_that_failed_fails_again() -> None:
    """Otherwise, the answer to the next request would be taken for the failed step."""
    ahead = AheadLoader()
    ahead.begin(preparation(seq_len=64, failing=2))
    for _ in range(2):
        with pytest.raises(LoaderError, match="sequence 2 cannot be read"):
            ahead.get(0)
    ahead._process.kill()
    for _ in range(2):
        with pytest.raises(LoaderError, match="the loader process ended"):
            for consumed in range(4, 100, 4):
                ahead.get(consumed)
    ahead.close()


@pytest.mark.parametrize("mask_documents", [False, True])
def test_only_masks_with_documents_are_planned_ahead(mask_documents: bool) -> None:
    """A mask without documents is the same in all steps, so its plan is already known."""
    prepared = preparation(seq_len=100)
    prepared = replace(prepared, config=with_settings(prepared.config, {"data.mask_documents": mask_documents}))
    assert all(len(step.plans) == mask_documents for step in prepared.prepare(0, [Requests((), ())]))


@pytest.mark.slow
def test_the_error_of_a_process_reaches_the_trainer() -> None:
    """Before, the trainer sends a preparation that is larger than the buffer of a pipe, without waiting for the process."""
    ahead, prepared = AheadLoader(), preparation(seq_len=64, failing=6)
    prepared.data.text = bytes(2**22)
    ahead._process.send_signal(signal.SIGSTOP)
    ahead.begin(prepared)
    ahead._process.send_signal(signal.SIGCONT)
    ahead.get(0)
    with pytest.raises(LoaderError, match=r"^the loader process failed: OSError: sequence 6 cannot be read$"):
        ahead.get(4)
    ahead.close()
    assert ahead._process.poll() is not None


def test_an_unreadable_message_ends_the_wait_of_the_trainer() -> None:
    """The message's size is replaced by text, such as that of a library which prints at import."""
    ours, theirs = socket.socketpair()
    received = queue.SimpleQueue()
    thread = threading.Thread(target=loader._receive_all, args=(ours, received), daemon=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda error: None)  # the thread ends with a MemoryError
        thread.start()
        with theirs:
            theirs.sendall(b"Using cache dir /x\n")
            assert received.get(timeout=30) is None
        thread.join()


@pytest.mark.slow
def test_the_process_knows_the_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the loader processes of all ranks would show the warnings of rank 0."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(loader.subprocess, "Popen", popen := Mock())
    AheadLoader().close()
    assert popen.call_args.kwargs["env"]["RANK"] == "3"


def test_a_signal_to_the_process_group_of_the_trainer_misses_the_process(ahead: AheadLoader) -> None:
    """torchrun signals process groups. The process ignores stop signals, but not while it starts."""
    assert os.getpgid(ahead._process.pid) != os.getpgrp()


def test_the_end_of_a_process_reaches_the_trainer(ahead: AheadLoader) -> None:
    ahead.learn([Requests((), ())])
    ahead.begin(preparation(seq_len=64))
    ahead.get(0)
    ahead._process.kill()
    ahead._process.wait()
    with pytest.raises(LoaderError, match="the loader process ended with exit status -9"):
        for consumed in range(4, 100, 4):
            ahead.get(consumed)


TRAINER = """
import os, sys, time, torch
from ringattn.train.data.loader import AheadLoader
ahead = AheadLoader()
if "inherit" in sys.argv and os.fork() == 0:  # this child inherits the input of the loader process
    time.sleep(300)
print(ahead._process.pid, flush=True)
if "end" in sys.argv:
    os._exit(0)
time.sleep(300)
"""


@pytest.mark.parametrize("action", ["inherit", pytest.param("end", marks=pytest.mark.slow)])
def test_the_process_ends_with_the_trainer(action: str) -> None:
    """The training process is killed, or exits without any cleanup."""
    command = [sys.executable, "-c", TRAINER, action]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), start_new_session=True) as trainer:
        pid = int(trainer.stdout.readline())
        # Before it imports torch, the loader process asks the kernel to be killed.
        while action == "inherit" and "libtorch" not in Path(f"/proc/{pid}/maps").read_text():
            time.sleep(0.02)
        trainer.kill()
        trainer.wait()
        try:
            wait_for_end([pid])
        finally:
            os.killpg(trainer.pid, signal.SIGKILL) if action == "inherit" else None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process together with its parent")
def test_the_process_ends_if_the_trainer_died_before_it_started() -> None:
    """The parent is then not the trainer, and another process may keep the input open."""
    with subprocess.Popen([sys.executable, "-c", loader.START, "1"], stdin=subprocess.PIPE) as process:
        assert process.wait(100) == 1


def test_sequences_of_a_step_are_assigned_to_ranks_without_gaps() -> None:
    """Two micro-steps of two data-parallel ranks with two sequences each read eight consecutive sequences."""
    numbers = {
        rank: [batch.tokens[:, 0].tolist() for batch in preparation(seq_len=64, dp=(rank, 2)).batches(consumed=24)]
        for rank in range(2)
    }
    assert numbers == {0: [[24, 25], [28, 29]], 1: [[26, 27], [30, 31]]}
