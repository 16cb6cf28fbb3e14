"""TensorBoard's event files while they are written: whole records only, each once, and no damage is read on over."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from helm_rl.watch.event_file import EventFile

ALL = 1_000_000


def written(folder: Path, values: int = 5) -> Path:
    """Write a file as a training does: a text, scalars, a histogram that is passed over."""
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("hyperparameters", "|param|value|\n" * 3_000)
        for step in range(values):
            writer.add_scalar("losses/value_loss", step / 2, step)
        writer.add_histogram("weights", np.arange(10.0), 0)
        writer.add_scalar("charts/SPS", 7, 100)
    (path,) = folder.glob("events.out.tfevents.*")
    return path


def test_the_scalars_of_a_file_are_read_once(tmp_path: Path) -> None:
    file = EventFile(written(tmp_path))
    found = [(one.tag, one.step, one.value) for one in file.read(ALL)]
    assert found == [*[("losses/value_loss", step, step / 2) for step in range(5)], ("charts/SPS", 100, 7.0)]
    assert list(file.read(ALL)) == []
    assert file.damaged is None


def test_half_a_record_is_read_once_the_rest_has_come(tmp_path: Path) -> None:
    """Cut at every byte of the file in turn, it gives what is whole, and then the rest."""
    source = written(tmp_path / "a")
    data = source.read_bytes()
    whole = [one[:3] for one in EventFile(source).read(ALL)]
    path = tmp_path / "cut"
    for end in [*range(0, 200, 7), *range(len(data) - 400, len(data), 3)]:
        path.write_bytes(data[:end])
        file = EventFile(path)
        before = [one[:3] for one in file.read(ALL)]
        assert before == whole[: len(before)]
        assert file.damaged is None
        path.write_bytes(data)
        assert before + [one[:3] for one in file.read(ALL)] == whole


def test_no_more_records_are_read_than_asked_for(tmp_path: Path) -> None:
    file = EventFile(written(tmp_path))
    parts = [[one.value for one in file.read(3)] for _ in range(5)]
    assert [value for part in parts for value in part] == [0.0, 0.5, 1.0, 1.5, 2.0, 7.0]
    assert max(map(len, parts)) <= 3
    assert parts[0] == [0.0]  # the version and the text come first


def test_what_is_left_for_the_next_call_is_told(tmp_path: Path) -> None:
    file = EventFile(written(tmp_path))
    told = []
    for _ in range(4):
        list(file.read(3))
        told.append(file.behind)
    assert told == [True, True, True, False]  # of 9 records


def test_a_record_of_many_scalars_counts_as_so_many(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    with path.open("wb") as file:
        for step in range(4):
            event = Event(step=step)
            for k in range(5):
                event.summary.value.add(tag=str(k), simple_value=k)
            RecordWriter(file).write(event.SerializeToString())
    source = EventFile(path)
    assert [one.step for one in source.read(6)] == [0] * 5 + [1] * 5
    assert source.behind
    assert len(list(source.read(ALL))) == 10
    assert not source.behind


@pytest.mark.parametrize("at", ["length", "checksum", "data", "zeros", "huge"])
def test_from_damage_on_nothing_is_read(tmp_path: Path, at: str) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    second = 16 + struct.unpack_from("<Q", data)[0]  # where the second record begins
    third = second + 16 + struct.unpack_from("<Q", data, second)[0]
    fourth = third + 16 + struct.unpack_from("<Q", data, third)[0]
    if at == "length":
        data[fourth] ^= 1
    elif at == "checksum":
        data[fourth + 8] ^= 1
    elif at == "data":
        data[fourth + 14] ^= 1
    elif at == "zeros":  # as a machine leaves them that has lost its power
        data[fourth:] = bytes(500)
    else:
        data[fourth : fourth + 12] = b"\xff" * 8 + struct.pack("<I", 0)
    path.write_bytes(data)
    file = EventFile(path)
    assert [one.value for one in file.read(ALL)] == [0.0]
    assert file.damaged == fourth
    assert list(file.read(ALL)) == []


def test_a_file_that_has_gone_or_was_replaced_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a", values=20)
    file = EventFile(path)
    assert len(list(file.read(ALL))) == 21
    path.write_bytes(written(tmp_path / "b", values=2).read_bytes())
    assert [one.value for one in file.read(ALL)] == [0.0, 0.5, 7.0]
    path.unlink()
    assert list(file.read(ALL)) == []
    assert list(EventFile(tmp_path / "never").read(ALL)) == []
