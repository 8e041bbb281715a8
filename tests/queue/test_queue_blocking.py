"""The blocking twin of the client, seen by the thread that has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from streamrl_queue import BlockingTransferQueue, open_broker, work_flow
from streamrl_queue.errors import QueueError


def test_a_queue_that_is_used_after_its_block_says_that_it_was_closed(tmp_path: Path) -> None:
    def use(address: str) -> None:
        with BlockingTransferQueue.connect(address) as queue:
            queue.statistics().check()
        for _ in range(2):
            with pytest.raises(QueueError, match="this queue's session was closed"):
                queue.statistics()
            with pytest.raises(QueueError, match="this queue's session was closed"):
                queue.portal.start_soon(trio.sleep_forever)

    async def main() -> None:
        with trio.fail_after(20):
            async with open_broker(work_flow(), tmp_path, bind=f"ipc://{tmp_path}/q") as broker:
                await trio.to_thread.run_sync(use, broker.address)

    trio.run(main)
