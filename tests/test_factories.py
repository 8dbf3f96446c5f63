"""Every new tensor has an explicit device, because `torch.set_default_device` must not affect a call."""

import ast

import pytest

from tests.test_imports import ROOT, modules

# The torch functions whose result is on the default device if no device is given.
FACTORIES = {
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
        *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    )
}
# Parameters are created on the default device, as in torch's own modules, so that `train/setup.py` can create a model without
# allocating its memory.
EXCEPTIONS = {"train/model/gpt.py", "train/model/experts.py"}


@pytest.mark.parametrize("package", ["kernels", "ringattn", "train"])
def test_every_new_tensor_has_an_explicit_device(package):
    missing = []
    for path in modules(package):
        if (name := str(path.relative_to(ROOT))) in EXCEPTIONS:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func) in FACTORIES
                and "device" not in {x.arg for x in call.keywords}
            ):
                missing.append(f"{name}:{call.lineno}")
    assert not missing
