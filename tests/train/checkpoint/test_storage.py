import io
import json
import multiprocessing
import os
import pickle
import warnings
import zlib
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.state_dict import load_rng_state, model_state, rng_state, train_state
from ringattn.train.checkpoint.storage import (
    CheckpointError,
    delete_later_checkpoints,
    latest,
    load,
    read_meta,
)
from ringattn.train.config import ConfigError
from tests.distributed import run_ranks


class Tiny(nn.Module):
    """An odd number of rows, a shared weight, a scale of one row and a buffer: what sharding may trip over."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)) * self.scale)


def make(seed: int, width: int = 5) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and its optimizer; sharded over the ranks there are."""
    torch.manual_seed(seed)
    model = Tiny(width)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> None:
    for _ in range(steps):
        tokens = torch.randint(0, 7, (2, 3))
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += 1


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def save(directory: Path, step: int = 10, tensors: dict | None = None, keep: int = 2) -> Path:
    return storage.save(directory, step, tensors or {"model.w": torch.arange(6.0)}, {"sequences": 3 * step}, keep)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_names_of_a_training_run():
    assert sorted(train_state(*make(0))) == sorted(
        [f"model.{name}" for name in ("embed.weight", "hidden.weight", "hidden.bias", "scale", "seen")]
        + [
            f"optim.{name}.{part}"
            for name in ("embed.weight", "hidden.weight", "hidden.bias", "scale")
            for part in ("step", "exp_avg", "exp_avg_sq")
        ]
    )


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_zero_state_is_what_the_first_step_makes(fused):
    states = []
    for materialise in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(3, 4).t())
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        if materialise:
            train_state(nn.ParameterDict({"w": parameter}), optimizer)
        parameter.grad = torch.randn(4, 3)
        optimizer.step()
        states.append(optimizer.state[parameter])
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])
        assert (value.dtype, value.stride()) == (states[1][key].dtype, states[1][key].stride())


def test_resume_continues_bitwise(tmp_path):
    model, optimizer = make(0)
    train(model, optimizer, 3)
    path = save(tmp_path, 3, train_state(model, optimizer) | rng_state())
    train(model, optimizer, 2)

    resumed, resumed_optimizer = make(1)
    load(path, train_state(resumed, resumed_optimizer))
    assert load_rng_state(path)
    assert resumed.seen == 3
    train(resumed, resumed_optimizer, 2)
    assert_same(train_state(model, optimizer), train_state(resumed, resumed_optimizer))


def test_meta_is_kept(tmp_path):
    path = save(tmp_path)
    assert path == tmp_path / "step_00000010"
    meta = read_meta(path)
    assert (meta["step"], meta["sequences"]) == (10, 30)
    assert set(meta["files"]) == {".metadata", "__0_0.distcp"}


