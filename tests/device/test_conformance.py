"""The standard's scenarios and ours pass, and each of ours fails on an engine with the bug that it is about."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import device.attribution
import device.conversion
import device.device
import device.report
import device.stores.memory_store
import protocol.units
from device.attribution import Award
from device.budget import (
    EpochLoss,
    FilterKind,
    FilterOwner,
    LossTerms,
    PrivacyFilter,
    capacities,
    charges_of,
    check_and_consume,
    epoch_loss,
)
from device.device import Device, Payment
from device.events import Impression, SavedImpression
from device.limits import DeviceLimits
from device.request import CheckedRequest, Match
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.web.browser import Activations
from device.web.conformance import CONFIG, ScenarioConfig, load_json, run_file, run_folder, show_results, whole
from device.weeks import Weeks
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import MICROS
from tests.support.raising import raises

OURS = Path(__file__).parents[1] / "data" / "scenarios"
STANDARD = Path(__file__).parents[3] / "shared" / "w3c" / "e2e-tests"
Patch = pytest.MonkeyPatch
Filters = Mapping[FilterOwner, PrivacyFilter]


def scenario_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.name != CONFIG) if folder.is_dir() else []


@pytest.mark.skipif(not STANDARD.is_dir(), reason="the standard's scenarios (../shared/w3c) are not here")
def test_the_standards_scenarios_pass() -> None:
    results = run_folder(STANDARD)
    assert len(results) >= 16
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("path", scenario_files(OURS), ids=lambda path: path.stem)
def test_our_scenarios_pass(path: Path) -> None:
    assert run_file(path, ScenarioConfig.load(OURS / CONFIG)).passed


@pytest.mark.parametrize("path", scenario_files(OURS) + scenario_files(STANDARD), ids=lambda path: path.stem)
def test_scenarios_pass_on_a_durable_store(path: Path, tmp_path: Path) -> None:
    """Every scenario passes on the database as it does in memory."""
    config = ScenarioConfig.load(path.parent / CONFIG)
    length = config.limits.epoch_length

    def durable(_store: object, limits: Any, coins: Any, clock: Callable[[], int]) -> Any:
        SqliteStore.create(tmp_path / "device.db", epoch_length=length, debug=True)
        store = SqliteStore.open(tmp_path / "device.db", epoch_length=length, clock=clock)
        return Device(store, device.report.PlainSeal(), clock=clock, limits=limits, coins=coins)

    assert run_file(path, config, durable).passed


# The mutants: engines with one bug each. A scenario that its mutant passes proves nothing.


def uncharged(kind: FilterKind) -> Callable[[Patch], None]:
    """Filters of this kind are neither checked nor charged."""

    def apply(patch: Patch) -> None:
        def charges(*arguments: Any) -> Any:
            return {owner: amount for owner, amount in charges_of(*arguments).items() if owner.kind is not kind}

        patch.setattr(device.device, "charges_of", charges)

    return apply


def unchecked(kind: FilterKind) -> Callable[[Patch], None]:
    """Filters of this kind pay without a check of their capacity."""

    def without_end(limits: DeviceLimits) -> dict[FilterKind, float]:
        return {**capacities(limits), kind: math.inf}

    return lambda patch: patch.setattr(device.device, "capacities", without_end)


def undeducted(kind: FilterKind) -> Callable[[Patch], None]:
    """Filters of this kind are checked but never deducted from."""

    def spendthrift(epoch: int, charges: Mapping[FilterOwner, int], filters: Filters, capacity: Any) -> bool:
        if not all(filters[owner].spent(epoch) + amount <= capacity[owner.kind] for owner, amount in charges.items()):
            return False
        for owner, amount in charges.items():
            if owner.kind is not kind:
                filters[owner].consume(epoch, amount)
        return True

    return lambda patch: patch.setattr(device.device, "check_and_consume", spendthrift)


def global_forgotten_after_first_deduction(patch: Patch) -> None:
    """The public simulator's defect: a missing value becomes NaN, and NaN passes every check."""

    def forgetful(epoch: int, charges: Mapping[FilterOwner, int], filters: Filters, capacity: Any) -> bool:
        everyone = FilterOwner(FilterKind.GLOBAL, "")
        if filters[everyone].spent(epoch) > 0:
            charges = {owner: amount for owner, amount in charges.items() if owner != everyone}
        return check_and_consume(epoch, charges, filters, capacity)

    patch.setattr(device.device, "check_and_consume", forgetful)


