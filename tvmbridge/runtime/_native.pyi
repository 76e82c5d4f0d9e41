from typing import Any

import torch

TORCH_VERSION: str

class Watch:
    def __init__(
        self,
        dicts: tuple[dict[Any, Any], ...],
        objects: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        places: tuple[tuple[dict[Any, Any], Any, Any], ...],
        functions: tuple[tuple[Any, Any, Any], ...],
        missing: Any,
    ) -> None: ...
    def unchanged(self) -> bool: ...

class Alike:
    def __init__(self, *tensors: torch.Tensor) -> None: ...
    def check(self, *tensors: Any) -> bool: ...

def versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]: ...
