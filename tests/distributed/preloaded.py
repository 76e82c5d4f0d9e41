"""What the processes of the tests need, imported once; no thread is started by it."""

import torch

import tvmbridge.dispatch
import tvmbridge.distributed
import tvmbridge.frontend

__all__ = ["torch", "tvmbridge"]
