"""The ledger's tables and rules in PostgreSQL: the same tables and the same rules as in SQLite, and the fencing epoch.

Rules on tables of reports look at all rows of a statement at once, after it and in one pass: less than half the cost
of a function called for each row. All others are checked row by row, before the change, as SQLite does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from mpc_helpers.ledger.schema import (
    AFTER,
    APPLICATION_ID,
    RULES,
    SCHEMA_VERSION,
    SITE_PREFIX,
    TABLES,
    UNDATED,
    Change,
    Rule,
    reports_rules,
)
from protocol.wire import HASH_SIZE

# Narrow on purpose: there are billions of these rows and few of all others. The free space lets an update stay on its
# page without a new index entry.
_REPORTS = """
CREATE TABLE {table} (
    digest bytea PRIMARY KEY CHECK (length(digest) = {size}),
    attempt integer NOT NULL,
    debug smallint CHECK (debug IN (0, 1)),
    draws smallint NOT NULL DEFAULT 0,
    before bigint,
    after bigint NOT NULL DEFAULT 0 {check}
) WITH (fillfactor = 85)
"""
# `epoch` is the fencing token: it rises whenever a process opens the ledger, and a process with an older one is fenced.
_EPOCH = f"""
ALTER TABLE ledger
    ADD kind integer NOT NULL DEFAULT {APPLICATION_ID},
    ADD version integer NOT NULL DEFAULT {SCHEMA_VERSION},
    ADD epoch bigint NOT NULL DEFAULT 0
"""
_RAISE = "RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = "
_FENCE = f"""
CREATE FUNCTION fence() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM ledger WHERE epoch = nullif(current_setting('trefoil.epoch', true), '')::bigint;
    IF NOT FOUND THEN
        {_RAISE} 'only the process that holds a ledger writes to it';
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION fence_takeover() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch = OLD.epoch + 1 AND (NEW.ledger_id, NEW.party, NEW.identity_key, NEW.watermark, NEW.kind, NEW.version)
        IS NOT DISTINCT FROM (OLD.ledger_id, OLD.party, OLD.identity_key, OLD.watermark, OLD.kind, OLD.version)
    THEN
        RETURN NEW;
    END IF;
    IF NEW.epoch <> OLD.epoch OR (NEW.kind, NEW.version) <> (OLD.kind, OLD.version)
        OR OLD.epoch IS DISTINCT FROM nullif(current_setting('trefoil.epoch', true), '')::bigint
    THEN
        {_RAISE} 'only the process that holds a ledger writes to it';
    END IF;
    RETURN NEW;
END $$;
CREATE FUNCTION never_emptied() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_RAISE} 'a ledger is never emptied';
END $$;
CREATE TRIGGER a_fence_takeover BEFORE UPDATE ON ledger FOR EACH ROW EXECUTE FUNCTION fence_takeover()
"""
_NAMES = ("ledger", "attempts", "days", "votes", "moves", "peer_heads", "queries")
# The attempt that a row points to, which most rules ask about: joined once, and not looked up by each of them.
_POINTED = " LEFT JOIN attempts a ON a.attempt = n.attempt"
_TRANSITIONS = {
    Change.INSERT: ("NEW TABLE AS added", "added n" + _POINTED),
    Change.UPDATE: (
        "OLD TABLE AS gone NEW TABLE AS added",
        "gone o FULL JOIN added n ON n.digest = o.digest" + _POINTED,
    ),
    Change.DELETE: ("OLD TABLE AS gone", "gone o"),
}


def tables() -> Iterator[str]:
    """Yield the statements that make an empty ledger's tables."""
    for table in filter(str.strip, TABLES.split(";")):
        yield table.replace("BLOB", "bytea").replace("INTEGER", "bigint").replace("WITHOUT ROWID", "")
    yield _EPOCH


def guards() -> Iterator[str]:
    """Yield the statements that make the rules and the fence, once the first rows are in."""
    yield _FENCE
    yield from _rules(RULES, _row_wise)
    for table in _NAMES:
        yield from _fences(table, "INSERT OR DELETE" if table == "ledger" else "INSERT OR UPDATE OR DELETE")


