"""The report ledger's tables, and the rules of COMMIT.md that the database itself enforces on them.

Defence in depth: a bug in the code above cannot persist an illegal move, because a trigger aborts the transaction. Both
engines make their triggers from the same rules, which are written in SQLite's dialect. Truth values are 0 and 1 and
compared explicitly; `IS NOT` between values is the one thing that PostgreSQL spells otherwise.

Reports are stored by the day of their header's hour, one table for each day. The digest covers the header, so a report
has one day, and a digest that is unique within its day is unique. So it is with the site: in a day's table a digest
begins with two bytes of a hash of its site, so that a batch, which is one site's, touches few pages of a large table.
Reports whose day this ledger cannot know are in `undated`, under their digests alone: those recorded before there were
days, and those that peers listed after this ledger was lost. Their rows never change. A report of them that is reserved
again is first copied to its day, and from then on the copy counts.

`before` is what a report has left without the attempt that it points to, `after` what it has left if that attempt is
released, in micros of its own ε; `before` is NULL for all that its header says. Released amounts are folded in when the
report is pointed on, so that no other move changes more than one row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from protocol.header import TIME_STEP
from protocol.units import DAY
from protocol.wire import tagged_hash

# "TfNL" in ASCII, in the file's header: identifies a report ledger without opening it.
APPLICATION_ID = 0x54664E4C
SCHEMA_VERSION = 7

# Row 0 of `attempts` owns the reports imported from both peers after a lost ledger: taken from by unknown attempts.
ELSEWHERE = 0
# Later than any report.
NEVER_PRUNED = 2**62
# The table of reports of unknown day, and the number under which `days` lists it.
UNDATED, NO_DAY = "undated", -1
HOURS_PER_DAY = DAY // TIME_STEP
# Few on purpose: sites that share a prefix share pages, and nothing else.
SITE_PREFIX = 2

TABLES = """
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    ledger_id BLOB NOT NULL CHECK (length(ledger_id) = 16),
    party INTEGER NOT NULL CHECK (party IN (0, 1, 2)),
    identity_key BLOB NOT NULL CHECK (length(identity_key) = 32),
    watermark INTEGER NOT NULL
);
CREATE TABLE attempts (
    attempt INTEGER PRIMARY KEY,
    attempt_id BLOB NOT NULL UNIQUE CHECK (length(attempt_id) = 32),
    query_key BLOB NOT NULL CHECK (length(query_key) = 32),
    query_digest BLOB NOT NULL CHECK (length(query_digest) = 32),
    number INTEGER NOT NULL,
    debug INTEGER CHECK (debug IN (0, 1)),
    newest INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'voted', 'released', 'renounced', 'aborted')),
    voted INTEGER NOT NULL CHECK (voted IN (0, 1)),
    sealed_share BLOB,
    reason TEXT NOT NULL DEFAULT '',
    drawn INTEGER NOT NULL DEFAULT 1 CHECK (drawn IN (0, 1)),
    most_draws INTEGER CHECK (most_draws > 0),
    whole INTEGER NOT NULL DEFAULT 1 CHECK (whole IN (0, 1))
);
CREATE UNIQUE INDEX one_live_attempt_per_query ON attempts (query_key) WHERE state <> 'aborted';
CREATE INDEX attempts_of_query ON attempts (query_key, number);
CREATE INDEX unsettled ON attempts (state) WHERE state IN ('reserved', 'voted', 'renounced');
CREATE TABLE days (
    day INTEGER PRIMARY KEY,
    newest INTEGER NOT NULL
);
CREATE TABLE votes (
    attempt INTEGER NOT NULL REFERENCES attempts,
    party INTEGER NOT NULL CHECK (party IN (0, 1, 2)),
    vote TEXT NOT NULL CHECK (vote IN ('yes', 'aborted', 'renounced')),
    message BLOB NOT NULL,
    PRIMARY KEY (attempt, party, vote)
) WITHOUT ROWID;
CREATE TABLE moves (
    sequence INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    head BLOB NOT NULL CHECK (length(head) = 32)
);
CREATE TABLE peer_heads (
    party INTEGER PRIMARY KEY CHECK (party IN (0, 1, 2)),
    ledger_id BLOB NOT NULL CHECK (length(ledger_id) = 16),
    sequence INTEGER NOT NULL,
    head BLOB NOT NULL CHECK (length(head) = 32)
);
CREATE TABLE queries (
    query_key BLOB PRIMARY KEY NOT NULL CHECK (length(query_key) = 32),
    query_digest BLOB NOT NULL CHECK (length(query_digest) = 32),
    state TEXT NOT NULL,
    detail TEXT NOT NULL,
    updated INTEGER NOT NULL
) WITHOUT ROWID;
"""

# The entry that owns what was spent before a ledger was rebuilt.
FIRST_ATTEMPT = """
INSERT INTO attempts VALUES (:attempt, :nobody, :nobody, :nobody, 0, NULL, :newest, 'released', 0, NULL,
    'spent before this ledger began', 1, NULL, 0)
