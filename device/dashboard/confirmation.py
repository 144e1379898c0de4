"""What the person can do on the dashboard. Each action has a page that says what will happen, and asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, assert_never

from device.dashboard.layout import button_link, page
from device.dashboard.markup import Node, tag
from device.device import Device

AnyDevice: TypeAlias = Device[Any]


class Action(Enum):
    """The closed list of what can be changed here; the values are addresses."""

    CLEAR_SITE = "clear-site"
    CLEAR_HISTORY = "clear-history"
    SWITCH_OFF = "switch-off"
    SWITCH_ON = "switch-on"

    @property
    def done(self) -> str:
        """What the overview says afterwards."""
        match self:
            case Action.CLEAR_SITE:
                return "Done: what this site had stored is gone."
            case Action.CLEAR_HISTORY:
                return "Done: your history is cleared, and every week so far is closed to all sites."
            case Action.SWITCH_OFF:
                return "Done: measurement is off. Sites get empty reports, and cannot tell."
            case Action.SWITCH_ON:
                return "Done: measurement is on."
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the person chose on a confirmation page."""

    action: Action
    site: str = ""
    close_past: bool = False

    def run(self, device: AnyDevice) -> None:
        """Do it. Whoever calls has asked."""
        for step in self._steps(device):
            step()

    def _steps(self, device: AnyDevice) -> list[Callable[[], None]]:
        match self.action:
            case Action.CLEAR_SITE:
                steps: list[Callable[[], None]] = [lambda: device.clear_impressions_for_site(self.site)]
                if self.close_past:
                    steps.append(lambda: device.clear_browsing_history([self.site], forget_visits=False))
                return steps
            case Action.CLEAR_HISTORY:
                return [lambda: device.clear_browsing_history(forget_visits=True)]
            case Action.SWITCH_OFF:
                return [device.disable]
            case Action.SWITCH_ON:
                return [device.enable]
            case _:
                assert_never(self.action)


@dataclass(frozen=True, slots=True)
class _Question:
    """What a confirmation page says: the question, what will happen, and the name of the button that does it."""

    title: str
    told: tuple[str, ...]
    answer: str


def confirmation_page(action: Action, form_token: str, *, site: str = "") -> str:
    """The page that asks. Without its button nothing happens."""
    question = _question(action, site)
    fields = [
        tag("input", type="hidden", name="token", value=form_token),
        tag("input", type="hidden", name="site", value=site) if site else None,
        _close_past(site) if action is Action.CLEAR_SITE else None,
    ]
    kind = "primary" if action is Action.SWITCH_ON else "primary danger"
    buttons = tag("p", tag("button", question.answer, class_=kind), button_link("No, go back", "./"), class_="actions")
    form = tag("form", fields, buttons, method="post", action=action.value)
    return page(question.title, [tag("h1", question.title), [tag("p", text) for text in question.told], form])


def _question(action: Action, site: str) -> _Question:
    match action:
        case Action.CLEAR_SITE:
            told = (
                f"The ads that {site} asked this device to remember are deleted, and so are those of others that were "
                f"remembered for {site} alone.",
                "What it has spent stays spent: a site must not get a new budget by being cleared.",
            )
            return _Question(f"Clear {site}?", told, "Clear this site")
        case Action.CLEAR_HISTORY:
            told = (
                "Everything goes: impressions, conversions, what each site has spent, and the log of reports.",
                "Since nobody knows any more what these weeks have paid, they are closed: no site measures anything "
                "that happened before now. This cannot be undone.",
            )
            return _Question("Clear your history?", told, "Clear everything")
        case Action.SWITCH_OFF:
            told = (
                "From now on no impression is stored, and every report is empty. Sites go on getting reports and "
                "cannot tell.",
                "What is stored stays until you clear it.",
            )
            return _Question("Switch measurement off?", told, "Switch off")
        case Action.SWITCH_ON:
            text = "Sites can have ads remembered again and measure purchases, within the budgets."
            return _Question("Switch measurement on?", (text,), "Switch on")
        case _:
            assert_never(action)


def _close_past(site: str) -> Node:
    box = tag("input", type="checkbox", name="close_past", value="yes", id="close-past")
    text = f"Also set its budgets to zero: {site} measures nothing more of the weeks up to now."
    return tag("p", box, tag("label", text, for_="close-past"), class_="choice")
