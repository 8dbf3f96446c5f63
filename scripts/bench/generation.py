"""Compare the speed of generation after a long context between ringattn and `generate` of Hugging Face transformers.

The command `scripts.bench.decode --model NAME` calls this module. All weights, keys and values are random, and nothing is
downloaded. The caches are filled directly, without a prompt. Both implementations select the most likely token, and copy every
token to the host before the next step.
"""

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn import Layout
from ringattn.train.inference.layer_cache import new_cache, prefill
from ringattn.train.inference.token_step import TokenStep
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.settings.config import ModelConfig

WARM_UP = 8  # the first tokens are not timed, because transformers compiles the model while it generates them


class Speed(NamedTuple):
    """The median time per token, and the bytes that the GPU reads per token."""

    ms_per_token: float
    bytes: int

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / self.ms_per_token

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.ms_per_token * 1e-6


def random_keys(config: ModelConfig, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return keys and values (1, context, Hkv, D) of one layer."""
    shape = 1, context, config.kv_heads, config.resolved_head_dim
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    return k, v


def bytes_per_token(config: ModelConfig, context: int, parameters: int) -> int:
    """Return the bytes of weights, keys and values that the GPU reads per token. A decoding step reads only one row of the
    embedding.
    """
    rows = sum(min(window or context, context) for window in config.windows)
    kv = 2 * rows * config.kv_heads * config.resolved_head_dim
    embedding = 0 if config.tie_embeddings else padded_vocabulary(config, 0) * config.dim
    return 2 * (kv + parameters - embedding)


def speed_of(times: list[float], config: ModelConfig, context: int, parameters: int) -> Speed:
    """Compute the speed from the times (in seconds) at which the tokens reached the host."""
    steps = [after - before for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    return Speed(statistics.median(steps) * 1e3, bytes_per_token(config, context, parameters))


@torch.no_grad()
def time_ringattn(config: ModelConfig, context: int, num_tokens: int, device: torch.device) -> Speed:
    """Time `TokenStep`, which `train/generate.py` uses. On a GPU, every token is one replay of a CUDA graph."""
    total = context + WARM_UP + num_tokens
    with device:
        model = GPT(config, 0).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    caches = [new_cache(window, total) for window in config.windows]
    k, v = random_keys(config, context, device)
    for cache in caches:
        prefill(cache, k, v, Layout.contiguous(context, 1), None)
    step = TokenStep(model, caches, lambda hidden, head: hidden[0, -1:] @ head.T, "auto")
    if device.type == "cuda":
        step.capture(context)
    token = 0
    times: list[float] = []
    for position in range(context, total):
        token = int(step(token, position).argmax())
        times.append(time.perf_counter())
    return speed_of(times, config, context, sum(x.numel() for x in model.parameters()))


class Clock:
    """A streamer for `generate` of transformers."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        if tokens.numel() == 1:  # the first call passes the prompt
            self.times.append(time.perf_counter())

    def end(self) -> None: ...


@torch.no_grad()
def time_transformers(config: ModelConfig, context: int, num_tokens: int, device: torch.device, compiled: bool) -> Speed:
    """Time `generate` with SDPA and a static cache, for a Llama of the same size. With `compiled`, transformers compiles the
    model.
    """
    import transformers

    total = context + WARM_UP + num_tokens
    settings = transformers.LlamaConfig(
        vocab_size=padded_vocabulary(config, 0), hidden_size=config.dim, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.resolved_head_dim,
        intermediate_size=config.resolved_ffn_dim, tie_word_embeddings=config.tie_embeddings, max_position_embeddings=total,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with device:
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=total)
    # The call of `generate` processes the last token of the prompt.
    k, v = (x.transpose(1, 2) for x in random_keys(config, context - 1, device))
    for layer in range(config.layers):
        cache.update(k, v, layer)
    clock, prompt = Clock(), torch.zeros(1, context, dtype=torch.int64, device=device)
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, streamer=clock, do_sample=False,
        max_new_tokens=WARM_UP + num_tokens, disable_compile=not compiled,
    )  # fmt: skip
    return speed_of(clock.times, config, context, sum(x.numel() for x in model.parameters()))


def measure(config: ModelConfig, context: int, num_tokens: int, device: torch.device) -> dict[str, Speed | str]:
    """Return the speed of each implementation, or the error with which it failed.

    Args:
        context: the number of tokens in the caches before the first new token.
    """
    variants = {
        "ringattn": lambda: time_ringattn(config, context, num_tokens, device),
        "transformers": lambda: time_transformers(config, context, num_tokens, device, compiled=False),
        "transformers, compiled": lambda: time_transformers(config, context, num_tokens, device, compiled=True),
    }
    results: dict[str, Speed | str] = {}
    for name, run in variants.items():
        try:
            results[name] = run()
        except Exception as error:  # transformers raises exceptions of any type
            results[name] = f"{type(error).__name__}: {str(error)[:200]}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results
