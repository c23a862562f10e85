"""The bundled trainer: a GPT on text, from a configuration to a trained model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tierzero as tz

from .checkpoint.sealed import discard_sealed, sealed_folder, sealed_step
from .config import Config
from .data import DataSplit, open_data
from .errors import CheckpointError, ConfigError
from .models import GPT, bundled_model
from .records import Recording, record
from .records.files import check_folder
from .training import checkpoints, ranks
from .training.memory import peak_rss_bytes
from .training.metrics import Measured, MetricsFile, Record, check_writable, combine
from .training.progress import Progress, Silent, open_progress
from .training.ranks import Ranks
from .training.schedule import scheduler_at
from .training.stopping import Stopped, StopSignals
from .training.summary import Totals, shown_text, summarise

_SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Job:
    """A run whose input was checked: nothing has been allocated yet."""

    config: Config
    ranks: Ranks
    data: DataSplit
    micro_batch: int
    micro_steps: int
    resume: Path | None
    go_on: bool
    """``--resume auto``: a sealed step counts as much as a checkpoint."""

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.config.train.batch_size * self.config.train.seq_len


def prepare(config: Config, resume: str | None = None) -> Job:
    """Checks everything a user can get wrong that does not need the model. Raises ConfigError."""
    config.check()
    own = Ranks.from_environment()
    micro_batch, micro_steps = ranks.micro_batches(config, own)
    data = open_data(config)
    if own.first and config.log.metrics is not None:
        check_writable(config.log.metrics)
    if config.log.dir is not None:
        check_folder(config.log.dir)
    if own.first:
        checkpoints.check_directory(config)
    found = checkpoints.to_resume(config, resume)
    return Job(config, own, data, micro_batch, micro_steps, found, resume == "auto")


def train(job: Job) -> float | None:
    """Runs a prepared job and reports on standard output.

    Returns the validation loss, or None where ``train.validation_batches`` is 0. Raises ConfigError for what only shows
    with the model (budgets, tier folders), and Stopped on SIGINT or SIGTERM, after cleaning up.
    """
    # The signals keep their default effect until here: waiting for other ranks cannot be interrupted otherwise.
    device = ranks.join(job.ranks)
    ranks.set_threads(job.config, job.ranks)
    with StopSignals(quiet=not job.ranks.first) as stop:
        model: GPT | None = None
        try:
            with stop.at_once():
                model = _build(job.config)
                run = Run(job, model, device, stop)
            validation = run.whole()
        except Stopped:
            if job.ranks.first:
                print(f"tierzero: {checkpoints.left_behind(job.config)}", file=sys.stderr, flush=True)
            raise
        except Exception:
            # Another rank that stopped closes its connections: what that breaks here is the stop, not a failure.
            stop.check()
            raise
        finally:
            stop.closing()
            if model is not None:
                tz.close(model)
        # Only after success: leaving waits for the other ranks, and a failed one must end at once to end them.
        ranks.leave()
    return validation


def _build(config: Config) -> GPT:
    torch.manual_seed(config.train.seed)
    # On the meta device from the start: a weight larger than the address space that is free is for the plan to refuse.
    with torch.device("meta"), tz.empty_init():
        model = bundled_model(config)
    sharded: GPT = tz.shard(model, config)
    return sharded


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay acts on matrices; norms are left alone."""
    section = config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    kind = tz.AdamW if section.name == "adamw" else tz.Adam
    optimizer: torch.optim.Optimizer = kind(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
    )
    return optimizer


