"""Which modules are gathered together: the units of a model.

Every parameter belongs to exactly one unit: the innermost unit module that holds it, by its first name. What no
chosen module holds belongs to the root unit, which stays gathered while the model's forward runs; therefore large
leaf modules outside the chosen ones (an embedding, an output head) become units of their own.

A gather has a cost of its own, however small the unit. Below a floor, neighbours become one unit of several modules;
what has no neighbour belongs to the unit around it, in the end to the root.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from torch import nn

from tierzero.errors import ConfigError

LARGE_LEAF = 256 * 1024
"""Elements. A leaf module outside every chosen unit that holds at least this many is gathered by itself."""

SMALL_UNIT = 1_000_000
"""Elements. Of smaller units, what a gather costs whatever its size is more than overlap gains (docs/benchmarks.md)."""

UnitChoice = Sequence[type[nn.Module] | str] | type[nn.Module] | str | None


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it is sharded: its modules by their dotted names ("" for the root), in the order of the model, and
    its own parameters with all their names.
    """

    modules: dict[str, nn.Module]
    parameters: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    ancestors: tuple[int, ...]

    @property
    def title(self) -> str:
        first, *others = self.modules
        beside = [name for name in others if first and not name.startswith(f"{first}.")]
        return f"{first} to {beside[-1]}" if beside else first or "(root)"


@dataclass
class _Node:
    """A unit that is being found: the modules gathered together, and the units inside them."""

    names: list[str]
    parameters: list[nn.Parameter] = field(default_factory=list)
    inner: list[_Node] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def take(self, other: _Node) -> None:
        self.names += other.names
        self.parameters += other.parameters
        self.inner += other.inner


def find_units(model: nn.Module, choice: UnitChoice, floor: int | None = None) -> list[UnitSpec]:
    """The units of ``model`` in the order of its modules, the root first; units without parameters of their own are
    left out.

    ``choice`` lists classes, class names, or dotted-name patterns (``"layers.*"``), or is one of them; None takes the
    repeated blocks. ``floor`` (elements): smaller units are joined with their neighbours; None is `SMALL_UNIT` for
    the repeated blocks, 0 for a choice.
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
    nodes = {name: _Node([name]) for name in order}
    for parameter, names in names_of.items():
        nodes[_around(names[0], nodes)].parameters.append(parameter)
    for name in [name for name in order if name and not nodes[name].parameters]:
        del nodes[name]
    for name in nodes:
        if name:
            nodes[_around(name, nodes)].inner.append(nodes[name])
    _join_small(nodes[""], floor if floor is not None else SMALL_UNIT if choice is None else 0)

    specs: list[UnitSpec] = []

    def add(node: _Node, ancestors: tuple[int, ...]) -> None:
        own = sorted(node.names, key=order.index)
        parameters = tuple((tuple(names_of[parameter]), parameter) for parameter in node.parameters)
        index = len(specs)
        specs.append(UnitSpec({name: model.get_submodule(name) for name in own}, parameters, ancestors))
        for inner in node.inner:
            add(inner, (index, *ancestors))

    add(nodes[""], ())
    return specs


def _join_small(node: _Node, floor: int) -> None:
    """Joins those of the units inside that have fewer than ``floor`` elements with what stands beside them."""
    joined: list[_Node] = []
    for inner in node.inner:
        _join_small(inner, floor)
        if joined and joined[-1].numel < floor:
            joined[-1].take(inner)
        else:
            joined.append(inner)
    node.inner = joined
    if joined and joined[-1].numel < floor:
        last = joined.pop()
        (joined[-1] if joined else node).take(last)


def _around(name: str, known: Container[str]) -> str:
    return next(above for above in dotted_prefixes(name) if above in known)


def dotted_prefixes(name: str) -> list[str]:
    """Dotted prefixes of ``name``, the longest first, without ``name`` itself, ending with the root."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(model: nn.Module) -> set[str]:
    """Members of the outermost containers whose children repeat one class: what FSDP users wrap by hand."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if any(above in found for above in [name, *dotted_prefixes(name)]):
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
        if not name or any(above in chosen for above in [name, *dotted_prefixes(name)]):
            continue
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own >= LARGE_LEAF and next(module.children(), None) is None:
            found.add(name)
    return found
