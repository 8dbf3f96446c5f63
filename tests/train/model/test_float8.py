"""FP8 linear layers: their errors, their gradients, the names of their weights, and runs that switch them on and off."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ringattn.train import setup as run_setup
from ringattn.train.checkpoint import state_dict, storage
from ringattn.train.inference.losses import evaluate
from ringattn.train.model import float8
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import Config, ConfigError, ModelConfig, with_settings
from ringattn.train.trainer import save_checkpoint
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.test_fp8_attention import train

MODEL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, qkv_bias=True)

# The relative error of a product of two rounded matrices: e4m3 has 3 bits after the leading one, and e5m2 has 2.
FORWARD_ERROR, BACKWARD_ERROR = 0.06, 0.15


def build(converted: bool) -> GPT:
    model = GPT(MODEL, 64)
    for module in (model, *model.blocks):
        module.init_weights(torch.Generator().manual_seed(1))
    if converted:
        float8.convert(model)
    return model


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("tokens", [32, 37], ids=["a multiple of 16", "padded"])
def test_outputs_and_gradients_have_the_errors_of_fp8(tokens):
    """Compare every linear layer with the same layer in float64."""
    for layer, plain in zip(build(True).blocks[0].children(), build(False).blocks[0].double().children(), strict=True):
        inputs = torch.randn(2, tokens, layer.in_features, requires_grad=True)
        exact = inputs.detach().double().requires_grad_()
        out, expected = layer(inputs), plain(exact)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        expected.backward(gradient.double())
        assert 0.001 < relative_error(out, expected) < FORWARD_ERROR
        pairs = [(inputs, exact), *zip(layer.parameters(), plain.parameters(), strict=True)]
        errors = [relative_error(x.grad, y.grad) for x, y in pairs]
        assert max(errors) < BACKWARD_ERROR, errors
        assert min(errors[:2]) > 0.001, errors  # the bias has the exact gradient


def test_evaluation_does_not_use_fp8():
    model, plain = build(True), build(False)
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        assert torch.equal(model.blocks[1].gate(x), plain.blocks[1].gate(x))
    assert not torch.equal(model.blocks[1].gate(x), plain.blocks[1].gate(x))


def test_weights_keep_their_names_and_values():
    model, plain = build(True).state_dict(), build(False).state_dict()
    assert list(model) == list(plain)
    assert all(type(x) is type(plain[name]) and torch.equal(x, plain[name]) for name, x in model.items())


def test_experts_do_not_use_fp8():
    model = GPT(ModelConfig(layers=1, dim=32, heads=4, kv_heads=2, experts=8), 64)
    float8.convert(model)
    names = [name for name, layer in model.blocks[0].named_modules() if type(layer).__name__ == "Float8Linear"]
    assert names == ["query", "key", "value", "output"]
    assert type(model.blocks[0].experts.router) is nn.Linear


@pytest.mark.parametrize(
    ("capability", "bf16", "settings", "message"),
    [
        (None, True, {}, "8.9 or newer, but this rank has a CPU: use"),
        ((8, 0), True, {}, "8.9 or newer, but this rank has A100: use"),
        ((9, 0), False, {}, "requires bf16: set trainer.precision=bf16"),
        ((9, 0), True, {"model.dim": 40}, "multiples of 16, but model.dim is 40"),
        ((9, 0), True, {"model.heads": 1, "model.kv_heads": 1, "model.head_dim": 24}, "heads x head_dim is 24"),
        ((9, 0), True, {"model.kv_heads": 1, "model.head_dim": 8}, "kv_heads x head_dim is 8"),
        ((9, 0), True, {"model.ffn_dim": 72}, "model.ffn_dim is 72"),
        ((8, 9), True, {"model.ffn_dim": 72, "model.experts": 4}, None),
    ],
)
def test_machines_and_shapes_without_fp8_are_rejected(capability, bf16, settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    model = with_settings(Config(model=MODEL), settings).model
    arguments = model, torch.device("cuda" if capability else "cpu"), bf16
    if message is None:
        float8.check(*arguments)
        return
    with pytest.raises(ConfigError, match=message) as error:
        float8.check(*arguments)
    assert "or leave trainer.float8 out" in str(error.value)


def test_run_on_a_cpu_is_rejected(corpus):
    with one_rank(), pytest.raises(ConfigError, match="but this rank has a CPU"):
        run_setup.build(with_settings(job(corpus, 1), {"trainer.float8": True}))


def allow_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "check", lambda *arguments: None)


@pytest.mark.slow
def test_run_learns_as_without_fp8_and_resumes_without_it(corpus, tmp_path, monkeypatch):
    allow_cpus(monkeypatch)
    with one_rank():
        plain, run = (run_setup.build(with_settings(job(corpus, 1), {"trainer.float8": use})) for use in (False, True))
        assert evaluate(run) == evaluate(plain)
        expected, losses = train(plain, 2), train(run, 2)
        assert losses != expected
        assert losses == pytest.approx(expected, rel=0.005)
        save_checkpoint(run, tmp_path, 2, 8)
        state = state_dict.train_state(plain.model, plain.optimizer)
        storage.load(tmp_path / "checkpoints" / "step_00000002", state)
        assert evaluate(run) == evaluate(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [256, 250])
def test_compiled_blocks_have_the_errors_of_fp8_on_a_gpu(tokens):
    """Compare with the same compiled blocks in bf16. The gradients of the keys pass through several layers."""
    device, grads = torch.device("cuda", 0), {}
    inputs, angles = torch.randn(1, tokens, 256), torch.rand(tokens, 1, 32)
    for use in (False, True):
        model = GPT(ModelConfig(layers=1, dim=256, heads=4, kv_heads=2), 64)
        model.blocks[0].init_weights(torch.Generator().manual_seed(1))
        if use:
            float8.convert(model)
        block = model.blocks[0].to(device, torch.bfloat16)
        before, after = torch.compile(block.before), torch.compile(block.after)
        x = inputs.to(device, torch.bfloat16).requires_grad_()
        q, k, v = before(x, *(each.to(device) for each in (angles.cos(), angles.sin())))
        out, _ = after(x, q + (k + v).repeat_interleave(2, -2))
        out.backward(inputs.to(out))
        grads[use] = [out, x.grad, *(parameter.grad for parameter in block.parameters())]
    errors = [relative_error(x, y) for x, y in zip(grads[True], grads[False], strict=True)]
    assert 0.001 < max(errors) < 0.3, errors


def test_blocks_share_their_compiled_code():
    """torch.compile gives up if it compiles a function for more than eight blocks, and a step then takes 1.5 times as long."""
    model, angles = GPT(replace(MODEL, layers=10), 64), (torch.rand(24, 1, 4), torch.rand(24, 1, 4))
    float8.convert(model)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model.blocks:
            before, after = (torch.compile(x, backend="eager") for x in (block.before, block.after))
            q, _, _ = before(torch.randn(1, 24, 32, requires_grad=True), *angles)
            after(torch.randn(1, 24, 32, requires_grad=True), q)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same():
    block, x, angles = build(True).blocks[0], torch.randn(1, 24, 32), torch.rand(24, 1, 4)
    results = {}
    for name, before in (("eager", block.before), ("compiled", torch.compile(block.before, fullgraph=True))):
        block.zero_grad()
        outputs = before(x, angles.cos(), angles.sin())
        sum(each.square().sum() for each in outputs).backward()
        results[name] = [*outputs, block.query.weight.grad, block.value.weight.grad]
    for eager, compiled in zip(results["eager"], results["compiled"], strict=True):
        assert torch.allclose(eager, compiled, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_memory_settings_do_not_change_fp8(corpus, monkeypatch):
    """Chunks of tokens have scales of their own, so their losses differ slightly."""
    allow_cpus(monkeypatch)
    losses = {}
    with one_rank():
        for setting in ("activations=keep", "activations=recompute", "activations=offload", "optimizer=offload", "chunk=16"):
            name, value = setting.split("=")
            values = {"trainer.float8": True, f"memory.{name}": int(value) if value.isdecimal() else value}
            run = run_setup.build(with_settings(job(corpus, 1), values))
            losses[setting] = train(run, 3)
            run.loader.close()
    expected = losses.pop("activations=keep")
    assert losses["activations=recompute"] == losses["activations=offload"] == expected
    assert losses["optimizer=offload"] == pytest.approx(expected, rel=1e-5)
    assert losses["chunk=16"] == pytest.approx(expected, rel=0.005)
    assert losses["chunk=16"] != expected


@pytest.mark.slow
def test_ranks_use_fp8(corpus, tmp_path):
    run_ranks(check_ranks, 2, tmp_path / "store", corpus)


def check_ranks(corpus: str) -> None:
    allow_cpus(pytest.MonkeyPatch())
    config = with_settings(job(corpus, 1, ring=2), {"trainer.precision": "bf16"})
    plain, losses = (train(run_setup.build(with_settings(config, {"trainer.float8": use})), 3) for use in (False, True))
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.005)
