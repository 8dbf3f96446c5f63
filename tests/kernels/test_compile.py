"""The Triton kernels compile for sm_90 and fit its registers; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_sm90.py")
SHARED_MEMORY = 227 * 1024  # of a program on sm_90
# bytes a thread may keep on the stack: the key gradient at 128 reloads some values that are constant in its loops, and the
# forward at 64 has few warps for the words of a dropout mask
STACK = {
    ("key_gradient", 64, "dropout"): 64,
    ("key_gradient", 64, "blocks+dropout"): 64,
    ("forward", 64, "dropout"): 256,
    ("forward", 64, "blocks+dropout"): 256,
    ("key_gradient", 128, ""): 160,
    ("key_gradient", 128, "blocks"): 160,
    ("key_gradient", 128, "dropout"): 256,
    ("key_gradient", 128, "blocks+dropout"): 384,
}


@pytest.mark.parametrize("features", ["", "dropout", "blocks", "blocks+dropout"])
def test_kernels_compile_without_spills(features):
    kernels = ("forward", "key_gradient", "query_gradient")
    cases = [f"{kernel}:bf16:{dim}:{features}" for kernel in kernels for dim in (64, 128)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, PROGRAM, *cases], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    for result in results:
        assert result["stack"] <= STACK.get((result["kernel"], result["head_dim"], features), 0), result
        assert result["shared"] <= SHARED_MEMORY, result
