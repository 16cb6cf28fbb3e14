"""The bytes of a log: plain, gzip or zstd (of any number of frames), in pieces of whole lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helm_rl.errors import UserError

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_KINDS = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_OTHERS = (
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"BZh", "compressed by bzip2; unpack it first"),
    (b"\xfd7zXZ", "compressed by xz; unpack it first"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
)

Progress = Callable[[int], None]


class Source:
    """One open log; `read` gives its content, unpacked."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        """Open it. progress is told the bytes of the file that were consumed since it was last told."""
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if not path.is_file():
            raise UserError(f"{path} is not a file")
        self.path = path
        self._progress = progress
        self._told = 0
        try:
            self._file = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        start = self._file.read(8)
        self._file.seek(0)
        self._stream: Any = self._file
        self.packed: str | None = None
        if start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F:  # a skippable frame comes first
            start = _KINDS[1][0]
        for magic, kind in _KINDS:
            if start.startswith(magic):
                import pyarrow as pa

                self.packed = kind
                self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), kind)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, b"" at the end. Raises UserError for packed data that are damaged or cut off."""
        try:
            data: bytes = self._stream.read(size)
        except OSError as error:
            if error.errno is not None or self.packed is None:
                raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from None
            what = "is cut off" if "Truncated" in str(error) else "is damaged"
            raise UserError(f"{self.path} {what}: its {self.packed} data cannot be unpacked to their end") from None
        if self._progress:
            at = self._file.tell()
            self._progress(at - self._told)
            self._told = at
        return data

    def lines(self) -> Iterator[bytes]:
        """Yield the content in pieces of whole lines; the last may lack its newline."""
        rest = b""
        while data := self.read(CHUNK_BYTES):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest += data
                if len(rest) > MAX_LINE_BYTES:
                    raise UserError(f"{self.path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; a log has lines")
                continue
            yield rest + data[:cut] if rest else data[:cut]
            rest = data[cut:]
        if rest:
            yield rest


def first_line_of(path: Path) -> str:
    """Return the first line that is not blank, whatever its length up to MAX_LINE_BYTES."""
    with Source(path) as source:
        for piece in source.lines():
            text = piece.removeprefix(b"\xef\xbb\xbf").lstrip()
            if text:
                return text.split(b"\n", 1)[0].decode("utf-8", "replace")
    return ""


def start_of(path: Path, size: int = 1 << 16) -> bytes:
    """Return the first `size` bytes of a log's content; raise UserError for what cannot be a log."""
    with Source(path) as source:
        start = b""
        while len(start) < size and (data := source.read(size - len(start))):
            start += data
    if not start:
        raise UserError(f"{path} is empty" if source.packed is None else f"{path} has nothing in it")
    for magic, what in _OTHERS:
        if start.startswith(magic):
            raise UserError(f"{path} is {what}")
    if start[257:262] == b"ustar":
        raise UserError(f"{path} is a tar archive; unpack it first, and name the files in it")
    return start
