"""The whole configuration: loading, overriding and the rules that span sections."""

from __future__ import annotations

import copy
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from ..errors import ConfigError
from .messages import config_error, keys_of, nearest_key, sections_of
from .rules import Rule, absolute
from .sections import (
    ActivationsSection,
    CheckpointSection,
    DataSection,
    IoSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    ShardingSection,
    TiersSection,
    TrainSection,
)


class Config(BaseModel):
    """A validated, immutable configuration. Build it with :meth:`load` or :meth:`from_dict`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    tiers: TiersSection = Field(default_factory=TiersSection)
    placement: PlacementSection = Field(default_factory=PlacementSection)
    sharding: ShardingSection = Field(default_factory=ShardingSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    activations: ActivationsSection = Field(default_factory=ActivationsSection)
    io: IoSection = Field(default_factory=IoSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr(default="config")
    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _said: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a TOML file. Relative paths in it are relative to its folder. Raises ConfigError."""
        file = Path(path)
        try:
            given = tomllib.loads(file.read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the configuration: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a TOML file is expected") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: not valid TOML: {' '.join(str(error).split())}") from None
        return cls._build(given, str(file), Path(os.path.abspath(file)).parent)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Takes the same nesting as the file; relative paths are relative to the working directory.

        Raises ConfigError.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"config: a configuration is a dict of sections, not {type(values).__name__}")
        return cls._build(copy.deepcopy(dict(values)), "config", Path.cwd())

    @classmethod
    def from_deepspeed(cls, config: str | os.PathLike[str] | Mapping[str, Any], ranks: int | None = None) -> Config:
        """Translates a DeepSpeed JSON file, or its content as a dict.

        ``ranks``: how many will run, where the file gives a batch per rank only. Paths in a file are relative to its
        folder. One warning names the keys that do not mean quite the same here; `tierzero.config.deepspeed.translate`
        gives what became of each. Raises ConfigError for what the user must change.
        """
        from .deepspeed import translate  # it builds on this module

        translation = translate(config, ranks)
        if summary := translation.summary():
            warnings.warn(summary, stacklevel=2)
        return translation.config

    @classmethod
    def from_translation(cls, given: dict[str, Any], source: str, base: Path, said: Mapping[str, str]) -> Self:
        """From values that another configuration was translated to. ``said``: for each key, where it comes from.

        Raises ConfigError.
        """
        return cls._build(given, source, base, said)

    @classmethod
    def _build(cls, given: dict[str, Any], source: str, base: Path, said: Mapping[str, str] | None = None) -> Self:
        """``said``: for keys that do not come from ``source`` as they are, how they were given."""
        try:
            config = cls.model_validate(given, context={"base": base})
        except ValidationError as error:
            raise config_error(source, error, cls, said or {}) from None
        config._given, config._source, config._base, config._said = given, source, base, dict(said or {})
        return config

    @property
    def source(self) -> str:
        """The file this was loaded from, or ``"config"``."""
        return self._source

    def origin(self, *keys: str) -> str:
        """How the first of ``keys`` ("section.key") that stood on the command line, or was translated, was given; else
        `source`.
        """
        return next((self._said[key] for key in keys if key in self._said), self._source)

    def override(self, assignments: Iterable[str]) -> Self:
        """A new configuration with ``section.key=value`` assignments applied, later ones winning.

        A value is TOML; text needs no quotes. Relative paths in it are relative to the working directory, because that
        is where they are typed. Raises ConfigError.
        """
        given = copy.deepcopy(self._given)
        said = dict(self._said)
        for assignment in assignments:
            dotted, equals, text = assignment.partition("=")
            where = tuple(part.strip() for part in dotted.split("."))
            if not equals or len(where) < 2 or not all(where):
                raise ConfigError(f"--set {assignment}: expected section.key=value, such as train.steps=100")
            _assign(type(self), given, where, _value(text, assignment), assignment)
            said[".".join(where[:2])] = f"--set {assignment}"
        return self._build(given, self._source, self._base, said)

    def given(self) -> dict[str, dict[str, Any]]:
        """Only what was said, without the defaults."""
        return copy.deepcopy(self._given)

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value in plain types, so that ``Config.from_dict`` of it is the same configuration."""
        found: dict[str, Any] = self.model_dump(by_alias=True, mode="python", exclude_none=True)
        return {section: {key: _plain(value) for key, value in values.items()} for section, values in found.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def check(self) -> None:
        """Rules between sections that only the finished configuration can break. Called before anything is allocated.

        Raises ConfigError.
        """
        for keys, problem in self._problems():
            raise ConfigError(f"{self.origin(*keys)}: {problem}")

    def _problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        """The keys that each is about, and the sentence."""
        model, train = self.model, self.train
        if model.dim % model.heads:
            text = f"model.heads = {model.heads}: does not divide model.dim = {model.dim}; choose heads that divide it"
            yield ("model.heads", "model.dim"), text
        if not self.tiers.nvme:
            for kind in ("params", "frozen", "optimizer", "gradients", "activations"):
                wanted = getattr(self.placement, kind)
                if isinstance(wanted, dict) and "nvme" in wanted:
                    text = f'placement.{kind} names "nvme": set tiers.nvme to the folders for the tier files'
                    yield (f"placement.{kind}", "tiers.nvme"), text
        shares = self.tiers.nvme_shares
        if shares is not None and len(shares) != len(self.tiers.nvme):
            text = f"tiers.nvme_shares = {shares}: needs one number for each of the {len(self.tiers.nvme)} tiers.nvme"
            yield ("tiers.nvme_shares", "tiers.nvme"), text
        if train.micro_batch is not None and train.batch_size % train.micro_batch:
            yield (
                ("train.micro_batch", "train.batch_size"),
                f"train.micro_batch = {train.micro_batch}: does not divide train.batch_size = {train.batch_size}; "
                "choose one that does",
            )
        if self.checkpoint.every and self.checkpoint.dir is None:
            text = "checkpoint.every is set but checkpoint.dir is not: set checkpoint.dir to a folder"
            yield ("checkpoint.every",), text

        if self.log.timeline and self.log.dir is None:
            yield ("log.timeline",), "log.timeline is set but log.dir is not: set log.dir to a folder for the record"

        if self.checkpoint.durable:
            yield from self._durable_problems()

    def _durable_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        where = ("checkpoint.durable",)
        if self.checkpoint.dir is None:
            yield where, "checkpoint.durable is set but checkpoint.dir is not: set it to a folder, which names the run"
        for kind in ("params", "frozen", "optimizer"):
            if getattr(self.placement, kind) not in ("params", {"nvme": 1.0}):
                yield where, f'checkpoint.durable needs all of the state in tier files: set placement.{kind} = "nvme"'

    @model_validator(mode="after")
    def _overlap_fits(self) -> Self:
        if self.optimizer.overlap != "backward":
            return self
        if self.train.grad_clip > 0:
            raise ValueError(
                'optimizer.overlap = "backward": updates before the global norm is known, so it needs '
                f'train.grad_clip = 0 (it is {self.train.grad_clip:g}); set it, or use overlap = "forward"'
            )
        if self.train.precision == "fp16":
            raise ValueError(
                'optimizer.overlap = "backward": updates before an fp16 overflow is known; '
                'use train.precision = "bf16" or overlap = "forward"'
            )
        return self


def _assign(config: type[Config], given: dict[str, Any], where: tuple[str, ...], value: Any, said: str) -> None:
    """Sets ``where`` in ``given``; a deeper key (placement.params.host) goes into a table below it."""
    section = sections_of(config).get(where[0])
    if section is None or where[1] not in keys_of(section):
        unknown = where[:1] if section is None else where[:2]
        raise ConfigError(f"--set {said}: {'.'.join(unknown)}: unknown key; {nearest_key(unknown, config)}")
    if len(where) == 2 and _holds_paths(section, where[1]):
        value = _made_absolute(value)
    table = given
    for part in where[:-1]:
        below = table.get(part)
        table[part] = dict(below) if isinstance(below, Mapping) else {}
        table = table[part]
    table[where[-1]] = value


def _holds_paths(section: type[BaseModel], name: str) -> bool:
    field = next(field for known, field in section.model_fields.items() if (field.alias or known) == name)
    return any(isinstance(rule, Rule) and rule.paths for rule in field.metadata)


def _made_absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_made_absolute(item) for item in value]
    return str(absolute(value, Path.cwd())) if isinstance(value, str) and value.strip() and "\0" not in value else value


def _value(text: str, said: str) -> Any:
    """``text`` as a TOML value where it is one, as itself where not."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        if len(parsed) != 1:
            raise ConfigError(f"--set {said!r}: one assignment only; give --set once for each")
        value = parsed["value"]
    except tomllib.TOMLDecodeError:
        if text.strip()[:1] in ("[", "{"):
            raise ConfigError(f"--set {said}: not a TOML value; text inside of [] or {{}} needs quotes") from None
        return text.strip()
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text.strip()


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
