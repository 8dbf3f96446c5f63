"""Predictions of steps: how close they are to measured times, the mesh that they choose, and the line before training."""

import pytest
import torch
from omegaconf import OmegaConf

from ringattn.train.commands.run import CONFIGS
from ringattn.train.parallel import prediction, timing
from ringattn.train.parallel.memory.capacity import GIB, Capacity, InsufficientMemory
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import (
    Config,
    ConfigError,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    TrainerConfig,
    with_settings,
)

# The names of the GPUs, and their memory in GiB.
GPUS = {"H100": ("NVIDIA H100 80GB HBM3", 79.2), "H200": ("NVIDIA H200", 139.8)}


@pytest.fixture
def machine(monkeypatch):
    """A function that returns some of these GPUs, which this machine does not have."""

    def build(gpu: str, ranks: int, ranks_per_host: int = 8, host_gib: float = 0) -> timing.Machine:
        name, gib = GPUS[gpu]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        device = torch.device("cuda", 0)
        return timing.Machine(
            device, timing.Gpu.of(device), ranks, ranks_per_host, 257, True, True, Capacity(gib * GIB, host_gib * GIB)
        )

    return build


def job(model: str, seq_len: int, tokens_per_step: int | None = None, activations: str = "auto") -> Config:
    """The settings of a run with one sequence per data-parallel rank."""
    return Config(
        model=ModelConfig(**OmegaConf.load(CONFIGS / "model" / f"{model}.yaml")),
        data=DataConfig(seq_len=seq_len),
        memory=MemoryConfig(activations),
        trainer=TrainerConfig(batch_size=1, tokens_per_step=tokens_per_step),
    )


@pytest.mark.parametrize(
    ("gpu", "model", "seq_len", "shape", "options", "share", "seconds"),
    [
        # The default model. The shares are the means of its text, of single sequences and of the busiest of four.
        ("H200", "52m", 32_768, (1, 1, 1), {}, 0.65, 0.058),
        ("H200", "52m", 32_768, (1, 1, 1), {}, 1, 0.076),
        ("H200", "52m", 32_768, (4, 1, 1), {}, 0.92, 0.074),
        # One document per package. The share follows from the time of one GPU.
        ("H200", "52m", 32_768, (1, 1, 1), {}, 0.767, 0.0661),
        ("H200", "52m", 32_768, (1, 2, 1), {}, 0.767, 0.0393),
        # One document per sequence.
        ("H200", "1.4b", 32_768, (1, 2, 1), {}, 1, 0.617),
        ("H200", "1.4b", 65_536, (1, 2, 1), {}, 1, 1.750),
        ("H200", "1.4b", 131_072, (1, 2, 1), {}, 1, 5.852),
        ("H200", "1.4b", 131_072, (1, 4, 1), {}, 1, 2.97),
        ("H100", "8b", 32_768, (1, 4, 1), {"activations": "recompute"}, 1, 1.384),
        ("H100", "8b", 131_072, (1, 4, 1), {"activations": "recompute"}, 1, 9.97),
    ],
)
def test_predictions_are_close_to_measured_times(gpu, model, seq_len, shape, options, share, seconds, machine):
    shape = MeshShape(*shape)
    predicted = prediction.predict(job(model, seq_len, **options), shape, machine(gpu, shape.ranks), {None: share}).seconds
    assert predicted == pytest.approx(seconds, rel=0.1)


def test_micro_steps_determine_the_time(machine):
    """Two sequences per step on one rank take twice as long as one, except for the time per step."""
    gpus = machine("H200", 1)
    one, two = (prediction.predict(job("124m", 65_536, n * 65_536), MeshShape(1, 1, 1), gpus).seconds for n in (1, 2))
    assert 1.9 * one < two < 2 * one


@pytest.mark.parametrize(("ring", "steps_of_passes"), [(1, 1), (4, 13)])
def test_the_host_determines_the_time_of_a_short_step(ring, steps_of_passes, machine):
    """The host needs time for every block and for every step of a ring pass."""
    config = job("tiny", 1024)
    config = with_settings(config, {"trainer.cuda_graphs": False})
    block = timing.HOST_BLOCK + steps_of_passes * timing.HOST_HOP
    expected = timing.HOST_STEP + timing.HOST_GROUP + config.model.layers * block
    predicted = prediction.predict(config, MeshShape(1, ring, 1), machine("H200", ring)).seconds
    assert predicted == pytest.approx(expected, rel=1e-3)


