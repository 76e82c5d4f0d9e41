import torch

TORCH_VERSION: str

def fill_mask(address: int, count: int, p: float, generator: torch.Generator) -> None: ...
