"""Every query that was asked of a batch, in a folder beside it: the newest is resumed, older ones keep their answers.

A query is kept before its first byte leaves and for as long as the batch is: without the key in it, its answer is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

from protocol.batch import BatchReader
from protocol.errors import ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.keys import IdentityKey
from protocol.querier.ask import OnStatus, Querier
from protocol.querier.own_record import MeasuredBias
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.querier.worth import QueryResult

SUFFIX = ".queries"
_SUFFIX = ".json"
_NOTE = ".bias"
SHOWN_DIGITS = 8


class QueryFolder:
    """The queries of one batch, by id."""

    def __init__(self, batch: Path) -> None:
        self._batch = batch
        self.path = batch.with_name(batch.name + SUFFIX)

    def all(self) -> list[SavedQuery]:
        """Oldest first."""
        found = [SavedQuery.load(path) for path in sorted(self.path.glob(f"*{_SUFFIX}"))]
        return sorted(found, key=lambda saved: (saved.made, saved.query.query_id))

    def newest(self) -> SavedQuery | None:
        """The query that is resumed when nothing else is said."""
        found = self.all()
        return found[-1] if found else None

    def find(self, digits: str) -> SavedQuery:
        """The query whose id begins with these hexadecimal digits."""
        found = [saved for saved in self.all() if saved.query.query_id.hex().startswith(digits.lower())]
        if len(found) != 1:
            what = "several queries" if found else "no query"
            raise TrefoilError(
                f"{what} of {self._batch} has an id that begins with {digits!r}",
                "Show them with: trefoil query --list",
            )
        return found[0]

    def keep(self, saved: SavedQuery) -> SavedQuery:
        """Store a new query. It becomes the newest, also if it was made in the same second as another."""
        last = self.newest()
        if last is not None and saved.made <= last.made:
            saved = replace(saved, made=last.made + 1)
        self.path.mkdir(mode=0o700, exist_ok=True)
        saved.save(self._file(saved))
        return saved

    def keep_bias(self, result: QueryResult) -> None:
        """Note what an answer's side query said, for her own record. A query that is not of this folder has no note."""
        path = self._note(result.query.query_id.hex())
        if result.bias is not None and path.with_suffix(_SUFFIX).exists():
            noted = {"bias_bound": result.bias.bound, "beta": result.bias.beta}
            write_atomically(path, (json.dumps(noted) + "\n").encode(), mode=0o600)

    def bias_of(self, query_id: bytes) -> MeasuredBias | None:
        """What was noted of that query's answer, if anything was."""
        path = self._note(query_id.hex())
        try:
            noted = json.loads(path.read_bytes())
            return MeasuredBias(float(noted["bias_bound"]), float(noted["beta"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise TrefoilError(
                f"{path} is damaged", "Remove it, and fetch the answer with: trefoil query --id"
            ) from None

    def drop(self, saved: SavedQuery) -> None:
        """Remove a query that no helper took: nobody can ever answer it."""
        self._file(saved).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _note(self, digits: str) -> Path:
        return self.path / f"{digits}{_NOTE}"

    def _file(self, saved: SavedQuery) -> Path:
        return self.path / f"{saved.query.query_id.hex()}{_SUFFIX}"


async def ask_batch(
    querier: Querier,
    batch: BatchReader,
    options: QueryOptions,
    site_key: IdentityKey,
    now: int,
    *,
    new: bool = False,
    on_status: OnStatus = lambda _: None,
) -> QueryResult:
    """Resume the newest query of a batch, or ask a new one: if there is none yet, or with `new`.

    Before a new one, those that have no answer yet are withdrawn as far as they can be: else a bad helper could revive
    one of them, and the new query would find its reports spent.
    """
    folder = QueryFolder(batch.path)
    if new:
        await withdraw_all(querier, folder, site_key)
    saved = None if new else _resumable(folder, batch, options, site_key)
    if saved is not None:
        result = await _resumed(querier, saved, batch, on_status)
    else:
        saved = folder.keep(make_query(batch, options, querier.helper_set, site_key, now))
        try:
            result = await querier.ask(saved, batch, on_status)
        except QueryFailed as error:
            if not error.taken:
                folder.drop(saved)
            raise
    folder.keep_bias(result)
    return result


async def _resumed(querier: Querier, saved: SavedQuery, batch: BatchReader, on_status: OnStatus) -> QueryResult:
    try:
        return await querier.ask(saved, batch, on_status)
    except QueryFailed as error:
        if not error.taken:
            # She may have the right set and key by now, and what she asked under the wrong ones is still the newest.
            error.hint = (
                f"This query was saved when it was asked before. Ask a new one with --new. {error.hint}".strip()
            )
        raise


async def withdraw_all(querier: Querier, folder: QueryFolder, site_key: IdentityKey) -> None:
    """Take back every query of a batch that no helper has voted for. What was answered stays."""

    async def withdraw(saved: SavedQuery) -> None:
        with contextlib.suppress(QueryFailed):
            await querier.withdraw(saved, site_key)

    await asyncio.gather(*(withdraw(saved) for saved in folder.all()))


def _resumable(
    folder: QueryFolder, batch: BatchReader, options: QueryOptions, site_key: IdentityKey
) -> SavedQuery | None:
    """The newest query, if it is what its querier wants now; an error that says what differs if it is not."""
    saved = folder.newest()
    if saved is None:
        return None
    difference = _difference(saved, batch, options, site_key)
    if difference:
        old = f"trefoil query --id {saved.query.query_id.hex()[:SHOWN_DIGITS]}"
        new = "Ask a new one with --new; it leaves out what was counted."
        raise TrefoilError(f"{batch.path} {difference}", f"{new} If that query has an answer, fetch it with: {old}")
    return saved


def _difference(saved: SavedQuery, batch: BatchReader, options: QueryOptions, site_key: IdentityKey) -> str:
    query = saved.query
    if query.batch_root != batch.root():
        return "has changed since it was queried"
    # A deadline may differ: resuming late is the point.
    chosen = (query.noise, query.minimum_reports, query.tolerated_bad_permille)
    wanted = (options.noise, options.minimum_reports, options.tolerated_bad_permille)
    if chosen != wanted or options.epsilon_micros not in (None, query.epsilon_micros):
        return "was queried before, with another ε, noise or minimum"
    try:
        saved.signed.verify(site_key.public)
    except ProtocolError:
        return "was queried before, with another site key"
    return ""
