"""Test the shapes and masks of public test suites against dense attention in float64.

The suites are those of flash-attention (hopper/test_flash_attn.py, also on a GPU in bf16), TransformerEngine
(tests/pytorch/attention/test_attention_with_cp.py) and flash-linear-attention (tests/ops/test_attn_sink.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn import (
    KVCache,
    Layout,
    Mask,
    decode_attention,
    flash_attention,
    ring_attention,
    simulate,
    ulysses_attention,
)
from tests.covering import every_pair, every_value, pairs

# (queries, keys). There are more queries than keys in some cases.
SHAPES = [
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023)),
]
HEADS = {"mha": 6, "gqa": 2, "mqa": 1}  # key heads of 6 query heads
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MASKS = ("full", "causal", "local", "causal local")

Window = tuple[int | None, int | None]  # keys to the left and to the right of the query; None: all


class Model(NamedTuple):
    """A row of TransformerEngine's table. `sinks` is "zero" for a softmax "off by one"."""

    heads: int
    key_heads: int
    dim: int
    value_dim: int
    window: Window
    sinks: str = ""


# All different rows without a bias, which ringattn does not support. A causal mask limits every window to (left, 0).
FULL, CAUSAL = (None, None), (None, 0)
MODELS = {
    "cp_1_0": Model(12, 12, 128, 128, CAUSAL),
    "cp_1_1": Model(12, 12, 128, 128, FULL),
    "cp_1_2": Model(12, 12, 128, 128, (512, 0)),
    "cp_1_3": Model(12, 12, 128, 128, (512, 512)),
    "cp_2_0": Model(32, 4, 128, 128, CAUSAL),
    "cp_2_1": Model(12, 2, 128, 128, FULL),
    "cp_2_2": Model(32, 32, 128, 128, (128, 0)),
    "cp_2_3": Model(12, 2, 128, 128, (512, 512)),
    "cp_2_6": Model(12, 2, 128, 128, (512, 0)),
    "cp_3_0": Model(128, 128, 192, 128, CAUSAL),
    "cp_3_0 fused": Model(12, 12, 128, 64, CAUSAL),
    "cp_3_1": Model(12, 12, 192, 128, FULL),
    "cp_3_2": Model(12, 12, 192, 128, (512, 0)),
    "cp_3_3": Model(12, 12, 192, 128, (512, 512)),
    "cp_4_0": Model(64, 8, 64, 64, CAUSAL),
    "cp_4_1": Model(64, 8, 64, 64, CAUSAL, "zero"),
    "cp_4_2": Model(64, 8, 64, 64, CAUSAL, "learnable"),
    "cp_4_3": Model(64, 64, 64, 64, (128, 0), "learnable"),
    "cp_d256_causal": Model(16, 16, 256, 256, CAUSAL),
    "cp_d256_causal_swa": Model(16, 16, 256, 256, (128, 0)),
}
BATCH, SEQ_LEN, SMALLER = 2, 4096, 64  # The tests divide lengths, windows and head dims by `SMALLER`.


