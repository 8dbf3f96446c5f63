import pytest
import torch

from scripts import gpus


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "start this script with torchrun"), ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "this machine has 0")],
)
def test_rank_without_a_gpu_exits_with_a_message(environment, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        gpus.join_group()


def test_only_one_rank_per_machine_prints_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as exited:
        gpus.require_gpus(2, local_rank=1)
    assert exited.value.code == 1