def test_model_alone_leaves_the_optimizer(tmp_path):
    model, optimizer = make(0)
    path = save(tmp_path, 1, train_state(model, optimizer))
    other, _ = make(1)
    load(path, model_state(other))
    assert_same(model_state(model), model_state(other))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of two ranks, and the tensors in it."""
    directory = tmp_path_factory.mktemp("sharded")
    run_ranks(_save_sharded, 2, directory / "ranks", directory)
    return latest(directory), torch.load(directory / "expected.pt", weights_only=True)


def test_resume_without_a_process_group(sharded):
    path, expected = sharded
    model, optimizer = make(1)
    load(path, train_state(model, optimizer))
    assert_same(train_state(model, optimizer), expected)
    assert not load_rng_state(path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_resume_on_other_numbers_of_ranks(sharded, tmp_path, ranks):
    run_ranks(_load_sharded, ranks, tmp_path, *sharded)


def _save_sharded(directory: Path) -> None:
    model, optimizer = make(0)
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, 2)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))  # leaves the root's parameters whole
    state = train_state(model, optimizer)
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")
    save(directory, 2, state | rng_state())


def _load_sharded(path: Path, expected: dict[str, torch.Tensor]) -> None:
    model, optimizer = make(1)
    load(path, train_state(model, optimizer))
    assert_same(whole(train_state(model, optimizer)), expected)
    same_ranks = dist.get_world_size() == 2
    assert load_rng_state(path) == same_ranks
    if same_ranks:
        drawn = torch.get_rng_state()
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            torch.randint(0, 7, (2, 3))
        assert torch.equal(drawn, torch.get_rng_state())
    train(model, optimizer, 1)


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path):
    path = save(tmp_path, 1, {"model.w": torch.zeros(4)})
    run_ranks(_load_other_shape_on_rank_1, 2, tmp_path / "ranks", path)


def _load_other_shape_on_rank_1(path: Path) -> None:
    with pytest.raises(CheckpointError, match="model.w has shape"):
        load(path, {"model.w": torch.zeros(4 + dist.get_rank())})


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000003"]
    assert latest(tmp_path).name == "step_00000003"


def test_turning_back_removes_later_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, {"model.w": torch.tensor(float(step))}, keep=5)
    delete_later_checkpoints(tmp_path, 2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000001", "step_00000002"]


def test_nothing_saved_yet(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_killed_before_the_rename_keeps_the_previous(keep, tmp_path):
    first = save(tmp_path, 1)
    process = multiprocessing.get_context("spawn").Process(target=_save_and_die, args=(tmp_path, keep))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert (tmp_path / ".step_00000002.tmp" / "meta.json").exists()
    assert latest(tmp_path) == first
    save(tmp_path, 3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000001", "step_00000003"]


def _save_and_die(directory: Path, keep: int) -> None:
    rename, target = os.rename, directory / "step_00000002"
    os.rename = lambda source, name: os._exit(9) if Path(name) == target else rename(source, name)
    save(directory, 2, keep=keep)


def test_a_disk_that_fails_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="failed: FileExistsError: .*; check the disk"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize("value", [3, "text", None], ids=str)
def test_only_tensors_are_saved(tmp_path, value):
    with pytest.raises(CheckpointError, match="extra is not a tensor"):
        save(tmp_path, 1, {"model.w": torch.zeros(2), "extra": value})
    assert latest(tmp_path) is None


def edit_meta(path: Path, **changes) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changes))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def spoil(path: Path) -> None:
    """One bit of the tensor that `save` writes is another; the file is as long as before."""
    content = path.read_bytes()
    place = content.index(torch.arange(6.0).numpy().tobytes()) + 6
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


DAMAGE = {
    "meta gone": (lambda path: (path / "meta.json").unlink(), r"meta.json: FileNotFoundError"),
    "meta not json": (lambda path: (path / "meta.json").write_text("{"), r"meta.json: JSONDecodeError"),
    "meta not a dict": (lambda path: (path / "meta.json").write_text("[1]"), r"meta.json: TypeError"),
    "meta binary": (lambda path: (path / "meta.json").write_bytes(b"\xff"), r"meta.json: UnicodeDecodeError"),
    "meta without step": (lambda path: edit_meta(path, step=None), r"meta.json: ValueError"),
    "data truncated": (
        lambda path: truncate(path / "__0_0.distcp"),
        r"__0_0.distcp: .*is missing, or its size is not \d+ bytes",
    ),
    "data spoilt": (
        lambda path: spoil(path / "__0_0.distcp"),
        r"__0_0.distcp: BadZipFile: the checksum of archive/data/0 is wrong",
    ),
    "data gone": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0.distcp: .*is missing, or its size is not \d+ bytes"),
    "index truncated": (lambda path: truncate(path / ".metadata"), r"\.metadata: .*is missing, or its size is not \d+ bytes"),
    "path of another directory": (lambda path: edit_meta(path, files={"../x": 1}), r"\.\./x: .*missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    path = save(tmp_path)
    act, message = DAMAGE[damage]
    act(path)
    assert_refused(path, f"step_00000010 is damaged: {message}.*remove the directory")


def test_no_such_directory(tmp_path):
    assert_refused(tmp_path / "step_00000001", "no such directory")


def test_an_index_is_held_to_its_checksum(tmp_path):
    path = save(tmp_path)
    content = bytearray((path / ".metadata").read_bytes())
    content[len(content) // 2] ^= 1
    (path / ".metadata").write_bytes(content)
    assert_refused(path, "metadata: ValueError: the checksum is wrong; remove the directory")


def test_an_index_without_a_checksum_is_read(tmp_path):
    """As earlier versions wrote them."""
    path = save(tmp_path)
    meta = json.loads((path / "meta.json").read_text())
    del meta["index"]
    (path / "meta.json").write_text(json.dumps(meta))
    load_rng_state(path)


def test_index_that_is_no_index(tmp_path):
    path = save(tmp_path)
    replace_index(path, pickle.dumps({"a": 1}))
    assert_refused(path, "metadata: AttributeError")
    replace_index(path, b"\x80\x04garbage")
    assert_refused(path, "metadata: UnpicklingError")


class Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def replace_index(path: Path, content: bytes) -> None:
    (path / ".metadata").write_bytes(content)
    meta = json.loads((path / "meta.json").read_text())
    edit_meta(path, files=meta["files"] | {".metadata": len(content)}, index=zlib.crc32(content))


def test_an_index_cannot_run_code(tmp_path):
    path = save(tmp_path)
    replace_index(path, pickle.dumps(Touch(tmp_path / "touched")))
    assert_refused(path, "it contains posix.mkdir, which is not allowed")
    with pytest.raises(CheckpointError, match="posix.mkdir"):
        load_rng_state(path)
    assert not (tmp_path / "touched").exists()
    pickle.loads((path / ".metadata").read_bytes())  # what a plain unpickler would have done
    assert (tmp_path / "touched").exists()


class OldPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, x):
        return (getattr, (type(x), x.name)) if isinstance(x, Enum) else NotImplemented


class Attribute:
    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def test_an_index_of_another_python_is_read(tmp_path):
    path = save(tmp_path)
    content = io.BytesIO()
    OldPickler(content).dump(pickle.loads((path / ".metadata").read_bytes()))
    replace_index(path, content.getvalue())
    assert b"getattr" in content.getvalue()
    load_rng_state(path)
    replace_index(path, pickle.dumps(Attribute()))
    assert_refused(path, "numel of <class 'torch.Size'>, which is not allowed")


def test_a_pickled_entry_cannot_run_code(tmp_path):
    path = tmp_path / "step_00000001"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model.w": Touch(tmp_path / "touched")}, checkpoint_id=path)
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    (path / "meta.json").write_text(json.dumps({"step": 1, "files": files}))
    assert_refused(path, "model.w is a pickled object")
    assert not (tmp_path / "touched").exists()


def test_another_shape_is_named_before_anything_is_read(tmp_path):
    path = save(tmp_path, 1, train_state(*make(0, width=5)))
    model, optimizer = make(1, width=6)
    before = whole(train_state(model, optimizer))
    message = r"model.embed.weight has shape \(7, 5\), but \(7, 6\) in this run: resume with the configuration"
    with pytest.raises(CheckpointError, match=message):
        load(path, train_state(model, optimizer))
    assert_same(train_state(model, optimizer), before)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.w": torch.zeros(6), "model.v": torch.zeros(1)}, "does not contain model.v, which this run has"),
        ({"model.w": torch.zeros(6, dtype=torch.bfloat16)}, "model.w is torch.float32, but torch.bfloat16 in this run"),
        ({}, None),
        ({"model.u": torch.zeros(2)}, "does not contain model.u"),
    ],
    ids=["missing", "dtype", "nothing asked", "other"],
)
def test_tensors_that_do_not_match(tmp_path, tensors, message):
    path = save(tmp_path)
    if message:
        assert_refused(path, message, tensors)
    else:
        load(path, tensors)


def test_tensors_left_over_are_named(tmp_path):
    path = save(tmp_path, 1, {"model.w": torch.zeros(6), "model.v": torch.zeros(6)})
    assert_refused(path, "contains model.v, which this run does not have")


def assert_refused(path: Path, message: str, tensors: dict | None = None) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(path, tensors or {"model.w": torch.zeros(6)})
    assert type(error.value) is CheckpointError
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_all_is_on_the_disk_before_it_has_a_name(tmp_path, monkeypatch):
    target, events, fsync, rename = tmp_path / "step_00000010", [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.stat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda old, new: rename(old, new) or (Path(new) == target and events.append("named")))
    save(tmp_path)
    before, after = events[: events.index("named")], events[events.index("named") :]
    assert {file.stat().st_ino for file in (target, *target.iterdir())} <= set(before)
    assert tmp_path.stat().st_ino in after


def test_what_could_not_be_written_whole_does_not_fill_the_disk(tmp_path, monkeypatch):
    write = storage.dcp.save

    def fill(*arguments, **options):
        write(*arguments, **options)
        raise OSError("No space left on device")

    monkeypatch.setattr(storage.dcp, "save", fill)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path)
    assert list(tmp_path.iterdir()) == []
