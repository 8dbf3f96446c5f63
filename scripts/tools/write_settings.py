"""Write docs/settings.md, which lists every setting of training with its default and its explanation.

    python -m scripts.tools.write_settings

The page is generated from the dataclasses in train/settings/config.py and from the comments above their fields. Run this
script after every change of a setting.
"""

import dataclasses
import inspect
import sys
from pathlib import Path

from ringattn.train.settings import config
from ringattn.train.settings.help import as_yaml, explanations
from scripts import command

PAGE = command.ROOT / "docs" / "settings.md"
HEADER = """# Settings

<!-- Generated from train/settings/config.py by `python -m scripts.tools.write_settings`. Do not edit this page by hand. -->

Every setting of `train/run.py`, with its default. None is written as `null`. The YAML files in `configs/` change
some defaults. `python train/run.py --cfg job --resolve` prints the values of a run.
"""


def entries(group: type, prefix: str) -> list[str]:
    """Return one Markdown paragraph per setting of a group, without nested groups."""
    texts, defaults = explanations(group), vars(group())
    return [
        f"**`{prefix}{name}={as_yaml(value)}`**: {texts[name]}"
        for name, value in defaults.items()
        if not dataclasses.is_dataclass(value)
    ]


def page() -> str:
    parts = [HEADER.rstrip(), *entries(config.Config, "")]
    for field in dataclasses.fields(config.Config):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            parts += [f"## {field.name}", inspect.getdoc(field.type) or "", *entries(field.type, f"{field.name}.")]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="the file to write (default: docs/settings.md)")
    args = parser.parse_args(argv)
    try:
        args.output.write_text(page())
    except OSError as error:
        parser.error(f"cannot write {args.output}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
