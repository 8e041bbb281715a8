"""The queue's metrics for Prometheus: what a broker did since it started, and how its rows stand.

    broker ──► Counts ─┐
    rows, journal ─────┴─► families ──► page, at most once a second ──► GET /metrics

A page is made from counts that the broker keeps anyhow, never by a walk over rows. It is served by a task of the
broker's own event loop. The library's server makes a thread for every connection and bounds neither these nor their
time; here connections are few, slow ones are closed, and a flood of them waits in the kernel.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, get_args
from urllib.parse import urlsplit

import trio

from . import messages as m
from .errors import AddressError, ConfigError
from .events import Committed, Ended, Event, Granted, Put, Written
from .nonces import Reason
from .nursery import open_nursery
from .schema import STATUSES
from .store import Store
from .transport import is_local

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    from .broker import Asked, Broker, Handler

log = logging.getLogger(__name__)

PREFIX: Final = "streamrl_queue_"
STATES: Final = ("waiting", "ready", "parked", "leased", "trained", "done", "dropped", "dead")
# Why rows are dropped, as far as it is a label; every other reason, which any client may make up, is `other`.
DROPS: Final = ("stale", "straggler", "group_too_small", "journal_damage", *(s for s in STATUSES if s != "completed"))
OTHER: Final = "other"
# Upper bounds of the histogram of handling, in seconds.
BOUNDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0)

# Seconds for which a page is good: however many ask, the broker makes one a second.
PAGE_SECONDS: Final = 1.0
# Connections at a time, and how many the kernel keeps waiting.
MOST_CONNECTIONS: Final = 16
BACKLOG: Final = 16
# A connection's whole life in seconds: a scrape takes milliseconds.
CONNECTION_SECONDS: Final = 2.0
# Between two connections, in seconds: a flood of them may take a few per cent of the broker's time, no more.
ACCEPT_SECONDS: Final = 0.01
# After the system refused a connection (no file descriptors), seconds until the next.
RETRY_SECONDS: Final = 1.0
MOST_HEAD_BYTES: Final = 8192
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def check_metrics(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, once the library that metrics need is known to be there.

    Raises:
        ConfigError: the address is none, or other hosts can reach it; or the library is missing.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            "metrics need the module prometheus_client, which is not installed; pip install 'streamrl[metrics]', or "
            "leave the metrics out"
        ) from None
    try:
        parts = urlsplit(f"tcp://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None or parts.netloc != address or "@" in address:
        raise ConfigError(f"metrics address {address!r}: expected HOST:PORT, for example 127.0.0.1:9464")
    if not is_local(f"tcp://{address}"):
        raise ConfigError(
            f"metrics address {address} is reachable from other hosts, and a scrape has no key; use 127.0.0.1:{port}, "
            "and a Prometheus, a proxy or a tunnel on this host"
        )
    # Of its two addresses one: they would get two free ports.
    return ("127.0.0.1" if host == "localhost" else host), port


class Timing:
    """One kind of request: how many were answered, how long it took to look at them."""

    __slots__ = ("answered", "buckets", "seconds")

    def __init__(self) -> None:
        self.answered = 0
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """It was looked at once, for so long."""
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


class Counts:
    """What a broker did since it was watched. Its counters are keyed by stage (and cause, for rows that went back)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.put_rows = 0
        self.trained_rows = 0
        self.leases: Counter[tuple[str]] = Counter()
        self.leased_rows: Counter[tuple[str]] = Counter()
        self.redelivered_rows: Counter[tuple[str]] = Counter()
        self.written_rows: Counter[tuple[str]] = Counter()
        self.expired_leases: Counter[tuple[str]] = Counter()
        self.returned_rows: Counter[tuple[str, str]] = Counter()
        self.timings: dict[type, Timing] = {kind: Timing() for kind in get_args(m.Request)}

    def event(self, event: Event) -> None:
        """Count an event that is about to be folded."""
        match event:
            case Put():
                self.put_rows += len(event.rows)
            case Granted(stage=stage):
                rows = self._store.rows.rows
                self.leases[stage,] += 1
                self.leased_rows[stage,] += len(event.rows)
                self.redelivered_rows[stage,] += sum(rows[id].attempts.get(stage, 0) > 0 for id in event.rows)
            case Written(stage=stage):
                self.written_rows[stage,] += len(event.rows)
            case Ended(cause=cause):
                # Its last rows may have ended with their group.
                if (lease := self._store.rows.leases.get(event.lease)) is not None:
                    self.returned_rows[lease.stage, cause] += len(lease.rows.intersection(event.rows))
                    self.expired_leases[lease.stage,] += cause == "expired"
            case Committed():
                self.trained_rows += len(event.rows)

    def timed(self, kind: type, handler: Handler) -> Handler:
        """The handler, and how long it takes. One that raises has answered too."""
        timing = self.timings[kind]

        def handle(asked: Asked) -> Any:
            started = time.perf_counter()
            answer: Any = ()
            try:
                answer = handler(asked)
            finally:
                timing.add(time.perf_counter() - started)
                timing.answered += answer is not None
            return answer

        return handle


