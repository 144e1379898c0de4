"""Policies of one's own: a class named on the command line, or an attribution function run on real devices."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.on_devices import OnDevices
from benchmarks.experiments.policies import DevicePolicy
from device.named_function import OURS, imported, named_function
from protocol.errors import TrefoilError


def own_policies(classes: Sequence[str], functions: Sequence[str]) -> tuple[DevicePolicy, ...]:
    """What `--policy` and `--function` name, in that order."""
    return (*map(policy_named, classes), *map(on_devices, functions))


def policy_named(name: str) -> DevicePolicy:
    """The policy of a class `module:Class`, made without arguments."""
    hint = "Name a class as module:Class; benchmarks/GUIDE.md has one."
    kind = imported(name, "policy", hint)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None)) and hasattr(kind, "system")):
        raise TrefoilError(f"{name} is no policy: it needs `system` and `run(world, matches)`", hint)
    try:
        policy: DevicePolicy = kind()
    except TypeError as error:
        raise TrefoilError(f"{name} cannot be made: {error}", hint) from None
    return policy


def on_devices(name: str) -> OnDevices:
    """An attribution function on real devices: one bucket, as the workloads have it, and two for slots."""
    return OnDevices(name, named_function(name), buckets=OURS[name].least_buckets if name in OURS else 1)
