"""What is done with a model of the transformers library beside training: generating, recomputing, saving."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.hf_models import MODELS
from ..support.oracle import (
    TIERS,
    Case,
    assert_bits,
    assert_close,
    built,
    config,
    sharded,
    train_plain,
    train_plain_bf16,
    train_sharded,
)
from ..support.rank_pool import RankPool

pytest.importorskip("transformers")

WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 20},
    {"do_sample": False, "num_beams": 2},
)
GENERATING = [name for name, kind in MODELS.items() if kind.generates]


def generated(name: str, model: Any) -> list[torch.Tensor]:
    given = MODELS[name].batch(0, 0)
    given = {key: value for key, value in given.items() if key in ("input_ids", "input_features")}
    found = []
    for way in WAYS:
        torch.manual_seed(5)
        found.append(model.generate(**given, max_new_tokens=6, min_new_tokens=6, use_cache=True, **way))
    return found


def compare_generated(name: str, tier: str, nvme: Path) -> None:
    case = MODELS[name].case()
    wanted = generated(name, built(case).eval())
    with sharded(built(case), config(nvme, tier, sharding={"min_unit": 0})) as model:
        found = generated(name, model.eval())
    for have, want, way in zip(found, wanted, WAYS, strict=True):
        assert torch.equal(have, want), way


@pytest.mark.parametrize(("name", "tier"), [("llama", "host"), ("t5", "nvme")])
def test_generation(name: str, tier: str, tmp_path: Path) -> None:
    compare_generated(name, tier, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", GENERATING)
def test_every_models_generation(name: str, tier: str, tmp_path: Path) -> None:
    compare_generated(name, tier, tmp_path)


def generate_as_rank(rank: int, size: int, name: str, nvme: str) -> None:
    for tier in TIERS:
        compare_generated(name, tier, Path(nvme))


@pytest.mark.long
@pytest.mark.parametrize("name", GENERATING)
def test_generation_on_two_ranks(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    """An encoder is called by itself there, outside the model's forward."""
    two_ranks.run(generate_as_rank, name, str(tmp_path))


def checkpointed(name: str, reentrant: bool, clip: float | None = 1.0) -> Case:
    def build() -> nn.Module:
        model: Any = MODELS[name].build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model  # type: ignore[no-any-return]

    return replace(MODELS[name].case(steps=3, clip=clip), build=build)


def compare_checkpointed(name: str, reentrant: bool, tier: str, recompute: str, nvme: Path) -> None:
    """Against the unsharded model that does the same: reentrant checkpointing loses the graph of some side outputs
    (a router's logits), whoever runs it.
    """
    sections: dict[str, Any] = {"sharding": {"min_unit": 0}, "activations": {"recompute": recompute}}
    case = checkpointed(name, reentrant)
    assert_close(train_sharded(case, config(nvme, tier, **sections)), train_plain(case))
    case = checkpointed(name, reentrant, clip=None)
    settings = config(nvme, tier, train={"precision": "bf16"}, **sections)
    assert_bits(train_sharded(case, settings), train_plain_bf16(case))


@pytest.mark.parametrize(
    ("name", "reentrant", "tier", "recompute"),
    [("llama", False, "nvme", "none"), ("t5", True, "nvme", "unit")],
)
def test_gradient_checkpointing(name: str, reentrant: bool, tier: str, recompute: str, tmp_path: Path) -> None:
    compare_checkpointed(name, reentrant, tier, recompute, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "unit", "sqrt"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_models_gradient_checkpointing(
    name: str, reentrant: bool, tier: str, recompute: str, tmp_path: Path
) -> None:
    compare_checkpointed(name, reentrant, tier, recompute, tmp_path)


def saved_again(name: str, tmp_path: Path, **options: Any) -> None:
    with sharded(MODELS[name].build(), config(tmp_path)) as model:
        wanted = tz.full_state_dict(model)
        model.save_pretrained(tmp_path / "saved", **options)
    loaded, notes = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, values in loaded.state_dict().items():
        assert torch.equal(values, wanted[key]), key


@pytest.mark.parametrize("name", ["mixtral"])
def test_save_pretrained_writes_true_weights(name: str, tmp_path: Path) -> None:
    saved_again(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_models_save_pretrained(name: str, tmp_path: Path) -> None:
    saved_again(name, tmp_path, max_shard_size="20KB")


def save_as_rank(rank: int, size: int, name: str, folder: str) -> None:
    model: Any = built(MODELS[name].case())
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    with sharded(model, config(Path(folder))):
        with pytest.raises(tz.NotResidentError, match=r"sharded over 2 ranks.*tierzero\.full_state_dict\(model\)"):
            model.save_pretrained(f"{folder}/refused{rank}")
        assert list(Path(folder).glob("refused*/*.safetensors")) == []
        state = tz.full_state_dict(model)
        model.save_pretrained(f"{folder}/saved", state_dict=state, is_main_process=rank == 0)
    torch.distributed.barrier()
    loaded = type(model).from_pretrained(f"{folder}/saved")
    assert all(torch.equal(values, plain[key]) for key, values in loaded.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_save_pretrained_on_two_ranks(name: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(save_as_rank, name, str(tmp_path))


def test_what_would_take_a_sharded_model_apart_is_refused(tmp_path: Path) -> None:
    with sharded(MODELS["gpt2"].build(), config(tmp_path)) as model:
        for attempt in (
            lambda: model.resize_token_embeddings(70),
            lambda: model.transformer.resize_token_embeddings(70),
            model.half,
            lambda: model.to(torch.float16),
            lambda: model.to("cpu"),
            lambda: model.load_state_dict({}),
        ):
            with pytest.raises(tz.ConfigError, match=r"sharded model.*before tierzero\.shard") as refused:
                attempt()
            assert "\n" not in str(refused.value)
        assert torch.isfinite(MODELS["gpt2"].loss(model, 0, 0))


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From random values; then from the folder that it wrote itself, which starts where the first run ended."""
    script, folder = Path(__file__).parents[2] / "tools" / "examples" / "hf_finetune.py", tmp_path / "first" / "model"
    losses = []
    for out, more in (("first", ["--steps", "10"]), ("second", ["--steps", "1", "--model", str(folder)])):
        torch.manual_seed(0)
        arguments = ["--nvme", str(tmp_path), "--out", str(tmp_path / out), *more]
        monkeypatch.setattr("sys.argv", [str(script), *arguments])
        if out == "second":
            write_byte_tokenizer(folder)
        runpy.run_path(str(script), run_name="__main__")
        losses.append([float(line.split()[3]) for line in capsys.readouterr().out.splitlines()])
    first, second = losses
    assert first[0] > 5
    assert first[-1] < first[0] - 1
    assert abs(second[0] - first[-1]) < 0.5
    assert sorted(path.name for path in (tmp_path / "second" / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def write_byte_tokenizer(folder: Path) -> None:
    """Tokens are bytes, as in the example's own model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = bytes_as_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def bytes_as_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
