"""The recorder alone: memory that stays bounded, threads that do not meet, and phases that partition the time."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierzero.runtime import timeline as timeline_module
from tierzero.runtime.spans import SPAN, Kind, SpanPage
from tierzero.runtime.stats import RoomClock, Stalls
from tierzero.runtime.timeline import PHASES, RecordedStep, Timeline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline_module.time, "perf_counter", clock)
    return clock


def started(capacity: int = 100) -> tuple[Timeline, list[RecordedStep]]:
    timeline, steps = Timeline(capacity), list[RecordedStep]()
    timeline.start(steps.append)
    return timeline, steps


def spent(step: RecordedStep) -> dict[str, float]:
    return {phase: seconds for phase, seconds in step.phases.items() if seconds}


@given(st.integers(1, 40), st.integers(0, 80))
def test_a_page_holds_its_capacity_and_counts_the_rest(capacity: int, written: int) -> None:
    page = SpanPage(capacity)
    for _ in range(2):
        for number in range(written):
            page.write(Kind.UPDATE, number, 1, 2, float(number), number + 0.5, 7)
        spans, dropped = page.close()
        assert (len(spans), dropped) == (min(written, capacity), max(0, written - capacity))
        assert spans["unit"].tolist() == list(range(len(spans)))
        assert spans.nbytes <= capacity * SPAN.itemsize
        page.restart()
        assert len(page.close()[0]) == 0
        page.restart()  # asking takes a slot as well


def test_threads_do_not_write_over_each_other() -> None:
    page = SpanPage(4000)
    ready = threading.Barrier(4)

    def write(thread: int) -> None:
        ready.wait()
        for number in range(1200):
            page.write(Kind.PAGE_IN, thread, 0, number, 1.0 * number, 2.0 * number, thread * 10_000 + number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans, dropped = page.close()
    assert (len(spans), dropped) == (4000, 800)
    found = {(unit, tile) for unit, tile in zip(spans["unit"].tolist(), spans["tile"].tolist(), strict=True)}
    assert len(found) == 4000
    assert (spans["bytes"] == spans["unit"] * 10_000 + spans["tile"]).all()


def test_every_moment_belongs_to_one_phase(clock: Clock) -> None:
    timeline, steps = started()
    stalls, room = Stalls(timeline), RoomClock()
    clock.now = 1.0
    timeline.begin_step()
    clock.now = 1.5
    outer = timeline.enter_forward(0)
    clock.now = 2.0
    inner = timeline.enter_forward(1)
    clock.now = 4.0
    timeline.leave(inner)
    with stalls.waiting("nvme_read", room, unit=2):
        room.change(waiting=1, holding=1, writing=1)
        clock.now = 5.0
        room.change(waiting=-1)
        clock.now = 8.0
    clock.now = 9.0
    timeline.leave(outer)
    clock.now = 11.0
    with timeline.phase(Kind.OPTIMIZER_STEP):
        clock.now = 12.5
        timeline.end_step()
    assert spent(steps[0]) == {
        "between": 1.0,
        "other": 2.5,
        "forward": 0.5 + 2.0 + 1.0,
        "stall_nvme_read": 3.0,
        "stall_host_budget": 1.0,
        "optimizer_step": 1.5,
    }
    page = steps[0].page
    assert page is not None
    spans, _ = page.close()
    named = [(Kind(kind).name, unit, start, end) for start, end, _, unit, _, _, kind in spans.tolist()]
    assert named == [
        ("FORWARD", 1, 2.0, 4.0),
        ("STALL_NVME_READ", 2, 4.0, 7.0),
        ("STALL_HOST_BUDGET", 2, 7.0, 8.0),
        ("FORWARD", 0, 1.5, 9.0),
        ("OPTIMIZER_STEP", -1, 11.0, 12.5),
    ]


@given(st.lists(st.tuples(st.sampled_from("flsbe"), st.floats(0, 5)), max_size=60))
def test_phases_add_up_whatever_happens(events: list[tuple[str, float]]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline_module.time, "perf_counter", clock)
        timeline, steps = started()
        depths: list[int] = []
        for event, took in events:
            before, clock.now = clock.now, clock.now + took
            if event == "f":
                depths.append(timeline.enter_forward(3))
            elif event == "l" and depths:
                timeline.leave(depths.pop(len(depths) // 2))  # an error may leave inner ones open
            elif event == "s":
                timeline.stalled("gather", 0, before, clock.now, took / 3)
            elif event == "b":
                timeline.begin_step()
            elif event == "e":
                timeline.end_step()
        timeline.end_step()
    assert sum(step.ended - step.started for step in steps) == pytest.approx(clock.now)
    for step in steps:
        assert sum(step.phases.values()) == pytest.approx(step.ended - step.started, abs=1e-9)
        assert set(step.phases) == set(PHASES)
        assert min(step.phases.values()) >= -1e-9


def test_a_backward_that_broke_off_ends_with_the_next_forward(clock: Clock) -> None:
    timeline, steps = started()
    weight = torch.ones(1, requires_grad=True)
    seen: list[int] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fails):  # type: ignore[no-untyped-def]
            ctx.fails = fails
            return x * 1

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            for unit in (4, 4, 3):
                timeline.in_backward(unit)
                clock.now += 1.0
            depth = timeline.enter_forward(3)  # checkpointing runs it again
            clock.now += 2.0
            timeline.leave(depth)
            timeline.in_backward(3)
            clock.now += 4.0
            if ctx.fails:
                raise ArithmeticError("on purpose")
            seen.append(1)
            return grad, None

    timeline.begin_step()
    with pytest.raises(ArithmeticError):
        Asks.apply(weight, True).backward()
    clock.now += 8.0
    timeline.close_backward()
    clock.now += 16.0
    Asks.apply(weight, False).backward()
    clock.now += 32.0
    timeline.end_step()
    assert spent(steps[0]) == {"backward": 7.0 + 8.0 + 7.0, "recompute": 4.0, "other": 16.0 + 32.0}
    page = steps[0].page
    assert page is not None
    spans, _ = page.close()
    units = [(Kind(kind).name, unit, end - start) for start, end, _, unit, _, _, kind in spans.tolist()]
    assert units == [
        ("BACKWARD", 4, 2.0),
        ("BACKWARD", 3, 1.0),
        ("RECOMPUTE", 3, 2.0),
        ("BACKWARD", 3, 12.0),
        ("BACKWARD", -1, 17.0),
        ("BACKWARD", 4, 2.0),
        ("BACKWARD", 3, 1.0),
        ("RECOMPUTE", 3, 2.0),
        ("BACKWARD", 3, 4.0),
        ("BACKWARD", -1, 9.0),
    ]
    assert seen == [1]


def test_without_a_free_page_a_step_keeps_its_phases_and_says_what_is_missing(clock: Clock) -> None:
    timeline, steps = started(capacity=3)
    for _ in range(4):
        timeline.begin_step()
        clock.now += 1.0
        for _ in range(5):
            with timeline.span(Kind.UPDATE):
                clock.now += 0.5
        timeline.end_step()
    assert [step.page is None for step in steps] == [False, False, True, True]
    assert [step.dropped for step in steps] == [0, 0, 5, 5]
    assert all(spent(step) == {"other": 3.5} for step in steps)
    assert steps[0].page is not None
    timeline.take_back(steps[0].page)
    timeline.end_step()
    assert steps[-1].page is not None


def test_off_it_records_nothing_and_holds_no_memory() -> None:
    timeline = Timeline()
    stalls = Stalls(timeline)
    with timeline.span(Kind.UPDATE), timeline.phase(Kind.CHECKPOINT), stalls.waiting("gather"):
        pass
    assert timeline._page.capacity == 0
    assert next(timeline._page._slots) == 0
    timeline.start(lambda step: None)
    timeline.stop()
    assert timeline._page.capacity == 0
    assert not timeline._free


def test_a_span_takes_microseconds() -> None:
    timeline, _ = started(10_000)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            with timeline.span(Kind.PAGE_IN, 1, 0, 2, 3):
                pass
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 20e-6, best  # it takes 1; a busy machine may take ten times as long
