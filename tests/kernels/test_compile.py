"""The kernels compile for sm_90 and fit into its registers and shared memory; no GPU is needed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that a program may use on sm_90.
SHARED_MEMORY = 227 * 1024
# Bytes per thread that may be spilled to the stack. The key gradient at head dim 128 reloads some values that are constant in
# its loops, and the forward at 64 has few warps for the random words of a dropout mask.
STACK = {
    ("key_gradient", 64, "dropout"): 16,
    ("key_gradient", 64, "blocks+dropout"): 16,
    ("forward", 64, "dropout"): 256,
    ("forward", 64, "blocks+dropout"): 256,
    ("key_gradient", 128, ""): 160,
    ("key_gradient", 128, "blocks"): 160,
    ("key_gradient", 128, "dropout"): 320,
    ("key_gradient", 128, "blocks+dropout"): 320,
}


def compile_cases(program: str, cases: list[str]) -> list[dict]:
    """Compile the cases in two processes of a program, and return what it prints for them."""
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(run, (program, program), (cases[::2], cases[1::2])), [])


def run(program: str, cases: list[str]) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{program}", *cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    return results


def check_resources(cases: list[str]) -> None:
    for result in compile_cases("compile_sm90", cases):
        assert result["stack"] <= STACK.get((result["kernel"], result["head_dim"], result["options"]), 0), result
        assert result["shared"] <= SHARED_MEMORY, result


def test_each_triton_kernel_compiles_without_spills():
    check_resources(["forward:bf16:64:", "key_gradient:bf16:64:blocks+dropout", "query_gradient:bf16:64:blocks"])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "dropout", "blocks", "blocks+dropout"])
def test_triton_kernels_with_any_options_compile_without_spills(options):
    kernels = ("forward", "key_gradient", "query_gradient")
    check_resources([f"{kernel}:bf16:{dim}:{options}" for kernel in kernels for dim in (64, 128)])


# bytes a thread may keep on the stack from item to item; what is not named keeps none
HOPPER_STACK = {"forward": {64: 64, 128: 64}, "backward": {128: 8}}
HOPPER_SPILLS = {"forward": 0, "backward": 1}  # of a step: how often it may reload or store


@pytest.mark.parametrize("direction", HOPPER_STACK)
def test_hopper_kernels_compile_and_overlap(direction):
    """No spills to speak of, and no matrix product that the assembler makes wait for the one before it."""
    kinds = {"forward": ("final", "begin", "state", "merge", "few"), "backward": ("fresh", "add")}[direction]
    # at 64 few rows have the tiles of many
    cases = [f"{direction}:bf16:{dim}:1:{kind}" for dim in (64, 128) for kind in kinds if (dim, kind) != (64, "few")]
    cases += [f"{direction}:fp16:128:4:{kinds[0]}"]
    for result in compile_cases("compile_hopper", cases):
        assert not result["serialized"], result
        assert result["steps"] and max(result["steps"]) <= HOPPER_SPILLS[direction], result
        assert result["stack"] <= HOPPER_STACK[direction].get(result["dim"], 0), result
        assert result["shared"] <= SHARED_MEMORY, result
