"""Load tests/worker.py before Triton: if an argument of pytest names this folder, pytest loads its fixtures early."""

from tests import worker as worker
