"""Train a long-context GPT over a ring of ranks: `torchrun --nproc_per_node=N train/run.py [overrides]`."""
