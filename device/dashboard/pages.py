"""Render the dashboard's pages: the overview, from one `Overview` of the device, and a confirmation of each action.

Totals by recipient (a site, or an intermediary on its pages: paper, Figure 1) come from the log of reports. Each week
has its own budget, so charges are summed within a week and never across weeks.

The page is short whatever the device has done: a summary, the switch and the sites that have spent most. Weeks, limits
and lists are folded; a browser unfolds them without a script.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple, TypeVar, assert_never

from device.budget import FilterKind, FilterState
from device.dashboard import formatting
from device.dashboard.formatting import LocalTime, epsilon, plural
from device.dashboard.markup import Link, Markup, Node, budget_bar, button_link, fold, notice, page, section, table, tag
from device.device import Device
from device.epoch import EpochCalendar
from device.events import SavedConversion, SavedImpression
from device.limits import OwnSite
from device.overview import Overview
from device.site import parse_site
from device.stores.storage import EpochEntry, ReportRecord, Side
from protocol.units import show


@dataclass(frozen=True, slots=True)
class RecipientTotal:
    """What one site, or one intermediary over all sites, has received."""

    name: str
    # The sites on which an intermediary called, or the intermediaries that called on a site.
    others: tuple[str, ...]
    reports: int
    # Reports that some week paid for; the others are null.
    paid_for: int
    # The largest total charge of one week, in micros.
    most: int


def totals_by_site(records: Iterable[ReportRecord]) -> list[RecipientTotal]:
    """Return the totals of every site, whose budget pays for all callers on its pages."""
    return _totals(records, lambda record: record.site, lambda record: record.caller)


def totals_by_intermediary(records: Iterable[ReportRecord]) -> list[RecipientTotal]:
    """Return the totals of every intermediary over all sites on which it called: it can combine their answers."""
    through = [record for record in records if record.caller != record.site]
    return _totals(through, lambda record: record.caller, lambda record: record.site)


def _totals(
    records: Iterable[ReportRecord], name: Callable[[ReportRecord], str], other: Callable[[ReportRecord], str]
) -> list[RecipientTotal]:
    groups: dict[str, list[ReportRecord]] = defaultdict(list)
    for record in records:
        groups[name(record)].append(record)
    totals = [_total(recipient, groups[recipient], other) for recipient in groups]
    return sorted(totals, key=lambda total: (-total.most, -total.reports, total.name))


def _total(name: str, records: Sequence[ReportRecord], other: Callable[[ReportRecord], str]) -> RecipientTotal:
    weeks: Counter[int] = Counter()
    for record in records:
        for entry in record.epochs:
            weeks[entry.epoch] += entry.paid
    return RecipientTotal(
        name,
        tuple(sorted({other(record) for record in records} - {name})),
        len(records),
        sum(any(entry.paid for entry in record.epochs) for record in records),
        max(weeks.values(), default=0),
    )


T = TypeVar("T")

MAX_ROWS = 50
SHOWN_SITES = 8
_EXAMPLE = 250_000
# For display only: the factors are e^0.1 and e^1, rounded up.
_MEANING = (
    "When a site measures whether its ads worked, your device answers with a sealed report. Reports of many people "
    "are added up, noise is put on the sum, and the site sees only that. Still, every answer says a little about you. "
    "That little is counted here in ε (epsilon), for every {length} and every site.",
    "Spending 0.1 ε can move the odds of any guess about that week by a factor of at most "
    + formatting.odds_factor(100_000)
    + "; spending 1 ε, by at most "
    + formatting.odds_factor(1_000_000)
    + ". When a budget is used up, your device goes on answering, but with empty reports. No site is told how much is "
    "left, and none can tell an empty report from a full one.",
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
_RECIPIENTS = (
    "A site's budget pays for every report asked for on its pages, also by others. An intermediary asks on the pages "
    "of many sites and can collude: its total is what they have paid for it in one week."
)
_ALL_SITES = "Limits that hold across sites, so that many of them cannot add up what each one may learn."
_QUOTAS = (
    "These may add up to more than all sites together. A report can rest on ads that several sites showed: each of "
    "them is charged its whole cost, as any one of them might be behind it, while the total is charged once."
)
_SERVED = "This page comes from your own machine, for this browser alone. It loads nothing from elsewhere."


_COLUMNS = {
    "reports": ("When", "To whom", "What it cost you", "Week by week", "Noise asked for"),
    "impressions": ("When", "Where", "Bucket", "Who may count it", "Kept until"),
    "conversions": ("When", "Where", "Label", "Who may learn of it", "Kept until"),
}


def _show_all(count: int) -> Markup:
    return tag("p", tag("a", f"Show all {count:,}", href="?all=1"))


def _recipient_row(total: RecipientTotal) -> list[Node]:
    through = ", ".join(total.others) or "none"
    return [total.name, through, f"{total.reports:,}", f"{total.paid_for:,}", epsilon(total.most)]


@dataclass(frozen=True, slots=True)
class OverviewPage:
    """The overview of one device for its person.

    `done` reports the action just performed; `all_rows` disables truncation of long lists; `back_link` is added to the
    navigation, and `below` under the header.
    """

    overview: Overview
    local_time: LocalTime
    done: str = ""
    all_rows: bool = False
    back_link: Link | None = None
    below: Node = None

    def render(self) -> str:
        overview = self.overview
        lists = [
            self._list("reports", "report", "sent", _REPORTS, overview.reports, self._report_row),
            self._list("impressions", "impression", "stored", _IMPRESSIONS, overview.impressions, self._impression_row),
            self._list("conversions", "conversion", "stored", _CONVERSIONS, overview.conversions, self._conversion_row),
        ]
        parts = [
            tag("h1", "What measurement has cost you"),
            notice(self.done) if self.done else None,
            self._controls(),
            self._summary(),
            self._sites(),
            section("more", "Everything in detail", self._all_sites(), self._recipients(), lists, self._meaning()),
            self._footer(),
        ]
        return page("Privacy dashboard", parts, links=(self.back_link,) if self.back_link else (), below=self.below)

    def _summary(self) -> Node:
        """Return the state of the device in a few sentences. They hold after clearing, too."""
        overview = self.overview
        sentences = ["Nothing is on record."]
        if overview.reports:
            sites = len({record.site for record in overview.reports})
            empty = sum(not any(entry.paid for entry in record.epochs) for record in overview.reports)
            blank = f" ({empty:,} empty)" if empty else ""
            sentences = [f"{plural(len(overview.reports), 'report')}{blank} went to {plural(sites, 'site')}."]
        if states := self._of_kind(FilterKind.SITE):
            most = max(states, key=lambda state: (state.spent, state.epoch))
            spent = f"{epsilon(most.spent)} of {epsilon(most.capacity)}"
            sentences.append(f"{most.site} has spent most: {spent} in the week {self._week(most.epoch)}.")
        now, capacity = self._spent_now(), overview.limits.global_budget
        if closed := self._closed(self._calendar().index(overview.now)):
            sentences.append("This week is closed: no site can measure anything of it.")
        else:
            sentences.append(f"This week all sites together have spent {epsilon(now)} of {epsilon(capacity)}.")
        cleared = formatting.describe_barrier(overview, self.local_time)
        return [
            tag("p", " ".join(sentences), class_="lead"),
            None if closed else budget_bar(now, capacity),
            tag("p", cleared) if cleared else None,
        ]

    def _controls(self) -> Markup:
        on = self.overview.enabled
        state = tag("span", "Measurement is on" if on else "Measurement is off", class_=f"pill {'on' if on else 'off'}")
        debug = tag("span", "A debug device: its reports can be read", class_="pill off")
        switch = button_link("Switch measurement off…", "switch-off", danger=True)
        if not on:
            switch = button_link("Switch measurement on…", "switch-on")
        clear = button_link("Clear history…", "clear-history", danger=True)
        return tag("p", state, debug if self.overview.debug else None, switch, clear, class_="actions")

    def _meaning(self) -> Markup:
        length = formatting.describe_epoch_length(self.overview.limits.epoch_length)
        together = epsilon(2 * self.overview.limits.global_budget)
        own_ads = "counts ads on its own pages, " if self.overview.limits.own_site is OwnSite.COUNTED else ""
        limits = {"length": length, "together": together, "own_ads": own_ads}
        example = {"example": epsilon(_EXAMPLE), "sure": formatting.guess_probability(_EXAMPLE)}
        paragraphs = [text.format(**limits, **example) for text in _MEANING]
        return fold("meaning", "What a spent budget means", [tag("p", text) for text in paragraphs])

    def _sites(self) -> Markup:
        """Return the sites, most spent first, each folded around its weeks."""
        states = sorted(self._of_kind(FilterKind.SITE), key=lambda state: state.site)
        groups = [list(group) for _, group in groupby(states, key=lambda state: state.site)]
        groups.sort(key=lambda group: -max(state.spent for state in group))
        sites = [self._site(group) for group in groups]
        further = plural(len(sites) - SHOWN_SITES, "more site", "more sites")
        rest = fold("further", f"{further} with less", sites[SHOWN_SITES:]) if sites[SHOWN_SITES:] else None
        capacity = epsilon(self.overview.limits.site_budget)
        explained = f"Most spent first. A site may spend {capacity} of every week, the mark at the end of each bar."
        nothing = tag("p", "No site is on record.", class_="empty")
        content = [tag("p", explained), sites[:SHOWN_SITES], rest] if sites else nothing
        return section("sites", "What each site has spent", content)

    def _site(self, states: Sequence[FilterState]) -> Markup:
        most = max(states, key=lambda state: (state.spent, state.epoch))
        name = [
            tag("strong", most.site),
            budget_bar(most.spent, most.capacity),
            tag("span", f"{epsilon(most.spent)}, {self._week(most.epoch)}", class_="soft"),
        ]
        caption = f"Budget of {most.site}, by week; weeks that are not listed have paid it nothing"
        clear = tag("p", button_link(f"Clear {most.site}…", f"clear-site?site={most.site}"), class_="actions")
        return fold(f"site-{most.site}", name, self._budget_table(caption, states), clear, class_="fold site")

    def _all_sites(self) -> Markup:
        tables: list[Node] = []
        for kind in FilterKind:
            if kind is not FilterKind.SITE and (states := self._of_kind(kind)):
                caption = f"{formatting.FILTER_MEANINGS[kind]}: at most {epsilon(states[0].capacity)} a week"
                tables.append(self._budget_table(caption, states, named=bool(states[0].site)))
        nothing = tag("p", "Nothing is on record.", class_="empty")
        explained = [tag("p", _ALL_SITES), tables or nothing, tag("p", _QUOTAS, class_="soft") if tables[1:] else None]
        return fold("everyone", "Limits across sites", explained)

    def _budget_table(self, caption: str, states: Sequence[FilterState], *, named: bool = False) -> Node:
        ordered = sorted(states, key=lambda state: (-state.spent if named else 0, -state.epoch, state.site))
        columns = ["Site and week" if named else "Week", "Up to the capacity", "Spent", "Left", "In words"]
        rows = [self._budget_row(state, named) for state in (ordered if self.all_rows else ordered[:MAX_ROWS])]
        listing = table(caption, columns, rows, numbers=("Spent", "Left"), class_="budgets")
        return [listing, _show_all(len(ordered)) if len(rows) < len(ordered) else None]

    def _budget_row(self, state: FilterState, named: bool) -> list[Node]:
        week = self._week(state.epoch)
        bar = budget_bar(state.spent, state.capacity)
        usage = (
            "closed: history was cleared"
            if self._closed(state.epoch)
            else formatting.describe_usage(state.spent, state.capacity)
        )
        name: Node = [state.site, tag("br"), tag("span", week, class_="soft")] if named else week
        return [name, bar, epsilon(state.spent), epsilon(state.remaining), usage]

    def _recipients(self) -> Markup:
        records = self.overview.reports
        tables: list[Node] = []
        for who, through, totals in (
            ("Site", "Intermediaries on its pages", totals_by_site(records)),
            ("Intermediary", "Sites it asked on", totals_by_intermediary(records)),
        ):
            if totals:
                columns = [who, through, "Reports", "Paid for", "Most of one week"]
                caption = f"Totals by {who.lower()}, over the reports below"
                rows = [_recipient_row(total) for total in totals]
                tables.append(table(caption, columns, rows, numbers=columns[2:]))
        nothing = tag("p", "Nobody is on record.", class_="empty")
        return fold("askers", "Who asked", tag("p", _RECIPIENTS), tables or nothing)

    def _report_row(self, record: ReportRecord) -> list[Node]:
        to: Node = record.site
        if record.caller != record.site:
            to = [record.site, tag("br"), f"through {record.caller}"]
        if record.side is Side.PUBLISHER:
            to = [to, tag("br"), "about conversions after its ad"]
        weeks = tag("ul", [tag("li", line) for line in self._cost_lines(record.epochs)])
        noise = f"ε {show(record.epsilon_micros)}, sensitivity {record.query_sensitivity:,}"
        return [self.local_time.moment(record.time), to, formatting.describe_cost(record.epochs), weeks, noise]

    def _cost_lines(self, entries: Sequence[EpochEntry]) -> list[str]:
        """Return one line per run of weeks with the same outcome."""
        lines = []
        for outcome, group in groupby(reversed(entries), key=formatting.describe_outcome):
            epochs = [entry.epoch for entry in group]
            name = self._week(epochs[0]) if len(epochs) == 1 else plural(len(epochs), "week")
            lines.append(f"{name}: {outcome}")
        return lines

    def _impression_row(self, saved: SavedImpression) -> list[Node]:
        ad = saved.impression
        where: Node = ad.site if ad.caller == ad.site else [ad.site, tag("br"), f"by {ad.caller}"]
        who = ", ".join(sorted(saved.conversion_sites | saved.conversion_callers)) or "any site"
        times = self.local_time
        return [times.moment(ad.time), where, ad.histogram_index, who, times.moment(saved.expires)]

    def _conversion_row(self, saved: SavedConversion) -> list[Node]:
        event, times = saved.event, self.local_time
        where: Node = event.site if event.caller == event.site else [event.site, tag("br"), f"by {event.caller}"]
        who = ", ".join(sorted(saved.publishers))
        return [times.moment(event.time), where, event.label, who, times.moment(saved.expires)]

    def _list(
        self,
        name: str,
        one: str,
        done: str,
        explained: str,
        stored: Sequence[T],
        row: Callable[[T], list[Node]],
    ) -> Markup:
        """Return a folded table of the latest entries, with a link to the rest."""
        if not stored:
            return fold(name, f"No {one} is {'stored' if done == 'stored' else 'on record'}", tag("p", explained))
        latest = stored if self.all_rows else stored[-MAX_ROWS:]
        rows = [row(each) for each in reversed(latest)]
        listing = table(f"{name.capitalize()} {done}, latest first", _COLUMNS[name], rows)
        rest = _show_all(len(stored)) if len(latest) < len(stored) else None
        heading = f"{plural(len(stored), one)} {done}"
        return fold(name, heading, tag("p", explained), listing, rest, unfolded=self.all_rows)

    def _footer(self) -> Markup:
        zone = self.local_time.zone_name(self.overview.now)
        read = f"Read from this device's own store on {self.local_time.day(self.overview.now)}; times in {zone}. "
        return tag("p", read + _SERVED, class_="soft small")

    def _of_kind(self, kind: FilterKind) -> list[FilterState]:
        return [state for state in self.overview.filters if state.kind is kind]

    def _spent_now(self) -> int:
        calendar = self.overview.calendar
        if calendar is None:
            return 0
        current = calendar.index(self.overview.now)
        return sum(state.spent for state in self._of_kind(FilterKind.GLOBAL) if state.epoch == current)

    def _calendar(self) -> EpochCalendar:
        """Return the device's calendar, or one that starts now if it has none yet."""
        return self.overview.calendar or EpochCalendar(self.overview.now, self.overview.limits.epoch_length)

    def _week(self, epoch: int) -> str:
        return self.local_time.week(self._calendar(), epoch, self.overview.now)

    def _closed(self, epoch: int) -> bool:
        barrier = self.overview.barrier
        return barrier is not None and epoch <= self._calendar().index(barrier)


class Action(Enum):
    """What the person can change here; the values are URL paths."""

    CLEAR_SITE = "clear-site"
    CLEAR_HISTORY = "clear-history"
    SWITCH_OFF = "switch-off"
    SWITCH_ON = "switch-on"


class _Text(NamedTuple):
    """A confirmation page: the question, what will happen, and the button; and what is said afterwards."""

    title: str
    consequences: tuple[str, ...]
    button: str
    done: str


_TEXTS = {
    Action.CLEAR_SITE: _Text(
        "Clear {site}?",
        ("This means: {clearing}.", "It gets no new budget by this, and no site is told."),
        "Clear this site",
        "the site is cleared.",
    ),
    Action.CLEAR_HISTORY: _Text(
        "Clear your history?",
        (
            "Everything goes: impressions, conversions, what each site has spent, and the log of reports.",
            "Since nobody knows any more what these weeks have paid, they are closed: no site measures anything "
            "that happened before now. This cannot be undone.",
        ),
        "Clear everything",
        "your history is cleared, and every week so far is closed to all sites.",
    ),
    Action.SWITCH_OFF: _Text(
        "Switch measurement off?",
        (
            "From now on no impression is stored, and every report is empty. Sites go on getting reports and "
            "cannot tell.",
            "What is stored stays until you clear it.",
        ),
        "Switch off",
        "measurement is off. Sites get empty reports, and cannot tell.",
    ),
    Action.SWITCH_ON: _Text(
        "Switch measurement on?",
        ("Sites can have ads remembered again and measure purchases, within the budgets.",),
        "Switch on",
        "measurement is on.",
    ),
}


def confirmation_page(action: Action, csrf_token: str, site: str) -> str:
    """Return the page that says what `action` will do, and whose form performs it."""
    text, names = _TEXTS[action], {"site": site, "clearing": formatting.describe_clearing(site)}
    title = text.title.format(**names)
    fields = [
        tag("input", type="hidden", name="token", value=csrf_token),
        tag("input", type="hidden", name="site", value=site) if site else None,
    ]
    kind = "primary" if action is Action.SWITCH_ON else "primary danger"
    buttons = tag("p", tag("button", text.button, class_=kind), button_link("No, go back", "./"), class_="actions")
    form = tag("form", fields, buttons, method="post", action=action.value)
    paragraphs = [tag("p", each.format(**names)) for each in text.consequences]
    return page(title, [tag("h1", title), paragraphs, form])


def dashboard_page(
    device: Device[Any],
    action: Action | None,
    query: Mapping[str, str],
    local_time: LocalTime,
    *,
    csrf_token: str = "",
    back_link: Link | None = None,
    below: Node = None,
) -> str:
    """Return the confirmation page of `action`, or without one the overview, as the query of its address wants it."""
    if action is not None:
        return confirmation_page(action, csrf_token, _site_of(action, query))
    notices = {each.value: f"Done: {_TEXTS[each].done}" for each in Action}
    done, all_rows = notices.get(query.get("done", ""), ""), query.get("all") == "1"
    return OverviewPage(device.overview(), local_time, done, all_rows, back_link, below).render()


def perform(device: Device[Any], action: Action, form: Mapping[str, object]) -> str:
    """Perform what the person has confirmed; return the address of the page that says so."""
    site = _site_of(action, form)
    match action:
        case Action.CLEAR_SITE:
            device.clear_site(site)
        case Action.CLEAR_HISTORY:
            device.clear_browsing_history(forget_visits=True)
        case Action.SWITCH_OFF:
            device.disable()
        case Action.SWITCH_ON:
            device.enable()
        case _:
            assert_never(action)
    return f"?done={action.value}"


def _site_of(action: Action, fields: Mapping[str, object]) -> str:
    return parse_site(fields.get("site")) if action is Action.CLEAR_SITE else ""
