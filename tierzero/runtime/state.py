"""The model's sharded state as the runtime holds it: units, their flat groups, and the tiles that live in the tiers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from tierzero.empty import give_memory
from tierzero.errors import ConfigError, NotResidentError
from tierzero.graphs import out_of_graphs
from tierzero.optim.formats import StateFormat
from tierzero.optim.hyper import AdamHyper
from tierzero.optim.owner import HyperOf
from tierzero.runtime.paged import GatheredParameter, PagedParameter, placeholder
from tierzero.sharding.layout import FlatLayout, Fragment, Slot, TileSpan
from tierzero.tiers import Buffer, StoredObject, Tier, page_round

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


@dataclass(frozen=True)
class Home:
    """Where one kind of state of one tile lives: ``nbytes`` of ``stored`` from ``offset`` (bytes)."""

    stored: StoredObject
    offset: int
    nbytes: int

    @property
    def tier(self) -> Tier:
        return self.stored.home

    def tensor(self, dtype: torch.dtype, numel: int, skip: int = 0) -> torch.Tensor:
        """The bytes as a 1-D tensor, ``skip`` bytes after the start; only for homes in memory."""
        assert self.stored.buffer is not None
        return self.stored.buffer.view(dtype, numel, self.offset + skip)


@dataclass(frozen=True)
class Tile:
    """A slice of a shard and the homes of its state; optimizer and gradient are None for frozen weights."""

    span: TileSpan
    weight: Home
    optimizer: Home | None
    gradient: Home | None

    @property
    def state(self) -> list[Home]:
        """The homes of its weights and of its optimizer state, if it has any."""
        return [home for home in (self.weight, self.optimizer) if home is not None]

    def state_bytes(self, only: Tier | None = None) -> int:
        """Bytes of its state as it is filed, each part in whole pages; of one tier, or all."""
        return sum(page_round(home.nbytes) for home in self.state if only is None or home.tier is only)


@dataclass(frozen=True)
class UpdateSegment:
    """Elements ``[start, stop)`` of a shard that are updated alike, and the factor on their gradients."""

    start: int
    stop: int
    hyper: AdamHyper
    grad_scale: float


@dataclass(frozen=True)
class UpdateSpec:
    """An update that ``step()`` has fixed and that a group's tiles still await."""

    segments: tuple[UpdateSegment, ...]


