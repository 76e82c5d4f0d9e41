"""A pytest plugin that plants the mistake named by ``TVMBRIDGE_PLANT``, if any."""

from __future__ import annotations

import os

from tests.planted.plant import VARIABLE
from tests.planted.table import PLANTS

if os.environ.get(VARIABLE):
    PLANTS[os.environ[VARIABLE]].install()
