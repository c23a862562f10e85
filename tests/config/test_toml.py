from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.config import Config
from tierzero.config.toml import toml_document
from tierzero.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
PLAIN = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.sampled_from(["~/a b", '"\\'])
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(st.dictionaries(TEXT, st.dictionaries(TEXT, VALUES, min_size=1, max_size=4), max_size=4), TEXT)
def test_what_is_written_is_read_back(sections: dict[str, dict[str, Any]], comment: str) -> None:
    comments = {f"{section}.{key}": comment for section, values in sections.items() for key in values}
    written = toml_document(sections, comments)
    assert tomllib.loads(written) == sections
    assert len([line for line in written.splitlines() if line]) == sum(1 + len(values) for values in sections.values())


def test_a_whole_configuration_goes_through_its_file(tmp_path: Path) -> None:
    config = Config.from_dict(
        {
            "tiers": {"nvme": [str(tmp_path / 'a "quoted"\\name\n'), str(tmp_path / "ü")], "host": "8GB"},
            "placement": {"optimizer": {"host": 0.3, "nvme": 0.7}},
            "optimizer": {"eps": 1e-8, "betas": [0.9, 0.95]},
            "sharding": {"units": ["layers.*"], "reshard_after_forward": False},
        }
    )
    file = tmp_path / "written.toml"
    file.write_text(toml_document(config.given()), encoding="utf-8")
    assert Config.load(file) == config


def test_what_toml_has_no_word_for() -> None:
    assert toml_document({"a": {"left out": None}, "b": {"x": math.inf}}) == "[b]\nx = inf\n"
    for value in ("\ud800", object(), [Path("a")]):
        with pytest.raises(ConfigError, match="cannot be written as TOML"):
            toml_document({"a": {"key": value}})
