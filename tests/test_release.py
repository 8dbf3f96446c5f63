"""All files state the same version, and the workflows call commands that exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import ringattn

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_all_files_state_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ringattn.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def pin_oldest() -> str:
    """Return the command that pins the oldest supported releases together with a compatible release of numpy."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(re.match(r"(\w+)>=([\d.]+)", dependency).groups() for dependency in dependencies if ">=" in dependency)
    pins = {name: f"{version}.0" for name, version in oldest.items()} | {"numpy": "2.3.5"}
    edits = "; ".join(f"s/^{name}==.*/{name}=={version}/" for name, version in pins.items())
    return f'sed -i -E "{edits}" constraints.txt'


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(workflow: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    others = [command for command in commands if not (command.startswith("make ") and command.split()[1] in targets)]
    assert {*others} <= {pin_oldest()}


def test_the_oldest_supported_releases_are_tested() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["oldest"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [
        pin_oldest(),
        "make test",
        'make test-slow ARGS="tests/kernels/test_compile.py -k short-forward"',
    ]


def test_the_workflows_were_found() -> None:
    assert {"ci", "links"} <= {path.stem for path in WORKFLOWS}
