"""No result depends on torch's default device or default dtype, and no cache keeps anything that does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from ringattn import (
    BlockMask,
    KVCache,
    Layout,
    Mask,
    PagedKVCache,
    balanced_layout,
    decode_attention,
    explain,
    flash_attention,
    ring_attention,
    simulate,
    ulysses_attention,
)
from tests.ringattn.rings import Case

MASK = Mask.causal(window=37, documents=[50, 14])
CASE = Case.random(64, dtype=torch.float32, dim=16, value_dim=16)
LAYOUT = Layout.zigzag(64, 2)
BLOCKS = BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 64)


def flash(**options) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in (CASE.q, CASE.k, CASE.v)]
    out, lse = flash_attention(*inputs, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (CASE.dout, CASE.dlse))]


def on_ranks(defaults: Callable, attend: Callable = ring_attention, layout: Layout = LAYOUT, **options) -> list[Tensor]:
    def run(rank, group):
        if attend is ulysses_attention:
            options["ulysses_group"] = group
        with defaults():  # a default device applies to one thread only
            return CASE.on_rank(layout, MASK, rank, group, attend, **options)

    return [x for results in simulate(2, run) for x in results]


def decode() -> list[Tensor]:
    cache, pages = KVCache(80), PagedKVCache(8, 1, 200)
    results = []
    for x in (cache, pages):
        x.append(CASE.k[:, :60], CASE.v[:, :60])
        x.append(CASE.k[:, 60:], CASE.v[:, 60:])
        results.append(decode_attention(CASE.q[:, -2:], x, window=5, sinks=2))
    cache.append(CASE.k[:, :1], CASE.v[:, :1], rows=torch.tensor([3], device="cpu"))
    cache.truncate(9)
    bounds = torch.tensor([[1]], dtype=torch.int32, device="cpu"), torch.tensor([[7]], dtype=torch.int32, device="cpu")
    return [*results, decode_attention(CASE.q[:, -1:], cache, bounds=bounds)]


def decode_on_ranks(defaults: Callable) -> list[Tensor]:
    def run(rank, group):
        with defaults():
            cache = KVCache(100, rank, 2)
            cache.prefill(*(LAYOUT.shard(x, rank) for x in (CASE.k, CASE.v)), LAYOUT)
            cache.append(CASE.k[:, :20], CASE.v[:, :20])
            return decode_attention(CASE.q[:, -2:], cache, group=group, window=30, sinks=3)

    return simulate(2, run)


def layouts() -> list[Tensor]:
    layout = balanced_layout(Mask.causal(documents=[1000, 3096]), 4096, 2)
    return [
        *(layout.positions(rank) for rank in range(2)),
        LAYOUT.unshard([LAYOUT.shard(CASE.q, rank) for rank in range(2)]),
        *Mask.causal(window=3).intervals(9, 4),
        torch.tensor(bytearray(str(explain(CASE.q, CASE.k, CASE.v, layout=LAYOUT, mask=MASK)).encode()), device="cpu"),
    ]


CALLS: dict[str, Callable[[Callable], list[Tensor]]] = {
    "flash": lambda defaults: flash(mask=MASK, dropout_p=0.2, seed=1),
    "fp8": lambda defaults: flash(mask=MASK, precision="fp8"),
    "blocks": lambda defaults: flash(blocks=BLOCKS, backend="reference"),
    "state": partial(on_ranks, schedule="state", dropout_p=0.2),
    "kv": partial(on_ranks, schedule="kv", precision="fp8"),
    "ulysses": partial(on_ranks, attend=ulysses_attention, layout=Layout.contiguous(64, 1).split(2)),
    "decode": lambda defaults: decode(),
    "decode on ranks": decode_on_ranks,
    "layouts": lambda defaults: layouts(),
}


@contextmanager
def dtype(default: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": partial(torch.device, "meta"),
    "bfloat16": partial(dtype, torch.bfloat16),
    "float64": partial(dtype, torch.float64),
}


def clear_caches() -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("ringattn")]:
        for owner in (module, *(x for x in vars(module).values() if isinstance(x, type))):
            for function in list(vars(owner).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_results_do_not_depend_on_the_defaults(call, defaults):
    clear_caches()
    with DEFAULTS[defaults]():
        results = CALLS[call](DEFAULTS[defaults])
    again = CALLS[call](partial(torch.device, "cpu"))  # with the caches that the first call has filled
    clear_caches()
    expected = CALLS[call](partial(torch.device, "cpu"))
    for x, y, z in zip(results, again, expected, strict=True):
        assert x.dtype == y.dtype == z.dtype
        assert torch.equal(x, y)
        assert torch.equal(x, z)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "fp8"])
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_results_on_a_gpu_do_not_depend_on_the_defaults(defaults, dim, precision):
    inputs = [torch.randn(1, 64, 2, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def results() -> list[Tensor]:
        out = flash_attention(*inputs, mask=MASK, precision=precision)
        return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]

    clear_caches()
    with DEFAULTS[defaults]():
        found = results()
    clear_caches()
    for x, y in zip(found, results(), strict=True):
        torch.testing.assert_close(x, y)  # the last bits of dq differ from run to run
