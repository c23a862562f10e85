"""Every key with values of every kind: taken as they are and kept, or refused in one line that names the key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from tierzero.config import Config
from tierzero.config.messages import keys_of, sections_of
from tierzero.errors import ConfigError

NUMBERS: tuple[Any, ...] = (0, -1, 1, 1.5, 1e9, 15099494.4, 10**18, 10**30, -0.0, 1e-300, math.nan, math.inf)
OTHERS: tuple[Any, ...] = ("auto", None, True, "", "x", "1e9", "8", b"x", [], [1], ["a"], [None], (1, 2), {}, {"a": 1})
SPLITS: tuple[Any, ...] = ({"host": math.nan}, {"host": -1}, {"host": 1, "nvme": 1}, {"nvme": "all"}, object())
WHOLE = {"train.steps", "train.batch_size", "model.dim", "model.layers", "io.queue_depth", "checkpoint.every"}


def refusal(take: Callable[[], object]) -> str | None:
    try:
        take()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("section", sections_of(Config))
def test_taken_or_refused(section: str) -> None:
    for key, value in itertools.product(keys_of(sections_of(Config)[section]), (*NUMBERS, *OTHERS, *SPLITS)):
        said = refusal(lambda key=key, value=value: Config.from_dict({section: {key: value}}))
        if said is not None:
            assert f"{section}.{key}" in said, value
            assert "\n" not in said, value
            assert len(said) < 400, value
            continue
        config = Config.from_dict({section: {key: value}})
        assert Config.from_dict(config.to_dict()) == config, (key, value)
        if f"{section}.{key}" in WHOLE:
            assert type(getattr(getattr(config, section), key)) is int, (key, value)
        assert "\n" not in (refusal(config.check) or ""), (key, value)


@pytest.mark.parametrize("section", sections_of(Config))
def test_on_the_command_line(section: str) -> None:
    for key, value in itertools.product(keys_of(sections_of(Config)[section]), (*NUMBERS, *OTHERS, *SPLITS)):
        said = refusal(lambda key=key, value=value: Config.from_dict({}).override([f"{section}.{key}={value}"]))
        assert "\n" not in (said or ""), (key, value)


def test_no_drives_is_said_in_several_ways() -> None:
    for nothing in ([], None, ()):
        assert Config.from_dict({"tiers": {"nvme": nothing}}).tiers.nvme == []
