"""What a broker tells Prometheus: counts that agree with what was done, whoever asks and however."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
import trio
import trio.testing
import zmq
from prometheus_client.parser import text_string_to_metric_families

from streamrl_queue import Flow, QueueConfig, Task, TransferQueue, metrics, open_broker, training_flow, work_flow
from streamrl_queue.errors import AddressError, ConfigError, LeaseExpired, StreamRLError
from streamrl_queue.metrics import Page, check_metrics, serve_metrics
from streamrl_queue.nursery import run as run_trio

FLOW = work_flow(("work", "collect"))
# Much longer than anything here takes.
SECONDS = 60.0

Values = Mapping[tuple[str, frozenset[str]], float]


class Served(NamedTuple):
    """A broker, a client of it, and where its metrics are."""

    address: str
    queue: TransferQueue
    port: int

    async def connection(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def get(self, request: bytes) -> tuple[bytes, bytes]:
        """The head and the body of the response to these bytes."""
        async with await self.connection() as stream:
            await stream.send_all(request)
            return await response(stream)

    async def scrape(self) -> Values:
        head, body = await self.get(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        return values(body)


async def response(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    data = b""
    async for chunk in stream:
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


async def flood(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(b"x" * 65536)


def values(page: bytes) -> Values:
    """Name and label values → value."""
    return {
        (sample.name.removeprefix("streamrl_queue_"), frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def at(found: Values, name: str, *labels: str) -> float:
    return found[name, frozenset(labels)]


@asynccontextmanager
async def served(path: Path, flow: Flow = FLOW, key: bytes | None = None) -> AsyncIterator[Served]:
    with trio.fail_after(SECONDS):
        async with (
            open_broker(flow, path / "journal", bind=f"ipc://{path}/q", key=key) as broker,
            serve_metrics(broker, "127.0.0.1:0") as url,
            TransferQueue.connect(broker.address, key=key, name="tester") as queue,
        ):
            yield Served(broker.address, queue, urlsplit(url).port or 0)


def numbers(n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": list(range(n))})


def written(rows: Sequence[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"row": pa.array(rows, pa.uint64()), "y": [1.0] * len(rows)})


def test_a_scrape_counts_what_was_done_and_how_the_rows_stand(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as here:
            queue = here.queue
            await queue.put(numbers(6), keys=list("abcdef"))
            await queue.put(numbers(6), keys=list("abcdef"))
            async with TransferQueue.connect(here.address, name="lost") as other:
                assert await other.lease("work", rows=2) is not None
            again = await queue.lease("work", rows=5)
            assert again is not None
            await queue.write(again, written(again.ids[:3]))
            await queue.release(again, again.ids[3:4])
            await queue.drop(again, again.ids[4:], reason="straggler")
            with pytest.raises(LeaseExpired):
                await queue.write(again, written(again.ids[4:]))
            found, statistics = await here.scrape(), await queue.statistics()

            rows = {state: at(found, "rows", "train", state) for state in metrics.STATES}
            assert rows == {s: statistics.by_split["train"].get(s, 0) for s in metrics.STATES}
            assert sum(rows.values()) == statistics.tasks == at(found, "put_rows_total") == 6
            for name, stage in statistics.stages.items():
                assert at(found, "stage_rows", name, "ready") == stage.ready
                assert at(found, "written_rows_total", name) == stage.written
            assert at(found, "stage_rows", "collect", "ready") == 3
            assert (at(found, "leases_total", "work"), at(found, "leased_rows_total", "work")) == (2, 7)
            assert at(found, "redelivered_rows_total", "work") == 2
            assert at(found, "returned_rows_total", "work", "session") == 2
            assert at(found, "returned_rows_total", "work", "released") == 1
            assert at(found, "dropped_rows_total", "straggler") == 1
            assert at(found, "requests_total", "PutTasks") == 2
            assert at(found, "handling_seconds_count", "PutTasks") == 2
            assert at(found, "handling_seconds_bucket", "PutTasks", "+Inf") == 2
            assert at(found, "handling_seconds_sum", "PutTasks") > 0
            assert at(found, "refusals_total", "LeaseExpired") == 1
            assert at(found, "sessions") == 1
            assert (
                at(found, "journal_bytes") == at(found, "journal_appended_bytes_total") == await queue.journal_bytes()
            )
            assert at(found, "journal_needed_bytes") > 0
            assert at(found, "journal_segments") == 1
            assert at(found, "snapshot_timestamp_seconds") == 0
            assert at(found, "process_resident_memory_bytes") > 0

    run_trio(main)


def test_leases_that_ran_out_rows_that_died_and_requests_that_wait_are_counted(tmp_path: Path) -> None:
    flow = work_flow(("work", "collect"), seconds=0.2, max_deliveries=1)

    async def main() -> None:
        async with served(tmp_path, flow) as here, trio.open_nursery() as nursery:
            await here.queue.put(numbers(1))
            lease = await here.queue.lease("work", rows=1)
            assert lease is not None
            while not (await here.queue.statistics()).dead:
                # Each question is a round trip; the broker ends the lease on its own clock.
                await trio.lowlevel.checkpoint()
            async with TransferQueue.connect(here.address, name="waits") as other:

                async def wait() -> None:
                    await other.lease("collect", rows=1, wait=SECONDS)

                nursery.start_soon(wait)
                # The broker answers one connection in order: the lease waits there when this is answered.
                await trio.testing.wait_all_tasks_blocked()
                await other.statistics()
                found = await here.scrape()
                nursery.cancel_scope.cancel()
        assert at(found, "expired_leases_total", "work") == 1
        assert at(found, "returned_rows_total", "work", "expired") == 1
        assert at(found, "dead_rows_total", "work") == at(found, "rows", "train", "dead") == 1
        assert (at(found, "waiting_leases", "collect"), at(found, "waiting_leases", "work")) == (1, 0)
        assert at(found, "waiting_puts") == 0
        # The one that waits was looked at and not answered.
        assert at(found, "requests_total", "LeaseRows") == 1
        assert at(found, "handling_seconds_count", "LeaseRows") >= 2

    run_trio(main)


def test_a_training_flow_tells_its_step_its_versions_and_the_lag_of_the_oldest_row(tmp_path: Path) -> None:
    flow = training_flow(QueueConfig(max_staleness=2), rows_per_step=8)

    async def main() -> None:
        async with served(tmp_path, flow) as here:
            queue = here.queue
            await queue.put([Task(env="e", task={}, index=i) for i in range(2)])
            assert await queue.lease("rollout", rows=1) is not None
            await queue.commit(1, ())
            version = await queue.begin_version(1, None)
            await queue.commit_version(version, "digest")
            found = await here.scrape()
            assert (at(found, "step"), at(found, "version"), at(found, "version_step")) == (1, version, 1)
            assert at(found, "oldest_lag_steps") == 1
            assert at(found, "unstarted_rows") == 1
            assert at(found, "unstarted_rows_limit") == QueueConfig().waiting_rows

    run_trio(main)


def test_nobody_can_make_a_label_by_what_he_sends(tmp_path: Path) -> None:
    key = bytes(range(32))

    async def main() -> None:
        async with served(tmp_path, key=key) as here:
            with zmq.Context.instance().socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(here.address)
                for junk in (b"GET /made-up HTTP/1.1", bytes(64)):
                    stranger.send(junk)
                while (await here.queue.protocol_errors())["total"] < 2:
                    await trio.lowlevel.checkpoint()
            async with TransferQueue.connect(here.address, key=key, role="made-up", name="made-up") as client:
                await client.put(numbers(2), keys=["made-up", "made-up-too"])
                for reason in ("made-up", "made-up-too"):
                    lease = await client.lease("work", rows=1)
                    assert lease is not None
                    await client.drop(lease, reason=reason)
                with pytest.raises(StreamRLError):
                    await client.lease("made-up", rows=1)
                with pytest.raises(StreamRLError):
                    await client.put(numbers(1), split="made-up")
                found = await here.scrape()
        assert at(found, "dropped_messages_total", "digest") == 2
        assert at(found, "dropped_rows_total", "other") == 2
        assert at(found, "refusals_total", "UnknownName") == 2
        assert not [labels for _, labels in found for label in labels if "made" in label]

    run_trio(main)


def test_one_page_a_second_is_made_however_many_ask(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with open_broker(FLOW, tmp_path / "journal", bind=f"ipc://{tmp_path}/q") as broker:
            page = Page(broker)
            before = page.text()
            event, _, _ = broker.rows.put(0.0, ["a"], [""], members=3, split="train", priority=0, sources={})
            broker.store.record(event)
            assert page.text() is before
            clock.jump(metrics.PAGE_SECONDS)
            assert at(values(page.text()), "put_rows_total") == 3

    trio.run(main, clock=clock)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x00\xff\x16\x03\x01 garbage\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics SMTP/1.1\r\n\r\n", b"400"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"405"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_a_request_that_is_no_scrape_is_told_so(request_: bytes, status: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as here:
            head, _ = await here.get(request_)
            assert head.split()[1] == status

    run_trio(main)


def test_idle_and_broken_connections_leave_the_broker_serving_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More idle connections than are looked at; none lives longer than its seconds."""

    async def main() -> None:
        monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 0.3)
        async with served(tmp_path) as here, AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(await here.connection()) for _ in range(metrics.MOST_CONNECTIONS)]
            half = await stack.enter_async_context(await here.connection())
            await half.send_all(b"GET /metrics HT")
            (await here.connection()).socket.close()
            await here.queue.put(numbers(2))
            lease = await here.queue.lease("work", rows=2)
            assert lease is not None
            await here.queue.write(lease, written(lease.ids))
            for stream in (*idle, half):
                assert await response(stream) == (b"", b"")
            monkeypatch.undo()
            assert at(await here.scrape(), "stage_rows", "collect", "ready") == 2

    run_trio(main)


