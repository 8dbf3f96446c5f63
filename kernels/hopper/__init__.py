"""The kernels for Hopper GPUs. This module can be imported on every machine, because it does not import Triton."""

# The modules `forward_narrow` and `backward_narrow` support head dims of at most NARROW_DIM. The modules `forward_wide` and
# `backward_wide` support larger head dims.
NARROW_DIM = 128
