from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.config import Config
from tierzero.data import TokenFile, TokenSource, TokenStream, open_data, permute
from tierzero.errors import ConfigError

U8 = np.dtype(np.uint8)


def text_file(path: Path, content: bytes) -> TokenFile:
    path.write_bytes(content)
    return TokenFile.open(path, U8, "data.path")


def source(path: Path, content: bytes, seq_len: int, batch: int, seed: int = 0) -> TokenSource:
    stream = TokenStream([text_file(path, content)], "data.path")
    return TokenSource(stream, seq_len=seq_len, batch_size=batch, vocab=256, seed=seed)


def config(**data: Any) -> Config:
    return Config.from_dict({"data": data, "train": {"seq_len": 8, "batch_size": 2}})


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 5))
def test_permutation_is_one(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


def test_permutation_depends_on_every_part_of_the_key_and_moves_things() -> None:
    base = permute(np.arange(1000), 1000, 1, 2)
    for other in ((1, 3), (2, 2), (2, 1), (1,)):
        assert (permute(np.arange(1000), 1000, *other) != base).mean() > 0.9
    assert (base != np.arange(1000)).mean() > 0.9
    assert abs(np.corrcoef(base, np.arange(1000))[0, 1]) < 0.15
    with pytest.raises(ValueError, match="positions"):
        permute(5, 5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.data())
def test_a_stream_is_its_files_one_after_another(tmp_path_factory: Any, sizes: list[int], data: Any) -> None:
    folder = tmp_path_factory.mktemp("stream")
    whole = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8).tobytes()
    files, at = [], 0
    for number, size in enumerate(sizes):
        files.append(text_file(folder / f"{number}", whole[at : at + size]))
        at += size
    stream = TokenStream(files, "data.path")
    assert len(stream) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert stream.read(start, count).tolist() == list(whole[start : start + count])
    part = stream.part(start, start + count)
    inner = data.draw(st.integers(0, count))
    assert part.read(inner, count - inner).tolist() == list(whole[start + inner : start + count])
    with pytest.raises(IndexError):
        part.read(inner, count - inner + 1)


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    files = [text_file(tmp_path / f"{number}", bytes([number])) for number in range(200)]
    stream = TokenStream(files, "data.path")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert [int(stream.read(number, 1)[0]) for number in range(200)] == list(range(200))
    assert len(os.listdir("/proc/self/fd")) - before <= 64


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (2, 6), (4, 1), (3, 2), (12, 1)])
def test_the_global_batch_does_not_depend_on_ranks_and_micro_batches(tmp_path: Path, world: int, micro: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    made = source(tmp_path / "a", content, 9, 12)
    for step in (0, 3, 40):
        whole = made.batch(step, 0, 12, 0, 1)
        share = 12 // world
        parts = [made.batch(step, k, micro, r, world) for r in range(world) for k in range(share // micro)]
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_every_window_is_seen_once_per_epoch_and_targets_follow_inputs(tmp_path: Path) -> None:
    content = bytes(range(200))
    made = source(tmp_path / "a", content, 8, 4)
    windows = (len(content) - 1) // 8
    for epoch in range(2):
        starts = []
        for number in range(epoch * windows, (epoch + 1) * windows):
            ids, targets = made.batch(number // 4, number % 4, 1, 0, 1)
            assert torch.equal(targets, ids + 1)
            assert ids.dtype == torch.int64
            starts.append(int(ids[0, 0]))
        assert len(set(starts)) == windows
        assert len({start % 8 for start in starts}) == 1


def test_another_seed_gives_another_order_and_the_same_seed_the_same(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    first, again, other = (source(tmp_path / "a", content, 16, 8, seed) for seed in (1, 1, 2))
    assert torch.equal(first.batch(5, 0, 8, 0, 1)[0], again.batch(5, 0, 8, 0, 1)[0])
    assert not torch.equal(first.batch(5, 0, 8, 0, 1)[0], other.batch(5, 0, 8, 0, 1)[0])


def test_validation_is_spread_and_the_same_for_every_number_of_ranks(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    made = source(tmp_path / "a", content, 16, 8)
    alone = torch.cat([made.spread(n, 4, 4, 0, 1)[0] for n in range(4)])
    four = torch.cat([made.spread(n, 2, 2, r, 4)[0] for n in range(2) for r in range(4)])
    assert torch.equal(alone, four)
    assert len({tuple(row.tolist()) for row in alone}) == 16


def test_default_corpus_is_this_pythons_library_with_files_apart() -> None:
    found = open_data(Config.from_dict({}))
    training = {file.path for file in found.train.stream.files}
    held_out = {file.path for file in found.validation.stream.files}
    assert not training & held_out
    assert len(found.train.stream) > 2_000_000
    assert len(found.validation.stream) > 50_000
    assert all("site-packages" not in path.parts and "test" not in path.parts for path in training | held_out)
    assert found.is_text


def test_own_text_keeps_its_end_apart(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 100)
    (tmp_path / "other.md").write_bytes(b"x")
    found = open_data(config(path=str(tmp_path / "*.txt")))
    assert len(found.train.stream) == 285
    assert found.validation.stream.read(0, 15).tolist() == [2] * 15
    apart = open_data(config(path=str(tmp_path / "0.txt"), validation=str(tmp_path / "1.txt")))
    assert (len(apart.train.stream), len(apart.validation.stream)) == (100, 100)


def test_a_path_with_pattern_signs_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_bytes(b"y" * 50)
    assert len(open_data(config(path=str(tmp_path / "a[1].txt"))).train.stream) == 41


@pytest.mark.parametrize(("dtype", "vocab"), [("uint16", 60000), ("uint32", 70000), ("auto", 60000), ("auto", 70000)])
def test_binary_tokens(tmp_path: Path, dtype: str, vocab: int) -> None:
    element = dtype if dtype != "auto" else ("uint16" if vocab <= 65536 else "uint32")
    tokens = np.random.default_rng(0).integers(0, vocab, 400).astype(element)
    tokens.tofile(tmp_path / "a.bin")
    values = {"data": {"path": str(tmp_path / "a.bin"), "dtype": dtype}, "model": {"vocab": vocab}}
    found = open_data(Config.from_dict({**values, "train": {"seq_len": 8}}))
    assert found.train.stream.read(0, 300).tolist() == tokens[:300].tolist()
    assert not found.is_text


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 300
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"token id 300 .*token 777.*model\.vocab = 256.*at least 301"):
        open_data(config(path=str(tmp_path / "a.bin")))


def test_a_token_that_the_scan_missed_is_caught_in_its_batch(tmp_path: Path) -> None:
    np.full(50, 300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    stream = TokenStream([TokenFile.open(tmp_path / "a.bin", np.dtype("<u2"), "data.path")], "data.path")
    with pytest.raises(ConfigError, match="token id 300"):
        TokenSource(stream, seq_len=8, batch_size=1, vocab=256, seed=0).batch(0, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("files", "data", "parts"),
    [
        ({}, {"path": "none.txt"}, ("data.path", "no such file", "none.txt")),
        ({}, {"path": "*.txt"}, ("data.path", "no file matches")),
        ({"a.txt": b""}, {"path": "a.txt"}, ("data.path", "a.txt", "empty")),
        ({"a.txt": b"", "b.txt": b""}, {"path": "*.txt"}, ("data.path", "all 2 files", "empty")),
        ({"a.txt": b"x" * 17}, {"path": "a.txt"}, ("data.path", "17 tokens are too few", "9 each", "data.validation")),
        ({"a.txt": b"x" * 8, "b.txt": b"x" * 99}, {"path": "a.txt", "validation": "b.txt"}, ("8 tokens", "takes 9")),
        ({"a.txt": b"x" * 99, "b.txt": b"x"}, {"path": "a.txt", "validation": "b.txt"}, ("data.validation", "takes 9")),
        ({"a.bin": b"x" * 33}, {"path": "a.bin"}, ("33 bytes", "uint16", "data.dtype")),
        ({"a.bin": b"x" * 64, "a.txt": b"x"}, {"path": "a.*"}, ("mixes", "a.bin", "a.txt")),
        ({"sub/a.txt": b"x"}, {"path": "sub"}, ("folder", "**/*.txt")),
    ],
)
def test_unusable_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    data: dict[str, str],
    parts: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_data(config(**data))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
