"""Every key of DeepSpeed is in the tables, leads somewhere, and is reported once."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.config import Config
from tierzero.config.deepspeed import Outcome, Translation, translate
from tierzero.config.deepspeed.draft import RULES
from tierzero.config.deepspeed.page import with_tables
from tierzero.config.messages import keys_of, sections_of
from tierzero.errors import ConfigError

from ..support.deepspeed import nested

HERE = {f"{section}.{key}" for section, cls in sections_of(Config).items() for key in keys_of(cls)}
THEIRS: list[str] = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text())["keys"]
PAGE = Path(__file__).parents[2] / "docs" / "moving.md"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.key)
def test_every_row_leads_somewhere(rule: Any) -> None:
    assert rule.why
    assert set(rule.to) <= HERE
    assert rule.to or rule.outcome is not Outcome.MAPPED


def known(key: str) -> bool:
    path = tuple(key.split("."))
    return path in RULES or any(path[:depth] in RULES and RULES[path[:depth]].is_section for depth in range(len(path)))


def test_no_key_of_deepspeed_is_missing_from_the_tables() -> None:
    assert len(THEIRS) > 190
    assert [key for key in THEIRS if not known(key)] == []


def test_the_page_is_the_one_the_tables_make() -> None:
    page = PAGE.read_text(encoding="utf-8")
    there, made = page.splitlines(), with_tables(page).splitlines()
    change = "\n".join(difflib.unified_diff(there, made, "docs/moving.md", "made", lineterm="", n=0))
    assert there == made, f"run: python -m tierzero.config.deepspeed.page docs/moving.md\n{change}"
    assert all(f"`{rule.path[-1]}" in page for rule in RULES.values())


USUAL = {
    "stage": st.integers(0, 3),
    "device": st.sampled_from(["none", "cpu", "nvme"]),
    "nvme_path": st.just("/nvme"),
    "type": st.sampled_from(["AdamW", "Adam", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "Lamb"]),
    "enabled": st.sampled_from([True, False, "auto"]),
    "ratio": st.floats(0, 1),
}
ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "", "bf16", "log", "\ud800", "a\0"]),
    st.lists(st.floats(0, 1), max_size=2),
    st.just({}),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FREE_KEYS = st.text(st.characters(categories=("L",)), min_size=1, max_size=12)


@st.composite
def configurations(draw: st.DrawFn, usual: bool) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(THEIRS) | FREE_KEYS, max_size=14, unique=True))
    flat = {}
    for key in keys:
        likely = USUAL.get(key.rpartition(".")[2], st.sampled_from([False, 1, "auto", 5e8, None]))
        flat[key] = draw(likely if usual else likely | ANY)
    return nested(flat)


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        where = f"{prefix}{key}"
        rule = RULES.get(tuple(where.split(".")))
        inside = isinstance(value, dict) and value and (rule is None or rule.is_section)
        found += leaves(value, f"{where}.") if inside else [where]
    return found


def translated(values: dict[str, Any], ranks: int | None) -> tuple[Translation | None, str]:
    try:
        return translate(values, ranks), ""
    except ConfigError as error:
        return None, str(error)


@settings(max_examples=300, deadline=None)
@given(st.booleans().flatmap(configurations), st.sampled_from([None, 1, 2]))
def test_any_keys_are_refused_in_a_line_or_each_reported_once(values: dict[str, Any], ranks: int | None) -> None:
    translation, refusal = translated(values, ranks)
    if translation is None:
        assert "\n" not in refusal
        assert len(refusal) < 2000
        return
    reported = [entry.key for entry in translation.entries]
    assert sorted(reported) == sorted(leaves(values))
    assert all(set(entry.to) <= HERE for entry in translation.entries)
    assert all(entry.why for entry in translation.entries if entry.outcome is not Outcome.MAPPED)
    assert Config.from_dict(translation.config.given()) == translation.config
    said = {f"{section}.{key}" for section, values in translation.config.given().items() for key in values}
    assert said == set(translation.origin)
    added = [(each.key, each.value) for each in translation.added]
    assert len(dict(added)) == len(added)
    assert [(key, translation.config.given()[key.split(".")[0]][key.split(".")[1]]) for key, _ in added] == added
