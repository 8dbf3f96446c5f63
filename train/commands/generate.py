"""Generate text with a trained model, and print the text while it is generated.

    python train/generate.py run=NAME prompt='def f('                      on one GPU, or on the CPU
    torchrun --nproc_per_node=N train/generate.py run=NAME prompt=...      on N ranks, which share the positions of the text

The command only reads the files of the run. The text is written to stdout and all messages are written to stderr. The settings
of the model come from its checkpoint, or from the config.json of its folder. Other settings can follow as group.key=value, for
example trainer.device=cpu, parallel.kernel=triton or model.rope_factor=4. The page docs/settings.md explains all settings. If
trainer.fp8_attention=inference is set, FP8 attention processes the prompt.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import torch.distributed as dist

from ringattn.train.commands.arguments import apply_overrides, option, parse
from ringattn.train.commands.messages import exit_process
from ringattn.train.commands.options import RUN_HELP, find_model, run_command
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.inference.generation import stream
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.settings.config import ConfigError, check, replace_invalid
from ringattn.train.setup import build_for_inference


@dataclass
class Options:
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
            ("prompt", "UTF-8", replace_invalid(self.prompt) == self.prompt),
            ("tokens", "at least 1 and below 2**31", 1 <= self.tokens < 2**31),
            ("temperature", "0, or finite and at least 1e-30", self.temperature == 0 or 1e-30 <= self.temperature < math.inf),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("seed", "at least 0 and below 2**63", 0 <= self.seed < 2**63),
        ):
            if not is_valid:
                raise ConfigError(f"{name}={getattr(self, name)}: must be {bound}")


def main() -> NoReturn:
    exit_process(run_command(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    """Continue the prompt, and print the text. All ranks call this function."""
    options, overrides = parse(arguments, Options)
    model = find_model(options.run)
    config = apply_overrides(model.config, overrides)
    with sync_errors():
        check(config, dist.get_world_size())
    run = build_for_inference(config, model.path, options.tokens)
    prompt = run.tokenizer.encode(options.prompt).tolist()
    tokens = stream(run, prompt, options.tokens, options.temperature, options.top_p, options.seed)
    for text in chain(decode_stream(run.tokenizer, prompt, tokens), ["\n"]):
        if dist.get_rank() == 0:
            print(text, end="", flush=True)


def decode_stream(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of a prompt and of its continuation in pieces, as soon as the tokens are known.

    The text of a token may depend on earlier tokens, so all tokens are decoded after every new token. A character may consist
    of several tokens. The replacement character of an incomplete character is not yielded.
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
