"""Products are exact under all settings of PyTorch. Settings may have no effect on a CPU, so their values are tested."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import flash_attention
from ringattn.kernels import blockwise, fp8, reference
from ringattn.kernels.exact_products import exact_products, under_autocast
from tests.kernels.masks import intervals_of
from tests.kernels.problems import make_problem

CPU = torch.device("cpu")
GENERIC, CUDA, MKLDNN = torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def precisions() -> tuple[str, str]:
    return CUDA.fp32_precision, MKLDNN.fp32_precision


@pytest.fixture(autouse=True)
def original_settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for setting in (GENERIC, CUDA, MKLDNN):
        setting.fp32_precision = "none"


class Products(TorchDispatchMode):
    """Record the settings at every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.seen.append((*precisions(), under_autocast(CPU)))
        return function(*arguments, **(options or {}))


SETTINGS: dict[str, Callable[[], object]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(CUDA, "allow_tf32", True),
    "cuda": lambda: setattr(CUDA, "fp32_precision", "tf32"),
    "mkldnn": lambda: setattr(MKLDNN, "fp32_precision", "bf16"),
    "all": lambda: setattr(GENERIC, "fp32_precision", "tf32"),
}
PROBLEM = make_problem(*intervals_of("causal", 9, 9), 9)
FUNCTIONS = {
    "reference": lambda: (*PROBLEM.forward(reference), *PROBLEM.backward(reference)),
    "blockwise": lambda: (*PROBLEM.forward(blockwise), *PROBLEM.backward(blockwise)),
    "rotation": lambda: (fp8.quantize_rows(PROBLEM.q).scales, fp8.rotate_back(PROBLEM.q)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_products_are_exact_under_every_setting(function, setting):
    SETTINGS[setting]()
    before = precisions()
    assert before != ("none", "none")
    expected = FUNCTIONS[function]()
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        results = FUNCTIONS[function]()
    assert products.seen
    assert not {x for seen in products.seen for x in seen} & {"tf32", "bf16", True}
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert precisions() == before


def test_an_inherited_setting_is_still_inherited_afterwards():
    GENERIC.fp32_precision = "tf32"
    with exact_products(CPU):
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("tf32", "tf32")
    GENERIC.fp32_precision = "ieee"
    assert precisions() == ("ieee", "ieee")


def test_an_exception_restores_the_settings():
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), exact_products(CPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"


def test_products_stay_exact_until_the_last_thread_has_finished():
    torch.set_float32_matmul_precision("high")
    entered, may_leave = threading.Event(), threading.Event()

    def other_thread() -> None:
        with exact_products(CPU):
            entered.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other_thread)
    with exact_products(CPU):
        thread.start()
        assert entered.wait(60)
    assert CUDA.fp32_precision == "ieee"
    may_leave.set()
    thread.join()
    assert torch.get_float32_matmul_precision() == "high"


def test_a_setting_that_changes_meanwhile_does_not_round_later_products():
    with exact_products(CPU):
        torch.set_float32_matmul_precision("high")
        with exact_products(CPU):
            assert CUDA.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["high", "medium", "allow_tf32", "cuda", "all"])
@pytest.mark.parametrize(("dim", "backend"), [(64, "blockwise"), (64, "reference"), (64, "triton"), (320, "auto")])
def test_results_on_a_gpu_are_exact(dim, backend, setting):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 512, 2, dim, generator=generator).cuda() for _ in range(4))
    SETTINGS[setting]()
    results = []
    for inputs in ([q, k, v], [q.double(), k.double(), v.double()]):
        inputs = [x.requires_grad_() for x in inputs]
        out = flash_attention(*inputs, is_causal=True, backend=backend if inputs[0].dtype == torch.float32 else "auto")
        results.append((out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))))
    assert max((x - y).abs().max().item() for x, y in zip(*results, strict=True)) < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["high", "cuda"])
def test_the_rotation_on_a_gpu_is_exact(setting):
    SETTINGS[setting]()
    x = torch.randn(1, 64, 2, 80).cuda()
    exact = x.double() @ fp8.rotation(80, x.device).double().T
    assert (fp8.rotate_back(x) - exact).abs().max() < 1e-5
