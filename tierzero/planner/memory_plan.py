"""Where every tile of a model's state lives and how large each buffer is: decided, and checked, before anything is allocated.

The inputs are byte counts only; `MemoryPlan` is what the runtime then builds. All sizes are bytes unless a name says elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierzero.errors import BudgetError, ConfigError
from tierzero.optim.formats import StateFormat
from tierzero.sharding.layout import FlatLayout
from tierzero.tiers import Tier, page_round

Split = Mapping[str, float] | str
"""A placement as configured: "auto", or the fraction of the bytes in each tier."""

DEFAULT_TILE = 2 * 1024 * 1024
"""Elements. 28 MB of bf16 training state with its gradient: long enough for the drive, short enough to pipeline."""
SMALLEST_TILE = 64 * 1024
STAGING_TILES = 8
"""Tiles in flight by default: read, update and write at once, with some to spare."""
FEWEST_STAGING_TILES = 2
DEFAULT_PREFETCH = 2


@dataclass(frozen=True)
class GroupShape:
    """One flat group as the planner sees it; ``fmt`` is None for frozen groups."""

    unit: int
    layout: FlatLayout
    fmt: StateFormat | None
    grad_itemsize: int

    def weight_bytes(self, elements: int) -> int:
        return elements * self.layout.dtype.itemsize

    def optimizer_bytes(self, elements: int) -> int:
        return elements * self.fmt.optimizer_itemsize if self.fmt else 0

    def gradient_bytes(self, elements: int) -> int:
        return elements * self.grad_itemsize if self.fmt else 0


@dataclass(frozen=True)
class ModelShape:
    """The groups of all units, and for each unit the units that are gathered while it runs (its ancestors)."""

    groups: tuple[GroupShape, ...]
    unit_names: tuple[str, ...]
    ancestors: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Budgets:
    """What the user allows per rank. None: as much as the plan needs, up to ``free`` bytes of that memory."""

    device: int | None
    host: int | None
    device_free: int
    host_free: int
    device_is_host: bool
    nvme: bool


@dataclass(frozen=True)
class PlanRequest:
    """The configured choices that the plan has to carry out."""

    params: Split
    optimizer: Split
    gradients: Split
    tile: int | None = None
    prefetch: int | None = None
    keep_gathered: bool = False


@dataclass(frozen=True)
class TileHomes:
    """Home tiers of one tile; optimizer and gradient are None for frozen weights."""

    weight: Tier
    optimizer: Tier | None
    gradient: Tier | None


@dataclass(frozen=True)
class MemoryPlan:
    """The placement and the size of every pool.

    ``homes[g][t]`` belongs to tile ``t`` of group ``g``. Device memory is the sum of ``device_state``, ``arena`` (gathered units) and ``buckets``
    (gradients on their way); host memory of ``host_state`` and ``staging`` (tiles in flight, ``staging_tile`` each).
    """

    tile: int
    prefetch: int
    homes: tuple[tuple[TileHomes, ...], ...]
    device_state: int
    host_state: int
    nvme_state: int
    arena: int
    buckets: int
    staging: int
    staging_tile: int
    in_place: tuple[bool, ...] = field(default=())
    """For each group: its shard is the whole flat buffer and lies in memory that the device computes from, so a gather is no copy."""

    @property
    def device(self) -> int:
        return self.device_state + self.arena + self.buckets

    @property
    def host(self) -> int:
        return self.host_state + self.staging


def plan_memory(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> MemoryPlan:
    """Places every tile and sizes every pool.

    Raises ConfigError for a placement that cannot be carried out and BudgetError, naming the bytes missing and the key, when a budget is too small.
    """
    _check_request(request, budgets)
    best: BudgetError | None = None
    for tile in _tile_sizes(shape, request, budgets):
        for prefetch in _prefetch_depths(request):
            try:
                return _plan(shape, request, budgets, tile, prefetch)
            except BudgetError as error:
                best = error if best is None or error.missing < best.missing else best
    assert best is not None
    raise best


def _check_request(request: PlanRequest, budgets: Budgets) -> None:
    for kind in ("params", "optimizer", "gradients"):
        split = getattr(request, kind)
        if isinstance(split, Mapping) and split.get("nvme", 0) > 0 and not budgets.nvme:
            raise ConfigError(f"placement.{kind}: nvme is asked for, but tiers.nvme lists no path; add one")
    on_device = [split for split in (request.optimizer,) if isinstance(split, Mapping) and split.get("device", 0) > 0]
    if on_device and not budgets.device_is_host and not (isinstance(request.params, Mapping) and request.params.get("device", 0) == 1):
        raise ConfigError("placement.optimizer: 'device' needs placement.params = 'device' as well, on a GPU")


def _tile_sizes(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> list[int]:
    """Tile sizes to try, in elements, the preferred first. Several tiles per large shard, so that overlap exists on small models too."""
    if request.tile is not None:
        return [-(-request.tile // 2048) * 2048]
    largest = max((group.layout.shard_numel for group in shape.groups), default=1)
    first = min(DEFAULT_TILE, max(SMALLEST_TILE, -(-largest // (4 * 2048)) * 2048))
    sizes = [first]
    while sizes[-1] > SMALLEST_TILE:
        sizes.append(max(SMALLEST_TILE, sizes[-1] // 2 // 2048 * 2048))
    return sizes


def _prefetch_depths(request: PlanRequest) -> list[int]:
    return [request.prefetch] if request.prefetch is not None else list(range(DEFAULT_PREFETCH, -1, -1))


def _plan(shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, prefetch: int) -> MemoryPlan:
    buckets = _bucket_bytes(shape, request, budgets)
    arena = _arena_bytes(shape, prefetch, request.keep_gathered)
    staging_tile = _staging_tile_bytes(shape, tile)
    room = {
        Tier.DEVICE: _room(budgets.device, budgets.device_free, arena + buckets) if not budgets.device_is_host or budgets.device else 0,
        Tier.HOST: _room(budgets.host, budgets.host_free, FEWEST_STAGING_TILES * staging_tile),
    }
    homes = _place(shape, request, budgets, tile, room)
    in_place = tuple(_is_in_place(group, tiles, budgets) for group, tiles in zip(shape.groups, homes, strict=True))
    totals = _totals(shape, homes, tile)
    arena = 0 if all(in_place) else _arena_bytes(shape, prefetch, request.keep_gathered, in_place)
    staged = totals[Tier.NVME] > 0 or not budgets.device_is_host
    if not staged and not any(_needs_buckets(group, tiles, budgets) for group, tiles in zip(shape.groups, homes, strict=True)):
        buckets = 0
    most = _staging_bytes(budgets, totals[Tier.HOST], staging_tile, _tile_count(homes)) if staged else 0
    plan = MemoryPlan(
        tile, prefetch, homes, totals[Tier.DEVICE], totals[Tier.HOST], totals[Tier.NVME], arena, buckets, most, staging_tile if staged else 0, in_place
    )
    _check_fits(shape, plan, budgets)
    return plan


def _room(budget: int | None, free: int, reserved: int) -> int:
    return max(0, (free if budget is None else budget) - reserved)


def _gathered_bytes(shape: ModelShape, in_place: Sequence[bool] | None = None) -> list[int]:
    """Bytes of each unit's gathered buffers."""
    sizes = [0] * len(shape.unit_names)
    for index, group in enumerate(shape.groups):
        if in_place is None or not in_place[index]:
            sizes[group.unit] += page_round(group.weight_bytes(group.layout.numel))
    return sizes


