"""Machine profiles: those that come with TierZero, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tierzero.errors import ConfigError
from tierzero.planner.machine import MachineProfile, bundled_profile
from tierzero.planner.machines import bundled_names


@pytest.mark.parametrize("name", bundled_names())
def test_a_bundled_profile_is_whole_and_says_where_it_comes_from(name: str) -> None:
    profile = bundled_profile(name)
    assert profile.name == name
    assert "data sheets of" in profile.source
    assert profile.source.startswith("not measured: ")
    assert {"bf16", "fp16", "fp32"} == set(profile.compute)
    assert profile.device is not None
    assert profile.device.to_device < profile.device.both < 2 * profile.device.to_device
    assert max(profile.adam) == profile.host.cores
    rates = list(profile.adam.values())
    assert rates == sorted(rates)
    for drive in profile.drives:
        assert drive.write <= drive.mixed <= drive.read
    half = profile.compute["bf16"]
    assert half.matmul_flops(64, 256) < half.matmul_flops(16384, 8192)
    assert profile.compute["fp32"].matmul_flops(16384, 8192) < half.matmul_flops(16384, 8192)
    if profile.device.count > 1:
        assert profile.network is not None
        assert profile.network.ranks == profile.device.count
        assert profile.network.all_reduce[-1].rate < profile.network.all_gather[-1].rate


def test_the_expected_machines_are_there() -> None:
    assert {"h100-node", "a100-node", "rtx4090-workstation", "laptop-4060"} <= set(bundled_names())


def test_a_name_stands_for_a_bundled_profile_where_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("h100-node", "h100-node.json"):
        with pytest.warns(UserWarning, match=rf"{text}: no such file here; using the profile of that name"):
            assert MachineProfile.load(text) == bundled_profile("h100-node")
    own = bundled_profile("a100-node").as_json() | {"name": "mine"}
    Path("h100-node.json").write_text(json.dumps(own))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MachineProfile.load("h100-node.json").name == "mine"
    with pytest.raises(ConfigError, match=r"h200: there is no such machine profile.*a100-node, h100-node"):
        MachineProfile.load("h200")
    with pytest.raises(ConfigError, match="there is no such machine profile"):
        MachineProfile.load(tmp_path / "h100-nodes.json")
    with pytest.raises(ConfigError, match="cannot read the machine profile"):
        MachineProfile.load(tmp_path)
