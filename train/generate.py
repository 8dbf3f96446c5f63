"""Generate text with a trained model: the script of `ringattn.train.commands.generate`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root of the repository replaces the folder of this script on the search path, as in train/run.py.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent) if entry == str(folder) else entry for entry in sys.path]

    from ringattn.train.commands.generate import main

    main()
