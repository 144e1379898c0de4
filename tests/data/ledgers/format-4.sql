BEGIN TRANSACTION;
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
INSERT INTO "attempts" VALUES(0,X'0000000000000000000000000000000000000000000000000000000000000000',X'0000000000000000000000000000000000000000000000000000000000000000',X'0000000000000000000000000000000000000000000000000000000000000000',0,NULL,4611686018427387904,'released',0,NULL,'spent before this ledger began',1,NULL);
INSERT INTO "attempts" VALUES(1,X'0101010101010101010101010101010101010101010101010101010101010101',X'0101010101010101010101010101010101010101010101010101010101010101',X'6464646464646464646464646464646464646464646464646464646464646464',1,0,1728018000,'released',1,X'7365616C6564','',1,NULL);
INSERT INTO "attempts" VALUES(2,X'0201020102010201020102010201020102010201020102010201020102010201',X'0202020202020202020202020202020202020202020202020202020202020202',X'6464646464646464646464646464646464646464646464646464646464646464',1,0,1728018000,'aborted',0,NULL,'a NO',1,NULL);
INSERT INTO "attempts" VALUES(3,X'0202020202020202020202020202020202020202020202020202020202020202',X'0202020202020202020202020202020202020202020202020202020202020202',X'6464646464646464646464646464646464646464646464646464646464646464',2,0,1728018000,'aborted',0,NULL,'again',1,NULL);
INSERT INTO "attempts" VALUES(4,X'0301030103010301030103010301030103010301030103010301030103010301',X'0303030303030303030303030303030303030303030303030303030303030303',X'6464646464646464646464646464646464646464646464646464646464646464',1,0,1727931600,'voted',1,X'7365616C6564','',1,NULL);
INSERT INTO "attempts" VALUES(5,X'0401040104010401040104010401040104010401040104010401040104010401',X'0404040404040404040404040404040404040404040404040404040404040404',X'6464646464646464646464646464646464646464646464646464646464646464',1,0,1728018000,'renounced',1,NULL,'a NO',1,NULL);
INSERT INTO "attempts" VALUES(6,X'0501050105010501050105010501050105010501050105010501050105010501',X'0505050505050505050505050505050505050505050505050505050505050505',X'6464646464646464646464646464646464646464646464646464646464646464',1,0,1728018000,'reserved',0,NULL,'',1,NULL);
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    ledger_id BLOB NOT NULL CHECK (length(ledger_id) = 16),
    party INTEGER NOT NULL CHECK (party IN (0, 1, 2)),
    identity_key BLOB NOT NULL CHECK (length(identity_key) = 32),
    watermark INTEGER NOT NULL
);
INSERT INTO "ledger" VALUES(1,X'69696969696969696969696969696969',0,X'6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B',1726290000);
CREATE TABLE moves (
    sequence INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    head BLOB NOT NULL CHECK (length(head) = 32)
);
INSERT INTO "moves" VALUES(1,1,'reserved',X'2687B9DA04189181CC6A17F4AEB596447C2F7BBB77FE666BED4364D1EC8CDF8E');
INSERT INTO "moves" VALUES(2,1,'voted',X'3D628155B88CADC4DCD7CD5169AD2A470F1DB9C25547A4A187D23A0E3A1BA86B');
INSERT INTO "moves" VALUES(3,1,'released',X'1672AA2CC73C43B0A97E91C91346E7886E2F792A727D66C092A4039FFBDD0BD7');
INSERT INTO "moves" VALUES(4,2,'reserved',X'D9A334F1769BB7906DE1DD0DA40323078D838AE384B42AA6A3C6998D27815550');
INSERT INTO "moves" VALUES(5,2,'aborted',X'6AB07BAF7FC837FC92615208044B4484863D69A3E7FF8B42D0664E45F1BADFB7');
INSERT INTO "moves" VALUES(6,3,'reserved',X'FA60B7D6629729DA8C67D3691CEDE367E2230E056EAA2E41DF4F454FED46AE0C');
INSERT INTO "moves" VALUES(7,3,'aborted',X'116618949F18EAB87B7C5A9EB4789D939C9E5E0387847DB6F24C67B22A8D7DD8');
INSERT INTO "moves" VALUES(8,4,'reserved',X'E2FF08F3CF095A0689BB829D28828343E32FEAF4CAB3CB1A9266DDC4D4772092');
INSERT INTO "moves" VALUES(9,4,'voted',X'BC3001955CEFCF194EA8F5CF551EA7370FF1B2F4071F86A162DEAB5949D50E94');
INSERT INTO "moves" VALUES(10,5,'reserved',X'BBDD3CADDB817AC182940997E6501BAD5395CBA8962F85B584E0352D4D4E69EC');
INSERT INTO "moves" VALUES(11,5,'voted',X'04452BAA487190664C37A3A0FEB6F68DB61A3288555BED72BF70CE89C97906F9');
INSERT INTO "moves" VALUES(12,5,'renounced',X'1BBF0E38518F2739BF7674DDD7EB9C74F8663B9CE897828B971E122F8B39AE41');
INSERT INTO "moves" VALUES(13,6,'reserved',X'0FF0A1FAF47A0CB7F2996D4D2335D6D96875919E2E8162C55F3B9629F1212EBD');
CREATE TABLE peer_heads (
    party INTEGER PRIMARY KEY CHECK (party IN (0, 1, 2)),
    ledger_id BLOB NOT NULL CHECK (length(ledger_id) = 16),
    sequence INTEGER NOT NULL,
    head BLOB NOT NULL CHECK (length(head) = 32)
);
INSERT INTO "peer_heads" VALUES(1,X'70707070707070707070707070707070',7,X'6868686868686868686868686868686868686868686868686868686868686868');
CREATE TABLE queries (
    query_key BLOB PRIMARY KEY NOT NULL CHECK (length(query_key) = 32),
    query_digest BLOB NOT NULL CHECK (length(query_digest) = 32),
    state TEXT NOT NULL,
    detail TEXT NOT NULL,
    updated INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "queries" VALUES(X'0606060606060606060606060606060606060606060606060606060606060606',X'6464646464646464646464646464646464646464646464646464646464646464','withdrawn','{"stage": "queued", "party": null, "reason": "withdrawn", "hint": "", "shortfall": null}',20);
CREATE TABLE reports (
    digest BLOB PRIMARY KEY NOT NULL,
    attempt INTEGER NOT NULL,
    debug INTEGER CHECK (debug IN (0, 1)),
    draws INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
INSERT INTO "reports" VALUES(X'0A00000000000000000000000000000000000000000000000000000000000000',1,0,0);
INSERT INTO "reports" VALUES(X'0B00000000000000000000000000000000000000000000000000000000000000',1,0,0);
INSERT INTO "reports" VALUES(X'1400000000000000000000000000000000000000000000000000000000000000',3,0,1);
INSERT INTO "reports" VALUES(X'1500000000000000000000000000000000000000000000000000000000000000',3,0,0);
INSERT INTO "reports" VALUES(X'1E00000000000000000000000000000000000000000000000000000000000000',4,0,0);
INSERT INTO "reports" VALUES(X'2800000000000000000000000000000000000000000000000000000000000000',5,0,0);
INSERT INTO "reports" VALUES(X'3200000000000000000000000000000000000000000000000000000000000000',6,0,0);
INSERT INTO "reports" VALUES(X'5A00000000000000000000000000000000000000000000000000000000000000',0,NULL,0);
INSERT INTO "reports" VALUES(X'5B00000000000000000000000000000000000000000000000000000000000000',0,NULL,0);
INSERT INTO "reports" VALUES(X'5C00000000000000000000000000000000000000000000000000000000000000',0,NULL,0);
CREATE TABLE votes (
    attempt INTEGER NOT NULL REFERENCES attempts,
    party INTEGER NOT NULL CHECK (party IN (0, 1, 2)),
    vote TEXT NOT NULL CHECK (vote IN ('yes', 'aborted', 'renounced')),
    message BLOB NOT NULL,
    PRIMARY KEY (attempt, party, vote)
) WITHOUT ROWID;
INSERT INTO "votes" VALUES(1,1,'yes',X'796573206F662032');
INSERT INTO "votes" VALUES(1,2,'yes',X'796573206F662033');
INSERT INTO "votes" VALUES(2,1,'aborted',X'6E6F206F662032');
INSERT INTO "votes" VALUES(5,1,'aborted',X'6E6F206F662032');
CREATE UNIQUE INDEX one_live_attempt_per_query ON attempts (query_key) WHERE state <> 'aborted';
CREATE INDEX attempts_of_query ON attempts (query_key, number);
CREATE INDEX unsettled ON attempts (state) WHERE state IN ('reserved', 'voted', 'renounced');
CREATE TRIGGER attempts_begin_reserved BEFORE INSERT ON attempts
    WHEN NEW.state <> 'reserved' OR NEW.voted OR NEW.sealed_share IS NOT NULL OR NEW.debug IS NULL OR NOT NEW.drawn
    BEGIN SELECT RAISE(ABORT, 'an attempt begins as reserved, for a debug query or a real one'); END;
CREATE TRIGGER attempt_numbers_rise BEFORE INSERT ON attempts
    WHEN NEW.number <= (SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = NEW.query_key)
    BEGIN SELECT RAISE(ABORT, 'the number of a new attempt must be above the last'); END;
CREATE TRIGGER attempts_move_legally BEFORE UPDATE ON attempts
    WHEN NOT ((OLD.state = 'reserved' AND NEW.state IN ('voted', 'aborted'))
           OR (OLD.state = 'voted' AND NEW.state IN ('released', 'renounced'))
           OR (OLD.state = 'renounced' AND NEW.state = 'aborted')
           OR (OLD.state = 'released' AND NEW.state = 'released' AND NEW.sealed_share IS NULL))
    BEGIN SELECT RAISE(ABORT, 'no such move'); END;
CREATE TRIGGER attempts_keep_their_name BEFORE UPDATE ON attempts
    WHEN (NEW.attempt, NEW.attempt_id, NEW.query_key, NEW.query_digest, NEW.number, NEW.debug, NEW.newest)
      IS NOT (OLD.attempt, OLD.attempt_id, OLD.query_key, OLD.query_digest, OLD.number, OLD.debug, OLD.newest)
      OR NEW.most_draws IS NOT OLD.most_draws
    BEGIN SELECT RAISE(ABORT, 'only the state of an attempt changes'); END;
CREATE TRIGGER a_vote_stores_its_share BEFORE UPDATE ON attempts
    WHEN (NEW.state = 'voted') <> (NEW.voted <> OLD.voted)
      OR (NEW.state = 'voted' AND NEW.sealed_share IS NULL)
      OR (NEW.state = 'released' AND OLD.state <> 'released' AND NEW.sealed_share IS NOT OLD.sealed_share)
    BEGIN SELECT RAISE(ABORT, 'the sealed share is stored with the vote, once'); END;
CREATE TRIGGER a_share_goes_with_its_promise BEFORE UPDATE ON attempts
    WHEN NEW.state IN ('renounced', 'aborted') AND NEW.sealed_share IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'a share that will not be released is erased'); END;
CREATE TRIGGER draws_count_unless_none_was_made BEFORE UPDATE ON attempts
    WHEN NEW.drawn <> OLD.drawn AND NOT (OLD.drawn AND OLD.state = 'reserved' AND NEW.state = 'aborted')
    BEGIN SELECT RAISE(ABORT, 'a draw that may have been made counts'); END;
CREATE TRIGGER release_needs_both_yes BEFORE UPDATE ON attempts
    WHEN NEW.state = 'released' AND (SELECT count(*) FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote = 'yes' AND votes.party <> ledger.party) <> 2
    BEGIN SELECT RAISE(ABORT, 'releasing needs YES from both peers'); END;
CREATE TRIGGER renouncing_needs_a_no BEFORE UPDATE ON attempts
    WHEN NEW.state = 'renounced' AND NOT EXISTS (SELECT 1 FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote <> 'yes' AND votes.party <> ledger.party)
    BEGIN SELECT RAISE(ABORT, 'renouncing needs a NO'); END;
CREATE TRIGGER freeing_needs_both_no BEFORE UPDATE ON attempts
    WHEN OLD.state = 'renounced' AND NEW.state = 'aborted'
        AND (SELECT count(DISTINCT votes.party) FROM votes, ledger WHERE votes.attempt = NEW.attempt
        AND votes.vote <> 'yes' AND votes.party <> ledger.party) <> 2
    BEGIN SELECT RAISE(ABORT, 'freeing a voted attempt needs NO from both peers'); END;
CREATE TRIGGER attempts_stay BEFORE DELETE ON attempts
    BEGIN SELECT RAISE(ABORT, 'attempts are never deleted'); END;
CREATE TRIGGER reports_stay_locked BEFORE UPDATE ON reports
    WHEN (SELECT state FROM attempts WHERE attempt = OLD.attempt) <> 'aborted' OR NEW.digest <> OLD.digest
    BEGIN SELECT RAISE(ABORT, 'the report is held by a live attempt'); END;
CREATE TRIGGER reports_join_their_own_kind BEFORE INSERT ON reports
    WHEN NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'a debug report in a real attempt, or the reverse'); END;
