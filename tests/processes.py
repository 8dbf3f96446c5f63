"""Settings of every test process, which shares the cores of the machine with other processes."""

import base64
import gc
from io import BytesIO

import torch


def use_one_thread() -> None:
    """Compute with one thread, also if the training code requests all cores."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda count: None


def freeze_objects() -> None:
    """Exclude all objects that exist now from later garbage collections.

    Each collection takes 0.5 s in a process that has imported all tests.
    """
    gc.freeze()
    # A training run would put these objects back, because it freezes and unfreezes the objects of its process itself.
    gc.freeze = gc.unfreeze = lambda: None


def save_blank_picture(figure: object, file: BytesIO, **options: object) -> None:
    """Replace `Figure.savefig`, which takes as long as many steps of a small run, by one that saves a picture of one pixel.

    Figures are drawn by the tests of the reports, and by runs that tests start with torchrun.
    """
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    file.write(base64.b64decode(png))
