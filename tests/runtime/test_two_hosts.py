"""Two hosts, as torchrun sees them: network namespaces with addresses of their own, joined by its rendezvous."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..support.ranks import DEADLINE_S, ROOT, Job, run_ranks
from ..support.training import assert_identical

RUNS = {
    f"stage{stage}": {
        "recipe": {"steps": 4},
        "config": {
            "sharding": {"stage": stage},
            "placement": {"params": "nvme" if stage == 3 else "host", "optimizer": "nvme", "gradients": "host"},
        },
    }
    for stage in (0, 1, 2, 3)
}


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    number = os.getpid() % 200
    found = [
        Host(f"tz{os.getpid()}{end}", f"10.213.{number}.{index}", f"tz{os.getpid()}{end}")
        for index, end in ((1, "a"), (2, "b"))
    ]
    try:
        try:
            for host in found:
                ip("netns", "add", host.name)
            ip("link", "add", found[0].link, "type", "veth", "peer", "name", found[1].link)
            for host in found:
                ip("link", "set", host.link, "netns", host.name)
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
                ip("-n", host.name, "link", "set", host.link, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found
    finally:
        for host in found:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the ip command")
def test_two_hosts_train_as_one(hosts: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path / "job", RUNS, tmp_path / "nvme")
    path = job.write(rendezvous=False)
    for index, host in enumerate(hosts):
        launch = [
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-id", "two-hosts", "--rdzv-endpoint", f"{hosts[0].address}:29571", "--local-addr", host.address),
            *("--rdzv-conf", f"is_host={index == 0}"),  # both have this machine's name
            *("-m", "tests.support.rank_job", str(path)),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": host.link}
        with (job.folder / f"{index}.log").open("wb") as log:
            command = ["ip", "netns", "exec", host.name, sys.executable, *launch]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        job.processes.append(process)
    try:
        assert job.finish(DEADLINE_S) == [0, 0], job.output()
        found = job.results()
    finally:
        for process in job.processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    wanted = run_ranks(Job(tmp_path / "alone", RUNS, tmp_path / "nvme-alone"))
    for name in RUNS:
        assert_identical(found[name], wanted[name], name)