CREATE TRIGGER reports_begin_without_draws BEFORE INSERT ON reports
    WHEN NEW.draws <> 0
    BEGIN SELECT RAISE(ABORT, 'a report that is new here was in no draw'); END;
CREATE TRIGGER draws_add_up BEFORE UPDATE ON reports
    WHEN NEW.draws <> OLD.draws + (SELECT drawn FROM attempts WHERE attempt = OLD.attempt)
    BEGIN SELECT RAISE(ABORT, 'the draws that a report was in are counted'); END;
CREATE TRIGGER draws_are_few BEFORE UPDATE ON reports
    WHEN NEW.draws >= (SELECT most_draws FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'the report was in as many draws as this query allows'); END;
CREATE TRIGGER reports_keep_their_kind BEFORE UPDATE ON reports
    WHEN NEW.debug IS NOT OLD.debug OR NEW.debug IS NOT (SELECT debug FROM attempts WHERE attempt = NEW.attempt)
    BEGIN SELECT RAISE(ABORT, 'a debug report in a real attempt, or the reverse'); END;
CREATE TRIGGER reports_go_by_the_watermark BEFORE DELETE ON reports
    WHEN (SELECT newest FROM attempts WHERE attempt = OLD.attempt) > (SELECT watermark FROM ledger)
    BEGIN SELECT RAISE(ABORT, 'the report is above the watermark'); END;
