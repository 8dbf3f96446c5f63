"""Tests of attention on one rank without a group, compared with a dense softmax that autograd differentiates."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ringattn import BlockMask, Layout, Mask, flash, flash_attention
from ringattn.kernels import fp8, interval_mask
from ringattn.kernels.dropout import Dropout, keep_mask
from ringattn.spec import AttentionSpec
from tests.kernels.problems import spread_heads

OPERATOR = torch.ops.ringattn.flash_attention.default


def inputs(num_queries: int, num_keys: int, heads: int = 4, key_heads: int = 2, dtype=torch.float64) -> list[Tensor]:
    """q, k and v of a batch of two with gradients; head dim 8, value dim 6."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, num_queries, heads, 8), (2, num_keys, key_heads, 8), (2, num_keys, key_heads, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Compute attention with all scores in memory. `allowed` and `keep` broadcast to (B, H, Nq, Nk)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    if keep is not None:
        probabilities = probabilities * keep / (1 - p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)


def assert_equal_results(call: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Check that outputs and gradients are equal in fp64."""
    out, reference = call(*tensors), expected(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    pairs = zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(reference, tensors, dout), strict=True)
    for got, exact in [(out, reference), *pairs]:
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


def dense_mask(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    """Return which keys each query may attend to, (B, 1, Nq, Nk)."""
    return interval_mask.dense(*mask.intervals(num_keys, num_queries), num_keys)[:, None]


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("rows", [(9, 9), (3, 9), (9, 3), (1, 12)], ids=lambda n: f"{n[0]}x{n[1]}")
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.causal(window=4), Mask.full(window=3)], ids=str)
def test_masks_and_lengths(mask: Mask, rows: tuple[int, int], backend: str) -> None:
    """There may be fewer or more queries than keys."""
    allowed = dense_mask(mask, *rows)
    assert_equal_results(
        lambda *x: flash_attention(*x, mask=mask, backend=backend), lambda *x: dense_attention(*x, allowed), inputs(*rows)
    )


def test_the_last_query_has_the_position_of_the_last_key() -> None:
    """This holds whether there are more keys or more queries, and with documents."""
    assert dense_mask(Mask.causal(), 2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert dense_mask(Mask.causal(), 3, 2)[0, 0].int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert dense_mask(Mask.causal(documents=[3, 2]), 3, 5)[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_results_equal_those_of_torch() -> None:
    """The call replaces torch.nn.functional.scaled_dot_product_attention, with another order of dimensions."""
    q, k, v = inputs(11, 11, key_heads=4)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(flash_attention(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_dropout(backend: str) -> None:
    """Output and gradients equal those of a dense softmax with the same entries dropped."""
    positions = torch.arange(40, dtype=torch.int32)
    keep = keep_mask(Dropout(0.3, 5, positions, positions), 2, 4)
    allowed = dense_mask(Mask.causal(), 40, 40)
    assert_equal_results(
        lambda *x: flash_attention(*x, is_causal=True, dropout_p=0.3, seed=5, backend=backend),
        lambda *x: dense_attention(*x, allowed, keep, 0.3),
        inputs(40, 40),
    )


@settings(max_examples=10)
@given(st.integers(0, 2**16))
def test_block_masks(seed: int) -> None:
    """Random blocks under a causal mask. A query may have no block, and the sequence ends inside a block."""
    keep = torch.rand(1, 4, 2, 2, generator=torch.Generator().manual_seed(seed)) < 0.5
    blocks = BlockMask(keep, size=64)
    allowed = dense_mask(Mask.causal(), 70, 70) & blocks.dense(70, 70)
    assert_equal_results(
        lambda *x: flash_attention(*x, is_causal=True, blocks=blocks), lambda *x: dense_attention(*x, allowed), inputs(70, 70)
    )


def test_blocks_modified_before_the_backward_raise_an_error() -> None:
    """The block mask is a saved tensor of autograd."""
    q, k, v = (torch.randn(1, 128, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keep = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    out = flash_attention(q, k, v, blocks=BlockMask(keep, size=64))
    keep[..., 0, 1] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_computes_attention_on_rounded_inputs(dtype: torch.dtype) -> None:
    """Output and gradients are those of the rounded inputs. The gradients of the rotated q and k are rotated back."""
    q, k, v = inputs(200, 300, dtype=dtype)
    allowed = dense_mask(Mask.causal(window=150), 200, 300)
    out, lse = flash_attention(q, k, v, mask=Mask.causal(window=150), precision="fp8", return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    quantized = fp8.quantize(*(x.detach() for x in (q, k, v)))
    rounded = [fp8.dequantize(x, torch.float64, 300).requires_grad_() for x in quantized]
    expected = dense_attention(*rounded, allowed)
    # Another window, which drops or adds one key per query, would cause an error of about 0.02.
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}[dtype]
    assert (out - expected).abs().max() < tolerance < 0.02 < (out - dense_attention(q, k, v, allowed)).abs().max()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    dq, dk, dv = torch.autograd.grad(expected.sum(), rounded)
    for got, exact in zip(gradients, (fp8.rotate_back(dq), fp8.rotate_back(dk), dv), strict=True):
        assert got.dtype == dtype
        assert (got - exact).norm() < tolerance * exact.norm()


KEYLESS = {  # numbers of queries and keys, and options
    "causal": (40, 30, dict(is_causal=True)),
    "window": (40, 30, dict(mask=Mask.causal(window=5))),
    "full window": (40, 30, dict(mask=Mask.full(window=5))),
    "fp8": (40, 30, dict(is_causal=True, precision="fp8")),
    "dropout": (40, 30, dict(is_causal=True, dropout_p=0.5, seed=1)),
    "no keys": (7, 0, {}),
    "intervals": (40, 40, dict(mask=Mask.from_intervals([0] * 10 + [5] * 30, [0] * 10 + [20] * 20 + [40] * 10))),
    "blocks": (128, 128, dict(is_causal=True, blocks=BlockMask(torch.tensor([[[[False, True], [True, True]]]]), 64))),
    "blocks of some heads": (70, 70, dict(blocks=BlockMask((torch.arange(8) > 3).view(1, 4, 2, 1).expand(-1, -1, -1, 2), 64))),
}


@pytest.mark.parametrize("backend", ["blockwise", "reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", KEYLESS)
def test_gradients_of_queries_without_keys_have_no_effect(case: str, backend: str, device: torch.device) -> None:
    """These gradients may be NaN or infinite, because out and lse of such queries do not depend on q, k and v."""
    num_queries, num_keys, options = KEYLESS[case]
    if "blocks" in options:
        options = options | dict(blocks=BlockMask(options["blocks"].keep.to(device), 64))
    tensors = [x.detach().to(device).requires_grad_() for x in inputs(num_queries, num_keys, dtype=torch.float32)]
    out, lse = flash_attention(*tensors, **options, backend=backend, return_lse=True)
    has_no_keys = lse == float("-inf")
    assert has_no_keys.any()
    gradients = []
    for value in (0.0, float("nan"), float("inf")):
        upstream = (
            torch.ones_like(out).masked_fill(has_no_keys[..., None], value),
            torch.ones_like(lse).masked_fill(has_no_keys, value),
        )
        gradients.append(torch.autograd.grad((out, lse), tensors, upstream, retain_graph=True))
    assert all(torch.equal(x, y) for other in gradients[1:] for x, y in zip(other, gradients[0], strict=True))


def test_partial_results_merged_by_the_caller_have_finite_gradients() -> None:
    """The first queries have no key in either of the partial results, so the gradient of torch.logaddexp is NaN."""
    tensors = inputs(6, 3)
    parts = [flash_attention(*tensors, mask=Mask.causal(window=n), return_lse=True)[1] for n in (None, 2)]
    lse = torch.logaddexp(*parts)
    gradients = torch.autograd.grad(torch.where(lse.isfinite(), lse, 0.0).sum(), tensors)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(("queries", "keys", "scale"), [(3e4, 1e-5, None), (1e-5, 3e4, None), (3.0, 2e-6, 200.0)])
def test_gradients_of_fp16_inputs_with_fp8_do_not_overflow(queries: float, keys: float, scale: float | None) -> None:
    """Rotated queries and keys may be larger than the largest fp16 number, and smaller than the smallest one."""
    q, k, v = (x.detach()[..., :1] for x in inputs(100, 100, dtype=torch.float16))
    # All elements of the rotated query or key are 0, except one, which is 8 ** 0.5 times as large as the elements of the input.
    q, k = ((x.sign() * size * fp8.rotation(8, x.device)[:, 0].sign()).half() for x, size in ((q, queries), (k, keys)))
    gradients = {}
    for dtype in (torch.float16, torch.float64):
        tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = flash_attention(*tensors, is_causal=True, precision="fp8", scale=scale)
        assert out.isfinite().all()
        gradients[dtype] = torch.autograd.grad(0.25 * out.sum(), tensors)
    for got, exact in zip(*gradients.values(), strict=True):
        # Some gradients are subnormal fp16 numbers, which are multiples of 2**-24.
        assert got.dtype == torch.float16
        assert (got - exact).abs().max() < 0.01 * exact.abs().max() + 2**-24


def test_gradients_of_large_scores_with_fp8_have_the_right_size() -> None:
    """If the backward used the inputs as given, its probabilities would not sum to 1, and the gradients would be too large."""
    q, k, v = (30 * x.detach() if i < 2 else x.detach() for i, x in enumerate(inputs(100, 100, dtype=torch.float32)))
    norms = {}
    for precision in ("ieee", "fp8"):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*tensors, precision=precision)
        norms[precision] = [x.norm().item() for x in torch.autograd.grad(out.square().sum(), tensors)]
    assert all(x < 2 * y for x, y in zip(norms["fp8"], norms["ieee"], strict=True)), norms


def test_the_operator_passes_the_checks_of_torch() -> None:
    """Schema, fake tensors and autograd, as torch.library.opcheck tests them."""
    create = partial(AttentionSpec.create, Mask.causal(window=4), Layout.contiguous(9, 1), scale=0.5)
    blocks = {"keep": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": 64}
    torch.library.opcheck(OPERATOR, (*inputs(7, 9), *create(dropout_p=0.1, seed=3, backend="blockwise", **blocks)))
    torch.library.opcheck(OPERATOR, (*inputs(7, 9), *create(precision="fp8")))


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_results_are_contiguous(backend: str) -> None:
    """A compiler assumes contiguous results, even of transposed inputs such as those of `scaled_dot_product_attention`."""
    tensors = [torch.randn(2, 3, 7, 4).transpose(1, 2).requires_grad_() for _ in range(3)]
    out, lse = flash_attention(*tensors, is_causal=True, backend=backend, return_lse=True)
    spec = AttentionSpec.create(Mask.causal(), Layout.contiguous(7, 1), scale=0.5, backend=backend)
    gradients = torch.ops.ringattn.flash_attention_backward([*tensors, out, lse], out, None, *spec)
    assert all(x.is_contiguous() for x in (out, lse, *gradients))


def test_a_default_device_is_ignored() -> None:
    """Tensors that masks create on the host stay on the CPU under `with torch.device(...)`."""
    tensors = inputs(7, 9)
    mask = Mask.causal(documents=[2, 7])
    expected = flash_attention(*tensors, mask=mask)
    with torch.device("meta"):
        assert torch.equal(flash_attention(*tensors, mask=Mask.causal(documents=[2, 7])), expected)


def test_a_mask_created_in_inference_mode_works_in_training() -> None:
    """The lengths of a mask are saved for the backward, which inference tensors do not allow."""
    with torch.inference_mode():
        mask = Mask.causal(documents=[2, 7])
    tensors = inputs(9, 9)
    flash_attention(*tensors, mask=mask).sum().backward()
    assert all(x.grad is not None for x in tensors)


def test_block_lists_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with the same block mask share its lists of blocks until the mask is modified in place."""
    created = []

    class Counted(BlockMask):
        def __post_init__(self) -> None:
            created.append(self)

    monkeypatch.setattr(flash, "BlockMask", Counted)
    blocks = Counted(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    for _ in range(3):
        flash_attention(*inputs(7, 9), blocks=blocks).sum().backward()
    assert len(created) == 2  # the mask of the caller, and one for all calls
    blocks.keep[:] = False
    assert not flash_attention(*inputs(7, 9), blocks=blocks).any()
    assert len(created) == 3


def test_compiles_without_graph_break() -> None:
    """Compiled and eager calls return the same bits."""
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    tensors = inputs(7, 9)
    assert torch.equal(compiled(*tensors, is_causal=True), flash_attention(*tensors, is_causal=True))


INVALID = {
    "mask-twice": ({"mask": Mask.full(), "is_causal": True}, "both mask and is_causal"),
    "dropout-of-one": ({"dropout_p": 1.0}, "dropout_p ?= ?1.0"),
    "negative-seed": ({"seed": -1}, "seed ?= ?-1"),
    "fractional-seed": ({"seed": 1.5}, "seed ?= ?1.5"),
    "unknown-precision": ({"precision": "bf16"}, "unknown precision 'bf16'"),
    "fp8-with-dropout": ({"precision": "fp8", "dropout_p": 0.1}, "precision='fp8' with dropout"),
    "fp8-with-blocks": (
        {"precision": "fp8", "blocks": BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool))},
        "precision='fp8' with a block mask",
    ),
    "fp8-without-kernel": ({"precision": "fp8", "backend": "hopper"}, "'hopper' with precision='fp8'.*use backend='auto'"),
    "queries-before-documents": ({"mask": Mask.causal(documents=[2, 3])}, "7 queries.* 5 keys"),
    "blocks-of-another-shape": ({"blocks": BlockMask(torch.ones(1, 1, 2, 2, dtype=torch.bool))}, "block mask"),
}


