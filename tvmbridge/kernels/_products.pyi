from collections.abc import Callable
from typing import Any

TORCH_VERSION: str

def register_products(usual: str, onednn: str, describe: Callable[[str], Any]) -> bool: ...