def test_a_request_without_an_end_is_cut_off_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 10 * SECONDS)

    async def main() -> None:
        async with served(tmp_path) as here, await here.connection() as stream:
            with pytest.raises(trio.BrokenResourceError):
                await flood(stream)
            assert (await here.queue.put(numbers(1))).rows

    run_trio(main)


def test_connections_beyond_the_most_wait_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = peak = 0
    read = metrics._head

    async def counted(stream: trio.SocketStream) -> bytes:
        nonlocal taken, peak
        taken += 1
        peak = max(peak, taken)
        try:
            return await read(stream)
        finally:
            taken -= 1

    monkeypatch.setattr(metrics, "_head", counted)
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", SECONDS)
    monkeypatch.setattr(metrics, "ACCEPT_SECONDS", 0.0)

    async def main() -> None:
        async with served(tmp_path) as here:
            idle = [await here.connection() for _ in range(metrics.MOST_CONNECTIONS + 3)]
            await trio.testing.wait_all_tasks_blocked()
            assert taken == metrics.MOST_CONNECTIONS
            for stream in idle:
                await stream.aclose()
            await here.scrape()
            assert peak == metrics.MOST_CONNECTIONS

    run_trio(main)


def test_a_page_that_cannot_be_made_is_the_scrapes_failure_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no page today")

    async def main() -> None:
        async with served(tmp_path) as here:
            monkeypatch.setattr(metrics, "families", broken)
            head, _ = await here.get(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert head.split()[1] == b"500"
            assert (await here.queue.put(numbers(1))).rows

    run_trio(main)
    assert "no page today" in caplog.text


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "192.168.1.5:9464", "example.com:80", "[::]:9464", "127.0.0.1.nip.io:1"]
)
def test_an_address_that_other_hosts_can_reach_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="reachable from other hosts"):
        check_metrics(address)


@pytest.mark.parametrize(
    "address", ["", "9464", "127.0.0.1", "localhost:http", "127.0.0.1:70000", "a@127.0.0.1:1", "::1"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        check_metrics(address)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[metrics\]'"):
        check_metrics("127.0.0.1:9464")


def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            served(tmp_path) as here,
            open_broker(FLOW, tmp_path / "other", bind=f"ipc://{tmp_path}/p") as broker,
            serve_metrics(broker, f"127.0.0.1:{here.port}"),
        ):
            pass

    with pytest.raises(AddressError, match=r"metrics address 127\.0\.0\.1:\d+: cannot listen"):
        run_trio(main)
