"""Which format a log has: told by the names in its header, by the shape of its rows, and last by the file's name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helm_rl.errors import UserError
from helm_rl.workloads.readers import oracle, parquet
from helm_rl.workloads.readers.mapping import SEPARATOR_WORDS
from helm_rl.workloads.readers.presets import PRESETS
from helm_rl.workloads.readers.source import first_line_of, start_of
from helm_rl.workloads.readers.tables import cells_of

GENERIC = "generic"
ORACLE = "oracle-general"
FORMATS: tuple[str, ...] = (*PRESETS, ORACLE, GENERIC)
"""The names that `--format` takes."""

_BLANKS = " \t\n\r\v\f"  # those of bytes.strip, by which a file is empty; str.strip takes more for blanks
_SAMPLE = 200  # rows looked at
_LCS = (0x123456789ABCDEF0).to_bytes(8, "little")
_SEPARATORS = (",", "\t", "::", ";", "|")
_DATA_ROW = re.compile(r"-?\d+(,-?\d*){10,}\s*$")  # a KuaiRand log without its header


def kind_of(path: Path, start: bytes) -> str:
    """Return "parquet", "jsonl", "csv" or "binary"."""
    if start.startswith(b"PAR1"):
        return "parquet"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise UserError(f"{path} holds nothing but blanks")
    if b"\0" in start[:4096]:
        return "binary"
    return "jsonl" if text.startswith(b"{") else "csv"


def detect_format(path: str | Path) -> str:
    """Tell the format of a log. Raises UserError if it is none that is known, or could be several."""
    path = Path(path)
    start = start_of(path)
    kind = kind_of(path, start)
    if kind == "binary":
        return _binary(path, start)
    if kind == "parquet":
        names = parquet.names_of(path)
        found = [name for name, preset in PRESETS.items() if "parquet" in preset.mapping.files and _fits(preset, names)]
        return _one_of(path, found, f"columns {', '.join(names[:12])}")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().decode("utf-8", "replace")
    lines = [line.removesuffix("\r") for line in text.split("\n")][:_SAMPLE]
    if len(lines) > 1 and len(start) >= 1 << 16:
        lines = lines[:-1]  # perhaps a part of one
    if kind == "jsonl":
        return _objects(path, lines[0] if len(lines) > 1 or len(start) < 1 << 16 else first_line_of(path))
    return _table(path, [line for line in lines if line.strip(_BLANKS)])


def _fits(preset: object, names: list[str]) -> bool:
    header = preset.header  # type: ignore[attr-defined]
    return bool(header) and header <= set(names)


def _binary(path: Path, start: bytes) -> str:
    if start.startswith(_LCS):
        raise UserError(f"{path} is a libCacheSim lcs trace, which is not read; convert it to oracleGeneral first")
    if oracle.looks_like(start):
        return ORACLE
    line = start.count(b"\n", 0, start.index(b"\0")) + 1
    raise UserError(
        f"{path}, line {line}: not text; a log is CSV, JSON Lines, Parquet or oracleGeneral (--format {ORACLE})"
    )


def _objects(path: Path, line: str) -> str:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line 1: not JSON: {str(error)[:120]}") from None
    names = list(document) if isinstance(document, dict) else []
    found = [name for name, preset in PRESETS.items() if "jsonl" in preset.mapping.files and _fits(preset, names)]
    if "ragpulse" in found and isinstance(document.get("hash_ids"), list):
        found.remove("ragpulse")  # Mooncake's layout with sessions, as its tools write it
    if not found and len(names) and {"input_length", "hash_ids", "timestamp"} & set(names):
        return "mooncake"  # whose reader says what is missing
    return _one_of(path, found, f"a JSON object of {', '.join(map(str, names[:12]))}")


def _table(path: Path, lines: list[str]) -> str:
    first = lines[0]
    headers = {separator: cells_of(first.removeprefix("#"), separator) for separator in _SEPARATORS}
    found = []
    for name, preset in PRESETS.items():
        mapping = preset.mapping
        if "csv" not in mapping.files:
            continue
        if preset.header:
            names = headers[mapping.separator]
            if (mapping.comment or not first.startswith("#")) and _fits(preset, names):
                found.append(name)
        elif preset.row is not None:
            fitting = sum(bool(preset.row.fullmatch(line)) for line in lines)
            if 10 * fitting >= 9 * len(lines) or (len(lines) < 10 and fitting == len(lines) - 1 and fitting):
                found.append(name)
    if not found:
        _refuse_close(path, first, headers)
        if _DATA_ROW.match(first):
            found = ["kuairand"]  # without its header, which its reader says
    return _one_of(path, found, f"{first[:60]!r}")


def _refuse_close(path: Path, first: str, headers: dict[str, list[str]]) -> None:
    """Name what keeps a header from being a known one: another separator, or one missing column."""
    for separator, names in headers.items():
        for name, preset in PRESETS.items():
            mapping = preset.mapping
            if "csv" in mapping.files and _fits(preset, names) and separator != mapping.separator:
                raise UserError(
                    f"{path}, line 1: columns are separated by {SEPARATOR_WORDS[separator]}; "
                    f"a {name} log has {SEPARATOR_WORDS[mapping.separator]}"
                )
    every = {cell for names in headers.values() for cell in names}
    close = [
        (len(preset.header & every) / len(preset.header), name) for name, preset in PRESETS.items() if preset.header
    ]
    share, name = max(close)
    if share >= 0.5 and len(PRESETS[name].header & every) >= 2:
        missing = ", ".join(sorted(PRESETS[name].header - every))
        shown = (first if len(first) <= 160 else first[:157] + "...").replace("\r", " ")
        raise UserError(
            f"{path}, line 1: column {missing} is missing from the header found ({shown}), if it is a {name} log; "
            "for others say which column is what: --map time=...,user=...,item=..."
        )


def _one_of(path: Path, found: list[str], what: str) -> str:
    """Choose the preset that names the most columns; where several do, the file's name decides, or nobody."""
    if not found:
        raise UserError(
            f"{path}, line 1: {what} is the start of no format known; known are {', '.join(FORMATS[:-1])}; "
            "for others say which column is what: --map time=...,user=...,item=..."
        )
    most = max(len(PRESETS[name].header) for name in found)
    best = [name for name in found if len(PRESETS[name].header) == most]
    if len(best) > 1:
        named = [name for name in best if PRESETS[name].file.search(path.name)]
        best = named if len(named) == 1 else best
    if len(best) > 1:
        raise UserError(f"{path} could be any of {', '.join(best)}; say which with --format")
    return best[0]
