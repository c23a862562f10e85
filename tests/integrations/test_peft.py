"""LoRA over a sharded base: the losses and adapters of an unsharded run, a base that is only read, PEFT's own files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import assert_at_rest, config
from ..support.rank_pool import RankPool
from .examples import example

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

PLACEMENT = {"params": "device", "frozen": "nvme", "optimizer": "device", "gradients": "device"}


def settings(nvme: Path) -> tz.Config:
    return config(nvme, placement=PLACEMENT)


def adapted(recompute: str = "none", base: nn.Module | None = None) -> Any:
    """LoRA with dropout, in training mode, its blocks recomputed in one of PyTorch's ways or not."""
    base = base if base is not None else example("small").llama(use_cache=False)
    torch.manual_seed(1)
    chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(base, chosen).train()
    if recompute != "none":
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    if recompute == "reentrant":
        model.enable_input_require_grads()
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, steps: range, part: slice) -> list[float]:
    """``part``: of the eight rows of each step, this rank's."""
    rows, losses = example("small").Bytes().rows, []
    for step in steps:
        torch.manual_seed(step)
        batch = rows[8 * step : 8 * step + 8][part]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_sharded(model: nn.Module, steps: range, part: slice = slice(None)) -> list[float]:
    optimizer = tz.AdamW(trained(model), lr=1e-2)
    return take_steps(model, optimizer, lambda _, most: tz.clip_grad_norm_(model, most), steps, part)


def run_plain(model: nn.Module, steps: range) -> list[float]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    return take_steps(model, optimizer, torch.nn.utils.clip_grad_norm_, steps, slice(None))


def of_adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


@pytest.mark.parametrize(
    "recompute",
    ["non-reentrant", pytest.param("none", marks=pytest.mark.long), pytest.param("reentrant", marks=pytest.mark.long)],
)
def test_trains_as_unsharded_and_only_reads_the_base(recompute: str, tmp_path: Path) -> None:
    plain = adapted(recompute)
    wanted = run_plain(plain, range(4))
    model = tz.shard(adapted(recompute), settings(tmp_path))
    assert run_sharded(model, range(4)) == pytest.approx(wanted, rel=1e-6)
    for name, value in of_adapters(plain).items():
        torch.testing.assert_close(tz.read_state(model.get_parameter(name), "weight"), value, rtol=1e-4, atol=1e-6)
    found = tz.stats(model)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert found["nvme_write_bytes"] == 0
    assert found["nvme_read_bytes"] >= 4 * frozen
    assert found["placement"]["params"]["nvme"] >= 4 * frozen
    assert sum(sum(found["placement"][kind].values()) for kind in ("optimizer", "gradients")) < 4 * frozen // 4
    assert_at_rest(model)
    tz.close(model)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    found = tz.shard(adapted(), settings(tmp_path))
    run_sharded(found, range(2))
    yield found
    tz.close(found)


def test_adapters_go_to_pefts_files_and_back(model: Any, tmp_path: Path) -> None:
    from tierzero.integrations.peft import adapter_state, load_adapter, save_adapters

    folder, wanted = tmp_path / "adapters", of_adapters(model)
    assert len(wanted) == 8
    assert all(bool(value.any()) for value in wanted.values())
    assert adapter_state(model).keys() == wanted.keys()
    for save in (save_adapters, lambda m, path: m.save_pretrained(path)):
        save(model, folder)
        before = peft.PeftModel.from_pretrained(example("small").llama(), folder, is_trainable=True)
        other = tz.shard(before, settings(tmp_path))
        assert all(torch.equal(value, wanted[name]) for name, value in of_adapters(other).items())
        tz.close(other)
    after = tz.shard(adapted(), settings(tmp_path))
    load_adapter(after, folder)
    assert all(torch.equal(value, wanted[name]) for name, value in of_adapters(after).items())
    with pytest.raises(tz.ConfigError, match="no adapter 'second', only 'default'"):
        load_adapter(after, folder, "second")
    tz.close(after)
    for take in (
        lambda: model.load_adapter(folder, "default"),
        lambda: peft.set_peft_model_state_dict(model, peft.get_peft_model_state_dict(model)),
    ):
        with pytest.raises(tz.ConfigError, match="load_state_dict on a sharded model"):
            take()


def test_adapters_added_or_thawed_later_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(tz.ConfigError, match=r"was added to a ModuleDict.*before tierzero\.shard"):
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    run_sharded(model, range(1))
    two = adapted()
    two.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tz.shard(two, settings(tmp_path))
    with pytest.raises(tz.ConfigError, match=r"second.*frozen when the model was sharded"):
        two.set_adapter("second")
    tz.close(two)


