"""How weights travel from the learner to the engines: the messages, the buckets and the process group.

A version is a `Manifest` of buckets. Each bucket is one contiguous run of bytes, broadcast whole and proven by
its digest. The learner is rank 0 of the transfer group; the engines follow.

    learner                          engine
    Prepare ───────────────────────► checks names and shapes, joins the group
    broadcast of every bucket ─────► staging memory; running requests go on
    Apply(probe) ──────────────────► digests, swap at a token boundary, probe; samples nothing from here
    commit_version in the queue
    Resume ────────────────────────► samples again, stamps the version
    Abort ─────────────────────────► forgets staging, or puts the weights before it back

torch is imported by the functions that need it, not by this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from blake3 import blake3

from .errors import DeadlineExceeded

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Backend = Literal["gloo", "nccl"]

# Large enough that the cost per broadcast does not matter, small enough to overlap gather and broadcast.
BUCKET_BYTES: Final = 32 << 20
# Members join within milliseconds of each other.
JOIN_POLL_SECONDS: Final = 0.005


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside a bucket: its name in the model, its torch dtype (`float32`), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Bucket(msgspec.Struct, frozen=True):
    """Tensors that travel together; `digest` is the hexadecimal BLAKE3 of their bytes, in order."""

    tensors: tuple[TensorSpec, ...]
    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """What `version` consists of. `step` is the optimizer step it was made after, `parent` the version before it."""

    version: int
    step: int
    parent: int | None
    buckets: tuple[Bucket, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def digest(self) -> str:
        """One digest over all buckets, recorded with the version."""
        return blake3("".join(bucket.digest for bucket in self.buckets).encode()).hexdigest()


class Probe(msgspec.Struct, frozen=True):
    """A fixed sequence and the learner's log-probabilities of `tokens[1:]` (nats, temperature 1)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Check that this version fits, then join `group` at `store` as `rank` of `world` and receive the buckets."""

    manifest: Manifest
    group: str
    store: str
    rank: int
    world: int
    backend: Backend
    seconds: float


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The version fits and the engine is joining the group."""


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Wait for all buckets, check them, swap the weights at a token boundary, and answer with the probe's error."""

    version: int
    probe: Probe


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The weights are in; nothing is sampled until Resume. `probe_error` is the largest difference in nats."""

    version: int
    digests: tuple[str, ...]
    probe_error: float


class Resume(msgspec.Struct, frozen=True, tag=True):
    """The version is committed: sample again and stamp it."""

    version: int


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """Sampling goes on. `pause_seconds` is how long it stood still for this version."""

    pause_seconds: float


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The version will not exist: forget what was received, put the previous weights back, sample on."""

    version: int
    reason: str


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The engine is where it was before Prepare."""


WeightRequest = Prepare | Apply | Resume | Abort
WeightReply = Prepared | Applied | Resumed | Aborted


def plan(tensors: Iterable[TensorSpec], limit: int = BUCKET_BYTES) -> Iterator[tuple[TensorSpec, ...]]:
    """Group tensors into buckets of at most `limit` bytes, in order; a larger tensor gets a bucket of its own."""
    bucket: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        if bucket and size + spec_bytes(tensor) > limit:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(tensor)
        size += spec_bytes(tensor)
    if bucket:
        yield tuple(bucket)


def spec_bytes(spec: TensorSpec) -> int:
    """The size of a tensor in bytes."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def pack(specs: Sequence[TensorSpec], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of the named tensors, end to end, as one contiguous uint8 tensor."""
    import torch

    return torch.cat([state[spec.name].detach().contiguous().view(-1).view(torch.uint8) for spec in specs])


def unpack(specs: Sequence[TensorSpec], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside a packed `buffer`, as views where alignment allows, else as copies."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        part = buffer[start : start + spec_bytes(spec)]
        start += spec_bytes(spec)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors[spec.name] = part.view(dtype).view(spec.shape)
    return tensors


def buffer_digest(buffer: torch.Tensor) -> str:
    """The hexadecimal BLAKE3 of a packed bucket."""
    return blake3(buffer.cpu().numpy().data).hexdigest()


def host_store(host: str = "127.0.0.1") -> TCPStore:
    """A rendezvous store on a free port, for transfer groups; `store.port` tells which."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


class _Meeting:
    """The members of a group wait for each other at a store."""

    def __init__(
        self, store: Any, group: str, rank: int, world: int, seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        self._store = store
        self._group = group
        self._rank = rank
        self._world = world
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._should_stop = should_stop

    def all_are(self, what: str) -> None:
        """Say that this rank is `what`, and wait until all ranks have said so.

        Raises:
            DeadlineExceeded: naming the ranks that did not.
        """
        self._store.set(f"{what}/{self._rank}", "1")
        while absent := [rank for rank in range(self._world) if not self._store.check([f"{what}/{rank}"])]:
            if self._should_stop() or time.monotonic() > self._deadline:
                ranks = ", ".join(map(str, absent))
                source = f"transfer group {self._group}"
                raise DeadlineExceeded.waiting(f"ranks {ranks} of {self._world} to be {what}", source, self._seconds)
            time.sleep(JOIN_POLL_SECONDS)


class TransferGroup:
    """A process group of the learner (rank 0) and some engines, for as long as the members stay.

    It stands beside torch's default group, so that the learner's ranks keep theirs.
    """

    def __init__(
        self,
        store: str,
        group: str,
        rank: int,
        world: int,
        backend: Backend,
        seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join: returns when all `world` members have.

        Args:
            store: `host:port` of the rendezvous store that the learner hosts.
            group: a name that no other group at this store has had.
            rank: 0 for the learner.
            world: members in all.
            backend: `gloo` for CPU tensors, `nccl` for CUDA tensors.
            seconds: deadline of joining and of every broadcast.
            should_stop: asked while waiting for the others; when it says so the wait ends.

        Raises:
            DeadlineExceeded: naming the ranks that did not come.
        """
        import torch.distributed as dist

        host, port = store.rsplit(":", 1)
        timeout = timedelta(seconds=seconds)
        client = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        prefixed = dist.PrefixStore(group, client)  # type: ignore[attr-defined]
        meeting = _Meeting(prefixed, group, rank, world, seconds, should_stop)
        # The backends wait for absent members inside C++, where nothing can stop them: so nobody enters alone.
        meeting.all_are("here")
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, timeout)
        # A member that has its tensors leaves; its connections must not be half made for the others then.
        meeting.all_are("connected")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` from rank 0, or receive into it; returns when this side is done with it."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


class Circle:
    """The transfer group that a process is in. It is kept from one version to the next while its name stays."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._group: TransferGroup | None = None

    def join(self, store: str, group: str, rank: int, world: int, backend: Backend, seconds: float) -> TransferGroup:
        """The group of that name: the one this process is in, or a new one; see `TransferGroup`."""
        if self._name != group or self._group is None:
            self._group = None
            self._group = TransferGroup(store, group, rank, world, backend, seconds)
            self._name = group
        return self._group

    def leave(self, name: str) -> None:
        """After a failure: the group of that name is not used again."""
        if self._name == name:
            self._name = self._group = None
