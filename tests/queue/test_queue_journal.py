"""What the journal promises: whole records come back, torn tails are cut off, damage is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from streamrl_queue import audit
from streamrl_queue.errors import JournalError
from streamrl_queue.events import Dropped, Event
from streamrl_queue.journal import Damaged, Journal

SEGMENT_BYTES = 1 << 16


def fill(directory: Path, records: int = 5) -> list[tuple[Event, bytes]]:
    written: list[tuple[Event, bytes]] = []
    journal = Journal(directory, durability="flush", segment_bytes=SEGMENT_BYTES)
    assert list(journal.recover()) == []
    for i in range(records):
        written.append((Dropped(float(i), (i,), "test"), bytes([i]) * (i * 37)))
        journal.append(*written[-1])
    journal.close()
    return written


def reopen(directory: Path) -> list[tuple[Event, bytes]]:
    journal = Journal(directory, durability="flush", segment_bytes=SEGMENT_BYTES)
    found = []
    for entry in list(journal.recover()):
        assert not isinstance(entry, Damaged)
        found.append((entry[0], bytes(journal.payload(entry[1]))))
    journal.close()
    return found


def test_what_was_appended_comes_back_in_order_with_its_payload(tmp_path: Path) -> None:
    written = fill(tmp_path)
    assert reopen(tmp_path) == written
    assert [(entry.event, bytes(entry.payload or b"")) for entry in audit.events(tmp_path)] == written


def test_appending_goes_on_after_recovery(tmp_path: Path) -> None:
    written = fill(tmp_path)
    journal = Journal(tmp_path, durability="flush", segment_bytes=SEGMENT_BYTES)
    list(journal.recover())
    more = (Dropped(9.0, (9,), "more"), b"payload")
    journal.append(*more)
    journal.close()
    assert reopen(tmp_path) == [*written, more]


def test_a_record_torn_at_any_byte_is_cut_off_and_all_before_it_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = fill(tmp_path / "whole")
    whole = (tmp_path / "whole" / "00000001.segment").read_bytes()
    fill(tmp_path / "before", records=4)
    start = len((tmp_path / "before" / "00000001.segment").read_bytes())
    last = len(whole.rstrip(b"\0"))
    for cut in range(start, last):
        torn = tmp_path / f"cut{cut}"
        torn.mkdir()
        (torn / "00000001.segment").write_bytes(whole[:cut])
        assert reopen(torn) == written[:4], f"cut at byte {cut}"
    assert "incomplete record" in caplog.text


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_a_damaged_event_before_the_tail_stops_recovery_and_names_the_place(tmp_path: Path) -> None:
    fill(tmp_path)
    flip(tmp_path / "00000001.segment", 70)
    with pytest.raises(JournalError, match=r"00000001.segment: the event at byte 0 is damaged"):
        reopen(tmp_path)


def test_damaged_columns_stop_recovery_unless_it_is_told_to_give_them_up(tmp_path: Path) -> None:
    written = fill(tmp_path)
    data = (tmp_path / "00000001.segment").read_bytes()
    flip(tmp_path / "00000001.segment", data.index(bytes([2]) * 74) + 5)
    journal = Journal(tmp_path, durability="flush", segment_bytes=SEGMENT_BYTES)
    with pytest.raises(JournalError, match=r"columns in .*segment, byte \d+ are damaged \(Dropped of rows \(2,\)\)"):
        list(journal.recover())
    journal.close()
    journal = Journal(tmp_path, durability="flush", segment_bytes=SEGMENT_BYTES, recovery="skip")
    found = list(journal.recover())
    journal.close()
    assert [f.event if isinstance(f, Damaged) else f[0] for f in found] == [event for event, _ in written]
    assert [i for i, f in enumerate(found) if isinstance(f, Damaged)] == [2]


def test_a_full_disk_refuses_and_later_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fill(tmp_path)
    journal = Journal(tmp_path, durability="flush", segment_bytes=SEGMENT_BYTES)
    list(journal.recover())
    real = os.pwritev

    def full(fd: int, buffers: list[bytes], offset: int) -> int:
        real(fd, [buffers[0][:20]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match="No space left on device"):
        journal.append(Dropped(5.0, (5,), "refused"), b"x" * 1000)
    monkeypatch.setattr(os, "pwritev", real)
    more = (Dropped(6.0, (6,), "later"), b"y")
    journal.append(*more)
    journal.close()
    assert reopen(tmp_path) == [*written, more]


def test_recovery_starts_at_the_newest_whole_snapshot(tmp_path: Path) -> None:
    journal = Journal(tmp_path, durability="flush", segment_bytes=1 << 12)
    states = iter(f"state {n}".encode() for n in range(100))
    journal.dump = lambda: next(states)
    events = [Dropped(float(i), (i,), "x") for i in range(30)]
    records = [journal.append(event, bytes(500)) for event in events]
    last = records[-1] >> 32
    journal.close()

    def behind_snapshot() -> tuple[bytes | None, list[object]]:
        again = Journal(tmp_path, durability="flush", segment_bytes=1 << 12)
        state = again.snapshot()
        found = [f[0] for f in again.recover() if not isinstance(f, Damaged)]
        again.close()
        return state, found

    state, found = behind_snapshot()
    assert state == f"state {last - 2}".encode()
    assert found == [event for event, record in zip(events, records, strict=True) if record >> 32 >= last]
    flip(tmp_path / f"{last:08d}.snapshot", 33)
    state, found = behind_snapshot()
    assert state == f"state {last - 3}".encode()
    assert found == [event for event, record in zip(events, records, strict=True) if record >> 32 >= last - 1]


def test_segments_that_nobody_needs_are_deleted_and_the_ledger_remembers_their_events(tmp_path: Path) -> None:
    journal = Journal(tmp_path, durability="flush", segment_bytes=1 << 12)
    journal.dump = lambda: b"state"
    events = [Dropped(float(i), (i,), "x") for i in range(40)]
    records = []
    for i, event in enumerate(events):
        records.append(journal.append(event, bytes(500)))
        journal.need(records[-1])
        if i >= 3:
            journal.free(records[i - 3])
        journal.delete_unneeded()
    assert len(list(tmp_path.glob("*.segment"))) <= 4
    assert journal.size < 5 << 12
    assert [entry.event for entry in audit.events(tmp_path)] == events
    journal.close()


def test_records_larger_than_a_segment_get_a_segment_of_their_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path, durability="flush", segment_bytes=SEGMENT_BYTES)
    list(journal.recover())
    big = bytes(range(256)) * 1024
    record = journal.append(Dropped(0.0, (1,), "big"), big)
    assert bytes(journal.payload(record)) == big
    journal.append(Dropped(0.0, (2,), "small"))
    journal.close()
    assert len(list(tmp_path.glob("*.segment"))) == 2
    assert reopen(tmp_path)[0][1] == big


def test_an_empty_directory_is_not_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        list(audit.events(tmp_path))
