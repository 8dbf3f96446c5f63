"""The planner of training runs: its output, and its proposal if nothing fits."""

import re

import pytest

from scripts.tools import plan_training
from scripts.tools.plan_training import Cluster, compose, first, report


def lines(text: str, name: str) -> list[str]:
    return re.findall(rf"^  {name} +(.*)$", text, re.MULTILINE)


def test_the_plan_of_a_million_tokens_on_four_gpus(capsys):
    plan_training.main(["--model", "8b", "--seq-len", "1048576", "--gpus", "4", "memory.optimizer=keep"])
    output = capsys.readouterr().out
    assert output.startswith("Predictions for 8b with 1,048,576 tokens per sequence on NVIDIA H200\n\n4 GPUs\n")
    assert len(lines(output, "mesh")) == 1
    (memory,), (step,) = lines(output, "GPU memory"), lines(output, "step")
    total, *parts = (float(x) for x in re.findall(r" ?([\d.]+) GiB \(| ([\d.]+)[,)]", memory) for x in x if x)
    assert sum(parts) == pytest.approx(total, abs=0.3)
    seconds, tflops, mfu = (float(re.search(text, step)[1]) for text in (r"([\d.]+) s, ", r"(\d+) TFLOP/s", r"MFU ([\d.]+)%"))
    assert tflops == pytest.approx(9.894 * mfu, rel=0.01)
    assert 380 < seconds < 480


def test_settings_of_the_command_line_are_used():
    config = compose("8b", 8192, ["memory.activations=recompute", "trainer.batch_size=2"])
    assert (config.model.dim, config.data.seq_len, config.trainer.batch_size) == (4096, 8192, 2)
    text = report(config, Cluster("h200", 8, 8, None))
    assert all("recomputes 32 of 32" in plan for plan in lines(text, "memory plan"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("parallel.ring=2", {(2, 1), (1, 2)}),
        ("parallel.ulysses=2", {(1, 2), (2, 2)}),
        ("parallel=ulysses", {(1, 1), (1, 2), (1, 4)}),
        ("parallel=state_ring", {(1, 1), (2, 1), (4, 1)}),
        ("model=52m", {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}),
    ],
)
def test_settings_restrict_the_meshes(setting, expected):
    found = plan_training.meshes(compose("52m", 8192, [setting]), 4)
    assert {(shape.ring, shape.ulysses) for shape in found} == expected


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("parallel.ring=3", "parallel.ring=3 must divide the number of ranks, 4: choose one of 1, 2, 4"),
        ("model=8b", "model=8b contradicts --model: use only the option --model"),
        ("trainer.init_from=llama", "trainer.init_from=llama contradicts --model: use only the option --model"),
        ("data.seq_len=5", "data.seq_len=5 contradicts --seq-len: use only the option --seq-len"),
        ("trainer.precision=fp32", "trainer.precision=fp32 is impossible: predictions are for bf16 .*; leave it out"),
        ("data.mask_documents=true", "data.mask_documents=true is impossible: .*"),
        ("trainer.tokens_per_step=5", "no mesh of 3 GPUs has these settings: use .*trainer.tokens_per_step"),
    ],
)
def test_an_impossible_mesh_is_reported_in_one_line(setting, error, capsys):
    with pytest.raises(SystemExit) as raised:
        plan_training.main(["--model", "52m", "--seq-len", "8192", "--gpus", "3", "4", setting])
    assert re.fullmatch(f"error: {error}", raised.value.code)
    assert not capsys.readouterr().out


def test_fp8_requires_a_gpu_with_fp8_products(capsys):
    arguments = ["--model", "52m", "--seq-len", "8192", "--gpus", "1", "trainer.float8=true", "--gpu"]
    for gpu in ("h100", "b200"):
        plan_training.main([*arguments, gpu])
        assert lines(capsys.readouterr().out, "mesh")
    with pytest.raises(SystemExit, match=r"^error: trainer.float8=true is impossible on NVIDIA A100-SXM4-80GB: choose"):
        plan_training.main([*arguments, "a100"])


