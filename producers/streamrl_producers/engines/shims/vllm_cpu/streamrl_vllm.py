"""Receives weights inside vLLM's workers on a CPU, where none of vLLM's own ways to transfer them works.

Loaded by vLLM, by `--worker-extension-cls streamrl_vllm.Extension`, before it makes its transfer engine. The messages
have the fields of vLLM's NCCL engine, so that the other side need not know which of the two it talks to.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

SECONDS = 120.0  # a broadcast that does not come ends the update


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):
    """The group to join: rank 0 keeps its store at `master_address:master_port`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors of the next broadcasts, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine):
    """One broadcast per tensor, over Gloo."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        wait = timedelta(seconds=SECONDS)
        made: Any = dist
        store = made.TCPStore(init_info.master_address, init_info.master_port, init_info.world_size, False, wait)
        self.group = made.ProcessGroupGloo(store, rank, init_info.world_size, wait)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The inherited one ends with a synchronisation of an accelerator that is not there.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        tensors = []
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], options).wait()
            tensors.append((name, tensor))
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU a tied head keeps a packed copy of the embedding, which the reload leaves as it was.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)


class Extension:
    """Mixed into vLLM's workers; importing this module is what matters."""
