"""The runtime of one sharded model: it joins the tiers, the units and the update, and is what the public functions
talk to."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from tierzero.errors import ConfigError
from tierzero.optim.owner import HyperOf
from tierzero.runtime.access import zero_moments
from tierzero.runtime.accounts import counters
from tierzero.runtime.forward import SavedWeights
from tierzero.runtime.gradients import Gradients
from tierzero.runtime.inputs import cast_inputs
from tierzero.runtime.machinery import Machinery, Unfinished
from tierzero.runtime.offloading import Offloading
from tierzero.runtime.pager import Pager
from tierzero.runtime.pending import PendingUpdates
from tierzero.runtime.sealing import Sealer, Updates
from tierzero.runtime.spans import Kind
from tierzero.runtime.state import GroupState, SlotState, UnitState, slot_of
from tierzero.runtime.stats import Counters, Stalls
from tierzero.runtime.tile_io import TileIO
from tierzero.runtime.timeline import Timeline
from tierzero.runtime.trials import StagingForTrials
from tierzero.runtime.update import Updater
from tierzero.runtime.whole_state import WholeState


class Runtime:
    """Owns everything about one sharded model. ``close()`` gives all memory and files back."""

    def __init__(self, model: nn.Module, units: list[UnitState], parts: Machinery) -> None:
        self._model = weakref.ref(model)
        self.units = units
        self.world, self.device, self.plan = parts.world, parts.device, parts.plan
        self.engine, self.store, self.pools = parts.engine, parts.store, parts.pools
        self.collectives = parts.collectives
        self.overlap = parts.overlap
        self.input_dtype = parts.input_dtype
        self.timeline = Timeline()
        self.stalls = Stalls(self.timeline)
        self.tile_io = TileIO(parts.store, parts.pools["host"], parts.device, self.timeline)
        self.updater = Updater(
            parts.engine,
            parts.store,
            self.tile_io,
            parts.device,
            parts.plan.staging_tile,
            parts.ema,
            StagingForTrials.of(parts.plan) if parts.overlap == "both" else StagingForTrials(),
        )
        self.host_limit = parts.host_limit
        self.offloading = Offloading()
        self.pager = Pager(
            units,
            parts.pools["arena"],
            parts.engine,
            self.updater,
            parts.device,
            parts.collectives,
            parts.plan.prefetch,
            self.stalls,
            reads_ahead=parts.overlap != "backward",
            kept=parts.kept,
            timeline=self.timeline,
        )
        self.gradients = Gradients(
            units,
            parts.engine,
            parts.store,
            self.tile_io,
            parts.device,
            parts.collectives,
            parts.pools["buckets"],
            self.stalls,
        )
        self.updates = PendingUpdates(
            units, parts.engine, self.updater, self.pager, self.stalls, self._start_afresh, self.world.size
        )
        self.pager.before_demand = self.offloading.check
        self.gradients.before_arrival = self._before_arrival
        self.gradients.on_unit_complete = self._on_unit_complete
        self.gradients.on_backward_end = self.updates.backward_ended
        self.pager.after_use = self.updates.amount.used
        self.saved_weights = SavedWeights(self.pager)
        self.saved_weights.know(self.slots())
        self.held_open: set[SlotState] = set()
        """Parameters that `gathered` keeps resident."""
        self._turn = threading.RLock()
        self.loss_scale = 1.0
        """What the loss was multiplied with before backward."""
        self.on_step_skipped: Callable[[bool], None] | None = None
        self._closed = False
        sealer: Sealer | None = None
        if parts.lasting is not None:
            updates = Updates(self.flush, self.updates.begin_all, self.updater.written)
            sealer = Sealer(parts.store, parts.lasting, parts.collectives, parts.plan.tile, updates, self.stalls)
            self.gradients.on_backward_begin = sealer.begin_sealing
            self.updates.spares_free = lambda: sealer.under_way
        self.whole_state = WholeState(parts.engine, parts.store, parts.device, self.updater, sealer, self._forget_all)
        self.saving: Unfinished | None = None
        """A checkpoint that is being written beside the training."""
        self._step_start = self._step_began = Counters()
        self._between_steps = True
        if sealer is not None:
            self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
            atexit.register(self._at_exit)
        self.last_step = Counters(step_s=0.0)
        self.steps = 0

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def sealer(self) -> Sealer | None:
        """None where the tiers end with the process."""
        return self.whole_state.sealer

    @property
    def updates_in_backward(self) -> bool:
        return self.overlap == "backward"

    @property
    def updates_in_forward(self) -> bool:
        """A step's updates are applied after it has ended."""
        return self.overlap in ("forward", "both")

    def slots(self) -> list[SlotState]:
        """All parameters, in the order of the units."""
        return [slot for unit in self.units for slot in unit.all_slots()]

    def groups(self) -> list[GroupState]:
        return [group for unit in self.units for group in unit.groups]

    # In the model's forward.

    @property
    def in_model_code(self) -> bool:
        """Inside a forward or backward, where all ranks run the same code."""
        return torch._C._current_graph_task_id() != -1 or any(unit.active for unit in self.units)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time pages weights in and out. Raises ConfigError where another one does, and does not wait
        for it: it may be waiting for this one.

        A backward on an accelerator runs on PyTorch's own threads, while the one that called it waits.
        """
        if torch._C._current_graph_task_id() != -1 and not self.device.is_host:
            yield
            return
        if not self._turn.acquire(blocking=False):
            raise ConfigError(
                "a thread uses a sharded model while another one is in its forward; let them take turns, as by a lock "
                "around the call"
            )
        try:
            yield
        finally:
            self._turn.release()

    def enter_root(self) -> None:
        """Before the model's forward: raises what failed in the background, and clears what a failed pass left
        behind.
        """
        self.require_open()
        if torch._C._current_graph_task_id() == -1:
            # Updates of a backward that no step followed: whether they failed must be known before going on.
            self.updates.settle_early()
        self.engine.check()
        if torch._C._current_graph_task_id() == -1:
            self.gradients.recover()
            self.timeline.close_backward()
            self.pager.trace.begin_forward(torch.is_grad_enabled())
        if self._between_steps and torch.is_grad_enabled():
            # Bytes are counted from step to step, as the next one's reads begin early; time is the step's own.
            self._step_began, self._between_steps, self.stalls.starting = counters(self), False, True
            if self.timeline.on:
                self.timeline.begin_step()

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """fp32 tensors among the model's inputs in the dtype that the model was converted to."""
        return cast_inputs(self.input_dtype, args, kwargs)

    @torch.inference_mode(False)
    def full_copy(self, slot: SlotState) -> torch.Tensor:
        """The parameter's values in a tensor of its own, on the device."""
        self.require_open()
        self.check_use()
        with self.turn():
            gathered = self.pager.demand(slot.group.unit)[slot.group.index]
            return gathered.parameter_values(slot.slot).clone()

    # The step.

    def grad_norm(self) -> float:
        """The 2-norm of all gradients over ranks and tiers, unscaled, as clipped so far. Every rank must call it."""
        self.require_open()
        with self.timeline.phase(Kind.GRADIENT_NORM):
            return self._grad_norm()

    def _grad_norm(self) -> float:
        self._collect_gradients()
        squares = sum(slot.sum_of_squares * slot.clip_factor**2 for slot in self.slots() if slot.has_grad)
        if self.collectives is not None and self.groups()[0].layout.parts > 1:
            with self.stalls.waiting("gather"):
                total = self.collectives.small_sum(torch.tensor([squares], dtype=torch.float64, device="cpu"))
                squares = float(total[0]) / self.world.replicas  # which hold the same
        return float(squares**0.5) / self.loss_scale

    def with_gradients(self) -> list[SlotState]:
        return [slot for slot in self.slots() if slot.has_grad]

    def clip(self, max_norm: float) -> float:
        """Fixes the factor that brings the global norm down to ``max_norm``; the update applies it. Returns the norm
        before clipping.
        """
        _refuse_in_backward("clip_grad_norm_")
        if self.overlap == "backward":
            raise ConfigError(
                "clip_grad_norm_: optimizer.overlap = 'backward' updates before the norm is known; use 'forward' to "
                "clip"
            )
        norm = self.grad_norm()
        # As torch.nn.utils.clip_grad_norm_ does it: the factor is computed and clamped in fp32.
        factor = torch.clamp(
            torch.tensor(max_norm, dtype=torch.float32, device="cpu")
            / (torch.tensor(norm, dtype=torch.float32, device="cpu") + 1e-6),
            max=1.0,
        )
        for slot in self.slots():
            if slot.has_grad:
                slot.clip_factor *= float(factor)
        return norm

    def step(self, hyper_of: HyperOf, slots: Iterable[SlotState]) -> bool:
        """Fixes the update of every parameter in ``slots`` that has a gradient; it is applied as ``overlap`` says.

        Returns False when a non-finite gradient of scaled training skipped it.
        """
        self.require_open()
        self.whole_state.refuse_averages("optimizer.step")
        _refuse_in_backward("optimizer.step")
        with self.timeline.phase(Kind.OPTIMIZER_STEP):
            return self._step(hyper_of, list(slots))

    def _step(self, hyper_of: HyperOf, slots: list[SlotState]) -> bool:
        self.updates.anticipation.confirm(hyper_of, slots)
        self.updates.settle_early()
        self.engine.check()
        self._collect_gradients()
        if self.sealer is not None and not self.updates_in_backward:
            self.sealer.complete()  # whose slots the updates of this step will need
        applied = True
        if self.on_step_skipped is not None:
            applied = self.grad_norm() < float("inf")
            self.on_step_skipped(not applied)
        stepped = [slot for slot in slots if slot.has_grad]
        if applied:
            self.updates.fix_rest([(slot, hyper_of) for slot in slots if slot.has_grad], self.loss_scale)
        self.updates.spend_confirmed()
        self.updates.end_speculation(applied, stepped)
        self._end_step()
        return applied

    def _collect_gradients(self) -> None:
        """All gradients at home, also what a backward that was broken off has left half collected."""
        if torch._C._current_graph_task_id() == -1:
            self.gradients.recover()
        self.gradients.finish()

    def _start_afresh(self, slots: list[SlotState]) -> None:
        self.flush()
        zero_moments(self, slots)
        for slot in slots:
            slot.step = 0

    def _end_step(self) -> None:
        self.steps += 1
        self.pager.trace.end_step()
        if self.overlap == "none":
            self.flush()
        now = counters(self)
        self.last_step, self._step_start = now.since(self._step_start, self._step_began), now
        self._between_steps = True
        if self.timeline.on:
            self.timeline.end_step()
        if self.overlap != "none":
            self.pager.prefetch()  # of the next step, which its bytes count in

    def check_use(self) -> None:
        """Refuses a use of weights that a backward has updated already and no step has confirmed."""
        if torch._C._current_graph_task_id() == -1:
            self.updates.anticipation.check_use()

    def refuse_inside_gathered(self, call: str) -> None:
        """For what would find the values from before an edit. Raises ConfigError."""
        if self.held_open:
            name = next(iter(self.held_open)).name
            raise ConfigError(f"{call}: inside tierzero.gathered, whose changes of {name!r} count when it is left")

    def flush_to_read(self) -> None:
        """`flush`, for whoever reads or changes state by hand."""
        self.check_use()
        self.flush()

    def flush(self) -> None:
        """Brings the tiers up to date: every update applied and written. After it the state is that of the last
        step.
        """
        self.gradients.finish()
        self.updates.apply_all()
        self.engine.check()

    def _before_arrival(self, unit: UnitState) -> None:
        self.offloading.check()
        self.whole_state.refuse_averages("a backward")
        self.updates.make_way(unit)

    def _on_unit_complete(self, unit: UnitState, reduced: Future[None] | None) -> None:
        if self.updates_in_backward:
            self.updates.begin_early(unit, reduced)
        elif self.overlap == "both":
            self.updates.speculate(unit, reduced, self.loss_scale)

    def zero_grad(self, slots: Sequence[SlotState] | None = None) -> None:
        """Drops gradients; what a pending update still needs is kept until it has run."""
        self.updates.anticipation.check_dropped(self.slots() if slots is None else slots)
        self.gradients.drop(slots)

    def _forget_all(self) -> None:
        self.updates.anticipation.clear()
        self.flush()
        self.zero_grad()
        for unit in self.units:
            self.pager.forget(unit)

    # Its life.

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_open(self) -> bool:
        """Neither closed nor failed in the background."""
        return not self._closed and self.engine.failure is None

    def require_open(self, whole: bool = True, present: bool = True) -> None:
        """Raises ConfigError after `close`, where the state must be ``present`` while it is offloaded, and as
        `WholeState.check` where ``whole`` state is needed.
        """
        if self._closed:
            raise ConfigError("this model's tiers were closed; shard a new model to go on")
        if present:
            self.offloading.check()
        if whole:
            self.whole_state.check()

    def close(self) -> None:
        """Ends the background work and gives memory and files back. The model cannot be used afterwards."""
        if self._closed:
            return
        if self.saving is not None:
            self.saving.end()
        if self.sealer is not None:
            atexit.unregister(self._at_exit)
            self.sealer.settle()
        if self.sealer is not None and (self.collectives is None or self._between_steps):
            with contextlib.suppress(Exception):  # then the step before it is what there is
                self.sealer.complete_alone()
        self._closed = True
        with contextlib.suppress(Exception):  # a broken engine has closed what it could
            self.engine.run(self.tile_io.discard_ahead())
        self.gradients.close()
        if self.collectives is not None:
            self.collectives.close()
        self.offloading.close()
        self.engine.close()
        self.updater.speculation.close()
        self.store.close()
        for pool in self.pools.values():
            pool.close()

    def __del__(self) -> None:
        """A model that is dropped without `close` gives its memory and files back too. In a thread of its own: the last
        reference may go on any thread, the engine's included.
        """
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # no new thread while the interpreter exits
                threading.Thread(target=self.close, daemon=True).start()


def _refuse_in_backward(call: str) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"{call} in a backward, as from a hook: it needs all gradients; call it after the backward "
            "(optimizer.overlap = 'backward' updates each unit as soon as its gradients are complete)"
        )


def _close_at_exit(runtime: weakref.ref[Runtime]) -> None:
    """What is marked is sealed at the end of the process too."""
    found = runtime()
    if found is not None:
        found.close()


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model. Raises ConfigError for any other module."""
    for parameter in model.parameters():
        slot = slot_of(parameter)
        if slot is not None:
            return slot.group.unit.runtime
    raise ConfigError("this model was not sharded with tierzero.shard, or it has no parameters")
