"""Tests of the all-to-all over NVLink, with copies, flags and streams of a fake host."""

import pytest
import torch

from ringattn import Layout, Mask, ulysses, ulysses_attention
from ringattn.comm import connect
from ringattn.comm.all_to_all import HeadSlice, TokenSlice
from ringattn.comm.nvlink_all_to_all import StridedCopy, _strided_copies
from tests.covering import every_value
from tests.ringattn.comm.fake_gpus import Capture, RunOnHost, every_message_waits_for_an_event
from tests.ringattn.rings import Case, assert_close, masks, unshard_results


@every_value(ranks=(2, 3, 4), chunks=(1, 2), saved=("saved", "recomputed"))
def test_calls_in_graphs_and_outside(
    ranks: int, chunks: int, saved: str, run_on_host: RunOnHost, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with different data, masks, lengths and batch sizes follow each other, and ring passes run between them."""
    monkeypatch.setattr(ulysses, "head_chunks_for_overlap", lambda *_: chunks)
    calls = []
    for i, (name, seq_len, in_graph) in enumerate(
        [("causal", 70, False), ("full", 33, True), ("window", 41, True), ("documents", 33, False), ("causal", 70, True)] * 2
    ):
        heads = dict(heads=4 * ranks, key_heads=2 * ranks, value_dim=5)
        case = Case.random(seq_len, (1, 2, 0)[i % 3], **heads, seed=i, dtype=torch.float32)
        calls.append((case, masks(seq_len)[name], Layout.contiguous(seq_len, 1).split(ranks), in_graph))

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for i, (case, mask, layout, capture.active) in enumerate(calls):
            q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
            if i % 3 == 0:  # k and v are slices of a wider tensor, such as the result of one matrix product
                k, v = torch.cat([k.flatten(2), v.flatten(2)], 2).split([k.shape[2:].numel(), v.shape[2:].numel()], 2)
                k, v = k.unflatten(2, (2 * ranks, -1)), v.unflatten(2, (2 * ranks, -1))
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            options = dict(layout=layout, mask=mask, ulysses_group=group, return_lse=True)
            out, lse = ulysses_attention(q, k, v, recompute_all_to_all=saved == "recomputed", **options)
            upstream = layout.shard(case.dout, rank), layout.shard(case.dlse, rank).to(lse.dtype)
            shards.append([out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), upstream)])
            if i % 4 == 1:
                capture.active = False
                Case.random(40, dtype=torch.float32).on_rank(Layout.zigzag(40, ranks), Mask.causal(), rank, group)
        return shards

    shards = run_on_host(ranks, on_rank)
    for i, (case, mask, layout, _) in enumerate(calls):
        got = unshard_results(layout, [shard[i] for shard in shards])
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


def test_a_graph_of_a_call_that_never_ran_raises_an_error(run_on_host: RunOnHost, capture: Capture) -> None:
    """The receive buffer cannot grow during a capture. The message says what to do."""

    def on_rank(rank: int, group: object) -> None:
        q = torch.zeros(1, 4, 2, 8)
        capture.active = True
        ulysses_attention(q, q, q, layout=Layout.contiguous(8, 1).split(2), mask=Mask.causal(), ulysses_group=group)

    with pytest.raises(RuntimeError, match="CUDA graph: call it once before the capture"):
        run_on_host(2, on_rank)


def test_heads_are_copied_after_they_are_computed(run_on_host: RunOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sending stream waits for the kernels before every message."""
    monkeypatch.setattr(ulysses, "head_chunks_for_overlap", lambda *_: 2)
    layout = Layout.contiguous(9, 1).split(3)
    case = Case.random(9, heads=12, key_heads=6, dtype=torch.float32)

    def on_rank(rank: int, group) -> list[str]:
        case.on_rank(layout, Mask.full(), rank, None, ulysses_attention, ulysses_group=group)
        return connect.connect(group.group_name, torch.device("cpu")).streams["block"].log

    for log in run_on_host(3, on_rank):
        assert "copy" in log
        assert every_message_waits_for_an_event(log)


def test_tokens_may_share_their_memory(run_on_host: RunOnHost) -> None:
    """All queries are the same memory, and so is their gradient, as after a mean over the tokens."""
    case, layout = Case.random(9, heads=4, key_heads=4, dtype=torch.float32), Layout.contiguous(9, 1).split(2)
    case.q, case.dout = (x[:, :1].expand_as(x) for x in (case.q, case.dout))

    def on_rank(rank: int, group: object) -> list[torch.Tensor]:
        q, dout = (x[:, : layout.rows(rank)] for x in (case.q, case.dout))
        k, v = (layout.shard(x, rank) for x in (case.k, case.v))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = ulysses_attention(q, k, v, layout=layout, mask=Mask.causal(), ulysses_group=group, return_lse=True)
        upstream = dout, layout.shard(case.dlse, rank)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), upstream)]

    got = unshard_results(layout, run_on_host(2, on_rank))
    assert_close(got, case.to(torch.float64).unsharded(Mask.causal()), 1e-5)


def test_strided_copies_by_hand() -> None:
    """Rank 1 of two holds 3 of 5 tokens, with 4 heads of 8 fp16 values, and sends two heads to each rank."""
    shape, strides = torch.Size((1, 3, 4, 8)), (96, 32, 8, 1)
    heads, tokens = HeadSlice(ranks=2, chunks=1, chunk=0), TokenSlice((2, 3))
    copies = _strided_copies(heads, tokens, shape, strides, torch.Size((2, 8)), (5, 5), 2, 1)
    # In the target, 2 tokens of rank 0 come first, and a token of two heads has 32 bytes.
    assert copies == [
        [StridedCopy(target=64, target_pitch=32, source=0, source_pitch=64, width=32, count=3)],
        [StridedCopy(target=64, target_pitch=32, source=32, source_pitch=64, width=32, count=3)],
    ]