def pays_though_it_cannot(patch: Patch) -> None:
    """Deducts before it checks, and does not refund."""

    def rash(epoch: int, charges: Mapping[FilterOwner, int], filters: Filters, capacity: Any) -> bool:
        able = all(filters[owner].spent(epoch) + amount <= capacity[owner.kind] for owner, amount in charges.items())
        for owner, amount in charges.items():
            filters[owner].consume(epoch, min(amount, capacity[owner.kind] - filters[owner].spent(epoch)))
        return able

    patch.setattr(device.device, "check_and_consume", rash)


def rounds_down(patch: Patch) -> None:
    def loss(self: LossTerms, sensitivity: int) -> int:
        return math.floor(sensitivity / (self.query_sensitivity / self.epsilon) * MICROS)

    patch.setattr(LossTerms, "loss", loss)


def keyed_by_caller(patch: Patch) -> None:
    original = Device._charge

    def charge(self: Any, conversion: CheckedRequest, match: Match, award: Award) -> Payment:
        return original(self, replace(conversion, site=conversion.caller), match, award)

    patch.setattr(Device, "_charge", charge)


def forgets_to_forget(patch: Patch) -> None:
    patch.setattr(MemoryStore, "raise_barrier", lambda self, moment: None)


def forgets_for_multi_epoch_windows_only(patch: Patch) -> None:
    """The early draft's slip: a window of one epoch never looks at the barrier."""
    original = Weeks.usable

    def usable(self: Any, calendar: Any, window: Any, now: int) -> Any:
        return list(window) if len(window) == 1 else original(self, calendar, window, now)

    patch.setattr(Weeks, "usable", usable)


def forgets_one_epoch_too_few(patch: Patch) -> None:
    original = MemoryStore.raise_barrier
    patch.setattr(MemoryStore, "raise_barrier", lambda self, moment: original(self, moment - 7 * 86_400))


def any_epsilon(patch: Patch) -> None:
    patch.setattr(device.conversion, "MAX_EPSILON", math.inf)
    patch.setattr(protocol.units, "MAX_MICROS", math.inf)


def reassigns_lost_credit(patch: Patch) -> None:
    original = device.attribution._all

    def inside(relevant: Mapping[int, Any]) -> list[Impression]:
        return [impression for impression in original(relevant) if impression.histogram_index < 2]

    patch.setattr(device.attribution, "_all", inside)


def drops_the_remainder(patch: Patch) -> None:
    def allocation(value: int, credit: Any, coins: object) -> list[int]:
        return [math.floor(value * share / sum(credit)) for share in credit]

    patch.setattr(device.attribution, "fair_allocation", allocation)


def gives_the_remainder_to_the_last(patch: Patch) -> None:
    def allocation(value: int, credit: Any, coins: object) -> list[int]:
        parts = [math.floor(value * share / sum(credit)) for share in credit]
        return [*parts[:-1], value - sum(parts[:-1])]

    patch.setattr(device.attribution, "fair_allocation", allocation)


def normalises_over_all_credit(patch: Patch) -> None:
    """Normalises by credit that no impression received."""
    original = device.attribution.fair_allocation

    def allocation(value: int, credit: Any, coins: Any) -> list[int]:
        padded = [*credit, *([1.0] * (3 - len(credit)))]
        return original(value, padded, [*coins, 0.5, 0.5])[: len(credit)]

    patch.setattr(device.attribution, "fair_allocation", allocation)


def draws_twice(patch: Patch) -> None:
    """Charges for one draw and reports another: the public simulator's second defect."""
    original = Device._charge

    def charge(self: Any, conversion: CheckedRequest, match: Match, award: Award) -> Payment:
        payment = original(self, conversion, match, award._replace(coins=[0.25] * len(award.coins)))
        if payment.output is None:
            return payment
        return Payment(payment.paid, device.attribution.attribute(conversion.function, match.relevant, award))

    patch.setattr(Device, "_charge", charge)


def site_pays_the_full_charge(patch: Patch) -> None:
    patch.setattr(device.device, "epoch_loss", lambda terms, **case: epoch_loss(terms, **{**case, "output": None}))


def everyone_pays_the_actual_report(patch: Patch) -> None:
    def cheap(terms: LossTerms, **case: Any) -> EpochLoss:
        loss = epoch_loss(terms, **case)
        return EpochLoss(loss.site, loss.site)

    patch.setattr(device.device, "epoch_loss", cheap)


