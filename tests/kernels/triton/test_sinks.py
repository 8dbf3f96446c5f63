"""The kernels that add learned sinks, against the reference in float64."""

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.triton import sinks as kernel
from tests.covering import every_pair


def strided(x: Tensor) -> Tensor:
    """Return a copy of `x` whose last dimension has the stride 2."""
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


@every_pair(
    dim=(40, 128), dtype=(torch.float32, torch.float16), batch=(1, 2), with_dlse=(False, True), is_strided=(False, True)
)
def test_sinks_match_the_reference(
    dim: int, dtype: torch.dtype, batch: int, with_dlse: bool, is_strided: bool, device: torch.device
) -> None:
    """Forward and backward. Some queries have no keys, and the last sink is far above the scores."""
    generator = torch.Generator().manual_seed(0)
    out, dout = (torch.randn(batch, 37, 3, dim, generator=generator).to(dtype) for _ in range(2))
    lse, dlse = (torch.randn(batch, 37, 3, generator=generator) for _ in range(2))
    lse[:, :5], out[:, :5] = float("-inf"), 0
    sinks, dlse = torch.tensor([-3.0, 0.5, 90.0]), dlse if with_dlse else None
    tensors = [x if x is None or not is_strided else strided(x) for x in (out, lse, sinks, dout, dlse)]
    exact = [x if x is None else x.double() for x in tensors]
    expected = [*reference.add_sinks(*exact[:3]), *reference.add_sinks_backward(*exact)]
    on_device = [x if x is None else x.to(device) for x in tensors]
    got = [*kernel.add_sinks(*on_device[:3]), *kernel.add_sinks_backward(*on_device)]
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, torch.float32, torch.float32]
    for x, y in zip(got, expected, strict=True):
        tolerance = 1e-3 if x.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(x.double().cpu(), y, rtol=tolerance, atol=tolerance)


def test_one_sink_may_serve_all_heads(device: torch.device) -> None:
    """All heads of an expanded tensor share one number in memory. Each head has its own gradient."""
    out, lse, sink = torch.randn(1, 9, 3, 16), torch.randn(1, 9, 3), torch.tensor([0.5]).to(device).expand(3)
    expected = [*reference.add_sinks(out, lse, sink.cpu()), *reference.add_sinks_backward(out, lse, sink.cpu(), out, lse)]
    out, lse = out.to(device), lse.to(device)
    for x, y in zip(
        (*kernel.add_sinks(out, lse, sink), *kernel.add_sinks_backward(out, lse, sink, out, lse)), expected, strict=True
    ):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-5)
