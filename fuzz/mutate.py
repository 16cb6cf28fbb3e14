"""Mutations of small logs, for where atheris is not: seeded, so that what fails can be run again."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from fuzz.targets import Target

SCRAPS = (
    *(
        b"\n",
        b"\r\n",
        b"\r",
        b'"',
        b'""',
        b",",
        b", ",
        b"\t",
        b"::",
        b";",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"-",
        b"--",
    ),
    *(
        b"9" * 25,
        b"1e9",
        b"1e-9",
        b"1e999999",
        b".5",
        b"0x1",
        b"-0",
        b"007",
        b"NA",
        b"NaN",
        b"Infinity",
        b"null",
        b"true",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b"{}",
        b"[[]]",
        b"[" * 200,
        b'"a"',
        b":",
        b"#",
        b" ",
        b"\x1c",
        b"\xc2\x85",
        b"\xed\xa0\x80",
    ),
    *(b"18446744073709551615", b"18446744073709551616", b"-9223372036854775809", b"2024-02-30 00:00:00", b"PAR1"),
    *(b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08\x00", b"\\ud800", b"\\u0000"),
)


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a seed with a few bytes changed, cut out, put in, doubled, or taken from another."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 5)):
        at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
        elif kind == 1:
            data[at : min(end, at + rng.choice((1, 3, 30)))] = b""
        elif kind == 2:
            data[at:at] = rng.choice(SCRAPS)
        elif kind == 3:
            data[at : min(end, at + rng.choice((1, 5, 20)))] = rng.choice(SCRAPS)
        elif kind == 4:
            data[at:at] = data[at : min(end, at + 200)]
        else:
            other = rng.choice(seeds)
            data[at:end] = other[: rng.randint(0, len(other))]
    return bytes(data)


def fuzz(run: Target, seeds: Sequence[bytes], seconds: float, seed: int = 1) -> tuple[int, int]:
    """Run mutations for so long; return how many, and how many made a trace. What fails is raised, with its bytes."""
    rng = random.Random(seed)
    inputs = traces = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = mutated(rng, seeds)
        try:
            traces += run(data)
        except Exception as error:
            raise AssertionError(f"input {inputs} of seed {seed}, {data!r}: {type(error).__name__}: {error}") from error
        inputs += 1
    return inputs, traces
