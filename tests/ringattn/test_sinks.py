"""Tests of learned attention sinks: outputs and all gradients equal a softmax with one more column per head, in float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ringattn import (
    KVCache,
    Layout,
    Mask,
    PagedKVCache,
    decode_attention,
    flash_attention,
    ring_attention,
    simulate,
    ulysses_attention,
)
from tests.covering import every_pair
from tests.ringattn.rings import ALL_MASK_NAMES, Case, masks

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
HEADS, KEY_HEADS = 4, 2
SINKS = torch.tensor([-30.0, 0.5, 2.0, 30.0], dtype=torch.float64)  # two sinks are far from the scores


def with_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Concatenate the sinks to the scores as one more key, which has no value."""
    lo, hi = (x[:, None, :, None] for x in mask.intervals(k.shape[1], q.shape[1]))
    keys = torch.arange(k.shape[1])
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill((keys < lo) | (keys >= hi), float("-inf"))
    scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)
    return out, scores.logsumexp(-1).transpose(1, 2)


def results(attend: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> list[Tensor]:
    """Return (out, lse) and the gradients of sum(out * dout) + sum(lse * dlse) for q, k, v and the sinks."""
    *inputs, dout, dlse = tensors
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*inputs)
    grads = torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *grads]


def expected(case: Case, mask: Mask, sinks: Tensor = SINKS) -> list[Tensor]:
    """The exact results of the whole sequence."""
    return results(partial(with_column, mask=mask), case.q, case.k, case.v, sinks, case.dout, case.dlse)


def on_ring(case: Case, layout: Layout, mask: Mask, ulysses: bool = False, **options) -> list[Tensor]:
    """The results of a simulated ring, or of one Ulysses group. The gradient of the sinks is the sum over the ranks."""
    call = partial(ulysses_attention if ulysses else ring_attention, layout=layout, mask=mask, return_lse=True, **options)

    def run(rank: int, group: object) -> list[Tensor]:
        q, k, v, dout, dlse = (layout.shard(x, rank) for x in (case.q, case.k, case.v, case.dout, case.dlse))
        attend = partial(call, **{"ulysses_group" if ulysses else "group": group})
        return results(lambda q, k, v, sinks: attend(q, k, v, sink_logits=sinks), q, k, v, SINKS.to(q.dtype), dout, dlse)

    *shards, dsinks = zip(*simulate(layout.ranks, run), strict=True)
    return [*(layout.unshard(list(x)) for x in shards), sum(dsinks)]


