"""The dispatcher's choice of a kernel, and its own computations."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels import dispatch, fp8, reference, validation
from ringattn.kernels.backends import Choice
from tests.covering import every_pair
from tests.kernels.compare import TOLERANCE, assert_rows_close, assert_scalars_close, assert_states_close
from tests.kernels.contract import check_forward, check_incremental
from tests.kernels.masks import full, intervals_of
from tests.kernels.problems import make_blocks, make_dropout, make_problem

PORTABLE = ["reference", "blockwise", "triton"]


@pytest.mark.parametrize(
    ("shapes", "options", "splits"),
    [
        (((1, 1, 32, 128), (1, 4096, 8, 128)), {}, True),
        (((2, 16, 32, 128), (2, 4096, 8, 128)), {}, True),
        (((1, 17, 32, 128), (1, 4096, 8, 128)), {}, False),
        (((1, 16, 8, 256), (1, 4096, 2, 256)), {}, False),
        (((1, 1, 32, 128), (1, 1000, 8, 128)), {}, False),
        (((1, 1, 32, 128), (1, 4096, 8, 128)), {"backend": "hopper"}, False),
        (((1, 1, 32, 128), (1, 4096, 8, 128)), {"final": False}, False),
        (((1, 1, 32, 128), (1, 4096, 8, 128)), {"dropout": "dropout"}, False),
        (((1, 1, 32, 128), (1, 4096, 8, 128)), {"dtype": torch.float32}, False),
    ],
    ids=["one", "several", "many", "large-head-dim", "few-keys", "requested-backend", "state", "dropout", "fp32"],
)
def test_few_queries_are_computed_by_the_split_kv_kernel(shapes, options, splits, monkeypatch):
    calls = []
    kernels = SimpleNamespace(
        decode=lambda *_, **__: calls.append(True) or (None, None), forward=lambda *_, **__: calls.append(False)
    )
    monkeypatch.setattr(dispatch, "_choose", lambda *_: Choice("hopper", ""))
    monkeypatch.setattr(dispatch, "_kernel", lambda backend, name: getattr(kernels, name))
    monkeypatch.setattr(dispatch, "_triton", lambda: SimpleNamespace(decode=kernels))
    monkeypatch.setattr(validation, "check_inputs", lambda *_: None)
    q, k = (torch.empty(shape, dtype=options.pop("dtype", torch.bfloat16), device="meta") for shape in shapes)
    dispatch.forward(q, k, k, full(q.shape[1], k.shape[1]), 1.0, **{"final": True, **options})
    assert calls == [splits]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "heads", "dims"), [(1, (32, 8), (128, 128)), (5, (8, 1), (64, 96)), (2, (4, 4), (192, 128))]
)
def test_few_queries_on_a_gpu(queries, heads, dims):
    """The third query attends to no key."""
    lo, hi = (torch.tensor([x[:queries]]) for x in ([0, 3000, 4000, 4000, 4000], [4000, 4000, 4000, 4010, 4097]))
    check_forward(make_problem(lo, hi, 4097, torch.bfloat16, 2, heads, dims, "cuda"), dispatch)


@pytest.mark.parametrize("backend", PORTABLE)
def test_fp8_forward_equals_attention_on_rounded_inputs(backend, device):
    problem = make_problem(*intervals_of("causal", 20, 150), 150, batch=2, heads=(2, 1), dims=(24, 16), device=device)
    inputs = fp8.quantize(problem.q, problem.k, problem.v)
    rounded = replace(problem, **{n: fp8.dequantize(x, torch.float64, 150) for n, x in zip("qkv", inputs, strict=True)})
    for final in (False, True):
        actual = problem.forward(dispatch, backend=backend, precision="fp8", final=final)
        assert_states_close(actual, rounded.forward(reference, final=final), TOLERANCE[torch.float32])
        same = dispatch.forward_fp8(*inputs, problem.intervals, problem.scale, None, final, backend, dtype=problem.q.dtype)
        assert all(torch.equal(x, y) for x, y in zip(actual, same, strict=True))
    # A backward with FP8 does not round its inputs.
    gradients = [problem.gradients(dispatch, backend=backend, precision=precision) for precision in ("ieee", "fp8")]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "dims", "fused"),
    [
        (True, torch.bfloat16, (128, 128), True),
        (True, torch.float32, (64, 64), True),
        (True, torch.float64, (128, 128), False),
        (True, torch.bfloat16, (96, 96), False),
        (True, torch.bfloat16, (128, 64), False),
        (False, torch.bfloat16, (128, 128), False),
    ],
    ids=["bf16", "fp32", "fp64", "96", "different-dims", "cpu"],
)
def test_one_kernel_rounds_the_inputs_on_a_gpu(is_cuda, dtype, dims, fused, monkeypatch):
    monkeypatch.setattr(dispatch, "_triton", lambda: SimpleNamespace(quantize=SimpleNamespace(quantize=lambda *_: "Triton")))
    monkeypatch.setattr(fp8, "quantize", lambda *_: "PyTorch")
    q, v = (SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 5, 2, dim)) for dim in dims)
    assert dispatch.quantize(q, q, v) == ("Triton" if fused else "PyTorch")


def test_fp8_states_continue_over_blocks_of_keys(device):
    """A chain of calls over whole blocks of 128 keys equals one call over all keys."""
    whole = make_problem(*intervals_of("causal", 300, 300), 300, device=device)
    rounded = replace(
        whole,
        **{
            n: fp8.dequantize(x, torch.float32, 300)
            for n, x in zip("qkv", fp8.quantize(whole.q, whole.k, whole.v), strict=True)
        },
    )
    forward = partial(dispatch.forward, precision="fp8")
    bounds, state = [0, 128, 256, 300], None
    for first, last in itertools.pairwise(bounds):
        part = whole.intervals.restrict(slice(0, 300), slice(first, last))
        state = forward(whole.q, whole.k[:, first:last], whole.v[:, first:last], part, whole.scale, state, last == 300)
    assert_states_close(state, rounded.double().forward(reference, final=True), TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128)], ids=str)
def test_fp8_on_a_gpu(dims, mask):
    """The output and the lse are compared with those of the rounded inputs. Every query attends to 1 to 300 keys."""
    problem = make_problem(*intervals_of(mask, 300, 300), 300, torch.bfloat16, 2, (4, 2), dims, "cuda")
    q, k, v = dispatch.round_to_fp8(problem.q, problem.k, problem.v)
    expected = replace(problem, q=q, k=k, v=v).double().forward(reference, final=True)
    for first in (None, 128):  # in one call, or in two calls of which the second one continues the state of the first one
        state, whole = None, slice(0, 300)
        for keys in (whole,) if first is None else (slice(0, first), slice(first, 300)):
            part = problem.intervals.restrict(whole, keys)
            state = dispatch.forward(
                *(problem.q, problem.k[:, keys], problem.v[:, keys], part, problem.scale),
                *(state, keys.stop == 300),
                precision="fp8",
            )
        # A kernel for FP8 inputs also rounds the probabilities, by up to 1/16.
        assert_rows_close("out", state[0], expected[0], 0.1)
        assert_scalars_close("lse", state[1], expected[1], 0.1)


def test_fp8_inputs_must_match():
    problem = make_problem(*intervals_of("causal", 5, 200), 200)
    q, k, v = fp8.quantize(problem.q, problem.k, problem.v)
    for operands, message in (
        ((q, k, replace(v, data=v.data[:, :, :1])), "v.data has shape"),
        ((q, replace(k, scales=k.scales[:, :1]), v), "k.scales has shape"),
        ((replace(q, data=problem.q), k, v), "q.data is torch.float32"),
        ((q, k, replace(v, scales=v.scales.double())), "v.scales is torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            dispatch.forward_fp8(*operands, problem.intervals, problem.scale, dtype=torch.float32)
    for option, message in ((make_dropout(5, 200), "dropout"), (make_blocks(5, 200), "a block mask")):
        name = "dropout" if message == "dropout" else "blocks"
        with pytest.raises(ValueError, match=f"precision='fp8' with {message}"):
            problem.forward(dispatch, precision="fp8", **{name: option})


@pytest.mark.parametrize(("queries", "reads_fp8"), [(1, False), (80, True)])
def test_few_queries_are_not_computed_by_the_fp8_kernel(queries, reads_fp8, monkeypatch):
    """The split-KV kernel computes few queries on rounded inputs."""
    received = []
    monkeypatch.setattr(dispatch, "forward_fp8", lambda *_, reads_fp8, **__: received.append(reads_fp8))
    problem = make_problem(*intervals_of("full", queries, 1100), 1100, torch.bfloat16)
    problem.forward(dispatch, precision="fp8", final=True)
    assert received == [reads_fp8]


def test_every_kernel_is_imported_from_the_module_of_its_backend():
    for name in ("forward", "backward"):
        kernels = [dispatch._kernel(backend, name) for backend in ("hopper", "triton", "blockwise", "reference")]
        modules = f"hopper.{name}", f"triton.{name}", "blockwise", "reference"
        expected = [f"ringattn.kernels.{module}.{name}" for module in modules]
        assert [f"{kernel.__module__}.{kernel.__name__}" for kernel in kernels] == expected


def test_hopper_kernels_are_told_whether_they_share_the_sms(monkeypatch):
    received = []

    def kernel(*arguments, shares_sms, **options):
        received.append(shares_sms)

    monkeypatch.setattr(dispatch, "_choose", lambda *_: Choice("hopper", ""))
    monkeypatch.setattr(dispatch, "_kernel", lambda backend, name: kernel)
    q = torch.zeros(1, 2, 1, 8)
    dispatch.forward(q, q, q, full(2, 2), 1.0)
    for shares_sms in (False, True):
        dispatch.forward(q, q, q, full(2, 2), 1.0, shares_sms=shares_sms)
        dispatch.backward(q, q, q, q, q[..., 0], q[..., 0], full(2, 2), 1.0, shares_sms=shares_sms)
    assert received == [False, False, False, True, True]  # the default is False


@pytest.mark.parametrize("backend", PORTABLE)
def test_every_call_is_validated_once(backend, device, monkeypatch):
    problem = make_problem(*intervals_of("causal", 5, 5), 5, device=device)
    calls = []
    for name in ("check_inputs", "check_state", "check_gradients"):
        check = getattr(validation, name)
        monkeypatch.setattr(validation, name, lambda *args, name=name, check=check: calls.append(name) or check(*args))
    state = problem.forward(dispatch, backend=backend)
    problem.forward(dispatch, backend=backend, state=state)
    problem.gradients(dispatch, backend=backend)
    assert calls == ["check_inputs", "check_inputs", "check_state", "check_inputs", "check_gradients"]


@pytest.mark.parametrize("backend", PORTABLE)
def test_backends_compute_the_same(backend, device):
    """The dispatcher passes every argument on to the backend it names."""
    options = {"dropout": make_dropout(20, 30, device=device), "blocks": make_blocks(20, 30, (1, 2), device=device)}
    problem = make_problem(*intervals_of("causal", 20, 30), 30, device=device, **options)
    expected = *problem.forward(dispatch, final=True, backend="reference"), *problem.gradients(dispatch, backend="reference")
    actual = *problem.forward(dispatch, final=True, backend=backend), *problem.gradients(dispatch, backend=backend)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@every_pair(backend=PORTABLE, with_dlse=[False, True])
def test_delta_may_be_given_as_out_and_dlse(backend, with_dlse, device):
    problem = make_problem(*intervals_of("causal", 20, 20), 20, device=device)
    out, lse = problem.forward(dispatch, final=True, backend=backend)
    dlse = torch.ones_like(lse) if with_dlse else None
    problem.delta = dispatch.row_delta(out, problem.dout, dlse, backend)
    expected = problem.gradients(dispatch, backend=backend)
    problem.delta = out, dlse
    for x, y in zip(problem.gradients(dispatch, backend=backend), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("backend", "dtype", "delta_as_out"),
    [
        ("blockwise", torch.float16, False),
        # In fp16, the rounded output would give a less exact delta than that of the reference.
        ("triton", torch.float32, True),
        pytest.param("triton", torch.float16, False, marks=pytest.mark.slow),
        pytest.param("blockwise", torch.float32, True, marks=pytest.mark.slow),
    ],
    ids=["blockwise-delta", "triton-out", "triton-delta", "blockwise-out"],
)
def test_incremental_backward_equals_one_call(backend, dtype, delta_as_out, device):
    problem = make_problem(*intervals_of("window", 33, 33), 33, dtype, 2, (4, 2), device=device)
    delta = (problem.forward(dispatch, final=True, backend=backend)[0], None) if delta_as_out else problem.delta
    queries = problem.q, problem.v, problem.dout, problem.lse, delta
    check_incremental(problem, [0, 7, 8, 33], dispatch.IncrementalBackward(*queries, problem.scale, backend))


def test_incremental_backward_without_blocks_gives_zero():
    q, lse = torch.ones(1, 3, 1, 8), torch.ones(1, 3, 1)
    assert torch.equal(dispatch.IncrementalBackward(q, q, q, lse, lse, 1.0).finish(), torch.zeros_like(q))


@pytest.mark.parametrize("batch", [1, 2])
def test_partials_are_summed_on_any_device_and_for_any_batch(batch, device):
    generator = torch.Generator().manual_seed(0)
    base, *parts = (torch.randn(batch, n, 3, 40, generator=generator).to(device) for n in (37, 37, 18, 1))
    expected = base.double()
    for first, x in zip((0, 0, 36), parts, strict=True):
        expected[:, first : first + x.shape[1]] += x
    total = dispatch.sum_partials(base, list(zip((0, 0, 36), parts, strict=True)), torch.float32)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