def reports_table(table: str) -> Iterator[str]:
    """Yield the statements that make a table of reports with its rules."""
    size = HASH_SIZE if table == UNDATED else SITE_PREFIX + HASH_SIZE
    yield _REPORTS.format(table=table, size=size, check=AFTER)
    yield from _rules(reports_rules(table), _set_wise)
    yield from _fences(table, "INSERT OR UPDATE OR DELETE")


def triggers(report_tables: Iterable[str]) -> set[tuple[str, str]]:
    """Return the triggers of a ledger with these tables of reports: the table and the name of each."""
    statements = (*guards(), *(statement for table in report_tables for statement in reports_table(table)))
    made = (re.findall(r"CREATE TRIGGER (\w+) .*? ON (\w+)", statement) for statement in statements)
    return {(table, name) for each in made for name, table in each}


def drop_functions(table: str) -> str:
    """Return the statement that drops the functions of a table of reports, which do not go with it."""
    return ";".join(f"DROP FUNCTION IF EXISTS {table}_on_{change.value.lower()}()" for change in Change)


def _fences(table: str, events: str) -> Iterator[str]:
    yield f"CREATE TRIGGER a_fence BEFORE {events} ON {table} FOR EACH STATEMENT EXECUTE FUNCTION fence()"
    yield f"CREATE TRIGGER never_emptied BEFORE TRUNCATE ON {table} EXECUTE FUNCTION never_emptied()"


def _rules(rules: Sequence[Rule], make: Callable[[str, Change, list[Rule]], Iterator[str]]) -> Iterator[str]:
    # Where two rules are broken, SQLite names the one that was made last. Both engines say the same.
    by_change = sorted(rules, key=lambda rule: (rule.table, rule.change.value))
    for (table, change), group in groupby(by_change, key=lambda rule: (rule.table, rule.change)):
        yield from make(table, change, [*group][::-1])


def _row_wise(table: str, change: Change, rules: list[Rule]) -> Iterator[str]:
    checks = "".join(f"IF {_condition(rule)} THEN {_RAISE} '{rule.message}'; END IF;\n" for rule in rules)
    row = "OLD" if change is Change.DELETE else "NEW"
    name = f"{table}_on_{change.value.lower()}"
    yield f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {checks} RETURN {row}; END $$"
    yield f"CREATE TRIGGER {name} BEFORE {change.value} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"


def _set_wise(table: str, change: Change, rules: list[Rule]) -> Iterator[str]:
    referencing, rows = _TRANSITIONS[change]
    refused = [(f"({_of_rows(rule)})", rule.message) for rule in rules]
    if change is Change.UPDATE:
        # A digest that was changed is in one of the two tables only.
        refused.insert(0, ("n.digest IS NULL OR o.digest IS NULL", rules[0].message))
    # All in one pass, which stops at the first row that breaks a rule.
    cases = " ".join(f"WHEN {condition} THEN '{message}'" for condition, message in refused)
    first = f"SELECT CASE {cases} END INTO broken FROM {rows} WHERE {' OR '.join(each for each, _ in refused)} LIMIT 1"  # noqa: S608  (constants)
    name = f"{table}_on_{change.value.lower()}"
    yield (
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE broken text; BEGIN {first};\n"
        f"IF broken IS NOT NULL THEN {_RAISE} broken; END IF; RETURN NULL; END $$"
    )
    yield (
        f"CREATE TRIGGER {name} AFTER {change.value} ON {table} REFERENCING {referencing}"
        f" FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
    )


def _condition(rule: Rule) -> str:
    return re.sub(r"\bIS NOT (?!NULL)", "IS DISTINCT FROM ", rule.refused)


def _of_rows(rule: Rule) -> str:
    """Return a rule's condition over the rows `o`, `n`, and the attempt `a` that `n` points to."""
    joined = re.sub(r"\(SELECT (\w+) FROM attempts WHERE attempt = NEW\.attempt\)", r"a.\1", _condition(rule))
    return re.sub(r"\bOLD\.", "o.", re.sub(r"\bNEW\.", "n.", joined))
