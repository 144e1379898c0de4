"""Conformance: the standard's end-to-end scenarios, run against `device/`.

A scenario is a JSON timeline of calls with what each must give; a folder of them shares one `CONFIG.json` with the
limits and the coins. What is unknown in a scenario fails it, so that none passes because part was not understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from device.coins import DeviceCoins
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import StandardError
from device.impression import ImpressionOptions
from device.limits import DeviceLimits
from device.memory_store import MemoryStore
from device.report import PlainSeal
from device.storage import Store
from protocol.console import err, out, progress, write_json
from protocol.errors import TrefoilError

CONFIG = "CONFIG.json"
Outcome = list[int] | str | dict[str, str] | None
PlainDevice = Device[tuple[int, ...]]
MakeDevice = Callable[[Store, DeviceLimits, DeviceCoins, Callable[[], int]], PlainDevice]

# The standard's names of limits, and ours.
_LIMITS = {
    "globalPrivacyBudgetPerEpoch": "global_budget",
    "impressionSiteQuotaPerEpoch": "impression_site_quota",
    "perSitePrivacyBudget": "site_budget",
    "privacyBudgetEpochDays": "epoch_days",
    "maxConversionSitesPerImpression": "max_conversion_sites",
    "maxConversionCallersPerImpression": "max_conversion_callers",
    "maxImpressionSitesForConversion": "max_impression_sites",
    "maxImpressionCallersForConversion": "max_impression_callers",
    "maxCreditSize": "max_credit_size",
    "maxMatchValues": "max_match_values",
    "maxLookbackDays": "max_lookback_days",
    "maxHistogramSize": "max_histogram_size",
}
_COINS = {"epochStart": "epoch_start", "fairlyAllocateCreditFraction": "credit"}
_DEFAULT_COIN = 0.5


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One event of a scenario that gave something else than it must."""

    event: int
    kind: str
    seconds: int
    expected: Outcome
    actual: Outcome


