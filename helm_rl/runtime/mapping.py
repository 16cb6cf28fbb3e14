"""Which metric of a server each signal is: TOML files, one shipped for each kind of server."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from helm_rl.errors import UserError
from helm_rl.runtime.counters import MONOTONE, Counters, unfit
from helm_rl.toml_file import line_of, read_toml

_SHIPPED = Path(__file__).parent / "mappings"
SIGNALS = tuple(field.name for field in dataclasses.fields(Counters))

_NAME = r"^[a-zA-Z_:][a-zA-Z0-9_:]*$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Signal(_Section):
    """Where a signal comes from: a metric, of which the samples that have all `labels` are added up, or a constant.

    optional: until it is first seen the server is taken to be one that cannot give it; from then on it must be there.
    """

    metric: Annotated[str, Field(pattern=_NAME, max_length=200)] | None = None
    labels: dict[str, str] = {}
    optional: bool = False
    scale: Annotated[float, Field(gt=0, strict=False)] = 1.0
    value: Annotated[float, Field(ge=0, strict=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Signal:
        if (self.metric is None) == (self.value is None):
            raise ValueError("it must have either a metric or a value")
        if self.value is not None and (self.labels or self.optional or self.scale != 1.0):
            raise ValueError("a constant value is never optional and has neither labels nor a scale")
        return self


def _table(given: Any) -> Any:
    return {"metric": given} if isinstance(given, str) else given


def _known(name: str) -> str:
    if name not in SIGNALS:
        near = difflib.get_close_matches(name, SIGNALS, n=1)
        raise ValueError(f"no such signal; did you mean {near[0]}?" if near else f"known are {', '.join(SIGNALS)}")
    return name


class Mapping(_Section):
    """The signals of one kind of server. alpha0: what is applied at first, where the server does not say."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    alpha0: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    signals: dict[Annotated[str, AfterValidator(_known)], Annotated[Signal, BeforeValidator(_table)]]

    @model_validator(mode="after")
    def _check(self) -> Mapping:
        if "arrivals" not in self.signals:
            raise ValueError("the signal arrivals is missing, which nothing goes without")
        if "alpha" not in self.signals and self.alpha0 is None:
            raise ValueError("without the signal alpha there must be an alpha0, what is applied at first")
        histogram = self.signals.get("latency")
        if histogram is not None and histogram.metric is None:
            raise ValueError("latency must be the metric of a histogram")
        for name, signal in self.signals.items():
            if signal.value is None:
                continue
            if name in MONOTONE:
                raise ValueError(f"{name} must be a metric: a counter that stands still says that nothing happens")
            alone: dict[str, Any] = {"arrivals": 0.0, name: signal.value}
            if unfit(Counters(**alone)) is not None:
                raise ValueError(f"{name} cannot be {signal.value:g}: every reading would be void")
        return self


def mapping_names() -> list[str]:
    """Return the names of the mappings that ship with helm-rl."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_mapping(name_or_path: str | Path) -> Mapping:
    """Return a shipped mapping by its name, or read one from a TOML file.

    Raises UserError, naming the file, the line where it can be had, and the field.
    """
    names = mapping_names()
    if str(name_or_path) in names:
        path = _SHIPPED / f"{name_or_path}.toml"
    else:
        path = Path(name_or_path)
        if not path.exists():
            raise UserError(f"{name_or_path} is neither a shipped mapping ({', '.join(names)}) nor a file")
    text, document = read_toml(path, "a mapping", "name and [signals]")
    try:
        return Mapping.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = [part for part in first["loc"] if part != "[key]"]
        line = line_of(text, at)
        where = f"{path}, line {line}" if line else f"{path}"
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        field = ".".join(map(str, at))
        raise UserError(f"{where}: {field + ': ' if field else ''}{said[:1].lower()}{said[1:]}") from None
