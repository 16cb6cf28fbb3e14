"""One entry point a reader: bytes in, a sound trace or a UserError out; and small logs to start from."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helm_rl.errors import UserError
from helm_rl.workloads.readers import parse_mapping, read_trace
from helm_rl.workloads.trace import Trace, UnsoundTraceError

Target = Callable[[bytes], bool]
"""Returns whether the bytes made a trace; any other exception than UserError is a fault."""

_KUAIRAND = b"user_id,video_id,time_ms,tab\n1,10,1649675512388,1\n1,11,1649675512388,1\n2,10,1649675512400,0\n"
_MOONCAKE = (
    b'{"timestamp": 0, "input_length": 513, "output_length": 9, "hash_ids": [0, 7]}\n'
    b'{"timestamp": 3000, "input_length": 1, "output_length": 9, "hash_ids": [18446744073709551615]}\n'
)
_RAGPULSE = (
    b'{"timestamp": "82", "input_length": 3112, "output_length": 192, "hash_ids": {"sys_prompt": [8302], '
    b'"passages_ids": [7398, 7370], "history": []}, "session_id": "17-af"}\n'
    b'{"timestamp": "93", "input_length": 5, "output_length": 1, "hash_ids": {"passages_ids": []}, "session_id": "x"}\n'
)
_QWEN = (
    b'{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 1, '
    b'"type": "text", "turn": 1, "hash_ids": [1089, 1090]}\n'
)
_AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,374,44\r\n2024-05-12 00:00:00+00:00,5,1"
)
_ORACLE = np.array(
    [(0, 5, 1, 3), (0, 2**64 - 1, 1, -1), (1, 5, 1, -1)],
    dtype=[("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")],
).tobytes()
_OBJECTS = b"# time, object, size, next_access_vtime\n0, 13053225291711363978, 737, 13\n1, 5, 248, -1\n"
_TWITTER = b"0,ns:a,b,4,10,1,get,0\n0,ns:c,4,10,2,set,300\n"
_BURSTGPT = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"19440110.0,,0.5,ChatGPT,472,18,490,API log\n19440111.5,7,0.5,GPT-4,5,0,5,Conversation log\n"
)
_GENERIC = b"t\tu\ti\n1.5\ta\t7\n2e0\tb\t007\n"
_LISTS = (
    b'{"t": 1, "u": "a", "i": [1, 2], "c": "x"}\n{"t": 2, "u": 7, "i": ["k"], "c": "y"}\n'
    b'{"t": 3, "u": "a", "i": 5, "c": ""}\n'
)
_BLOCKS = b'{"t": 1, "u": "a", "i": [1, 2], "n": 17}\n{"t": 2, "u": "b", "i": [3], "n": 16}\n'


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    table = {
        "uid": np.array([100, 100, 200], np.uint32),
        "item_id": np.array([7, 8, 7], np.uint32),
        "timestamp": np.array([5, 5, 39420], np.uint32),
    }
    pq.write_table(pa.table(table), out)
    return out.getvalue()


SEEDS: dict[str, list[bytes]] = {
    "any": [_KUAIRAND, _MOONCAKE, _AZURE, _ORACLE, gzip.compress(_TWITTER), b"1::2::3::978300760\n", _GENERIC],
    "kuairand": [_KUAIRAND],
    "mooncake": [_MOONCAKE],
    "ragpulse": [_RAGPULSE],
    "qwen-bailian": [_QWEN],
    "azure": [_AZURE],
    "burstgpt": [_BURSTGPT],
    "libcachesim-csv": [_OBJECTS],
    "twitter": [_TWITTER],
    "oracle-general": [_ORACLE],
    "yambda": [_parquet()],
    "generic": [_GENERIC],
    "lists": [_LISTS],
    "blocks": [_BLOCKS, b"t,u,i,n\n1,a,1,16\n2,b,2,3\n"],
    "session-gap": [_KUAIRAND],
}
"""Logs to mutate, by the name of the target."""


def target(name: str) -> Target:
    """Return the entry point: "any" tells the format itself, "session-gap" is KuaiRand with other requests."""
    file = Path(tempfile.gettempdir()) / f"helm-rl-fuzz-{os.getpid()}-{name}"
    saved = file.with_name(f"{file.name}.parquet")
    options: dict[str, object] = {}
    format: str | None = name
    if name == "any":
        format = None
    elif name == "generic":
        options["mapping"] = parse_mapping("time=t,user=u,item=i")
    elif name == "lists":
        format, options["mapping"] = "generic", parse_mapping("time=t,user=u,item=i,tenant=c")
    elif name == "blocks":
        format, options["mapping"] = "generic", parse_mapping("time=t,user=u,item=i,tokens=n,blocks=16")
    elif name == "session-gap":
        format, options = "kuairand", {"requests": "session-gap", "session_s": 0.01, "candidates": 2, "spread": True}

    def run(data: bytes) -> bool:
        file.write_bytes(data)
        try:
            trace = read_trace(file, format, **options)
        except UnsoundTraceError as error:
            raise AssertionError(f"an unsound trace: {error}") from None
        except UserError as error:
            said = str(error)
            if "\n" in said or len(said) > 1000:
                raise AssertionError(f"not one sentence: {said!r}") from None
            return False
        finally:
            file.unlink(missing_ok=True)
        try:  # outside the above: what fails here is a fault, not bad input
            trace.save(saved)
            again = Trace.load(saved)
        except UserError as error:
            raise AssertionError(f"an unsound trace: {error}") from None
        finally:
            saved.unlink(missing_ok=True)
        if again.hash() != trace.hash():
            raise AssertionError("the trace that was written is not the one that was read back")
        return True

    return run
