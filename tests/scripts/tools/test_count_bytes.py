import re
from pathlib import Path

import pytest
import torch

from ringattn import Mask
from scripts.tools import count_bytes


def test_prediction_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    count_bytes.main(["--length", "128", "--predict"])
    assert "| forward |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        count_bytes.main(["--length", "128"])
    assert exited.value.code == 2
    assert "a CUDA device is required; --predict works without one" in capsys.readouterr().err


def test_sequence_that_fits_in_l2_is_read_from_dram_once() -> None:
    """One head of 1,024 tokens: q, k and v are read once, and out and lse are written."""
    forward = count_bytes.predict(1024, 1, 128, Mask.full())["forward"]
    assert forward.dram_read == 3 * 1024 * 128 * 2
    assert forward.dram_write == 1024 * (128 * 2 + 4)
    assert forward.l2_read > forward.dram_read


def test_prediction_is_close_to_the_counters_of_the_hardware() -> None:
    """docs/io.md contains the predictions. If the model were wrong by a factor of 3, predictions would exceed the bounds.

    The largest difference is in DRAM reads if the operands do not fit into L2.
    """
    page = (Path(__file__).parents[3] / "docs" / "io.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| (causal|full) \| (forward|key gradient|query gradient) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for length, mask, kernel, counters in rows:
        numbers = [int(x.replace(",", "")) for x in counters.split(" | ")]
        predicted = count_bytes.predict(int(length.replace(",", "")), 16, 128, count_bytes.MASKS[mask])
        traffic = predicted[kernel.replace(" ", "_")][:3]  # without the reductions, which the Triton kernels do not use
        for count, stated, measured in zip(traffic, numbers[::2], numbers[1::2], strict=True):
            assert round(count / 1e6) == stated
            assert 0.55 < measured / stated < 1.2


def test_l2_reads_follow_from_the_tiles() -> None:
    """With full attention, each tile of 128 queries reads all keys and values."""
    num_tokens, heads, dim = 4096, 3, 128
    forward = count_bytes.predict(num_tokens, heads, dim, Mask.full())["forward"]
    keys_and_values = heads * num_tokens**2 // 128 * 4 * dim
    assert forward.l2_read == keys_and_values + heads * num_tokens * dim * 2


def test_prediction_of_the_hopper_kernels() -> None:
    """With full attention, every tile of 128 keys loads all queries and dout, and adds to the whole of dq."""
    num_tokens, heads, dim = 4096, 16, 128
    traffic = count_bytes.predict_hopper(num_tokens, heads, dim, Mask.full())
    rows, row = heads * num_tokens, dim * 2
    loop_rows = rows * num_tokens // 128
    assert traffic["main"].l2_reduce == loop_rows * dim * 4
    assert traffic["main"].l2_read == loop_rows * (2 * row + 8) + rows * 2 * row
    assert traffic["forward"].dram_read == rows * 3 * row
    # The kernels before and after the main kernel write and read the sums of dq once.
    assert traffic["prepare"].dram_write - rows * 8 == traffic["finish"].dram_read == rows * dim * 4


def test_backend_chooses_the_prediction(capsys: pytest.CaptureFixture) -> None:
    count_bytes.main(["--length", "128", "--predict", "--backend", "hopper"])
    assert "| main |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        count_bytes.main(["--predict", "--backend", "hopper", "--head-dim", "256"])
    assert "--head-dim 256" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("backend", count_bytes.PREDICTIONS)
def test_kernels_run(backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels require sm_90")
    count_bytes.launch(256, 2, 64, Mask.causal(), backend)


@pytest.mark.parametrize("option", ["--length", "--heads"])
def test_numbers_below_one_are_rejected(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        count_bytes.main(["--predict", option, "0"])
    assert f"argument {option}: '0' must be an integer of at least 1" in capsys.readouterr().err
