"""First contents of the tiers, unit by unit: from a built model, from modules that initialise themselves, or from
safetensors files.

Never more than one unit's full weights exist at a time, and each rank keeps only its shard of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.formats import store_master
from tierzero.runtime.state import GroupState, SlotState, Tile, UnitState, attach, piece_in
from tierzero.runtime.tile_io import OpenTile, Parts

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime

Init = Callable[[nn.Module], object] | str | Path | None


def check_fillable(model: nn.Module, init: Init) -> None:
    """Raises ConfigError, before anything is allocated, when an empty parameter has no source of values."""
    empty = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.is_meta}
    if isinstance(init, str | Path):
        SafetensorsFolder(Path(init)).check(model)
        return
    if init is not None and not callable(init):
        raise ConfigError(f"init: {init!r} is a {type(init).__name__}; give a function of a module, or a folder")
    if init is not None and not empty:
        raise ConfigError(
            "init: the model has its values already, and a function is for an empty model; build it under "
            "tierzero.empty_init(), or leave init out"
        )
    if init is not None or not empty:
        return
    for name, module in model.named_modules():
        owns = [child for child, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        if owns and _own_reset(module) is None:
            raise ConfigError(
                f"module {name or '(root)'!r} ({type(module).__name__}) has the empty parameter {owns[0]!r} and no "
                "reset_parameters(); "
                "pass init=fn(module) or init='folder of safetensors' to tierzero.shard"
            )


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _opened(path: Path) -> Any:
    """The safetensors file, open. Raises ConfigError for what is none, or was cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"init: {path} cannot be read as a safetensors file: {error}") from None


class SafetensorsFolder:
    """Tensors by name in a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"init: {folder} is not a folder; name one that holds *.safetensors files")
        self._folder = folder
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            return self._from_index(index)
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            with _opened(path) as tensors:
                found.update(dict.fromkeys(tensors.keys(), path))
        if not found:
            raise ConfigError(f"init: {self._folder} holds no *.safetensors file")
        return found

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            found = {name: self._folder / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"init: {index} is no index of safetensors files: {error!r}") from None
        missing = [path for path in set(found.values()) if not path.is_file()]
        if missing:
            raise ConfigError(f"init: {missing[0]} is missing; {index.name} names it")
        return found

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError for a parameter whose tensor is missing or of another shape."""
        for names, parameter in _named_parameters(model):
            name = self._known(names)
            if name is None:
                raise ConfigError(
                    f"init: {self._folder} has no tensor {names[0]!r}; it must hold every parameter of the model"
                )
            shape = self._shape(name)
            if shape != tuple(parameter.shape):
                raise ConfigError(
                    f"init: {name!r} in {self._folder} has shape {shape}, the model's has {tuple(parameter.shape)}"
                )

    def _known(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self._file_of), None)

    def _shape(self, name: str) -> tuple[int, ...]:
        with _opened(self._file_of[name]) as tensors:
            if name not in tensors.keys():  # noqa: SIM118 (no mapping)
                raise ConfigError(f"init: {self._file_of[name]} has no tensor {name!r}, against the folder's index")
            return tuple(tensors.get_slice(name).get_shape())

    def load(self, names: tuple[str, ...]) -> torch.Tensor:
        name = self._known(names)
        assert name is not None
        with _opened(self._file_of[name]) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
            return tensor

    def load_buffers(self, model: nn.Module) -> None:
        """Persistent buffers that the folder has values for."""
        state_names = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers():
            if name in self._file_of and name in state_names:
                buffer.copy_(self.load((name,)))


def _named_parameters(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return [(tuple(names), parameter) for parameter, names in names_of.items()]


@torch.no_grad()
def fill_unit(runtime: Runtime, unit: UnitState, init: Init, folder: SafetensorsFolder | None) -> None:
    """Gives the unit's tiles their first contents and takes the values from its parameters."""
    if folder is None and any(slot.parameter.is_meta for slot in unit.all_slots()):
        _materialize(unit, init)
    for group in unit.groups:
        sources = _sources(runtime, group, folder)
        for tile in group.tiles:
            runtime.engine.run(_fill_tile(runtime, group, tile, sources))
    take_values(unit)


def take_values(unit: UnitState) -> None:
    """From now on the tiers have the values of the unit's parameters."""
    for slot in unit.all_slots():
        slot.put_away()
        attach(slot)


def _materialize(unit: UnitState, init: Init) -> None:
    """Allocates the unit's empty parameters and lets its modules fill them. One module's parameters may belong to
    another unit (a tied weight);
    those that already have values keep them."""
    empty = [slot for slot in unit.all_slots() if slot.parameter.is_meta]
    for slot in empty:
        real = torch.empty(slot.slot.shape, dtype=slot.parameter.dtype)
        if callable(init) and real.is_floating_point():
            real.fill_(float("nan"))
        torch.utils.swap_tensors(slot.parameter, nn.Parameter(real, requires_grad=slot.parameter.requires_grad))
    mine = {slot.parameter for slot in empty}
    for module in _children_first(unit.modules.values()):
        if callable(init):
            if any(parameter in mine for parameter in module.parameters()):
                init(module)
            continue
        own = set(module.parameters(recurse=False)) & mine
        if own:
            reset = _own_reset(module)
            assert reset is not None
            reset()
            mine -= own  # a tied weight is initialised once, by the module that it is named after
    for slot in empty if callable(init) else ():
        if slot.slot.numel and bool(slot.parameter.detach().isnan().all()):
            raise ConfigError(
                f"init: parameter {slot.name!r} was given no values; the function that fills modules must fill each "
                "module's own parameters"
            )


def _children_first(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """As ``nn.Module.apply`` visits them, each module once."""
    seen: set[nn.Module] = set()

    def visit(current: nn.Module) -> Iterator[nn.Module]:
        if current in seen:
            return
        seen.add(current)
        for child in current.children():
            yield from visit(child)
        yield current

    for module in modules:
        yield from visit(module)


def _sources(
    runtime: Runtime, group: GroupState, folder: SafetensorsFolder | None
) -> list[tuple[SlotState, torch.Tensor]]:
    """Each parameter that this rank holds a part of, with its full values in host memory, flattened."""
    sources = []
    for slot in group.slots:
        values = folder.load(slot.slot.names) if folder is not None else slot.parameter.detach()
        flat = values.reshape(-1).cpu()
        if runtime.collectives is not None and folder is None:
            # Whatever each rank's generator gave, rank 0's weights count. A copy, in case the caller's tensor is
            # shared.
            flat = flat.contiguous()
            runtime.collectives.broadcast(flat)
        sources.append((slot, flat))
    return sources


async def _fill_tile(
    runtime: Runtime, group: GroupState, tile: Tile, sources: list[tuple[SlotState, torch.Tensor]]
) -> None:
    parts = Parts.STATE if group.fmt is not None else Parts.WEIGHT
    async with runtime.tile_io.fresh(group, tile, parts) as opened:
        await runtime.engine.call(_write_values, group, tile, opened, sources)


def _write_values(
    group: GroupState, tile: Tile, opened: OpenTile, sources: list[tuple[SlotState, torch.Tensor]]
) -> None:
    assert opened.weight is not None
    opened.weight.zero_()
    for part in opened.optimizer.values():
        part.zero_()
    for slot, values in sources:
        piece = piece_in(slot, tile)
        if piece is None:
            continue
        given, inside = values[piece.of_parameter], piece.of_tile
        if group.fmt is None:
            opened.weight[inside].copy_(given)
        else:
            store_master(group.fmt, given.float().contiguous(), opened.weight[inside], opened.cut(inside))
