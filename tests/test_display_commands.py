"""`trefoil device conversion` and `trefoil device label` as a person runs them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trefoil
from device import agent
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet, HpkeKeyConfig
from protocol.regression.features import FeatureEncoding, Field, FieldKind
from protocol.seconds import DAY
from tests.support.protocol_samples import helper_entry, signed

PUBLISHER, SHOP, STORE = "news.example", "shop.example", "store.example"


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """An advertiser and an hour."""
    path = tmp_path / "features.json"
    fields = (
        Field("advertiser", FieldKind.CATEGORY, levels=(SHOP, STORE)),
        Field("hour", FieldKind.NUMBER, edges=(6, 12, 18)),
    )
    FeatureEncoding(fields).save(path)
    return path


@pytest.fixture
def helpers(tmp_path: Path) -> Path:
    """A signed helper set whose keys are active now."""
    until = int(time.time()) + 10**6
    entries = [
        replace(helper_entry(party), hpke_keys=(HpkeKeyConfig(helper_entry(party).hpke_keys[0].key, 0, until),))
        for party in range(3)
    ]
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps(signed(HelperSet(7, (entries[0], entries[1], entries[2]))).to_json()))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(trefoil.app, [str(each) for each in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def label(features: Path, helpers: Path, *more: object) -> str:
    options = ["--db", features.parent / "ann.db", "--helpers", helpers, "--features", features]
    options += ["--field", "hour=20", "--ago", 8 * DAY, "--batch", features.parent / "new.batch"]
    return run("device", "label", PUBLISHER, *options, "--records", features.parent / "new.records", *more)


def test_a_conversion_and_a_label_from_the_command_line(features: Path, helpers: Path) -> None:
    db = features.parent / "ann.db"
    said = run("device", "conversion", SHOP, "--db", db, "--publisher", PUBLISHER, "--label", 3)
    assert "news.example may learn of" in said
    asked = ("--field", f"advertiser={SHOP}", "--advertiser", SHOP)
    for _ in range(2):
        assert "wrote a sealed report" in label(features, helpers, *asked)
    batch = BatchReader(features.parent / "new.batch")
    terms = batch[0].terms()
    encoding = FeatureEncoding.load(features)
    assert (terms.site, terms.unit, terms.sensitivity) == (PUBLISHER, encoding.unit, encoding.cap)
    records = [json.loads(line) for line in (features.parent / "new.records").read_text().splitlines()]
    assert [bytes.fromhex(record["report"]) for record in records] == [report.digest for report in batch]
    assert records[0]["features"] == list(encoding.encode({"advertiser": SHOP, "hour": 20}))
    with agent.opened(db) as device:
        (kept,) = device.overview().conversions
        # Saved today, and the window was over yesterday: nothing was found, and nothing paid.
        assert (kept.event.label, device.budget()) == (3, [])


def test_bad_input_of_the_device_is_told_and_writes_nothing(features: Path, helpers: Path) -> None:
    shop = ("--field", f"advertiser={SHOP}", "--advertiser", SHOP)
    for bad, told in (
        ((*shop, "--ago", DAY), "has not closed"),
        (("--field", "advertiser=unknown.example", "--advertiser", SHOP), "column 'advertiser'"),
        (("--field", "hour", "--advertiser", SHOP), "is not a field"),
        (("--advertiser", SHOP), "has no 'advertiser'"),
        (("--field", f"advertiser={SHOP}", "--advertiser", PUBLISHER), "itself"),
        ((*shop, "--epsilon", 0), "epsilon"),
    ):
        with pytest.raises(TrefoilError, match=told):
            label(features, helpers, *bad)
    assert not (features.parent / "new.batch").exists()
    assert not (features.parent / "new.records").exists()
    with pytest.raises(TrefoilError, match="itself"):
        run("device", "conversion", SHOP, "--db", features.parent / "ann.db", "--publisher", SHOP)
