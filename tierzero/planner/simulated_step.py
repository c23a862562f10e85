"""A step in simulated time, as the runtime would run it: the same order of gathers, reads, updates, write-backs and
waits, on resources that are as fast as the machine profile says.

The model's thread is plain code, which lets the simulation go on until what it waits for is there. docs/planning.md has
the model for users.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierzero.planner.fluid import Shared, Simulation
from tierzero.planner.simulated_tiles import DEMAND, PREFETCH, WRITE_BACK, SimulatedTiles
from tierzero.planner.simulated_tries import SimulatedTries
from tierzero.planner.step_case import Access, Phases, StepCase
from tierzero.planner.step_units import TileWork

_MOST_STEPS = 6
_MICRO_STEPS = 4
"""Micro-batches of a step that are simulated; more are like the last but one of them."""


@dataclass
class _UnitState:
    here: bool = False
    coming: bool = False
    left: int = 0
    """Tiles of a fetch that are not there yet."""
    pending: bool = False
    """Has an update that is not begun."""
    updating: int = 0
    """Tiles of an update without a fetch that are not done."""
    when_updated: list[Callable[[], None]] = field(default_factory=list)


class SimulatedStep:
    """Steps one after another, each beginning with what the one before has left, until they are alike."""

    def __init__(self, case: StepCase) -> None:
        self.case = case
        speeds = case.speeds
        resources = {"processor": speeds.processor, "drive": speeds.drive, "network": Shared(1.0, 1.0, 0.5, 0.5)}
        if speeds.link is not None:
            resources["link"] = speeds.link
        self._sim = Simulation(resources, {"drive": speeds.tiles_at_once})
        self._processor, self._network = self._sim.resources["processor"], self._sim.resources["network"]
        self._link = self._sim.resources.get("link")
        self._tiles = SimulatedTiles(case, self._sim)
        self._tries = SimulatedTries(case, self._sim, self._tiles)
        self._states = [_UnitState(pending=case.overlap in ("forward", "both")) for _ in case.units]
        self._arena, self._buckets = case.arena, case.buckets
        self._trace = [access.unit for access in (*case.forward, *case.backward) if access.uses]
        self._cursor = self._gradients_left = 0
        self._waiting: dict[str, float] = {}

    def run(self) -> Phases:
        """Raises RuntimeError where the plan's memory would not do for the step."""
        before = self._step()
        for _ in range(_MOST_STEPS):
            phases = self._step()
            if _alike(before.step, phases.step) and _alike(before.nvme_bytes, phases.nvme_bytes):
                break
            before = phases
        return phases

    # The model's thread.

    def _step(self) -> Phases:
        begun, moved, self._waiting = self._sim.now, self._tiles.moved, {}
        self._tries.begin_step()
        busy = {name: resource.busy for name, resource in self._sim.resources.items()}
        forward = backward = 0.0
        repeated: Phases | None = None
        simulated = min(self.case.micro_steps, _MICRO_STEPS)
        for number in range(simulated):
            before = self._so_far(begun, busy, moved, forward, backward)
            start = self._sim.now
            self._cursor = 0
            for access in self.case.forward:
                self._use(access, last_backward=False)
            middle = self._sim.now
            self._backward(adds=number > 0, last=number + 1 == simulated)
            forward, backward = forward + middle - start, backward + self._sim.now - middle
            if number == simulated - 2:
                repeated = self._so_far(begun, busy, moved, forward, backward).since(before)
        start = self._sim.now
        self._optimizer_step()
        whole = self._so_far(begun, busy, moved, forward, backward, self._sim.now - start)
        more = self.case.micro_steps - simulated
        return whole.with_more(repeated, more) if repeated is not None and more else whole

    def _so_far(
        self, begun: float, busy: dict[str, float], moved: float, forward: float, backward: float, update: float = 0.0
    ) -> Phases:
        return Phases(
            self._sim.now - begun,
            forward,
            backward,
            update,
            {name: resource.busy - busy[name] for name, resource in self._sim.resources.items()},
            dict(self._waiting),
            self._tiles.moved - moved,
        )

    def _backward(self, adds: bool, last: bool) -> None:
        for access in self.case.backward:
            self._use(access, last_backward=last)
            if access.completes:
                self._take_gradients(access.unit, adds, last)
        self._wait("gradients", lambda: self._gradients_left == 0)

    def _use(self, access: Access, last_backward: bool) -> None:
        if access.uses:
            self._demand(access.unit, last_backward)
        self._compute(access.seconds + self.case.speeds.unit_s)

    def _demand(self, unit: int, last_backward: bool) -> None:
        state = self._states[unit]
        self._cursor = (self._cursor + 1) % len(self._trace)
        if not state.here and not state.coming:
            self._fetch(unit, required=True)
        self._fetch_ahead(unit, last_backward)
        self._wait("weights", lambda: state.here)

    def _compute(self, seconds: float) -> None:
        done: list[bool] = []
        self._sim.submit(self._processor.first, seconds, lambda: done.append(True))
        self._sim.run_until(lambda: bool(done))

    def _wait(self, what: str, reached: Callable[[], bool]) -> None:
        begun = self._sim.now
        self._sim.run_until(reached)
        self._waiting[what] = self._waiting.get(what, 0.0) + self._sim.now - begun

    def _optimizer_step(self) -> None:
        if self.case.overlap == "backward":
            return
        self._tries.stop()
        for index, state in enumerate(self._states):
            state.pending = True
            self._drop(index)
        if self.case.overlap == "none":
            for index in range(len(self._states)):
                self._update_in_place(index, DEMAND)
            self._wait("optimizer", lambda: not self._tiles.unwritten)

    # Fetching units.

    def _fetch_ahead(self, current: int, last_backward: bool) -> None:
        """What comes after the step's last backward waits for its update: of that, the state is read ahead."""
        upcoming = self._upcoming()
        if last_backward:
            upcoming = self._trace[self._cursor :] if self._cursor else []
            if self.case.overlap != "backward":
                self._tiles.read_ahead(self._tiles_in_order(), self._tries.claims)
        for unit in list(dict.fromkeys(upcoming))[: self.case.prefetch]:
            state = self._states[unit]
            if not state.here and not state.coming and not self._fetch(unit, required=False, current=current):
                return

    def _tiles_in_order(self) -> Iterator[TileWork]:
        tiles = (tile for unit in dict.fromkeys(self._trace) for tile in self.case.units[unit].tiles)
        return (tile for tile in tiles if not self._tries.holds(tile))

    def _upcoming(self) -> list[int]:
        return self._trace[self._cursor :] + self._trace[: self._cursor]

    def _fetch(self, unit: int, *, required: bool, current: int | None = None) -> bool:
        if not self._make_room(unit, required, current):
            return False
        state = self._states[unit]
        self._arena -= self.case.units[unit].arena
        state.coming, state.left = True, len(self.case.units[unit].tiles)
        updates, state.pending = state.pending, False
        bring = functools.partial(self._bring, unit, updates, DEMAND if required else PREFETCH)
        if state.updating:
            state.when_updated.append(bring)
        else:
            bring()
        return True

    def _bring(self, unit: int, updates: bool, priority: int) -> None:
        if not self.case.units[unit].tiles:
            self._gather(unit)
        for tile in self.case.units[unit].tiles:
            then = functools.partial(self._to_device, unit, tile)
            read = functools.partial(self._tiles.read, tile.weights, priority, then)
            if updates and tile.trained:
                self._tries.take(tile, read, functools.partial(self._tiles.update, tile, priority, then))
            else:
                read()

    def _to_device(self, unit: int, tile: TileWork) -> None:
        def arrived() -> None:
            self._states[unit].left -= 1
            if self._states[unit].left == 0:
                self._gather(unit)

        if self._link is not None:
            self._sim.submit(self._link.first, tile.weights + tile.copied, arrived)
        else:
            self._sim.submit(self._processor.second, tile.copied / self.case.speeds.host_copy, arrived)

    def _gather(self, unit: int) -> None:
        def here() -> None:
            self._states[unit].here, self._states[unit].coming = True, False

        self._sim.submit(self._network.first, self.case.gather_s[unit], here)

    # Room for them.

    def _make_room(self, unit: int, required: bool, current: int | None) -> bool:
        while self._arena < self.case.units[unit].arena:
            upcoming = self._upcoming()
            distance = {index: _distance(upcoming, index) for index in self._evictable({unit, current})}
            if not distance:
                if not required:
                    return False
                self._wait("weights", lambda: bool(self._evictable({unit})) or not self._any_coming())
                if not self._evictable({unit}):
                    raise RuntimeError("the plan's memory for gathered units does not hold those in use")
                continue
            victim = max(distance, key=lambda index: distance[index])
            if not required and distance[victim] <= _distance(upcoming, unit):
                return False
            self._drop(victim)
        return True

    def _evictable(self, but: set[int | None]) -> list[int]:
        return [
            index
            for index, state in enumerate(self._states)
            if state.here and self.case.units[index].arena and index not in but and index not in self.case.held
        ]

    def _any_coming(self) -> bool:
        return any(state.coming for state in self._states)

    def _drop(self, unit: int) -> None:
        state = self._states[unit]
        if state.coming:
            self._sim.run_until(lambda: state.here)
        if state.here:
            state.here = False
            self._arena += self.case.units[unit].arena

    # Updates without a fetch, and gradients.

    def _update_in_place(self, unit: int, priority: int) -> None:
        state = self._states[unit]
        state.pending = False
        trained = [tile for tile in self.case.units[unit].tiles if tile.trained]
        state.updating = len(trained)

        def updated() -> None:
            state.updating -= 1
            if not state.updating:
                waiting, state.when_updated = state.when_updated, []
                for go_on in waiting:
                    go_on()

        for tile in trained:
            self._tiles.update(tile, priority, updated)

    def _take_gradients(self, unit: int, adds: bool, last: bool) -> None:
        """A unit's gradients are complete: taken over, reduced, and taken home."""
        work = self.case.units[unit]
        if not work.gradient:
            return
        self._compute((3 if adds else 2) * work.gradient / self.case.speeds.gradient_copy)
        if work.bucketed:
            self._wait("gradients", lambda: self._buckets >= work.gradient or not self._gradients_left)
            self._buckets -= work.gradient
            # Collected in the bucket first, then summed and copied on their way home.
            self._compute(2 * work.gradient / self.case.speeds.gradient_copy)
        self._gradients_left += 1
        home = functools.partial(self._gradients_home, unit, last)
        put_away = functools.partial(self._put_away, unit, adds, home)
        self._sim.submit(self._network.second, self.case.reduce_s[unit], put_away)

    def _put_away(self, unit: int, adds: bool, home: Callable[[], None]) -> None:
        work = self.case.units[unit]
        tiles = [tile for tile in work.tiles if tile.gradients]
        left = len(tiles)

        def written() -> None:
            nonlocal left
            left -= 1
            if not left:
                home()

        for tile in tiles:
            self._tiles.write_gradient(tile, adds, written)
        if not tiles and self._link is not None:
            self._sim.submit(self._link.second, work.gradient, home)
        elif not tiles:
            home()

    def _gradients_home(self, unit: int, last: bool) -> None:
        if self.case.units[unit].bucketed:
            self._buckets += self.case.units[unit].gradient
        self._gradients_left -= 1
        if last and self.case.overlap == "backward":
            self._drop(unit)
            self._update_in_place(unit, WRITE_BACK)
        elif last and self.case.overlap == "both":
            self._tries.begin(self.case.units[unit].tiles)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= 0.005 * max(one, other)


def _distance(upcoming: list[int], unit: int) -> int:
    """Uses before the next one of ``unit``."""
    return upcoming.index(unit) if unit in upcoming else len(upcoming)
