"""Tests of the text in which `explain` describes the schedule of a call."""

import pytest
import torch
from torch import Tensor

from ringattn import Layout, Mask, explain, simulate


def shapes(rows: int, heads: int = 16, key_heads: int = 16) -> list[Tensor]:
    """q, k and v without memory, in bf16 with head dim 128."""
    return [torch.empty(1, rows, h, 128, dtype=torch.bfloat16, device="meta") for h in (heads, key_heads, key_heads)]


def test_the_text_describes_every_hop() -> None:
    """Zigzag on two ranks: rank 0 sends the first half of its keys and receives all keys of rank 1."""
    lines = explain(*shapes(8192), layout=Layout.zigzag(16384, 2), mask=Mask.causal(), schedule="kv").splitlines()
    assert lines[0].startswith("2 ranks over nvlink")
    assert "330 GB/s" in lines[0]
    assert "580 TFLOP/s" in lines[0]
    assert lines[1].startswith("rank 0 holds 8,192 of 16,384 positions (zigzag); batch 1, 16 query and 16 key heads")
    assert lines[3].startswith("forward: kv ring of 2 ranks over nvlink; (k, v) go directly")
    assert lines[3].endswith("state 0.966 ms and 97.0 MiB, kv 0.948 ms and 64.0 MiB")
    sends = "sends k, v rows 0:4096 of rank 0 to rank 1, receives k, v rows 0:8192 of rank 1 from rank 1"
    assert lines[4].startswith(f"  hop 0: computes with rows 0:8192 of rank 0, {sends}; 474 us of kernels")
    assert "64.0 MiB" in lines[4]
    assert "215 us" in lines[4]
    assert lines[4].endswith("hidden")
    assert lines[5] == "  hop 1: computes with rows 0:8192 of rank 1; 474 us of kernels"
    assert any(line.startswith("backward: kv ring ") and "results (dk, dv)" in line for line in lines)


def test_the_text_describes_an_fp8_forward() -> None:
    """The keys and values need 129 of 256 bytes per row and head in the forward pass, and all bytes in the backward pass."""
    options = dict(layout=Layout.zigzag(16384, 2), mask=Mask.causal(), schedule="kv")
    plain, fp8 = (explain(*shapes(8192), **options, precision=precision).splitlines() for precision in ("ieee", "fp8"))
    assert "while 64.0 MiB move" in plain[4]
    assert "while 32.2 MiB move" in fp8[4]
    backward = [next(i for i, line in enumerate(lines) if line.startswith("backward")) for lines in (plain, fp8)]
    assert plain[backward[0] :] == fp8[backward[1] :]
    with pytest.raises(ValueError, match="unknown precision 'fp4'"):
        explain(*shapes(8192), **options, precision="fp4")


def test_the_text_describes_a_relay() -> None:
    """NVLink does not relay blocks, so the text describes a ring over NCCL."""
    text = explain(*shapes(8192), layout=Layout.zigzag(16384, 2), mask=Mask.causal(), schedule="state", route="relay")
    assert text.startswith("2 ranks over nccl, neighbours relay messages")
    assert "(q) and the results (m, l, o) are relayed by neighbours; as requested" in text


def test_the_text_describes_one_of_several_head_chunks() -> None:
    """With 2**18 tokens per rank one head fills a GPU, so a call has 16 ring passes of one head."""
    text = explain(*shapes(2**18), layout=Layout.zigzag(2**20, 4), mask=Mask.full(), schedule="kv")
    assert "16 chunks of 1 query and 1 key heads" in text
    assert "sends k, v rows 0:262144 of rank 0 to rank 1, receives k, v rows 0:262144 of rank 1 from rank 1" in text
    assert "128.0 MiB" in text


def test_the_text_names_a_different_value_dim() -> None:
    """The value dim is shown only if it differs from the head dim."""
    q, k, v = shapes(4)
    options = dict(layout=Layout.zigzag(8, 2), mask=Mask.causal())
    assert "head dim 128 (values 64)" in explain(q, k, v[..., :64], **options)
    assert "values" not in explain(q, k, v, **options).splitlines()[1]


def test_the_text_names_communication_that_is_not_hidden() -> None:
    """With short shards, messages take longer than computation."""
    text = explain(*shapes(512), layout=Layout.zigzag(2048, 4), mask=Mask.causal(), transport="p2p", rank=3)
    assert "4 ranks over nccl" in text
    assert "rank 3 holds 512" in text
    assert "us of it not hidden" in text


@pytest.mark.parametrize("options", [{}, {"transport": "p2p"}, {"route": "relay"}, {"schedule": "kv"}], ids=str)
def test_tensors_on_a_cpu_use_gloo(options: dict) -> None:
    q = torch.zeros(1, 4, 2, 8)
    text = explain(q, q, q, layout=Layout.zigzag(8, 2), mask=Mask.causal(), **options)
    assert text.startswith("2 ranks over gloo")
    assert "1 GB/s" in text
    assert "nvlink" not in text.lower()
    with pytest.raises(ValueError, match="transport='nvlink' is unavailable: the tensors are on cpu"):
        explain(q, q, q, layout=Layout.zigzag(8, 2), mask=Mask.causal(), transport="nvlink")


def test_a_group_determines_rank_and_interconnect() -> None:
    """Each rank describes its own hops over the transport of the group."""
    layout, mask = Layout.contiguous(12, 3), Mask.causal(window=3)
    q = torch.zeros(1, 4, 2, 8)
    texts = simulate(3, lambda rank, group: explain(q, q, q, layout=layout, mask=mask, group=group, schedule="state"))
    assert all("neighbours relay" in text and "requested" in text for text in texts)
    assert "rank 2 holds 4 of 12" in texts[2]


def test_times_are_those_of_the_described_rank() -> None:
    """Under a causal mask and a contiguous layout, rank 0 computes nothing in the second hop."""
    text = explain(*shapes(8192), layout=Layout.contiguous(16384, 2), mask=Mask.causal(), schedule="kv", rank=0)
    idle = next(line for line in text.splitlines() if "hop 1: computes nothing" in line)
    assert "; 0 us of kernels" in idle


Q, K, V = shapes(4)
INVALID = {
    "rank-outside-the-ring": ((Q, K, V), {"rank": 2}, "rank=2: .*from 0 to 1"),
    "documents-of-another-length": ((Q, K, V), {"mask": Mask.causal(documents=[5])}, "5 .* 8"),
    "name-instead-of-mask": ((Q, K, V), {"mask": "causal"}, "mask is a str.*ringattn.Mask"),
    "name-instead-of-layout": ((Q, K, V), {"layout": "zigzag"}, "layout is a str.*ringattn.Layout"),
    "unknown-transport": ((Q, K, V), {"transport": "pigeon"}, "'pigeon'"),
    "heads-that-do-not-divide": (shapes(4, 4, 3), {}, "4 query heads .* 3 key heads"),
    "three-dimensions": ((Q[0], K[0], V[0]), {}, "3, 3, 3 dimensions"),
    "integers": ((Q.int(), K.int(), V.int()), {}, "torch.int32"),
    "two-dtypes": ((Q.half(), K, V), {}, "torch.float16"),
}


@pytest.mark.parametrize(("tensors", "changes", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(tensors: list[Tensor], changes: dict, message: str) -> None:
    """The same arguments are invalid as for `ring_attention`."""
    with pytest.raises(ValueError, match=message):
        explain(*tensors, **{"layout": Layout.zigzag(8, 2), "mask": Mask.causal()} | changes)
