"""The display side from end to end: advertisers' conversions, real devices, three real helpers, one model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from device.conversion_event import ConversionEventOptions
from device.device import Device
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE
from device.memory_store import MemoryStore
from device.report import HelperSetSeal
from protocol.helper_set import HelperSet
from protocol.regression.features import FeatureEncoding, Field, FieldKind
from protocol.regression.records import Record, append_record
from protocol.regression.view import fit_and_show
from protocol.report import SealedReport
from protocol.seconds import DAY
from tests.support.three_helpers import SITE, real_now, three_helpers

ADVERTISERS = ("boots.example", "books.example")
ENCODING = FeatureEncoding((Field("advertiser", FieldKind.CATEGORY, levels=ADVERTISERS),))
REPORTS = 60


def labelled(advertiser: str, helper_set: HelperSet, *, converted: bool) -> SealedReport:
    """One person, whom the publisher showed an ad of `advertiser` eight days ago."""
    now = real_now()
    clock = [now - 8 * DAY]
    device = Device(MemoryStore(), HelperSetSeal(helper_set), clock=lambda: clock[0])
    device.calendar()
    if converted:
        clock[0] += 2 * DAY
        device.save_conversion(advertiser, ConversionEventOptions((SITE,)))
    clock[0] = now
    features = ENCODING.encode({"advertiser": advertiser})
    asked = LabelOptions(TREFOIL_SERVICE, features, ENCODING.cap, 1.0, 8 * DAY, (advertiser,), unit=ENCODING.unit)
    return device.measure_impression(SITE, asked)


async def test_a_publisher_fits_a_model_of_conversions_that_it_never_saw(tmp_path: Path) -> None:
    """Reports of two advertisers are one batch; without the noise that was drawn, the answer is Σ y·x exactly."""
    records, features = tmp_path / "records", tmp_path / "features.json"
    ENCODING.save(features)
    async with three_helpers(tmp_path / "helpers") as three:
        reports, sums = [], np.zeros(ENCODING.columns, dtype=np.int64)
        for number in range(REPORTS):
            advertiser = ADVERTISERS[number % 2]
            # Nine of ten who saw boots, and one of ten who saw books.
            converted = (number // 2 % 10 < 9) if number % 2 == 0 else (number // 2 % 10 < 1)
            report = labelled(advertiser, three.helper_set, converted=converted)
            vector = ENCODING.encode({"advertiser": advertiser})
            append_record(records, Record(report.digest, vector))
            sums += np.array(vector) * converted
            reports.append(report)
        batch = three.batch(reports)
        result = await three.ask(three.query(batch), batch)
        noise = three.noise_of(result)
    assert result.answer.counted == REPORTS
    assert [told - drawn for told, drawn in zip(result.answer.histogram, noise, strict=True)] == sums.tolist()
    assert sums.tolist() == [30, 27, 3]
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(result.to_json()))
    fitted = fit_and_show(answer, batch.path, records, features, tmp_path / "model.json")
    # Whatever the noise was: a model of this batch, or a reason why there is none.
    assert (fitted["rows"], fitted["unit"]) == (REPORTS, ENCODING.unit)