def _arena_bytes(shape: ModelShape, prefetch: int, keep: bool, in_place: Sequence[bool] | None = None) -> int:
    """Room for the unit in use with its ancestors, the one used before it, and ``prefetch`` more, wherever in the model that is."""
    sizes = _gathered_bytes(shape, in_place)
    if keep:
        return sum(sizes)
    window = prefetch + 2
    most = 0
    for start in range(len(sizes)):
        inside = range(start, min(start + window, len(sizes)))
        held = {above for unit in inside for above in shape.ancestors[unit]} | set(inside)
        most = max(most, sum(sizes[unit] for unit in held))
    # The last units of the forward are followed by the first ones again, and the two largest must fit wherever they stand.
    edge = set(range(max(0, len(sizes) - window + 1), len(sizes))) | {0, 1} & set(range(len(sizes)))
    largest = sorted(range(len(sizes)), key=lambda unit: sizes[unit])[-2:]
    held = {above for unit in largest for above in shape.ancestors[unit]} | set(largest)
    return min(sum(sizes), max(most, sum(sizes[unit] for unit in edge), sum(sizes[unit] for unit in held)))


def _bucket_bytes(shape: ModelShape, request: PlanRequest, budgets: Budgets) -> int:
    """Two of the largest unit's whole gradients: one filling while the other is reduced and put away."""
    sizes = [0] * len(shape.unit_names)
    for group in shape.groups:
        sizes[group.unit] += page_round(group.gradient_bytes(group.layout.numel))
    return sum(sorted(sizes)[-2:]) if len(sizes) > 1 else sum(sizes)


def _needs_buckets(group: GroupShape, homes: Sequence[TileHomes], budgets: Budgets) -> bool:
    if group.fmt is None:
        return False
    return group.layout.parts > 1 or len({home.gradient for home in homes}) > 1 or homes[0].gradient is Tier.NVME


def _staging_tile_bytes(shape: ModelShape, tile: int) -> int:
    most = 0
    for group in shape.groups:
        elements = min(tile, group.layout.shard_numel)
        parts = (group.weight_bytes(elements), group.optimizer_bytes(elements), group.gradient_bytes(elements))
        most = max(most, sum(page_round(part) for part in parts))
    return most


