"""Code in the docs does what it says."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout, Mask, ring_attention
from tests.distributed import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "your-own-loop.md"
DOCUMENTS = [40, 35, 1, 25]


def train_as_the_page_says() -> None:
    """On a ring, with parameters sharded, one step is that of one process without either."""
    import transformers

    page: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], page)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=128, head_dim=16, **sizes))
    tokens = torch.randint(128, (1, sum(DOCUMENTS)))
    alone, losses = copy.deepcopy(model), []
    for document in tokens.split(DOCUMENTS, 1):
        logits = alone(document, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, document[0, 1:], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    page["put_on_ring"](model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    optimizers[1].step()
    assert page["train_step"](model, optimizers[0], tokens, DOCUMENTS, mesh) == pytest.approx(expected.item(), rel=1e-5)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", (2, 3), ids=lambda n: f"P{n}")
def test_a_model_of_transformers_trains_on_a_ring(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(train_as_the_page_says, ranks, tmp_path / "ranks")


def test_sinks_are_a_factor_of_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    sink = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    scores = torch.cat([scores, sink[None, :, None, None].expand(2, 3, 9, 1)], -1)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)
    out, lse = ring_attention(q, k, v, layout=Layout.contiguous(9, 1), mask=Mask.causal(), return_lse=True)
    found = out * torch.sigmoid(lse - sink)[..., None]
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v, sink)) for x in (found, expected))
    torch.testing.assert_close(*grads)
