"""Show the comments of `config.py` in `train/run.py --help` and in docs/settings.md."""

import inspect
import re

from omegaconf import DictConfig, OmegaConf

from ringattn.train.settings.config import Config

# The settings that `--help` explains. All other settings are explained in docs/settings.md.
COMMON = (
    *("name", "data.path", "data.eval_split", "data.tokenizer", "data.seq_len", "parallel.ring", "optim.lr"),
    *("trainer.steps", "trainer.batch_size", "trainer.accumulate", "trainer.device", "trainer.init_from"),
    *("trainer.checkpoint_every", "trainer.eval_every", "trainer.time_limit_s", "logger.wandb"),
)


def explanations(group: type) -> dict[str, str]:
    """Return the comment above each field of a dataclass, as one paragraph per field."""
    comments: list[str] = []
    found = {}
    for line in inspect.getsource(group).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            comments.append(comment[1])
            continue
        if field := re.match(r"    (\w+): ", line):
            found[field[1]] = " ".join(comments)
        comments = []
    return found


def as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{','.join(map(as_yaml, value))}]"
    return repr(value) if value == "" or str(value).strip() != str(value) else str(value)


def common_settings(*, _root_: DictConfig) -> str:
    """Describe each common setting in one line, with its value and the first sentence of its comment.

    As a resolver of OmegaConf, the function receives all settings in the argument `_root_`.
    """
    lines = []
    for name in COMMON:
        group, _, option = name.rpartition(".")
        texts = explanations(type(getattr(Config(), group)) if group else Config)
        value = as_yaml(OmegaConf.select(_root_, name))
        first_sentence = texts[option].partition(". ")[0].rstrip(".")
        lines.append(f"{f'{name}={value}':<30}{first_sentence}.")
    # Hydra would substitute names after a dollar sign.
    return "\n".join(lines).replace("$", "$$")
