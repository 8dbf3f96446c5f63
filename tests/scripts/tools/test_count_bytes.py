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
