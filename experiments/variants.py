"""Variants: one kernel with several knobs in a job, each a row of its own at every point.

An entry of Job.kernels is a kernel id, or for a variant the id, a space and the knobs that differ.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be run, with what to write instead."""


def kernel_id(entry: str) -> str:
    """The kernel of an entry of Job.kernels."""
    return entry.partition(" ")[0]


def variant_of(entry: str) -> str:
    """The knobs of an entry of Job.kernels, "" for the kernel as its file has it."""
    return entry.partition(" ")[2]


def expand_variants(
    variants: Mapping[str, Any], kernels: Mapping[str, dict[str, Any]], known: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Entry -> configuration of every variant of the chosen kernels.

    Args:
        variants: kernel id -> list of knobs, as conf/variants/ has them.
        kernels: the chosen kernels and their configurations; knobs that one has already are no
            variant of it.
        known: every kernel id there is.

    Raises:
        ConfigError: a variant of no kernel, not a list of knobs, or a class or name among them.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, listed in variants.items():
        if name not in known:
            raise ConfigError(f"variants.{name}: no such kernel; there are {sorted(known)}")
        for knobs in listed if isinstance(listed, list) else [None]:
            if not isinstance(knobs, dict) or not knobs:
                raise ConfigError(f"variants.{name} wants a list of knobs, as [{{key: value}}]")
            fixed = sorted({"_target_", "name"} & set(knobs))
            if fixed:
                raise ConfigError(f"variants.{name}: {fixed[0]} is no knob; add a kernel instead")
            if name in kernels and not knobs.items() <= kernels[name].items():
                text = " ".join(f"{key}={_override_text(value)}" for key, value in knobs.items())
                conf = {**kernels[name], **knobs}
                if conf not in entries.values():  # the same knobs in another order
                    entries[f"{name} {text}"] = conf
    return entries


def _override_text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
