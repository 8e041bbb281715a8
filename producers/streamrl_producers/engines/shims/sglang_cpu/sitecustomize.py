"""Imported first by SGLang's processes on a machine without a GPU: this directory leads their PYTHONPATH.

PyPI's torchvision is built for CUDA. Beside a torch for the CPU its operators do not load, and its import fails where
it registers fakes for two of them. Their schemas are declared before that; nothing calls them.
"""

import importlib.abc
import sys
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            # Kept: the declarations end with the library object.
            library: Any = torch.library
            _DeclareOperators.library = library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                _DeclareOperators.library.define(schema)


sys.meta_path.insert(0, _DeclareOperators())
