"""The check of the kernels, as far as it runs without a GPU."""

import pytest
import torch

from scripts.accuracy import NAMES, row_limits
from scripts.check import kernels as check_kernels


@pytest.mark.parametrize("name", ["portable", "hopper"])
def test_kernels_of_both_backends_are_found(name):
    kernels = check_kernels.load_kernels(name)
    assert callable(kernels.forward)
    assert callable(kernels.backward)


def test_errors_above_their_limit_are_marked():
    limits = row_limits(torch.bfloat16)
    ours = dict.fromkeys(NAMES, 0.0) | {"dq": 1.1 * limits["dq"], "dk": float("nan")}
    cells = check_kernels.format_errors(ours, {"out": 1e-3}, limits)
    assert [name for name, cell in zip(NAMES, cells, strict=True) if "too large" in cell] == ["dq", "dk"]
    assert cells[0] == "0.0e+00 (1.0e-03)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_machine_without_a_gpu_is_rejected(capsys):
    with pytest.raises(SystemExit):
        check_kernels.main([])
    assert "a CUDA device is required" in capsys.readouterr().err
