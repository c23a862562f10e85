"""The plan: placements, budgets and the bytes that it names, without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.errors import BudgetError, ConfigError
from tierzero.optim.formats import state_format
from tierzero.planner import memory_plan
from tierzero.planner.floor import floor_plan
from tierzero.planner.memory_plan import plan_memory
from tierzero.planner.shape import Budgets, GroupShape, ModelShape, PlanRequest
from tierzero.sharding.layout import flat_layout
from tierzero.sharding.stages import STAGES
from tierzero.tiers import Tier

MANY = 1 << 40
ROOMY = Budgets(None, None, MANY, MANY, device_is_host=True, nvme=True)
AUTO = PlanRequest("auto", "auto", "auto")


def shape_of(numels: list[int], parts: int = 1) -> ModelShape:
    """One unit per entry, below a root; bf16, trainable."""
    groups = tuple(
        GroupShape(
            unit,
            flat_layout(torch.bfloat16, True, [((f"p{unit}",), torch.Size([numel]))], parts),
            state_format(torch.bfloat16),
            2,
        )
        for unit, numel in enumerate(numels)
    )
    ancestors = tuple(() if unit == 0 else (0,) for unit in range(len(numels)))
    return ModelShape(groups, tuple(f"unit{unit}" for unit in range(len(numels))), ancestors)


def test_explicit_placement_is_carried_out() -> None:
    request = PlanRequest({"nvme": 1.0}, {"nvme": 1.0}, {"host": 1.0})
    plan = plan_memory(shape_of([1 << 16] * 4), request, ROOMY)
    homes = {(home.weight, home.optimizer, home.gradient) for tiles in plan.homes for home in tiles}
    assert homes == {(Tier.NVME, Tier.NVME, Tier.HOST)}
    assert plan.nvme_state == 4 * (1 << 16) * 12
    assert plan.host_state == 4 * (1 << 16) * 2


def test_fractions_are_met_to_a_tile() -> None:
    shape = shape_of([1 << 22] * 4)
    request = PlanRequest({"host": 1.0}, {"host": 0.25, "nvme": 0.75}, {"host": 1.0}, tile=1 << 18)
    plan = plan_memory(shape, request, ROOMY)
    homes = [home.optimizer for tiles in plan.homes for home in tiles]
    assert abs(homes.count(Tier.HOST) / len(homes) - 0.25) <= 1 / len(homes)


def test_auto_fills_the_host_with_weights_first() -> None:
    shape = shape_of([1 << 20] * 8)
    plan = plan_memory(shape, AUTO, replace(ROOMY, host=40 << 20))
    weights = {home.weight for tiles in plan.homes for home in tiles}
    assert weights == {Tier.HOST}
    assert Tier.NVME in {home.optimizer for tiles in plan.homes for home in tiles}
    assert plan.host <= 40 << 20


def test_optimizer_state_goes_to_a_gpu_only_beside_its_weights() -> None:
    gpu = Budgets(1 << 30, 1 << 30, 1 << 30, 1 << 30, device_is_host=False, nvme=True)
    plan = plan_memory(shape_of([1 << 20] * 8), PlanRequest({"host": 1.0}, "auto", "auto"), gpu)
    assert Tier.DEVICE not in {home.optimizer for tiles in plan.homes for home in tiles}
    with pytest.raises(ConfigError, match=r"placement\.optimizer"):
        plan_memory(shape_of([1 << 20]), PlanRequest({"host": 1.0}, {"device": 1.0}, "auto"), gpu)


def adapted(units: int) -> ModelShape:
    """Units of a frozen group of 2 MiB and a trainable one of 128 KiB, the frozen one first."""
    groups = []
    for unit in range(units):
        for numel, fmt in ((1 << 20, None), (1 << 16, state_format(torch.bfloat16))):
            layout = flat_layout(torch.bfloat16, fmt is not None, [((f"p{unit}-{numel}",), torch.Size([numel]))], 1)
            groups.append(GroupShape(unit, layout, fmt, 2 if fmt else 0))
    return ModelShape(tuple(groups), tuple(f"unit{unit}" for unit in range(units)), ((),) * units)


@pytest.mark.parametrize("params", ["auto", {"device": 1.0}])
@pytest.mark.parametrize("frozen", [None, "auto", {"nvme": 1.0}, {"host": 0.5, "nvme": 0.5}])
def test_frozen_weights_have_a_place_of_their_own(params: Any, frozen: Any) -> None:
    shape = adapted(8)
    request = PlanRequest(params, {"host": 1.0}, {"host": 1.0}, frozen=frozen)
    plan = plan_memory(shape, request, replace(ROOMY, host=20 << 20))
    homes: dict[bool, list[Tier]] = {True: [], False: []}
    for group, tiles in zip(shape.groups, plan.homes, strict=True):
        homes[group.fmt is None] += [home.weight for home in tiles]
    fast = Tier.DEVICE if params == {"device": 1.0} else Tier.HOST
    assert set(homes[False]) == {fast}  # under "auto" too, though frozen ones stand before them in the model
    wanted = params if frozen is None else frozen
    on_nvme = homes[True].count(Tier.NVME) / len(homes[True])
    if isinstance(wanted, dict):
        assert on_nvme == wanted.get("nvme", 0)
    else:
        assert 0 < on_nvme < 1
    assert plan.host <= 20 << 20


def test_frozen_weights_on_missing_or_useless_tiers_are_refused() -> None:
    request = PlanRequest("auto", "auto", "auto", frozen={"nvme": 1.0})
    with pytest.raises(ConfigError, match=r"placement\.frozen.*tiers\.nvme"):
        plan_memory(adapted(2), request, replace(ROOMY, nvme=False))
    with pytest.raises(ConfigError, match=r"placement\.frozen: sharding\.stage = 2"):
        plan_memory(adapted(2), replace(request, stage=STAGES[2]), ROOMY)
    with pytest.raises(BudgetError, match=r"nvme_limit"):
        plan_memory(adapted(8), request, replace(ROOMY, nvme_capacity=8 << 20, nvme_limited=True))


def test_nvme_without_paths_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement\.params.*tiers\.nvme"):
        plan_memory(shape_of([1 << 16]), PlanRequest({"nvme": 1.0}, "auto", "auto"), replace(ROOMY, nvme=False))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_bytes_that_a_refusal_names_are_enough(tier: str) -> None:
    shape = shape_of([1 << 14, *[1 << 20] * 3])
    request = PlanRequest({"nvme": 1.0}, {"nvme": 1.0}, {"nvme": 1.0})
    short = replace(ROOMY, **{tier: 4096})
    with pytest.raises(BudgetError, match=f"tiers.{tier}") as refused:
        plan_memory(shape, request, short)
    plan_memory(shape, request, replace(ROOMY, **{tier: 4096 + refused.value.missing}))
    with pytest.raises(BudgetError):
        plan_memory(shape, request, replace(ROOMY, **{tier: 4096 + refused.value.missing - 1}))


def test_budgets_beyond_the_machine_are_refused() -> None:
    shape = shape_of([1 << 20] * 8)
    small = replace(ROOMY, host=1 << 40, device=1 << 40, available=64 << 20)
    with pytest.raises(BudgetError, match="memory that this machine has free") as refused:
        plan_memory(shape, AUTO, small)
    plan_memory(shape, AUTO, replace(small, available=small.available + refused.value.missing))


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(1, 1 << 21), min_size=1, max_size=6),
    parts=st.integers(1, 4),
    device=st.none() | st.integers(0, 1 << 27),
    host=st.none() | st.integers(0, 1 << 27),
)
def test_a_plan_never_exceeds_its_budgets(numels: list[int], parts: int, device: int | None, host: int | None) -> None:
    budgets = replace(ROOMY, device=device, host=host)
    plan, missing = None, 0
    try:
        plan = plan_memory(shape_of(numels, parts), replace(AUTO, reduced=parts > 1), budgets)
    except BudgetError as error:
        missing = error.missing
    if plan is None:
        assert missing > 0
        return
    assert device is None or plan.device <= device
    assert host is None or plan.host <= host
    assert plan.bucket_limit >= plan.buckets


SPLITS = (
    "auto",
    {"nvme": 1.0},
    {"host": 1.0},
    {"device": 1.0},
    {"host": 0.3, "nvme": 0.7},
    {"device": 0.5, "host": 0.5},
)


@settings(max_examples=150, deadline=None)
@given(
    numels=st.lists(st.integers(1, 1 << 21), min_size=1, max_size=6),
    parts=st.integers(1, 3),
    splits=st.tuples(st.sampled_from(SPLITS), st.sampled_from(SPLITS), st.sampled_from(SPLITS)),
    tile=st.sampled_from((1 << 16, 1 << 19)),
    prefetch=st.integers(0, 2),
    device_is_host=st.booleans(),
)
def test_the_floor_is_never_above_the_plan(
    numels: list[int],
    parts: int,
    splits: tuple[Any, Any, Any],
    tile: int,
    prefetch: int,
    device_is_host: bool,
) -> None:
    shape = shape_of(numels, parts)
    budgets = replace(ROOMY, device_is_host=device_is_host)
    request = PlanRequest(*splits, tile=tile, prefetch=prefetch, reduced=parts > 1)
    try:
        plan = plan_memory(shape, request, budgets)
    except ConfigError:
        return
    floor = floor_plan(shape, request, budgets, tile, prefetch)
    for part in ("device_state", "host_state", "nvme_state", "arena", "buckets", "staging", "device", "host"):
        assert getattr(floor, part) <= getattr(plan, part), part


@pytest.mark.parametrize("params", SPLITS)
@pytest.mark.parametrize("device", [1 << 20, None])
def test_a_model_far_too_large_is_refused_before_a_tile_of_it_is_placed(
    params: Any, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "place", lambda *args: pytest.fail("placed"))
    budgets = Budgets(device, 1 << 20, 1 << 20, 1 << 20, device_is_host=True, nvme=True, nvme_capacity=1 << 32)
    for request in (replace(AUTO, params=params), PlanRequest(params, {"nvme": 1.0}, {"nvme": 1.0})):
        with pytest.raises(BudgetError, match=r"short of the|nvme") as refused:
            plan_memory(shape_of([1 << 33] * 4), request, budgets)
        assert refused.value.missing > 0


def test_a_model_beyond_all_tiers_is_refused_before_a_tile_of_it_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "place", lambda *args: pytest.fail("placed"))
    budgets = replace(ROOMY, nvme_capacity=MANY)
    with pytest.raises(BudgetError, match=r"training state, .* does not fit in tiers.device .*, tiers.host .* short"):
        plan_memory(shape_of([1 << 35] * 64), AUTO, budgets)
