"""What the CUDA driver is asked for, with a stand-in for the driver."""

import pytest

from ringattn.comm import cuda_driver


def test_a_call_has_fewer_steps_than_the_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def batch(stream: int, count: int, steps: object, flags: int) -> int:
        calls.append([(step.kind, step.address) for step in steps[:count]])
        return 0

    monkeypatch.setattr(cuda_driver, "_functions", lambda: (None, None, batch, None))
    addresses = list(range(4, 4 * 301, 4))
    cuda_driver.wait_and_clear_flags(addresses, stream=7)
    assert all(len(call) < 256 for call in calls)
    wanted = [(kind, address) for address in addresses for kind in (cuda_driver._WAIT, cuda_driver._WRITE)]
    assert [step for call in calls for step in call] == wanted
