"""What the pages say about a device, from a result file: the section of RESULTS.md and a line of the README.

To renew both after a run: python -m benchmarks.bench.device_page
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.result_files import ROOT, stored

PAGE = ROOT / "benchmarks" / "RESULTS.md"
FRONT = ROOT / "README.md"

Figures = Mapping[str, Any]

_CASES = (("10", "10"), ("30", "30"), ("100", "100"), ("null", "none: a null report"))
_SECTION = """## A device

`{command}`, [device.json](results/device.json), durable storage, {samples:,} conversions of each kind.
{conditions}

| relevant impressions | median time of a conversion |
|---|---|
{medians}

The paper's prototype took {paper_ratio} times as long for 100 impressions as for 10; this one takes
{ratio_100_to_10:.2f} times as long. A caller sees neither: every call leaves after a turn of {tick_ms:.0f} ms
([device](../device/README.md#what-it-promises)). The next table says how well the time tells two devices apart. An
area of 0.5 is a coin, 1 or 0 is certainty. *Alone* is the 95 % interval of one question: of twenty true coins, one
looks like none. *Family* holds for all {questions} questions at once. *Full* is as much as a device may hold.
Controls ask two devices that are alike.

| what a caller would like to know | area | alone | family |
|---|---|---|---|
{areas}

{verdict}

"""
# One line: the front page is short.
_FRONT_LINE = (
    "- **{median:.1f} ms to measure a conversion** on a device with 100 impressions. "
    "Whoever guesses from the time which of two reports is null is right in {right} of cases.\n"
)
_OLD_SECTION = re.compile(r"^## A device\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
_OLD_FRONT_LINE = re.compile(r"^- \*\*[0-9.]+ ms to measure a conversion\*\*.*\n(?:  .*\n)*", re.MULTILINE)


def section(figures: Figures) -> str:
    """All of the section, with its heading."""
    medians = [f"| {name} | {figures['median_ms'][case]:.2f} ms |" for case, name in _CASES]
    areas = [_row(question, found) for question, found in _questions(figures)]
    parts = {"medians": medians, "areas": areas, "verdict": _verdict(figures), "conditions": _conditions(figures)}
    return _SECTION.format(**figures, **{name: "\n".join(lines) for name, lines in parts.items()})


def front_line(figures: Figures) -> str:
    """The README's line: the time, and how often the best guess from it is right."""
    right = f"{figures['auc_real_vs_null']:.1%}".replace("%", " %")
    return _FRONT_LINE.format(median=figures["median_ms"]["100"], right=right)


def _conditions(figures: Figures) -> list[str]:
    """How busy the machine was when the run ended, and what else is known of it."""
    load = figures["machine"]["load_average"][1]
    return [f"The machine's load was {load:.0f}.", *([figures["origin_note"]] if "origin_note" in figures else [])]


def _questions(figures: Figures) -> list[tuple[str, Any]]:
    return [*figures["after_tick"]["areas"].items(), *figures["watching"].items()]


def _row(question: str, found: Mapping[str, float]) -> str:
    alone, family = (f"{found[f'{of}low']:.3f} to {found[f'{of}high']:.3f}" for of in ("", "family_"))
    return f"| {question} | {found['area']:.3f} | {alone} | {family} |"


def _verdict(figures: Figures) -> list[str]:
    """What the run shows, and what it does not."""
    asked = [(question, found) for question, found in _questions(figures) if not question.startswith("control")]
    coins = sum(found["is_a_coin"] for _, found in asked)
    others = [question for question, found in asked if not found["is_a_coin_in_family"]]
    said = [f"{coins} of the {len(asked)} questions are no better than a coin by their own interval, and"]
    if not others:
        return [*said, "all of them by that of the family."]
    return [*said, f"{len(asked) - len(others)} by that of the family. Those that are not:", "", *_listed(others)]


def _listed(questions: list[str]) -> list[str]:
    return [f"- {question}" for question in questions]


def main() -> None:
    """Write both pages from the result file."""
    figures = stored("device")
    _renew(PAGE, _OLD_SECTION, section(figures))
    _renew(FRONT, _OLD_FRONT_LINE, front_line(figures))


def _renew(page: Path, old: re.Pattern[str], text: str) -> None:
    renewed, places = old.subn(lambda _: text, page.read_text())
    if places != 1:
        raise SystemExit(f"{page} has {places} places for it")
    page.write_text(renewed)


if __name__ == "__main__":
    main()