"""

# A part takes something, and not more than is left. What peers left of a report says nothing of what was taken.
AFTER = "CHECK (after >= 0 AND (after < before OR attempt = 0))"
# The columns of each table of reports.
REPORTS = f"""
CREATE TABLE {{table}} (
    digest BLOB PRIMARY KEY NOT NULL,
    attempt INTEGER NOT NULL,
    debug INTEGER CHECK (debug IN (0, 1)),
    draws INTEGER NOT NULL DEFAULT 0,
    before INTEGER,
    after INTEGER NOT NULL DEFAULT 0 {AFTER}
) WITHOUT ROWID
"""

# The most that a row of `reports` can leave for another attempt, with the row of `attempts` that it points to. :paid is
# what the report's header says. Peers may have claimed more of a report that this ledger learnt from them.
MOST = (
    "CASE WHEN state <> 'released' THEN coalesce(reports.before, :paid)"
    f" WHEN attempts.attempt = {ELSEWHERE} AND reports.after > :paid THEN :paid ELSE reports.after END"
)
# What is left of a report of the row `reports`; NULL while its attempt is undecided.
LEFT = (
    f"(SELECT CASE WHEN state IN ('aborted', 'released') THEN {MOST} END"  # noqa: S608  (constants)
    " FROM attempts WHERE attempts.attempt = reports.attempt)"
)
# The draws that came to nothing, over all answers of a report: a release neither counts nor resets them.
FAILED_DRAW = "CASE WHEN state = 'aborted' THEN drawn ELSE 0 END"


class Change(Enum):
    """The statements that a rule looks at."""

    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on the rows OLD and NEW under which the database refuses a change."""

    name: str
    table: str
    change: Change
    message: str
    refused: str = "1 = 1"


_INSERT, _UPDATE, _DELETE = Change.INSERT, Change.UPDATE, Change.DELETE

