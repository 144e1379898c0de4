"""What `import trefoil` offers: from a device to an answer, and no more names than that takes."""

from __future__ import annotations

from device.agent import create as create_device
from device.agent import opened as opened_device
from device.agent import system_clock
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.report import HelperSetSeal, PlainSeal
from mpc_helpers.local.launcher import launched_helpers
from protocol.batch import BatchReader, BatchWriter
from protocol.helper_set import HelperSet
from protocol.keys import load_identity as load_site_key
from protocol.querier.blocking import ask
from protocol.querier.plot import plot_result
from protocol.querier.worth import QueryResult
from protocol.query import NoiseMode
from protocol.report import SealedReport

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
    "ask",
    "create_device",
    "launched_helpers",
    "load_site_key",
    "opened_device",
    "plot_result",
    "system_clock",
]
