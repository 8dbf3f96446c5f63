"""Who picks which kernels, and says why."""

import pytest
import torch

from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import full
from tests.kernels.contract import check_blockwise
from tests.kernels.masks import intervals_of
from tests.kernels.problems import make_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_choices():
    """Choices are remembered; those of a pretended GPU must not be."""
    from ringattn.kernels.hopper import common as hopper_common

    yield
    for function in (dispatch.choose_backend, hopper_common.refusal):
        function.cache_clear()


def pretend(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_hopper_kernels_on_hopper(monkeypatch):
    pretend((9, 0), monkeypatch)
    assert dispatch.choose_backend(GPU, torch.bfloat16).backend == "hopper"
    assert dispatch.choose_backend(GPU, torch.float16, dims=(80, 64)).backend == "hopper"
    assert dispatch.choose_backend(GPU, torch.bfloat16, "triton").backend == "triton"


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "plain", "reason"),
    [
        ((8, 0), torch.bfloat16, (128, 128), True, "sm_80"),
        ((10, 0), torch.bfloat16, (128, 128), True, "sm_100"),
        ((9, 0), torch.float32, (128, 128), True, "not fp16 or bf16"),
        ((9, 0), torch.bfloat16, (192, 128), True, "query head dim 192"),
        ((9, 0), torch.bfloat16, (64, 12), True, "value head dim 12"),
        ((9, 0), torch.bfloat16, (128, 128), False, "no dropout"),
    ],
    ids=["ampere", "blackwell", "fp32", "wide", "odd-value-dim", "dropout"],
)
def test_portable_kernels_where_hopper_cannot(capability, dtype, dims, plain, reason, monkeypatch):
    pretend(capability, monkeypatch)
    choice = dispatch.choose_backend(GPU, dtype, "auto", dims, plain)
    assert choice.backend == "triton" and reason in choice.why
    with pytest.raises(ValueError, match=reason):
        dispatch.choose_backend(GPU, dtype, "hopper", dims, plain)


def test_cpu_ranks_compute_in_pytorch():
    assert dispatch.choose_backend(CPU, torch.float32).backend == "tiled"
    with pytest.raises(ValueError, match="do not run on cpu"):
        dispatch.choose_backend(CPU, torch.bfloat16, "hopper")
    with pytest.raises(ValueError, match="unknown kernel backend 'fast'"):
        dispatch.choose_backend(CPU, torch.float32, "fast")


def test_triton_kernels_are_refused_where_triton_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.choose_backend.cache_clear()
    with pytest.raises(ValueError, match="do not run on cpu"):
        dispatch.choose_backend(torch.device("cpu"), torch.float32, "triton")


def test_deterministic_algorithms_keep_the_hopper_backward_out(monkeypatch):
    asked = []

    class Kernels:
        @staticmethod
        def backward(*arguments, **options):
            return asked.append(None)

    monkeypatch.setattr(dispatch, "_choose", lambda *_: "hopper")
    monkeypatch.setattr(dispatch, "_module", lambda backend, direction: asked.append(backend) or Kernels)
    q, rows = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1)
    arguments = (q, q, q, q, rows, rows, full(2, 2), 1.0)
    dispatch.backward(*arguments)
    torch.use_deterministic_algorithms(True)
    try:
        dispatch.backward(*arguments)
        with pytest.raises(ValueError, match="no fixed order"):
            dispatch.backward(*arguments, backend="hopper")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x for x in asked if x] == ["hopper", "triton"]


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out-and-dlse"])
def test_delta_may_be_what_it_is_made_from(with_dlse, backend, device):
    problem = make_problem(*intervals_of("causal", 20, 20), 20, device=device)
    out, lse = problem.forward(dispatch, final=True, backend=backend)
    dlse = torch.ones_like(lse) if with_dlse else None
    problem.delta = dispatch.row_delta(out, problem.dout, dlse, backend)
    expected = problem.gradients(dispatch, backend=backend)
    problem.delta = out, dlse
    for x, y in zip(problem.gradients(dispatch, backend=backend), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("of_output", [False, True], ids=["delta", "out"])
def test_one_block_of_keys_after_the_other(of_output, backend, device):
    problem = make_problem(*intervals_of("window", 41, 41), 41, torch.float32, 2, (4, 2), device=device)
    delta = (problem.forward(dispatch, final=True, backend=backend)[0], None) if of_output else problem.delta
    rows = problem.q, problem.v, problem.dout, problem.lse, delta
    check_blockwise(problem, [0, 7, 8, 41], dispatch.blockwise_backward(*rows, problem.scale, backend))


def test_no_block_of_keys_gives_no_gradient():
    q, rows = torch.ones(1, 3, 1, 8), torch.ones(1, 3, 1)
    assert torch.equal(dispatch.blockwise_backward(q, q, q, rows, rows, 1.0).finish(), torch.zeros_like(q))
