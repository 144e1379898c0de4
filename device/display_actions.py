"""What the commands of the display side do: an advertiser saves a conversion, a publisher asks about an impression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device import agent
from device.actions import Destination
from device.conversion_event import ConversionEventOptions
from device.labelling import LabelOptions
from device.report import DebugReport
from device.service_actions import opened_for, present
from device.site import parse_site
from protocol.console import say
from protocol.errors import TrefoilError
from protocol.places import check_file
from protocol.regression.features import FeatureEncoding
from protocol.regression.records import Record, append_record


def save_conversion(
    db: Path, site: str, options: ConversionEventOptions, intermediary: str | None
) -> dict[str, object]:
    """Save one conversion event, on a device that is made if need be."""
    with present(db), agent.opened(db) as device:
        device.save_conversion(site, options, intermediary=intermediary)
    publishers = sorted(parse_site(publisher) for publisher in options.publishers)
    say(f"saved a conversion on {parse_site(site)} that {', '.join(publishers)} may learn of")
    return {"site": parse_site(site), "publishers": publishers, "label": options.label}


@dataclass(frozen=True, slots=True)
class Labelled:
    """What a publisher hands in about one impression, and where it keeps what it handed in."""

    options: LabelOptions
    records: Path
    visitor: str = ""

    @classmethod
    def of(
        cls, features: Path, fields: Sequence[str], records: Path, visitor: str, service: str, **options: Any
    ) -> Labelled:
        """`fields` are name=value; `options` are those of `LabelOptions` that do not follow from the features."""
        encoding, named = FeatureEncoding.load(features), {}
        for each in fields:
            name, equals, value = each.partition("=")
            if not equals:
                raise TrefoilError(f"{each!r} is not a field", "Write name=value.")
            named[name] = value
        vector = encoding.encode(named, "the impression")
        given = LabelOptions(service, vector, encoding.cap, unit=encoding.unit, **options)
        return cls(given, records, visitor)


def label(
    db: Path, helpers: Path | None, site: str, labelled: Labelled, intermediary: str | None, batch: Path
) -> dict[str, object]:
    """Ask whether a conversion followed an impression; write the report, and what was handed in beside it."""
    options, destination = labelled.options, Destination(batch, is_batch=True)
    check_file("--records", labelled.records)
    with opened_for(db, helpers, options.aggregation_service) as (helper_set, device):
        request = options.checked(parse_site(site), parse_site(intermediary or site), device.overview().limits)
        destination.check(request, helper_set, agent.system_clock())
        report = device.measure_impression(site, options, intermediary=intermediary)
    sealed = report.sealed if isinstance(report, DebugReport) else report
    # The record first: one without a report does no harm, and a report without one could not be fitted.
    append_record(labelled.records, Record(sealed.digest, tuple(options.features), labelled.visitor))
    destination.write(sealed)
    size = len(sealed.encode())
    say(f"wrote a sealed report of {size} bytes to {batch}, and its features to {labelled.records}")
    result: dict[str, object] = {"report": sealed.digest.hex(), "bytes": size, "file": str(batch)}
    if isinstance(report, DebugReport):
        say(f"debug: the report is {list(report.histogram)}")
        result["histogram"] = list(report.histogram)
    return result