class SlotState:
    """One parameter of the model: its place in a group, its step count, its gradient's state. The parameter's link to
    the runtime.
    """

    def __init__(self, group: GroupState, slot: Slot, parameter: nn.Parameter, fragment: Fragment | None) -> None:
        self.group = group
        self.slot = slot
        self.parameter = parameter
        self.fragment = fragment
        self.resident_class: type[nn.Parameter] = type(parameter)
        self.away = placeholder(slot.shape, group.layout.dtype, group.device)
        self.step = 0
        self.hyper_of: HyperOf | None = None
        """Of the newest optimizer that has the parameter."""
        self.state_of: HyperOf | None = None
        """Of the optimizer whose moments are in the tiers; None: of none yet, or of the next that steps."""
        self.has_grad = False
        self.sum_of_squares = 0.0
        """Of this rank's fragment of the gradient as it is stored."""
        self.clip_factor = 1.0
        """What clipping multiplies the stored gradient with."""
        self.spent = False
        """See `tierzero.runtime.anticipation`."""
        self.observed: weakref.ref[nn.Parameter] | None = None
        """Lets `torch.utils.swap_tensors` refuse the parameter, whose place in the tiers it would not see."""

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def owner(self) -> Runtime:
        return self.group.unit.runtime

    def put_away(self) -> None:
        """Takes the values from the parameter object; from now on reading them pages in. The class goes first and comes
        back last, so that an interrupt between the two leaves a parameter that is away.
        """
        self.parameter.__class__ = PagedParameter
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter.is_meta:
                give_memory(self.parameter, self.away)
            else:
                self.parameter.data = self.away

    def make_resident(self, values: torch.Tensor, between_steps: bool = False) -> None:
        """Lets the parameter be an ordinary one over ``values`` (true shape and dtype); ``between_steps`` one that
        knows where its gradient is.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.data = values
        plain = self.resident_class is nn.Parameter
        self.parameter.__class__ = GatheredParameter if between_steps and plain else self.resident_class

    @property
    def is_away(self) -> bool:
        return type(self.parameter) is PagedParameter

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Met when a parameter is pickled while it is gathered."""
        raise NotResidentError(
            f"parameter {self.name!r} of a sharded model cannot be pickled; save `parameter.detach().clone()`, "
            "tierzero.full_state_dict(model), or use tierzero.save_checkpoint"
        )

    # What PagedParameter asks for.

    @out_of_graphs
    def fetch_copy(self) -> torch.Tensor:
        runtime = self.owner
        if runtime.world.size > 1 and not runtime.in_model_code:
            raise NotResidentError(
                f"the values of parameter {self.name!r} are sharded over {runtime.world.shards} ranks and are read "
                "outside the model's forward; "
                "use `with tierzero.gathered(parameter):` or tierzero.full_state_dict(model), on all ranks"
            )
        return runtime.full_copy(self)

    def gradient_for_user(self) -> torch.Tensor | None:
        if not self.has_grad:
            return None
        raise NotResidentError(
            f"the gradient of {self.name!r} is kept in the tiers, not in .grad; use tierzero.AdamW or tierzero.Adam to "
            "train (torch.optim's optimizers cannot), tierzero.clip_grad_norm_(model, max_norm) to clip, "
            "tierzero.LossScaler(model) to scale and tierzero.read_state(parameter, 'gradient') to read it"
        )

    def discard_gradient(self) -> None:
        """The user's ``parameter.grad = None``."""
        self.owner.zero_grad([self])

    def drop_gradient(self) -> None:
        self.has_grad = self.spent = False
        self.sum_of_squares = 0.0
        self.clip_factor = 1.0

    def set_requires_grad(self, wanted: bool) -> None:
        if wanted and not self.group.layout.trainable:
            raise ConfigError(
                f"parameter {self.name!r} was frozen when the model was sharded and has no optimizer state; unfreeze "
                "it before tierzero.shard"
            )

    def check_frozen(self) -> None:
        """`set_requires_grad` for a parameter that has been resident, when nobody was asked."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter.requires_grad and not self.group.layout.trainable:
                self.parameter.requires_grad = False
                self.set_requires_grad(True)


class GroupState:
    """One flat group of a unit: this rank's shard of it, cut into tiles."""

    def __init__(
        self,
        unit: UnitState,
        index: int,
        layout: FlatLayout,
        fmt: StateFormat | None,
        part: int,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.unit = unit
        self.index = index
        self.layout = layout
        self.fmt = fmt
        self.part = part
        self.grad_dtype = grad_dtype
        self.device = device
        self.tiles: tuple[Tile, ...] = ()
        self.slots: list[SlotState] = []
        self.in_place = False
        """The gathered weights are the home of weights that lie where the device computes: the shard, if it is the
        whole buffer, else what the stage keeps whole.
        """
        self.whole: frozenset[str] = frozenset()
        """Kinds of state that the stage keeps whole."""
        self.gathered_version = -1
        """``version`` of the weights that were last gathered into weights kept whole."""
        self.pending: UpdateSpec | None = None
        self.applying: UpdateSpec | None = None
        """An update that is on its way to the tiles: some have it, some not yet."""
        self.updating: Future[object] | None = None
        """An update that runs beside the backward; the weights are new when it ends."""
        self.version = 0
        """Counts changes of the weights: a weight saved for backward must not outlive one."""

    @property
    def shard_start(self) -> int:
        """Element of the whole buffer at which this rank's shard starts."""
        return self.part * self.layout.shard_numel

    def keeps_whole(self, kind: str) -> bool:
        """There is more here of this kind than the shard. ``kind``: "weight" or "gradient"."""
        return self.layout.parts > 1 and {"weight": "params", "gradient": "gradients"}[kind] in self.whole

    def whole_kept(self, kind: str) -> torch.Tensor:
        """All shards' weights or gradients as they are kept here: 1-D, of the layout's ``numel``."""
        assert self.keeps_whole(kind)
        stored = getattr(self.tiles[0], kind).stored
        dtype = self.layout.dtype if kind == "weight" else self.grad_dtype
        return Home(stored, 0, stored.nbytes).tensor(dtype, self.layout.numel)

    def home_bytes(self, kind: str) -> dict[Tier, int]:
        """Bytes of one kind of state that this rank keeps, per tier. ``kind``: "weight", "optimizer" or "gradient"."""
        found: dict[Tier, int] = {}
        for tile in self.tiles:
            home = getattr(tile, kind)
            if home is not None:
                found[home.tier] = found.get(home.tier, 0) + home.nbytes
        if kind != "optimizer" and self.keeps_whole(kind):
            return {tier: nbytes * self.layout.parts for tier, nbytes in found.items()}
        return found

    def whole_home(self, kind: str) -> torch.Tensor | None:
        """The shard's weights or gradients as one tensor where they lie in memory in one piece, else None. ``kind``:
        "weight" or "gradient".
        """
        homes = [getattr(tile, kind) for tile in self.tiles]
        first = homes[0]
        if first is None or first.tier is Tier.NVME or any(home.stored is not first.stored for home in homes):
            return None
        dtype = self.layout.dtype if kind == "weight" else self.grad_dtype
        whole: torch.Tensor = first.tensor(dtype, self.layout.shard_numel)
        return whole

    def gathered_bytes(self) -> int:
        return self.layout.numel * self.layout.dtype.itemsize


@dataclass
class Gathered:
    """The whole weights of one group in device memory. ``buffer`` is None when they are a home (``in_place``)."""

    group: GroupState
    buffer: Buffer | None
    flat: torch.Tensor
    _lent: list[StorageWeakRef] = field(default_factory=list)

    def lend(self) -> torch.Tensor:
        """``flat`` for a reader whose end nobody announces: a node of a backward holds a weight while it unpacks its
        other tensors, for which checkpointing may run, and page in, any number of units; a user's forward may keep a
        view of its weights anywhere. What is returned, and every view of it, has a storage of its own over the same
        memory, so that it is known when the last is gone.
        """
        if self.buffer is None or not self.flat.numel():
            return self.flat
        alias: torch.Tensor = from_dlpack(torch._C._to_dlpack(self.flat.view(torch.uint8))).view(self.flat.dtype)
        self._lent.append(StorageWeakRef(alias.untyped_storage()))
        return alias

    @property
    def is_lent(self) -> bool:
        self._lent = [storage for storage in self._lent if not storage.expired()]
        return bool(self._lent)

    def parameter_values(self, slot: Slot, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Out of ``flat``, of which this may have been lent one."""
        return (self.flat if flat is None else flat).narrow(0, slot.offset, slot.numel).view(slot.shape)


@dataclass
class UnitState:
    """Modules gathered together."""

    runtime: Runtime
    index: int
    title: str
    modules: dict[str, nn.Module]
    ancestors: tuple[int, ...]
    groups: list[GroupState] = field(default_factory=list)
    active: int = 0
    """Forwards of this unit's modules that are running now."""

    @property
    def in_place(self) -> bool:
        return all(group.in_place for group in self.groups)

    def all_slots(self) -> list[SlotState]:
        return [slot for group in self.groups for slot in group.slots]


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one tile: elements of the flattened parameter, and of the tile."""

    slot: SlotState
    of_parameter: slice
    of_tile: slice


def piece_in(slot: SlotState, tile: Tile) -> Piece | None:
    """What of the parameter lies in this rank's ``tile``, if anything."""
    fragment = slot.fragment
    if fragment is None:
        return None
    start = max(fragment.shard_offset, tile.span.start)
    stop = min(fragment.shard_offset + fragment.numel, tile.span.stop)
    if start >= stop:
        return None
    first = fragment.start + start - fragment.shard_offset
    return Piece(slot, slice(first, first + stop - start), slice(start - tile.span.start, stop - tile.span.start))


def tile_pieces(group: GroupState, tile: Tile) -> Iterator[Piece]:
    """The parts of all parameters in a tile, in order."""
    for slot in group.slots:
        piece = piece_in(slot, tile)
        if piece is not None:
            yield piece


def attach(slot: SlotState) -> None:
    """Makes the parameter know its slot: the one attribute that TierZero puts on a parameter."""
    slot.parameter._tierzero = slot  # type: ignore[attr-defined]
    slot.observed = weakref.ref(slot.parameter)


def slot_of(parameter: torch.Tensor) -> SlotState | None:
    """The slot of a sharded parameter; None for any other tensor."""
    found = parameter.__dict__.get("_tierzero")
    return found if isinstance(found, SlotState) else None


def slot_required(parameter: torch.Tensor) -> SlotState:
    """The slot of a sharded parameter. Raises ConfigError for anything else."""
    slot = slot_of(parameter) if isinstance(parameter, torch.Tensor) else None
    if slot is None:
        raise ConfigError("this tensor is not a parameter of a model sharded with tierzero.shard")
    return slot


def slots_in_order(units: Sequence[UnitState]) -> list[SlotState]:
    return [slot for unit in units for slot in unit.all_slots()]
