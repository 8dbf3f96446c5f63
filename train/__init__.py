"""Training a long-context GPT on the ring: `torchrun --nproc_per_node=N train/run.py [overrides]`."""
