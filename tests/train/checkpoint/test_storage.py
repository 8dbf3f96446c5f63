"""Checkpoints on the disk: written completely or not at all, and compared with their checksums when they are read."""

import errno
import json
import os
import pickle
import re
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.storage import (
    CheckpointError,
    DiskFullError,
    check_space,
    delete_later_checkpoints,
    latest,
    load,
    read_meta,
    read_tensor_names,
)
from ringattn.train.settings.config import ConfigError
from tests.distributed import run_ranks

WEIGHT = torch.arange(6.0)


def save(directory: Path, step: int = 10, tensors: dict[str, Tensor] | None = None, keep: int = 2) -> Path:
    """Write a small checkpoint."""
    return storage.save(directory, step, tensors or {"model.w": WEIGHT}, {"sequences": 3 * step}, keep)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_load_raises(path: Path, message: str, tensors: dict[str, Tensor] | None = None) -> None:
    """Loading raises a CheckpointError of one line, which contains the path and matches `message`."""
    with pytest.raises(CheckpointError, match=message) as error:
        load(path, tensors or {"model.w": torch.zeros(6)})
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_loaded_tensors_equal_the_saved_ones(tmp_path):
    path, loaded = save(tmp_path), torch.zeros(6)
    load(path, {"model.w": loaded})
    assert torch.equal(loaded, WEIGHT)


def test_meta_is_saved_with_the_step_and_the_files(tmp_path):
    path = save(tmp_path)
    assert path == tmp_path / "step_00000010"
    meta = read_meta(path)
    assert (meta["step"], meta["sequences"]) == (10, 30)
    assert meta["files"] == {name: (path / name).stat().st_size for name in (".metadata", "__0_0.distcp")}


def test_tensor_names_are_those_of_the_checkpoint(tmp_path):
    assert read_tensor_names(save(tmp_path, 1, {"a": torch.zeros(1), "b": torch.zeros(2)})) == {"a", "b"}


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert latest(tmp_path).name == "step_00000003"


def test_at_least_one_checkpoint_is_kept(tmp_path):
    save(tmp_path, 1, keep=0)
    assert names(tmp_path) == ["step_00000001"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, {"model.w": WEIGHT + 1})
    loaded = torch.zeros(6)
    load(tmp_path / "step_00000001", {"model.w": loaded})
    assert torch.equal(loaded, WEIGHT + 1)
    assert names(tmp_path) == ["step_00000001"]


def test_checkpoints_of_later_steps_are_deleted(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=5)
    delete_later_checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_only_the_link_to_a_checkpoint_is_deleted(tmp_path):
    target = save(tmp_path / "elsewhere", 1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / target.name).symlink_to(target)
    save(tmp_path / "checkpoints", 2, keep=1)
    assert names(tmp_path / "checkpoints") == ["step_00000002"]
    load(target, {"model.w": torch.zeros(6)})


def test_a_new_run_has_no_latest_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize("keep", [1, 2])
def test_an_interrupted_save_leaves_the_previous_checkpoint(keep, tmp_path, monkeypatch):
    first = save(tmp_path, 1)
    rename = os.rename

    def interrupt(source: Path, target: Path) -> None:
        if Path(target).name == "step_00000002":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, keep=keep)
    assert (tmp_path / ".step_00000002.tmp" / "meta.json").exists()
    assert latest(tmp_path) == first

    save(tmp_path, 3)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


def test_all_files_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    target, events = tmp_path / "step_00000010", []
    fsync, rename = os.fsync, os.rename

    def record_fsync(file: int) -> None:
        events.append(os.stat(file).st_ino)
        fsync(file)

    def record_rename(source: Path, name: Path) -> None:
        rename(source, name)
        if Path(name) == target:
            events.append("renamed")

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(tmp_path)

    before, after = events[: events.index("renamed")], events[events.index("renamed") :]
    assert {file.stat().st_ino for file in (target, *target.iterdir())} <= set(before)
    assert tmp_path.stat().st_ino in after


def test_a_failed_save_does_not_fill_the_disk(tmp_path, monkeypatch):
    write = storage.dcp.save

    def write_and_fail(*args, **kwargs) -> None:
        write(*args, **kwargs)
        raise OSError("No space left on device")

    monkeypatch.setattr(storage.dcp, "save", write_and_fail)
    with pytest.raises(CheckpointError, match=r"No space left on device.*check the disk"):
        save(tmp_path)
    assert names(tmp_path) == []


