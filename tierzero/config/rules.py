"""What one configuration value may be: a parser and the sentence that describes it, kept together.

A :class:`Rule` is used as an annotation of a field. Its ``allowed`` text appears in error messages and in the reference
page, so the two cannot drift apart.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic_core import CoreSchema, core_schema

from .toml import toml_text

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_LARGEST_SIZE = 2**60
TIERS = ("device", "host", "nvme")

Parser = Callable[[Any, Path], Any]


@dataclass(frozen=True)
class Rule:
    """One kind of value. ``parse(value, base)`` returns the value to keep or raises ValueError with what is allowed.

    ``base`` is the folder that relative paths are relative to. ``paths`` says that the value holds paths.
    """

    allowed: str
    parse: Parser
    paths: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
            base = (info.context or {}).get("base")
            return self.parse(value, Path.cwd() if base is None else base)

        return core_schema.with_info_plain_validator_function(validate)

    def refuse(self, why: str = "") -> ValueError:
        """The error to raise for a value outside this rule."""
        return ValueError(f"{why}; allowed: {self.allowed}" if why else f"must be {self.allowed}")


def _rule(allowed: str, parse: Callable[[Rule, Any, Path], Any], *, paths: bool = False) -> Rule:
    rule = Rule(allowed, lambda value, base: parse(rule, value, base), paths)
    return rule


def _as_int(value: Any) -> int | None:
    """The integer that ``value`` states, or None. 1e9 counts as an integer; booleans, NaN and strings do not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return None


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(low: int, high: int, *, multiple: int = 1) -> Rule:
    """An integer from ``low`` to ``high``."""
    also = f" and a multiple of {multiple}" if multiple > 1 else ""

    def parse(rule: Rule, value: Any, base: Path) -> int:
        number = _as_int(value)
        if number is None or not low <= number <= high or number % multiple:
            raise rule.refuse()
        return number

    return _rule(f"a whole number from {low} to {high}{also}", parse)


def real(low: float, high: float, *, above: bool = False, below: bool = False) -> Rule:
    """A finite number from ``low`` to ``high``; ``above``/``below`` exclude the lower/upper end."""
    lower = f"above {low:g}" if above else f"from {low:g}"
    upper = f"below {high:g}" if below else f"to {high:g}"

    def parse(rule: Rule, value: Any, base: Path) -> float:
        number = _as_float(value)
        if number is None or not low <= number <= high or (above and number == low) or (below and number == high):
            raise rule.refuse()
        return number

    return _rule(f"a number {lower} {upper}", parse)


def real_pair(low: float, high: float) -> Rule:
    """Two numbers in [low, high)."""

    def parse(rule: Rule, value: Any, base: Path) -> tuple[float, float]:
        if isinstance(value, (list, tuple)) and len(value) == 2:
            first, second = _as_float(value[0]), _as_float(value[1])
            if first is not None and second is not None and low <= first < high and low <= second < high:
                return first, second
        raise rule.refuse()

    return _rule(f"a list of two numbers, each from {low:g} to below {high:g}", parse)


def flag() -> Rule:
    """true or false, nothing that merely looks like it."""

    def parse(rule: Rule, value: Any, base: Path) -> bool:
        if not isinstance(value, bool):
            raise rule.refuse()
        return value

    return _rule("true or false", parse)


def choice(*values: str | int | bool, later: Sequence[str | int | bool] = ()) -> Rule:
    """One of ``values``. Those in ``later`` have a meaning, but this version refuses them."""

    def is_in(value: Any, names: Sequence[str | int | bool]) -> bool:
        return any(type(value) is type(name) and value == name for name in names)

    def parse(rule: Rule, value: Any, base: Path) -> str | int | bool:
        if is_in(value, later):
            raise rule.refuse("is not available in this version")
        if not is_in(value, values):
            raise rule.refuse()
        return value  # type: ignore[no-any-return]

    return _rule(" or ".join(toml_text(value) for value in values), parse)


def either(first: Rule, second: Rule) -> Rule:
    """A value of either kind."""

    def parse(rule: Rule, value: Any, base: Path) -> Any:
        for inner in (first, second):
            try:
                return inner.parse(value, base)
            except ValueError:
                continue
        raise rule.refuse()

    return _rule(f"{first.allowed} or {second.allowed}", parse)


def parse_size(value: Any) -> int | None:
    """Bytes stated by an integer or by text such as ``16GB`` (10^9) or ``512MiB`` (2^20); None when it states none.

    A fraction of a byte is rounded down.
    """
    if not isinstance(value, str):
        return _as_int(value)
    found = _SIZE.fullmatch(value)
    if found is None:
        return None
    factor = _UNITS.get(found[2].upper() or "B")
    return None if factor is None else int(Fraction(found[1]) * factor)


def size(low: int = 0, high: int = _LARGEST_SIZE, *, multiple: int = 1) -> Rule:
    """A size in bytes."""
    also = f", {low} to {high} bytes" if (low, high) != (0, _LARGEST_SIZE) else ""
    also += f", a multiple of {multiple}" if multiple > 1 else ""

    def parse(rule: Rule, value: Any, base: Path) -> int:
        number = parse_size(value)
        if number is None or not low <= number <= high or number % multiple:
            raise rule.refuse()
        return number

    return _rule(f'a size (bytes, or text such as "16GB" or "512MiB"{also})', parse)


