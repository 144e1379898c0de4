"""Run a standard's scenarios against the device: `trefoil conformance`.

A scenario is a JSON timeline of calls with the expected outcome of each; a folder of them shares limits and fixed coins
(CONFIG.json). Each scenario runs on a new device. An unknown event, key or option fails its scenario, so that none
passes because part of it was not understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from device.conversion import ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.errors import StandardError
from device.events import ImpressionOptions
from device.limits import DeviceLimits
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from device.stores.storage import Store
from device.web.browser import Browser, Page
from device.web.dictionaries import Options, member_names, read_options
from protocol.cli.console import err, progress, say, write_json
from protocol.cli.options import JsonFile
from protocol.errors import ErrorKind, TrefoilError

CONFIG = "CONFIG.json"

# Limits by the standard's names.
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
    "activationSeconds": "activation_seconds",
}
# In the order of `DeviceCoins`.
_COINS = ("epochStart", "fairlyAllocateCreditFraction")
_DEFAULT_COIN = 0.5


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """The limits and fixed coins of a folder of scenarios."""

    limits: DeviceLimits
    coins: DeviceCoins

    @classmethod
    def load(cls, path: Path) -> ScenarioConfig:
        """Load a CONFIG.json. Missing settings, or a missing file, mean the defaults."""
        given = as_object(load_json(path), str(path)) if path.exists() else {}
        unknown = set(given) - set(_LIMITS) - set(_COINS) - {"aggregationServices"}
        if unknown:
            err.print(f"warning: {path} has unknown settings: {', '.join(sorted(unknown))}", highlight=False)
        values: dict[str, Any] = {_LIMITS[name]: whole(value) for name, value in given.items() if name in _LIMITS}
        if "aggregationServices" in given:
            values["aggregation_services"] = frozenset(given["aggregationServices"])
        coins = (float(given.get(name, _DEFAULT_COIN)) for name in _COINS)
        return cls(DeviceLimits(**values), DeviceCoins(*(_constant(coin) for coin in coins)))


def load_json(path: Path) -> object:
    """Return the parsed JSON of a file, or raise an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        kind = ErrorKind.FILE_UNREADABLE if isinstance(error, OSError) else ErrorKind.MALFORMED
        raise TrefoilError(f"cannot read {path}: {error}", kind=kind) from None


def as_object(value: object, what: str) -> dict[str, Any]:
    """Return a JSON object without its comments."""
    if not isinstance(value, dict):
        raise TrefoilError(f"{what} must be an object, not {type(value).__name__}", kind=ErrorKind.WRONG_TYPE)
    return {key: item for key, item in value.items() if key != "$comment"}


def whole(value: object) -> int:
    """Return a JSON number as an integer: 5.0 is 5."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _constant(coin: float) -> Callable[[], float]:
    return lambda: coin


Outcome = list[int] | str | dict[str, str] | None
PlainDevice = Device[tuple[int, ...]]
PlainBrowser = Browser[tuple[int, ...]]
MakeDevice = Callable[[Store, DeviceLimits, DeviceCoins, Callable[[], int]], PlainDevice]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One event of a scenario whose outcome was not the expected one."""

    event: int
    kind: str
    seconds: int
    expected: Outcome
    actual: Outcome


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The outcome of one scenario file: passed if there was neither a mismatch nor an error."""

    name: str
    mismatches: tuple[Mismatch, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.mismatches and not self.error


def run_folder(folder: Path, make_device: MakeDevice | None = None) -> list[ScenarioResult]:
    """Run every scenario in `folder`, in the order of their names."""
    if not folder.is_dir():
        raise TrefoilError(f"{folder} is not a folder", "Give the folder of scenarios.", kind=ErrorKind.FILE_MISSING)
    files = sorted(path for path in folder.glob("*.json") if path.name != CONFIG)
    if not files:
        hint = "Scenarios are .json files with an event list."
        raise TrefoilError(f"there are no scenario files in {folder}", hint, kind=ErrorKind.TOO_FEW)
    config = ScenarioConfig.load(folder / CONFIG)
    results = []
    with progress("scenarios", len(files)) as advance:
        for path in files:
            results.append(run_file(path, config, make_device))
            advance(note=path.stem)
    return results


def run_file(path: Path, config: ScenarioConfig, make_device: MakeDevice | None = None) -> ScenarioResult:
    """Run one scenario on its own device. A malformed file is a failed result, not an exception."""
    try:
        scenario = as_object(load_json(path), path.name)
        mismatches = tuple(run_scenario(scenario, config, make_device or plain_device))
    except TrefoilError as error:
        return ScenarioResult(path.stem, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return ScenarioResult(path.stem, error=f"not a scenario: {type(error).__name__}: {error}")
    return ScenarioResult(path.stem, mismatches)


def run_scenario(scenario: Mapping[str, Any], config: ScenarioConfig, make_device: MakeDevice) -> Iterator[Mismatch]:
    """Run the events of one timeline and yield every mismatch."""
    now = 0
    device = make_device(MemoryStore(debug=True), config.limits, config.coins, lambda: now)
    browser = Browser(device, lambda: now, config.limits)
    for number, raw in enumerate(scenario["events"], start=1):
        event = as_object(raw, f"event {number}")
        now = whole(event.pop("seconds"))
        kind = event.pop("event")
        expected = _expected(kind, event)
        actual = outcome(device, browser, kind, event)
        if event:
            unknown = ", ".join(sorted(event))
            raise TrefoilError(f"event {number} has unknown keys: {unknown}", kind=ErrorKind.UNKNOWN_FIELD)
        if actual != expected:
            yield Mismatch(number, kind, now, expected, actual)


def plain_device(store: Store, limits: DeviceLimits, coins: DeviceCoins, clock: Callable[[], int]) -> PlainDevice:
    """Return the device under test, which does not seal its reports."""
    return Device(store, PlainSeal(), clock=clock, limits=limits, coins=coins)


def outcome(device: PlainDevice, browser: PlainBrowser, kind: str, event: dict[str, Any]) -> Outcome:
    """Return the outcome of one call: a histogram, the standard's name of an error, or None."""
    try:
        return _call(device, browser, kind, event)
    except StandardError as error:
        return error.standard_name


