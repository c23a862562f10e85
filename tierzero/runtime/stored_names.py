"""Under which names, and in which form, the tensors of a model lie in a folder of files.

As a rule under the model's own. Of models of the transformers library the folder may lack the prefix of the base model,
or have one that the model lacks, and older names and forms: experts one by one that the model has as one tensor.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierzero.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """The tensors of a folder that one of the model's is made of. ``join`` None: of one, as it is."""

    names: tuple[str, ...]
    shape: Shape
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    def make(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if self.join is None else self.join(tensors)


class Origins:
    """Where the parameters and buffers of ``model`` come from, of a folder that has the tensors ``stored``.

    Raises ConfigError where tensors of the folder cannot be joined to what the model has.
    """

    def __init__(self, model: nn.Module, stored: Iterable[str], shape: Callable[[str], Shape]) -> None:
        self._shape = shape
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._plain: dict[str, str] = {}
        self._joined: dict[str, Origin] = {}
        library = _Transformers.of(model)
        if library is None:
            self._plain = {name: name for name in stored if name in names}
            return
        groups: dict[str, list[_Part]] = {}
        for name in library.in_order(stored):
            part = library.part(name, names)
            if part.target in names and part.pattern is None:
                self._plain[part.target] = name
            elif part.pattern is not None:
                groups.setdefault(part.target, []).append(part)
        for target, parts in groups.items():
            self._joined |= library.joined(target, parts, shape)

    def of(self, names: Sequence[str]) -> Origin | None:
        """Of a tensor that the model has under all of ``names``."""
        for name in names:
            if name in self._joined:
                return self._joined[name]
            if name in self._plain:
                return Origin((self._plain[name],), self._shape(self._plain[name]))
        return None


@dataclass(frozen=True)
class _Part:
    """A tensor of the folder: the model's name for it, or for what it is a part of by the rule for ``pattern``."""

    name: str
    target: str
    pattern: str | None


class _Transformers:
    """What the transformers library knows of the names that its model may have in a folder."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        self._rules: Any = None
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        try:
            from transformers import core_model_loading as rules
            from transformers.conversion_mapping import get_model_conversion_mapping
        except ImportError:  # a version whose models and folders have the same names
            return
        self._rules = rules
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, rules.WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, rules.WeightConverter)]

    @classmethod
    def of(cls, model: nn.Module) -> _Transformers | None:
        """None for a model that is not of the library."""
        library = sys.modules.get("transformers.modeling_utils")
        return cls(model) if library is not None and isinstance(model, library.PreTrainedModel) else None

    def in_order(self, names: Iterable[str]) -> list[str]:
        """By number where names differ in one: the order in which parts are joined."""
        return sorted(names, key=self._rules.dot_natural_key if self._rules is not None else None)

    def part(self, name: str, known: Container[str]) -> _Part:
        renamed, pattern = name, None
        if self._rules is not None:
            renamed, pattern = self._rules.rename_source_key(name, self._renamings, self._converters)
        target = self._with_prefix(renamed, known)
        if target not in known and self._with_prefix(name, known) in known:
            return _Part(name, self._with_prefix(name, known), None)
        return _Part(name, target, pattern)

    def _with_prefix(self, name: str, known: Container[str]) -> str:
        """With the prefix of the base model or without it, as the model has it."""
        if name in known or not self._prefix:
            return name
        bare, longer = name.removeprefix(self._prefix), self._prefix + name
        return bare if bare in known else longer if longer in known else name

    def joined(self, target: str, parts: Sequence[_Part], shape: Callable[[str], Shape]) -> dict[str, Origin]:
        """What becomes of the parts, by the model's names: one tensor of several, or several of one."""
        names = tuple(part.name for part in parts)
        try:
            made = self._convert(target, parts, [torch.empty(shape(name), device="meta") for name in names])
        except Exception as error:
            raise ConfigError(f"{target!r} cannot be made of {names[0]!r} and alike: {error}") from error

        def join(name: str) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
            return lambda tensors: self._convert(target, parts, tensors)[name]

        return {name: Origin(names, tuple(tensor.shape), join(name)) for name, tensor in made.items()}

    def _convert(self, target: str, parts: Sequence[_Part], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(next(rule for rule in self._converters if parts[0].pattern in rule.source_patterns))
        for part, tensor in zip(parts, tensors, strict=True):
            rule.add_tensor(target, part.name, part.pattern, tensor)
        made = rule.convert(target, model=self._model, config=self._model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}
