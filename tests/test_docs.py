"""Tests of the documentation: its code works, and its links lead to files of this repository."""

import ast
import copy
import importlib.util
import itertools
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from scripts.command import child_environment, torchrun
from tests.distributed import run_ranks, run_script
from tests.ringattn.transformers.small_models import (
    all_processes,
    new_model,
    packed_rows,
    random_tokens,
    training_arguments,
)
from tests.test_budget import docstrings
from tests.train.settings.test_config import composed

ROOT = Path(__file__).parents[1]
DOCUMENTS = [40, 35, 1, 25]


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def python_examples(page: Path) -> list[str]:
    """The Python examples of a page, which may be indented in a list."""
    return [
        textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


EXAMPLES = {f"{page.relative_to(ROOT)}-{i}": code for page in PAGES for i, code in enumerate(python_examples(page))}
# Examples that need several ranks, a GPU or files. Other tests run them.
RUN_BY_RANKS = (
    "README.md-0",
    "docs/how-to/several-ranks-on-one-gpu.md-0",
    "docs/how-to/your-own-loop.md-0",
    "docs/how-to/your-own-loop.md-1",
    "docs/how-to/your-own-loop.md-2",
    "docs/how-to/your-own-loop.md-3",
    "docs/prepared-data.md-0",  # tests/train/data/test_prepared.py runs it
)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in RUN_BY_RANKS])
def test_examples_run(name: str) -> None:
    exec(EXAMPLES[name], {})


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "ring.py"
    script.write_text(EXAMPLES["README.md-0"])
    run_script(script, 2, tmp_path / "ranks")


@pytest.mark.gpu
def test_the_example_of_several_ranks_on_one_gpu(tmp_path: Path) -> None:
    """torchrun starts the example, as the page says."""
    script, environment = tmp_path / "example.py", child_environment(RINGATTN_SHARE_GPUS="1")
    script.write_text(EXAMPLES["docs/how-to/several-ranks-on-one-gpu.md-0"])
    launched = subprocess.run(torchrun(2, str(script)), env=environment, capture_output=True, text=True, timeout=200)
    assert launched.returncode == 0, launched.stderr
    printed = launched.stdout
    errors = [float(text) for text in re.findall(r"largest difference from one rank ([\d.]+)", printed)]
    assert len(errors) == 2
    assert max(errors) < 0.02


WINDOWS = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "gemma3_text": WINDOWS,
    "gpt_oss": WINDOWS | dict(num_local_experts=2, num_experts_per_tok=2, rope_parameters=None),
}


def check_the_training_loop(kind: str) -> None:
    """Train one step on a ring with sharded parameters as the page says, and compare it with one ordinary process."""
    model = new_model(kind, std=0.3, **MODELS[kind])
    tokens = random_tokens(1, sum(DOCUMENTS))
    reference, losses = copy.deepcopy(model), []
    for document in tokens.split(DOCUMENTS, 1):
        logits = reference(document).logits[0, :-1]
        losses.append(F.cross_entropy(logits, document[0, 1:], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    names = dict(model=model)
    exec(EXAMPLES["docs/how-to/your-own-loop.md-3"].replace('"cuda"', '"cpu"'), names)
    names["optimizer"], optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    labels = tokens.masked_fill(positions == 0, -100)
    found = names["train_step"]({"input_ids": tokens, "position_ids": positions, "labels": labels})
    optimizer.step()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "gemma3_text" else pytest.mark.slow) for kind in MODELS]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda n: f"P{n}")
def test_a_model_of_transformers_trains_on_a_ring(kind: str, ranks: int, tmp_path: Path) -> None:
    """The code of the page about your own training loop works as it is printed."""
    pytest.importorskip("transformers")
    run_ranks(check_the_training_loop, ranks, tmp_path / "ranks", kind)


