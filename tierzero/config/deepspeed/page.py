"""The tables of `docs/moving.md`, made from the rows themselves.

``python -m tierzero.config.deepspeed.page docs/moving.md`` puts them between the page's marks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .draft import RULES
from .rules import KeyRule, Outcome

_BEGIN = "<!-- Written by python -m tierzero.config.deepspeed.page docs/moving.md -->"
_END = "<!-- End of what is written -->"
_TOP = "Top level, and whole sections"


def with_tables(page: str) -> str:
    """``page`` with the tables between its marks. Raises ValueError where there are none."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{_tables()}\n{_END}{after}"


def _tables() -> str:
    groups: dict[str, list[KeyRule]] = {}
    for rule in RULES.values():
        inside = ".".join(rule.path[:-1])
        groups.setdefault(f"`{inside}`" if inside else _TOP, []).append(rule)
    groups[_TOP] = groups.pop(_TOP)  # last: most of it is about other things than offload
    parts = []
    for heading, rules in groups.items():
        rows = "".join(f"{_row(rule)}\n" for rule in rules)
        parts.append(f"### {heading}\n\n| key | outcome | here | how, or why not |\n|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def _row(rule: KeyRule) -> str:
    name = f"{rule.path[-1]}.*" if rule.is_section else rule.path[-1]
    cells = (f"`{name}`", _outcome(rule), ", ".join(f"`{key}`" for key in rule.to), rule.why.replace("*", "\\*"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(rule: KeyRule) -> str:
    if rule.is_section and rule.outcome in (Outcome.DIFFERS, Outcome.REFUSED):
        return f"{rule.outcome}, if given" if rule.on else f"{rule.outcome}, if enabled"
    plain = " or ".join(f"`{json.dumps(value)}`" for value in rule.plain)
    return f"{rule.outcome} unless {plain}" if plain else str(rule.outcome)


def main() -> None:
    """Renews the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tierzero.config.deepspeed.page docs/moving.md")
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
