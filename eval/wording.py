"""How numbers are shown to people, the same in tables and in the report."""

from __future__ import annotations

from eval.comparison import Estimate
from eval.segments import FlatSet


def milliseconds(value_ms: float) -> str:
    """Show a latency without its unit: one decimal, none from 1,000 ms up."""
    return f"{value_ms:,.0f}" if value_ms >= 999.95 else f"{value_ms:.1f}"


def interval_ms(measured: Estimate) -> str:
    """Show the interval of a latency, `135.8 to 140.1`; empty where there is none or it is a point."""
    if measured.interval is None or measured.interval[0] == measured.interval[1]:
        return ""
    return " to ".join(milliseconds(end) for end in measured.interval)


def percent(share: float) -> str:
    """Show a share as a percentage, with a decimal where it is small."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:,.0f} %"


def times(ratio: float) -> str:
    """Show a ratio: two decimals, or two digits where it is small."""
    return f"{ratio:.2g} ×" if ratio < 0.0995 else f"{ratio:,.2f} ×"


def alpha(value: float) -> str:
    """Show an alpha with two decimals, or three where it is a mean that has them."""
    text = f"{value:.3f}"
    return text[:-1] if text.endswith("0") else text


def flat_set(flat: FlatSet) -> str:
    """Show a flat set: `0.56 to 0.64`, or several such, or single alphas."""
    ends = [(f"{low:.2f}", f"{high:.2f}") for low, high in flat]
    return ", ".join(low if low == high else f"{low} to {high}" for low, high in ends)


def counted(number: int, one: str, several: str | None = None) -> str:
    """Show a number of things: `1 draw`, `2 draws`; several: the word for many where it is not one with an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
