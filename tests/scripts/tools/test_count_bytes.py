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
    """docs/io.md contains the predictions, and an error of the model by a factor of 3 would be outside of the bounds.

    The largest difference is in the reads of DRAM, if the operands do not fit into L2.
    """
    page = (Path(__file__).parents[3] / "docs" / "io.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| (causal|full) \| (forward|key gradient|query gradient) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for length, mask, kernel, counters in rows:
        numbers = [int(x.replace(",", "")) for x in counters.split(" | ")]
        predicted = count_bytes.predict(int(length.replace(",", "")), 16, 128, count_bytes.MASKS[mask])
        for count, stated, measured in zip(predicted[kernel.replace(" ", "_")], numbers[::2], numbers[1::2], strict=True):
            assert round(count / 1e6) == stated
            assert 0.55 < measured / stated < 1.2


def test_l2_reads_follow_from_the_tiles() -> None:
    """With full attention, each tile of 128 queries reads all keys and values."""
    num_tokens, heads, dim = 4096, 3, 128
    forward = count_bytes.predict(num_tokens, heads, dim, Mask.full())["forward"]
    keys_and_values = heads * num_tokens**2 // 128 * 4 * dim
    assert forward.l2_read == keys_and_values + heads * num_tokens * dim * 2
