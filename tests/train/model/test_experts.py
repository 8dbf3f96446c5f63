"""Experts compute what a loop over all tokens computes, forward and every gradient. The balance loss equals Hugging Face's."""

import pytest
import torch
import torch.nn.functional as F

from ringattn.train.model.experts import Experts, activate, balance_loss
from ringattn.train.settings.config import ModelConfig
from tests.train.hub_models import in_float64

SHAPES = {
    "qwen": dict(experts=6, experts_per_token=3, normalise_top_k=False),
    "mixtral": dict(experts=4, experts_per_token=2),
    "gpt-oss": dict(experts=5, experts_per_token=2, expert_bias=True, activation="clamped"),
    "one per token": dict(experts=3, experts_per_token=1, normalise_top_k=False, activation="gelu"),
}


def build(dtype=torch.float64, device="cpu", **settings) -> Experts:
    config = ModelConfig(**{"layers": 1, "dim": 16, "heads": 4, "kv_heads": 2, "ffn_dim": 24} | settings)
    experts, generator = Experts(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.7, generator=generator)
    return experts.to(device, dtype)


def inputs(tokens: int = 40, dim: int = 16) -> torch.Tensor:
    return 2 * torch.randn(2, tokens // 2, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Compute each token separately, with all experts."""
    config, rows = experts.config, []
    for token in x.flatten(0, 1):
        logits = experts.router(token)
        chosen = logits.topk(config.experts_per_token).indices
        weights = logits.softmax(0)[chosen]
        if config.normalise_top_k:
            weights = weights / weights.sum()
        outputs = []
        for e in chosen.tolist():
            gate, up = experts.gate[e] @ token, experts.up[e] @ token
            if config.expert_bias:
                gate, up = gate + experts.gate_bias[e], up + experts.up_bias[e]
            out = experts.down[e] @ activate(gate, up, config.activation)
            outputs.append(out + experts.down_bias[e] if config.expert_bias else out)
        rows.append(weights @ torch.stack(outputs))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(shape):
    experts, x = build(**SHAPES[shape]), inputs().requires_grad_()
    dout = torch.randn_like(x)
    with in_float64():
        out, routing = experts(x)
    reference = expected(experts, x)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    assert routing[0].sum() == 40 * experts.config.experts_per_token
    torch.testing.assert_close(routing[1], experts.router(x).softmax(-1).sum((0, 1)))
    leaves = [x, *experts.parameters()]
    gradients, wanted = (torch.autograd.grad(y, leaves, dout) for y in (out, reference))
    for gradient, want in zip(gradients, wanted, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-10)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    experts = build(experts=3, experts_per_token=1, expert_bias=True)
    with torch.no_grad():
        experts.router.bias[1] = -1e9
    out, routing = experts(inputs())
    assert routing[0, 1] == 0
    for parameter in (experts.gate, experts.down, experts.up_bias):
        (gradient,) = torch.autograd.grad(out.sum(), parameter, retain_graph=True)
        assert not gradient[1].any()
        assert gradient[0].any()


def test_a_rank_without_tokens_has_an_empty_output():
    experts, x = build(experts=3), inputs()[:, :0].requires_grad_()
    out, routing = experts(x)
    assert out.shape == x.shape
    assert not routing.any()
    out.sum().backward()
    assert not experts.gate.grad.any()


def test_the_clamped_activation_is_that_of_gpt_oss():
    transformers = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    gate_up = 9 * torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    config = transformers.GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=2)
    wanted = transformers.GptOssExperts(config)._apply_gate(gate_up)
    torch.testing.assert_close(activate(gate_up[:, ::2], gate_up[:, 1::2], "clamped"), wanted)


def test_the_balance_loss_is_that_of_transformers():
    """The mean over the layers, because transformers counts the tokens of all layers together."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    experts, x = build(experts=4, experts_per_token=2), inputs()
    with in_float64():
        routing = torch.stack([experts(x)[1], experts(x.square())[1]])
    logits = [experts.router(y).flatten(0, 1) for y in (x, x.square())]
    wanted = sum(mixtral.load_balancing_loss_func((each,), 4, 2) for each in logits) / 2
    torch.testing.assert_close(balance_loss(routing, routing[:, 0], 2), wanted, rtol=1e-6, atol=0, check_dtype=False)
    balanced = torch.full((3, 2, 4), 10.0)
    balanced[:, 0] = 20
    assert balance_loss(balanced, balanced[:, 0], 2) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bf16_on_a_gpu_is_as_accurate_as_a_loop(shape, compiled):
    """Some experts have no token, or a number of tokens that is not a multiple of 8."""
    settings = dict(dim=64, ffn_dim=96) | SHAPES[shape]
    exact, x = build(**settings).cuda(), inputs(300, 64).cuda().requires_grad_()
    with torch.no_grad():
        for parameter in (*exact.parameters(), x):
            parameter.copy_(parameter.bfloat16())
        if exact.router.bias is not None:
            exact.router.bias[1] = -1e9
    fast = build(torch.bfloat16, "cuda", **settings)
    fast.load_state_dict(exact.state_dict())
    y = x.detach().bfloat16().requires_grad_()
    # The choice of experts must be the same, so the router computes in fp64.
    fast.router.double()
    fast.router.forward = lambda tokens: F.linear(tokens.double(), fast.router.weight, fast.router.bias)
    out, routing = (torch.compile(fast) if compiled else fast)(y)
    with in_float64():
        want, want_routing = exact(x)
    assert torch.equal(routing[0].long(), want_routing[0].long())
    # Rounding moves some elements across the limit of "clamped", where its gradient is not continuous. How much their gradients
    # weigh depends on dout, so dout is the same in every run.
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    names = ["x", *dict(exact.named_parameters())]
    results = [out, *torch.autograd.grad(out, [y, *fast.parameters()], dout)]
    wanted = [want, *torch.autograd.grad(want, [x, *exact.parameters()], dout.double())]
    for name, result, each in zip(["out", *names], results, wanted, strict=True):
        error = (result.double() - each).norm() / each.norm()
        assert error < (0.06 if SHAPES[shape].get("activation") == "clamped" else 0.02), (name, error)
