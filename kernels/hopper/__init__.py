"""The kernels for Hopper GPUs. This module does not import Triton, so every machine can import it."""

# The modules `forward_narrow` and `backward_narrow` support head dims of at most NARROW_DIM.
NARROW_DIM = 128
