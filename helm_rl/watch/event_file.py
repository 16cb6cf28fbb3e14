"""TensorBoard's event files, read while they are being written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import masked_crc32c

_HEADER = struct.Struct("<QI")  # length of the data, and a checksum of it
_CHECKSUM = struct.Struct("<I")
_MOST_RECORD = 16 << 10
"""Bytes of a record that is read: one with scalars has some hundred; pictures and texts are passed over."""
_MOST_LENGTH = 1 << 40


class Scalar(NamedTuple):
    """A value of a tag, after so many steps, at a time in seconds since 1970."""

    tag: str
    step: int
    value: float
    time_s: float


class EventFile:
    """Reads the scalars of one file from where the last call ended.

    Attributes:
        damaged: the byte at which something stands that no writer leaves there, None where there is none; from there
            on nothing is read. Half a record at the end is no damage: the rest may be on its way.
        behind: whether the last call left something that could be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: int | None = None
        self.behind = False
        self._offset = 0

    def read(self, most: int) -> Iterator[Scalar]:
        """Yield what has been written since, nothing where the file has gone.

        It ends after so many scalars, or with the record that goes beyond; a record without any counts as one.
        """
        self.behind = False
        if self.damaged is not None:
            return
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            size = file.seek(0, 2)
            if size < self._offset:  # another file of the same name
                self._offset = 0
            file.seek(self._offset)
            while most > 0:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    return
                length, checksum = _HEADER.unpack(header)
                if checksum != masked_crc32c(header[:8]) or length > _MOST_LENGTH:
                    self.damaged = self._offset
                    return
                end = self._offset + _HEADER.size + length + _CHECKSUM.size
                if end > size:
                    return
                if length <= _MOST_RECORD:
                    data = file.read(length)
                    if _CHECKSUM.unpack(file.read(_CHECKSUM.size)) != (masked_crc32c(data),):
                        self.damaged = self._offset
                        return
                    scalars = list(_scalars(data))
                else:
                    file.seek(end)
                    scalars = []
                self._offset = end
                most -= max(len(scalars), 1)
                yield from scalars
            self.behind = True


def _scalars(data: bytes) -> Iterator[Scalar]:
    try:
        event = Event.FromString(data)
    except Exception:  # protobuf's own: the checksum is right, but who wrote it has another idea of what an event is
        return
    for value in event.summary.value:
        if value.WhichOneof("value") == "simple_value":
            yield Scalar(value.tag, event.step, value.simple_value, event.wall_time)
