"""Generate text with a trained model, and print the text while it is generated.

    python train/generate.py run=NAME prompt='def f('                      on one GPU, or on the CPU
    torchrun --nproc_per_node=N train/generate.py run=NAME prompt=...      on N ranks, which share the positions of the text

The command only reads the files of the run. The text is written to stdout and all messages are written to stderr. The settings
of the model come from its checkpoint, or from the config.json of its folder. Other settings can follow as group.key=value, for
example trainer.device=cpu, parallel.kernel=triton or model.rope_factor=4. train/config.py explains them. With
trainer.fp8_attention=inference, the prompt is processed with FP8 attention.
"""

import ctypes
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # The root of the repository replaces the folder of this script on the search path. train/run.py explains the reason.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent) if entry == str(folder) else entry for entry in sys.path]

if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # If torchrun dies, this process ends. train/run.py explains the call.

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import KVCache, Layout, Mask, decode_attention, ring_attention
from ringattn.train.config import ConfigError, check
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.errors import exit_process
from ringattn.train.inference import RUN_HELP, apply_overrides, find_model, option, parse, run_command
from ringattn.train.model.gpt import Attend
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.setup import InferenceRun, build_for_inference
from ringattn.train.token_step import TokenStep, copy_for_one_rank


@dataclass
class Options:
    """The options of this command."""

    run: str = option(RUN_HELP)
    prompt: str = option("The text to continue. If it is empty, the model begins a new document.", default="")
    tokens: int = option(
        "The largest number of tokens to generate. Generation stops earlier at the end-of-text token.", default=200
    )
    temperature: float = option(
        "Divides the logits before the softmax. A lower temperature makes likely tokens more likely. 0 selects the most likely "
        "token each time.",
        default=0.8,
    )
    top_p: float = option(
        "Each token is sampled from the most likely tokens whose probabilities sum to at least top_p. If "
        "top_p is 1, each token is sampled from all tokens.",
        default=0.95,
    )
    seed: int = option("The seed of the sampling. The same seed gives the same text.", default=0)

    def __post_init__(self) -> None:
        for name, bound, is_valid in (
            ("prompt", "UTF-8", self.prompt.encode(errors="replace").decode() == self.prompt),
            ("tokens", "at least 1", self.tokens >= 1),
            ("temperature", "at least 0 and finite", 0 <= self.temperature < math.inf),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("seed", "at least 0 and below 2**63", 0 <= self.seed < 2**63),
        ):
            if not is_valid:
                raise ConfigError(f"{name}={getattr(self, name)}: must be {bound}")


