"""The parts of `tierzero bench` on made-up figures, and its test files on a real folder."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tierzero.cli.values import sizes, wholes
from tierzero.errors import ConfigError
from tierzero.planner.machine import MachineProfile
from tierzero.profiling.bench import suspicion, timing
from tierzero.profiling.bench.adam import AdamReport, thread_counts
from tierzero.profiling.bench.collective import OPS, CollectiveReport, CollectiveRow
from tierzero.profiling.bench.compute import ComputeReport, DtypeFigures, MatmulFigure
from tierzero.profiling.bench.io import IoReport, IoRow, IoTarget, nearest
from tierzero.profiling.bench.link import LinkReport
from tierzero.profiling.bench.names import BlockDevice, block_device, cpu_model, kind_of, mount_of
from tierzero.profiling.bench.profile import machine_profile
from tierzero.profiling.bench.report import Results, lines
from tierzero.profiling.bench.requests import MeasuredFile, Point, _reads
from tierzero.profiling.bench.suspicion import Reread
from tierzero.profiling.bench.timing import Spread, rate, together

NVME = BlockDevice("nvme0n1", "ACME 9000", "NVMe drive", "ext4", False)
VIRTUAL = BlockDevice("vda", "", "virtual drive", "ext4", True)
KIB, MIB = 1 << 10, 1 << 20


def flat(value: float) -> Spread:
    return Spread(value, value, value, 1)


def test_grids_are_lists_with_commas() -> None:
    assert sizes("8MiB,256KiB, 1MiB,256KiB") == (256 * KIB, MIB, 8 * MIB)
    assert wholes("16,1, 8") == (1, 8, 16)
    for parse, text in ((sizes, "1MiB,much"), (sizes, ""), (wholes, "1,0"), (wholes, "4,-1"), (wholes, "1.5")):
        with pytest.raises(typer.BadParameter):
            parse(text)


def test_threads_are_powers_of_two_and_all_cores() -> None:
    assert [thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_rate_counts_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]

    def work(seconds: float) -> None:
        clock[0] += seconds
        calls[0] += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    slow = rate(lambda: work(2.0), 100.0, 7.0)
    assert (slow.median, slow.low, slow.high) == (50.0, 50.0, 50.0)
    assert 2 <= slow.samples == calls[0] - 2 <= 4, "a warm-up and one call to see how long they take"
    calls[0] = 0
    fast = rate(lambda: work(1e-4), 1.0, 0.05)
    assert fast.median == pytest.approx(1e4)
    assert calls[0] > 20 * fast.samples, "short calls are timed together"
    assert rate(lambda: work(2.0), 1.0, 0.0).samples == 1


def test_amounts_one_after_another_take_the_sum_of_their_times() -> None:
    assert together([(1.0, flat(1.0)), (3.0, flat(1.0))]).median == 1.0
    assert together([(1.0, flat(1.0)), (1.0, flat(3.0))]).median == pytest.approx(1.5)


@given(st.integers(1, 9), st.integers(0, 3))
def test_mixed_requests_read_and_write_every_block_in_turn(lap: int, start: int) -> None:
    numbers = range(2 * lap * start, 2 * lap * (start + 1))
    reads = [number % lap for number in numbers if _reads("mixed", number, lap)]
    assert sorted(reads) == list(range(lap))
    assert all(_reads("read", number, lap) and not _reads("write", number, lap) for number in numbers)


def test_caches_are_suspected_on_their_signs_alone() -> None:
    gb = 1e9
    assert suspicion.of_page_cache("/a", 9 * gb, 3 * gb) == (
        "/a: buffered reads came at 9.00 GB/s, with O_DIRECT at 3.00 GB/s: the page cache answered part of them; rely "
        "on the latter"
    )
    assert suspicion.of_page_cache("/a", 4 * gb, 3 * gb) is None
    said = suspicion.of_rereading("/a", Reread(64 * 10**6, 8 * gb, 2 * 10**9, 2 * gb))
    assert said is not None
    assert "64 MB read over and over come at 8.00 GB/s, all 2,000 MB at 2.00 GB/s" in said
    assert suspicion.of_rereading("/a", Reread(64 * 10**6, 2.5 * gb, 2 * 10**9, 2 * gb)) is None
    assert suspicion.of_rereading("/a", Reread(64 * 10**6, 8 * gb, 64 * 10**6, 2 * gb)) is None, "it is the whole file"
    assert suspicion.of_ceiling("/a", NVME, "read", 17 * gb) is not None
    assert suspicion.of_ceiling("/a", NVME, "read", 7 * gb) is None
    assert suspicion.of_ceiling("/a", VIRTUAL, "read", 17 * gb) is None
    disk = BlockDevice("sda", "", "hard disk", "xfs", False)
    assert "more than one hard disk can do" in (suspicion.of_ceiling("/a", disk, "write", gb) or "")
    assert suspicion.of_memory("/a", VIRTUAL, "read", 9 * gb, 8 * gb) is not None
    assert suspicion.of_memory("/a", VIRTUAL, "read", 7 * gb, 8 * gb) is None
    assert suspicion.of_memory("/a", NVME, "read", 9 * gb, 8 * gb) is None
    assert suspicion.of_memory("/a", VIRTUAL, "read", 9 * gb, None) is None
    assert "ended at 1.00 GB/s" in (suspicion.of_slowing("/a", 3 * gb, gb) or "")
    assert suspicion.of_slowing("/a", gb, 3 * gb) is None
    tmpfs = BlockDevice("tmpfs", "", "unknown", "tmpfs", False)
    assert "lies in memory" in (suspicion.of_file_system("/a", tmpfs) or "")
    assert suspicion.of_file_system("/a", NVME) is None
    assert "several paths lie on vda" in (suspicion.of_shared_drive(["vda", "nvme0n1", "vda"]) or "")
    assert suspicion.of_shared_drive(["vda", "vdb"]) is None


def test_parts_are_named_from_proc_and_sys(tmp_path: Path) -> None:
    mounts = "/dev/vda / ext4 rw 0 0\n/dev/nvme0n1p2 /mnt/a\\040b xfs rw 0 0\ntmpfs /mnt/a\\040b/c tmpfs rw 0 0\n"
    assert mount_of("/home/x", mounts) == ("/dev/vda", "ext4")
    assert mount_of("/mnt/a b/d", mounts) == ("/dev/nvme0n1p2", "xfs")
    assert mount_of("/mnt/a b/c", mounts) == ("tmpfs", "tmpfs")
    assert mount_of("/mnt/a bc", mounts) == ("/dev/vda", "ext4")
    assert cpu_model("processor\t: 0\nmodel name\t: Some  CPU @ 2GHz\n") == "Some CPU @ 2GHz"
    kinds = [kind_of(name, True) for name in ("nvme0n1", "sda", "vda", "md0")]
    assert kinds == ["NVMe drive", "hard disk", "virtual drive", "block device"]
    assert kind_of("sda", False) == "SCSI or SATA drive"
    found = block_device(tmp_path)
    assert found.name
    assert found.file_system in {line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}


def test_the_nearest_point_is_past_the_page_cache() -> None:
    points = [
        ("read", Point(direct, block, depth)) for direct in (False, True) for block, depth in ((4096, 1), (MIB, 8))
    ]
    assert nearest(points, "read", 8 * MIB, 8) == ("read", Point(True, MIB, 8))
    assert nearest(points[:2], "read", 4096, 2) == ("read", Point(False, 4096, 1))


def test_the_file_holds_written_data_and_goes_away(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with suppress(ZeroDivisionError), MeasuredFile(paths, 3 * MIB, [64 * KIB, 256 * KIB], 3) as file:
        assert 0 < file.nbytes <= 3 * MIB
        file.fill(math.inf)
        contents = [path.read_bytes() for path in file.files]
        assert sum(map(len, contents)) == file.nbytes == file.filled
        for content in contents:
            assert all(any(content[at : at + 4096]) for at in range(0, len(content), 4096)), "a hole was left"
        for block in (64 * KIB, 256 * KIB):
            for op in ("write", "read", "mixed"):
                done = file.run(Point(file.has_direct, block, 3), op, 0.02)
                request = done.nbytes // len(done.latencies)
                assert request % (2 * block) == 0
                assert len(done.latencies) >= 3
                assert max(done.latencies) <= done.seconds
        assert file.reread(Point(file.has_direct, 64 * KIB, 3), MIB, 0.01).nbytes >= MIB
        raise ZeroDivisionError
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_a_slow_fill_leaves_less_to_measure(tmp_path: Path) -> None:
    with MeasuredFile([tmp_path], 64 * MIB, [64 * KIB], 2) as file:
        file.fill(0.0)
        assert file.filled == 2 * 2 * 64 * KIB
        assert file.run(Point(False, 64 * KIB, 2), "write", 0.0, at_least=MIB).nbytes >= MIB
        content = file.files[0].read_bytes()
        assert not any(content[file.filled :]), "it went beyond what was filled"


def _results(folder: Path) -> Results:
    point = Point(True, 8 * MIB, 8)
    rates = {"read": 3e9, "write": 2e9, "mixed": 2.5e9}
    rows = tuple(IoRow(op, point, flat(value), (0.01, 0.02, 0.03)) for op, value in rates.items())
    reread = Reread(64 * MIB, 3e9, 2 << 30, 3e9)
    targets = tuple(IoTarget((folder / n,), (NVME,), rows, reread, 2 << 30) for n in ("a", "b"))
    both = IoTarget((folder / "a", folder / "b"), (NVME, NVME), rows, reread, 2 << 30)
    figures = DtypeFigures(
        (MatmulFigure(64, 256, flat(1e12)), MatmulFigure(256, 256, flat(2e12))),
        {256: flat(1e12), 1024: flat(3e12)},
        {"add": (3.0, flat(1e10)), "gelu": (1.0, flat(1e10))},
        flat(1e6),
    )
    collectives = tuple(CollectiveRow(op, nbytes, flat(nbytes * 1e3)) for op in OPS for nbytes in (1 << 16, 1 << 20))
    return Results(
        "2026-01-02T03:04:05+00:00",
        IoReport((*targets, both), (8 * MIB, 8), ("a note",)),
        AdamReport(1 << 20, {1: flat(1e9), 2: flat(2e9)}, flat(4e9), ()),
        LinkReport(1 << 28, 2, flat(9e9), None, ()),
        ComputeReport("cpu", 2, {"bf16": figures}, ()),
        CollectiveReport("gloo", 2, 1, collectives, ()),
    )


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    profile = machine_profile(_results(tmp_path))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile.as_json()))
    loaded = MachineProfile.load(file)
    assert loaded == profile
    assert loaded.adam == {1: 1e9, 2: 2e9}
    assert loaded.gradients == 4e9
    assert [(drive.read, drive.write, drive.mixed) for drive in loaded.drives] == [(3e9, 2e9, 2.5e9)] * 2
    assert loaded.drives[0].name == f"ACME 9000 (nvme0n1, ext4) at {tmp_path / 'a'}"
    assert loaded.striped is not None
    assert loaded.compute["bf16"].attention_flops(256) == pytest.approx(1e12)
    assert loaded.compute["bf16"].matmul_flops(256, 256) == 2e12
    assert loaded.compute["bf16"].operation_s == 1e-6
    assert loaded.network is not None
    assert [(each.nbytes, each.rate) for each in loaded.network.all_reduce] == [(65536, 65536e3), (1 << 20, 1048576e3)]
    assert (loaded.device, loaded.host.copy_bytes, loaded.date[:10]) == (None, 9e9, "2026-01-02")


def test_every_figure_is_in_the_text_and_in_the_json(tmp_path: Path) -> None:
    results = _results(tmp_path)
    text = "\n".join(lines(results))
    for part in ("8 MiB", "10.0/20.0/30.0", "3.00", "Gparam/s", "host to host", "1,000", "all-reduce", "note  a note"):
        assert part in text, text
    value = json.loads(json.dumps(results.as_json()))
    assert set(value) == {"date", "machine", "io", "adam", "link", "compute", "collective", "notes"}
    assert value["io"]["targets"][0]["rows"][0]["latency_s"] == {"p50": 0.01, "p95": 0.02, "p99": 0.03}
    assert CollectiveReport.from_json(value["collective"], ()) == results.collective


def test_without_matplotlib_a_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierzero.profiling.bench import pictures

    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tierzero\[plot\]'"):
        pictures.check_drawable(tmp_path / "x.png")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tierzero.profiling.bench.pictures import check_drawable, draw

    check_drawable(tmp_path / "x.png")
    draw(_results(tmp_path), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="does not exist"):
        check_drawable(tmp_path / "nowhere" / "x.png")
