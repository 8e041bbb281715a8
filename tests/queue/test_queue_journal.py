"""What the journal promises: whole records come back, torn tails are cut off, damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl_queue.errors import JournalError
from streamrl_queue.events import Dropped, Event
from streamrl_queue.journal import Journal, read

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
    for event, record in list(journal.recover()):
        payload = bytes(journal.payload(record)) if record in journal._places else b""
        found.append((event, payload))
    journal.close()
    return found


def test_what_was_appended_comes_back_in_order_with_its_payload(tmp_path: Path) -> None:
    written = fill(tmp_path)
    assert reopen(tmp_path) == written
    assert [(event, bytes(payload)) for event, payload in read(tmp_path)] == written


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


def test_a_flipped_bit_before_the_tail_stops_recovery_and_names_the_place(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "00000001.segment"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"00000001.segment is damaged at byte 0"):
        reopen(tmp_path)


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
        list(read(tmp_path))
