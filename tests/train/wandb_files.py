"""Read the files of offline runs of Weights & Biases (W&B).

wandb offers no reader for the .wandb files that it writes. Such a file begins with a header of 7 bytes. Then it has the format
of a LevelDB log. The log consists of blocks of 32 KiB, and each block contains chunks. A chunk has a header with a checksum (4
bytes), the length of its data (2 bytes) and its type (1 byte). A record that does not fit into one block is split into several
chunks. Each record is a serialised protobuf message.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, FILE_HEADER, CHUNK_HEADER = 32768, 7, 7
FULL, LAST = 1, 4  # the types of the chunks with which a record ends


@dataclass
class Segment:
    """The content of one offline-run-* folder, which one launch has written."""

    id: str
    name: str
    group: str
    resume: Any
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    step_metrics: dict[str, str] = field(default_factory=dict)  # by the pattern of the name of a metric
    exit_code: int | None = None  # None if the launch has not finished its W&B run


def read_segments(directory: Path) -> list[Segment]:
    """Return the segments of a run in the order in which they were written. `directory` is the directory of the run.

    All launches must have finished their W&B runs.
    """
    segments = [read_segment(path) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]
    assert all(segment.exit_code is not None for segment in segments), "W&B has not finished a file"
    return segments


def read_segment(path: Path) -> Segment:
    """Return the content of a .wandb file."""
    segment = Segment("", "", "", None, {}, [], {})
    for record in read_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            segment.id, segment.name, segment.group = record.run.run_id, record.run.display_name, record.run.run_group
            segment.resume = record.run.resume
            segment.config |= _values(record.run.config.update)
        elif kind == "config":
            segment.config |= _values(record.config.update)
        elif kind == "history":
            segment.history.append(_values(record.history.item))
        elif kind == "summary":
            segment.summary |= _values(record.summary.update)
        elif kind == "metric":
            segment.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            segment.exit_code = record.exit.exit_code
    return segment


def read_table(directory: Path, row: dict[str, Any], name: str) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a table.

    Args:
        directory: the directory of the run.
        row: the row of the history that contains the table.
        name: the name of the table.
    """
    (path,) = directory.glob(f"wandb/offline-run-*/files/{row[f'{name}/path']}")
    table = json.loads(path.read_text())
    return table["columns"], table["data"]


def read_records(path: Path) -> Iterator[Record]:
    """Return the records of a .wandb file."""
    data, position, record = path.read_bytes(), FILE_HEADER, b""
    while position + CHUNK_HEADER <= len(data):
        if BLOCK - position % BLOCK < CHUNK_HEADER:  # The rest of a block is padding if no header fits into it.
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += CHUNK_HEADER
        if position + length > len(data):
            return  # W&B has not written the whole chunk yet.
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield Record.FromString(record)
            record = b""


def _values(items: Any) -> dict[str, Any]:
    """Return the values by their names, without the values that W&B adds."""
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {name: value for name, value in values.items() if not name.startswith("_")}
