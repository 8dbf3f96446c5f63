"""Fixtures of the tests of communication."""

from tests.ringattn.comm.fake_gpus import capture, run_on_host

__all__ = ["capture", "run_on_host"]
