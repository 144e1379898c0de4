"""Trefoil measures advertising without watching people: devices pay privacy budget for sealed reports, three helpers
add them up, and a querier gets one noisy histogram.

This module is the library, from a device to an answer; `trefoil` on a command line runs `main`. Each name is imported
when it is first used.

    with trefoil.launched_helpers(sites={"shop.example": ["shop.example"]}) as helpers:
        seal = trefoil.HelperSetSeal(helpers.helper_set)
        device = trefoil.Device(trefoil.MemoryStore(), seal, clock=trefoil.system_clock)

README.md has the whole example, `benchmarks/tutorial.ipynb` a tour.
"""

from __future__ import annotations

import gc
import importlib
import io
import sys

# As in `typing`, whose import, like that of `pathlib`, takes long enough for a Ctrl-C to arrive before `main`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from benchmarks.experiments.own_workload import SimulationResult, example_tables, simulate
    from device.agent import create as create_device
    from device.agent import opened as opened_device
    from device.agent import system_clock
    from device.conversion import AttributionRequest, ConversionOptions
    from device.device import Device
    from device.events import ImpressionOptions
    from device.limits import TREFOIL_SERVICE, DeviceLimits
    from device.report import HelperSetSeal, PlainSeal
    from device.stores.memory_store import MemoryStore
    from mpc_helpers.local.launcher import launched_helpers
    from protocol.batch import BatchReader, BatchWriter
    from protocol.errors import TrefoilError
    from protocol.helper_set import HelperSet
    from protocol.keys import load_identity as load_site_key
    from protocol.noise import NoiseMode
    from protocol.querier.query_folder import ask
    from protocol.querier.result import QueryResult, plot_result
    from protocol.report import SealedReport

    __version__: str

__all__ = [
    "TREFOIL_SERVICE",
    "AttributionRequest",
    "BatchReader",
    "BatchWriter",
    "ConversionOptions",
    "Device",
    "DeviceLimits",
    "HelperSet",
    "HelperSetSeal",
    "ImpressionOptions",
    "MemoryStore",
    "NoiseMode",
    "PlainSeal",
    "QueryResult",
    "SealedReport",
    "SimulationResult",
    "TrefoilError",
    "__version__",
    "ask",
    "create_device",
    "example_tables",
    "launched_helpers",
    "load_site_key",
    "opened_device",
    "plot_result",
    "simulate",
    "system_clock",
]

# Where each name is defined: importing all of them at once would take a second that `trefoil --help` does not have.
_DEFINED_IN = {
    "AttributionRequest": "device.conversion:AttributionRequest",
    "BatchReader": "protocol.batch:BatchReader",
    "BatchWriter": "protocol.batch:BatchWriter",
    "ConversionOptions": "device.conversion:ConversionOptions",
    "Device": "device.device:Device",
    "DeviceLimits": "device.limits:DeviceLimits",
    "HelperSet": "protocol.helper_set:HelperSet",
    "HelperSetSeal": "device.report:HelperSetSeal",
    "ImpressionOptions": "device.events:ImpressionOptions",
    "MemoryStore": "device.stores.memory_store:MemoryStore",
    "NoiseMode": "protocol.noise:NoiseMode",
    "PlainSeal": "device.report:PlainSeal",
    "QueryResult": "protocol.querier.result:QueryResult",
    "SealedReport": "protocol.report:SealedReport",
    "SimulationResult": "benchmarks.experiments.own_workload:SimulationResult",
    "TREFOIL_SERVICE": "device.limits:TREFOIL_SERVICE",
    "TrefoilError": "protocol.errors:TrefoilError",
    "ask": "protocol.querier.query_folder:ask",
    "create_device": "device.agent:create",
    "example_tables": "benchmarks.experiments.own_workload:example_tables",
    "launched_helpers": "mpc_helpers.local.launcher:launched_helpers",
    "load_site_key": "protocol.keys:load_identity",
    "opened_device": "device.agent:opened",
    "plot_result": "protocol.querier.result:plot_result",
    "simulate": "benchmarks.experiments.own_workload:simulate",
    "system_clock": "device.agent:system_clock",
}


def __getattr__(name: str) -> object:
    """Import and return a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("trefoil")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'trefoil' has no attribute {name!r}")
    module, _, attribute = _DEFINED_IN[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise (ImportError(text) if (text := _hidden()) else error) from error


def __dir__() -> list[str]:
    return sorted([*__all__, "main"])


def _hidden() -> str:
    """Return which file hides a package of ours, if one does: their names are common words."""
    import importlib.util
    from pathlib import Path

    for package in ("protocol", "device", "mpc_helpers", "benchmarks"):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin and Path(spec.origin).resolve().parent.parent != Path(__file__).resolve().parent:
            return f"{spec.origin} hides Trefoil's own package `{package}`: rename it, or run from another folder"
    return ""


# More objects than the modules of any command make: collecting garbage among those took a fifth of its start.
_IMPORTED_OBJECTS = 150_000


def main() -> None:
    """Run the command of this process."""
    usual = gc.get_threshold()

    def collect_as_usual(_phase: str, _info: object) -> None:
        gc.callbacks.remove(collect_as_usual)
        gc.set_threshold(*usual)

    # Only the first collection is late: a device that answers on time cannot wait for one of so many objects.
    gc.callbacks.append(collect_as_usual)
    gc.set_threshold(_IMPORTED_OBJECTS)
    try:
        if text := _hidden():
            sys.exit(f"error: {text}")
        from protocol.cli.app import run
        from protocol.cli.stopping import interrupt_when_terminated

        interrupt_when_terminated()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A terminal that lacks ε, or a file name that is no UTF-8, must not stop a command.
                stream.reconfigure(errors="backslashreplace")
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        # While modules are imported, which takes seconds on a busy machine; `run` catches all others but a second one.
        sys.stderr.write("error: interrupted\nhint:  Run the command again.\n")
        sys.exit(130)
    finally:
        # As the process ends, Python would look for garbage among all of them once more.
        gc.freeze()


if __name__ == "__main__":
    main()
