from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.config import Config, parse_size
from tierzero.config.reference import reference
from tierzero.errors import ConfigError

FORMS: dict[str, dict[str, Any]] = {
    "model": {"kind": "gpt", "dim": 64, "layers": 2, "heads": 2, "vocab": 256, "tied": True, "dropout": 0.1},
    "data": {"path": ["a.txt", "b/*.txt"], "validation": "c.txt", "dtype": "uint16"},
    "train": {
        "steps": 2,
        "batch_size": 4,
        "micro_batch": 2,
        "seq_len": 32,
        "precision": "fp16",
        "grad_dtype": "fp32",
        "grad_clip": 0,
        "seed": 1,
        "compile": True,
        "threads": "auto",
    },
    "tiers": {"device": "1GB", "host": "512MiB", "nvme": ["x"], "nvme_limit": 1e9, "tile": 8192, "prefetch": 0},
    "placement": {
        "params": "nvme",
        "optimizer": {"host": 0.5, "nvme": 0.5},
        "gradients": "host",
        "activations": "device",
    },
    "sharding": {"stage": 0, "units": ["Block"], "reshard_after_forward": False},
    "optimizer": {
        "name": "adam",
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup": 3,
        "min_lr_ratio": 0,
        "overlap": "none",
        "state_dtype": "fp32",
    },
    "activations": {"recompute": "unit"},
    "io": {"block_size": "8MiB", "queue_depth": 8, "direct": True, "verify": False},
    "checkpoint": {"dir": "x", "every": 10, "keep": 2, "async": False, "durable": False},
    "log": {"metrics": "m.jsonl", "dir": "runs/a", "timeline": True, "every": 1},
}


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in FORMS.items() for k in keys])
def test_every_form_is_accepted_alone(section: str, key: str) -> None:
    Config.from_dict({section: {key: FORMS[section][key]}})


def test_values_and_types_after_validation() -> None:
    config = Config.from_dict(FORMS)
    config.check()
    assert config.tiers.host == 512 * 2**20
    assert config.tiers.nvme_limit == 10**9
    assert isinstance(config.tiers.nvme_limit, int)
    assert config.tiers.nvme == [Path.cwd() / "x"]
    assert config.train.threads is None
    assert config.placement.params == {"nvme": 1.0}
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.checkpoint.async_ is False
    assert config.io.block_size == 8 * 2**20
    assert config.data.path == [str(Path.cwd() / "a.txt"), str(Path.cwd() / "b/*.txt")]
    assert config.source == "config"


def test_defaults_are_complete() -> None:
    config = Config.from_dict({})
    config.check()
    assert (config.train.precision, config.sharding.stage, config.optimizer.overlap) == ("bf16", 3, "auto")


def test_to_dict_makes_the_same_configuration() -> None:
    config = Config.from_dict(FORMS)
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict({}) != config


BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"train": {"stepz": 1}}, ("train.stepz", "unknown", "train.steps")),
    ({"steps": 3}, ("steps", "train.steps")),
    ({"train": {"dim": 3}}, ("train.dim", "model.dim")),
    ({"trian": {}}, ("trian", "[train]")),
    ({"nonsense": 1}, ("nonsense", "sections", "placement")),
    ({"train": 5}, ("train = 5", "table")),
    ({"train": {"steps": True}}, ("train.steps = true", "whole number")),
    ({"train": {"steps": 1.5}}, ("train.steps = 1.5", "whole number")),
    ({"train": {"steps": "8"}}, ('train.steps = "8"', "whole number")),
    ({"train": {"batch_size": 0}}, ("train.batch_size = 0", "from 1")),
    ({"train": {"precision": "fp8"}}, ("train.precision", '"bf16"')),
    ({"train": {"compile": 1}}, ("train.compile = 1", "true or false")),
    ({"train": {"grad_clip": math.nan}}, ("train.grad_clip", "number from 0")),
    ({"optimizer": {"lr": math.inf}}, ("optimizer.lr", "number from 0")),
    ({"optimizer": {"lr": -1}}, ("optimizer.lr = -1", "number from 0")),
    ({"optimizer": {"betas": [0.9, 1]}}, ("optimizer.betas", "below 1")),
    ({"optimizer": {"eps": 0}}, ("optimizer.eps", "above 0")),
    ({"optimizer": {"state_dtype": "fp8"}}, ("optimizer.state_dtype", '"int8"')),
    ({"optimizer": {"overlap": "backward"}}, ("optimizer.overlap", "grad_clip = 0")),
    ({"optimizer": {"overlap": "backward"}, "train": {"grad_clip": 0, "precision": "fp16"}}, ("overlap", "fp16")),
    ({"tiers": {"host": "16G"}}, ('tiers.host = "16G"', '"16GB"')),
    ({"tiers": {"host": -1}}, ("tiers.host = -1", "size")),
    ({"tiers": {"host": math.nan}}, ("tiers.host = NaN", "size")),
    ({"tiers": {"host": 10**30}}, ("tiers.host", "size")),
    ({"tiers": {"nvme": ["a", "./a"]}}, ("tiers.nvme", "twice")),
    ({"tiers": {"nvme": [3]}}, ("tiers.nvme", "path")),
    ({"placement": {"params": {"host": 0.3, "nvme": 0.3}}}, ("placement.params", "sums to 0.6")),
    ({"placement": {"params": {"host": 1.5, "nvme": -0.5}}}, ("placement.params", "sums to 1")),
    ({"placement": {"params": "disk"}}, ("placement.params", '"nvme"')),
    ({"placement": {"activations": "host"}}, ("placement.activations", "not available")),
    ({"tiers": {"nvme": ["/tmp", "/tmp/../tmp"]}}, ("tiers.nvme", "same path twice")),
    ({"sharding": {"reshard_after_forward": "yes"}}, ("reshard_after_forward", "true or false or a list")),
    ({"sharding": {"stage": 4}}, ("sharding.stage = 4", "0 or 1 or 2 or 3")),
    ({"sharding": {"units": []}}, ("sharding.units", "list of class names")),
    ({"activations": {"recompute": "root"}}, ("activations.recompute", '"sqrt" or a whole number from 1')),
    ({"activations": {"recompute": 0}}, ("activations.recompute", '"sqrt" or a whole number from 1')),
    ({"activations": {"recompute": True}}, ("activations.recompute", '"sqrt" or a whole number from 1')),
    ({"io": {"block_size": 5000}}, ("io.block_size = 5000", "multiple of 4096")),
    ({"checkpoint": {"async_": False}}, ("checkpoint.async_", "checkpoint.async")),
    ({"model": {"dim": 64, "heads": 3}}, ("model.heads = 3", "model.dim = 64")),
    ({"train": {"steps": -1, "seq_len": 0}}, ("train.steps = -1", "(wrong as well: train.seq_len)")),
]


@pytest.mark.parametrize(("values", "parts"), BAD)
def test_a_mistake_is_one_line_that_says_what_and_where(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(values)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("config: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"placement": {"optimizer": "nvme"}}, "tiers.nvme"),
        ({"train": {"micro_batch": 3}}, "train.micro_batch = 3"),
        ({"model": {"heads": 7}}, "model.heads = 7"),
        ({"checkpoint": {"every": 5}}, "checkpoint.dir"),
        ({"log": {"timeline": True}}, "set log.dir to a folder"),
    ],
)
def test_rules_that_need_the_finished_configuration(values: dict[str, Any], part: str) -> None:
    config = Config.from_dict(values)
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        config.check()


def test_heads_follow_dim_when_left_out() -> None:
    assert Config.from_dict({"model": {"dim": 512}}).model.heads == 8
    assert Config.from_dict({"model": {"dim": 96}}).model.heads == 1
    assert Config.from_dict({}).override(["model.dim=128"]).model.heads == 2


