"""Which modules are gathered together: the units of a model.

Every parameter belongs to exactly one unit: the innermost unit module that holds it, by its first name. What no
chosen module holds belongs to the root unit, which stays gathered while the model's forward runs; therefore large
leaf modules outside the chosen ones (an embedding, an output head) become units of their own.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tierzero.errors import ConfigError

LARGE_LEAF = 256 * 1024
"""Elements. A leaf module outside every chosen unit that holds at least this many is gathered by itself."""

UnitChoice = Sequence[type[nn.Module] | str] | type[nn.Module] | str | None


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it is sharded: its module, its dotted name ("" for the root), and its own parameters with all
    their names.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    ancestors: tuple[int, ...]

    @property
    def title(self) -> str:
        return self.name or "(root)"


def find_units(model: nn.Module, choice: UnitChoice) -> list[UnitSpec]:
    """The units of ``model`` in the order of its modules, the root first; units without parameters of their own are
    left out.

    ``choice`` lists classes, class names, or dotted-name patterns (``"layers.*"``), or is one of them; None takes the
    repeated blocks.
    Raises ConfigError for an entry that matches no module.
    """
    if isinstance(choice, str | type):
        choice = (choice,)
    chosen = _repeated_blocks(model) if choice is None else _matching(model, choice)
    chosen |= _large_leaves(model, chosen)
    chosen.add("")
    order = [name for name, _ in model.named_modules() if name in chosen]
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    members: dict[str, list[nn.Parameter]] = {name: [] for name in order}
    for parameter, names in names_of.items():
        members[_owner(names[0], chosen)].append(parameter)
    kept = [name for name in order if members[name] or name == ""]
    position = {name: index for index, name in enumerate(kept)}
    return [
        UnitSpec(
            name,
            model.get_submodule(name),
            tuple((tuple(names_of[parameter]), parameter) for parameter in members[name]),
            tuple(position[above] for above in _ancestors(name) if above in position),
        )
        for name in kept
    ]


def _owner(parameter_name: str, chosen: set[str]) -> str:
    return next(name for name in _ancestors(parameter_name) if name in chosen)


def _ancestors(name: str) -> list[str]:
    """Dotted prefixes of ``name``, the longest first, without ``name`` itself, ending with the root."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(model: nn.Module) -> set[str]:
    """Members of the outermost containers whose children repeat one class: what FSDP users wrap by hand."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if any(above in found for above in [name, *_ancestors(name)]):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            counts = Counter(type(child) for child in module.children())
            for child_name, child in module.named_children():
                repeated = counts[type(child)] > 1 or len(counts) == len(list(module.children())) == 1
                if repeated and next(child.children(), None) is not None and _holds_parameters(child):
                    found.add(f"{name}.{child_name}" if name else child_name)
    return found


def _matching(model: nn.Module, choice: Sequence[type[nn.Module] | str]) -> set[str]:
    found: set[str] = set()
    for entry in choice:
        if not isinstance(entry, str | type):
            kind = type(entry).__name__
            raise ConfigError(f"units: {entry!r} is a {kind}; name a class or a pattern of module names")
        hits = {name for name, module in model.named_modules() if name and matches(name, module, entry)}
        if not hits:
            shown = entry if isinstance(entry, str) else entry.__name__
            raise ConfigError(
                f"units: no module of the model matches {shown!r}; name a class or a pattern such as 'layers.*'"
            )
        found |= hits
    return found


def matches(name: str, module: nn.Module, entry: type[nn.Module] | str) -> bool:
    if isinstance(entry, str):
        return type(module).__name__ == entry or fnmatch.fnmatchcase(name, entry)
    return isinstance(module, entry)


def _large_leaves(model: nn.Module, chosen: set[str]) -> set[str]:
    found: set[str] = set()
    for name, module in model.named_modules():
        if not name or any(above in chosen for above in [name, *_ancestors(name)]):
            continue
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own >= LARGE_LEAF and next(module.children(), None) is None:
            found.add(name)
    return found
