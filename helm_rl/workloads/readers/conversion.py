"""From logs to a trace, as one stream: read, sort by time, make requests, place them, add what is lacking, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.workloads.readers.arrivals import MAX_NS, Placer, ReadOptions
from helm_rl.workloads.readers.detect import FORMATS, GENERIC, ORACLE, detect_format, kind_of
from helm_rl.workloads.readers.jsonl import read_jsonl
from helm_rl.workloads.readers.mapping import CHAIN, FRESH, ITEM, SECOND_BLOCK, Mapping
from helm_rl.workloads.readers.oracle import read_oracle
from helm_rl.workloads.readers.parquet import read_parquet
from helm_rl.workloads.readers.presets import PRESETS
from helm_rl.workloads.readers.requests import Candidates, Grouper, Histories, Requests
from helm_rl.workloads.readers.rows import Dictionaries, Drops, Facts, Rows
from helm_rl.workloads.readers.runs import Runs
from helm_rl.workloads.readers.source import start_of
from helm_rl.workloads.readers.tables import Columns, read_csv
from helm_rl.workloads.trace import BASE, CANDIDATES, Ids, PieceCheck, Trace, TraceMeta, TracePhase

_MOST_TENANTS = 65_536
_MAX_HISTORY = 2**31 - 1

_ORACLE = Mapping(
    ORACLE,
    "libCacheSim oracleGeneral (binary)",
    files=("binary",),
    time="time",
    user=ITEM,
    item="object",
    requests="row",
    repeats_kept=True,
    notes=("size and next access left out",),
)


class Writer(Protocol):
    """Takes a trace piece by piece, as TraceWriter does."""

    def append(
        self,
        columns: dict[str, npt.NDArray[Any]],
        item_offsets: npt.NDArray[np.int64],
        item_values: npt.NDArray[np.int64],
        candidates: npt.NDArray[np.int64] | None = None,
        done: float = 0.0,
    ) -> None:
        """Add requests."""

    def finish(self, meta: TraceMeta) -> None:
        """End the trace."""


OpenWriter = Callable[[dict[str, Ids], int], Writer]
"""Given the tables beside the requests and the number of candidates of each, returns the writer."""


def convert_log(
    paths: list[Path], format: str | None, options: ReadOptions, open_writer: OpenWriter, folder: Path | None = None
) -> TraceMeta:
    """Convert the files of one log, in memory that its length does not set, and return the meta data.

    What is in memory: the dictionaries of ids, what is carried for each user, and a few pieces of rows. folder: where a
    spill file may lie. Raises UserError as the readers do.
    """
    options.check()
    mapping = _mapping_of(paths, format, options)
    books, facts, drops = Dictionaries(), Facts(), Drops(options.strict)
    for part, name in mapping.named().items():
        if hasattr(books, part):
            getattr(books, part).name = name
    with Runs(folder) as runs:
        try:
            _read(paths, mapping, options, format is None, books, drops, facts, runs)
            return _Conversion(paths, mapping, options, books, drops, facts, runs).write(open_writer)
        except OSError as error:
            if error.filename is None and error.errno is None:
                raise UserError(f"{paths[0]} cannot be read: {error}") from None
            raise


def _mapping_of(paths: list[Path], format: str | None, options: ReadOptions) -> Mapping:
    if not paths:
        raise UserError("name at least one file to convert")
    if format is None and options.mapping is not None:
        format = GENERIC
    if format is not None and format not in FORMATS:
        raise UserError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    found = [detect_format(path) if format is None else format for path in paths]
    for path, other in zip(paths, found, strict=True):
        if other != found[0]:
            raise UserError(f"{path} is a {other} log and {paths[0]} a {found[0]} log; convert them one at a time")
    if found[0] == GENERIC:
        if options.mapping is None:
            raise UserError("format generic needs --map, which says what the columns are")
        mapping = options.mapping
    else:
        if options.mapping is not None:
            raise UserError(f"--map goes with format generic, not with {found[0]}")
        mapping = _ORACLE if found[0] == ORACLE else PRESETS[found[0]].mapping
    if mapping.alone and len(paths) > 1:
        raise UserError(
            f"{paths[1]}: {mapping.name} logs each start at time 0; convert one at a time, {paths[0]} first"
        )
    if mapping.blocks and options.block_tokens is not None:
        mapping = replace(mapping, blocks=options.block_tokens)
    if mapping.blocks and options.requests not in (None, "row"):
        raise UserError(
            f"requests = {options.requests} joins rows, and a row of a {mapping.name} log has all blocks of its request"
        )
    if options.requests is not None:
        mapping = replace(mapping, requests=options.requests)
    if options.session_s is not None:
        mapping = replace(mapping, session_s=options.session_s)
        if mapping.requests != "session-gap":
            raise UserError(
                f"session-s says which pause ends a session, and requests = {mapping.requests} has none; "
                "pass --requests session-gap too"
            )
    if mapping.requests != "row" and mapping.user in (FRESH, ITEM):
        if options.requests is not None:
            raise UserError(f"requests = {options.requests} needs users, and a {mapping.name} log has none")
        mapping = replace(mapping, requests="row")
    return mapping


def _read(
    paths: list[Path],
    mapping: Mapping,
    options: ReadOptions,
    guessed: bool,
    books: Dictionaries,
    drops: Drops,
    facts: Facts,
    runs: Runs,
) -> None:
    columns = Columns(mapping, books, drops, facts, guessed)
    timed = options.arrivals is not None or options.order_only
    for path in paths:
        parts: Iterator[Rows]
        kind = kind_of(path, start_of(path))
        if mapping.name == ORACLE:
            parts = read_oracle(path, books, drops, facts, options.progress)
        elif kind not in mapping.files and kind == "binary":
            raise UserError(f"{path}, line 1: not text; a {mapping.name} log is {' or '.join(mapping.files)}")
        elif kind == "parquet" and "parquet" in mapping.files:
            parts = read_parquet(path, mapping, columns, timed, options.progress)
        elif mapping.files == ("jsonl",) or (kind == "jsonl" and "jsonl" in mapping.files):
            parts = read_jsonl(path, mapping, columns, timed, options.progress)
        elif "csv" in mapping.files and kind != "parquet":
            parts = read_csv(path, mapping, columns, timed, options.progress)
        else:
            raise UserError(f"{path} is {kind}; a {mapping.name} log is {' or '.join(mapping.files)}")
        for rows in parts:
            runs.add(rows)
    if not runs.rows:
        raise UserError(f"{paths[0]}: no row of it can be used")
    runs.finish()


class _Conversion:
    """The second half: everything after the rows have been read."""

    def __init__(
        self,
        paths: list[Path],
        mapping: Mapping,
        options: ReadOptions,
        books: Dictionaries,
        drops: Drops,
        facts: Facts,
        runs: Runs,
    ) -> None:
        if facts.timeless and mapping.requests != "row":
            if options.requests is not None:
                raise UserError(
                    f"requests = {options.requests} joins rows by their times, and the log has none; "
                    "pass --requests row"
                )
            mapping = replace(mapping, requests="row")
        self.paths = paths
        self.mapping = mapping
        self.options = options
        self.books = books
        self.drops = drops
        self.facts = facts
        self.runs = runs
        self.steps: list[str] = []
        self.from_ns, self.to_ns = runs.first_ns, runs.last_ns + 1
        if runs.last_ns - runs.first_ns >= MAX_NS:
            raise UserError(
                f"times span from {runs.first_ns} to {runs.last_ns} ns, more than a trace can hold (146 years)"
            )
        self.kept_rows = runs.rows
        self.raised = 0  # requests with more items than the log says that their history has
        self.own_users = mapping.user == FRESH or (mapping.user != ITEM and not books.user.count)
        """Whether every request has a user of its own; BurstGPT v1 lacks a column that v2 has."""

    def write(self, open_writer: OpenWriter) -> TraceMeta:
        """Write the trace and return its meta data."""
        mapping, options = self.mapping, self.options
        window = self._cut()
        self._order_ids(recount=window or self.facts.recount)
        self.placer = Placer(self._origin_ns(), self.facts.step_ns, options)
        spread_ns = 0
        if options.spread:
            ahead = Placer(self.placer.origin_ns, self.facts.step_ns, options)
            ahead.watch(self._requests()[1])
            spread_ns = ahead.step_ns()
        tables: dict[str, Ids] = {}
        users = self.item_ids if mapping.user == ITEM else self.user_ids
        if users is not None:
            tables["user_ids"] = users
        if self.item_ids is not None:
            tables["item_ids"] = self.item_ids
        if options.candidates and self.item_ids is None:
            raise UserError(f"candidates: a {mapping.name} log has no items to draw them from")
        writer = open_writer(tables, options.candidates)
        grouper, parts = self._requests()
        widest = TracePhase(label=BASE, start_ns=0, end_ns=MAX_NS - 1)
        meta = TraceMeta(
            name=self.paths[0].name.split(".")[0] or self.paths[0].name,
            source=mapping.name,
            origin_ns=self.placer.origin_ns,
            measure_from_ns=0,
            users=self.kept_rows if users is None else users.size,
            items=options.law_items if self.item_ids is None else self.item_ids.size,
            content="law" if self.item_ids is None else "blocks" if mapping.blocks else "items",
            block_tokens=mapping.blocks,
            zipf_items=options.zipf_items if self.item_ids is None else None,
            law_items=options.law_items if self.item_ids is None else None,
            phases=(widest,),
            seed=options.seed if options.spread or options.candidates or options.arrivals is not None else None,
        )
        check = PieceCheck(meta, tables)
        count = self._append(writer, self.placer.place(parts, spread_ns), check)
        measure_from_ns, phase = self.placer.measured()
        meta = meta.model_copy(
            update={
                "measure_from_ns": measure_from_ns,
                "users": count if users is None else users.size,
                "phases": (phase,),
                "steps": (*self._said(grouper, count), *self.steps, *self.placer.steps(spread_ns), *self._added()),
                "dropped": self._dropped(grouper),
            }
        )
        check.finish(meta)
        writer.finish(meta)
        return meta

    def _cut(self) -> bool:
        """Narrow the window of time to what was asked for; whether that leaves rows out."""
        options, runs = self.options, self.runs
        if options.start_s is None and options.end_s is None:
            return False
        if self.facts.timeless or not self.mapping.time:
            raise UserError(f"start-s and end-s need times, and a {self.mapping.name} log has none")
        first, last = runs.first_ns, runs.last_ns
        from_ns = first + round((options.start_s or 0.0) * 1e9)
        to_ns = last + 1 if options.end_s is None else min(last + 1, first + round(options.end_s * 1e9))
        self.from_ns, self.to_ns = from_ns, to_ns
        self.kept_rows = sum(part.time_ns.size for part in runs.pieces(from_ns, to_ns)) if from_ns < to_ns else 0
        if not self.kept_rows:
            raise UserError(
                f"no row lies in the window asked for; the log's {runs.rows} rows span {(last - first) / 1e9:g} s"
            )
        self.steps.append(f"kept [{(from_ns - first) / 1e9:g}, {(to_ns - first) / 1e9:g}) s of the log")
        return self.kept_rows < runs.rows

    def _order_ids(self, recount: bool) -> None:
        """Fix the final codes: in order of the ids, of those that come up in the rows kept."""
        books = self.books
        used: dict[str, npt.NDArray[np.bool_] | None] = {"user": None, "item": None}
        if recount:
            used = {name: np.zeros(getattr(books, name).count, dtype=bool) for name in used}
            for part in self.runs.pieces(self.from_ns, self.to_ns):
                for name, mask in used.items():
                    column = getattr(part, name)
                    if column is not None and mask is not None:
                        mask[column] = True
        self.user_ids: Ids | None = None
        self.item_ids: Ids | None = None
        if books.user.count:
            self.user_ids, self._user_place = books.user.ordered(used["user"])
            books.user.free()
        if books.item.count:
            self.item_ids, self._item_place = books.item.ordered(used["item"])
            books.item.free()
        if self.mapping.item and (self.item_ids is None or not self.item_ids.size):
            raise UserError(f"{self.paths[0]}: not one item in it; field {self.mapping.item} is empty in every row")
        self._tenants = self._tenant_values()
        self._request_place = books.request.ordered()[1] if books.request.count else None

    def _tenant_values(self) -> npt.NDArray[np.int32] | None:
        """Return the tenant of each code: the number itself, or the place of a name among the names."""
        book = self.books.tenant
        if not book.count:
            return None
        ids, place = book.ordered()
        if isinstance(ids, np.ndarray):
            return ids[place].astype(np.int32)
        if ids.size > _MOST_TENANTS:
            raise UserError(f"field {book.name}: {ids.size} different tenants, more than {_MOST_TENANTS}")
        names = ids.tolist()
        listed = ", ".join(f"{i} = {name or '(empty)'}" for i, name in enumerate(names[:12]))
        self.steps.append(f"tenant = {book.name}: {listed}{', ...' if len(names) > 12 else ''}")
        return place

    def _origin_ns(self) -> int:
        if self.options.arrivals is not None:
            return 0
        if self.mapping.requests == "session-gap":  # a session comes at its last row
            for part in self._requests()[1]:
                if len(part):
                    return int(part.time_ns[0])
        return int(next(self.runs.pieces(self.from_ns, self.to_ns)).time_ns[0])

    def _requests(self) -> tuple[Grouper, Iterator[Requests]]:
        mapping = self.mapping
        real_user = not self.own_users and mapping.user != ITEM
        plain = real_user and not mapping.blocks and bool(mapping.item) and self.facts.plain
        grouper = Grouper(
            mapping.requests,
            round(mapping.session_s * 1e9),
            drop_repeats=plain and not mapping.repeats_kept,
            by_user=mapping.requests != "row" or (plain and not mapping.repeats_kept),
        )
        return grouper, grouper.requests(self._final_rows())

    def _final_rows(self) -> Iterator[Rows]:
        for part in self.runs.pieces(self.from_ns, self.to_ns):
            if part.user is not None:
                part.user = self._user_place[part.user]
            if part.item is not None:
                part.item = self._item_place[part.item]
            if part.tenant is not None and self._tenants is not None:
                part.tenant = np.where(part.tenant < 0, np.int32(0), self._tenants[part.tenant])
            if part.request is not None and self._request_place is not None:
                part.request = self._request_place[part.request]
            yield part

    def _append(self, writer: Writer, parts: Iterator[Requests], check: PieceCheck) -> int:
        """Write the requests with their histories; return how many."""
        mapping, options = self.mapping, self.options
        users = 0
        if not self.own_users:
            ids = self.item_ids if mapping.user == ITEM else self.user_ids
            users = 0 if ids is None else ids.size
        histories = Histories(users, mapping.blocks)
        candidates = None
        if options.candidates and self.item_ids is not None:
            window_ns = round(options.candidate_window_s * 1e9)
            candidates = Candidates(options.candidates, window_ns, options.seed, self.item_ids.size)
        count = rows = 0
        for part in parts:
            rows += part.rows
            n = len(part)
            if not n:
                continue
            if self.own_users:
                user = np.arange(count, count + n, dtype=np.int64)
            elif mapping.user == ITEM:
                user = part.items
            else:
                assert part.user is not None
                user = part.user
            count += n
            new = np.diff(part.offsets)
            if mapping.blocks:
                assert part.tokens is not None
                history = part.tokens.astype(np.int64)
                new = histories.after_blocks(user, part.tokens, part.offsets, part.items).astype(np.int64)
            elif part.tokens is not None:
                history = np.maximum(part.tokens.astype(np.int64), new)
                self.raised += int(np.count_nonzero(history > part.tokens))
            elif self.own_users:
                history = new
            else:
                history = histories.running(user, new)
            if history.size and history.max() > _MAX_HISTORY:
                raise UserError(
                    f"{self.paths[0]}: one user has {history.max()} rows; a history holds at most {_MAX_HISTORY}"
                )
            columns: dict[str, npt.NDArray[Any]] = {
                "arrival_ns": part.time_ns,
                "user": user,
                "tenant": np.zeros(n, dtype=np.int32) if part.tenant is None else part.tenant.astype(np.int32),
                "phase": np.zeros(n, dtype=np.int32),
                "history_tokens": history.astype(np.int32),
                "new_tokens": new.astype(np.int32),
            }
            check.check(columns, part.offsets, part.items)
            drawn = None if candidates is None else candidates.draw(part.time_ns, part.offsets, part.items)
            writer.append(columns, part.offsets, part.items, drawn, done=min(1.0, rows / self.kept_rows))
        return count

    def _said(self, grouper: Grouper, count: int) -> list[str]:
        """Say how rows became requests, and what stands for what the log lacks."""
        mapping, facts = self.mapping, self.facts
        noun = "requests" if mapping.requests == "row" else "rows"
        steps = []
        if mapping.requests == "row":
            steps.append(f"every row is a request: {count}")
        elif mapping.requests == "session-gap":
            steps.append(
                f"{self.kept_rows} rows in {count} requests: rows of a user with pauses of up to "
                f"{mapping.session_s:g} s, at the time of the last"
            )
        else:
            both = f"{mapping.user} and {mapping.time}" + (f" and {mapping.request}" if mapping.request else "")
            steps.append(f"{self.kept_rows} rows in {count} requests: rows that share {both}")
        if self.runs.early:
            steps.append(f"sorted by time: {self.runs.early} of {self.runs.rows} {noun} came before the one above them")
        stands = {
            FRESH: "no user in the log: every request has a user of its own",
            ITEM: f"no user in the log: its item ({mapping.item}) stands for the user",
            SECOND_BLOCK: f"user = the second content block ({mapping.item}[1])",
            CHAIN: "user = the first chat of a chain (chat_id, parent_chat_id)",
        }
        user = FRESH if self.own_users else mapping.user
        if user in stands:
            steps.append(stands[user])
        if facts.lone:
            steps.append(f"user = the only block in requests of one block: {facts.lone}")
        if facts.late:
            steps.append(f"chats that came after one which follows them, where its chain is cut: {facts.late}")
        if facts.fresh:
            steps.append(f"rows with an empty {mapping.user}, each a user of its own: {facts.fresh}")
        if self.item_ids is None:
            steps.append(
                f"no items in the log: histories follow a Zipf law, exponent {self.options.zipf_items:g} over "
                f"{self.options.law_items:,} items (chosen, not measured)"
            )
        if mapping.tokens:
            steps.append(f"history_tokens = {mapping.tokens}")
            if grouper.tokens_mixed:
                steps.append(f"requests whose rows differ in {mapping.tokens}, the most taken: {grouper.tokens_mixed}")
            if self.raised:
                steps.append(f"{mapping.tokens} below the items of the request, raised to them: {self.raised}")
        else:
            steps.append("history_tokens = the user's items so far, those of the request included")
        if grouper.tenants_mixed:
            steps.append(
                f"requests whose rows differ in {mapping.tenant}, that of the first taken: {grouper.tenants_mixed}"
            )
        if facts.repeated_lines and not grouper.drops_repeats:
            steps.append(f"lines that repeat an earlier one exactly, kept as {noun}: {facts.repeated_lines}")
        if facts.unit:
            steps.append(f"{mapping.time} read as {facts.unit}, told by the size of its values")
        if facts.zoneless:
            steps.append(f"times without a zone, read as UTC: {facts.zoneless}")
        if facts.exponents:
            steps.append(
                f"times written with an exponent, digits below its last are lost: {facts.exponents}; "
                "requests may fall together"
            )
        return [*steps, *mapping.notes, *facts.notes]

    def _added(self) -> list[str]:
        if not self.options.candidates:
            return []
        return [
            f"candidates: {self.options.candidates} a request (table {CANDIDATES}), drawn from the items of the "
            f"{self.options.candidate_window_s:g} s before it (seed {self.options.seed}); the simulator draws its own"
        ]

    def _dropped(self, grouper: Grouper) -> dict[str, int]:
        mapping = self.mapping
        dropped = self.drops.as_meta()
        outside = self.runs.rows - self.kept_rows
        if outside:
            dropped["rows outside the window"] = outside
        if grouper.repeats:
            named = f"{mapping.user}, {mapping.item} and {mapping.time}"
            if self.options.strict:
                time_ns, user, item = grouper.first_repeat or (0, 0, 0)
                ids = [_id(self.user_ids, user), _id(self.item_ids, item)]
                raise UserError(
                    f"{self.paths[0]}: {grouper.repeats} rows repeat {named}; "
                    f"the first: {ids[0]}, {ids[1]} at {time_ns} ns"
                )
            dropped[f"rows that repeat {named}"] = grouper.repeats
        return dropped


def _id(ids: Ids | None, code: int) -> object:
    return code if ids is None else ids[np.array([code])][0]


class TraceParts:
    """A writer that keeps the trace in memory."""

    def __init__(self, tables: dict[str, Ids], candidates: int) -> None:
        self._tables = tables
        self._parts: list[tuple[Any, ...]] = []
        self._meta: TraceMeta | None = None

    def append(
        self,
        columns: dict[str, npt.NDArray[Any]],
        item_offsets: npt.NDArray[np.int64],
        item_values: npt.NDArray[np.int64],
        candidates: npt.NDArray[np.int64] | None = None,
        done: float = 0.0,
    ) -> None:
        """Add requests."""
        self._parts.append((columns, item_offsets, item_values, candidates))

    def finish(self, meta: TraceMeta) -> None:
        """End the trace."""
        self._meta = meta

    def trace(self) -> Trace:
        """Return the trace."""
        assert self._meta is not None
        columns = {name: np.concatenate([part[0][name] for part in self._parts]) for name in self._parts[0][0]}
        lengths = np.concatenate([np.diff(part[1]) for part in self._parts])
        tables: dict[str, npt.NDArray[Any]] = {}
        if self._parts[0][3] is not None:
            tables[CANDIDATES] = np.concatenate([part[3] for part in self._parts])
        return Trace(
            **columns,
            item_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            item_values=np.concatenate([part[2] for part in self._parts]),
            meta=self._meta,
            feature_tables=tables,
            user_ids=self._tables.get("user_ids"),
            item_ids=self._tables.get("item_ids"),
        )