class Run:
    """A sharded model on its way through the steps of a job."""

    def __init__(self, job: Job, model: GPT, device: torch.device, stop: StopSignals) -> None:
        self.job, self.config, self.model, self.device, self.stop = job, job.config, model, device, stop
        self.optimizer = _optimizer(self.config, model)
        self.scaler = tz.LossScaler(model) if self.config.train.precision == "fp16" else None
        self.source = ""
        """What it goes on from."""
        self.start = self._resume()
        self.scheduler = scheduler_at(
            self.optimizer, self.config.optimizer, self.config.train.steps, min(self.start, self.config.train.steps)
        )
        self.totals = Totals()
        self._averages: float | None = None
        """The last validation loss of the averages of the weights."""
        self._checkpointed: int | None = None
        """The step of a checkpoint that was begun."""

    def _resume(self) -> int:
        """The step to go on from. Rank 0 decides which checkpoint, so that all take the same."""
        resume = self.job.resume
        folder = ranks.from_first(str(resume) if resume else None, self.device)
        sealed = sealed_step(self.model)
        if sealed is not None and folder is None and not self.job.go_on:
            raise ConfigError(
                f"checkpoint.durable: step {sealed} of an earlier run is sealed in {sealed_folder(self.model)}; "
                "--resume auto goes on from it, or remove that folder to start afresh"
            )
        if sealed is not None and self.job.go_on and (folder is None or checkpoints.step_of(Path(folder)) <= sealed):
            self._take_extra(tz.resume(self.model, self.optimizer))
            self.source = f"the step sealed in {sealed_folder(self.model)}"
            return sealed
        if folder is None:
            if self.job.go_on and self.config.checkpoint.durable:
                self._note("--resume auto: no sealed step and no checkpoint, starting afresh")
            return 0
        if sealed is not None:
            self._note(f"step {sealed}, sealed in the tier files, is given up for {folder}")
        self.source = folder
        try:
            extra: dict[str, Any] = tz.load_checkpoint(self.model, self.optimizer, folder)
        except CheckpointError as error:
            older = checkpoints.before(Path(folder))
            advice = f"; the one before it is --resume {older}" if older is not None else ""
            raise ConfigError(f"--resume: {error}{advice}") from error
        if not isinstance(extra.get("step"), int):
            raise ConfigError(f"--resume: {folder} does not say at which step it was written; give one of this command")
        self._take_extra(extra)
        return int(extra["step"])

    def _note(self, text: str) -> None:
        if self.job.ranks.first:
            print(f"note     {text}", flush=True)

    def _take_extra(self, extra: dict[str, Any]) -> None:
        if self.scaler is not None and "scaler" in extra:
            self.scaler.load_state_dict(extra["scaler"])

    def _extra(self, step: int) -> dict[str, Any]:
        """What is saved with the state after ``step`` steps."""
        extra: dict[str, Any] = {"step": step, "config": self.config.to_dict()}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        return extra

    def whole(self) -> float | None:
        """All steps, then validation, sample and summary. Returns the validation loss."""
        train, first = self.config.train, self.job.ranks.first
        path = self.config.log.metrics if first else None
        metrics = MetricsFile(path, resumed=self.start) if path is not None else None
        if first:
            self._greet()
            self._set_aside()
        progress = open_progress(train.steps, self.start, self.config.log.every) if first else Silent()
        validation = None
        try:
            with self._recording() as recording:
                for found in self.steps():
                    self.totals.add(found)
                    progress.show(found)
                    if metrics is not None:
                        metrics.write(found)
                    if recording is not None:
                        recording.log(asdict(found))
                    self._checkpoint(found.step, progress)
                    if found.step == train.steps or (
                        train.validation_every and found.step % train.validation_every == 0
                    ):
                        validation = self._validate()
                        if validation is not None:
                            loss = f"validation loss {validation:.4f}{self._of_averages()}"
                            progress.note(f"step {found.step}/{train.steps}  {loss}")
        finally:
            progress.close()
            if metrics is not None:
                metrics.close()
        if self.start >= train.steps:
            validation = self._validate()
        self._finish(validation)
        self._discard_sealed()
        return validation

    def _recording(self) -> AbstractContextManager[Recording | None]:
        log = self.config.log
        if log.dir is None or self.start >= self.config.train.steps:
            return nullcontext()
        return record(self.model, log.dir, steps=self.start, timeline=log.timeline, config=self.config)

    def _discard_sealed(self) -> None:
        """At the end of the run its last checkpoint is all that is needed; a run that was killed before it has none."""
        section = self.config.checkpoint
        if not section.durable or section.dir is None:
            return
        last = checkpoints.folder_of(section.dir, max(self.start, self.config.train.steps))
        if ranks.from_first(None if last.exists() else str(last), self.device) is not None:
            tz.save_checkpoint(self.model, self.optimizer, last, extra=self._extra(checkpoints.step_of(last)))
        discard_sealed(self.model)

    def steps(self) -> Iterator[Record]:
        """Runs the steps that are left, giving the record of each."""
        for step in range(self.start, self.config.train.steps):
            self.stop.check()
            yield self._step(step)

    def _step(self, step: int) -> Record:
        began = time.perf_counter()
        # From the step alone, so that dropout goes on exactly after a resume; each rank its own.
        torch.manual_seed(_seed(self.config.train.seed, step, self.job.ranks.rank))
        losses = [self._micro_step(step, number) for number in range(self.job.micro_steps)]
        norm = self._clip()
        lr = float(self.optimizer.param_groups[0]["lr"])
        scale = self.scaler.scale_value if self.scaler is not None else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.config.checkpoint.durable:
            tz.seal(self.model, self.optimizer, self._extra(step + 1))
        loss = sum(float(part) for part in losses) / len(losses)
        own = Measured(step + 1, loss, norm, lr, self.job.tokens, time.perf_counter() - began, scale)
        return combine(own, tz.stats(self.model), self.device, self.job.ranks.world_size)

    def _micro_step(self, step: int, number: int) -> torch.Tensor:
        own = self.job.ranks
        ids, targets = self.job.data.train.batch(step, number, self.job.micro_batch, own.rank, own.world_size)
        loss: torch.Tensor = self.model(ids.to(self.device), targets.to(self.device))
        self.stop.check()
        part = loss / self.job.micro_steps
        (part if self.scaler is None else self.scaler.scale(part)).backward()
        self.stop.check()
        return loss.detach()

    def _clip(self) -> float | None:
        """Clips if configured to; returns the norm before it, or None where it is never known as a whole."""
        if self.config.optimizer.overlap == "backward":
            return None
        return float(tz.clip_grad_norm_(self.model, self.config.train.grad_clip or math.inf))

    def _checkpoint(self, step: int, progress: Progress) -> None:
        section = self.config.checkpoint
        due = step == self.config.train.steps or (section.every and step % section.every == 0)
        if section.dir is None or not due:
            return
        folder = checkpoints.folder_of(section.dir, step)
        self._complete_checkpoint(progress)
        tz.save_checkpoint(self.model, self.optimizer, folder, extra=self._extra(step), background=section.async_)
        self._checkpointed = step
        if not section.async_ or step == self.config.train.steps:
            self._complete_checkpoint(progress)

    def _complete_checkpoint(self, progress: Progress) -> None:
        """Waits for the last checkpoint that was begun, and removes the oldest."""
        step, self._checkpointed = self._checkpointed, None
        directory = self.config.checkpoint.dir
        if step is None or directory is None:
            return
        tz.finish_checkpoint(self.model)
        if self.job.ranks.first:
            checkpoints.keep_newest(directory, self.config.checkpoint.keep)
            progress.note(f"step {step}/{self.config.train.steps}  checkpoint {checkpoints.folder_of(directory, step)}")

    def _set_aside(self) -> None:
        directory = self.config.checkpoint.dir
        if directory is None or self.start >= self.config.train.steps:
            return
        aside = checkpoints.set_aside_others(directory, self.job.resume, self.start)
        if aside is not None:
            print(f"note     checkpoints that this run does not continue were moved to {aside}", flush=True)

    def _validate(self) -> float | None:
        """The validation loss, and beside it that of the averages where there are any."""
        loss = self.validate()
        if loss is not None and self.config.optimizer.ema:
            with tz.averaged(self.model):
                self._averages = self.validate()
        return loss

    def _of_averages(self) -> str:
        return "" if self._averages is None else f", of the averages {self._averages:.4f}"

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss over fixed parts of the validation data, the same for every number of ranks; None if turned off."""
        train, own, source = self.config.train, self.job.ranks, self.job.data.validation
        per_batch = train.batch_size // (self.job.micro_batch * own.world_size)
        batches = min(train.validation_batches, max(1, source.windows // train.batch_size)) * per_batch
        if not batches:
            return None
        self.model.eval()
        loss = 0.0
        try:
            for number in range(batches):
                self.stop.check()
                ids, targets = source.spread(number, batches, self.job.micro_batch, own.rank, own.world_size)
                loss += float(self.model(ids.to(self.device), targets.to(self.device)))
        finally:
            self.model.train()
        return ranks.total([loss / batches], self.device)[0] / own.world_size

    def _greet(self) -> None:
        own, train = self.job.ranks, self.config.train
        print(f"data     {self.job.data.description}")
        if self.start and self.start >= train.steps:
            done = f"{self.source} is from step {self.start}, train.steps is {train.steps}"
            print(f"training done already: {done}", flush=True)
            return
        plan = f"steps {self.start + 1} to {train.steps}" if self.start else f"{train.steps} steps"
        split = f", {self.job.micro_steps} micro-batches" if self.job.micro_steps > 1 else ""
        over = f" on {own.world_size} ranks" if own.world_size > 1 else ""
        size = f"{train.batch_size} x {train.seq_len} tokens{split}"
        print(f"training {plan} of {size}{over}, {train.precision}, {self.device}", flush=True)
        if self.source:
            print(f"from     {self.source}", flush=True)

    def _finish(self, validation: float | None) -> None:
        sample = self._sample()
        stats = tz.stats(self.model)
        state, spare, peak = ranks.total(
            [stats["state_bytes"], stats["second_slot_bytes"], peak_rss_bytes()], self.device
        )
        if not self.job.ranks.first:
            return
        if sample is not None:
            print(f"sample\n{_indented(sample)}")
        if validation is not None:
            bits = validation / math.log(2)
            print(f"result   validation loss {validation:.4f} ({bits:.3f} bits per token){self._of_averages()}")
        for line in summarise(self.totals, stats, int(state), int(spare), int(peak), self.job.ranks.world_size):
            print(line)

    def _sample(self) -> str | None:
        """What the model writes after a line break. Every rank takes part, because every forward gathers."""
        train = self.config.train
        if not train.sample_tokens:
            return None
        text = self.job.data.is_text
        first = ord("\n") if text else int(self.job.data.validation.stream.read(0, 1)[0])
        ids = torch.tensor([[first]], device=self.device)
        generator = torch.Generator().manual_seed(train.seed)
        for _ in range(train.sample_tokens):
            self.stop.check()
            ids = self.model.generate(ids, 1, _SAMPLE_TEMPERATURE, generator)
        tokens = [int(token) for token in ids[0, 1:].tolist()]
        return shown_text(tokens) if text else " ".join(map(str, tokens))


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