def or_auto(inner: Rule) -> Rule:
    """``inner``, or "auto" (kept as None) to leave it to the program."""

    def parse(rule: Rule, value: Any, base: Path) -> Any:
        if value is None or value == "auto":
            return None
        try:
            return inner.parse(value, base)
        except ValueError:
            raise rule.refuse() from None

    return _rule(f'"auto" or {inner.allowed}', parse, paths=inner.paths)


def absolute(text: str | Path, base: Path) -> Path:
    """``text`` as an absolute path, ``~`` expanded, relative to ``base``. Links are left as they are."""
    path = Path(text).expanduser()
    return path if path.is_absolute() else Path(os.path.abspath(base / path))


def _path_text(value: Any) -> str | None:
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str) and value.strip() and "\0" not in value else None


def path() -> Rule:
    """A path, or nothing (key left out)."""

    def parse(rule: Rule, value: Any, base: Path) -> Path | None:
        if value is None:
            return None
        text = _path_text(value)
        if text is None:
            raise rule.refuse()
        return absolute(text, base)

    return _rule("a path", parse, paths=True)


def paths(*, as_text: bool = False, what: str = "path") -> Rule:
    """A list of paths (one may stand alone); with ``as_text`` they stay text, because they may be patterns."""

    def parse(rule: Rule, value: Any, base: Path) -> list[Path] | list[str] | None:
        if value is None:
            return None if as_text else []
        given = value if isinstance(value, (list, tuple)) else [value]
        texts = [_path_text(item) for item in given]
        found = [absolute(text, base) for text in texts if text is not None]
        if len(found) != len(texts):
            raise rule.refuse()
        if len(set(map(os.path.realpath, found))) != len(found):
            raise rule.refuse("names the same path twice")
        if as_text and not found:
            raise rule.refuse("is empty")
        return [str(item) for item in found] if as_text else found

    return _rule(f"a {what} or a list of them", parse, paths=True)


def wholes(low: int, high: int) -> Rule:
    """A list of integers from ``low`` to ``high``."""

    def parse(rule: Rule, value: Any, base: Path) -> list[int]:
        numbers = [_as_int(item) for item in value] if isinstance(value, (list, tuple)) else []
        found = [number for number in numbers if number is not None and low <= number <= high]
        if not found or len(found) != len(numbers):
            raise rule.refuse()
        return found

    return _rule(f"a list of whole numbers from {low} to {high}", parse)


def names() -> Rule:
    """A list of names, or "auto" (kept as None)."""

    def parse(rule: Rule, value: Any, base: Path) -> list[str] | None:
        if value is None or value == "auto":
            return None
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)) or not given:
            raise rule.refuse()
        if not all(isinstance(name, str) and name.strip() for name in given):
            raise rule.refuse()
        return list(given)

    return _rule('"auto" or a list of class names or name patterns', parse)


def listed_names() -> Rule:
    """A list of names."""
    inner = names()

    def parse(rule: Rule, value: Any, base: Path) -> list[str]:
        found = inner.parse(value, base) if isinstance(value, (list, tuple)) else None
        if found is None:
            raise rule.refuse()
        return list(found)

    return _rule("a list of class names or name patterns", parse)


def order_of(kinds: Sequence[str]) -> Rule:
    """All of ``kinds``, each once, in any order."""

    def parse(rule: Rule, value: Any, base: Path) -> list[str]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise rule.refuse()
        if sorted(value) != sorted(kinds):
            raise rule.refuse()
        return list(value)

    return _rule(f"a list of {', '.join(kinds[:-1])} and {kinds[-1]}, in any order", parse)


def placement(tiers: Sequence[str] = TIERS) -> Rule:
    """A tier's name, "auto", or a split over tiers; a split is kept as fractions that sum to 1."""
    listed = ", ".join(f'"{tier}"' for tier in tiers)
    split = " or a split that sums to 1 such as {host = 0.3, nvme = 0.7}" if len(tiers) > 1 else ""

    def parse(rule: Rule, value: Any, base: Path) -> str | dict[str, float]:
        if value == "auto":
            return "auto"
        if isinstance(value, str):
            if value in TIERS and value not in tiers:
                raise rule.refuse("is not available in this version")
            value = {value: 1.0}
        if not isinstance(value, Mapping):
            raise rule.refuse()
        return _split(rule, value, tiers)

    return _rule(f'"auto", {listed}{split}', parse)


def _split(rule: Rule, value: Mapping[Any, Any], tiers: Sequence[str]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for tier, share in value.items():
        number = _as_float(share)
        if tier not in tiers or number is None or not 0 <= number <= 1:
            raise rule.refuse()
        parts[tier] = number
    total = math.fsum(parts.values())
    if abs(total - 1) > 1e-6:
        raise rule.refuse(f"sums to {total:g}, not to 1")
    return {tier: parts[tier] / total for tier in tiers if parts.get(tier)}
