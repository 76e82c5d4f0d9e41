"""Recall: code that an earlier process compiled serves a module that this process never captures.

A *plan* is what capture has observed and compilation has decided, as plain JSON beside the code. A
later process compares each observed fact with the module that is there, and binds the code to it.
Anything that cannot be described as data is captured as before.
"""

from tvmbridge.recall.caller import Caller
from tvmbridge.recall.recall import RECALLED, keep, recalled
from tvmbridge.recall.shared import SHARED, SharedPlans

__all__ = ["RECALLED", "SHARED", "Caller", "SharedPlans", "keep", "recalled"]
