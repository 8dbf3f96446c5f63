"""Settings of every process of the tests, which shares the cores of the machine with other processes."""

import gc

import torch


def use_one_thread() -> None:
    """Compute with one thread, also if the training code requests all cores."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda count: None


def freeze_objects() -> None:
    """Leave all objects that exist now out of later garbage collections.

    Each collection takes 0.5 s in a process that has imported all tests.
    """
    gc.freeze()
    # A training run would put these objects back, because it freezes and unfreezes the objects of its process itself.
    gc.freeze = gc.unfreeze = lambda: None
