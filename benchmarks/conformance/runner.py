"""Running scenarios against `device/`: a device for each, its calls in order, and every outcome that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.conformance.scenario import CONFIG, ScenarioConfig, as_object, load_json, python_options, whole
from device.browser import Browser, Page
from device.coins import DeviceCoins
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import StandardError
from device.impression import ImpressionOptions
from device.limits import DeviceLimits
from device.memory_store import MemoryStore
from device.report import PlainSeal
from device.storage import Store
from protocol.console import progress
from protocol.errors import TrefoilError

Outcome = list[int] | str | dict[str, str] | None
PlainDevice = Device[tuple[int, ...]]
MakeDevice = Callable[[Store, DeviceLimits, DeviceCoins, Callable[[], int]], PlainDevice]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One event of a scenario that gave something else than it must."""

    event: int
    kind: str
    seconds: int
    expected: Outcome
    actual: Outcome


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """How one scenario file went: passed when nothing differed and nothing broke."""

    name: str
    mismatches: tuple[Mismatch, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.mismatches and not self.error


def run_folder(folder: Path, make_device: MakeDevice | None = None) -> list[ScenarioResult]:
    """Every scenario in `folder`, in the order of their names."""
    if not folder.is_dir():
        raise TrefoilError(f"{folder} is not a folder", "Give the folder that holds the scenario files.")
    files = sorted(path for path in folder.glob("*.json") if path.name != CONFIG)
    if not files:
        raise TrefoilError(f"there are no scenario files in {folder}", "Scenarios are .json files with an event list.")
    config = ScenarioConfig.load(folder / CONFIG)
    results = []
    with progress("scenarios", len(files)) as advance:
        for path in files:
            results.append(run_file(path, config, make_device))
            advance(note=path.stem)
    return results


def run_file(path: Path, config: ScenarioConfig, make_device: MakeDevice | None = None) -> ScenarioResult:
    """One scenario on a device of its own. A file that cannot be understood fails by itself; the others go on."""
    try:
        scenario = as_object(load_json(path), path.name)
        mismatches = tuple(run_scenario(scenario, config, make_device or plain_device))
    except TrefoilError as error:
        return ScenarioResult(path.stem, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return ScenarioResult(path.stem, error=f"not a scenario: {type(error).__name__}: {error}")
    return ScenarioResult(path.stem, mismatches)


def run_scenario(scenario: Mapping[str, Any], config: ScenarioConfig, make_device: MakeDevice) -> Iterator[Mismatch]:
    """The events of one timeline, giving those that differ from what they must."""
    now = 0
    device = make_device(MemoryStore(debug=True), config.limits, config.coins, lambda: now)
    browser = ScenarioBrowser(device, Browser(device, lambda: now, config.limits))
    for number, raw in enumerate(scenario["events"], start=1):
        event = as_object(raw, f"event {number}")
        now = whole(event.pop("seconds"))
        kind = event.pop("event")
        expected = _expected(kind, event)
        actual = outcome(browser, kind, event)
        if event:
            raise TrefoilError(f"event {number} has unknown keys: {', '.join(sorted(event))}")
        if actual != expected:
            yield Mismatch(number, kind, now, expected, actual)


def plain_device(store: Store, limits: DeviceLimits, coins: DeviceCoins, clock: Callable[[], int]) -> PlainDevice:
    """The engine under test, without sealing."""
    return Device(store, PlainSeal(), clock=clock, limits=limits, coins=coins)


class ScenarioBrowser(NamedTuple):
    """What a scenario acts on: a device, and the browser before it."""

    device: PlainDevice
    browser: Browser[tuple[int, ...]]


def outcome(acts_on: ScenarioBrowser, kind: str, event: dict[str, Any]) -> Outcome:
    """What one call gives: a histogram, an error in the standard's words, or nothing."""
    try:
        return _call(acts_on, kind, event)
    except StandardError as error:
        return error.standard_name


def _call(acts_on: ScenarioBrowser, kind: str, event: dict[str, Any]) -> Outcome:
    device, browser = acts_on
    match kind:
        case "saveImpression":
            impression = ImpressionOptions(**python_options(event.pop("options")))
            browser.save_impression(_page(event), impression)
        case "measureConversion":
            conversion = ConversionOptions(**python_options(event.pop("options")))
            return list(browser.measure_conversion(_page(event), conversion))
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
            raise TrefoilError(f"unknown kind of event: {kind}")
    return None


def _expected(kind: str, event: dict[str, Any]) -> Outcome:
    if kind == "measureConversion":
        expected: Outcome = event.pop("expected")
        return [whole(number) for number in expected] if isinstance(expected, list) else expected
    error: Outcome = event.pop("expectedError", None)
    return error


def _page(event: dict[str, Any]) -> Page:
    """Scenarios name sites; a tab only where activation is meant."""
    return Page(_site(event), event.pop("intermediarySite", None), event.pop("topLevelTraversable", None))


def _site(event: dict[str, Any]) -> str:
    site: str = event.pop("site")
    return site
