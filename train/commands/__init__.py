"""The commands: run, evaluate, generate and export."""

import ctypes
import os
import signal
import sys

if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    # torchrun has started this process. Request that the kernel sends SIGTERM to this process if torchrun dies. Without this
    # request, the process would keep its GPU and the lock on its directory. The request comes before the imports of the
    # commands, because importing torch takes seconds.
    # Option 1 of prctl(2) is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