def test_load_resolves_paths_against_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "run.toml"
    file.parent.mkdir()
    file.write_text('[tiers]\nnvme = ["../nvme"]\n[checkpoint]\ndir = "/abs"\n[data]\npath = "*.txt"\n')
    config = Config.load(file)
    assert config.tiers.nvme == [tmp_path / "nvme"]
    assert config.checkpoint.dir == Path("/abs")
    assert config.data.path == [str(file.parent / "*.txt")]
    assert config.source == str(file)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"[train\n", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"a = 1\na = 2\n", "not valid TOML")],
)
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=part) as caught:
        Config.load(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Config.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.load(tmp_path)


def test_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.from_dict({"train": {"steps": 5, "seed": 7}}).override(
        [
            "train.steps=9",
            "tiers.host=512MiB",
            "tiers.nvme=drive",
            "optimizer.name=adam",
            "optimizer.betas=[0.8, 0.9]",
            "placement.params.host=0.25",
            "placement.params.nvme=0.75",
            "io.direct=false",
            "train.grad_clip = 0.5",
        ]
    )
    assert (config.train.steps, config.train.seed, config.train.grad_clip) == (9, 7, 0.5)
    assert config.tiers.host == 2**29
    assert config.tiers.nvme == [tmp_path / "drive"]
    assert config.optimizer.name == "adam"
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.placement.params == {"host": 0.25, "nvme": 0.75}
    assert config.io.direct is False


def test_override_paths_belong_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "configs" / "run.toml"
    file.parent.mkdir()
    file.write_text('[tiers]\nnvme = ["here"]\n')
    monkeypatch.chdir(tmp_path)
    config = Config.load(file)
    assert config.override(["log.metrics=m.jsonl"]).log.metrics == tmp_path / "m.jsonl"
    assert config.override(["train.steps=1"]).tiers.nvme == [file.parent / "here"]


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("train.stpes=3", "train.steps"),
        ("steps=3", "section.key=value"),
        ("train.steps", "section.key=value"),
        ("a.b=1", "sections"),
        ("train.steps=[1", "not a TOML value"),
        ("tiers.nvme=", "path"),
    ],
)
def test_a_bad_override(assignment: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({}).override([assignment])
    assert part in str(caught.value)


def test_a_configuration_cannot_be_changed() -> None:
    config = Config.from_dict({})
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


@given(st.integers(0, 2**50), st.sampled_from([("", 1), ("B", 1), ("kB", 10**3), ("GB", 10**9), ("MiB", 2**20)]))
def test_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


def test_fractional_sizes() -> None:
    assert parse_size("1.5GB") == 1_500_000_000
    assert parse_size(" 0.5 KiB ") == 512
    assert parse_size("0.3B") == 0
    for text in ("", "GB", "1,5GB", "-1GB", "1e9", "16G", "0x10", "1.GB", "inf", "\u0661GB"):
        assert parse_size(text) is None, text


@given(st.dictionaries(st.sampled_from(["device", "host", "nvme"]), st.integers(1, 100), min_size=1))
def test_a_split_keeps_its_proportions(parts: dict[str, int]) -> None:
    total = sum(parts.values())
    given_split = {tier: part / total for tier, part in parts.items()}
    split = Config.from_dict({"placement": {"optimizer": given_split}}).placement.optimizer
    assert isinstance(split, dict)
    assert math.isclose(math.fsum(split.values()), 1, abs_tol=1e-12)
    assert split == pytest.approx(given_split)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference()


def test_every_key_has_a_description() -> None:
    for line in reference().splitlines():
        if line.startswith("| `"):
            assert len(line.replace("\\|", "").split("|")[4].strip()) > 10, line


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.steps=many", r"^--set train\.steps=many: train\.steps = \"many\": must be a whole number"),
        ("placement.params.host=2", r"^--set placement\.params\.host=2: placement\.params = .*must be .auto."),
        ("train.steps=4\ntrain.seed=3", "one assignment only"),
        ("train.micro_batch=3", r"^--set train\.micro_batch=3: train\.micro_batch = 3: does not divide"),
        ("optimizer.overlap=backward", r"^--set optimizer\.overlap=backward: optimizer\.overlap = "),
        ("sharding.units=[Block]", r"^--set sharding\.units=\[Block\]: not a TOML value; .*quotes"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path, assignment: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=message):
        Config.load(file).override(["train.seed=2", assignment]).check()
