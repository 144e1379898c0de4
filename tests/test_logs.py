"""A helper's log: one line an event, for people or for programs, with nothing in it that a terminal would obey."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpc_helpers.service.logs import LogFormat, LogLevel, fields, start_logging
from protocol.querier.query_failed import QueryFailed
from tests.support.three_helpers import SITE, three_helpers
from tests.test_server import send, small_batch, talking_to, url


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_a_text_line_is_one_line_whatever_is_in_it() -> None:
    written = io.StringIO()
    start_logging(LogLevel.INFO, LogFormat.TEXT, written)
    log = logging.getLogger("trefoil.test")
    log.debug("not written")
    log.info("said: %s", "two\nlines \x1b[31m and a colour", extra=fields(query="abc"))
    (line,) = written.getvalue().splitlines()
    assert " INFO trefoil.test said: two�lines �[31m and a colour" in line
    try:
        raise RuntimeError("here")
    except RuntimeError:
        log.exception("a defect")
    assert "RuntimeError: here" in written.getvalue()


@pytest.mark.usefixtures("restored")
def test_a_json_line_has_its_fields() -> None:
    written = io.StringIO()
    start_logging(LogLevel.WARNING, LogFormat.JSON, written)
    log = logging.getLogger("trefoil.test")
    log.info("not written")
    log.warning("said: %s", "two\nlines", extra=fields(query="abc", reports=5))
    try:
        raise RuntimeError("here")
    except RuntimeError:
        log.exception("a defect")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "trefoil.test",
        "message": "said: two\nlines",
        "query": "abc",
        "reports": 5,
    }
    assert "RuntimeError: here" in second["traceback"]


async def test_a_query_has_one_line_when_it_comes_and_one_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Enough to follow it by, and too little to fetch its answer with."""
    caplog.set_level(logging.INFO)
    async with three_helpers(tmp_path) as three:
        batch = small_batch(three)
        first, second = three.query(batch), three.query(batch)
        await three.ask(first, batch)
        with pytest.raises(QueryFailed):
            await three.ask(second, batch)
        async with talking_to(three) as session:  # asked again, it is tried again, and ends again
            await send(session, "GET", url(second.signed))
        lines = [getattr(record, "fields", {}) for record in caplog.records if record.name == "trefoil.queries"]
        for asked, outcome in ((first, "released"), (second, "failed")):
            digest = asked.query.digest.hex()
            mine = [line for line in lines if line.get("query") == digest[:16]]
            came = [line for line in mine if line["event"] == "query arrived"]
            ended = [line for line in mine if line["event"] == "query ended"]
            assert len(came) == len(ended) == 3  # one of each at each helper
            assert {(line["site"], line["reports"], line["buckets"], line["noise"]) for line in came} == {
                (SITE, 5, 4, "local")
            }
            assert {(line["site"], line["reports"], line["outcome"]) for line in ended} == {(SITE, 5, outcome)}
            assert all(line["seconds"] >= 0 for line in ended)
            assert digest not in caplog.text
        assert all(permit.hex() not in caplog.text for permit in first.permits)
