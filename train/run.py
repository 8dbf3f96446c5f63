"""Train a GPT over a ring of ranks: the script of `ringattn.train.commands.run`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of a script first on its search path. With train/ on the search path, `import data` in another
    # package would import train/data. Therefore the root of the repository replaces train/ on the search path. With the root on
    # the search path, `import ringattn` works without an installation.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent) if entry == str(folder) else entry for entry in sys.path]

    from ringattn.train.commands.run import main

    main()
