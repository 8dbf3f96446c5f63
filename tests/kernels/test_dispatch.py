"""Which backend computes a call, the reason for the choice, and what the dispatcher itself computes."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels import dispatch, fp8, reference, validation
from tests.covering import every_pair
from tests.kernels.compare import TOLERANCE, assert_rows_close, assert_scalars_close, assert_states_close
from tests.kernels.contract import check_forward, check_incremental
from tests.kernels.masks import full, intervals_of
from tests.kernels.problems import make_blocks, make_dropout, make_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PORTABLE = ["reference", "blockwise", "triton"]


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    """Choices are cached. Choices for the simulated GPUs of these tests must not stay in the cache."""
    from ringattn.kernels.hopper import common as hopper_common

    yield
    for function in (dispatch.choose_backend, hopper_common.unsupported_reason):
        function.cache_clear()


def simulate_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_hopper_kernels_are_selected_on_sm_90(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    assert dispatch.choose_backend(GPU, torch.bfloat16).backend == "hopper"
    for dims in ((80, 64), (256, 256), (192, 128)):
        assert dispatch.choose_backend(GPU, torch.float16, dims=dims).backend == "hopper"
    assert dispatch.choose_backend(GPU, torch.bfloat16, "triton").backend == "triton"


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "plain", "reason"),
    [
        ((8, 0), torch.bfloat16, (128, 128), True, "sm_80"),
        ((10, 0), torch.bfloat16, (128, 128), True, "sm_100"),
        ((9, 0), torch.float32, (128, 128), True, "torch.float32"),
        ((9, 0), torch.bfloat16, (64, 12), True, "head dim 12"),
        ((9, 0), torch.bfloat16, (128, 128), False, "no dropout"),
    ],
    ids=["ampere", "blackwell", "fp32", "odd-value-dim", "dropout"],
)
def test_triton_kernels_are_selected_where_the_hopper_kernels_are_unavailable(
    capability, dtype, dims, plain, reason, monkeypatch
):
    simulate_gpu(capability, monkeypatch)
    choice = dispatch.choose_backend(GPU, dtype, "auto", dims, plain)
    assert choice.backend == "triton"
    assert reason in choice.reason
    with pytest.raises(ValueError, match=f"hopper.*{reason}.*backend='triton'"):
        dispatch.choose_backend(GPU, dtype, "hopper", dims, plain)


@pytest.mark.parametrize(
    ("keys", "value_dim", "dropout", "backend"),
    [(1, 80, None, "hopper"), (0, 80, None, "triton"), (1, 12, None, "triton"), (1, 80, "dropout", "triton")],
    ids=["one-key", "no-keys", "odd-value-dim", "dropout"],
)
def test_forward_selects_a_backend_by_shapes_and_options(keys, value_dim, dropout, backend, monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    q = SimpleNamespace(device=GPU, dtype=torch.bfloat16, shape=(1, 5, 4, 64))
    v = SimpleNamespace(shape=(1, keys, 2, value_dim))
    assert dispatch._choose(q, v, "auto", dropout, None) == backend


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
    kernels = SimpleNamespace(decode=lambda *_, **__: calls.append(True), forward=lambda *_, **__: calls.append(False))
    monkeypatch.setattr(dispatch, "_choose", lambda *_: "hopper")
    monkeypatch.setattr(dispatch, "_module", lambda backend, name: kernels)
    monkeypatch.setattr(validation, "check_inputs", lambda *_: None)
    q, k = (torch.empty(shape, dtype=options.pop("dtype", torch.bfloat16), device="meta") for shape in shapes)
    dispatch.forward(q, k, k, full(q.shape[1], k.shape[1]), 1.0, **{"final": True, **options})
    assert calls == [splits]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "heads", "dims"), [(1, (32, 8), (128, 128)), (5, (8, 1), (64, 96)), (2, (4, 4), (192, 128))]
)
def test_few_queries_on_a_gpu(queries, heads, dims):
    """The third of the queries attends to no key."""
    lo, hi = (torch.tensor([x[:queries]]) for x in ([0, 3000, 4000, 4000, 4000], [4000, 4000, 4000, 4010, 4097]))
    check_forward(make_problem(lo, hi, 4097, torch.bfloat16, 2, heads, dims, "cuda"), dispatch)


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "backend", "reason"),
    [
        ((9, 0), torch.float16, (64, 64), "hopper", None),
        ((9, 0), torch.bfloat16, (256, 256), "hopper", None),
        ((9, 0), torch.bfloat16, (96, 96), "hopper", "head dims 96 and 96"),
        ((9, 0), torch.bfloat16, (256, 128), "hopper", "head dims 256 and 128"),
        ((9, 0), torch.float32, (128, 128), "triton", "torch.float32"),
        ((8, 0), torch.bfloat16, (128, 128), "triton", "sm_80"),
    ],
    ids=["64", "256", "96", "different-dims", "fp32", "ampere"],
)
def test_fp8_kernel_is_selected_where_it_can_run(capability, dtype, dims, backend, reason, monkeypatch):
    """Elsewhere, the usual kernels compute the call on rounded inputs, and the reason says so."""
    simulate_gpu(capability, monkeypatch)
    choice = dispatch.choose_backend(GPU, dtype, "auto", dims, precision="fp8")
    assert (choice.backend, choice.reads_fp8) == (backend, reason is None)
    assert dispatch.choose_backend(GPU, dtype, "triton", dims, precision="fp8") == dispatch.Choice("triton", "requested")
    if reason is not None:
        assert reason in choice.reason
        assert "rounded to FP8" in choice.reason
        with pytest.raises(ValueError, match=f"'hopper' with precision='fp8' is unavailable: .*{reason}"):
            dispatch.choose_backend(GPU, dtype, "hopper", dims, precision="fp8")


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
    monkeypatch.setattr(dispatch, "_module", lambda *name: SimpleNamespace(quantize=lambda *_: name))
    monkeypatch.setattr(fp8, "quantize", lambda *_: "PyTorch")
    q, v = (SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 5, 2, dim)) for dim in dims)
    assert dispatch.quantize(q, q, v) == (("triton", "quantize") if fused else "PyTorch")


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


def test_release_of_triton_without_gluon_selects_the_triton_kernels(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    monkeypatch.setitem(sys.modules, "ringattn.kernels.hopper.common", None)  # importing it raises ImportError
    choice = dispatch.choose_backend(GPU, torch.bfloat16)
    assert choice.backend == "triton"
    assert "Gluon" in choice.reason


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "reason"),
    [
        (CPU, torch.float32, (64, 64), "cpu"),
        (GPU, torch.float64, (64, 64), "torch.float64"),
        (GPU, torch.bfloat16, (64, 300), "head dims 64 and 300"),
    ],
    ids=["cpu", "fp64", "head-dim"],
)
def test_blockwise_is_selected_where_no_gpu_kernel_runs(device, dtype, dims, reason):
    choice = dispatch.choose_backend(device, dtype, dims=dims)
    assert choice.backend == "blockwise"
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [(torch.float64, (64, 64), "torch.float64"), (torch.float32, (300, 64), "300"), (torch.float32, (0, 64), "head dims 0")],
    ids=["fp64", "large-head-dim", "no-head-dim"],
)
def test_requested_triton_kernels_must_support_the_call(dtype, dims, reason):
    with pytest.raises(ValueError, match=f"triton.*{reason}.*blockwise"):
        dispatch.choose_backend(GPU, dtype, "triton", dims)


def test_triton_kernels_run_on_a_cpu_only_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose_backend(CPU, torch.float32, "triton").backend == "triton"
    with pytest.raises(ValueError, match="interpreter computes bf16"):
        dispatch.choose_backend(CPU, torch.bfloat16, "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    dispatch.choose_backend.cache_clear()
    with pytest.raises(ValueError, match="do not run on cpu"):
        dispatch.choose_backend(CPU, torch.float32, "triton")


def test_unknown_and_unavailable_backends_are_errors():
    with pytest.raises(ValueError, match="do not run on cpu"):
        dispatch.choose_backend(CPU, torch.bfloat16, "hopper")
    with pytest.raises(ValueError, match=r"unknown kernel backend 'fast'.*blockwise"):
        dispatch.choose_backend(CPU, torch.float32, "fast")


def test_tiled_is_a_deprecated_alias_of_blockwise():
    problem = make_problem(*intervals_of("causal", 5, 5), 5)
    with pytest.warns(DeprecationWarning, match="backend='tiled' is deprecated: use backend='blockwise'"):
        out, _ = problem.forward(dispatch, final=True, backend="tiled")
    assert torch.equal(out, problem.forward(dispatch, final=True, backend="blockwise")[0])


def test_deterministic_algorithms_do_not_change_the_backend(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        assert dispatch.choose_backend(GPU, torch.bfloat16).backend == "hopper"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dims", "name"), [((128, 128), "backward"), ((192, 128), "backward_wide"), ((64, 136), "backward_wide")], ids=str
)
def test_hopper_backward_of_large_head_dims_has_its_own_module(dims, name, monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    selected = []

    class Kernels:
        @staticmethod
        def backward(*arguments, **options):
            return None

        @staticmethod
        def IncrementalBackward(*arguments):
            return None

    monkeypatch.setattr(dispatch, "_choose", lambda *_: "hopper")
    monkeypatch.setattr(dispatch, "_module", lambda *module: selected.append(module) or Kernels)
    q, v, lse = torch.zeros(1, 2, 1, dims[0]), torch.zeros(1, 2, 1, dims[1]), torch.zeros(1, 2, 1)
    dispatch.backward(q, q, v, v, lse, lse, full(2, 2), 1.0)
    dispatch.IncrementalBackward(q, v, v, lse, lse, 1.0)
    assert selected == [("hopper", name)] * 2


def test_hopper_kernels_are_told_whether_they_share_the_sms(monkeypatch):
    received = []

    class Kernels:
        @staticmethod
        def forward(*arguments, shares_sms, **options):
            received.append(shares_sms)

    monkeypatch.setattr(dispatch, "_choose", lambda *_: "hopper")
    monkeypatch.setattr(dispatch, "_module", lambda backend, name: Kernels)
    q = torch.zeros(1, 2, 1, 8)
    dispatch.forward(q, q, q, full(2, 2), 1.0)
    for shares_sms in (False, True):
        dispatch.forward(q, q, q, full(2, 2), 1.0, shares_sms=shares_sms)
    assert received == [False, False, True]  # the default is False


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
        # In fp16, the rounded output would give a less exact delta than the reference uses.
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
