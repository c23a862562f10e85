"""Values that the modules of an empty model give themselves: by their ``reset_parameters()``, or by a function of the
user's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tierzero.empty import give_memory
from tierzero.errors import ConfigError
from tierzero.runtime.state import SlotState, UnitState
from tierzero.sharding.units import dotted_prefixes

Filler = Callable[[nn.Module], object]


def check_resets(model: nn.Module) -> None:
    """Raises ConfigError for a module that has something without values and no way to give it some."""
    for name, module in model.named_modules():
        empty = [child for child, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        lacks = [child for child, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        built = any(not parameter.is_meta for parameter in module.parameters(recurse=False))
        if empty and _own_reset(module) is None:
            raise ConfigError(
                f"module {name or '(root)'!r} ({type(module).__name__}) has the empty parameter {empty[0]!r} and no "
                f"reset_parameters(); pass {_function_for(model)} or init='folder of safetensors' to tierzero.shard"
            )
        if lacks and (built or _own_reset(module) is None):
            raise no_values(f"{name}.{lacks[0]}" if name else lacks[0])


def warn_of_lost_values(model: nn.Module) -> None:
    """Warns where constructors have given empty parameters values beyond the modules' own resets, as those do that
    initialise what is inside of them: filling by the resets alone loses that.
    """
    lost = _written_beyond_resets(model)
    if lost:
        warnings.warn(
            f"shard: parameter {lost[0]!r} (and {len(lost) - 1} more) was initialised beyond its module's own "
            "reset_parameters(), which is all that an empty model is filled by, so that this has no effect; pass "
            f"{_function_for(model)}, which does all of it, to tierzero.shard",
            RuntimeWarning,
            stacklevel=2,
        )


def _function_for(model: nn.Module) -> str:
    """Models of the transformers library bring theirs."""
    return "init=model._init_weights" if callable(getattr(model, "_init_weights", None)) else "init=fn(module)"


def _written_beyond_resets(model: nn.Module) -> list[str]:
    """PyTorch counts writes to empty tensors too: those so far are compared with what the resets make of them."""
    before = {name: parameter._version for name, parameter in model.named_parameters() if parameter.is_meta}
    if max(before.values(), default=0) < 2:
        return []
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        for module in list(model.modules()):
            reset = _own_reset(module) if any(p.is_meta for p in module.parameters(recurse=False)) else None
            if reset is not None:
                with contextlib.suppress(Exception):  # one that cannot run without values
                    reset()
    with torch.no_grad():
        for buffer, values in kept:
            buffer.copy_(values)
    own = {name: model.get_parameter(name)._version - version for name, version in before.items()}
    return [name for name, version in before.items() if version > own[name] > 0]


def check_buffers(model: nn.Module, filled: Container[str] = ()) -> None:
    """Raises ConfigError for a buffer on the meta device that is not among the ``filled``."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in filled:
            raise no_values(name)


def no_values(buffer: str) -> ConfigError:
    return ConfigError(
        f"init: buffer {buffer!r} has no values (it is on the meta device), and nothing gives it any; build the model "
        "under tierzero.empty_init(), which makes buffers as usual"
    )


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


@dataclass(frozen=True)
class _Buffer:
    """A buffer that got memory: how it was before anything was written to it."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    version: int

    def is_untouched(self) -> bool:
        same = self.module._buffers.get(self.key) is self.tensor and self.tensor._version == self.version
        unset = not self.tensor.is_floating_point() or bool(self.tensor.isnan().all())
        return same and unset and self.tensor.numel() > 0


class EmptyBuffers:
    """The buffers of ``model`` that are on the meta device, in memory from now on but without values."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._all: list[_Buffer] = []
        made: dict[torch.Tensor, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    continue
                fill = float("nan") if buffer.is_floating_point() else 0
                real = made.setdefault(buffer, torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu"))
                module._buffers[key] = real
                self._all.append(_Buffer(f"{prefix}.{key}" if prefix else key, module, key, real, real._version))

    @torch.no_grad()
    def fill_rest(self, init: Filler | None) -> None:
        """Lets those modules fill theirs that no unit's parameters made fill anything."""
        for module in dict.fromkeys(buffer.module for buffer in self._all):
            if init is not None and next(module.parameters(), None) is None:
                init(module)
            elif init is None and next(module.parameters(recurse=False), None) is None:
                reset = _own_reset(module)
                assert reset is not None
                reset()

    def check(self) -> None:
        """Raises ConfigError for one that nobody wrote to."""
        for buffer in self._all:
            if buffer.is_untouched():
                raise no_values(buffer.name)


def fill_empty(model: nn.Module, unit: UnitState, init: Filler | None) -> None:
    """Allocates the unit's empty parameters and lets modules fill them.

    A function is called as ``nn.Module.apply`` does it, of every module around the parameters: it may be one further
    out that gives them their values. What belongs to other units is still, or again, empty then, and nothing can be
    lost that is written there.
    """
    empty = [slot for slot in unit.all_slots() if slot.parameter.is_meta]
    for slot in empty:
        real = torch.empty(slot.slot.shape, dtype=slot.parameter.dtype, device="cpu")
        if init is not None and real.is_floating_point():
            real.fill_(float("nan"))
        give_memory(slot.parameter, real)
    if init is None:
        _reset(unit, {slot.parameter for slot in empty})
        return
    around = {prefix for slot in empty for name in slot.slot.names for prefix in dotted_prefixes(name)}
    for name, module in _children_first([("", model)]):
        if name in around:
            init(module)
    for slot in empty:
        if slot.slot.numel and bool(slot.parameter.detach().isnan().all()):
            raise ConfigError(
                f"init: parameter {slot.name!r} was given no values; the function that fills modules must fill each "
                "module's own parameters"
            )


def _reset(unit: UnitState, mine: set[nn.Parameter]) -> None:
    """One module's parameters may belong to another unit (a tied weight); those that already have values keep them."""
    for _, module in _children_first(unit.modules.items()):
        own = set(module.parameters(recurse=False)) & mine
        if own:
            reset = _own_reset(module)
            assert reset is not None
            reset()
            mine -= own  # a tied weight is initialised once, by the module that it is named after


def empty_again(slots: Iterable[SlotState]) -> None:
    """Gives the parameters' memory back: their values are in the tiers."""
    for slot in slots:
        give_memory(slot.parameter, torch.empty_like(slot.parameter, device="meta"))


def _children_first(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """As ``nn.Module.apply`` visits them, each module once, under its first name."""
    seen: set[nn.Module] = set()

    def visit(name: str, current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if current in seen:
            return
        seen.add(current)
        for child_name, child in current.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, current

    for name, module in modules:
        yield from visit(name, module)