def check_the_trainers(folder: Path) -> None:
    """Run the other examples of the page. The tests of ringattn.transformers compare their losses with one process."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    all_processes()
    rows = packed_rows(2)
    names = dict(model=new_model(), args=training_arguments(folder, max_steps=1), dataset=rows)
    exec(EXAMPLES["docs/how-to/your-own-loop.md-0"], names)
    names["trainer"].train()
    if importlib.util.find_spec("trl"):
        exec(EXAMPLES["docs/how-to/your-own-loop.md-1"], names)
    model, accelerator = new_model(), Accelerator(cpu=True)
    names = dict(model=model, optimizer=torch.optim.SGD(model.parameters()), loader=DataLoader(rows), accelerator=accelerator)
    exec(EXAMPLES["docs/how-to/your-own-loop.md-2"], names | dict(init_device_mesh=init_device_mesh))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_the_trainers_of_the_page_run(tmp_path: Path) -> None:
    run_ranks(check_the_trainers, 2, tmp_path / "ranks", tmp_path / "run")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Every relative link leads to a file or folder that exists and, if it has an anchor, to a heading."""
    missing = []
    for link in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def commands(page: Path) -> list[list[str]]:
    """The commands of the shell blocks of a page, as lists of words."""
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_settings(arguments: list[str]) -> None:
    """Compose the settings of a training command. A sweep is represented by its first values."""
    if "--cfg" not in arguments:
        composed(*(argument.split(",")[0] if "=" in argument else argument for argument in arguments))


def check_module(module: str, arguments: list[str]) -> None:
    """The module exists, and its source names every option."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    path = path if path.exists() else path.with_suffix("") / "__main__.py"
    source = path.read_text() + (ROOT / "scripts" / "command.py").read_text()
    unknown = [argument for argument in arguments if argument.startswith("--") and f'"{argument}"' not in source]
    assert not unknown, f"{module} has no option {unknown}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """The settings of training commands and the options of scripts exist."""
    for words in commands(page):
        if "train/run.py" in words:
            check_settings(words[words.index("train/run.py") + 1 :])
        elif "-m" in words and (module := words[words.index("-m") + 1]).startswith(("scripts.", "ringattn.", "tests.")):
            check_module(module, words[words.index("-m") + 2 :])
        else:
            paths = [word for word in words if word.startswith(("train/", "scripts/", "tests/", "ringattn/"))]
            assert all((ROOT / path.split("::")[0]).exists() for path in paths), words


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a Python file without its docstrings. A line break stands for a value that is inserted into a string."""
    tree = ast.parse(path.read_text())
    documentation = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield re.sub(r"%[\d.,]*[dfs]", "\n", node.value)


def quoted_messages() -> list[tuple[str, str]]:
    """The messages of at least three words in the first columns of the how-to pages' tables."""
    pages = [page for page in PAGES if page.parent.name == "how-to"]
    cells = [(page.name, cell) for page in pages for cell in re.findall(r"^ *\| (.*?) \|", page.read_text(), re.MULTILINE)]
    quoted = [(name, text) for name, cell in cells for text in re.findall(r"`([^`]+)`", cell) if len(text.split()) > 2]
    # A few cells contain settings, and Hydra prints one of the messages.
    return [(name, text) for name, text in quoted if not text.startswith(("data=", "mismatched input"))]


def test_quoted_messages_are_in_the_code() -> None:
    """At least half of a message's pairs of neighbouring words are in a string of the code. The others contain values."""
    folders = ("kernels", "ringattn", "train", "scripts")
    code = "\n\n".join(text for folder in folders for path in (ROOT / folder).rglob("*.py") for text in texts_of(path))
    messages = quoted_messages()
    assert len(messages) > 20
    for page, message in messages:
        pairs = [
            " ".join(pair) for pair in itertools.pairwise(message.split()) if all(re.search("[a-z]", word) for word in pair)
        ]
        assert sum(pair in code for pair in pairs) >= len(pairs) / 2, f"{page} quotes {message!r}"
