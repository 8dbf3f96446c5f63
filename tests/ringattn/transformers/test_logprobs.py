"""Log-probabilities in chunks and on a ring equal those from all logits, and so do the gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed import RankPool
from tests.ringattn.transformers.small_models import new_model, packed_rows, padded_rows, random_tokens

pytest.importorskip("transformers")


def shard_parameters(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Like accelerate, shard the parameters, and free those of the output layer after the forward pass."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def mask_of_documents(batch: dict) -> torch.Tensor:
    """Return which keys each query sees, bool (B, 1, S, S). Padding sees no key."""
    document = (batch["position_ids"].diff(dim=1, prepend=batch["position_ids"][:, :1] - 1) != 1).cumsum(1)
    is_same = document[:, None, :, None] == document[:, None, None, :]
    return (is_same & (batch["attention_mask"] == 1)[:, None, None, :]).tril()


def compare(
    batch: dict, mesh: DeviceMesh | None, chunk: int | None, is_sharded: bool = False, kind: str = "qwen3", **settings: object
) -> None:
    """Compare with a Hugging Face model in one process, in float64, for a loss that depends on every token."""
    from ringattn.transformers import put_on_ring, token_logprobs

    model = new_model(kind, dtype=torch.float64, attention="sdpa", **settings)
    reference = copy.deepcopy(model)
    put_on_ring(model, mesh)
    if is_sharded:
        shard_parameters(model, mesh)
    found = token_logprobs(model, batch, chunk)
    tokens = batch["input_ids"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if {"attention_mask", "position_ids"} <= batch.keys():
        inputs["attention_mask"] = mask_of_documents(batch)  # transformers would ignore the documents
    logits = reference(**inputs, use_cache=False).logits
    labels = batch.get("labels", tokens)[:, 1:]
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.nn.functional.pad(logprobs.masked_fill(labels == -100, 0), (0, 1))
    torch.testing.assert_close(found, expected)
    weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for logprobs in (found, expected):
        (weights * logprobs.exp()).sum().backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if is_sharded:
            gradient = gradient.full_tensor()
        elif mesh is not None:
            dist.all_reduce(gradient)
            gradient /= mesh.size()  # as DDP and FSDP average
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, msg=name)


def batches() -> dict[str, dict]:
    def collate(rows: list[dict]) -> dict:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    left, packed = collate(padded_rows(3, "left")), collate(packed_rows(2))
    mask = (torch.arange(63) >= 10).long().expand(2, -1)
    tokens = packed["input_ids"]
    return {
        "whole": {"input_ids": random_tokens(2, 37)},
        "packed": packed,
        "padded": collate(padded_rows(3, "right")),
        "padded on the left": left,
        # Padding predicts the first token, and a document begins after 23 tokens.
        "packed and padded": {**packed, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)},
    }


@pytest.mark.parametrize("name", batches())
@pytest.mark.parametrize("chunk", [5, None])
def test_one_process(name: str, chunk: int | None) -> None:
    compare(batches()[name], None, chunk)


def check_ring() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for batch in batches().values():
        compare(batch, mesh, 7)
    compare(batches()["packed"], mesh, 7, is_sharded=True)
    # The last of 37 positions determines the rotary frequencies, but one of the ranks has no position above 27.
    longrope = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    scaling = {"rope_theta": 100.0, "original_max_position_embeddings": 30}
    for kind, rope in (("phi3", {"rope_type": "longrope"} | longrope), ("llama", {"rope_type": "dynamic", "factor": 2.0})):
        settings = dict(head_dim=8, rope_parameters=rope | scaling, max_position_embeddings=60 if kind == "phi3" else 30)
        compare(batches()["whole"], mesh, 7, kind=kind, **settings)


def test_a_ring(ranks: RankPool) -> None:
    ranks.run(check_ring)


def test_without_labels_every_token_of_a_document_has_one() -> None:
    from ringattn.transformers import put_on_ring, token_logprobs

    model = new_model()
    put_on_ring(model, None)
    batch = {"input_ids": random_tokens(2, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0], [1] * 6])}
    batch["position_ids"] = torch.tensor([[1, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]])
    assert (token_logprobs(model, batch) != 0).tolist() == [
        [False, False, True, True, False, False],
        [True, True, False, True, True, False],
    ]


def test_the_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.transformers import put_on_ring, token_logprobs

    model = new_model()
    put_on_ring(model, None)
    sizes = []
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    logprobs = token_logprobs(model, {"input_ids": random_tokens(2, 10)}, 8)
    assert sizes == [8, 8, 4]
    logprobs.sum().backward()
    assert sorted(sizes) == [4, 4, 8, 8, 8, 8]  # the backward pass recomputes them


def test_changed_logits_are_an_error() -> None:
    from ringattn.transformers import put_on_ring, token_logprobs

    model = new_model("granite", logits_scaling=2.0)
    put_on_ring(model, None)
    with pytest.raises(ValueError, match="GraniteForCausalLM changes the logits after its output layer"):
        token_logprobs(model, {"input_ids": random_tokens(2, 10)})


def test_arguments_that_cannot_be_honoured_are_errors() -> None:
    from ringattn.transformers import put_on_ring, token_logprobs

    model = new_model()
    put_on_ring(model, None)
    with pytest.raises(ValueError, match="chunk=0: it must be an integer of at least 1"):
        token_logprobs(model, {"input_ids": random_tokens(2, 10)}, 0)
    with pytest.raises(ValueError, match="contains neither labels nor input_ids"):
        token_logprobs(model, {"inputs_embeds": torch.zeros(2, 10, 32)})