def test_the_base_alone_and_merged(model: Any) -> None:
    small = example("small")
    rows, base = small.Bytes().rows[:2], small.llama().eval()
    with torch.no_grad():
        adapted_logits = model.eval()(input_ids=rows).logits
        with model.disable_adapter():
            assert torch.equal(model(input_ids=rows).logits, base(input_ids=rows).logits)
        assert torch.equal(model(input_ids=rows).logits, adapted_logits)
    with pytest.raises(tz.NotResidentError, match=r"tierzero\.gathered"):
        model.merge_and_unload()
    for layer in model.modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            with tz.gathered(layer.parameters()):
                layer.merge()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=rows).logits, adapted_logits, rtol=1e-4, atol=1e-4)
        assert not torch.equal(adapted_logits, base(input_ids=rows).logits)


def test_resuming_and_other_frozen_parts(model: Any, tmp_path: Path) -> None:
    def go_on(sharded: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        return take_steps(sharded, optimizer, lambda _, most: tz.clip_grad_norm_(sharded, most), steps, slice(None))

    optimizer = tz.AdamW(trained(model), lr=1e-2)
    go_on(model, optimizer, range(2))
    tz.save_checkpoint(model, optimizer, tmp_path / "saved")
    wanted = go_on(model, optimizer, range(2, 5))
    again = tz.shard(adapted(), settings(tmp_path))
    optimizer = tz.AdamW(trained(again), lr=1)
    tz.load_checkpoint(again, optimizer, tmp_path / "saved")
    assert go_on(again, optimizer, range(2, 5)) == wanted
    assert all(torch.equal(value, of_adapters(model)[name]) for name, value in of_adapters(again).items())
    tz.close(again)

    fewer = adapted()
    fewer.base_model.model.model.layers[0].requires_grad_(False)
    tz.shard(fewer, settings(tmp_path))
    with pytest.raises(tz.CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.lora_A.*one of them only"):
        tz.load_checkpoint(fewer, tz.AdamW(trained(fewer), lr=1e-2), tmp_path / "saved")
    tz.load_checkpoint(fewer, None, tmp_path / "saved")
    tz.close(fewer)
    more = adapted()
    more.base_model.model.lm_head.requires_grad_(True)
    tz.shard(more, settings(tmp_path))
    with pytest.raises(tz.CheckpointError, match=r"lm_head\.weight' was frozen when it was saved"):
        tz.load_checkpoint(more, None, tmp_path / "saved")
    tz.close(more)


def test_a_base_from_a_folder(tmp_path: Path) -> None:
    from tierzero.integrations.peft import init_base

    small = example("small")
    small.llama().save_pretrained(tmp_path / "base")
    with tz.empty_init():
        base = small.llama(use_cache=False)
    model = adapted(base=base)
    tz.shard(model, settings(tmp_path), init=init_base(model, tmp_path / "base"))
    rows = small.Bytes().rows[:2]
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=rows).logits, small.llama().eval()(input_ids=rows).logits)
    before = copy.deepcopy(of_adapters(model))
    run_sharded(model.train(), range(2))
    assert all(not torch.equal(value, before[name]) for name, value in of_adapters(model).items())
    tz.close(model)


def as_rank(rank: int, size: int, recompute: str, folder: str) -> list[float]:
    from tierzero.integrations.peft import load_adapter, save_adapters

    nvme = Path(folder)
    model = tz.shard(_without_dropout(adapted(recompute)), settings(nvme))
    losses = run_sharded(model, range(4), slice(4 * rank, 4 * rank + 4))
    assert tz.stats(model)["nvme_write_bytes"] == 0
    with pytest.raises(tz.NotResidentError, match=r"tierzero\.full_state_dict"):
        model.save_pretrained(nvme / "refused", is_main_process=rank == 0)
    save_adapters(model, nvme / "adapters")
    model.save_pretrained(nvme / "own", state_dict=tz.full_state_dict(model), is_main_process=rank == 0)
    wanted = tz.read_state(trained(model), "weight")
    tz.close(model)
    other = tz.shard(adapted(), settings(nvme))
    load_adapter(other, nvme / "adapters")
    assert all(torch.equal(a, b) for a, b in zip(tz.read_state(trained(other), "weight"), wanted, strict=True))
    tz.close(other)
    return losses


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "reentrant", "non-reentrant"])
def test_two_ranks(recompute: str, tmp_path: Path, two_ranks: RankPool) -> None:
    from safetensors.torch import load_file

    plain = _without_dropout(adapted(recompute))
    wanted = run_plain(plain, range(4))
    losses = two_ranks.run(as_rank, recompute, str(tmp_path))
    assert [sum(both) / 2 for both in zip(*losses, strict=True)] == pytest.approx(wanted, rel=1e-5)
    state = {name.replace(".default", ""): value for name, value in of_adapters(plain).items()}
    for folder in ("adapters", "own"):
        saved = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert saved.keys() == state.keys()
        for name, value in saved.items():
            torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-5)


def test_the_example_trains(tmp_path: Path) -> None:
    losses = example("lora").train(str(tmp_path), 8, "fp32")
    assert losses[-1] < losses[0] - 0.1
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