@dataclass(frozen=True, slots=True)
class Result:
    """How one scenario file went: passed when nothing differed and nothing broke."""

    name: str
    mismatches: tuple[Mismatch, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.mismatches and not self.error


@dataclass(frozen=True, slots=True)
class Config:
    """The limits and fixed coins of a folder of scenarios."""

    limits: DeviceLimits
    coins: DeviceCoins

    @classmethod
    def load(cls, path: Path) -> Config:
        """From a CONFIG.json; what it leaves out is the default, and without the file everything is."""
        given = _object(load_json(path), str(path)) if path.exists() else {}
        unknown = set(given) - set(_LIMITS) - set(_COINS) - {"aggregationServices"}
        if unknown:
            err.print(f"warning: {path} has unknown settings: {', '.join(sorted(unknown))}", highlight=False)
        values: dict[str, Any] = {_LIMITS[name]: whole(value) for name, value in given.items() if name in _LIMITS}
        if "aggregationServices" in given:
            values["aggregation_services"] = frozenset(given["aggregationServices"])
        fixed = {ours: float(given.get(theirs, _DEFAULT_COIN)) for theirs, ours in _COINS.items()}
        return cls(DeviceLimits(**values), DeviceCoins(*(_constant(fixed[ours]) for ours in ("epoch_start", "credit"))))


def run_folder(folder: Path, make_device: MakeDevice | None = None) -> list[Result]:
    """Every scenario in `folder`, in the order of their names."""
    if not folder.is_dir():
        raise TrefoilError(f"{folder} is not a folder", "Give the folder that holds the scenario files.")
    files = sorted(path for path in folder.glob("*.json") if path.name != CONFIG)
    if not files:
        raise TrefoilError(f"there are no scenario files in {folder}", "Scenarios are .json files with an event list.")
    config = Config.load(folder / CONFIG)
    results = []
    with progress("scenarios", len(files)) as advance:
        for path in files:
            results.append(run_file(path, config, make_device))
            advance(note=path.stem)
    return results


def report_results(results: Sequence[Result], json_file: Path | None) -> bool:
    """Show every failure with what it must give and what it gave, then the count; whether all passed."""
    for result in results:
        if not result.passed:
            out.print(f"FAILED {result.name}", style="red", markup=False, highlight=False)
        if result.error:
            out.print(f"  {result.error}", markup=False, highlight=False)
        for miss in result.mismatches:
            out.print(f"  event {miss.event} ({miss.kind} at {miss.seconds} s)", markup=False, highlight=False)
            out.print(f"    expected {json.dumps(miss.expected)}", markup=False, highlight=False)
            out.print(f"    actual   {json.dumps(miss.actual)}", markup=False, highlight=False)
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    document = {"passed": passed, "failed": failed, "scenarios": [asdict(result) for result in results]}
    write_json(json_file, document)
    out.print(f"{passed} passed, {failed} failed", markup=False, highlight=False)
    return failed == 0


def run_file(path: Path, config: Config, make_device: MakeDevice | None = None) -> Result:
    """One scenario on a device of its own. A file that cannot be understood fails by itself; the others go on."""
    try:
        scenario = _object(load_json(path), path.name)
        mismatches = tuple(run_scenario(scenario, config, make_device or plain_device))
    except TrefoilError as error:
        return Result(path.stem, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Result(path.stem, error=f"not a scenario: {type(error).__name__}: {error}")
    return Result(path.stem, mismatches)


def run_scenario(scenario: Mapping[str, Any], config: Config, make_device: MakeDevice) -> Iterator[Mismatch]:
    """The events of one timeline, giving those that differ from what they must."""
    now = 0
    device = make_device(MemoryStore(), config.limits, config.coins, lambda: now)
    for number, raw in enumerate(scenario["events"], start=1):
        event = _object(raw, f"event {number}")
        now = whole(event.pop("seconds"))
        kind = event.pop("event")
        expected = _expected(kind, event)
        actual = outcome(device, kind, event)
        if event:
            raise TrefoilError(f"event {number} has unknown keys: {', '.join(sorted(event))}")
        if actual != expected:
            yield Mismatch(number, kind, now, expected, actual)


def plain_device(store: Store, limits: DeviceLimits, coins: DeviceCoins, clock: Callable[[], int]) -> PlainDevice:
    """The engine under test, without sealing."""
    return Device(store, PlainSeal(), clock=clock, limits=limits, coins=coins)


def outcome(device: PlainDevice, kind: str, event: dict[str, Any]) -> Outcome:
    """What one call gives: a histogram, an error in the standard's words, or nothing."""
    try:
        return _call(device, kind, event)
    except StandardError as error:
        return error.standard_name


def _call(device: PlainDevice, kind: str, event: dict[str, Any]) -> Outcome:
    match kind:
        case "saveImpression":
            impression = ImpressionOptions(**python_options(event.pop("options")))
            device.save_impression(_site(event), impression, intermediary=event.pop("intermediarySite", None))
        case "measureConversion":
            conversion = ConversionOptions(**python_options(event.pop("options")))
            report = device.measure_conversion(
                _site(event), conversion, intermediary=event.pop("intermediarySite", None)
            )
            return list(report)
        case "clearImpressionsForSite":
            device.clear_impressions_for_site(_site(event))
        case "clearBrowsingHistoryForAttribution":
            device.clear_browsing_history(event.pop("sites"), forget_visits=event.pop("forgetVisits"))
        case "enableAPI":
            device.enable()
        case "disableAPI":
            device.disable()
        case _:
            raise TrefoilError(f"unknown kind of event: {kind}")
    return None


def python_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The standard's camelCase options in Python names; comments go. An unknown one is refused by the dataclass."""
    named = {}
    for name, value in _object(options, "options").items():
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        exact = snake in {"epsilon", "credit"}
        named[snake] = value if exact else _wholes(value)
    return named


def load_json(path: Path) -> object:
    """A file's JSON, or an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrefoilError(f"cannot read {path}: {error}") from None


def whole(value: object) -> int:
    """JSON knows one kind of number: 5.0 is the integer 5."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _wholes(value: object) -> object:
    if isinstance(value, list):
        return [_wholes(item) for item in value]
    return whole(value) if isinstance(value, float) else value


def _expected(kind: str, event: dict[str, Any]) -> Outcome:
    if kind == "measureConversion":
        expected: Outcome = event.pop("expected")
        return [whole(number) for number in expected] if isinstance(expected, list) else expected
    error: Outcome = event.pop("expectedError", None)
    return error


def _site(event: dict[str, Any]) -> str:
    site: str = event.pop("site")
    return site


def _object(value: object, what: str) -> dict[str, Any]:
    """A JSON object without its comments."""
    if not isinstance(value, dict):
        raise TrefoilError(f"{what} must be an object, not {type(value).__name__}")
    return {key: item for key, item in value.items() if key != "$comment"}


def _constant(coin: float) -> Callable[[], float]:
    return lambda: coin
