import sys

import pytest
import torch

from scripts.tools import count_bytes


def test_without_a_gpu_only_the_prediction_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["count_bytes.py", "--length", "128", "--predict"])
    count_bytes.main()
    assert "| forward |" in capsys.readouterr().out
    sys.argv.remove("--predict")
    with pytest.raises(SystemExit) as ended:
        count_bytes.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: needs a CUDA device; --predict launches nothing\n")
