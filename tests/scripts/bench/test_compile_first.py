"""The kernels of a benchmark are compiled in other processes."""

import pytest

from scripts.bench import compile_first
from scripts.bench.cases import Case


def test_cases_with_the_same_kernels_are_compiled_once():
    causal = Case("causal", 65536, 16, 128)
    cases = [
        causal,
        Case("causal", 16384, 32, 128),
        Case("window", 16384, 16, 128, window_size=1024),
        Case("window", 16384, 16, 128, window_size=4096),
        Case("causal", 16384, 32, 128, key_heads=8),
        Case("causal", 16384, 16, 192, value_dim=128),
    ]
    found = compile_first.distinct_cases(cases)
    assert found == [Case("causal", 16384, 16, 128), cases[2], *cases[4:]]


@pytest.mark.slow
def test_failed_calls_are_returned_and_unsupported_masks_are_skipped(capsys):
    window, causal = Case("window", 128, 1, 16), Case("causal", 128, 1, 16)
    errors = compile_first.compile_first([window, causal], ["cudnn"], 2)
    assert list(errors) == [("cudnn", causal)]  # cuDNN needs a GPU, and it has no windows
    assert "compiled 2 calls" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "0"])
def test_the_cache_on_disk_is_enabled_unless_the_user_decides(name, monkeypatch):
    variable = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(variable, raising=False) if name is None else monkeypatch.setenv(variable, name)
    monkeypatch.setattr(compile_first.os, "environ", environ := dict(compile_first.os.environ))
    compile_first.use_disk_cache()
    assert environ[variable] == (name or "1")
