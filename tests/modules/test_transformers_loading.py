"""Models of the transformers library that are built empty: filled by their own rules or from a folder of theirs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.hf_models import MODELS
from ..support.oracle import built, config, sharded

pytest.importorskip("transformers")

EMPTY: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "empty_init": tz.empty_init,
    "meta": lambda: torch.device("meta"),
}


def empty(name: str, how: str = "empty_init") -> Any:
    with EMPTY[how]():
        return MODELS[name].empty()


def source(name: str, folder: Path, *, parts: bool = False, base: bool = False) -> Any:
    """A model with values and the folder that the library saves of it: in one file or several, or of the base model."""
    model: Any = built(MODELS[name].case())
    saved = model.base_model if base else model
    saved.save_pretrained(folder, **({"max_shard_size": "20KB"} if parts else {}))
    assert (len(list(folder.glob("*.safetensors"))) > 1) == parts
    return model


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Parameters, and all buffers, also those that no folder holds, to the last bit."""
    state = tz.full_state_dict(model)
    for name, values in plain.state_dict().items():
        assert torch.equal(state[name], values), name
    buffers = dict(model.named_buffers())
    for name, values in plain.named_buffers():
        assert torch.equal(buffers[name], values), name


def from_folder(name: str, parts: bool, tmp_path: Path) -> None:
    plain = source(name, tmp_path / "saved", parts=parts)
    settings = config(tmp_path, sharding={"min_unit": 0})
    with sharded(empty(name), settings, init=tmp_path / "saved") as model:
        assert_same(model, plain)
        batch = MODELS[name].batch(0, 0)
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.parametrize(("name", "parts"), [("gpt2", False), ("t5", True), ("mixtral", True), ("vit", False)])
def test_folder(name: str, parts: bool, tmp_path: Path) -> None:
    """Tied weights are there once, experts one by one, layers under older names."""
    from_folder(name, parts, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_folder(name: str, parts: bool, tmp_path: Path) -> None:
    from_folder(name, parts, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_folder_of_the_base_model(name: str, tmp_path: Path) -> None:
    """Whose names lack the prefix; the tied head is the embedding."""
    plain = source(name, tmp_path / "saved", base=True)
    with sharded(empty(name), config(tmp_path), init=tmp_path / "saved") as model:
        assert_same(model, plain)


@pytest.mark.parametrize("name", ["llama"])
def test_base_model_from_a_folder_of_the_whole(name: str, tmp_path: Path) -> None:
    plain = source(name, tmp_path / "saved").base_model
    with tz.empty_init():
        base = type(plain)(plain.config)
    with sharded(base, config(tmp_path), init=tmp_path / "saved") as model:
        assert_same(model, plain)


def test_folder_without_the_head_is_refused(tmp_path: Path) -> None:
    source("llama", tmp_path / "saved", base=True)
    with pytest.raises(tz.ConfigError, match=r"no tensor 'lm_head\.weight'; it must hold every parameter"):
        tz.shard(empty("llama"), config(tmp_path), init=tmp_path / "saved")


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_weights_into_a_sharded_model(name: str, tmp_path: Path) -> None:
    """Piece by piece, so what would have to be converted as a whole is refused."""
    plain = source(name, tmp_path / "saved", base=name == "gpt2")
    with sharded(MODELS[name].build(), config(tmp_path)) as model:
        if name == "gpt2":
            tz.load_safetensors(model, tmp_path / "saved")
            assert_same(model, plain)
            return
        with pytest.raises(
            tz.ConfigError, match=r"load_safetensors: .*experts.* in another form.*init to tierzero\.shard"
        ):
            tz.load_safetensors(model, tmp_path / "saved")


def own_init(name: str, how: str, tmp_path: Path) -> None:
    """In units of single layers, so that the library's rules for whole models have to reach into other units."""
    torch.manual_seed(1)
    plain: Any = MODELS[name].empty()
    model = empty(name, how)
    embeddings = () if name == "vit" else (nn.Embedding,)
    units = (nn.Linear, *embeddings, *MODELS[name].blocks)
    with sharded(model, config(tmp_path), units, init=model._init_weights):
        state = tz.full_state_dict(model)
        for key, parameter in plain.named_parameters():
            if not parameter.requires_grad or parameter.std() < 1e-6:  # a table, ones or zeros
                assert torch.equal(state[key], parameter), key
            else:
                assert 0.5 < state[key].std() / parameter.std() < 2, key
        buffers = dict(model.named_buffers())
        assert all(torch.equal(buffers[key], buffer) for key, buffer in plain.named_buffers())
        assert torch.isfinite(MODELS[name].loss(model, 0, 0))


@pytest.mark.parametrize(("name", "how"), [("t5", "empty_init"), ("whisper", "meta"), ("bert", "meta")])
def test_own_rules(name: str, how: str, tmp_path: Path) -> None:
    own_init(name, how, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("how", EMPTY)
@pytest.mark.parametrize("name", MODELS)
def test_every_models_own_rules(name: str, how: str, tmp_path: Path) -> None:
    own_init(name, how, tmp_path)


def test_layers_without_reset_parameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(tz.ConfigError, match=r"LlamaRMSNorm.*'weight'.*reset_parameters.*init=model._init_weights"):
        tz.shard(empty("llama"), config(tmp_path))


def test_tables_on_the_meta_device_are_refused_with_a_folder(tmp_path: Path) -> None:
    source("llama", tmp_path / "saved")
    with pytest.raises(tz.ConfigError, match=r"rotary_emb\.inv_freq' has no values.*tierzero\.empty_init"):
        tz.shard(empty("llama", "meta"), config(tmp_path), init=tmp_path / "saved")