def _staging_bytes(budgets: Budgets, host_state: int, staging_tile: int, tiles: int) -> int:
    wanted = max(FEWEST_STAGING_TILES, min(STAGING_TILES, tiles)) * staging_tile
    if budgets.host is None:
        return wanted
    return max(FEWEST_STAGING_TILES * staging_tile, min(wanted, budgets.host - host_state))


def _tile_count(homes: Sequence[Sequence[TileHomes]]) -> int:
    return sum(1 for tiles in homes for tile in tiles if Tier.NVME in (tile.weight, tile.optimizer, tile.gradient)) or 2


def _is_in_place(group: GroupShape, homes: Sequence[TileHomes], budgets: Budgets) -> bool:
    if group.layout.parts != 1 or len({home.weight for home in homes}) != 1:
        return False
    return homes[0].weight is Tier.DEVICE or (homes[0].weight is Tier.HOST and budgets.device_is_host)


class _Chooser:
    """Gives each tile of one kind a tier: by the configured fractions, spread evenly, or ("auto") the fastest that has room."""

    def __init__(self, split: Split, room: dict[Tier, int], nvme: bool) -> None:
        self._fractions = {Tier(name): part for name, part in split.items()} if isinstance(split, Mapping) else None
        self._room = room
        self._nvme = nvme
        self._given: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._total = 0

    def choose(self, nbytes: int) -> Tier:
        if self._fractions is not None:
            self._total += nbytes
            tier = max(self._fractions, key=lambda t: self._fractions[t] * self._total - self._given[t])  # type: ignore[index]
        else:
            tier = next((t for t in (Tier.DEVICE, Tier.HOST) if self._room[t] >= nbytes), Tier.NVME if self._nvme else Tier.HOST)
        self._given[tier] += nbytes
        if tier in self._room:
            self._room[tier] -= nbytes
        return tier


def _place(
    shape: ModelShape, request: PlanRequest, budgets: Budgets, tile: int, room: dict[Tier, int]
) -> tuple[tuple[TileHomes, ...], ...]:
    """Explicit placements take their room first; then weights (moved most often per byte), gradients, optimizer states."""
    tiles = [[span.numel for span in group.layout.tiles(tile)] for group in shape.groups]
    chosen: dict[str, list[list[Tier]]] = {}
    kinds = ("params", "gradients", "optimizer")
    size = {"params": GroupShape.weight_bytes, "gradients": GroupShape.gradient_bytes, "optimizer": GroupShape.optimizer_bytes}
    for kind in sorted(kinds, key=lambda k: getattr(request, k) == "auto"):
        chooser = _Chooser(getattr(request, kind), room, budgets.nvme)
        chosen[kind] = [
            [chooser.choose(page_round(size[kind](group, numel))) for numel in numels]
            for group, numels in zip(shape.groups, tiles, strict=True)
        ]
    return tuple(
        tuple(
            TileHomes(weight, optimizer if group.fmt else None, gradient if group.fmt else None)
            for weight, optimizer, gradient in zip(
                chosen["params"][index], chosen["optimizer"][index], chosen["gradients"][index], strict=True
            )
        )
        for index, group in enumerate(shape.groups)
    )


def _totals(shape: ModelShape, homes: Sequence[Sequence[TileHomes]], tile: int) -> dict[Tier, int]:
    """Persistent bytes per tier."""
    totals = dict.fromkeys(Tier, 0)
    for group, tiles in zip(shape.groups, homes, strict=True):
        for span, home in zip(group.layout.tiles(tile), tiles, strict=True):
            totals[home.weight] += page_round(group.weight_bytes(span.numel))
            if home.optimizer is not None and home.gradient is not None:
                totals[home.optimizer] += page_round(group.optimizer_bytes(span.numel))
                totals[home.gradient] += page_round(group.gradient_bytes(span.numel))
    return totals


def _check_fits(shape: ModelShape, plan: MemoryPlan, budgets: Budgets) -> None:
    sizes = _gathered_bytes(shape, plan.in_place)
    largest = max(range(len(sizes)), key=lambda unit: sizes[unit]) if sizes else 0
    name = shape.unit_names[largest] if sizes else ""
    rows = (
        ("device", plan.device, budgets.device, budgets.device_free,
         f"{plan.device_state:,} bytes of state, {plan.arena:,} for gathered units (the largest, {name}, takes {sizes[largest]:,}) and {plan.buckets:,} for gradients on their way"),
        ("host", plan.host, budgets.host, budgets.host_free,
         f"{plan.host_state:,} bytes of state and {plan.staging:,} of staging ({FEWEST_STAGING_TILES} or more tiles of {plan.staging_tile:,})"),
    )  # fmt: skip
    for tier, needed, budget, free, parts in rows:
        limit = free if budget is None else budget
        if needed > limit:
            source = f"tiers.{tier} = {budget:,} bytes per rank" if budget is not None else f"the {free:,} bytes of {tier} memory that are free"
            raise BudgetError(
                f"{source}: {needed - limit:,} bytes short of the {needed:,} needed: {parts}; raise tiers.{tier} or place more on another tier",
                needed - limit,
            )