def after_writing(act: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` with the directory of a checkpoint after its tensors were written."""
    write = storage._write_tensors
    monkeypatch.setattr(storage, "_write_tensors", lambda path, *rest: (write(path, *rest), act(path))[0])
    monkeypatch.setattr(storage, "VISIBLE_S", 0.3)


@pytest.mark.parametrize(
    "act", [lambda path: (path / "__0_0.distcp").unlink(), lambda path: truncate(path / "__0_0.distcp")], ids=["gone", "short"]
)
def test_a_checkpoint_that_lacks_a_file_of_another_host_is_not_published(act, tmp_path, monkeypatch):
    first = save(tmp_path, 1)
    after_writing(act, monkeypatch)
    with pytest.raises(CheckpointError, match=r"/__0_0\.distcp is missing or incomplete .*all hosts share"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == [first.name]
    load(first, {"model.w": torch.zeros(6)})


def test_a_save_waits_until_a_file_of_another_host_is_visible(tmp_path, monkeypatch):
    def hide_and_show(path: Path) -> None:
        hidden = (path / "__0_0.distcp").rename(tmp_path / "hidden")
        threading.Timer(0.1, hidden.rename, [path / "__0_0.distcp"]).start()

    after_writing(hide_and_show, monkeypatch)
    load(save(tmp_path / "checkpoints", 1), {"model.w": torch.zeros(6)})


def test_a_stale_list_of_files_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([self / ".metadata"]))
    load(save(tmp_path), {"model.w": torch.zeros(6)})


def test_older_checkpoints_remain_if_the_new_one_is_incomplete_after_its_renaming(tmp_path, monkeypatch):
    save(tmp_path, 1)
    publish = storage._publish
    monkeypatch.setattr(storage, "_publish", lambda path, target: (publish(path, target), truncate(target / ".metadata")))
    monkeypatch.setattr(storage, "VISIBLE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"step_00000002/\.metadata is missing or incomplete"):
        save(tmp_path, 2, keep=1)
    assert "step_00000001" in names(tmp_path)


@pytest.mark.parametrize(
    ("number", "of_directories", "is_error"),
    [
        (errno.EINVAL, True, False),
        (errno.ENOTSUP, True, False),
        (errno.EIO, True, True),
        (errno.EINVAL, False, True),
        (errno.ENOTSUP, False, True),
    ],
)
def test_only_directories_may_be_impossible_to_sync(number, of_directories, is_error, tmp_path, monkeypatch):
    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.stat(file).st_mode) == of_directories:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"step_00000001.*check the disk") if is_error else nullcontext():
        save(tmp_path, 1)
    assert names(tmp_path) == ([] if is_error else ["step_00000001"])


def free_space(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk have `free` bytes of free space."""
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, free=free))


@contextmanager
def open_full_device(self: FileSystem, path: Path, mode: str) -> Iterator[IO[bytes]]:
    """Open a file on which every write fails, as on a full disk."""
    with open("/dev/full", mode) as stream:
        yield stream


@pytest.mark.parametrize("elements", [6, 2**20], ids=["in the buffer of a file", "in torch's archive"])
def test_a_full_disk_is_reported_with_its_sizes_and_the_remaining_checkpoint(elements, tmp_path, monkeypatch):
    first = save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(FileSystem, "create_stream", open_full_device)
        free_space(3 * 2**30, patched)
        with pytest.raises(DiskFullError) as error:
            save(tmp_path, 2, {"model.w": torch.zeros(elements)})
    message = str(error.value)
    assert re.search(
        r"full: .*/step_00000002 needs about (0|4).0 MiB, and 3.0 GiB are free.*remains is .*/step_00000001", message
    )
    assert "\n" not in message
    assert names(tmp_path) == ["step_00000001"]
    load(first, {"model.w": torch.zeros(6)})


@pytest.mark.parametrize(
    ("number", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)], ids=["space", "quota", "damage"]
)
@pytest.mark.parametrize("function", ["_write_meta", "_fsync", "_write_tensors"])
def test_errors_of_a_full_disk_are_distinguished_from_others(function, number, is_full, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError:
            if function == "_write_tensors":
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904
            raise

    monkeypatch.setattr(storage, function, fail)
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, 1)
    assert isinstance(error.value, DiskFullError) == is_full
    assert ("there is no earlier checkpoint" in str(error.value)) == is_full
    assert names(tmp_path) == []


def test_a_full_disk_of_one_rank_is_reported_on_all_ranks(tmp_path):
    run_ranks(_save_on_full_disk_of_rank_1, 2, tmp_path / "ranks", tmp_path / "checkpoints")


def _save_on_full_disk_of_rank_1(directory: Path) -> None:
    weight = distribute_tensor(torch.zeros(2**20), init_device_mesh("cpu", (2,)), [Shard(0)])
    save(directory, 1, {"model.w": weight})
    if dist.get_rank() == 1:
        FileSystem.create_stream = open_full_device
    with pytest.raises(DiskFullError, match=r"full: .*step_00000002 needs about 4.0 MiB.*remains is .*step_00000001"):
        save(directory, 2, {"model.w": weight})
    assert names(directory) == ["step_00000001"]


@pytest.mark.parametrize(
    ("existing", "saves", "keep", "fitting", "warning"),
    [
        pytest.param(0, 9, 2, 2, "3 more checkpoints", id="one checkpoint more than are kept"),
        pytest.param(0, 9, 2, 3, None, id="enough"),
        pytest.param(0, 2, 2, 2, None, id="few saves"),
        pytest.param(1, 9, 2, 1, "2 more checkpoints", id="one exists"),
        pytest.param(2, 9, 2, 1, None, id="all exist"),
        pytest.param(4, 9, 2, 1, None, id="more exist than are kept"),
    ],
)
def test_a_warning_if_the_checkpoints_will_not_fit(existing, saves, keep, fitting, warning, tmp_path, monkeypatch, caplog):
    for step in range(1, existing + 1):
        save(tmp_path, step, keep=9)
    free_space(1000 * fitting, monkeypatch)
    check_space(tmp_path, existing, 1000, keep, saves)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [warning in message for message in warnings] == ([True] if warning else [])


def test_an_error_if_not_even_one_checkpoint_fits(tmp_path, monkeypatch):
    free_space(2**20 - 1, monkeypatch)
    with pytest.raises(ConfigError, match=r"each needs about 1\.0 MiB.*1\.0 MiB free"):
        check_space(tmp_path / "missing" / "checkpoints", 0, 2**20, keep=2, saves=1)


def test_space_of_checkpoints_that_will_be_removed_is_free(tmp_path, monkeypatch):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    hidden = second.rename(tmp_path / ".step_00000002.tmp")
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in (first, hidden)]
    free_space(0, monkeypatch)
    check_space(tmp_path, 1, sizes[1], keep=1, saves=1)
    check_space(tmp_path, 0, sum(sizes), keep=1, saves=1)
    with pytest.raises(ConfigError):
        check_space(tmp_path, 1, sizes[1] + 1, keep=1, saves=1)
    assert names(tmp_path) == [".step_00000002.tmp", "step_00000001"]


def test_unexpected_files_next_to_the_checkpoints_do_not_matter(tmp_path):
    """Files with the names of incomplete checkpoints are removed, too. Other files are kept."""
    save(tmp_path, 1)
    for name in (".step_00000001", ".step_00000002.tmp", "step_00000003", "step_4", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".step_00000005.old").symlink_to(tmp_path / "missing")
    (tmp_path / "step_00000001" / "folder").mkdir()
    check_space(tmp_path, 1, 1000, keep=2, saves=2)
    delete_later_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["notes.txt", "step_00000001", "step_4"]
    (tmp_path / ".step_00000006").touch()
    save(tmp_path, 2)
    assert names(tmp_path) == ["notes.txt", "step_00000001", "step_00000002", "step_4"]


def test_a_disk_of_unknown_size_is_not_full(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(total=0, free=0))
    check_space(tmp_path, 0, 2**50, keep=2, saves=9)


def test_a_directory_that_cannot_be_created_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"NotADirectoryError: .*check the disk"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize("value", [3, "text", None], ids=str)
def test_only_tensors_can_be_saved(value, tmp_path):
    with pytest.raises(CheckpointError, match="extra is not a tensor"):
        save(tmp_path, 1, {"model.w": WEIGHT, "extra": value})
    assert latest(tmp_path) is None


def edit_meta(path: Path, **changes: object) -> None:
    """Change entries of meta.json without updating its checksum."""
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changes))


def write_old_meta(path: Path, **changes: object) -> None:
    """Change entries of meta.json, which then has neither a format nor a checksum, as in earlier versions."""
    edit_meta(path, **changes, format=1, checksum=None)


def remove_checksums(path: Path) -> None:
    """Turn a checkpoint into one of an earlier version, which has no checksums of its shards and of meta.json."""
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        del info.checksum
    content = pickle.dumps(index)
    (path / ".metadata").write_bytes(content)
    files = {name: (path / name).stat().st_size for name in (".metadata", "__0_0.distcp")}
    write_old_meta(path, files=files, index=zlib.crc32(content))


def copy_from_another_step(*files: str) -> Callable[[Path], None]:
    def copy(path: Path) -> None:
        another = save(path.parents[1] / "another", 9, {"model.w": WEIGHT + 1})
        for name in files:
            shutil.copy(another / name, path / name)

    return copy


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_bit(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def flip_bit_of_weight(path: Path) -> None:
    data = path / "__0_0.distcp"
    flip_bit(data, data.read_bytes().index(WEIGHT.numpy().tobytes()) + 6)


WRONG_SIZE = r"missing, or its size is not \d+ bytes"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "meta missing": (lambda path: (path / "meta.json").unlink(), "meta.json: FileNotFoundError"),
    "meta not JSON": (lambda path: (path / "meta.json").write_text("{"), "meta.json: JSONDecodeError"),
    "meta not a dict": (lambda path: (path / "meta.json").write_text("[1]"), "meta.json: AttributeError"),
    "meta not text": (lambda path: (path / "meta.json").write_bytes(b"\xff"), "meta.json: UnicodeDecodeError"),
    "meta without a step": (lambda path: write_old_meta(path, step=None), "meta.json: ValueError: step and"),
    "meta with a negative step": (lambda path: write_old_meta(path, step=-1), "meta.json: ValueError: step and"),
    "meta with another step": (lambda path: write_old_meta(path, step=3), "meta.json: .*belongs to step 3"),
    "meta of another step": (copy_from_another_step("meta.json"), "meta.json: .*belongs to step 9"),
    "edited step": (lambda path: edit_meta(path, step=3), "meta.json: .*checksum is wrong"),
    "edited position": (lambda path: edit_meta(path, sequences=31), "meta.json: .*checksum is wrong"),
    "edited setting": (lambda path: edit_meta(path, config={"model": {"rope_theta": 5.0}}), "meta.json: .*checksum is wrong"),
    "added entry": (lambda path: edit_meta(path, origin="/another"), "meta.json: .*checksum is wrong"),
    "edited checksum": (lambda path: edit_meta(path, checksum=0), "meta.json: .*checksum is wrong"),
    "data of another step": (copy_from_another_step("__0_0.distcp"), "__0_0.distcp: .*belongs to another checkpoint"),
    "data and index of another step": (copy_from_another_step("__0_0.distcp", ".metadata"), r"\.metadata: .*(checksum|size)"),
    "all files of another step": (copy_from_another_step("__0_0.distcp", ".metadata", "meta.json"), ".*to step 9"),
    "data truncated": (lambda path: truncate(path / "__0_0.distcp"), f"__0_0.distcp: .*{WRONG_SIZE}"),
    "data missing": (lambda path: (path / "__0_0.distcp").unlink(), f"__0_0.distcp: .*{WRONG_SIZE}"),
    "data with a wrong bit": (flip_bit_of_weight, "__0_0.distcp: .*checksum is wrong"),
    "padding with a wrong bit": (lambda path: flip_bit(path / "__0_0.distcp", 60), "__0_0.distcp: .*checksum is wrong"),
    "index truncated": (lambda path: truncate(path / ".metadata"), rf"\.metadata: .*{WRONG_SIZE}"),
    "index with a wrong bit": (lambda path: flip_bit(path / ".metadata", 200), r"\.metadata: .*the checksum is wrong"),
    "file in another directory": (lambda path: write_old_meta(path, files={"../x": 1}), r"\.\./x: .*missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_error_names_the_damaged_file_and_the_remedy(damage, tmp_path):
    act, message = DAMAGE[damage]
    path = save(tmp_path)
    act(path)
    assert_load_raises(path, f"step_00000010 is damaged: {message}.*remove the directory")


@pytest.mark.parametrize("name", ["step_00000001", "other"])
def test_a_path_that_is_not_a_checkpoint_is_named(name, tmp_path):
    assert_load_raises(tmp_path / name, "not a checkpoint .*no such directory")


def test_a_directory_that_is_not_a_checkpoint_is_named(tmp_path):
    assert_load_raises(tmp_path, "not a checkpoint .*another directory")


def test_an_index_without_a_checksum_can_be_read(tmp_path):
    """The first versions of ringattn did not write a checksum of the index."""
    path = save(tmp_path)
    write_old_meta(path)
    meta = json.loads((path / "meta.json").read_text())
    del meta["index"]
    (path / "meta.json").write_text(json.dumps(meta))
    load(path, {"model.w": torch.zeros(6)})


def test_a_checkpoint_of_an_earlier_version_is_read_and_compared_with_the_checksums_that_it_has(tmp_path, caplog):
    caplog.set_level("INFO")
    path, loaded = save(tmp_path), torch.zeros(6)
    load(path, {"model.w": loaded})
    assert "checksums" not in caplog.text

    remove_checksums(path)
    for _ in range(2):
        load(path, {"model.w": loaded})
    assert torch.equal(loaded, WEIGHT)
    assert caplog.text.count(f"missing in {path}, because") == 1
    flip_bit_of_weight(path)
    assert_load_raises(path, "__0_0.distcp: .*checksum is wrong")


def test_the_layout_of_meta_does_not_matter(tmp_path):
    path = save(tmp_path)
    meta = read_meta(path)
    file = path / "meta.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items())), indent=7))
    assert read_meta(path) == meta


def test_shapes_are_compared_before_any_tensor_is_read(tmp_path):
    path = save(tmp_path, 1, {"model.a": torch.ones(3), "model.b": torch.ones(7, 5)})
    tensors = {"model.a": torch.zeros(3), "model.b": torch.zeros(7, 6)}
    assert_load_raises(path, r"model.b is torch.float32 of shape \(7, 5\), but .* \(7, 6\) in this run: resume with", tensors)
    assert tensors["model.a"].eq(0).all()


MISMATCHES = {
    "tensor missing": (
        {"model.w": WEIGHT, "model.v": torch.zeros(1)},
        "model.v is missing, but torch.float32 of shape .* in this run",
    ),
    "another dtype": ({"model.w": WEIGHT.bfloat16()}, "model.w is torch.float32 of shape .*, but torch.bfloat16 of shape"),
    "tensor left over": ({"model.v": torch.zeros(6)}, "model.w is torch.float32 of shape .*, but missing in this run"),
}


@pytest.mark.parametrize(("tensors", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_tensors_that_do_not_match_are_named(tensors, message, tmp_path):
    path = save(tmp_path, 1, {"model.w": WEIGHT, "model.v": torch.zeros(6)} if "but missing" in message else None)
    assert_load_raises(path, message, tensors)


def test_tensors_of_another_prefix_may_be_left_out(tmp_path):
    path, loaded = save(tmp_path, 1, {"model.w": WEIGHT, "optim.w.step": torch.ones(())}), torch.zeros(6)
    load(path, {"model.w": loaded})
    assert torch.equal(loaded, WEIGHT)


def test_an_error_on_one_rank_is_raised_on_all_ranks(tmp_path):
    path = save(tmp_path, 1, {"model.w": torch.zeros(4)})
    run_ranks(_load_another_shape_on_rank_1, 2, tmp_path / "ranks", path)


def _load_another_shape_on_rank_1(path: Path) -> None:
    assert_load_raises(
        path, r"model.w is .* of shape \(4,\), but .* of shape \(5,\)", {"model.w": torch.zeros(4 + dist.get_rank())}
    )
