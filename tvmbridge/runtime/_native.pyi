from typing import Any

import torch

class Watch:
    def __init__(
        self,
        dicts: tuple[dict[Any, Any], ...],
        objects: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        tensor_type: type[torch.Tensor],
    ) -> None: ...
    def unchanged(self) -> bool: ...

def versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]: ...
