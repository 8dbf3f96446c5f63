"""Measurements, checks and tools. Each of these modules is a command: `python -m scripts.tools.plan_training`."""

import sys

# Ctrl-C prints one line instead of a traceback, also during the imports, which take seconds.
sys.excepthook = lambda kind, error, trace: (
    print("interrupted", file=sys.stderr) if kind is KeyboardInterrupt else sys.__excepthook__(kind, error, trace)
)
