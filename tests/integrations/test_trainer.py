"""The Trainer of transformers over a sharded model: the losses, norms and evaluations of an unsharded one, and resuming
bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierzero as tz

from ..support.oracle import config
from ..support.rank_pool import RankPool
from .examples import example

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

OPTIONS: dict[str, Any] = {"disable_tqdm": True, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}


def dropping() -> Any:
    return example("small").llama(attention_dropout=0.1)


def trained(folder: Path, steps: int = 6, **more: Any) -> Any:
    module = example("trainer")
    module.llama = dropping
    folder.mkdir(exist_ok=True)
    return module.train(str(folder), steps, "fp32", **OPTIONS | {"save_strategy": "steps"} | more)


def unsharded(folder: Path, ranks: int) -> list[dict[str, float]]:
    """The log of a plain Trainer that sees the batches of all ranks."""
    small = example("small")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "plain"),
        max_steps=6,
        per_device_train_batch_size=4 * ranks,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        **{name: value for name, value in OPTIONS.items() if name != "save_steps"},
    )
    model = dropping() if ranks == 1 else small.llama()
    trainer = transformers.Trainer(model, arguments, train_dataset=small.Bytes(), eval_dataset=small.Bytes(count=16))
    trainer.train()
    log: list[dict[str, float]] = trainer.state.log_history
    return log


def assert_same_log(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for have, want in zip(found, wanted, strict=True):
        for key in ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "train_loss"):
            assert (key in have) == (key in want), (key, want)
            assert have.get(key, 0) == pytest.approx(want.get(key, 0), rel=1e-4), (key, want)


def test_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    first = trained(tmp_path, load_best_model_at_end=False)
    log, weights = list(first.state.log_history), tz.full_state_dict(first.model)
    assert_same_log(log, unsharded(tmp_path, ranks=1))
    first.save_model(str(tmp_path / "out"))
    assert first.evaluate()["eval_loss"] == pytest.approx(log[-2]["eval_loss"], rel=1e-6)
    tz.close(first.model)
    saved = type(first.model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    assert not list((tmp_path / "run" / "checkpoint-3").glob("*.safetensors"))  # once, in the checkpoint

    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    again = trained(tmp_path, resume=True)
    assert [row.get("loss") for row in again.state.log_history[:-1]] == [row.get("loss") for row in log[:-1]]
    assert all(torch.equal(weights[name], value) for name, value in tz.full_state_dict(again.model).items())
    tz.close(again.model)

    shutil.rmtree(tmp_path / "run" / "checkpoint-6" / "tierzero")
    with pytest.raises(tz.CheckpointError, match=r"checkpoint-6 has no folder 'tierzero'"):
        trained(tmp_path, resume=True)


@pytest.mark.long
def test_the_best_model_and_the_model_alone(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "save_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trained(tmp_path, 4, **best)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    reached = tz.full_state_dict(trainer.model)
    tz.load_checkpoint(trainer.model, None, tmp_path / "run" / "checkpoint-2" / "tierzero")
    assert all(torch.equal(reached[name], value) for name, value in tz.full_state_dict(trainer.model).items())
    tz.close(trainer.model)
    trainer = trained(tmp_path / "alone", 2, save_only_model=True, save_steps=2, activation_checkpointing=True)
    wanted = tz.full_state_dict(trainer.model)
    saved = type(trainer.model).from_pretrained(tmp_path / "alone" / "run" / "checkpoint-2").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in wanted.items())
    tz.close(trainer.model)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optim": "sgd"}, r"optim is \"sgd\""),
    "autocast": ({"bf16": True}, r"mixed_precision is 'bf16'.*train\.precision"),
    "compiled": ({"torch_compile": True}, r"torch_compile cannot.*train\.compile"),
    "other ranks": ({"fp16_full_eval": True}, r"fp16_full_eval cannot"),
    "best without state": ({"load_best_model_at_end": True, "save_only_model": True}, "leave out save_only_model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_had_are_refused(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    before = dict(os.environ)
    options = {"save_steps": 2, "eval_strategy": "steps"} | options
    try:
        with pytest.raises(tz.ConfigError, match=message):
            trained(tmp_path, **options)
    finally:
        os.environ.clear()  # what torch_compile=True and bf16=True set
        os.environ.update(before)


def test_a_model_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    from tierzero.integrations.transformers import TierZeroTrainer

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(tz.ConfigError, match=r"sharded with tierzero\.shard"):
        TierZeroTrainer(dropping(), arguments)


def test_clipping_beside_the_backward_is_refused(tmp_path: Path) -> None:
    from tierzero.integrations.transformers import TierZeroTrainer

    settings = config(tmp_path, optimizer={"overlap": "backward"}, train={"precision": "fp32", "grad_clip": 0})
    model = tz.shard(dropping(), settings)
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 2}
    with pytest.raises(tz.ConfigError, match=r"set max_grad_norm=0"):
        TierZeroTrainer(model, transformers.TrainingArguments(**arguments))
    unclipped = transformers.TrainingArguments(**arguments, max_grad_norm=0, logging_steps=1, save_strategy="no")
    trainer = TierZeroTrainer(model, unclipped, train_dataset=example("small").Bytes())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    assert "grad_norm" not in trainer.state.log_history[0]
    tz.close(model)


def as_rank(rank: int, size: int, folder: str) -> list[dict[str, float]]:
    module, path = example("trainer"), Path(folder)
    found = module.train(folder, 6, "fp32", **OPTIONS | {"save_strategy": "steps"})
    wanted = tz.full_state_dict(found.model)
    found.save_model(str(path / "out"))
    tz.close(found.model)
    dist.barrier()
    saved = type(found.model).from_pretrained(path / "out").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in wanted.items())
    if rank == 0:
        shutil.rmtree(path / "run" / "checkpoint-6")
    dist.barrier()
    again = module.train(folder, 6, "fp32", resume=True, **OPTIONS | {"save_strategy": "no"})
    assert all(torch.equal(wanted[name], value) for name, value in tz.full_state_dict(again.model).items())
    tz.close(again.model)
    log: list[dict[str, float]] = found.state.log_history
    return log


@pytest.mark.long
def test_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    logs = two_ranks.run(as_rank, str(tmp_path))
    assert_same_log(logs[0], unsharded(tmp_path, ranks=2))
