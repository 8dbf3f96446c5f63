"""`explain` tells what the schedule does."""

import pytest
import torch
from torch import Tensor

from ringattn import Layout, Mask, explain, simulate


def shapes(rows: int, heads: int = 16, key_heads: int = 16) -> list[Tensor]:
    return [torch.empty(1, rows, h, 128, dtype=torch.bfloat16, device="meta") for h in (heads, key_heads, key_heads)]


def test_every_hop_says_what_moves_and_what_hides_it() -> None:
    """Zigzag on two ranks: rank 0 sends the first half of its keys and needs all of rank 1's."""
    text = explain(*shapes(8192), layout=Layout.zigzag(16384, 2), mask=Mask.causal())
    lines = text.splitlines()
    assert lines[:2] == [
        "2 ranks over nvlink, every pair linked: 330 GB/s and 12 us a message, 580 TFLOP/s a rank",
        "rank 0 holds 8,192 of 16,384 positions (zigzag); batch 1, 16 query and 16 key heads of 128, bfloat16",
    ]
    assert lines[3:7] == [
        "forward: kv schedule, k, v travel",
        "  less time, then fewer bytes, of the busiest rank at each hop: "
        "kv 0.948 ms with 64.0 MiB, state 1.09 ms with 97.0 MiB",
        "  hop 0: computes with rows 0:8192 of rank 0, sends k, v rows 0:4096 of rank 0 to rank 1, "
        "receives k, v rows 0:8192 of rank 1 from rank 1; 474 us of kernels beside 64.0 MiB in 215 us, hidden",
        "  hop 1: computes with rows 0:8192 of rank 1; 474 us of kernels",
    ]
    assert "backward: kv schedule, k, v travel, dk, dv come home" in text


def test_few_heads_at_a_time() -> None:
    """Of 2**18 rows a rank one head fills a GPU: 16 passes, and what is told is told of one."""
    text = explain(*shapes(2**18), layout=Layout.zigzag(2**20, 4), mask=Mask.full())
    assert "16 passes, of 1 query and 1 key heads each; this is one of them" in text
    assert "sends k, v rows 0:262144 of rank 0 to rank 1, receives k, v rows 0:262144 of rank 1 from rank 1" in text
    assert "beside 128.0 MiB" in text


def test_values_of_another_width_are_said() -> None:
    q, k, v = shapes(4)
    text = explain(q, k, v[..., :64], layout=Layout.zigzag(8, 2), mask=Mask.causal())
    assert "key heads of 128, values of 64, bfloat16" in text


def test_what_is_not_hidden_is_said() -> None:
    text = explain(*shapes(512), layout=Layout.zigzag(2048, 4), mask=Mask.causal(), transport="p2p", rank=3)
    assert "4 ranks over nccl" in text
    assert "rank 3 holds 512" in text
    assert "us of it not hidden" in text


def test_a_group_is_asked_for_its_own_ring() -> None:
    layout, mask = Layout.contiguous(12, 3), Mask.causal(window=3)
    q = torch.zeros(1, 4, 2, 8)
    texts = simulate(3, lambda rank, group: explain(q, q, q, layout=layout, mask=mask, group=group, schedule="state"))
    assert all("relayed by neighbours" in text and "asked for" in text for text in texts)
    assert "rank 2 holds 4 of 12" in texts[2]


def test_refusals() -> None:
    q, layout = shapes(4), Layout.zigzag(8, 2)
    with pytest.raises(ValueError, match="rank 2 of a ring of 2"):
        explain(*q, layout=layout, mask=Mask.causal(), rank=2)
    with pytest.raises(ValueError, match="documents sum to 5 tokens but the sequence has 8"):
        explain(*q, layout=layout, mask=Mask.causal(documents=[5]))
    with pytest.raises(ValueError, match="mask is a str: give a ringattn.Mask"):
        explain(*q, layout=layout, mask="causal")
    with pytest.raises(ValueError, match="layout is a str: give a ringattn.Layout"):
        explain(*q, layout="zigzag", mask=Mask.causal())
    with pytest.raises(ValueError, match="transport 'pigeon'"):
        explain(*q, layout=layout, mask=Mask.causal(), transport="pigeon")
    wrong = {"4 query heads .* 3 key heads": shapes(4, 4, 3), "have 3, 3, 3 dimensions": [x[0] for x in q]}
    wrong |= {"give fp16, bf16, fp32 or fp64": [x.int() for x in q], "give one dtype and device": [q[0].half(), *q[1:]]}
    for message, tensors in wrong.items():
        with pytest.raises(ValueError, match=message):
            explain(*tensors, layout=layout, mask=Mask.causal())


def test_the_times_are_those_of_the_rank_asked_for() -> None:
    text = explain(*shapes(8192), layout=Layout.contiguous(16384, 2), mask=Mask.causal(), schedule="kv", rank=0)
    idle = next(line for line in text.splitlines() if "hop 1: computes nothing" in line)
    assert "; 0 us of kernels" in idle