CREATE TRIGGER votes_stay BEFORE DELETE ON votes BEGIN SELECT RAISE(ABORT, 'votes are never deleted'); END;
CREATE TRIGGER votes_stand BEFORE UPDATE ON votes BEGIN SELECT RAISE(ABORT, 'votes are never changed'); END;
CREATE TRIGGER moves_follow BEFORE INSERT ON moves
    WHEN NEW.sequence <> (SELECT coalesce(max(sequence), 0) + 1 FROM moves)
    BEGIN SELECT RAISE(ABORT, 'moves are numbered without gaps'); END;
CREATE TRIGGER moves_stay BEFORE DELETE ON moves BEGIN SELECT RAISE(ABORT, 'moves are never deleted'); END;
CREATE TRIGGER moves_stand BEFORE UPDATE ON moves BEGIN SELECT RAISE(ABORT, 'moves are never changed'); END;
CREATE TRIGGER watermark_rises BEFORE UPDATE ON ledger
    WHEN NEW.watermark < OLD.watermark OR (NEW.ledger_id, NEW.party, NEW.identity_key)
      IS NOT (OLD.ledger_id, OLD.party, OLD.identity_key)
    BEGIN SELECT RAISE(ABORT, 'the watermark never goes back and the owner never changes'); END;
CREATE TRIGGER withdrawn_before_any_vote_on_insert BEFORE INSERT ON queries
    WHEN NEW.state = 'withdrawn'
        AND EXISTS (SELECT 1 FROM attempts WHERE query_key = NEW.query_key AND state <> 'aborted')
    BEGIN SELECT RAISE(ABORT, 'a query with an attempt that is not aborted cannot be withdrawn'); END;
CREATE TRIGGER withdrawn_for_ever BEFORE UPDATE ON queries
    WHEN OLD.state = 'withdrawn' AND NEW.state <> 'withdrawn'
    BEGIN SELECT RAISE(ABORT, 'a query that was withdrawn stays so'); END;
CREATE TRIGGER no_attempt_at_a_withdrawn_query BEFORE INSERT ON attempts
    WHEN EXISTS (SELECT 1 FROM queries WHERE query_key = NEW.query_key AND state = 'withdrawn')
    BEGIN SELECT RAISE(ABORT, 'the query was withdrawn'); END;
CREATE TRIGGER queries_stay BEFORE DELETE ON queries
    BEGIN SELECT RAISE(ABORT, 'queries are never deleted'); END;
CREATE TRIGGER ledger_stays BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'a ledger is for ever'); END;
COMMIT;
