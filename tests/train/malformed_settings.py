"""Generate the list of malformed command lines in malformed_settings.txt, one command line per line.

python -m tests.train.malformed_settings > tests/train/malformed_settings.txt
"""

import shlex
from collections.abc import Iterator
from dataclasses import fields

from ringattn.train.settings.config import CHOICES, RANGES, Config

# Command lines that no rule below generates.
OTHERS = [
    # Names that are not a single component of a path, and settings of Hydra.
    *(
        "name=../../x",
        "name=/",
        "name=a/b",
        "name=/tmp/x",
        "name=.",
        "name=..",
        "name=null",
        "name=",
        "name=a\tb",
        "name=a\x1bb",
    ),
    *("name=" + "a" * 201, "name=" + "a" * 5000, "hydra.run.dir=" + "a" * 300, "hydra.run.dir=loop/x", "hydra.run.dir=file"),
    *("hydra.job_logging.formatters.simple.format=5", "hydra.job_logging.root.level=nonsense"),
    *("hydra.job_logging.handlers.console.class=nonsense", "hydra.job_logging.version=nonsense", "hydra/job_logging=nonsense"),
    *("hydra.job_logging.root.handlers=[nonsense]", "hydra/launcher=nonsense", "hydra.nonsense=1", "hydra.mode=nonsense"),
    # Command lines that Hydra cannot parse.
    *("=5", "=", "trainer.steps", "trainer.steps=[1", "trainer.steps={1", "trainer.steps='1", "a b=5", "[]=1", "~~trainer=1"),
    *(
        "--resolve",
        "--nonsense",
        "-m --nonsense",
        "--cfg nonsense",
        "-m --cfg job",
        "--config-dir nonsense",
        "--config-name nonsense",
    ),
    *(
        "data.column=${nonsense}",
        "data.column=${nonsense:1}",
        "data.column=${oc.env:NONSENSE}",
        "+a=1",
        "+model.a=1",
        "nonsense=1",
    ),
    # Paths that are loops of links or too long, and damaged files.
    *("trainer.resume=loop", "trainer.init_from=loop", "data.tokenizer=loop", "data=text data.path=loop"),
    *(f"{name}={'a' * 300}" for name in ("trainer.resume", "trainer.init_from", "data.tokenizer", "data=text data.path")),
    *(f"{name}={'a/' * 3000}" for name in ("trainer.resume", "trainer.init_from", "data.tokenizer", "data=text data.path")),
    *("trainer.init_from=~nonsense", "trainer.resume=~nonsense", "trainer.init_from=file", "trainer.resume=file"),
    # Models that do not fit into memory.
    *("model.layers=4096 model.dim=8192", "model.vocab_size=1000000000", "model.ffn_dim=16777216 model.dim=1048576"),
    *("data.seq_len=1000000000", "trainer.batch_size=1000000"),
    # Combinations that contradict each other.
    *(
        "optim.betas=[0.9]",
        "optim.betas=[0.9,1]",
        "optim.betas=[nan,0.9]",
        "optim.betas=5",
        "model.heads=3",
        "model.kv_heads=3",
    ),
    *("model.head_dim=33", "model.head_dim=258", "optim.warmup_steps=10 trainer.steps=5", "model.rope_factor=2"),
    *("data.path=x", "data.subset=x", "data.column=x", "parallel.ring=2", "parallel.ulysses=3"),
]


def generate() -> Iterator[str]:
    """Yield the command lines."""
    yield from (shlex.join(text.split(" ") if not text.startswith("a b") else [text]) for text in OTHERS)
    # The values that are not numbers are the same for all settings of a type, so each setting tests one.
    for number, (name, (low, _)) in enumerate(RANGES.items()):
        group, _, setting = name.partition(".")
        is_float = "float" in str(type(getattr(Config(), group)).__annotations__[setting])
        values = [low - 1 if low == 0 or not isinstance(low, float) else -low]
        values += [] if name.endswith("seed") else [f"1{'0' * 18}"]
        values += ["nan", "1e300", "-inf"] if is_float else []
        others = [f"1{'0' * 30}", "two", "[1]"] + ([] if is_float else ["nan", "0.5"])
        yield from (shlex.quote(f"{name}={value}") for value in [*values, others[number % len(others)]])
    yield from (f"{name}=nonsense" for name in CHOICES)
    number = 0
    for group in fields(Config):
        if group.name == "name":
            continue
        yield from (
            shlex.quote(text) for text in (f"~{group.name}", f"{group.name}=null", f"{group.name}=5", f"{group.name}=[1]")
        )
        for option in fields(getattr(Config(), group.name)):
            others = [] if "None" in str(option.type) else ["null"]
            others += ["2", "-1", "maybe", "0.5"] if "bool" in str(option.type) else []
            if others:
                yield f"{group.name}.{option.name}={others[number % len(others)]}"
                number += 1


if __name__ == "__main__":
    print("\n".join(generate()))
