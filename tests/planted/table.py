"""The tables of all planted mistakes, by name."""

from __future__ import annotations

from tests.planted.caches import CACHES
from tests.planted.compiled_code import COMPILED_CODE
from tests.planted.gpu import GPU
from tests.planted.graphs import GRAPHS
from tests.planted.plant import Plant
from tests.planted.serving import SERVING

PLANTS: dict[str, Plant] = {
    plant.name: plant for plant in (*GRAPHS, *COMPILED_CODE, *SERVING, *CACHES)
}
# Mistakes whose tests need a GPU.
ON_GPUS: dict[str, Plant] = {plant.name: plant for plant in GPU}
