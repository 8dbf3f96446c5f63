"""The commands: run, evaluate, generate and export."""

import ctypes
import faulthandler
import os
import signal
import sys

# Ctrl-C prints one line instead of a traceback, also during the imports, which take seconds.
sys.excepthook = lambda kind, error, trace: (
    print("interrupted", file=sys.stderr) if kind is KeyboardInterrupt else sys.__excepthook__(kind, error, trace)
)
if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    # Let the kernel send SIGTERM to this process if torchrun dies. Without the signal, the process would keep its GPU and the
    # lock on its directory. Call prctl before the import of torch, which takes seconds. Option 1 of prctl(2) is
    # PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    # If a library crashes, for example during an import, print the Python stack of every thread.
    faulthandler.enable()
