"""Sample text from a trained model."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringattn import KVCache, Layout, Mask, ring_attention
from ringattn.train import preemption
from ringattn.train.data.records import RecordDataset
from ringattn.train.files import write_atomically
from ringattn.train.inference.layer_cache import decode, new_cache, places, prefill
from ringattn.train.inference.token_step import TokenStep, copy_for_one_rank
from ringattn.train.model.gpt import Attend
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import ConfigError
from ringattn.train.setup import InferenceRun, Run
from ringattn.train.step import check_finite

log = logging.getLogger(__name__)

# The default length of a prompt from held-out text, in tokens
PROMPT_TOKENS = 256


def write_sample(run: Run, directory: Path, wandb_run: WandbRun | None = None) -> None:
    """Write the prompt and a generated continuation to sample.txt, unless `trainer.sample_tokens` is 0.

    After a stop signal, the next launch generates the text, because torchrun waits only 30 s for a rank to exit.
    """
    trainer = run.config.trainer
    if trainer.sample_tokens == 0 or preemption.any_rank_stop_requested(None):
        return
    adds_bos = True
    if trainer.sample_prompt is None and isinstance(run.held_out, RecordDataset):
        prompt, adds_bos = run.held_out.beginning(PROMPT_TOKENS), False
    elif trainer.sample_prompt is None and run.held_out:
        prompt = [token for token in run.held_out.beginning(PROMPT_TOKENS) if token != run.tokenizer.eos]
    else:
        prompt = run.tokenizer.encode("def " if trainer.sample_prompt is None else trainer.sample_prompt).tolist()
    tokens = generate(run, prompt, trainer.sample_tokens, temperature=0.8, top_p=0.95, adds_bos=adds_bos)
    if dist.get_rank() == 0:
        text = run.tokenizer.decode(tokens)
        log.info(f"sample      the first {len(prompt)} tokens are the prompt:\n{text}")
        write_atomically(directory / "sample.txt", text.encode())
        if wandb_run is not None:
            parts = run.tokenizer.decode(tokens[: len(prompt)]), run.tokenizer.decode(tokens[len(prompt) :])
            wandb_run.log_table("samples", trainer.steps, ["step", "prompt", "text"], [[trainer.steps, *parts]])


# Compiling for the prompt and for single tokens would take longer than the generation.
@torch.compiler.set_stance("force_eager")
def generate(run: InferenceRun, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """Return a prompt and a sampled continuation, without `eos`. Options as in `stream`. All ranks call this function."""
    return [*prompt, *stream(run, prompt, num_tokens, **options)]


@torch.no_grad()
def stream(
    run: InferenceRun,
    prompt: list[int],
    num_tokens: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    adds_bos: bool = True,
) -> Iterator[int]:
    """Sample a continuation of a prompt, and yield its tokens. All ranks iterate together and yield the same tokens.

    The prompt runs through the model once, sharded as in training, and `layer_cache` stores its keys and values. Then the model
    processes one new token at a time on all ranks. On one GPU, the model processes each new token by replaying a CUDA graph.

    Args:
        run: the run whose model generates the text.
        prompt: the token ids of the prompt.
        num_tokens: the number of tokens to generate, unless `eos` ends the text earlier.
        temperature: divides the logits before the softmax; 0 selects the most likely token.
        top_p: each token is sampled from the most likely tokens whose probabilities sum to at least `top_p`.
        seed: the seed of the sampling.
        adds_bos: whether the model reads one `bos` before the prompt, as in training on text.
    """
    model, tokenizer, group = run.model, run.tokenizer, run.mesh.sequence.get_group()
    ranks, rank = group.size(), group.rank()
    tokens = [tokenizer.bos] * adds_bos + prompt
    longest = len(tokens) + num_tokens
    if model.config.for_length(longest) != model.config:
        raise ConfigError(
            f"a text of {longest} tokens is longer than model.rope_trained_len={model.config.rope_trained_len}, but this model "
            "uses the divisors of LongRoPE for shorter texts: generate fewer tokens"
        )
    layout = Layout.contiguous(seq_len=len(tokens), ranks=ranks)
    options = dict(layout=layout, group=group, backend=run.config.parallel.kernel)
    options |= dict(precision=run.config.trainer.attention_precision(training=False))
    windows = model.config.windows
    caches = [new_cache(window, len(tokens) + num_tokens, rank, ranks) for window in windows]
    layers = zip(caches, windows, strict=True)
    attend: list[Attend] = [partial(_attend_to_prompt, cache=cache, window=window, **options) for cache, window in layers]
    inputs, positions = layout.shard(torch.tensor([tokens], device="cpu"), rank), layout.positions(rank)
    logits = model(inputs.to(run.device), positions.to(run.device), attend, _last_logits)
    generator = torch.Generator("cpu").manual_seed(seed)
    step = _captured_step(run, caches, len(tokens)) or partial(_eager_step, run, caches)
    for i in range(num_tokens):
        if i > 0:
            logits = step(tokens[-1], len(tokens) - 1)
        token = torch.zeros((), dtype=torch.int64, device="cpu")
        if rank == ranks - 1:
            token = _sample(logits[0, : tokenizer.vocab_size].float().cpu(), temperature, top_p, generator)
        dist.broadcast(token, group=group, group_src=ranks - 1)
        if token == tokenizer.eos:
            break
        tokens.append(int(token))
        yield tokens[-1]


def _eager_step(run: InferenceRun, caches: list[KVCache], token: int, position: int) -> Tensor:
    inputs, positions = (torch.tensor(x, device="cpu").to(run.device) for x in ([[token]], [position]))
    options = dict(group=run.mesh.sequence.get_group(), backend=run.config.parallel.kernel)
    place = places(caches, positions)
    attend = [
        partial(decode, cache=cache, window=window, place=place.get(cache.capacity) if cache.ranks == 1 else None, **options)
        for cache, window in zip(caches, run.model.config.windows, strict=True)
    ]
    return run.model(inputs, positions, attend, _last_logits)


def _captured_step(run: InferenceRun, caches: list[KVCache], position: int) -> TokenStep | None:
    """Capture a CUDA graph for one token. Return None if a graph is impossible or too large."""
    if run.device.type != "cuda" or dist.get_world_size() > 1 or run.kernel.backend not in ("hopper", "triton"):
        return None
    if run.config.model.experts is not None:
        return None  # On some GPUs, PyTorch's grouped matrix product waits for the host.
    model = copy_for_one_rank(run.model, torch.bfloat16 if run.bf16 else torch.float32, run.device)
    if model is None:
        return None
    step = TokenStep(model, caches, _last_logits, run.config.parallel.kernel)
    step.capture(position)
    return step


def _attend_to_prompt(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, window: int | None, layout: Layout, group: ProcessGroup, **options: Any
) -> Tensor:
    prefill(cache, k, v, layout, group)
    return cast("Tensor", ring_attention(q, k, v, layout=layout, mask=Mask.causal(window), group=group, **options))


def _last_logits(hidden: Tensor, head: Tensor) -> Tensor:
    return hidden[0, -1:] @ head.T


def _sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    check_finite(logits)
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial(_nucleus((logits / temperature).softmax(-1), top_p), 1, generator=generator)[0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set the probabilities outside the nucleus to 0 (Holtzman et al. 2020). The remaining probabilities do not change.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to at least `top_p`.
    """
    if top_p == 1:
        return probabilities
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    # A token is outside the nucleus if the probabilities of more likely tokens sum to at least `top_p`.
    outside = ordered.cumsum(0) - ordered >= top_p
    return probabilities.index_fill(0, tokens[outside], 0)