def all_or_nothing(patch: Patch) -> None:
    """One epoch without budget takes all the others with it."""
    original = Device._attribute

    def attribute(self: Any, conversion: CheckedRequest, match: Match, payment: Payment, award: Award) -> Any:
        kept = payment if set(match.sites) <= set(payment.paid) else Payment({}, payment.output)
        return original(self, conversion, match, kept, award)

    patch.setattr(Device, "_attribute", attribute)


def saves_while_off(patch: Patch) -> None:
    patch.setattr(MemoryStore, "set_enabled", lambda self, enabled: None)


def clearing_leaves_lists_open(patch: Patch) -> None:
    """An emptied list means any site."""

    def without(saved: SavedImpression, site: str) -> SavedImpression:
        return replace(
            saved,
            conversion_sites=saved.conversion_sites - {site},
            conversion_callers=saved.conversion_callers - {site},
        )

    patch.setattr(device.stores.memory_store, "_without", without)


def clearing_refunds(patch: Patch) -> None:
    original = MemoryStore.clear_caller

    def clear(self: MemoryStore, site: str) -> None:
        original(self, site)
        self._filters = {owner: ledger for owner, ledger in self._filters.items() if owner.site != site}

    patch.setattr(MemoryStore, "clear_caller", clear)


def ignores_priority(patch: Patch) -> None:
    patch.setattr(device.attribution, "_precedence", lambda impression: impression.time)


def asks_for_no_action(patch: Patch) -> None:
    patch.setattr(Activations, "check", lambda self, tab, host, acted=False: None)


def activations_never_expire(patch: Patch) -> None:
    original = Activations.__init__
    patch.setattr(Activations, "__init__", lambda self, clock, lifetime: original(self, clock, 10**9))


def an_action_is_one_call(patch: Patch) -> None:
    original = Activations.check

    def check(self: Activations, tab: str, host: str, *, acted: bool = False) -> None:
        original(self, tab, host)
        self.closed(tab)

    patch.setattr(Activations, "check", check)


def an_open_tab_serves_any_site(patch: Patch) -> None:
    original = Activations.check
    patch.setattr(Activations, "check", lambda self, tab, host, acted=False: original(self, tab, "any.example"))


MUTANTS: list[tuple[str, str, Callable[[Patch], None]]] = [
    ("global-budget-across-sites", "no global check", unchecked(FilterKind.GLOBAL)),
    ("global-budget-across-sites", "no global budget", uncharged(FilterKind.GLOBAL)),
    ("global-budget-across-sites", "NaN", global_forgotten_after_first_deduction),
    ("quota-check", "no quota check", unchecked(FilterKind.IMPRESSION_SITE)),
    ("quota-check", "pays though it cannot", pays_though_it_cannot),
    ("quota-deduction", "no quota deduction", undeducted(FilterKind.IMPRESSION_SITE)),
    ("quota-deduction", "no quota", uncharged(FilterKind.IMPRESSION_SITE)),
    ("rounding-up", "rounds down", rounds_down),
    ("uneven-allocation", "drops the remainder", drops_the_remainder),
    ("uneven-allocation", "remainder to the last", gives_the_remainder_to_the_last),
    ("uneven-allocation", "normalises over all credit", normalises_over_all_credit),
    ("top-level-site-pays", "keyed by caller", keyed_by_caller),
    ("forgetting", "forgets to forget", forgets_to_forget),
    ("forgetting", "one epoch too few", forgets_one_epoch_too_few),
    ("forgetting", "not in windows of one epoch", forgets_for_multi_epoch_windows_only),
    ("forgetting-before-first-lookup", "forgets to forget", forgets_to_forget),
    ("epsilon-limit", "any epsilon", any_epsilon),
    ("lost-credit", "reassigns", reassigns_lost_credit),
    ("shared-filters-pay-in-full", "shared filters pay the actual report", everyone_pays_the_actual_report),
    ("one-draw", "draws twice", draws_twice),
    ("site-pays-the-actual-report", "site pays in full", site_pays_the_full_charge),
    ("dropped-epoch-alone", "all or nothing", all_or_nothing),
    ("measurement-off", "never off", saves_while_off),
    ("clearing-site-data", "emptied list means any site", clearing_leaves_lists_open),
    ("clearing-site-data", "refund", clearing_refunds),
    ("priority-and-order", "ignores priority", ignores_priority),
    ("activation", "asks for no action", asks_for_no_action),
    ("activation", "activations never expire", activations_never_expire),
    ("activation", "one call for each action", an_action_is_one_call),
    ("activation", "open to any site", an_open_tab_serves_any_site),
]