@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 1, 4, 1)], ids=("0-d", "1-d", "5-d"))
def test_tensors_must_have_four_dimensions(shape: tuple[int, ...]) -> None:
    """The message names the number of dimensions."""
    with pytest.raises(ValueError, match=f"{len(shape)}, {len(shape)}, {len(shape)} dimensions"):
        flash_attention(*(torch.zeros(shape) for _ in range(3)))


@pytest.mark.parametrize(("changes", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(changes: dict, message: str) -> None:
    """The message names the value that was given."""
    with pytest.raises(ValueError, match=message):
        flash_attention(*inputs(7, 5), **changes)


def test_autocast_casts_the_inputs() -> None:
    """Casts equal those of torch's attention. fp64 stays fp64."""
    q, k, v = inputs(7, 9, dtype=torch.float32)
    expected = flash_attention(*(x.bfloat16() for x in (q, k, v)), is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        for tensors in ((q, k, v), (q, k, v.bfloat16())):
            assert torch.equal(flash_attention(*tensors, is_causal=True), expected)
        double = [x.double() for x in (q, k, v)]
        under_autocast = flash_attention(*double, is_causal=True)
    assert torch.equal(under_autocast, flash_attention(*double, is_causal=True))


def test_dropout_without_a_seed_follows_the_generator_of_torch() -> None:
    """Two calls drop different entries, and the same seed of torch gives the same entries again. Fake tensors draw no seed."""
    tensors = inputs(7, 9)

    def attend() -> torch.Tensor:
        return flash_attention(*tensors, dropout_p=0.5)

    torch.manual_seed(3)
    first, second = attend(), attend()
    torch.manual_seed(3)
    assert torch.equal(attend(), first)
    assert not torch.equal(first, second)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attend().shape == first.shape
    state = torch.get_rng_state()
    flash_attention(*tensors)
    assert torch.equal(torch.get_rng_state(), state), "a call without dropout draws nothing"


def test_a_checkpoint_recomputes_the_same_dropout() -> None:
    """The recomputation draws the same seed, because `checkpoint` restores the generator."""
    tensors = inputs(7, 9)
    torch.manual_seed(3)
    expected = torch.autograd.grad(flash_attention(*tensors, dropout_p=0.5).sum(), tensors)
    torch.manual_seed(3)
    out = checkpoint(lambda *x: flash_attention(*x, dropout_p=0.5), *tensors, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(out.sum(), tensors), expected, strict=True):
        assert torch.equal(x, y)


def test_a_compiler_requires_a_seed_for_the_dropout() -> None:
    """A compiler would make the seed a constant."""
    with pytest.raises(Exception, match="requires a seed"):
        torch.compile(lambda *x: flash_attention(*x, dropout_p=0.5), backend="eager", fullgraph=True)(*inputs(7, 9))


@pytest.mark.parametrize(("query", "key"), [((2, 4, 7, 8), (2, 4, 9, 8)), ((2, 4, 1, 8), (2, 2, 9, 8))], ids=str)
def test_tensors_with_heads_before_tokens_are_pointed_out(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Torch's own attention takes (B, H, N, D)."""
    with pytest.raises(ValueError, match=r"transpose\(1, 2\)"):
        flash_attention(torch.randn(query), torch.randn(key), torch.randn(key))


def test_dropout_of_the_last_queries() -> None:
    """The dropped entries depend on the position of a query in the whole sequence."""
    q, k, v = inputs(40, 40)
    options = dict(is_causal=True, dropout_p=0.3, seed=5)
    whole = flash_attention(q, k, v, **options)
    torch.testing.assert_close(flash_attention(q[:, 30:], k, v, **options), whole[:, 30:])


def test_one_tensor_describes_blocks_of_two_sizes() -> None:
    """The cache of block lists distinguishes block sizes."""
    keep = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for size in (64, 128):
        x = torch.randn(1, 2 * size, 1, 8)
        torch.testing.assert_close(flash_attention(x, x, x, blocks=BlockMask(keep, size)), flash_attention(x, x, x))


def test_block_masks_in_inference_mode() -> None:
    """Inference tensors have no version counter, so a modified block mask is read at every call."""
    with torch.inference_mode():
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        q, k, v = (x.detach() for x in inputs(7, 9))
        for kept in (True, False):
            keep.fill_(kept)
            assert flash_attention(q, k, v, blocks=BlockMask(keep)).any() == kept


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [2**30, 2**31])
@pytest.mark.parametrize("precision", ["ieee", "fp8"])
def test_heads_beyond_32_bits(precision: str, stride: int) -> None:
    """Heads-first queries with more than 2**31 elements. The results have the same bits as those of contiguous queries."""
    q, k, v = (torch.randn(1, 300, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = partial(flash_attention, k=k, v=v, is_causal=True, precision=precision)
    assert torch.equal(call(spread_heads(q, stride)), call(q))
