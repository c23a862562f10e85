"""The simulated step and what it is made of: shared resources, counted work, bounds that no schedule can beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tierzero as tz
from tierzero.activations.measure import ActivationBytes
from tierzero.config import Config
from tierzero.planner.fluid import Shared, Simulation
from tierzero.planner.prediction import step_case, transient_peak
from tierzero.planner.simulated_step import SimulatedStep
from tierzero.planner.step_case import Phases
from tierzero.planner.work import total
from tierzero.training.estimated import activations_of
from tierzero.training.memory import rss_bytes
from tierzero.training.planned import Planner, Site, default_plan

from .machines import machine

NVME = {"params": "nvme", "optimizer": "nvme", "gradients": "host"}


def planner(profile: Any = None, **sections: Any) -> Planner:
    values: dict[str, Any] = {
        "model": {"dim": 256, "layers": 6, "heads": 4, "vocab": 8192},
        "train": {"batch_size": 2, "seq_len": 64},
        "tiers": {"nvme": ["/tmp"]},
        "placement": NVME,
        "optimizer": {"overlap": "forward"},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return Planner(Config.from_dict(values), Site(profile or machine()))


def step_s(profile: Any = None, **sections: Any) -> float:
    plan = default_plan(planner(profile, **sections))
    assert plan is not None
    return plan.best.step_s


class TestSharedResources:
    def test_one_queue_alone_has_its_own_rate(self) -> None:
        simulation = Simulation({"drive": Shared.halves(100, 50, 60)})
        ended: list[float] = []
        simulation.submit(simulation.resources["drive"].first, 200, lambda: ended.append(simulation.now))
        simulation.run_until(lambda: bool(ended))
        assert ended == [pytest.approx(2.0)]

    def test_both_share_until_one_is_done(self) -> None:
        simulation = Simulation({"drive": Shared.halves(100, 50, 60)})
        drive, ended = simulation.resources["drive"], dict[str, float]()
        simulation.submit(drive.first, 60, lambda: ended.setdefault("read", simulation.now))
        simulation.submit(drive.second, 160, lambda: ended.setdefault("write", simulation.now))
        simulation.run_until(lambda: len(ended) == 2)
        # 30 a second each for 2 s, then the write alone: 100 left at 50 a second.
        assert ended == {"read": pytest.approx(2.0), "write": pytest.approx(4.0)}
        assert drive.busy == pytest.approx(4.0)

    def test_an_urgent_job_goes_before_those_that_wait_but_not_before_the_one_that_runs(self) -> None:
        simulation = Simulation({"drive": Shared.halves(1, 1, 1)})
        queue, order = simulation.resources["drive"].first, list[str]()
        for name, priority in (("running", 2), ("waiting", 2), ("urgent", 0)):
            simulation.submit(queue, 1, lambda name=name: order.append(name), priority)
        simulation.run_until(lambda: len(order) == 3)
        assert order == ["running", "urgent", "waiting"]

    def test_several_jobs_of_a_queue_share_its_rate(self) -> None:
        simulation = Simulation({"drive": Shared.halves(60, 60, 60)}, {"drive": 2})
        queue, ended = simulation.resources["drive"].first, dict[str, float]()
        for name, work in (("small", 30.0), ("large", 60.0), ("third", 60.0)):
            simulation.submit(queue, work, lambda name=name: ended.setdefault(name, simulation.now))  # type: ignore[misc]
        simulation.run_until(lambda: len(ended) == 3)
        assert ended == {"small": pytest.approx(1.0), "large": pytest.approx(2.0), "third": pytest.approx(2.5)}

    def test_a_wait_for_nothing_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="nothing will bring"):
            Simulation({"drive": Shared.halves(1, 1, 1)}).run_until(lambda: False)


class TestCountedWork:
    def test_flops_are_six_per_parameter_and_token_and_those_of_attention(self) -> None:
        found = planner()
        tokens, dim, layers = 128, 256, 6
        matrices = layers * 12 * dim**2 + 8192 * dim  # the embedding is looked up; the head is made twice, see its loss
        attention = layers * 3.5 * 4 * tokens * 64 * dim
        wanted = 6 * tokens * matrices + 2 * tokens * 8192 * dim + attention
        assert found.work.flops == pytest.approx(wanted, rel=1e-6)

    def test_the_backward_visits_the_units_in_reverse(self) -> None:
        work = planner().work
        forward = [visit.unit for visit in work.forward if visit.counts.flops]
        backward = [visit.unit for visit in work.backward if visit.counts.flops]
        assert forward == [2, 3, 4, 5]  # two blocks of a unit each, and the head
        assert backward == forward[::-1]
        assert total(work.backward).flops > 1.9 * total(work.forward).flops

    @pytest.mark.parametrize("recompute", ["none", "unit", "sqrt", 2])
    def test_peak_activations_are_what_a_forward_keeps_and_little_more(self, recompute: str | int) -> None:
        config = planner(activations={"recompute": recompute}).config
        plan = default_plan(Planner(config, Site(machine())))
        kept: ActivationBytes = activations_of(config, config.train.batch_size)
        assert plan is not None
        # Beyond what autograd keeps there are the operations' own results and one weight's gradient at a time.
        assert kept.kept(recompute) <= plan.best.activations <= kept.peak(recompute) + 8192 * 256 * 2 * 4

    def test_recomputing_costs_one_forward(self) -> None:
        # Where nothing is waited for.
        kept = step_s(placement=dict.fromkeys(NVME, "host"), activations={"recompute": "none"})
        again = step_s(placement=dict.fromkeys(NVME, "host"), activations={"recompute": "unit"})
        work = planner().work
        blocks = total(visit for visit in work.forward if visit.kept and visit.counts.attention)
        assert again - kept == pytest.approx(blocks.seconds(machine().compute["bf16"]), rel=0.15)


class TestBounds:
    @settings(max_examples=12, deadline=None)
    @given(
        st.sampled_from(["forward", "none", "both"]),
        st.sampled_from([None, 0, 1, 4]),
        st.sampled_from([1, 4, 16]),
        st.sampled_from(["2MB", "6MB", "40MB"]),
    )
    def test_no_step_is_shorter_than_its_work_or_its_bytes(
        self, overlap: str, prefetch: int | None, batch: int, host: str
    ) -> None:
        placement = {**NVME, "gradients": "nvme"}
        tiers: dict[str, Any] = {"nvme": ["/tmp"], "host": host, "tile": 32768}
        if prefetch is not None:
            tiers["prefetch"] = prefetch
        found = planner(
            placement=placement, tiers=tiers, optimizer={"overlap": overlap}, train={"batch_size": batch, "seq_len": 64}
        )
        plan = default_plan(found)
        assert plan is not None
        phases, profile = plan.best.prediction.phases, machine()
        work = total((*found.work.forward, *found.work.backward)).seconds(profile.compute["bf16"])
        assert phases.step >= work + found.parameters / profile.adam[2] - 1e-9
        assert phases.step >= phases.nvme_bytes / 2e9 - 1e-9
        assert phases.step == pytest.approx(phases.forward + phases.backward + phases.update)
        assert all(busy <= phases.step + 1e-9 for busy in phases.busy.values())

    def test_what_is_tried_in_the_backward_moves_updates_out_of_the_forward(self) -> None:
        """Where the drive bounds the forward and idles in the backward. Weights of tried tiles are read once more."""
        slow = machine(drives=[{"name": "drive", "read": 6e8, "write": 6e8, "mixed": 4.8e8}])
        tiers, auto = {"nvme": ["/tmp"], "host": "60MB"}, {"overlap": "auto"}
        found = planner(slow, train={"batch_size": 16}, tiers=tiers, optimizer=auto)
        choice, budgets = found.as_configured(), found.budgets(found.site)

        def phases(overlap: str, tried: float = 0.0) -> Phases:
            load = found.workload(replace(choice, overlap=overlap), found.site, 0)
            case = step_case(load, found.candidate(choice, found.site, budgets).plan, slow)
            return SimulatedStep(replace(case, tried=tried)).run()

        none, some, more = phases("both"), phases("both", 0.25), phases("both", 0.5)
        assert none.step == phases("forward").step, "nothing tried costs nothing"
        assert some.forward < none.forward
        assert none.backward < some.backward < more.backward
        weights = 2 * found.parameters
        assert some.nvme_bytes - none.nvme_bytes == pytest.approx(weights / 4, rel=0.3)
        assert more.nvme_bytes - none.nvme_bytes == pytest.approx(weights / 2, rel=0.3)
        resolved = found.candidate(choice, found.site, budgets)
        assert (resolved.overlap, resolved.step_s) == ("both", some.step)
        assert resolved.second_slots == pytest.approx(12 * found.parameters, rel=0.02)
        options = replace(found.options(), recompute=["none"], order=[choice.order], tile=[None], prefetch=[None])
        best = found.plan(options).best
        assert (best.overlap, best.step_s) == ("both", some.step)
        assert best.step_s < 0.95 * phases("forward").step

    def test_a_faster_drive_helps_where_the_drive_bounds(self) -> None:
        twice = machine(drives=[{"name": "drive", "read": 4e9, "write": 4e9, "mixed": 3.2e9}])
        assert step_s(twice) < 0.75 * step_s()

    def test_memory_to_work_ahead_in_saves_waiting(self) -> None:
        def phases(host: str) -> Any:
            plan = default_plan(
                planner(tiers={"nvme": ["/tmp"], "host": host, "tile": 131072}, train={"batch_size": 8})
            )
            assert plan is not None
            return plan.best.prediction.phases

        little, roomy = phases("24MB"), phases("80MB")
        assert roomy.waiting["weights"] < 0.4 * little.waiting["weights"]
        assert roomy.step < little.step

    def test_several_ranks_share_a_node_and_gather_over_its_network(self) -> None:
        rates = [{"nbytes": 2**20, "rate": 1e9}]
        network = {
            "backend": "gloo",
            "ranks": 2,
            **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), rates),
        }
        config = planner(machine(network=network)).config
        plan = default_plan(Planner(config, Site(machine(network=network), 2, 1, here=False)))
        assert plan is not None
        units = plan.parameters * 2  # weights are gathered in the forward and, but for the last units, in the backward
        assert 1.5 * units / 1e9 <= plan.best.prediction.phases.busy["network"] <= 3.1 * units / 1e9

    def test_ranks_without_a_network_in_the_profile_are_refused(self) -> None:
        with pytest.raises(tz.errors.ConfigError, match="collectives"):
            default_plan(Planner(planner().config, Site(machine(), 2, 1, here=False)))


def test_nothing_is_allocated_for_a_model_of_forty_billion_parameters() -> None:
    config = Config.from_dict(
        {
            "model": {"dim": 12288, "layers": 24, "heads": 96, "vocab": 51200},
            "train": {"batch_size": 512, "micro_batch": 1, "seq_len": 2048},
            "placement": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
            "activations": {"recompute": "unit"},
        }
    )
    rates = [{"nbytes": 2**20, "rate": 1e11}]
    names = ("all_gather", "reduce_scatter", "all_reduce")
    network = {"backend": "nccl", "ranks": 8, "between_nodes": 1e11, **dict.fromkeys(names, rates)}
    device = {"name": "gpu", "count": 8, "memory_bytes": 80 * 10**9, "to_device": 2e10, "to_host": 2e10, "both": 3e10}
    host = {"name": "node", "cores": 96, "memory_bytes": 10**12, "copy_bytes": 1e11}
    profile = machine(device=device, network=network, host=host)
    before = rss_bytes()
    found = Planner(config, Site(profile, 512, 64, here=False))
    plan = default_plan(found)
    assert plan is not None
    assert found.parameters > 4e10
    assert transient_peak(found.workload(plan.best.choice, plan.site, 1)) > 0
    assert rss_bytes() - before < 200e6