@pytest.mark.parametrize(
    ("scenario", "mutant", "apply"), MUTANTS, ids=[f"{name}: {mutant}" for name, mutant, _ in MUTANTS]
)
def test_a_broken_engine_fails_its_scenario(
    scenario: str, mutant: str, apply: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    apply(monkeypatch)
    result = run_file(OURS / f"{scenario}.json", ScenarioConfig.load(OURS / CONFIG))
    assert result.mismatches, f"{scenario} does not notice: {mutant}"
    assert not result.error


def test_every_scenario_has_a_mutant() -> None:
    assert {path.stem for path in scenario_files(OURS)} == {scenario for scenario, _, _ in MUTANTS}


def test_comments_are_ignored_anywhere_and_whole_floats_are_integers(tmp_path: Path) -> None:
    events = [
        {
            "seconds": 1.0,
            "site": "p.example",
            "event": "saveImpression",
            "options": {"histogramIndex": 1.0, "$comment": "x"},
        },
        {
            "seconds": 2,
            "$comment": ["a", "b"],
            "site": "a.example",
            "event": "measureConversion",
            "options": {"aggregationService": "trefoil", "histogramSize": 2, "value": 3.0, "maxValue": 4},
            "expected": [0.0, 3.0],
        },
    ]
    (tmp_path / "one.json").write_text(json.dumps({"$comment": "c", "events": events}))
    # Without a CONFIG.json the device's own limits hold, and the coins are 0.5.
    assert [result.passed for result in run_folder(tmp_path)] == [True]


def test_what_is_not_understood_fails_by_itself(tmp_path: Path) -> None:
    good = {"events": [{"seconds": 1, "event": "enableAPI"}]}
    files = {
        "bad-json": "{",
        "good": json.dumps(good),
        "list": "[]",
        "no-events": "{}",
        "unknown-event": json.dumps({"events": [{"seconds": 1, "event": "dance"}]}),
        "unknown-key": json.dumps({"events": [{"seconds": 1, "event": "enableAPI", "loudly": True}]}),
        "unknown-option": json.dumps(
            {
                "events": [
                    {"seconds": 1, "event": "saveImpression", "site": "a.example", "options": {"histogramIndexx": 1}}
                ]
            }
        ),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    results = {result.name: result for result in run_folder(tmp_path)}
    assert [name for name, result in results.items() if result.passed] == ["good"]
    assert all(result.error for name, result in results.items() if name != "good")


def test_config_warns_of_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONFIG).write_text('{"maxFun": 3, "maxCreditSize": 4}')
    assert ScenarioConfig.load(tmp_path / CONFIG).limits.max_credit_size == 4
    assert "maxFun" in capsys.readouterr().err


def test_config_without_a_maximum_lookback(tmp_path: Path) -> None:
    """The schema does not require it, nor the coins."""
    settings = load_json(OURS / CONFIG)
    assert isinstance(settings, dict)
    del settings["maxLookbackDays"], settings["epochStart"], settings["fairlyAllocateCreditFraction"]
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    config = ScenarioConfig.load(tmp_path / CONFIG)
    assert config.limits.max_lookback_days == 30
    assert (config.coins.epoch_start(), config.coins.credit()) == (0.5, 0.5)


def test_failures_show_expected_and_actual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {
        "seconds": 7,
        "site": "a.example",
        "event": "measureConversion",
        "options": {"aggregationService": "trefoil", "histogramSize": 2},
        "expected": [1, 0],
    }
    (tmp_path / "wrong.json").write_text(json.dumps({"events": [event]}))
    assert not show_results(run_folder(tmp_path), tmp_path / "out" / "results.json")
    output = capsys.readouterr().out
    assert "expected [1, 0]" in output
    assert "actual   [0, 0]" in output
    assert output.endswith("0 passed, 1 failed\n")
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (written["passed"], written["failed"]) == (0, 1)
    assert written["scenarios"][0]["mismatches"][0]["actual"] == [0, 0]


def test_an_empty_or_missing_folder_is_an_error(tmp_path: Path) -> None:
    with raises(ErrorKind.TOO_FEW, TrefoilError):
        run_folder(tmp_path)
    with raises(ErrorKind.FILE_MISSING, TrefoilError):
        run_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [True, 1.5, "1", None])
def test_not_whole(value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(value))):
        whole(value)