def families(broker: Broker, counts: Counts) -> Iterator[Metric]:
    """All metrics of the queue, by name. The values of every label come from here or from the flow."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    rows, journal, flow = broker.rows, broker.store.journal, broker.rows.flow
    standing = rows.statistics()
    stages = [stage.name for stage in flow.stages]
    waiting = broker.waiting

    def gauge(name: str, text: str, values: Mapping[tuple[str, ...], float] | float, *labels: str) -> Metric:
        return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)

    def counter(name: str, text: str, values: Mapping[tuple[str, ...], float] | float, *labels: str) -> Metric:
        return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), values)

    def by_stage(values: Counter[tuple[str]]) -> dict[tuple[str, ...], float]:
        return {(stage,): values[stage,] for stage in stages}

    yield gauge(
        "rows",
        "Rows by split and state; their sum is all rows that were ever put",
        {(split, state): n.get(state, 0) for split, n in standing.by_split.items() for state in STATES},
        "split",
        "state",
    )
    yield gauge(
        "stage_rows",
        "Rows by stage that are ready for it, parked for it, or leased by it",
        {
            (name, state): n
            for name, of in standing.stages.items()
            for state, n in (("ready", of.ready), ("parked", of.parked), ("leased", of.leased))
        },
        "stage",
        "state",
    )
    yield gauge("unstarted_rows", "Rows that no stage has worked on", flow.waiting_rows - rows.room())
    yield gauge("unstarted_rows_limit", "Above so many a put waits", flow.waiting_rows)
    drops = dict.fromkeys((*DROPS, OTHER), 0)
    for reason, n in standing.dropped.items():
        drops[reason if reason in DROPS else OTHER] += n
    yield counter(
        "dropped_rows",
        "Rows that were dropped since the journal began",
        {(reason,): n for reason, n in drops.items()},
        "reason",
    )
    yield counter(
        "dead_rows",
        "Rows that were lost too often since the journal began, by the stage that lost them",
        {(s,): sum(n for why, n in standing.dead.items() if why.startswith(f"{s}: ")) for s in stages},
        "stage",
    )
    yield counter("put_rows", "Rows that were put", counts.put_rows)
    yield counter("leases", "Leases that were granted", by_stage(counts.leases), "stage")
    yield counter("leased_rows", "Rows that were handed out", by_stage(counts.leased_rows), "stage")
    yield counter(
        "redelivered_rows", "Rows handed out after a lost delivery", by_stage(counts.redelivered_rows), "stage"
    )
    yield counter("written_rows", "Rows whose columns were written", by_stage(counts.written_rows), "stage")
    yield counter("trained_rows", "Rows in commits of steps", counts.trained_rows)
    yield counter("expired_leases", "Leases that ran out of time", by_stage(counts.expired_leases), "stage")
    causes = ("released", "expired", "session", "fenced")
    yield counter(
        "returned_rows",
        "Rows that went back unwritten, by what ended the lease",
        {(stage, cause): counts.returned_rows[stage, cause] for stage in stages for cause in causes},
        "stage",
        "cause",
    )
    yield gauge("sessions", "Clients that are connected", len(broker.sessions))
    asked = Counter(request.stage for request in waiting if isinstance(request, m.LeaseRows))
    yield gauge("waiting_leases", "Leases that wait for rows", {(s,): asked[s] for s in stages}, "stage")
    yield gauge("waiting_puts", "Puts that wait for room", sum(isinstance(r, m.PutTasks) for r in waiting))
    kinds = {kind.__name__: timing for kind, timing in counts.timings.items()}
    yield counter("requests", "Requests that were answered", {(k,): t.answered for k, t in kinds.items()}, "kind")
    handling = HistogramMetricFamily(
        PREFIX + "handling_seconds", "Time to look at a request; one that waits is looked at again", labels=["kind"]
    )
    for kind, timing in kinds.items():
        handling.add_metric([kind], list(_cumulative(timing.buckets)), timing.seconds)
    yield handling
    yield counter(
        "refusals", "Requests that were answered with an error", {(e,): n for e, n in broker.refused.items()}, "error"
    )
    strangers = broker.strangers.by_reason
    yield counter(
        "dropped_messages",
        "Messages that were not for this broker",
        {(reason,): strangers[reason] for reason in get_args(Reason)},
        "reason",
    )
    yield counter("journal_appended_bytes", "Bytes that were written to the journal", journal.appended_bytes)
    yield gauge("journal_bytes", "Bytes that the journal's segments hold", journal.size)
    yield gauge("journal_needed_bytes", "Bytes of columns that rows still need", journal.needed_bytes)
    yield gauge("journal_needed_bytes_limit", "Above so many a put waits", flow.budget_bytes)
    yield gauge("journal_segments", "Files of the journal, ledgers not counted", journal.segments)
    yield gauge(
        "snapshot_timestamp_seconds", "When the newest snapshot was written; 0: never", journal.snapshot_time() or 0.0
    )
    yield gauge("step", "Steps that the learner has committed", standing.step)
    yield gauge("version", "The committed policy version", standing.version)
    yield gauge("version_step", "The step of the committed version", standing.version_step)
    oldest = rows.oldest_birth()
    yield gauge(
        "oldest_lag_steps",
        "Steps that the learner has taken since the version of the oldest row on its way to it",
        0 if oldest is None else standing.step - oldest,
    )


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float] | float) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else (((), values),):
        family.add_metric(labels, value)
    return family


def _cumulative(buckets: Iterable[int]) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, n in zip((*map(str, BOUNDS), "+Inf"), buckets, strict=True):
        total += n
        yield bound, total


class Page:
    """What a scrape is answered with: made when it is asked for, and then good for `PAGE_SECONDS`."""

    def __init__(self, broker: Broker) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.registry import Collector

        counts = Counts(broker.store)
        broker.watch(counts.event, counts.timed)

        class Queue(Collector):
            def collect(self) -> Iterable[Metric]:
                return families(broker, counts)

        self._registry: CollectorRegistry = CollectorRegistry()
        self._registry.register(Queue())
        ProcessCollector(registry=self._registry)
        self._text = b""
        self._made = -PAGE_SECONDS

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        from prometheus_client import generate_latest

        now = trio.current_time()
        if now - self._made >= PAGE_SECONDS:
            self._text = generate_latest(self._registry)
            self._made = now
        return self._text


@asynccontextmanager
async def serve_metrics(broker: Broker, address: str | None) -> AsyncIterator[str | None]:
    """Answers `GET /metrics` at `HOST:PORT` until the block is left; yields the URL. Port 0 takes a free one.

    None in place of an address: nowhere.

    Raises:
        ConfigError: see `check_metrics`.
        AddressError: the address is taken.
    """
    if address is None:
        yield None
        return
    host, port = check_metrics(address)
    page = Page(broker)
    try:
        (listener,) = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        raise AddressError(f"metrics address {address}: cannot listen: {error.strerror or error}") from error
    bound = listener.socket.getsockname()[1]
    async with open_nursery() as nursery:
        nursery.start_soon(_listen, listener, page)
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}/metrics"
        nursery.cancel_scope.cancel()


async def _listen(listener: trio.SocketListener, page: Page) -> None:
    """Consumes connections; produces a task for each; waits for a free slot and the socket; unblocked by both."""
    slots = trio.Semaphore(MOST_CONNECTIONS)
    async with listener, open_nursery() as nursery:
        while True:
            await slots.acquire()
            try:
                stream = await listener.accept()
            except OSError as error:
                slots.release()
                log.warning("metrics: no connection: %s; trying again in %.0f s", error, RETRY_SECONDS)
                await trio.sleep(RETRY_SECONDS)
                continue
            nursery.start_soon(_connection, stream, page, slots.release)
            await trio.sleep(ACCEPT_SECONDS)


async def _connection(stream: trio.SocketStream, page: Page, release: Callable[[], object]) -> None:
    """One request, one response, and the end; or just the end, when its time is over."""
    try:
        with trio.move_on_after(CONNECTION_SECONDS):
            await stream.send_all(_response(await _head(stream), page))
    except (OSError, trio.BrokenResourceError) as error:
        log.debug("metrics: a connection broke: %s", error)
    finally:
        release()
        await trio.aclose_forcefully(stream)


async def _head(stream: trio.SocketStream) -> bytes:
    """The head of the request, as much of it as came and is allowed."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MOST_HEAD_BYTES:
        chunk = await stream.receive_some(MOST_HEAD_BYTES)
        if not chunk:
            break
        head += chunk
    return head


def _response(head: bytes, page: Page) -> bytes:
    words = head.partition(b"\r\n")[0].split(b" ")
    if b"\r\n\r\n" not in head or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _http("400 Bad Request", b"expected GET /metrics HTTP/1.1\n")
    if words[0] != b"GET":
        return _http("405 Method Not Allowed", b"expected GET\n", "Allow: GET\r\n")
    if words[1].partition(b"?")[0] != b"/metrics":
        return _http("404 Not Found", b"expected /metrics\n")
    try:
        return _http("200 OK", page.text())
    # The supervision edge of a scrape: the broker goes on without its metrics.
    except Exception:
        log.exception("metrics: no page")
        return _http("500 Internal Server Error", b"see the broker's log\n")


def _http(status: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}{more}\r\n".encode() + body