def main() -> NoReturn:
    """Run the command line and exit. This function is the entry point of `ringattn-generate`."""
    exit_process(run_command(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    """Load the model that the arguments name, and print the generated text on rank 0. All ranks call this function."""
    options, overrides = parse(arguments, Options)
    model = find_model(options.run)
    config = apply_overrides(model.config, overrides)
    with sync_errors():
        check(config, dist.get_world_size())
    run = build_for_inference(config, model.path)
    prompt = run.tokenizer.encode(options.prompt).tolist()
    tokens = stream(run, prompt, options.tokens, options.temperature, options.top_p, options.seed)
    for text in decode_stream(run.tokenizer, prompt, tokens):
        if dist.get_rank() == 0:
            print(text, end="", flush=True)
    if dist.get_rank() == 0:
        print(flush=True)


def decode_stream(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of a prompt and of its continuation in pieces, as soon as the tokens are known.

    The whole text is decoded after every token, because the text of a token may depend on the tokens before it. A character may
    consist of several tokens. Until its last token is known, the decoded text ends in the replacement character, and this
    character is not yielded.
    """
    known, length = list(prompt), 0
    text = tokenizer.decode(known)
    for token in tokens:
        complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield complete[length:]
        length = max(length, len(complete))
        known.append(token)
        text = tokenizer.decode(known)
    yield text[length:]


# torch.compile would compile the model again for the prompt and for single tokens. This takes longer than the generation.
@torch.compiler.set_stance("force_eager")
def generate(run: InferenceRun, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """Sample a continuation of a prompt. All ranks call this function together and return the same tokens.

    Args:
        run: the run whose model generates the text.
        prompt: the token ids of the prompt.
        num_tokens: the largest number of tokens to generate.
        options: the temperature, top_p and the seed, as in `stream`.

    Returns:
        The prompt and the generated tokens, without `eos`.
    """
    return [*prompt, *stream(run, prompt, num_tokens, **options)]


@torch.no_grad()
def stream(
    run: InferenceRun, prompt: list[int], num_tokens: int, temperature: float = 0.8, top_p: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yield the tokens of a sampled continuation. All ranks call this function together and yield the same tokens.

    The tokens of the prompt are sharded over the ranks as in training. The prompt runs through the model once, and each rank
    stores the keys and values of its tokens in a cache. Afterwards, one new token at a time runs through the model on all
    ranks. The new token attends to the caches of all ranks. The rank that holds the last position samples each token and
    broadcasts it. On one GPU, the step of a new token is the replay of a CUDA graph.

    Args:
        run: the run whose model generates the text. The positions of the text are divided among the ranks that share a
            sequence. The embedding may be padded beyond the vocabulary of the tokenizer, and token ids of this padding are
            never sampled. Generation stops when the model generates the end-of-text token `eos` of the tokenizer.
        prompt: the token ids of the prompt. The model reads one `bos` before the prompt, as before every document in training.
        num_tokens: the largest number of tokens to generate.
        temperature: divides the logits before the softmax; 0 selects the most likely token.
        top_p: each token is sampled from the most likely tokens whose probabilities sum to at least `top_p`. If `top_p` is 1,
            each token is sampled from all tokens.
        seed: the seed of the sampling. The random numbers do not depend on the number of ranks.
    """
    model, tokenizer, group = run.model, run.tokenizer, run.mesh.sequence.get_group()
    ranks, rank = group.size(), group.rank()
    tokens = [tokenizer.bos, *prompt]
    layout = Layout.contiguous(seq_len=len(tokens), ranks=ranks)
    options = dict(layout=layout, mask=Mask.causal(model.config.window), group=group, backend=run.config.parallel.kernel)
    options |= dict(precision=run.config.trainer.attention_precision(training=False))
    caches = [KVCache(len(tokens) + num_tokens, rank, ranks) for _ in model.blocks]
    attend = [partial(_attend_with_cache, cache=cache, **options) for cache in caches]
    inputs, positions = layout.shard(torch.tensor([tokens], device="cpu"), rank), layout.positions(rank)
    logits = model(inputs.to(run.device), positions.to(run.device), attend, _last_logits)
    generator = torch.Generator("cpu").manual_seed(seed)
    step = _captured_step(run, caches) or partial(_eager_step, run, attend)
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


def _eager_step(run: InferenceRun, attend: list[Attend], token: int, position: int) -> Tensor:
    """Run one new token through the model on all ranks, and return its logits."""
    inputs, positions = (torch.tensor(x, device="cpu") for x in ([[token]], [position]))
    return run.model(inputs.to(run.device), positions.to(run.device), attend, _last_logits)


def _captured_step(run: InferenceRun, caches: list[KVCache]) -> TokenStep | None:
    """Return the step of a new token as a CUDA graph.

    The result is None if the job does not run on a single GPU, if the attention kernels cannot be captured, or if the GPU has
    too little memory.
    """
    if run.device.type != "cuda" or dist.get_world_size() > 1 or run.kernel.backend not in ("hopper", "triton"):
        return None
    model = copy_for_one_rank(run.model, torch.bfloat16 if run.bf16 else torch.float32)
    if model is None:
        return None
    step = TokenStep(model, caches, _last_logits, run.config.parallel.kernel)
    step.capture(caches[0].length)
    return step


def _attend_with_cache(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layout: Layout, mask: Mask, precision: str, **options: Any
) -> Tensor:
    """Compute the attention of one layer. The first call processes the prompt, and each later call processes one new token.

    Args:
        q, k, v: the queries, keys and values of the tokens of this rank.
        cache: the keys and values of all earlier calls.
        layout: the layout of the prompt.
        mask: the mask of the model: causal, with or without a sliding window.
        precision: the precision of the prompt, as in `ring_attention`. The cache and the attention of new tokens use the dtype
            of the model, even if the prompt uses FP8.
        options: the process group and the attention kernels, as in `ring_attention`.
    """
    if cache.length == 0:
        cache.prefill(k, v, layout)
        return ring_attention(q, k, v, layout=layout, mask=mask, precision=precision, **options)
    cache.append(k, v)
    return decode_attention(q, cache, window=mask.window, **options)


def _last_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the logits of this rank's last token as (1, padded vocabulary).

    If this rank has no token, the shape is (0, padded vocabulary).
    """
    return hidden[0, -1:] @ head.T


def _sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample one token from the logits, (vocabulary,). `stream` explains the other arguments."""
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial(_nucleus((logits / temperature).softmax(-1), top_p), 1, generator=generator)[0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set all probabilities outside the nucleus to 0 (Holtzman et al. 2020).

    The nucleus consists of the most likely tokens. It is the smallest set of tokens whose probabilities sum to at least
    `top_p`. The returned probabilities are not normalised again.
    """
    if top_p == 1:
        return probabilities
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    # A token belongs to the nucleus if the probabilities of all more likely tokens sum to less than `top_p`.
    outside = ordered.cumsum(0) - ordered >= top_p
    return probabilities.index_fill(0, tokens[outside], 0)


if __name__ == "__main__":
    main()
