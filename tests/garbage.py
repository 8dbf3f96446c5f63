"""Shorten garbage collections, each of which takes 0.5 s in a process that has imported all tests."""

import gc


def freeze_objects() -> None:
    """Leave all objects that exist now out of later garbage collections."""
    gc.freeze()
    # A training run would put these objects back, because it freezes and unfreezes the objects of its process itself.
    gc.freeze = gc.unfreeze = lambda: None
