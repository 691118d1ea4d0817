"""Directories of drivers: removed when they end, or by the next driver if nobody could."""

import tempfile
from pathlib import Path

import pytest

from kvspan.executor.meeting_place import MeetingPlace


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(directory: Path) -> Path:
    """What a driver leaves that was killed together with its fork-server."""
    path = directory / "kvspan-ranks-abc"
    path.mkdir()
    (path / "meet-0").touch()
    return path


def test_it_is_removed_in_the_end(own_tmp: Path) -> None:
    place = MeetingPlace()
    place.meeting(0).touch()
    place.close()
    assert list(own_tmp.iterdir()) == []


def test_what_nobody_holds_is_removed_by_the_next(own_tmp: Path) -> None:
    left = left_behind(own_tmp)
    MeetingPlace().close()
    assert not left.exists()


def test_what_somebody_holds_stays(own_tmp: Path) -> None:
    first = MeetingPlace()
    first.meeting(0).touch()
    MeetingPlace().close()
    assert first.meeting(0).exists()
    first.close()


def test_what_is_not_its_own_stays(own_tmp: Path) -> None:
    left = left_behind(own_tmp)
    (left / "thesis.txt").touch()
    link = own_tmp / "kvspan-ranks-link"
    link.symlink_to(left)
    MeetingPlace().close()
    assert (left / "thesis.txt").exists()
    assert link.is_symlink()
