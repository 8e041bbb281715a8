"""The process group through which an engine process hands weights to its server's workers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

BUCKET_BYTES: Final = 64 << 20  # tensors of one call: large beside the call's cost, small beside the server's memory


def buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """`tensors` in parts of at most 64 MiB, in order; a larger tensor is a part of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


class ServerGroup:
    """Rank 0 of a Gloo group on this host whose other ranks are a server's workers."""

    def __init__(self, world: int, seconds: float) -> None:
        import torch.distributed as dist

        self.name = f"streamrl-{uuid.uuid4().hex}"
        self.world, self._timeout = world, timedelta(seconds=seconds)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self.port = int(self._store.port)
        self._group: Any = None

    def connect(self, prefixes: Sequence[str] = ()) -> None:
        """Return when all ranks are connected. `prefixes` are those under which the others use the store."""
        import torch.distributed as dist

        store: Any = self._store
        for prefix in prefixes:
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._group = dist.ProcessGroupGloo(store, 0, self.world, self._timeout)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors`, in order."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor.contiguous()], options).wait()
