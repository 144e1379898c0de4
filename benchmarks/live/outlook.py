"""Before anything is asked: what a crowd of some size would get at some ε, and which campaigns would stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchmarks.live.chart import expected_chart
from benchmarks.live.crowd import MAX_PEOPLE, OPTIONS, POPULARITY, UNMOVED
from benchmarks.live.places import CAMPAIGNS, EPSILON, KAPPA
from device.dashboard.layout import section
from device.dashboard.markup import Markup, tag
from protocol.epsilon import MICROS
from protocol.noise_scale import NoiseScale
from protocol.querier.worth import CONFIDENCE
from protocol.query import NoiseMode

CROWD = 400
# Places of a slider, so that it moves evenly over crowds of one person and of thousands.
PEOPLE = (1, 10, 30, 100, 200, 400, 700, 1000, 1500, 2000, 3000, 4000, MAX_PEOPLE)
EPSILONS = (50_000, 100_000, 200_000, 300_000, 500_000, 700_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class CrowdOutlook:
    """The expected answer to a question about `people`, if each of them paid `epsilon_micros`."""

    people: int
    epsilon_micros: int

    @classmethod
    def at(cls, people: int, epsilon: int) -> CrowdOutlook:
        """By the places of two sliders."""
        return cls(PEOPLE[people], EPSILONS[epsilon])

    @property
    def expected(self) -> list[int]:
        """How many purchases each campaign would get in the mean."""
        return [round(self.people * (1 - UNMOVED) * share) for share in POPULARITY]

    @property
    def half_width(self) -> int:
        """How far noise may move each number."""
        sensitivity = 2 * OPTIONS.max_value
        rate = Fraction(self.epsilon_micros, MICROS * sensitivity)
        return NoiseScale(NoiseMode.LOCAL, rate, sensitivity + KAPPA).half_width(CONFIDENCE)

    def sentence(self) -> str:
        """What a person should expect."""
        seen = [name for name, number in zip(CAMPAIGNS, self.expected, strict=True) if number > self.half_width]
        told = f"{self.people:,} people at ε = {self.epsilon_micros / MICROS:g}: noise of ± {self.half_width:,}. "
        if not seen:
            return told + "No campaign would stand out from the noise."
        if len(seen) == len(CAMPAIGNS):
            return told + "Every campaign would stand out from the noise."
        return told + f"{len(seen)} of {len(CAMPAIGNS)} campaigns would stand out from the noise."

    def picture(self) -> Markup:
        """The sentence and a chart, which a script fetches again when a slider moves."""
        chart = expected_chart(CAMPAIGNS, self.expected, self.half_width, CONFIDENCE)
        return tag("div", tag("p", self.sentence(), role="status"), chart, id="outlook-picture")


def chosen(query: Sequence[str]) -> CrowdOutlook:
    """From two numbers of an address; the crowd and ε of this demonstration where they are not good ones."""
    places = [int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1 for text in query]
    people = places[0] if 0 <= places[0] < len(PEOPLE) else PEOPLE.index(CROWD)
    epsilon = places[1] if 0 <= places[1] < len(EPSILONS) else EPSILONS.index(round(EPSILON * MICROS))
    return CrowdOutlook.at(people, epsilon)


def outlook_section(outlook: CrowdOutlook) -> Markup:
    """Two sliders. Without scripts a button shows what they say."""
    people, epsilon = PEOPLE.index(outlook.people), EPSILONS.index(outlook.epsilon_micros)
    fields = [
        _slider("people", "Size of the crowd", people, len(PEOPLE)),
        _slider("epsilon", "ε that each purchase pays", epsilon, len(EPSILONS)),
    ]
    button = tag("noscript", tag("button", "Show"))
    form = tag(
        "form", tag("div", fields, class_="sliders"), button, id="outlook-form", method="get", action="/#outlook"
    )
    return section("outlook", "What to expect before you ask", form, outlook.picture())


def _slider(name: str, label: str, value: int, count: int) -> Markup:
    return tag(
        "div",
        tag("label", label, for_=f"outlook-{name}"),
        tag("input", type="range", id=f"outlook-{name}", name=name, min=0, max=count - 1, value=value),
    )
