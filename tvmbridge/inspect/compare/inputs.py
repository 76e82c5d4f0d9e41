"""Inputs of a comparison: what they are called."""

from __future__ import annotations

from tvmbridge.core.types import InputDescriptor, InputKind, OutputAlias


def title(descriptor: InputDescriptor) -> str:
    """The name of an input as users know it."""
    if descriptor.kind is InputKind.USER:
        return f"input {descriptor.position}"
    return descriptor.target or descriptor.name


def base_name(alias: OutputAlias) -> str:
    """The same for the base of an output that shares memory with an input."""
    return f"input {alias.key}" if alias.kind is InputKind.USER else str(alias.key)
