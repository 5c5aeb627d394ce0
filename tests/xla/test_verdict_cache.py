"""Verdicts that were given before: what finds them again, and that the folder never stops anything."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from xla_b2t.xla.verdict import Verdict
from xla_b2t.xla.verdict_cache import VerdictCache, default_folder, key

VERDICT = Verdict(True, peak_bytes=5, text="HloModule step")
CIRCUMSTANCES = {"versions": {"libtpu": "0.0.21"}, "slice": ["v5e:2x4", {}], "num_replicas": 8}


def test_key_is_of_the_program_and_of_everything_besides():
    name = key(b"program", CIRCUMSTANCES)
    assert name == key(b"program", dict(reversed(CIRCUMSTANCES.items())))
    others = [
        key(b"another", CIRCUMSTANCES),
        key(b"program", {**CIRCUMSTANCES, "num_replicas": 4}),
        key(b"program", {**CIRCUMSTANCES, "slice": ["v5e:2x4", {"wrap": 1}]}),
        key(b"program", {**CIRCUMSTANCES, "versions": {"libtpu": "0.0.22"}}),
    ]
    assert len({name, *others}) == 5


def test_cache_gives_back_what_it_was_given_and_says_that_it_remembers(tmp_path):
    cache = VerdictCache(tmp_path / "new" / "folder")
    assert cache.find("a") is None
    cache.keep("a", VERDICT)
    assert cache.find("a") == replace(VERDICT, is_remembered=True)
    assert VerdictCache(tmp_path / "new" / "folder").find("a") == replace(VERDICT, is_remembered=True)
    assert cache.find("b") is None


def test_cache_with_a_damaged_file_goes_on_without_it_and_says_so_once(tmp_path, caplog):
    cache = VerdictCache(tmp_path)
    for name in ("a", "b"):
        cache.keep(name, VERDICT)
        next(tmp_path.glob(f"{name}.*")).write_bytes(b"damaged")
    assert (cache.find("a"), cache.find("b")) == (None, None)
    (said,) = caplog.messages
    assert said.startswith("a verdict of the TPU's compiler could not be read, so it is asked again: ")
    assert "a.verdict" in said
    cache.keep("a", VERDICT)
    assert cache.find("a") is not None


@pytest.mark.parametrize("find_first", [True, False])
def test_cache_that_cannot_be_written_to_goes_on_and_says_so_once(tmp_path, caplog, find_first):
    (tmp_path / "file").touch()
    cache = VerdictCache(tmp_path / "file" / "folder")  # a file in the way stops root too
    if find_first:
        assert cache.find("a") is None
    cache.keep("a", VERDICT)
    cache.keep("b", VERDICT)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_cache_drops_what_was_longest_not_asked_for(tmp_path):
    cache = VerdictCache(tmp_path)
    for age, name in enumerate(("a", "b", "c")):
        cache.keep(name, VERDICT)
        os.utime(tmp_path / f"{name}.verdict", ns=(age, age))
    (tmp_path / "d.verdict.partial").write_bytes(b"of a process that was killed")
    os.utime(tmp_path / "d.verdict.partial", ns=(3, 3))
    assert cache.find("a")
    size = (tmp_path / "a.verdict").stat().st_size
    VerdictCache(tmp_path, limit_bytes=2 * size).keep("e", VERDICT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.verdict", "e.verdict"]


def test_cache_is_where_the_users_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "xla_b2t" / "tpu_compiler"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_folder() == Path.home() / ".cache" / "xla_b2t" / "tpu_compiler"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "xla_b2t" / "tpu_compiler"
