"""The kernels for Hopper GPUs. This module does not import Triton, so it can be imported on every machine."""

# The largest head dim of the modules `forward` and `backward`. `forward_wide` and `backward_wide` compute larger head dims.
NARROW_DIM = 128