@pytest.mark.parametrize("setting", ["memory.optimizer=[1", "memory.optimizer=host", "trainer.step=1", "data.seq_len=x"])
def test_a_malformed_setting_is_reported_in_one_line(setting):
    with pytest.raises(SystemExit) as raised:
        plan_training.main(["--seq-len", "8192", setting])
    assert re.fullmatch(r"error: .*" + re.escape(setting.split("=")[0]) + ".*", raised.value.code)


def test_the_memory_of_cuda_graphs_is_counted():
    """A run of this length with CUDA graphs had a peak of 11.64 GiB of GPU memory (tests/train/parallel/test_graphs.py)."""
    cluster, mesh = Cluster("h200", 2, 8, None), ["trainer.batch_size=1", "parallel.ring=2", "parallel.ulysses=1"]
    peaks = []
    for setting in ("null", "false"):
        text = report(compose("124m", 65_536, [*mesh, f"trainer.cuda_graphs={setting}"]), cluster)
        (memory,) = lines(text, "GPU memory")
        peaks.append(float(memory.split()[0]))
        assert ("CUDA graphs" in memory) == (setting == "null")
    assert peaks[0] == pytest.approx(11.64, rel=0.1)
    assert peaks[1] < peaks[0]


def test_only_meshes_with_the_wanted_cuda_graphs_are_planned(capsys):
    """Two ranks would have shards of different lengths, and the blocks of larger models are too large."""
    text = report(compose("124m", 16_385, ["trainer.cuda_graphs=true"]), Cluster("h200", 2, 8, None))
    assert [mesh.split(" (")[0] for mesh in lines(text, "mesh")] == ["2 data-parallel ranks with one sequence each"]
    plan_training.main(["--model", "8b", "--seq-len", "16384", "--gpus", "8", "trainer.cuda_graphs=true"])
    assert re.search(r"^8 GPUs\n  trainer\.cuda_graphs=true requires .*change these settings\n$", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_no_proposal_permits_the_wanted_cuda_graphs():
    """The script predicts the memory of many clusters and lengths, which takes ten seconds."""
    text = report(compose("8b", 2**20, ["trainer.cuda_graphs=true"]), Cluster("h200", 1, 8, None))
    assert re.fullmatch(r"1 GPU\n  does not fit.* none of more GPUs, a shorter length or larger hosts", text.strip())


def test_the_fastest_mesh_with_one_sequence_is_also_printed():
    text = report(compose("52m", 32_768, []), Cluster("h200", 2, 8, None))
    assert [mesh.split(", ")[1] for mesh in lines(text, "mesh")] == ["2 sequences per step", "1 sequence per step"]


@pytest.mark.slow
def test_if_nothing_fits_the_script_says_what_would():
    config = compose("8b", 1_048_576, [])
    text = report(config, Cluster("h200", 1, 8, None))
    gpus, length, host = re.search(r"would fit: (\d+) GPUs; ([\d,]+) tokens; hosts with ([\d,]+) GiB", text).groups()
    fitting = [
        (config, Cluster("h200", int(gpus), 8, None)),
        (compose("8b", int(length.replace(",", "")), []), Cluster("h200", 1, 8, None)),
        (config, Cluster("h200", 1, 8, float(host.replace(",", "")))),
    ]
    assert all("s exposed" in report(*each) for each in fitting)


def test_bisection_finds_the_first_value():
    assert [first(list(range(10)), lambda n, limit=limit: n >= limit) for limit in (0, 4, 9, 10)] == [0, 4, 9, None]


def test_the_memory_of_a_host_is_positive(capsys):
    for size in ("0", "-1", "nan"):
        with pytest.raises(SystemExit):
            plan_training.main(["--model", "52m", "--seq-len", "8192", "--host-gib", size])
        assert "must be greater than 0" in capsys.readouterr().err