def test_attention_of_all_layers_is_predicted(machine):
    """Half of the layers have a window. Documents halve the pairs of full layers, and do not change those of window layers."""
    gpus, config = machine("H200", 2), with_settings(job("1.4b", 131_072), {"model.window": 4096})
    mixed = with_settings(config, {"model.layer_types": ["sliding", "full"]})
    full = with_settings(config, {"model.layer_types": ["full"]})

    def attention(config: Config, shares: prediction.Shares) -> float:
        seconds = prediction.predict(config, MeshShape(1, 2, 1), gpus, shares).seconds
        return seconds - prediction.predict(config, MeshShape(1, 2, 1), gpus, {None: 0.0, 4096: 0.0}).seconds

    of_full, of_sliding = attention(full, {}), attention(config, {})
    assert 5 * of_sliding < of_full
    # The layout that balances both kinds of layers splits the work of a window less well.
    assert attention(mixed, {}) == pytest.approx((of_full + of_sliding) / 2, rel=0.02)
    expected = (of_full / 2 / prediction.DOCUMENT_EFFICIENCY + of_sliding) / 2
    assert attention(mixed, {None: 0.5, 4096: 1.0}) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_rank_updates_its_shard_of_the_parameters(ranks, machine):
    """A step of two micro-steps updates its 1.44 billion fp32 parameters only once."""
    gpus = machine("H200", ranks)
    config = job("1.4b", 16_384)
    seconds = []
    for accumulate in (1, 2):
        config = with_settings(config, {"trainer.accumulate": accumulate})
        seconds.append(prediction.predict(config, MeshShape(1, ranks, 1), gpus).seconds - timing.HOST_STEP)
    assert 2 * seconds[0] - seconds[1] == pytest.approx(40 * 1.44e9 / ranks / (0.7 * 4.8e12), rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "ranks", "per_host", "model", "seq_len", "sequences", "dp"),
    [
        pytest.param("H200", 4, 8, "52m", 32_768, 4, 4, id="a sequence per rank"),
        pytest.param("H200", 4, 8, "52m", 32_768, 2, 2, id="fewer sequences than ranks"),
        pytest.param("H200", 4, 8, "52m", 32_768, 6, 2, id="dp divides the sequences"),
        pytest.param("H200", 4, 8, "52m", 32_768, 1, 1, id="one sequence"),
        pytest.param("H100", 4, 8, "8b", 131_072, 4, 2, id="a sequence per rank does not fit"),
        pytest.param("H100", 8, 8, "8b", 131_072, 4, 1, id="longer rings recompute fewer blocks"),
        pytest.param("H200", 8, 4, "1.4b", 131_072, 2, 2, id="a sequence stays within a host"),
    ],
)
def test_fastest_mesh(gpu, ranks, per_host, model, seq_len, sequences, dp, machine):
    config, gpus = job(model, seq_len, sequences * seq_len), machine(gpu, ranks, per_host)
    shape = prediction.fastest_shape(config, gpus)
    assert (shape.dp, shape.ranks) == (dp, ranks)
    for other in prediction.possible_shapes(config, ranks):
        if gpus.capacity.fits(choose_plan(config, other, gpus)[1]):
            speed, highest = (prediction.tokens_per_second(config, each, gpus) for each in (shape, other))
            assert highest <= prediction.EQUAL_TIMES * speed


def test_the_fastest_mesh_fits(machine):
    """Without attention that runs again, four data-parallel ranks would be the fastest, but do not fit."""
    config, gpus = job("8b", 131_072, 4 * 131_072, "recompute"), machine("H100", 4)
    shape, fastest = prediction.fastest_shape(config, gpus), MeshShape(4, 1, 1)
    assert gpus.capacity.fits(choose_plan(config, shape, gpus)[1])
    assert prediction.tokens_per_second(config, fastest, gpus) > prediction.tokens_per_second(config, shape, gpus)