RULES = (
    Rule(
        "attempts_begin_reserved",
        "attempts",
        _INSERT,
        "an attempt begins as reserved, for a debug query or a real one",
        "NEW.state <> 'reserved' OR NEW.voted <> 0 OR NEW.sealed_share IS NOT NULL OR NEW.debug IS NULL"
        " OR NEW.drawn = 0",
    ),
    Rule(
        "attempt_numbers_rise",
        "attempts",
        _INSERT,
        "the number of a new attempt must be above the last",
        "NEW.number <= (SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = NEW.query_key)",
    ),
    Rule(
        "attempts_move_legally",
        "attempts",
        _UPDATE,
        "no such move",
        "NOT ((OLD.state = 'reserved' AND NEW.state IN ('voted', 'aborted'))"
        " OR (OLD.state = 'voted' AND NEW.state IN ('released', 'renounced'))"
        " OR (OLD.state = 'renounced' AND NEW.state = 'aborted')"
        " OR (OLD.state = 'released' AND NEW.state = 'released' AND NEW.sealed_share IS NULL))",
    ),
    Rule(
        "attempts_keep_their_name",
        "attempts",
        _UPDATE,
        "only the state of an attempt changes",
        "(NEW.attempt, NEW.attempt_id, NEW.query_key, NEW.query_digest, NEW.number, NEW.debug, NEW.newest)"
        " IS NOT (OLD.attempt, OLD.attempt_id, OLD.query_key, OLD.query_digest, OLD.number, OLD.debug, OLD.newest)"
        " OR (NEW.most_draws, NEW.whole) IS NOT (OLD.most_draws, OLD.whole)",
    ),
    Rule(
        "a_vote_stores_its_share",
        "attempts",
        _UPDATE,
        "the sealed share is stored with the vote, once",
        "(NEW.state = 'voted') <> (NEW.voted <> OLD.voted) OR (NEW.state = 'voted' AND NEW.sealed_share IS NULL)"
        " OR (NEW.state = 'released' AND OLD.state <> 'released' AND NEW.sealed_share IS NOT OLD.sealed_share)",
    ),
    # Shares that will never be released are erased: a ledger that leaks later, with the querier's key and a malicious
    # helper's shares, would open every attempt whose share is still stored, each with independent noise.
    Rule(
        "a_share_goes_with_its_promise",
        "attempts",
        _UPDATE,
        "a share that will not be released is erased",
        "NEW.state IN ('renounced', 'aborted') AND NEW.sealed_share IS NOT NULL",
    ),
    # A helper that knows part of the noise before its vote could abort until it likes a draw. So every reservation
    # counts as a draw, unless it was aborted before its MPC began.
    Rule(
        "draws_count_unless_none_was_made",
        "attempts",
        _UPDATE,
        "a draw that may have been made counts",
        "NEW.drawn <> OLD.drawn AND NOT (OLD.drawn = 1 AND OLD.state = 'reserved' AND NEW.state = 'aborted')",
    ),
    Rule(
        "release_needs_both_yes",
        "attempts",
        _UPDATE,
        "releasing needs YES from both peers",
        "NEW.state = 'released' AND (SELECT count(*) FROM votes, ledger WHERE votes.attempt = NEW.attempt"
        " AND votes.vote = 'yes' AND votes.party <> ledger.party) <> 2",
    ),
    Rule(
        "renouncing_needs_a_no",
        "attempts",
        _UPDATE,
        "renouncing needs a NO",
        "NEW.state = 'renounced' AND NOT EXISTS (SELECT 1 FROM votes, ledger WHERE votes.attempt = NEW.attempt"
        " AND votes.vote <> 'yes' AND votes.party <> ledger.party)",
    ),
    Rule(
        "freeing_needs_both_no",
        "attempts",
        _UPDATE,
        "freeing a voted attempt needs NO from both peers",
        "OLD.state = 'renounced' AND NEW.state = 'aborted' AND (SELECT count(DISTINCT votes.party) FROM votes, ledger"
        " WHERE votes.attempt = NEW.attempt AND votes.vote <> 'yes' AND votes.party <> ledger.party) <> 2",
    ),
    Rule("attempts_stay", "attempts", _DELETE, "attempts are never deleted"),
    Rule(
        "days_begin_above_the_watermark",
        "days",
        _INSERT,
        "the day is not above the watermark",
        "NEW.newest <= (SELECT watermark FROM ledger)",
    ),
    Rule("days_stand", "days", _UPDATE, "days are never changed"),
    # A day's table is dropped after its row here, in the same transaction.
    Rule(
        "days_go_by_the_watermark",
        "days",
        _DELETE,
        "the day has reports above the watermark",
        "OLD.newest > (SELECT watermark FROM ledger)",
    ),
    Rule("votes_stay", "votes", _DELETE, "votes are never deleted"),
    Rule("votes_stand", "votes", _UPDATE, "votes are never changed"),
    Rule(
        "moves_follow",
        "moves",
        _INSERT,
        "moves are numbered without gaps",
        "NEW.sequence <> (SELECT coalesce(max(sequence), 0) + 1 FROM moves)",
    ),
    Rule("moves_stay", "moves", _DELETE, "moves are never deleted"),
    Rule("moves_stand", "moves", _UPDATE, "moves are never changed"),
    Rule(
        "watermark_rises",
        "ledger",
        _UPDATE,
        "the watermark never goes back and the owner never changes",
        "NEW.watermark < OLD.watermark OR (NEW.ledger_id, NEW.party, NEW.identity_key)"
        " IS NOT (OLD.ledger_id, OLD.party, OLD.identity_key)",
    ),
    Rule(
        "withdrawn_before_any_vote_on_insert",
        "queries",
        _INSERT,
        "a query with an attempt that is not aborted cannot be withdrawn",
        "NEW.state = 'withdrawn'"
        " AND EXISTS (SELECT 1 FROM attempts WHERE query_key = NEW.query_key AND state <> 'aborted')",
    ),
    Rule(
        "withdrawn_for_ever",
        "queries",
        _UPDATE,
        "a query that was withdrawn stays so",
        "OLD.state = 'withdrawn' AND NEW.state <> 'withdrawn'",
    ),
    Rule(
        "no_attempt_at_a_withdrawn_query",
        "attempts",
        _INSERT,
        "the query was withdrawn",
        "EXISTS (SELECT 1 FROM queries WHERE query_key = NEW.query_key AND state = 'withdrawn')",
    ),
    Rule("queries_stay", "queries", _DELETE, "queries are never deleted"),
    Rule("ledger_stays", "ledger", _DELETE, "a ledger is permanent"),
)

