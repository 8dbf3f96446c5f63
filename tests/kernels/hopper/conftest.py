"""Tests that compute on a Hopper GPU request the fixture `hopper`. They are marked `gpu` and skipped on every other machine."""

import pytest
import torch

DTYPES = [torch.float16, torch.bfloat16]

# Head dims (D, Dv), and whether the forward uses its tiles for few rows. By default it would choose the tiles by the number of
# rows.
DIMS = {
    "64": ((64, 64), False),
    "96": ((96, 96), False),
    "96-few-rows": ((96, 96), True),
    "128": ((128, 128), False),
    "128-few-rows": ((128, 128), True),
    "192-128": ((192, 128), False),
    "256": ((256, 256), False),
}

SHAPES = {  # (Nq, Nk), (Hq, Hkv), (D, Dv), batch
    "one-query": ((1, 63), (2, 1), (64, 64), 1),
    "one-key": ((63, 1), (2, 1), (64, 64), 1),
    "one-pair": ((1, 1), (1, 1), (128, 128), 2),
    "63": ((63, 63), (4, 2), (16, 16), 2),
    "111x130": ((111, 130), (3, 1), (80, 80), 1),
    "200x200": ((200, 200), (4, 2), (112, 72), 1),
    "130x111": ((130, 111), (2, 2), (64, 48), 3),
    "129": ((129, 129), (8, 2), (128, 128), 1),
    "385x1000": ((385, 1000), (2, 1), (64, 64), 1),
    "1000x385": ((1000, 385), (2, 1), (128, 128), 1),
    "value-dim-wider": ((65, 65), (2, 1), (16, 96), 1),
    "value-dim-narrower": ((165, 65), (2, 1), (96, 8), 1),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that request the fixture `hopper`."""
    for item in items:
        if "hopper" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def hopper() -> torch.device:
    """Return the GPU, or skip the test if it is not an sm_90 GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    return torch.device("cuda")


@pytest.fixture
def dims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the head dims of an entry of DIMS, and make the forward use the tiles for few rows or those for many rows."""
    from ringattn.kernels.hopper import forward as hopper_forward  # imports Triton, which some machines do not have

    dims, few_rows = DIMS[request.param]
    monkeypatch.setattr(hopper_forward, "FEW_ROWS", 2**62 if few_rows else 0)
    return dims


@pytest.fixture
def num_sms(hopper: torch.device) -> int:
    """Return the number of SMs, which is the number of programs of a launch."""
    return torch.cuda.get_device_properties(hopper).multi_processor_count
