"""What the pages that evaluations write have in common: templates, pictures, and what they were made by."""

from __future__ import annotations

import base64
import importlib.metadata
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime

import jinja2

from helm_rl import __version__
from helm_rl.figures import machine

PACKAGES = ("numpy", "numba", "torch", "gymnasium")
"""Packages whose versions a result may depend on."""


@dataclass(frozen=True)
class Plot:
    """One plot of a page: its two drawings as data URIs, what it shows in words, its caption."""

    name: str
    title: str
    wide: str
    narrow: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Tile:
    """One number at the top of a page."""

    value: str
    label: str


def template(name: str) -> jinja2.Template:
    """Return a template of this package; what it is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eval"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["units"] = keep_units
    return environment.get_template(name)


def keep_units(text: str) -> str:
    """Put a no-break space between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(ms|%|s)\b|%)", "\N{NO-BREAK SPACE}", text)


def data_uri(svg: bytes) -> str:
    """Return a picture as the address of itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def made_by() -> dict[str, str]:
    """Return versions, machine and time, for "What was run"."""
    about = machine()
    versions = [f"helm-rl {__version__}", f"Python {platform.python_version()}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in PACKAGES]
    return {
        "versions": ", ".join(versions),
        "machine": f"{about['processor']}, {about['cores']} cores, {about['system']}",
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
