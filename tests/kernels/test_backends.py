"""The choice of a call's backend, and the reason for the choice."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ringattn import KVCache, decode_attention, flash_attention, last_backend
from ringattn.kernels import backends, dispatch
from ringattn.kernels.backends import Choice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    """Choices are cached. Choices for the simulated GPUs of these tests must not stay in the cache."""
    from ringattn.kernels.hopper import common as hopper_common

    yield
    for function in (backends.choose_backend, hopper_common.unsupported_reason):
        function.cache_clear()


def simulate_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_hopper_kernels_are_selected_on_sm_90(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    assert backends.choose_backend(GPU, torch.bfloat16).backend == "hopper"
    for dims in ((80, 64), (256, 256), (192, 128)):
        assert backends.choose_backend(GPU, torch.float16, dims=dims).backend == "hopper"
    assert backends.choose_backend(GPU, torch.bfloat16, "triton").backend == "triton"


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
    choice = backends.choose_backend(GPU, dtype, "auto", dims, plain)
    assert choice.backend == "triton"
    assert reason in choice.reason
    with pytest.raises(ValueError, match=f"hopper.*{reason}.*backend='triton'"):
        backends.choose_backend(GPU, dtype, "hopper", dims, plain)


@pytest.mark.parametrize(
    ("keys", "value_dim", "dropout", "backend"),
    [(1, 80, None, "hopper"), (0, 80, None, "triton"), (1, 12, None, "triton"), (1, 80, "dropout", "triton")],
    ids=["one-key", "no-keys", "odd-value-dim", "dropout"],
)
def test_forward_selects_a_backend_by_shapes_and_options(keys, value_dim, dropout, backend, monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    q = SimpleNamespace(device=GPU, dtype=torch.bfloat16, shape=(1, 5, 4, 64))
    v = SimpleNamespace(shape=(1, keys, 2, value_dim))
    assert dispatch._choose(q, v, "auto", dropout, None).backend == backend


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
    """Elsewhere, the usual kernels compute the call on rounded inputs, as the reason states."""
    simulate_gpu(capability, monkeypatch)
    choice = backends.choose_backend(GPU, dtype, "auto", dims, precision="fp8")
    assert (choice.backend, choice.reads_fp8) == (backend, reason is None)
    assert backends.choose_backend(GPU, dtype, "triton", dims, precision="fp8") == backends.Choice("triton", "requested")
    if reason is not None:
        assert reason in choice.reason
        assert "rounded to FP8" in choice.reason
        with pytest.raises(ValueError, match=f"'hopper' with precision='fp8' is unavailable: .*{reason}"):
            backends.choose_backend(GPU, dtype, "hopper", dims, precision="fp8")


def test_release_of_triton_without_gluon_selects_the_triton_kernels(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    monkeypatch.setitem(sys.modules, "ringattn.kernels.hopper.common", None)  # importing it raises ImportError
    choice = backends.choose_backend(GPU, torch.bfloat16)
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
    choice = backends.choose_backend(device, dtype, dims=dims)
    assert choice.backend == "blockwise"
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [(torch.float64, (64, 64), "torch.float64"), (torch.float32, (300, 64), "300"), (torch.float32, (0, 64), "head dims 0")],
    ids=["fp64", "large-head-dim", "no-head-dim"],
)
def test_requested_triton_kernels_must_support_the_call(dtype, dims, reason):
    with pytest.raises(ValueError, match=f"triton.*{reason}.*blockwise"):
        backends.choose_backend(GPU, dtype, "triton", dims)


def test_triton_kernels_run_on_a_cpu_only_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.choose_backend(CPU, torch.float32, "triton").backend == "triton"
    with pytest.raises(ValueError, match="interpreter computes bf16"):
        backends.choose_backend(CPU, torch.bfloat16, "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    backends.choose_backend.cache_clear()
    with pytest.raises(ValueError, match="do not run on cpu"):
        backends.choose_backend(CPU, torch.float32, "triton")


def test_unknown_and_unavailable_backends_are_errors():
    with pytest.raises(ValueError, match="do not run on cpu"):
        backends.choose_backend(CPU, torch.bfloat16, "hopper")
    with pytest.raises(ValueError, match=r"unknown kernel backend 'fast'.*blockwise"):
        backends.choose_backend(CPU, torch.float32, "fast")


def test_deterministic_algorithms_do_not_change_the_backend(monkeypatch):
    simulate_gpu((9, 0), monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        assert backends.choose_backend(GPU, torch.bfloat16).backend == "hopper"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_last_call_is_reported() -> None:
    """The backward pass does not count. Decoding reports its own kernel, also from a prepared function."""
    q, k, v = (x.requires_grad_() for x in torch.zeros(3, 1, 2, 2, 8))
    out = flash_attention(q, k, v, backend="reference")
    assert last_backend() == Choice("reference", "requested")
    flash_attention(q, k, v)
    assert last_backend() == Choice("blockwise", "no GPU kernel runs on cpu")
    out.sum().backward()
    assert last_backend() == Choice("blockwise", "no GPU kernel runs on cpu")
    cache = KVCache(4)
    cache.append(k, v)
    for _ in range(2):
        flash_attention(q, k, v)
        decode_attention(q.detach(), cache, backend="reference")
        assert last_backend() == Choice("reference", "requested")
    flash_attention(q, k, v, precision="fp8")
    assert "rounded to FP8" in last_backend().reason
