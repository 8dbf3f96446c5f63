import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("environment, message", (({}, "start it by torchrun"), ({"LOCAL_RANK": "0"}, "this machine has 0")))
def test_no_gpu_is_one_line(environment, message, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    call = [sys.executable, "-c", "from scripts.bench import gpus; gpus.join()"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr
