"""The pages of the dashboard, from one overview of the device. Reading them changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from device.conversion_event import SavedConversion
from device.dashboard import words
from device.dashboard.layout import Link, budget_bar, button_link, notice, page, section, table
from device.dashboard.markup import Markup, Node, tag
from device.dashboard.totals import AskerTotal, totals_by_intermediary, totals_by_site
from device.dashboard.words import Clockface, epsilon, plural
from device.epoch import EpochCalendar
from device.impression import SavedImpression
from device.limits import OwnSite
from device.overview import Overview
from device.privacy_filter import FilterKind, FilterState
from device.storage import EpochEntry, ReportRecord, Side
from protocol.epsilon import show

T = TypeVar("T")

SHOWN_ROWS = 50
_EXAMPLE = 250_000
LINKS = (
    ("Budgets", "#sites"),
    ("All sites together", "#everyone"),
    ("Who asked", "#askers"),
    ("What it means", "#meaning"),
    ("Reports", "#reports"),
    ("Impressions", "#impressions"),
    ("Conversions", "#conversions"),
    ("Controls", "#controls"),
)
# Reading aid only: the factors are e^0.1 and e^1, rounded up.
_MEANING = (
    "When a site measures whether its ads worked, your device answers with a sealed report. Reports of many people "
    "are added up, noise is put on the sum, and the site sees only that. Still, every answer says a little about you. "
    "That little is counted here in ε (epsilon), for every {length} and every site.",
    "Spending 0.1 ε can move the odds of any guess about that week by a factor of at most "
    + words.factor(100_000)
    + "; spending 1 ε, by at most "
    + words.factor(1_000_000)
    + ". When a budget is used up, your device goes on answering, but with empty reports. No site is told how much is "
    "left, and none can tell an empty report from a full one.",
    # An example with a number that a person can picture.
    "For example: somebody tosses a coin to guess whether you saw a certain ad in a week. That week pays {example}. "
    "Whatever the answer is, it cannot make the guess right with a chance above {sure}; a coin's is 50 %.",
    "This counts what one site can learn about what you did elsewhere. Twice as much is possible where a site "
    "{own_ads}asks how many reports were empty, or works together with those who showed you the ads. "
    "Sites that act on one another's answers are bounded only together: they learn at most {together} about a "
    "{length}. Whether two devices are both yours, a site can learn by two budgets of the one and one of the other.",
)
_REPORTS = (
    "Every call gives a report, whatever your device found: what you see here, the site does not. "
    "A report that cost nothing is empty."
)
_IMPRESSIONS = (
    "Ads that sites asked your device to remember. They never leave it: a report says at most which bucket of a "
    "histogram a purchase counts for, and only sealed."
)
_CONVERSIONS = (
    "Purchases and the like that a site asked your device to remember, so that the sites it names can learn, from "
    "reports of many people, which of their ads work. They never leave it either."
)
_ASKERS = (
    "A site's budget pays for every report asked for on its pages, also by others. An intermediary asks on the pages "
    "of many sites and can put their answers together: its total is what they have paid for it in one week."
)
_EVERYONE = "Limits that hold across sites, so that many of them cannot add up what each one may learn."
_MORE_THAN_TOTAL = (
    "These may add up to more than all sites together. A report can rest on ads that several sites showed: each of "
    "them is charged its whole cost, as any one of them might be behind it, while the total is charged once."
)
_SERVED = (
    "This page is served by your own machine to this browser alone. It holds no script and nothing from elsewhere."
)


def _asker_row(asker: AskerTotal) -> list[Node]:
    through = ", ".join(asker.others) or "none"
    return [asker.name, through, f"{asker.reports:,}", f"{asker.paid_for:,}", epsilon(asker.most)]


class OverviewPage:
    """One device as its person sees it. `done` says what a form has just changed; `all_rows` shows long lists whole;
    `way_back` is a link to where the person came from, and `steps` a bar of theirs.
    """

    def __init__(
        self,
        overview: Overview,
        clockface: Clockface,
        *,
        done: str = "",
        all_rows: bool = False,
        way_back: Link | None = None,
        steps: Node = None,
    ) -> None:
        self._steps = steps
        self._overview = overview
        self._clockface = clockface
        self._done = done
        self._all_rows = all_rows
        self._links = LINKS if way_back is None else (*LINKS, way_back)

    def render(self) -> str:
        """The whole page."""
        parts = [
            tag("h1", "What measurement has cost you"),
            self._status(),
            self._summary(),
            self._sites(),
            self._everyone(),
            self._askers(),
            self._meaning(),
            self._reports(),
            self._impressions(),
            self._conversions(),
            self._controls(),
            self._footer(),
        ]
        return page("Privacy dashboard", parts, links=self._links, below=self._steps)

    def _status(self) -> Node:
        on = self._overview.enabled
        state = tag("span", "Measurement is on" if on else "Measurement is off", class_=f"pill {'on' if on else 'off'}")
        debug = tag("span", "A debug device: its reports can be read", class_="pill off")
        told = notice(self._done) if self._done else None
        return [told, tag("p", state, " ", debug if self._overview.debug else None)]

    def _summary(self) -> Markup:
        overview = self._overview
        paying = {state.site for state in overview.filters if state.kind is FilterKind.SITE}
        spent, capacity = self._spent_now(), overview.limits.global_budget
        facts = [
            ("Reports released", f"{len(overview.reports):,}", "sealed; nobody can read one on its own"),
            ("Sites that were paid for", f"{len(paying):,}", "each has its own budget every week"),
            ("Spent this week", f"{epsilon(spent)}", f"of {epsilon(capacity)} for all sites together"),
            ("Impressions stored", f"{len(overview.impressions):,}", "ads you saw; only this device knows them"),
        ]
        cards = [
            tag("div", tag("dt", name), tag("dd", value), tag("dd", text, class_="words"), class_="card")
            for name, value, text in facts
        ]
        return tag("dl", cards, class_="cards")

    def _meaning(self) -> Markup:
        length = words.epoch_length_words(self._overview.limits.epoch_length)
        together = epsilon(2 * self._overview.limits.global_budget)
        own_ads = "counts ads on its own pages, " if self._overview.limits.own_site is OwnSite.COUNTED else ""
        said = {"length": length, "together": together, "own_ads": own_ads}
        example = {"example": epsilon(_EXAMPLE), "sure": words.sureness(_EXAMPLE)}
        paragraphs = [text.format(**said, **example) for text in _MEANING]
        return section("meaning", "What a spent budget means", [tag("p", text) for text in paragraphs])

    def _sites(self) -> Markup:
        states = sorted(self._of_kind(FilterKind.SITE), key=lambda state: state.site)
        cards = [self._site(site, list(group)) for site, group in groupby(states, key=lambda state: state.site)]
        capacity = epsilon(self._overview.limits.site_budget)
        explained = tag("p", f"A site may spend {capacity} of every week: the mark at the end of each bar.")
        nothing = tag("p", "No site has had anything from you yet.", class_="empty")
        return section("sites", "What each site has spent", explained, cards or nothing)

    def _site(self, site: str, states: Sequence[FilterState]) -> Markup:
        clear = button_link(f"Clear {site}…", f"clear-site?site={site}")
        head = tag("div", tag("h3", site), clear, class_="panel-head")
        caption = f"Budget of {site}, by week; weeks that are not listed have paid it nothing"
        return tag("div", head, self._budget_table(caption, states), class_="panel")

    def _everyone(self) -> Markup:
        everyone = self._of_kind(FilterKind.GLOBAL)
        capacity = epsilon(self._overview.limits.global_budget)
        total = self._budget_table(f"All sites together, at most {capacity} a week", everyone)
        quotas: list[Node] = []
        for kind in (FilterKind.IMPRESSION_SITE, FilterKind.ADVERTISER):
            if states := self._of_kind(kind):
                caption = f"{words.filter_words(kind)}: at most {epsilon(states[0].capacity)} a week"
                quotas.append(self._budget_table(caption, states, named=True))
        nothing = tag("p", "Nothing has been spent yet.", class_="empty")
        if quotas:
            quotas.append(tag("p", _MORE_THAN_TOTAL, class_="soft"))
        return section("everyone", "All sites together", tag("p", _EVERYONE), total if everyone else nothing, quotas)

    def _budget_table(self, caption: str, states: Sequence[FilterState], *, named: bool = False) -> Markup:
        ordered = sorted(states, key=lambda state: (state.site, -state.epoch))
        columns = ["Site and week" if named else "Week", "Up to the capacity", "Spent", "Left", "In words"]
        rows = [self._budget_row(state, named) for state in ordered]
        return table(caption, columns, rows, numbers=("Spent", "Left"), class_="budgets")

    def _budget_row(self, state: FilterState, named: bool) -> list[Node]:
        week = self._week(state.epoch)
        bar = budget_bar(state.spent, state.capacity)
        told = "closed: history was cleared" if self._closed(state.epoch) else words.used(state.spent, state.capacity)
        name: Node = [state.site, tag("br"), tag("span", week, class_="soft")] if named else week
        return [name, bar, epsilon(state.spent), epsilon(state.remaining), told]

    def _askers(self) -> Markup:
        records = self._overview.reports
        tables: list[Node] = []
        for who, through, askers in (
            ("Site", "Intermediaries on its pages", totals_by_site(records)),
            ("Intermediary", "Sites it asked on", totals_by_intermediary(records)),
        ):
            if askers:
                columns = [who, through, "Reports", "Paid for", "Most of one week"]
                caption = f"Totals by {who.lower()}, over the reports below"
                rows = [_asker_row(asker) for asker in askers]
                tables.append(table(caption, columns, rows, numbers=columns[2:]))
        nothing = tag("p", "Nobody has asked for a report yet.", class_="empty")
        return section("askers", "Who asked", tag("p", _ASKERS), tables or nothing)

    def _reports(self) -> Markup:
        columns = ["When", "To whom", "What it cost you", "Week by week", "Noise asked for"]
        listing = self._latest_first("Reports released", columns, self._overview.reports, self._report_row)
        nothing = tag("p", "No report has left this device.", class_="empty")
        return section("reports", "Reports released", tag("p", _REPORTS), listing or nothing)

    def _report_row(self, record: ReportRecord) -> list[Node]:
        to: Node = record.site
        if record.caller != record.site:
            to = [record.site, tag("br"), f"through {record.caller}"]
        if record.side is Side.PUBLISHER:
            to = [to, tag("br"), "about conversions after its ad"]
        weeks = tag("ul", [tag("li", line) for line in self._cost_lines(record.epochs)])
        noise = f"ε {show(record.epsilon_micros)}, sensitivity {record.query_sensitivity:,}"
        return [self._clockface.moment(record.time), to, words.cost_words(record.epochs), weeks, noise]

    def _cost_lines(self, entries: Sequence[EpochEntry]) -> list[str]:
        """Neighbouring weeks with the same outcome share a line."""
        lines = []
        for outcome, group in groupby(reversed(entries), key=words.outcome_words):
            epochs = [entry.epoch for entry in group]
            name = self._week(epochs[0]) if len(epochs) == 1 else plural(len(epochs), "week")
            lines.append(f"{name}: {outcome}")
        return lines

    def _impressions(self) -> Markup:
        columns = ["When", "Where", "Bucket", "Who may count it", "Kept until"]
        listing = self._latest_first("Impressions stored", columns, self._overview.impressions, self._impression_row)
        nothing = tag("p", "No impression is stored.", class_="empty")
        return section("impressions", "Impressions stored", tag("p", _IMPRESSIONS), listing or nothing)

    def _impression_row(self, saved: SavedImpression) -> list[Node]:
        seen = saved.impression
        where: Node = seen.site if seen.caller == seen.site else [seen.site, tag("br"), f"by {seen.caller}"]
        who = ", ".join(sorted(saved.conversion_sites | saved.conversion_callers)) or "any site"
        times = self._clockface
        return [times.moment(seen.time), where, seen.histogram_index, who, times.moment(saved.expires)]

    def _conversions(self) -> Markup:
        columns = ["When", "Where", "Label", "Who may learn of it", "Kept until"]
        listing = self._latest_first("Conversions stored", columns, self._overview.conversions, self._conversion_row)
        nothing = tag("p", "No conversion is stored.", class_="empty")
        return section("conversions", "Conversions stored", tag("p", _CONVERSIONS), listing or nothing)

    def _conversion_row(self, saved: SavedConversion) -> list[Node]:
        event, times = saved.event, self._clockface
        where: Node = event.site if event.caller == event.site else [event.site, tag("br"), f"by {event.caller}"]
        who = ", ".join(sorted(saved.publishers))
        return [times.moment(event.time), where, event.label, who, times.moment(saved.expires)]

    def _latest_first(
        self, caption: str, columns: Sequence[str], stored: Sequence[T], row: Callable[[T], list[Node]]
    ) -> list[Node]:
        """A table of what is stored, with a link to the rest if it is long; nothing if nothing is stored."""
        shown = stored if self._all_rows else stored[-SHOWN_ROWS:]
        listing = table(f"{caption}, latest first", columns, [row(each) for each in reversed(shown)])
        rest = tag("p", tag("a", f"Show all {len(stored):,}", href="?all=1"))
        return [listing, rest if len(shown) < len(stored) else None] if stored else []

    def _controls(self) -> Markup:
        on = self._overview.enabled
        switch = button_link("Switch measurement off…", "switch-off", danger=True)
        if not on:
            switch = button_link("Switch measurement on…", "switch-on")
        buttons = tag("p", switch, button_link("Clear history…", "clear-history", danger=True), class_="actions")
        explained = "Each of these asks before it does anything. No site is told, and none can tell."
        return section("controls", "Controls", tag("p", explained), buttons)

    def _footer(self) -> Markup:
        zone = self._clockface.zone_name(self._overview.now)
        read = f"Read from this device's own store on {self._clockface.day(self._overview.now)}; times in {zone}. "
        return tag("p", read + _SERVED, class_="soft small")

    def _of_kind(self, kind: FilterKind) -> list[FilterState]:
        return [state for state in self._overview.filters if state.kind is kind]

    def _spent_now(self) -> int:
        calendar = self._overview.calendar
        if calendar is None:
            return 0
        current = calendar.index(self._overview.now)
        return sum(state.spent for state in self._of_kind(FilterKind.GLOBAL) if state.epoch == current)

    def _calendar(self) -> EpochCalendar:
        """Without a start of its own a device names weeks as if they started now."""
        return self._overview.calendar or EpochCalendar(self._overview.now, self._overview.limits.epoch_length)

    def _week(self, epoch: int) -> str:
        return self._clockface.week(self._calendar(), epoch, self._overview.now)

    def _closed(self, epoch: int) -> bool:
        barrier = self._overview.barrier
        return barrier is not None and epoch <= self._calendar().index(barrier)
