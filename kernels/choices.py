"""Limits of the kernels. This module does not import torch, so that settings can be checked without it."""

BACKENDS = ("auto", "hopper", "triton", "blockwise", "reference")
MAX_HEAD_DIM = 256
