"""The access trace: what is foretold, and where in the step it says the run is."""

from __future__ import annotations

from tierzero.runtime.trace import AccessTrace

FORWARD, BACKWARD = [0, 1, 2, 3], [3, 2, 1]


def run(trace: AccessTrace, accesses: list[int], in_backward: bool = False) -> None:
    for unit in accesses:
        trace.access(unit, in_backward)


def trained(micro_batches: int = 1) -> AccessTrace:
    trace = AccessTrace()
    for _ in range(micro_batches):
        run(trace, FORWARD)
        run(trace, BACKWARD, in_backward=True)
    trace.end_step()
    return trace


def test_what_comes_next_is_foretold_across_the_step_boundary() -> None:
    trace = trained()
    assert trace.upcoming(2) == [0, 1]
    run(trace, FORWARD)
    run(trace, BACKWARD[:2], in_backward=True)
    assert trace.upcoming(3) == [1, 0, 2]
    assert trace.upcoming(0) == []
    assert trace.left() == 1
    run(trace, BACKWARD[2:], in_backward=True)
    assert trace.left() == 0
    assert trace.upcoming(2) == [0, 1]
    assert trace.order() == [0, 1, 2, 3]


def test_the_last_backward_is_known_by_its_step() -> None:
    assert not AccessTrace().in_last_backward()
    trace = trained(micro_batches=2)
    seen = []
    for _ in range(2):
        for unit in FORWARD:
            trace.access(unit)
            seen.append(trace.in_last_backward())
        for unit in BACKWARD:
            trace.access(unit, in_backward=True)
            seen.append(trace.in_last_backward())
    last_forward = 2 * len(FORWARD) + len(BACKWARD) - 1
    assert seen == [index >= last_forward for index in range(len(seen))]
    trace.end_step()
    assert not trace.in_last_backward()


def test_evaluations_are_foretold_and_leave_no_mark() -> None:
    trace, undisturbed = trained(micro_batches=2), trained(micro_batches=2)
    for each in (trace, undisturbed):
        each.begin_forward(training=True)
        run(each, FORWARD)
        run(each, BACKWARD, in_backward=True)
        if each is trace:  # between two micro-batches
            for _ in range(3):
                each.begin_forward(training=False)
                assert each.upcoming(2) == [0, 1]
                run(each, FORWARD)
                assert each.departures == 0
        each.begin_forward(training=True)
        assert each.upcoming(2) == [0, 1]
        run(each, FORWARD)
        run(each, BACKWARD, in_backward=True)
        assert each.departures == 0
        each.end_step()
    assert trace._trace == undisturbed._trace


def test_inference_alone_is_foretold_by_the_pass_before() -> None:
    trace = AccessTrace()
    for order in (FORWARD, FORWARD, [0, 2, 3]):
        trace.begin_forward(training=False)
        run(trace, order)
    trace.begin_forward(training=False)
    assert trace.upcoming(3) == [0, 2, 3]
    trace.begin_forward(training=True)  # of which a first step learns nothing
    run(trace, FORWARD)
    run(trace, BACKWARD, in_backward=True)
    trace.end_step()
    assert trace.order() == FORWARD
    assert len(trace._trace) == len(FORWARD) + len(BACKWARD) - 1


def test_a_recording_without_steps_does_not_grow_for_ever() -> None:
    trace = AccessTrace()
    for _ in range((1 << 20) // 2 + 10):
        run(trace, [0, 1])
    assert len(trace._recording) == 1 << 20
