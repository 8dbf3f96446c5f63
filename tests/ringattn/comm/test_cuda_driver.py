"""Tests of the calls of the CUDA driver, with a function in place of the driver."""

from types import SimpleNamespace

import pytest

from ringattn.comm import cuda_driver


def test_many_flags_are_divided_among_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver accepts at most 255 operations per call. Every flag is waited for and then cleared, in order."""
    calls = []

    def batch(stream: int, count: int, steps: object, flags: int) -> int:
        calls.append([(step.kind, step.address) for step in steps[:count]])
        return 0

    monkeypatch.setattr(cuda_driver, "_driver", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=batch))
    addresses = list(range(4, 4 * 301, 4))
    cuda_driver.wait_and_clear_flags(addresses, stream=7)
    assert all(len(call) < 256 for call in calls)
    expected = [(kind, address) for address in addresses for kind in (cuda_driver._WAIT, cuda_driver._WRITE)]
    assert [step for call in calls for step in call] == expected
