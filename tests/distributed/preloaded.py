"""Imports that all test processes need, done once before forking; they start no threads."""

import torch

import tvmbridge.dispatch
import tvmbridge.distributed
import tvmbridge.frontend

__all__ = ["torch", "tvmbridge"]
