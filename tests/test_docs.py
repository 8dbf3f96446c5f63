"""Tests of the documentation: its code works, and its links lead to files of this repository."""

import ast
import copy
import itertools
import math
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout, Mask, ring_attention
from scripts.command import child_environment, torchrun
from tests.distributed import run_ranks
from tests.train.settings.test_config import composed

ROOT = Path(__file__).parents[1]
DOCUMENTS = [40, 35, 1, 25]


SIZES = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
# The models that the page names as exact, with windows that are shorter than the documents.
EXACT_MODELS = {
    "qwen3": dict(num_hidden_layers=2),
    "ministral": dict(num_hidden_layers=2, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    "gemma3_text": dict(num_hidden_layers=2, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    "olmo3": dict(num_hidden_layers=2, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(num_hidden_layers=2, sliding_window=7, num_local_experts=2, num_experts_per_tok=2, rope_parameters=None),
    "mixtral": dict(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
REJECTED_MODELS = {
    "gemma2": (dict(num_hidden_layers=2), "softcap"),
    "llama4_text": (dict(num_hidden_layers=4, intermediate_size_mlp=64, num_local_experts=1), "chunked_attention"),
    "qwen3_next": (dict(num_hidden_layers=4, num_experts=2, num_experts_per_tok=1), "linear_attention"),
    "mamba": (dict(num_hidden_layers=1), "Conv1d"),
}


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def python_examples(page: Path) -> list[str]:
    """The Python examples of a page, which may be indented in a list."""
    return [
        textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


EXAMPLES = {f"{page.relative_to(ROOT)}-{i}": code for page in PAGES for i, code in enumerate(python_examples(page))}
# Examples that need several ranks or a GPU. Other tests of this module run them.
RUN_BY_RANKS = (
    "README.md-0",
    "docs/how-to/several-ranks-on-one-gpu.md-0",
    "docs/how-to/your-own-loop.md-0",
    "docs/how-to/your-own-loop.md-1",
)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in RUN_BY_RANKS])
def test_examples_run(name: str) -> None:
    exec(EXAMPLES[name], {})


def run_with_torchrun(name: str, ranks: int, directory: Path, **variables: str) -> str:
    """Run an example as a script on several ranks, and return what it printed."""
    script = directory / "example.py"
    script.write_text(EXAMPLES[name])
    launched = subprocess.run(
        torchrun(ranks, str(script)), env=child_environment(**variables), capture_output=True, text=True, timeout=200
    )
    assert launched.returncode == 0, launched.stderr
    return launched.stdout


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    run_with_torchrun("README.md-0", 2, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_the_example_of_several_ranks_on_one_gpu(tmp_path: Path) -> None:
    printed = run_with_torchrun("docs/how-to/several-ranks-on-one-gpu.md-0", 2, tmp_path, RINGATTN_SHARE_GPUS="1")
    errors = [float(text) for text in re.findall(r"largest difference from one rank ([\d.]+)", printed)]
    assert len(errors) == 2
    assert max(errors) < 0.02


def code_of_the_page() -> dict:
    """Run the code of the page and return its names."""
    page: dict = {}
    exec(EXAMPLES["docs/how-to/your-own-loop.md-0"], page)
    return page


def new_model(kind: str, **settings: object) -> torch.nn.Module:
    """Return a model of transformers with random weights that are large enough for attention to matter."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **settings, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def check_the_training_loop(kind: str) -> None:
    """Train one step on a ring with sharded parameters as the page says, and compare it with one process that has neither."""
    page, model = code_of_the_page(), new_model(kind, **EXACT_MODELS[kind])
    tokens = torch.randint(128, (1, sum(DOCUMENTS)))
    reference, losses = copy.deepcopy(model), []
    for document in tokens.split(DOCUMENTS, 1):
        logits = reference(document, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, document[0, 1:], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    page["put_on_ring"](model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    optimizers[1].step()
    assert page["train_step"](model, optimizers[0], tokens, DOCUMENTS, mesh) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other, rtol=1e-4, atol=1e-5)
    # The second example takes another step.
    names = page | dict(
        model=new_model(kind, **EXACT_MODELS[kind]), optimizer=optimizers[0], tokens=torch.randint(128, (1, 2048))
    )
    exec(EXAMPLES["docs/how-to/your-own-loop.md-1"].replace('"cuda"', '"cpu"'), names)
    assert math.isfinite(names["loss"])


def check_other_tokens_are_an_error() -> None:
    """Every rank takes a sequence of its own, as from a data loader that accelerate has prepared."""
    page, mesh = code_of_the_page(), init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError, match="rank 1 of the group has another batch than rank 0"):
        page["train_step"](None, None, torch.full((1, sum(DOCUMENTS)), dist.get_rank()), DOCUMENTS, mesh)


def test_ranks_with_other_tokens_are_an_error(tmp_path: Path) -> None:
    run_ranks(check_other_tokens_are_an_error, 2, tmp_path)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "gemma3_text" else pytest.mark.slow) for kind in EXACT_MODELS]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda n: f"P{n}")
def test_a_model_of_transformers_trains_on_a_ring(kind: str, ranks: int, tmp_path: Path) -> None:
    """The code of the page about your own training loop works as it is printed."""
    pytest.importorskip("transformers")
    run_ranks(check_the_training_loop, ranks, tmp_path / "ranks", kind)


@pytest.mark.parametrize("kind", REJECTED_MODELS)
def test_a_model_that_would_be_wrong_on_a_ring_is_rejected(kind: str) -> None:
    """The error names the keyword or the type of layer that attention on a ring does not support."""
    pytest.importorskip("transformers")
    settings, named = REJECTED_MODELS[kind]
    page, model = code_of_the_page(), new_model(kind, **settings)
    page["fully_shard"] = lambda module: None
    page["ring"].update(layout=Layout.contiguous(8, 1), documents=[8], group=None)
    with pytest.raises(ValueError, match=named):
        page["put_on_ring"](model)
        model(torch.randint(128, (1, 8)), use_cache=False)


def test_attention_sinks_scale_the_output() -> None:
    """A sink adds exp(sink) to the denominator of the softmax, so the output is multiplied by sigmoid(lse - sink)."""
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
    """The strings of a Python file. A line break stands for a value that is inserted into a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[\d.,]*[dfs]", "\n", node.value)


def quoted_messages() -> list[tuple[str, str]]:
    """The messages in the first columns of the tables of the how-to pages that have at least three words."""
    pages = [page for page in PAGES if page.parent.name == "how-to"]
    cells = [(page.name, cell) for page in pages for cell in re.findall(r"^ *\| (.*?) \|", page.read_text(), re.MULTILINE)]
    quoted = [(name, text) for name, cell in cells for text in re.findall(r"`([^`]+)`", cell) if len(text.split()) > 2]
    # A few cells contain settings, and Hydra prints one of the messages.
    return [(name, text) for name, text in quoted if not text.startswith(("data=", "mismatched input"))]


def test_quoted_messages_are_in_the_code() -> None:
    """At least half of the pairs of neighbouring words of a message are in a string of the code. The others contain values."""
    folders = ("kernels", "ringattn", "train", "scripts")
    code = "\n\n".join(text for folder in folders for path in (ROOT / folder).rglob("*.py") for text in texts_of(path))
    messages = quoted_messages()
    assert len(messages) > 20
    for page, message in messages:
        pairs = [
            " ".join(pair) for pair in itertools.pairwise(message.split()) if all(re.search("[a-z]", word) for word in pair)
        ]
        assert sum(pair in code for pair in pairs) >= len(pairs) / 2, f"{page} quotes {message!r}"
