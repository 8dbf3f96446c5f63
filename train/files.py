"""Write files so that other files stay unchanged, and so that no reader sees an incomplete file."""

import os
from pathlib import Path


def replace_link(path: Path) -> Path:
    """If `path` is a link, remove the link, so that writing does not change another file. Return `path`."""
    if path.is_symlink():
        path.unlink()
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of a file. Other processes see either the old content or the complete new content."""
    temporary = replace_link(path.with_suffix(".tmp"))
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        # Sync before the renaming. Without the sync, the file could be empty after a crash of the machine.
        os.fsync(file.fileno())
    os.replace(temporary, path)