def test_graphs_of_a_run_do_not_reject_other_meshes(machine):
    """A mesh that needs recomputation cannot use graphs, but the run's own mesh can."""
    config = job("350m", 131_072)
    config = with_settings(config, {"trainer.cuda_graphs": True})
    gpus = machine("H100", 4)
    shapes = MeshShape(1, 4, 1), MeshShape(4, 1, 1)
    assert [choose_plan(config, shape, gpus)[0].recomputed_blocks > 0 for shape in shapes] == [False, True]
    assert all(prediction.predict(config, shape, gpus).seconds > 0 for shape in shapes)


def test_no_mesh_fits(machine):
    with pytest.raises(InsufficientMemory, match="each rank would need about"):
        prediction.fastest_shape(job("8b", 131_072, 131_072), machine("H100", 1))


@pytest.mark.parametrize(
    ("tokens", "ranks", "message"),
    [
        (None, 4, "parallel=fastest requires trainer.tokens_per_step.*multiple of 1000"),
        (1500, 4, r"tokens_per_step=1500, which must be a multiple of 1000 \(data.seq_len=1000 x trainer.batch_size=1\)"),
        (3000, 128, "no mesh of 128 ranks can have trainer.tokens_per_step=3000, which must"),
    ],
)
def test_tokens_per_step_must_suit_a_mesh(tokens, ranks, message, machine):
    with pytest.raises(ConfigError, match=message) as error:
        prediction.fastest_shape(job("52m", 1000, tokens), machine("H200", ranks))
    assert "\n" not in str(error.value)


def test_meshes_suit_the_heads_and_the_length(machine):
    config = job("52m", 3)
    assert {shape.ulysses for shape in prediction.possible_shapes(config, 6)} == {1, 2}, "three does not divide eight heads"
    assert {shape.sequence for shape in prediction.possible_shapes(config, 6)} == {1, 2, 3}
    assert {shape.sequence for shape in prediction.possible_shapes(config, 2**40)} == {1, 2}, "a huge number takes no time"


def test_line_before_training(machine, monkeypatch):
    """The line names the fastest meshes with the same number of sequences per step and with another."""
    times = {(1, 4, 1): 0.5, (1, 1, 4): 0.4, (1, 2, 2): 0.45, (2, 2, 1): 0.6, (2, 1, 2): 0.7, (4, 1, 1): 0.51}
    monkeypatch.setattr(prediction, "predict", lambda config, shape, *rest: timing.StepTime(times[shape], 0.01))
    config, gpus = job("52m", 32_768), machine("H200", 4)
    assert prediction.describe_step(config, MeshShape(1, 4, 1), gpus, {}) == (
        "about 0.5 s per step (0.01 s exposed), 66,000 tokens/s, MFU 2%; "
        "Ulysses over 4 (parallel.ring=4 parallel.ulysses=4): about 1.2 times the tokens/s; "
        "4 data-parallel ranks with one sequence each (parallel.ring=1): about 3.9 times the tokens/s, 4 sequences per step"
    )
    assert prediction.describe_step(config, MeshShape(4, 1, 1), gpus, {}) == (
        "about 0.51 s per step (0.01 s exposed), 260,000 tokens/s, MFU 7%; "
        "no other mesh of these GPUs is predicted to be faster"
    )


def test_line_leaves_out_meshes_that_do_not_fit(machine, monkeypatch):
    """If all steps took as long, four data-parallel ranks would be the fastest mesh."""
    monkeypatch.setattr(prediction, "predict", lambda *arguments: timing.StepTime(1.0, 0.0))
    line = prediction.describe_step(job("8b", 131_072, None, "recompute"), MeshShape(1, 4, 1), machine("H100", 4), {})
    assert line.endswith(
        "; 2 data-parallel groups, each ring of 2 (parallel.ring=2): about 2 times the tokens/s, 2 sequences per step"
    )


def test_unknown_devices_have_no_prediction(monkeypatch):
    assert timing.Gpu.of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert timing.Gpu.of(torch.device("cuda", 0)) is None
