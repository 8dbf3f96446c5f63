"""The kernels for Hopper GPUs. This module can be imported on every machine, because it does not import Triton."""

# The largest head dim of the modules `forward_narrow` and `backward_narrow`. The modules `forward_wide` and `backward_wide`
# compute larger head dims.
NARROW_DIM = 128
