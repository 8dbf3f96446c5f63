"""Attention and training on CPUs do not need Triton, which exists only for Linux."""

import subprocess
import sys

import pytest

from scripts.command import ROOT, child_environment

PROGRAM = """
import sys
sys.modules["triton"] = None  # every import of Triton now raises ModuleNotFoundError
import torch
import ringattn.train.run
from ringattn import KVCache, Mask, decode_attention, flash_attention
q = torch.randn(1, 5, 2, 16, requires_grad=True)
flash_attention(q, q, q, mask=Mask.causal()).sum().backward()
cache = KVCache(capacity=5)
cache.append(q.detach(), q.detach())
decode_attention(q.detach()[:, -1:], cache)
"""


@pytest.mark.slow
def test_attention_and_training_do_not_import_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
