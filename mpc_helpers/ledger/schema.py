"""The report ledger's tables, and the rules of COMMIT.md that SQLite itself enforces on them.

Defence in depth: a bug in the code above cannot persist an illegal move, because a trigger aborts the transaction.
"""

from __future__ import annotations

# "TfNL" in ASCII, in the file's header: identifies a report ledger without opening it.
APPLICATION_ID = 0x54664E4C
SCHEMA_VERSION = 4

# Row 0 of `attempts` owns the reports imported from both peers after a lost ledger: spent by an unknown attempt.
ELSEWHERE = 0

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
    most_draws INTEGER CHECK (most_draws > 0)
);
CREATE UNIQUE INDEX one_live_attempt_per_query ON attempts (query_key) WHERE state <> 'aborted';
CREATE INDEX attempts_of_query ON attempts (query_key, number);
CREATE INDEX unsettled ON attempts (state) WHERE state IN ('reserved', 'voted', 'renounced');
CREATE TABLE reports (
    digest BLOB PRIMARY KEY NOT NULL,
    attempt INTEGER NOT NULL,
    debug INTEGER CHECK (debug IN (0, 1)),
    draws INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
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

TRIGGERS = (
    """
    CREATE TRIGGER attempts_begin_reserved BEFORE INSERT ON attempts
    WHEN NEW.state <> 'reserved' OR NEW.voted OR NEW.sealed_share IS NOT NULL OR NEW.debug IS NULL OR NOT NEW.drawn
    BEGIN SELECT RAISE(ABORT, 'an attempt begins as reserved, for a debug query or a real one'); END
    """,
    """
    CREATE TRIGGER attempt_numbers_rise BEFORE INSERT ON attempts
    WHEN NEW.number <= (SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = NEW.query_key)
    BEGIN SELECT RAISE(ABORT, 'the number of a new attempt must be above the last'); END
    """,
    """
    CREATE TRIGGER attempts_move_legally BEFORE UPDATE ON attempts
    WHEN NOT ((OLD.state = 'reserved' AND NEW.state IN ('voted', 'aborted'))
           OR (OLD.state = 'voted' AND NEW.state IN ('released', 'renounced'))
           OR (OLD.state = 'renounced' AND NEW.state = 'aborted')
           OR (OLD.state = 'released' AND NEW.state = 'released' AND NEW.sealed_share IS NULL))
    BEGIN SELECT RAISE(ABORT, 'no such move'); END
    """,
    """
    CREATE TRIGGER attempts_keep_their_name BEFORE UPDATE ON attempts
    WHEN (NEW.attempt, NEW.attempt_id, NEW.query_key, NEW.query_digest, NEW.number, NEW.debug, NEW.newest)
      IS NOT (OLD.attempt, OLD.attempt_id, OLD.query_key, OLD.query_digest, OLD.number, OLD.debug, OLD.newest)
      OR NEW.most_draws IS NOT OLD.most_draws
    BEGIN SELECT RAISE(ABORT, 'only the state of an attempt changes'); END
    """,
    """
    CREATE TRIGGER a_vote_stores_its_share BEFORE UPDATE ON attempts
    WHEN (NEW.state = 'voted') <> (NEW.voted <> OLD.voted)
      OR (NEW.state = 'voted' AND NEW.sealed_share IS NULL)
      OR (NEW.state = 'released' AND OLD.state <> 'released' AND NEW.sealed_share IS NOT OLD.sealed_share)
    BEGIN SELECT RAISE(ABORT, 'the sealed share is stored with the vote, once'); END
    """,
    # Shares that will never be released are erased: a ledger that leaks later, with the querier's key and a malicious
    # helper's shares, would open every attempt whose share is still stored, each with independent noise.
    """
    CREATE TRIGGER a_share_goes_with_its_promise BEFORE UPDATE ON attempts
    WHEN NEW.state IN ('renounced', 'aborted') AND NEW.sealed_share IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'a share that will not be released is erased'); END
    """,
    # A helper that knows part of the noise before its vote could abort until it likes a draw. So every reservation
    # counts as a draw, unless it was aborted before its MPC began.
    """
    CREATE TRIGGER draws_count_unless_none_was_made BEFORE UPDATE ON attempts
    WHEN NEW.drawn <> OLD.drawn AND NOT (OLD.drawn AND OLD.state = 'reserved' AND NEW.state = 'aborted')
    BEGIN SELECT RAISE(ABORT, 'a draw that may have been made counts'); END
    """,
    """
    CREATE TRIGGER release_needs_both_yes BEFORE UPDATE ON attempts
    WHEN NEW.state = 'released' AND (SELECT count(*) FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote = 'yes' AND votes.party <> ledger.party) <> 2
    BEGIN SELECT RAISE(ABORT, 'releasing needs YES from both peers'); END
    """,
    """
    CREATE TRIGGER renouncing_needs_a_no BEFORE UPDATE ON attempts
    WHEN NEW.state = 'renounced' AND NOT EXISTS (SELECT 1 FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote <> 'yes' AND votes.party <> ledger.party)
    BEGIN SELECT RAISE(ABORT, 'renouncing needs a NO'); END
    """,
    """
    CREATE TRIGGER freeing_needs_both_no BEFORE UPDATE ON attempts
    WHEN OLD.state = 'renounced' AND NEW.state = 'aborted'
        AND (SELECT count(DISTINCT votes.party) FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote <> 'yes' AND votes.party <> ledger.party) <> 2
    BEGIN SELECT RAISE(ABORT, 'freeing a voted attempt needs NO from both peers'); END
    """,
    """
    CREATE TRIGGER attempts_stay BEFORE DELETE ON attempts
    BEGIN SELECT RAISE(ABORT, 'attempts are never deleted'); END
    """,
    """
    CREATE TRIGGER reports_stay_locked BEFORE UPDATE ON reports
    WHEN (SELECT state FROM attempts WHERE attempt = OLD.attempt) <> 'aborted' OR NEW.digest <> OLD.digest
    BEGIN SELECT RAISE(ABORT, 'the report is held by a live attempt'); END
    """,
    # A debug query is answered without noise, so a real report must never be in one; nor a debug report in a real one.
    # `IS NOT`, because both are NULL where the report was spent elsewhere: its header is not known here.
    """
    CREATE TRIGGER reports_join_their_own_kind BEFORE INSERT ON reports
    WHEN NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'a debug report in a real attempt, or the reverse'); END
    """,
    """
    CREATE TRIGGER reports_begin_without_draws BEFORE INSERT ON reports
    WHEN NEW.draws <> 0
    BEGIN SELECT RAISE(ABORT, 'a report that is new here was in no draw'); END
    """,
    """
    CREATE TRIGGER draws_add_up BEFORE UPDATE ON reports
    WHEN NEW.draws <> OLD.draws + (SELECT drawn FROM attempts WHERE attempt = OLD.attempt)
    BEGIN SELECT RAISE(ABORT, 'the draws that a report was in are counted'); END
    """,
    """
    CREATE TRIGGER draws_are_few BEFORE UPDATE ON reports
    WHEN NEW.draws >= (SELECT most_draws FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'the report was in as many draws as this query allows'); END
    """,
    """
    CREATE TRIGGER reports_keep_their_kind BEFORE UPDATE ON reports
    WHEN NEW.debug IS NOT OLD.debug OR NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'a debug report in a real attempt, or the reverse'); END
    """,
    """
    CREATE TRIGGER reports_go_by_the_watermark BEFORE DELETE ON reports
    WHEN (SELECT newest FROM attempts WHERE attempt = OLD.attempt) > (SELECT watermark FROM ledger)
    BEGIN SELECT RAISE(ABORT, 'the report is above the watermark'); END
    """,
    """
    CREATE TRIGGER votes_stay BEFORE DELETE ON votes BEGIN SELECT RAISE(ABORT, 'votes are never deleted'); END
    """,
    """
    CREATE TRIGGER votes_stand BEFORE UPDATE ON votes BEGIN SELECT RAISE(ABORT, 'votes are never changed'); END
    """,
    """
    CREATE TRIGGER moves_follow BEFORE INSERT ON moves
    WHEN NEW.sequence <> (SELECT coalesce(max(sequence), 0) + 1 FROM moves)
    BEGIN SELECT RAISE(ABORT, 'moves are numbered without gaps'); END
    """,
    """
    CREATE TRIGGER moves_stay BEFORE DELETE ON moves BEGIN SELECT RAISE(ABORT, 'moves are never deleted'); END
    """,
    """
    CREATE TRIGGER moves_stand BEFORE UPDATE ON moves BEGIN SELECT RAISE(ABORT, 'moves are never changed'); END
    """,
    """
    CREATE TRIGGER watermark_rises BEFORE UPDATE ON ledger
    WHEN NEW.watermark < OLD.watermark OR (NEW.ledger_id, NEW.party, NEW.identity_key)
      IS NOT (OLD.ledger_id, OLD.party, OLD.identity_key)
    BEGIN SELECT RAISE(ABORT, 'the watermark never goes back and the owner never changes'); END
    """,
    """
    CREATE TRIGGER withdrawn_before_any_vote_on_insert BEFORE INSERT ON queries
    WHEN NEW.state = 'withdrawn'
        AND EXISTS (SELECT 1 FROM attempts WHERE query_key = NEW.query_key AND state <> 'aborted')
    BEGIN SELECT RAISE(ABORT, 'a query with an attempt that is not aborted cannot be withdrawn'); END
    """,
    """
    CREATE TRIGGER withdrawn_for_ever BEFORE UPDATE ON queries
    WHEN OLD.state = 'withdrawn' AND NEW.state <> 'withdrawn'
    BEGIN SELECT RAISE(ABORT, 'a query that was withdrawn stays so'); END
    """,
    """
    CREATE TRIGGER no_attempt_at_a_withdrawn_query BEFORE INSERT ON attempts
    WHEN EXISTS (SELECT 1 FROM queries WHERE query_key = NEW.query_key AND state = 'withdrawn')
    BEGIN SELECT RAISE(ABORT, 'the query was withdrawn'); END
    """,
    """
    CREATE TRIGGER queries_stay BEFORE DELETE ON queries
    BEGIN SELECT RAISE(ABORT, 'queries are never deleted'); END
    """,
    """
    CREATE TRIGGER ledger_stays BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'a ledger is for ever'); END
    """,
)
