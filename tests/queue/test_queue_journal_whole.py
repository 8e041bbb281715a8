"""A journal that lacks something in its middle is refused by name: only its very end may be unfinished."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from streamrl_queue.config import work_flow
from streamrl_queue.errors import JournalError
from streamrl_queue.journal import Journal
from streamrl_queue.store import Store

SEGMENT_BYTES = 1 << 13


def opened(path: Path) -> Store:
    journal = Journal(path, durability="flush", segment_bytes=SEGMENT_BYTES)
    store = Store(work_flow(), journal, clock=lambda: 0.0, wall=lambda: 0.0)
    try:
        store.recover()
    except BaseException:
        journal.close()
        raise
    return store


def filled(path: Path, *, finish: bool = False) -> list[Path]:
    """Some segments of rows, each put by itself; with `finish`, all are done but the last, and there are snapshots."""
    store = opened(path)
    for number in range(30):
        put, _, _ = store.rows.put(
            0.0, [f"k{number}"], ["e"], members=1, split="train", priority=0, sources={"s": number}
        )
        store.record(put, bytes([number + 1]) * 1000)
        if finish and number < 29:
            lease = store.rows.lease(0.0, "s", "work", rows=1)
            store.record(lease)
            assert lease is not None
            store.record(store.rows.write(0.0, "s", lease.lease, lease.rows, (), ()), b"x")  # type: ignore[union-attr]
            store.tidy()
    store.journal.close()
    segments = sorted(path.glob("*.segment"))
    return segments


def flip(file: Path, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (lambda file: file.unlink(), r"is missing or empty"),
    "emptied": (lambda file: file.write_bytes(b""), r"is missing or empty"),
    "last columns": (lambda file: flip(file, file.stat().st_size - 100), r"the columns in .* are damaged"),
    "cut short": (
        lambda file: file.write_bytes(file.read_bytes()[:-500]),
        r"the event at byte \d+ is damaged, and others",
    ),
}


# The first segment lies before a snapshot, and rows have columns in it; the second is behind it.
@pytest.mark.parametrize(("which", "how"), [(0, "gone"), (0, "emptied"), *((1, how) for how in DAMAGES)])
def test_a_sealed_segment_that_is_not_what_it_was_stops_the_broker_by_name(
    how: str, which: int, tmp_path: Path
) -> None:
    segment = filled(tmp_path / "j")[which]
    damage, said = DAMAGES[how]
    damage(segment)
    left = segment.read_bytes() if segment.exists() else None
    with pytest.raises(JournalError, match=said) as raised:
        opened(tmp_path / "j")
    assert segment.name in str(raised.value)
    assert (segment.read_bytes() if segment.exists() else None) == left, "nothing was cut or cleared"


def test_a_segment_that_was_cut_between_two_records_leaves_a_hole_that_is_noticed(tmp_path: Path) -> None:
    segment = filled(tmp_path / "j")[1]
    journal = Journal(tmp_path / "copy", durability="flush", segment_bytes=SEGMENT_BYTES)
    shutil.copy(segment, tmp_path / "copy" / "00000001.segment")
    ends = [record & 0xFFFFFFFF for _, record in journal.recover()]  # type: ignore[misc]
    journal.close()
    segment.write_bytes(segment.read_bytes()[: ends[-1]])
    with pytest.raises(JournalError, match="events are missing"):
        opened(tmp_path / "j")


def test_damaged_snapshots_are_kept_and_the_journal_says_what_it_lacks(tmp_path: Path) -> None:
    filled(tmp_path / "j", finish=True)
    snapshots = sorted((tmp_path / "j").glob("*.snapshot"))
    assert snapshots
    assert list((tmp_path / "j").glob("*.ledger")), "what came before is only in the ledger"
    for snapshot in snapshots:
        flip(snapshot, 40)
    with pytest.raises(JournalError, match=r"00000001\.segment.* is missing or empty.*no snapshot is whole"):
        opened(tmp_path / "j")
    assert sorted((tmp_path / "j").glob("*.snapshot")) == snapshots


def test_a_write_that_failed_at_the_end_of_a_segment_is_no_damage(tmp_path: Path) -> None:
    """The disk was full for a moment; then a larger record came, which needed a segment of its own."""
    store = opened(tmp_path / "j")
    segment = store.journal._segments[1]
    segment.view[segment.end : segment.end + 100] = b"?" * 100
    put, _, _ = store.rows.put(0.0, ["k"], ["e"], members=1, split="train", priority=0, sources={})
    store.record(put, bytes(2 * SEGMENT_BYTES))
    store.journal.close()
    assert opened(tmp_path / "j").rows.statistics().tasks == 1


def test_a_snapshot_of_another_release_is_refused_with_a_word_about_it(tmp_path: Path) -> None:
    filled(tmp_path / "j", finish=True)
    newest = max((tmp_path / "j").glob("*.snapshot"))
    state = msgspec.msgpack.encode({"flow": "of another day"})
    newest.write_bytes(blake3(state).digest() + state)
    with pytest.raises(JournalError, match="written by another release of streamrl"):
        opened(tmp_path / "j")