def assert_close(got: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """Check every result relative to its largest value. Ignoring one sink would change a result by more than 1e-2."""
    for name, x, y in zip(NAMES, got, exact, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max()
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize(
    ("mask", "kind", "schedule", "dtype"),
    [
        ("causal", "zigzag", "state", torch.float64),
        ("window+documents", "striped", "kv", torch.float64),
        ("intervals", "contiguous", "state", torch.float32),
        ("full", "zigzag", "kv", torch.float32),
    ],
)
def test_sinks_on_a_ring(mask: str, kind: str, schedule: str, dtype: torch.dtype) -> None:
    """Three ranks, batch 2."""
    case, mask = Case.random(41, batch=2, heads=HEADS, key_heads=KEY_HEADS, value_dim=5), masks(41)[mask]
    got = on_ring(case.to(dtype), Layout(kind, 41, 3), mask, schedule=schedule)
    assert_close(got, expected(case, mask), 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_sinks_with_ulysses(recompute: bool) -> None:
    """Each of four ranks computes one head. The output does not depend on `return_lse`."""
    case, layout = Case.random(31, heads=HEADS, key_heads=KEY_HEADS), Layout.contiguous(31, 1).split(4)
    got = on_ring(case, layout, Mask.causal(), ulysses=True, recompute_all_to_all=recompute)
    assert_close(got, expected(case, Mask.causal()), 1e-10)

    def output(rank: int, group: object) -> Tensor:
        q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
        return ulysses_attention(q, k, v, layout=layout, mask=Mask.causal(), ulysses_group=group, sink_logits=SINKS)

    assert torch.equal(layout.unshard(simulate(4, output)), got[0])


@pytest.mark.parametrize("num_queries", [12, 3])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_sinks_on_one_device(backend: str, num_queries: int) -> None:
    """There may be fewer queries than keys."""
    case, mask = Case.random(12, batch=2, heads=HEADS, key_heads=KEY_HEADS), Mask.causal(window=5)
    last = [x[:, -num_queries:] for x in (case.q, case.dout, case.dlse)]
    tensors = last[0], case.k, case.v, SINKS, *last[1:]
    attend = partial(flash_attention, mask=mask, backend=backend, return_lse=True)
    got = results(lambda q, k, v, sinks: attend(q, k, v, sink_logits=sinks), *tensors)
    assert_close(got, results(partial(with_column, mask=mask), *tensors), 1e-10)


def test_queries_without_keys_attend_only_to_the_sink() -> None:
    """The output is 0, and lse is the sink. All gradients are finite, and lse's gradients go to the sink."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 4, HEADS, 8, dtype=torch.float64))
    sinks = SINKS.clone().requires_grad_()
    mask = Mask.from_intervals([0, 0, 0, 0], [0, 0, 2, 4])
    out, lse = flash_attention(q, k, v, mask=mask, return_lse=True, sink_logits=sinks)
    assert out[:, :2].eq(0).all()
    assert torch.equal(lse[0, :2], SINKS.expand(2, -1))
    grads = torch.autograd.grad(out.sum() + lse[:, :2].sum(), (q, k, v, sinks))
    assert all(x.isfinite().all() for x in grads)
    assert grads[0][:, :2].eq(0).all()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_in_decoding(ranks: int, window: int | None) -> None:
    """The last two of 20 tokens, with a cache on each rank."""
    case = Case.random(20, batch=2, heads=HEADS, key_heads=KEY_HEADS)

    def decode(rank: int, group: object) -> tuple[Tensor, Tensor]:
        cache = KVCache(20, rank, ranks, block=2)
        cache.append(case.k, case.v)
        call = partial(decode_attention, case.q[:, 18:], cache, group=group if ranks > 1 else None)
        return call(window=window, sink_logits=SINKS), call(window=(4, 0), sink_logits=SINKS)

    mask = Mask.causal(window)
    exact, _ = with_column(case.q[:, 18:], case.k, case.v, SINKS, mask)
    windowed, _ = with_column(case.q[:, 18:], case.k, case.v, SINKS, Mask.causal(5))
    for got, pair in simulate(ranks, decode):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(pair, windowed, rtol=0, atol=1e-12)


def test_sinks_with_a_paged_cache_and_without_alternate_in_calls() -> None:
    """The function that decoding prepares in advance serves only one kind of call."""
    case = Case.random(12, heads=HEADS, key_heads=KEY_HEADS)
    cache = PagedKVCache(1, 1, 64)
    cache.append(case.k, case.v)
    plain, _ = with_column(case.q[:, 11:], case.k, case.v, SINKS - 1e9, Mask.causal())
    exact, _ = with_column(case.q[:, 11:], case.k, case.v, SINKS, Mask.causal())
    for _ in range(2):
        torch.testing.assert_close(decode_attention(case.q[:, 11:], cache), plain, rtol=0, atol=1e-12)
        torch.testing.assert_close(decode_attention(case.q[:, 11:], cache, sink_logits=SINKS), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"shape \(3,\).*\(4,\)"),
        (torch.zeros(4, dtype=torch.int64), "floating-point"),
        ([0.0] * 4, "sink_logits is a list"),
        (torch.zeros(4, device="meta"), "is on meta but q is on cpu"),
    ],
    ids=("shape", "dtype", "list", "device"),
)
def test_invalid_sinks_raise_an_error(sinks: object, message: str) -> None:
    """Every call rejects them."""
    q = torch.zeros(1, 8, HEADS, 8)
    cache = KVCache(8)
    cache.append(q, q)
    calls = (
        partial(flash_attention, q, q, q),
        partial(ring_attention, q, q, q, layout=Layout.zigzag(8, 1), mask=Mask.causal()),
        partial(decode_attention, q[:, :1], cache),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(sink_logits=sinks)


def test_compiled_code_has_sinks() -> None:
    """torch.compile traces the call with its gradients."""
    case = Case.random(12, heads=HEADS, key_heads=KEY_HEADS)
    tensors = case.q, case.k, case.v, SINKS, case.dout, case.dlse
    attend = partial(flash_attention, mask=Mask.causal(), backend="blockwise", return_lse=True)
    compiled = torch.compile(lambda q, k, v, sinks: attend(q, k, v, sink_logits=sinks), backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, *tensors), expected(case, Mask.causal()), 1e-10)


@pytest.mark.gpu
@every_pair(dim=(64, 128, 256), mask=ALL_MASK_NAMES, num_queries=(300, 40))
def test_sinks_on_a_gpu(dim: int, mask: str, num_queries: int) -> None:
    """The Hopper kernels compute every mask, and one kernel per direction adds the sinks."""
    case = Case.random(300, heads=HEADS, key_heads=KEY_HEADS, dim=dim, value_dim=dim).to(torch.bfloat16)
    last = [x[:, -num_queries:] for x in (case.q, case.dout, case.dlse)]
    tensors = last[0], case.k, case.v, SINKS, *last[1:]
    attend = partial(flash_attention, mask=masks(300)[mask], return_lse=True)
    on_gpu = [x.cuda().to(torch.float32 if x is SINKS else x.dtype) for x in tensors]
    got = results(lambda q, k, v, sinks: attend(q, k, v, sink_logits=sinks), *on_gpu)
    exact = results(partial(with_column, mask=masks(300)[mask]), *(x.double() for x in tensors))
    assert_close([x.cpu() for x in got], exact, 2e-2)


@pytest.mark.gpu
def test_a_graph_replays_decoding_with_sinks() -> None:
    """A replay reads the current values of the sinks."""
    case = Case.random(64, heads=HEADS, key_heads=KEY_HEADS, dim=64, value_dim=64).to(torch.bfloat16).to("cuda")
    cache, sinks, q = KVCache(64), SINKS.cuda().float(), case.q[:, 63:]
    cache.append(case.k, case.v)
    bounds = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.full((1, 1), 64, dtype=torch.int32, device="cuda")
    decode = partial(decode_attention, q, cache, bounds=bounds, sink_logits=sinks)
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for shift in (0.0, 5.0):
        sinks.copy_(SINKS + shift)
        graph.replay()
        exact, _ = with_column(*(x.double().cpu() for x in (q, case.k, case.v)), SINKS + shift, Mask.causal())
        torch.testing.assert_close(out.double().cpu(), exact, rtol=2e-2, atol=2e-2)
