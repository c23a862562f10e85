"""Which modules become a unit, and how small ones are joined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tierzero as tz
from tierzero.runtime.draft import draft
from tierzero.sharding.units import UnitSpec, find_units

PATTERNS = ("outer.*",)
"""Takes in the lists inside too, which have no parameters of their own and so are no units."""


class Inner(nn.Linear):
    def __init__(self, numel: int) -> None:
        super().__init__(numel, 1, bias=False)


class Outer(nn.Module):
    """Own parameters, and units inside."""

    def __init__(self, own: int, inner: list[int]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(own))
        self.inner = nn.ModuleList(Inner(numel) for numel in inner)


class Model(nn.Module):
    def __init__(self, own: int, outer: list[tuple[int, list[int]]]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(own))
        self.outer = nn.ModuleList(Outer(*given) for given in outer)


def numel(spec: UnitSpec) -> int:
    return sum(parameter.numel() for _, parameter in spec.parameters)


def found(model: nn.Module, floor: int) -> dict[str, int]:
    """Units by title, with their elements."""
    return {spec.title: numel(spec) for spec in find_units(model, PATTERNS, floor)}


def test_without_a_floor_every_module_is_a_unit() -> None:
    model = Model(5, [(10, [3, 4]), (20, [])])
    assert found(model, 0) == {"(root)": 5, "outer.0": 10, "outer.0.inner.0": 3, "outer.0.inner.1": 4, "outer.1": 20}


def test_small_neighbours_become_one_unit() -> None:
    model = Model(5, [(10, []), (10, []), (10, []), (40, []), (10, [])])
    assert found(model, 20) == {"(root)": 5, "outer.0 to outer.1": 20, "outer.2 to outer.4": 60}


def test_what_is_left_at_the_end_joins_its_neighbour() -> None:
    assert found(Model(5, [(30, []), (10, [])]), 20) == {"(root)": 5, "outer.0 to outer.1": 40}


def test_what_has_no_neighbour_belongs_to_what_is_around_it() -> None:
    model = Model(5, [(10, [3, 4]), (20, [30])])
    assert found(model, 8) == {"(root)": 5, "outer.0": 17, "outer.1": 20, "outer.1.inner.0": 30}
    assert found(model, 1000) == {"(root)": 72}


def test_units_inside_of_joined_ones_stay() -> None:
    specs = find_units(Model(5, [(3, [30]), (3, [30])]), PATTERNS, 6)
    assert [list(spec.modules) for spec in specs] == [
        [""],
        ["outer.0", "outer.1"],
        ["outer.0.inner.0"],
        ["outer.1.inner.0"],
    ]
    assert [spec.ancestors for spec in specs] == [(), (0,), (1, 0), (1, 0)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    outer=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), max_size=4)), min_size=1, max_size=5),
    floor=st.integers(0, 120),
)
def test_every_parameter_and_module_stays_in_one_unit_above_the_floor(
    outer: list[tuple[int, list[int]]], floor: int
) -> None:
    model = Model(1, outer)
    specs = find_units(model, PATTERNS, floor)
    assert sorted(names[0] for spec in specs for names, _ in spec.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    modules = [name for spec in specs for name in spec.modules]
    unjoined = [name for spec in find_units(model, PATTERNS) for name in spec.modules]
    assert sorted(modules) == sorted(unjoined)
    assert all(numel(spec) >= floor for spec in specs[1:])
    for index, spec in enumerate(specs[1:], 1):
        assert spec.ancestors[-1] == 0
        assert all(above < index for above in spec.ancestors)


def test_a_unit_is_kept_by_the_name_of_any_of_its_modules() -> None:
    config = tz.Config.from_dict({"sharding": {"min_unit": 20, "reshard_after_forward": ["outer.1"]}})
    drafted = draft(Model(5, [(10, []), (10, []), (30, [])]), config, (Outer,), 1)
    assert drafted.kept == {1}


def test_units_that_are_found_are_joined_and_those_that_are_named_are_not() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(600, 600)) for _ in range(6))
    joined = ["(root)", "blocks.0 to blocks.2", "blocks.3 to blocks.5"]
    assert [spec.title for spec in find_units(model, None)] == joined
    assert len(find_units(model, None, 0)) == len(find_units(model, ("blocks.?",))) == 7


@pytest.mark.parametrize("floor", [-1, 1.5, "1M"])
def test_a_floor_is_a_number_of_parameters(floor: object) -> None:
    with pytest.raises(tz.ConfigError, match=r"sharding\.min_unit"):
        tz.Config.from_dict({"sharding": {"min_unit": floor}})
