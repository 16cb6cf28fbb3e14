"""Reader of Mooncake logs: one JSON object a line, a request's content as hashes of 512-token blocks.

Format: https://github.com/kvcache-ai/Mooncake (FAST'25 release). There is no user in it. All requests open with the
same block (the system prompt), so the second block tells conversations apart and stands for the user.
"""

from __future__ import annotations

import json
from array import array
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from helm_rl.errors import UserError
from helm_rl.workloads.readers.arrivals import ReadOptions, place
from helm_rl.workloads.trace import Int32Array, Int64Array, Trace, TraceMeta, gather

_MAX_LINE_BYTES = 64 << 20
_MS = 1_000_000
_MAX_MS = 2**63 // _MS - 1
_MAX_TOKENS = 2**31 - 1


def read(paths: list[Path], options: ReadOptions) -> Trace:
    """Read one log. Raises UserError naming file, line and field of the first thing wrong.

    Content is "blocks"; hash ids may be any uint64. new_tokens are those after the blocks that a request has in common,
    from its start, with the same user's previous request. Repeated lines are requests like any other, and are counted.
    """
    if len(paths) > 1:
        raise UserError(f"{paths[1]}: Mooncake logs each start at time 0; convert one at a time, {paths[0]} first")
    log = _Log(paths[0], options)
    log.read()
    time_ns = np.frombuffer(log.time_ns, dtype=np.int64)
    offsets = np.frombuffer(log.offsets, dtype=np.int64)
    placed = place(time_ns, _MS, options)
    offsets, hashes = gather(offsets, np.frombuffer(log.hashes, dtype=np.uint64), placed.order)
    tokens = np.frombuffer(log.tokens, dtype=np.int32)[placed.order]

    second = np.minimum(offsets[:-1] + 1, offsets[1:] - 1)
    user_ids, user = np.unique(hashes[second], return_inverse=True)
    item_ids, items = np.unique(hashes, return_inverse=True)
    user, items = user.astype(np.int64), items.astype(np.int64)
    lone = int(np.count_nonzero(np.diff(offsets) == 1))
    steps = ["user = the second content block (hash_ids[1])", "output_length left out"]
    if lone:
        steps.append(f"user = the only block in requests of one block: {lone}")
    if log.repeats:
        steps.append(f"lines that repeat an earlier one exactly, kept as requests: {log.repeats}")
    dropped = dict(placed.dropped)
    if log.blank:
        dropped["blank lines"] = log.blank
    return Trace(
        arrival_ns=placed.arrival_ns,
        user=user,
        tenant=np.zeros(user.size, dtype=np.int32),
        phase=np.zeros(user.size, dtype=np.int32),
        history_tokens=tokens,
        new_tokens=_new_tokens(user, tokens, offsets, items, options.block_tokens),
        item_offsets=offsets,
        item_values=items,
        user_ids=user_ids,
        item_ids=item_ids,
        meta=TraceMeta(
            name=paths[0].stem,
            source="mooncake",
            origin_ns=placed.origin_ns,
            measure_from_ns=placed.measure_from_ns,
            users=user_ids.size,
            items=item_ids.size,
            content="blocks",
            block_tokens=options.block_tokens,
            phases=(placed.phase,),
            seed=options.seed if options.spread else None,
            steps=(*steps, *placed.steps),
            dropped=dropped,
        ),
    )


class _Log:
    """The columns of a log, filled line by line."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.options = options
        self.time_ns = array("q")
        self.tokens = array("i")
        self.hashes = array("Q")
        self.offsets = array("q", [0])
        self.blank = 0  # lines between others; those at the end are no fault
        self.repeats = 0
        self._seen: set[int] = set()
        self._line = 0

    def read(self) -> None:
        blank = 0
        with open(self.path, "rb") as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                self._line += 1
                if len(line) > _MAX_LINE_BYTES:
                    self._fail(f"the line is longer than {_MAX_LINE_BYTES >> 20} MiB")
                if self.options.progress:
                    self.options.progress(len(line))
                if not line.strip():
                    blank += 1
                    continue
                self.blank, blank = self.blank + blank, 0
                self._take(line)
        if not self.time_ns:
            raise UserError(f"{self.path} has no request in it; a Mooncake log has one JSON object a line")

    def _take(self, line: bytes) -> None:
        try:
            text = line.decode("utf-8-sig" if self._line == 1 else "utf-8")
        except UnicodeDecodeError:
            self._fail("not UTF-8 text")
        try:
            request = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
        except RecursionError:
            self._fail("not the JSON of a request: it is nested too deeply")
        except ValueError as error:
            cut = " (is the file cut off here?)" if not line.endswith(b"\n") else ""
            self._fail(f"not JSON: {str(error)[:120]}{cut}")
        if not isinstance(request, dict):
            self._fail("a request must be a JSON object, {...}")
        time_ns = self._time(self._field(request, "timestamp"))
        tokens = self._field(request, "input_length")
        if type(tokens) is not int or not 1 <= tokens <= _MAX_TOKENS:
            self._fail(f"field input_length: {_short(tokens)} is not a whole number from 1 to {_MAX_TOKENS}")
        hashes = self._field(request, "hash_ids")
        if not isinstance(hashes, list):
            self._fail(f"field hash_ids: {_short(hashes)} is not a list of block ids")
        for block in hashes:
            if type(block) is not int or not 0 <= block < 2**64:
                self._fail(f"field hash_ids: {_short(block)} is not a whole number from 0 to 2^64 - 1")
        blocks = -(-tokens // self.options.block_tokens)
        if len(hashes) != blocks:
            self._fail(
                f"field hash_ids: {len(hashes)} ids, where input_length {tokens} makes {blocks} blocks of "
                f"{self.options.block_tokens} tokens (--block-tokens)"
            )
        self.time_ns.append(time_ns)
        self.tokens.append(tokens)
        self.hashes.extend(hashes)
        self.offsets.append(len(self.hashes))
        mark = hash((time_ns, tokens, repr(request.get("output_length")), *hashes))
        self.repeats += mark in self._seen
        self._seen.add(mark)

    def _field(self, request: dict[str, Any], name: str) -> Any:
        if name not in request:
            found = ", ".join(map(str, list(request)[:12]))
            self._fail(f"field {name} is missing (found: {_short(found)})")
        return request[name]

    def _time(self, value: Any) -> int:
        """Milliseconds, whole or with decimals, to ns without passing through a float."""
        if type(value) is not int and not isinstance(value, Decimal):
            self._fail(f"field timestamp: {_short(value)} is not a number of milliseconds")
        if not -_MAX_MS <= value <= _MAX_MS:
            self._fail(f"field timestamp: {_short(value)} ms is more than 292 years")
        return round(value * _MS)

    def _fail(self, message: str) -> NoReturn:
        raise UserError(f"{self.path}, line {self._line}: {message}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _short(value: object) -> str:
    text = str(value) if isinstance(value, (Decimal, int)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _new_tokens(
    user: Int64Array, tokens: Int32Array, offsets: Int64Array, items: Int64Array, block_tokens: int
) -> Int32Array:
    """Return tokens after the common start with the user's previous request; all of them at his first; int32 (n,)."""
    new = tokens.copy()
    previous: dict[int, int] = {}
    for row, code in enumerate(user.tolist()):
        if (last := previous.get(code)) is not None:
            old, now = (items[offsets[r] : offsets[r + 1]] for r in (last, row))
            shared = min(old.size, now.size)
            differs = old[:shared] != now[:shared]
            common = int(np.argmax(differs)) if differs.any() else shared
            new[row] = max(0, int(tokens[row]) - common * block_tokens)
        previous[code] = row
    return new