# Rules on tables of reports look at rows after the change: an upsert that updates has inserted nothing.
_EVERY_TABLE = (
    # A debug query is answered without noise, so a real report must never be in one; nor a debug report in a real one.
    # `IS NOT`, because both are NULL where the report was spent elsewhere: its header is not known here.
    Rule(
        "join_their_own_kind",
        "",
        _INSERT,
        "a debug report in a real attempt, or the reverse",
        "NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)",
    ),
    Rule("go_by_the_day", "", _DELETE, "reports are forgotten by whole days, when they are not above the watermark"),
)
_UNDATED_DIGEST = f"substr(NEW.digest, {SITE_PREFIX + 1})"
_DAY_RULES = (
    *_EVERY_TABLE,
    # What was taken before is counted, once. From NULL nothing can be checked, and nothing was taken.
    Rule(
        "amounts_add_up",
        "",
        _UPDATE,
        "what is left of a report is what its last attempt left",
        "NEW.before IS NULL OR (SELECT CASE WHEN state = 'aborted' THEN NEW.before <> coalesce(OLD.before, NEW.before)"  # noqa: S608
        f" WHEN attempt = {ELSEWHERE} THEN NEW.before > OLD.after ELSE NEW.before <> OLD.after END"
        " FROM attempts WHERE attempt = OLD.attempt)",
    ),
    Rule(
        "leave_nothing_of_whole",
        "",
        _UPDATE,
        "a query that does not keep the rest leaves nothing",
        "NEW.after <> 0 AND (SELECT whole FROM attempts WHERE attempt = NEW.attempt) = 1",
    ),
    Rule(
        "go_to_reservations",
        "",
        _UPDATE,
        "a report is pointed at an attempt that is being reserved",
        "(SELECT state FROM attempts WHERE attempt = NEW.attempt) IS NOT 'reserved'",
    ),
    Rule(
        "stay_locked",
        "",
        _UPDATE,
        "the report is held by a live attempt",
        "(SELECT state FROM attempts WHERE attempt = OLD.attempt) NOT IN ('aborted', 'released')"
        " OR NEW.digest <> OLD.digest",
    ),
    # Otherwise a report that was spent before there were days would begin again on its day.
    Rule(
        "go_on_from_undated",
        "",
        _INSERT,
        "the report is recorded already, without its day",
        # Mostly there are none at all, which PostgreSQL finds out once for all rows.
        "EXISTS (SELECT 1 FROM undated)"  # noqa: S608  (constants)
        f" AND EXISTS (SELECT 1 FROM undated WHERE digest = {_UNDATED_DIGEST}"
        " AND (attempt, debug, draws, before, after)"
        " IS NOT (NEW.attempt, NEW.debug, NEW.draws, NEW.before, NEW.after))",
    ),
    Rule(
        "begin_in_full",
        "",
        _INSERT,
        "a report that is new here was in no draw, and is used up or keeps the rest of all that was paid",
        # What costs least first: it is false for every legal row of a new report, and `undated` is not searched then.
        "(NEW.draws <> 0 OR (NEW.before IS NULL AND NEW.after <> 0)"  # noqa: S608  (constants)
        " OR (SELECT whole FROM attempts WHERE attempt = NEW.attempt)"
        " IS NOT CASE WHEN NEW.before IS NULL THEN 1 ELSE 0 END)"
        f" AND NOT EXISTS (SELECT 1 FROM undated WHERE digest = {_UNDATED_DIGEST})",
    ),
    Rule(
        "draws_add_up",
        "",
        _UPDATE,
        "the draws that a report was in are counted",
        f"NEW.draws <> OLD.draws + (SELECT {FAILED_DRAW} FROM attempts WHERE attempt = OLD.attempt)",  # noqa: S608
    ),
    Rule(
        "draws_are_few",
        "",
        _UPDATE,
        "the report was in as many draws as this query allows",
        "NEW.draws >= (SELECT most_draws FROM attempts WHERE attempt = NEW.attempt)",
    ),
    Rule(
        "keep_their_kind",
        "",
        _UPDATE,
        "a debug report in a real attempt, or the reverse",
        # Peers cannot say a report's kind. Its header does, once it is in a batch.
        "NEW.debug IS NOT coalesce(OLD.debug, NEW.debug)"
        " OR NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)",
    ),
)
_UNDATED_RULES = (
    *_EVERY_TABLE,
    Rule("come_from_peers", "", _INSERT, "a report of unknown day comes from peers", f"NEW.attempt <> {ELSEWHERE}"),
    Rule("stand", "", _UPDATE, "a report of unknown day is copied to its day, and never changed here"),
)


def day_table(day: int) -> str:
    """Return the name of the table of a day's reports."""
    return UNDATED if day == NO_DAY else f"reports_{day:d}"


def site_prefix(site: str) -> bytes:
    """Return the bytes with which the digests of a site's reports begin in the tables of days."""
    return tagged_hash("ledger site", site.encode())[:SITE_PREFIX]


def last_hour(day: int) -> int:
    """Return the time of a day's last hour: no header of that day names a later one."""
    return (day * HOURS_PER_DAY + HOURS_PER_DAY - 1) * TIME_STEP


def reports_rules(table: str) -> list[Rule]:
    """Return the rules on a table of reports."""
    rules = _UNDATED_RULES if table == UNDATED else _DAY_RULES
    return [replace(rule, name=f"{table}_{rule.name}", table=table) for rule in rules]
