"""Launches with prepared constants give the same results as Triton's own launches."""

import os
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from ringattn.kernels.triton import launcher, quantize
from ringattn.kernels.triton.common import configure
from ringattn.kernels.triton.launcher import PreparedLaunch, launch


@triton.jit(do_not_specialize=["n"])
def _add_kernel(x, y, out, n, value, BLOCK: tl.constexpr):
    index = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + index, mask=index < n, other=0.0) + value
    if y is not None:
        total += tl.load(y + index, mask=index < n, other=0.0)
    tl.store(out + index, total, mask=index < n)


def current_stream(x: torch.Tensor) -> int | None:
    return torch.cuda.current_stream().cuda_stream if x.is_cuda else None


@pytest.mark.parametrize("offset", [0, 1])
def test_repeated_launches(offset, device):
    """The first launch compiles. The addresses of later launches may or may not be multiples of 16."""
    launch = PreparedLaunch(_add_kernel, (2, 3, 1), {"num_warps": 2}, (77, 2.5), BLOCK=16)
    for begin in (0, offset, 0):
        x, y = torch.randn(2, 101, device=device)
        out = torch.zeros(96, device=device)
        launch(current_stream(x), x[begin:], y[begin:], out)
        torch.testing.assert_close(out[:77], (x + y + 2.5)[begin : begin + 77])
        assert not out[77:].any()


def test_operands_that_are_none(device):
    launch = PreparedLaunch(_add_kernel, (1, 1, 1), {}, (16, 2.0), BLOCK=16)
    for x in torch.randn(2, 16, device=device):
        out = torch.empty(16, device=device)
        launch(current_stream(x), x, None, out)
        torch.testing.assert_close(out, x + 2.0)


def test_every_release_of_triton_fuses_products_and_sums():
    given = []
    kernel = {(1, 1, 1): lambda *_, **options: given.append(options), (1,): lambda *_, **options: given.append(options)}
    x = torch.zeros(4, 4, 1, 64)
    launch(kernel, 1, [x], [])
    PreparedLaunch(kernel, (1, 1, 1), {"num_warps": 2}, ())(None, x)
    given += configure("forward", x, x, x, None, "ieee")[1], quantize._options(64, torch.bfloat16)
    assert [options["enable_fp_fusion"] for options in given] == [True] * 4


@pytest.mark.parametrize(
    ("version", "arch", "given", "replaces"),
    [
        ("3.9.0", 90, None, True),
        ("3.9.0", 90, "ptxas_blackwell", False),
        ("3.9.0", 100, None, False),
        ("3.9.0", "gfx90a", None, False),
        ("3.8.0", 90, None, False),
    ],
)
def test_kernels_for_hopper_gpus_are_assembled_by_ptxas_12(version, arch, given, replaces, monkeypatch):
    """After a launch, Triton uses its default for the kernels of other projects, also if the compilation fails."""
    knobs, used = triton.knobs.nvidia, []
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)
    if given:
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", getattr(knobs, given).path)
    monkeypatch.setattr(triton, "__version__", version)
    target = GPUTarget("cuda", arch, 32)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target)))

    def compile_kernel(**options):
        used.extend([knobs.ptxas_blackwell, options])
        raise ZeroDivisionError

    default = knobs.ptxas_blackwell
    assert default != knobs.ptxas
    with pytest.raises(ZeroDivisionError):
        launcher.launch_by_triton({(1,): compile_kernel}, (1,), True)
    assert used == ([knobs.ptxas, {"ptx_version": 88}] if replaces else [default, {}])
    assert knobs.ptxas_blackwell == default
    assert ("TRITON_PTXAS_BLACKWELL_PATH" in os.environ) == (given is not None)