def window_of(kind: str, num_keys: int) -> Window:
    """Return (left, right), drawn at random for local masks. None means all keys on this side."""
    left, right = torch.randint(0, num_keys, (2,), generator=torch.Generator().manual_seed(num_keys)).tolist()
    is_causal = "causal" in kind
    return (left if "local" in kind else None), (0 if is_causal else right if "local" in kind else None)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    window: Window,
    documents: Sequence[int] = (),
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of dense attention. The last query is at the position of the last key. A sink is one more column."""
    key = torch.arange(k.shape[1], device=q.device)
    query = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    left, right = window
    allowed = torch.ones_like(key - query, dtype=torch.bool)
    allowed &= True if left is None else key >= query - left
    allowed &= True if right is None else key <= query + right
    if documents:
        document = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        allowed &= document == document[:, None]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[3] ** -0.5)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0))
    return torch.einsum("bhqk,bkhd->bqhd", p[..., : k.shape[1]], v), lse[..., 0].transpose(1, 2)


def results(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, _ = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Check the errors relative to the largest element. A wrong mask would cause an error above 0.1."""
    for name, x, y in zip(("out", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=1e-3)
        assert error <= tolerance, (name, error)
    assert len(got) == len(expected)


def check(shape: tuple[int, int], kind: str, heads: str, dims: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Compare the output and all gradients of a case of flash-attention."""
    (num_queries, num_keys), (dim, value_dim) = shape, dims
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = (
        (num_queries, 6, dim),
        (num_keys, HEADS[heads], dim),
        (num_keys, HEADS[heads], value_dim),
        (num_queries, 6, value_dim),
    )
    *inputs, dout = (normal(1, *size).to(device, dtype) for size in sizes)
    window = window_of(kind, num_keys)
    got = results(partial(flash_attention, mask=Mask(window=window), return_lse=True), inputs, dout)
    expected = results(partial(reference, window=window), [x.double() for x in inputs], dout)
    assert_close(got, expected, 1e-10 if dtype == torch.float64 else 2e-2)


@every_pair(shape=[shape for shape in SHAPES if max(shape) <= 256], kind=MASKS, heads=HEADS)
def test_short_cases_of_flash_attention(shape: tuple[int, int], kind: str, heads: str) -> None:
    """Head dims are small, because masks do not depend on them."""
    check(shape, kind, heads, (8, 5), torch.float64, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kind", "heads"), pairs(shape=[shape for shape in SHAPES if max(shape) > 256], kind=MASKS, heads=HEADS)
)
def test_long_cases_of_flash_attention(shape: tuple[int, int], kind: str, heads: str) -> None:
    check(shape, kind, heads, (8, 5), torch.float64, "cpu")


@pytest.mark.gpu
@every_pair(shape=SHAPES, kind=MASKS, heads=HEADS, dims=DIMS)
def test_cases_of_flash_attention_on_a_gpu(shape: tuple[int, int], kind: str, heads: str, dims: tuple[int, int]) -> None:
    check(shape, kind, heads, dims, torch.bfloat16, "cuda")


def draw(batch: int, seq_len: int, model: Model) -> tuple[list[Tensor], Tensor]:
    """Draw q, k and v, the sinks if the model has any, and the gradient of the output."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = (model.heads, model.dim), (model.key_heads, model.dim), (model.key_heads, model.value_dim)
    inputs = [normal(batch, seq_len, *size) for size in sizes]
    if model.sinks:
        inputs.append(normal(model.heads) * (model.sinks == "learnable"))
    return inputs, normal(batch, seq_len, model.heads, model.value_dim)


def on_ring(kind: str, mask: Mask, inputs: list[Tensor], dout: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return the results of a simulated ring, or of an all-to-all. The gradient of the sinks is the sum over the ranks."""
    ranks, sinks = 4 if kind == "ring of 4" else 2, inputs[3:]
    is_ring = kind != "all-to-all"
    layout = Layout.zigzag(dout.shape[1], ranks) if is_ring else Layout.contiguous(dout.shape[1], 1).split(ranks)
    call = partial(ring_attention if is_ring else ulysses_attention, layout=layout, mask=mask, scale=scale, return_lse=True)

    def run(rank: int, group: object) -> list[Tensor]:
        attend = partial(call, **{"group" if is_ring else "ulysses_group": group})
        shards = [layout.shard(x, rank) for x in (*inputs[:3], dout)]
        return results(lambda q, k, v, sinks=None: attend(q, k, v, sink_logits=sinks), [*shards[:3], *sinks], shards[3])

    out, dq, dk, dv, *dsinks = zip(*simulate(ranks, run), strict=True)
    return [*(layout.unshard(list(x)) for x in (out, dq, dk, dv)), *(sum(x) for x in dsinks)]


def packed_lengths(seq_len: int, ranks: int) -> list[int]:
    """Draw the lengths of two padded documents of at most half of `seq_len` tokens, and of their padding."""
    lengths = torch.randint(1, seq_len // 2 + 1, (2,), generator=torch.Generator().manual_seed(ranks)).tolist()
    padding = [-length % (2 * ranks) for length in lengths]
    parts = [lengths[0], padding[0], lengths[1], padding[1], seq_len - sum(lengths) - sum(padding)]
    return [part for part in parts if part]


@every_value(name=MODELS, kind=("ring of 2", "ring of 4", "all-to-all"), packed=(False, True))
def test_models_of_transformer_engine(name: str, kind: str, packed: bool) -> None:
    """Packed sequences are one sequence with the tokens of the whole batch."""
    model, length = MODELS[name], SEQ_LEN // SMALLER
    window = tuple(side and side // SMALLER for side in model.window)
    model = model._replace(dim=model.dim // SMALLER, value_dim=model.value_dim // SMALLER, window=window)
    batch, seq_len = (1, BATCH * length) if packed else (BATCH, length)
    inputs, dout = draw(batch, seq_len, model)
    documents = packed_lengths(seq_len, 2) if packed else []
    got = on_ring(kind, Mask(window=window, documents=documents or None), inputs, dout)
    assert_close(got, results(partial(reference, window=window, documents=documents), inputs, dout), 1e-10)


@pytest.mark.parametrize("kind", ["ring of 2", "all-to-all"])
@pytest.mark.parametrize(
    ("window", "lengths"), [(CAUSAL, [192]), ((63, 0), [192]), ((63, 0), [97, 76, 127]), ((-1, 0), [96])], ids=str
)
def test_sinks_of_flash_linear_attention(window: Window, lengths: list[int], kind: str) -> None:
    """The last case has no keys at all, so that every query attends only to its sink."""
    seq_len = sum(lengths)
    inputs, dout = draw(2 if len(lengths) == 1 else 1, seq_len, Model(8, 2, 64, 64, window, "learnable"))
    mask = Mask(window=window, documents=lengths) if window[0] != -1 else Mask.from_intervals([0] * seq_len, [0] * seq_len)
    got = on_ring(kind, mask, inputs, dout, scale=0.1)
    assert_close(got, results(partial(reference, window=window, documents=lengths, scale=0.1), inputs, dout), 1e-10)


@pytest.mark.parametrize("length", [128, 73])
def test_sinks_in_decoding_of_flash_linear_attention(length: int) -> None:
    (q, k, v, sinks), _ = draw(1, length, Model(8, 2, 64, 64, CAUSAL, "learnable"))
    cache = KVCache(length)
    cache.append(k, v)
    got = decode_attention(q[:, -1:], cache, scale=0.1, sink_logits=sinks)
    torch.testing.assert_close(got, reference(q[:, -1:], k, v, sinks, window=CAUSAL, scale=0.1)[0], rtol=0, atol=1e-12)
