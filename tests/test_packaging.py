"""Install the package next to the packages of Hugging Face, and train in a clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels", "ringattn", "train", "configs", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Environment:
    """A virtual environment that also finds the dependencies of ringattn where they are installed for this process.

    torch and the other dependencies are not installed again, because that would take minutes. Python does not process the .pth
    files of a folder that is itself added by a .pth file, so an editable installation of ringattn there is not found.
    """

    def __init__(self, directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        self.directory = directory
        self.python = directory / "bin" / "python"
        site_packages = next(directory.glob("lib/python*/site-packages"))
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def pip(self, *arguments: object) -> None:
        """Run the pip of this process on the virtual environment."""
        run([sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *arguments], self.directory)


def run(command: list[object], directory: Path) -> str:
    """Run a command in a directory, without the variables that lead Python to this repository, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["HF_HOME"] = str(directory / "cache")
    done = subprocess.run(
        [str(part) for part in command], cwd=directory, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_sources(directory: Path) -> Path:
    """Copy the files of a clone. Building a package writes into the folder of its sources."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


@pytest.fixture
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this repository, from a clone or from a source distribution."""
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    folder = tmp_path_factory.mktemp("wheel")
    if request.param == "sdist":
        build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
        run([sys.executable, "-c", build], sources)
        (sources,) = (sources / "dist").glob("*.tar.gz")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources], folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def kernels_of_hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of Hugging Face's package `kernels` and of those of its dependencies that are not installed here."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--constraint", ROOT / "constraints.txt", "kernels"]
    done = subprocess.run([*command, "--wheel-dir", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip cannot download the package kernels: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize(("wheel", "first"), [("clone", "kernels"), ("sdist", "ringattn")], indirect=["wheel"])
def test_hugging_face_packages_work_next_to_ringattn(
    first: str, wheel: Path, kernels_of_hugging_face: Path, tmp_path: Path
) -> None:
    """Both orders of installation work, and uninstalling ringattn does not damage the other packages."""
    environment = Environment(tmp_path / "environment")
    installations = {
        "ringattn": ["install", "--quiet", "--no-deps", "--ignore-installed", wheel],
        "kernels": ["install", "--quiet", "--no-index", "--find-links", kernels_of_hugging_face, "kernels"],
    }
    environment.pip(*installations.pop(first))
    environment.pip(*installations.popitem()[1])

    others = "import kernels; assert kernels.get_kernel; from transformers import AutoModelForCausalLM"
    script = f"import ringattn.kernels.dispatch; {others}; print(ringattn.__file__)"
    assert str(environment.directory) in run([environment.python, "-c", script], tmp_path)
    settings = run([environment.directory / "bin" / "ringattn-train", "--cfg", "job", "trainer.steps=7"], tmp_path)
    assert "steps: 7" in settings
    assert "dtype=..." in run([environment.directory / "bin" / "ringattn-export", "--help"], tmp_path)

    environment.pip("uninstall", "--quiet", "--yes", "ringattn")
    run([environment.python, "-c", others], tmp_path)
    with pytest.raises(AssertionError, match="No module named 'ringattn'"):
        run([environment.python, "-c", "import ringattn"], tmp_path)


def test_torchrun_trains_in_a_clone(tmp_path: Path) -> None:
    """The command of the README works after `pip install -e .`."""
    clone = copy_sources(tmp_path)
    environment = Environment(tmp_path / "environment")
    environment.pip("install", "--quiet", "--no-deps", "--ignore-installed", "--editable", clone)
    torchrun = [environment.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    small = [
        "model.layers=1",
        "model.dim=32",
        "model.heads=4",
        "model.kv_heads=2",
        "data.seq_len=64",
        "trainer.sample_tokens=0",
    ]
    output = run([*torchrun, "train/run.py", "trainer.steps=3", "trainer.device=cpu", *small], clone)
    assert "step 3/3" in output
