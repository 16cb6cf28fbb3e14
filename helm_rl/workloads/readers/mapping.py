"""What the columns of a log mean: the mapping that a preset has, or that `--map` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helm_rl.errors import UserError

Unit = Literal["s", "ms", "us", "ns", "iso", "auto"]
UNIT_POWERS: dict[str, int] = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Powers of ten of a nanosecond."""
Requests = Literal["same-time", "session-gap", "row"]

FRESH = "@fresh"
"""In place of a user's column: every request has a user of its own."""
ITEM = "@item"
"""In place of a user's column: the item stands for the user."""
SECOND_BLOCK = "@second"
"""In place of a user's column: the second content block stands for the user."""
CHAIN = "@chain"
"""In place of a user's column: the first request of a chain of chats (chat_id, parent_chat_id) stands for the user."""

_SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|", "space": " ", "colons": "::"}
SEPARATOR_WORDS = {";": "';'", "\t": "a tab", "|": "'|'", "::": "'::'", " ": "a space", ",": "','"}


@dataclass(frozen=True)
class Mapping:
    """Which columns of a table a trace is made of; "" where the log has no such column.

    A column is a name of the header, a place ("1" is the first) where there is no header, or a path into a JSON object
    ("hash_ids.passages_ids").
    """

    name: str
    about: str = ""
    files: tuple[str, ...] = ("csv", "jsonl", "parquet")
    separator: str = ""  # of a CSV file; "": told by its first line
    header: bool = True
    columns: int = 0  # of a file without a header
    comment: str = ""  # what the header's line may start with
    quoted: bool = True
    greedy: str = ""  # the column whose cells may hold separators
    time: str = ""
    unit: Unit = "s"
    unix: bool = False  # times count from 1970: none is negative, and units show in their size
    user: str = FRESH
    user_kind: Literal["whole", "text", "auto"] = "auto"
    item: str = ""
    item_kind: Literal["whole", "text", "auto"] = "auto"
    fresh_if_empty: bool = False  # a row with an empty user has one of its own
    tenant: str = ""
    tenant_kind: Literal["whole", "text", "auto"] = "auto"
    tokens: str = ""
    request: str = ""
    optional: tuple[str, ...] = ()  # columns that may be absent
    blocks: int = 0  # items are content blocks of so many tokens
    requests: Requests = "same-time"
    session_s: float = 1800.0  # of "session-gap"
    repeats_kept: bool = False  # rows that repeat one are accesses of their own
    alone: bool = False  # files each start at time 0: one at a time
    notes: tuple[str, ...] = ()  # steps that every trace of it states

    def named(self) -> dict[str, str]:
        """Return the columns of the file that are read, by their part."""
        parts = {part: getattr(self, part) for part in ("time", "user", "item", "tenant", "tokens", "request")}
        return {part: column for part, column in parts.items() if column and not column.startswith("@")}


def parse_mapping(text: str) -> Mapping:
    """Return the mapping that `--map` says: "time=ts:ms,user=uid,item=vid,tenant=cat,tokens=len,request=rid".

    time=COLUMN[:UNIT], unit s, ms, us, ns, iso or (default) auto; user=COLUMN[:text|:whole], item likewise; without a
    user every request has one of its own; separator=comma|tab|semicolon|pipe|space|colons (default: told by the first
    line); header=no, columns then by their place from 1; blocks=N: items are content blocks of N tokens, and
    every row is a request. Raises
    UserError.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        known = ("time", "user", "item", "tenant", "tokens", "request", "separator", "header", "blocks")
        if not equals or not value or key not in known:
            raise UserError(f"--map: {part!r} is not KEY=VALUE with one of the keys {', '.join(known)}")
        if value.startswith("@"):
            raise UserError(f"--map: {key}={value}: a column's name cannot begin with @; rename the column")
        if key in fields:
            raise UserError(f"--map: {key} is given twice")
        fields[key] = value
    time, unit = _suffix(fields.get("time", ""), (*UNIT_POWERS, "iso", "auto"), "auto")
    user, user_kind = _suffix(fields.get("user", FRESH), ("text", "whole", "auto"), "auto")
    item, item_kind = _suffix(fields.get("item", ""), ("text", "whole", "auto"), "auto")
    header = fields.get("header", "yes")
    if header not in ("yes", "no"):
        raise UserError(f"--map: header={header} must be yes or no")
    separator = fields.get("separator", "")
    blocks = fields.get("blocks", "0")
    if not blocks.isascii() or not blocks.isdigit() or not 0 <= int(blocks) <= 1 << 20:
        raise UserError(f"--map: blocks={blocks} must be a whole number of tokens up to {1 << 20}")
    mapping = Mapping(
        name="generic",
        separator=_SEPARATORS.get(separator, separator),
        header=header == "yes",
        time=time,
        unit=unit,  # type: ignore[arg-type]
        user=user,
        user_kind=user_kind,  # type: ignore[arg-type]
        item=item,
        item_kind=item_kind,  # type: ignore[arg-type]
        tenant=fields.get("tenant", ""),
        tokens=fields.get("tokens", ""),
        request=fields.get("request", ""),
        blocks=int(blocks),
        requests="row" if int(blocks) else "same-time",
    )
    if not mapping.named():
        raise UserError("--map: name at least one of time, user, item and tokens")
    if not mapping.item and not mapping.tokens:
        raise UserError("--map: a log needs items (item=COLUMN) or lengths of histories (tokens=COLUMN)")
    if mapping.blocks and not mapping.tokens:
        raise UserError("--map: content blocks need the length of the history (tokens=COLUMN)")
    if not mapping.header:
        for part, column in mapping.named().items():
            if not (column.isascii() and column.isdigit() and 1 <= int(column) <= 1000):
                raise UserError(f"--map: {part}={column}: without a header a column is a place, 1 to 1000")
    return mapping


def _suffix(value: str, known: tuple[str, ...], default: str) -> tuple[str, str]:
    head, colon, tail = value.rpartition(":")
    return (head, tail) if colon and head and tail in known else (value, default)