def _call(device: PlainDevice, browser: PlainBrowser, kind: str, event: dict[str, Any]) -> Outcome:
    match kind:
        case "saveImpression":
            browser.save_impression(_page(event), _options(ImpressionOptions, event))
        case "measureConversion":
            return list(browser.measure_conversion(_page(event), _options(ConversionOptions, event)))
        case "updateActivationTimestamp":
            browser.activations.user_acted(event.pop("topLevelTraversable"))
        case "clearImpressionsForSite":
            device.clear_impressions_for_site(_site(event))
        case "clearBrowsingHistoryForAttribution":
            device.clear_browsing_history(event.pop("sites"), forget_visits=event.pop("forgetVisits"))
        case "enableAPI":
            device.enable()
        case "disableAPI":
            device.disable()
        case _:
            raise TrefoilError(f"unknown event: {kind}", kind=ErrorKind.UNKNOWN_NAME)
    return None


def _options(kind: type[Options], event: dict[str, Any]) -> Options:
    """Return the call's options, as a page passes them. Unlike a page, a scenario may name no unknown one."""
    passed = as_object(event.pop("options"), "options")
    if unknown := passed.keys() - member_names(kind):
        raise TrefoilError(f"unknown options: {', '.join(sorted(unknown))}", kind=ErrorKind.UNKNOWN_FIELD)
    return read_options(kind, passed)


def _expected(kind: str, event: dict[str, Any]) -> Outcome:
    if kind == "measureConversion":
        expected: Outcome = event.pop("expected")
        return [whole(number) for number in expected] if isinstance(expected, list) else expected
    error: Outcome = event.pop("expectedError", None)
    return error


def _page(event: dict[str, Any]) -> Page:
    """Return the calling page. Scenarios name a tab only if they test activation."""
    return Page(_site(event), event.pop("intermediarySite", None), event.pop("topLevelTraversable", None))


def _site(event: dict[str, Any]) -> str:
    site: str = event.pop("site")
    return site


def show_results(results: Sequence[ScenarioResult], json_file: Path | None) -> bool:
    """Print every failure with its expected and actual outcome, then the counts; return whether all passed."""
    for result in results:
        if not result.passed:
            say(f"FAILED {result.name}", style="red")
        if result.error:
            say(f"  {result.error}")
        for miss in result.mismatches:
            say(f"  event {miss.event} ({miss.kind} at {miss.seconds} s)")
            say(f"    expected {json.dumps(miss.expected)}")
            say(f"    actual   {json.dumps(miss.actual)}")
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    document = {"passed": passed, "failed": failed, "scenarios": [asdict(result) for result in results]}
    write_json(json_file, document)
    say(f"{passed} passed, {failed} failed")
    return failed == 0


conformance = typer.Typer(help="Check the device against a standard's scenarios.", no_args_is_help=True)


@conformance.callback()
def conformance_group() -> None:
    """Check the device against a standard's scenarios."""


@conformance.command("w3c")
def conformance_w3c(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Scenario files, with their CONFIG.json.")],
    json_file: JsonFile = None,
) -> None:
    """Run every W3C Attribution scenario in DIR and show the mismatches; exit code 1 if there are any.

    Example: trefoil conformance w3c tests/data/scenarios
    """
    if not show_results(run_folder(folder), json_file):
        raise typer.Exit(1)
