"""The saved queries of a batch, in a folder beside it, and how one is run: resumed, or submitted again.

The newest query is resumed; older ones remain, because their answers can still be fetched. `ask` is the same without
`await`, for scripts and notebooks.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.answer import Answer
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import remove_on_failure, write_atomically
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.left_out import WOULD_COUNT
from protocol.noise import NoiseMode
from protocol.querier.ask import OnStatus, Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.result import BiasBound, QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery, kind_to_query, make_query
from protocol.query import Query
from protocol.units import entitlement

SUFFIX = ".queries"
_SUFFIX = ".json"
_OUTCOME = ".outcome"
SHOWN_DIGITS = 8


@dataclass(frozen=True, slots=True)
class RecordedQuery:
    """A saved query with what its querier knows of its outcome.

    `counted` has a bit for each report in the batch's order by digest, most significant first: those in the answer. It
    is None while no answer was fetched, or where the helpers' lists were truncated; then any report may be in one.
    `after` has the ids of those queries on the batch whose answers had come when this one was made.
    """

    query: Query
    counted: bytes | None = field(default=None, repr=False)
    answered: bool = False
    bias: BiasBound | None = None
    after: frozenset[bytes] = frozenset()

    @property
    def released(self) -> bool:
        """Return whether it was answered, as far as its querier knows."""
        return self.counted is not None

    def on(self, batch: BatchReader) -> RecordedQuery:
        """Return the same of a batch that may have changed since: its order is another, so that no place is known."""
        return self if batch.root() == self.query.batch_root else replace(self, counted=None)

    def rows(self, batch: BatchReader) -> npt.NDArray[np.bool_]:
        """Return which records of a batch may be in the answer: all, unless it is known."""
        rows = np.ones(len(batch), dtype=np.bool_)
        if self.counted is not None:
            bits = np.unpackbits(np.frombuffer(self.counted, dtype=np.uint8), count=len(batch))
            rows[batch.order()] = bits.astype(np.bool_)
        return rows


class QueryFolder:
    """The saved queries of one batch, by id."""

    def __init__(self, batch: Path) -> None:
        if not batch.name:
            raise TrefoilError(f"{batch} is no batch", "Name the batch that was queried.", kind=ErrorKind.WRONG_FILE)
        self._batch = batch
        self.path = batch.with_name(batch.name + SUFFIX)

    def all(self) -> list[SavedQuery]:
        queries = [SavedQuery.load(path) for path in sorted(self.path.glob(f"*{_SUFFIX}"))]
        return sorted(queries, key=lambda saved: (saved.made, saved.query.query_id))

    def newest(self) -> SavedQuery | None:
        """Return the query that is resumed by default, or None."""
        queries = self.all()
        return queries[-1] if queries else None

    def find(self, digits: str) -> SavedQuery:
        """Return the one query whose id begins with these hexadecimal digits."""
        matches = [saved for saved in self.all() if saved.query.query_id.hex().startswith(digits.lower())]
        if len(matches) != 1:
            what = ("several queries of", "have") if matches else ("no query of", "has")
            message = f"{what[0]} {self._batch} {what[1]} an id that begins with {digits!r}"
            kind = ErrorKind.DUPLICATE if matches else ErrorKind.UNKNOWN_NAME
            raise TrefoilError(message, "List them with: trefoil query list", kind=kind)
        return matches[0]

    def keep(self, saved: SavedQuery, *, first: bool = False) -> SavedQuery:
        """Save a new query as the newest, even if another was made in the same second, and return it.

        If it must be the `first`, save nothing where another command has saved one meanwhile, and return that.
        """
        with remove_on_failure(self._file(saved.query)):
            self.path.mkdir(mode=0o700, exist_ok=True)
            with _locked(self.path):
                last = self.newest()
                if last is not None and first:
                    return last
                if last is not None and saved.made <= last.made:
                    saved = replace(saved, made=last.made + 1)
                saved.save(self._file(saved.query))
        return saved

    def keep_result(self, result: QueryResult) -> None:
        """Save what the querier's own record needs of an answer: its reports, and the bound on its bias."""
        self.keep_outcome(result.query, result.answer, result.bias)

    def keep_outcome(self, query: Query, answer: Answer | None, bias: BiasBound | None = None) -> None:
        """Save which reports an answer holds, or that a query was withdrawn, if the query is of this folder."""
        path = self._file(query, _OUTCOME)
        if not self._file(query).exists():
            return
        noted: dict[str, object] = {"outcome": "withdrawn"}
        if answer is not None:
            counted = np.all([codes == WOULD_COUNT for codes in answer.left_out], axis=0)
            # Of truncated lists nobody but the helpers knows all reports in the answer.
            complete = np.count_nonzero(counted) == answer.counted
            # Which queries had been made when the answer first came, also if it is fetched again.
            newest = (self._noted(query) or {}).get("newest", max(saved.made for saved in self.all()))
            counted_bits = np.packbits(counted).tobytes().hex() if complete else None
            noted = {"outcome": "answered", "counted": counted_bits, "newest": newest}
            noted |= {} if bias is None else {"bias_bound": bias.bound, "beta": bias.beta}
        write_atomically(path, (json.dumps(noted) + "\n").encode(), mode=0o600)

    def recorded(self) -> list[RecordedQuery]:
        """Return all queries that were or may have been answered, oldest first: those that were not withdrawn."""
        queries = self.all()
        notes = {saved.query.query_id: self._noted(saved.query) for saved in queries}
        came = {query_id: note["newest"] for query_id, note in notes.items() if note and "newest" in note}
        recorded: list[RecordedQuery] = []
        for saved in queries:
            after = frozenset(query_id for query_id, newest in came.items() if newest < saved.made)
            note = notes[saved.query.query_id]
            if note is None:
                recorded.append(RecordedQuery(saved.query, after=after))
            elif note["outcome"] == "answered":
                bias = BiasBound(float(note["bias_bound"]), float(note["beta"])) if "beta" in note else None
                counted = None if note["counted"] is None else bytes.fromhex(note["counted"])
                recorded.append(RecordedQuery(saved.query, counted, answered=True, bias=bias, after=after))
        return recorded

    def _noted(self, query: Query) -> dict[str, Any] | None:
        """Return the saved outcome of a query, or None."""
        path = self._file(query, _OUTCOME)
        try:
            noted: dict[str, Any] = json.loads(path.read_bytes())
            if noted["outcome"] == "answered":
                size = None if noted["counted"] is None else len(bytes.fromhex(noted["counted"]))
                if size not in (None, -(-query.batch_size // 8)) or type(noted.get("newest", 0)) is not int:
                    raise ValueError
                if "beta" in noted:
                    BiasBound(float(noted["bias_bound"]), float(noted["beta"]))
            elif noted["outcome"] != "withdrawn":
                raise ValueError
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            hint = "Remove it, and fetch the answer with: trefoil query fetch --id"
            raise TrefoilError(f"{path} is damaged", hint, kind=ErrorKind.FILE_DAMAGED) from None
        return noted

    def drop(self, saved: SavedQuery) -> None:
        """Delete a query that no helper accepted: it can never be answered."""
        for suffix in (_SUFFIX, _OUTCOME):
            self._file(saved.query, suffix).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _file(self, query: Query, suffix: str = _SUFFIX) -> Path:
        return self.path / f"{query.query_id.hex()}{suffix}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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
    """Resume the newest query of a batch; submit a new one if there is none, or with `new`.

    A new query first withdraws those without an answer, best effort: otherwise a malicious helper could revive one of
    them, and the new query would find its reports spent.
    """
    folder = QueryFolder(batch.path)
    if new:
        await withdraw_all(querier, folder, site_key)
    saved = None if new else _resumable(folder, batch, options, site_key)
    if saved is not None:
        result = await _resume(querier, saved, batch, on_status)
    else:
        made = make_query(batch, options, querier.helper_set, site_key, now)
        saved = folder.keep(made, first=not new)
        if saved.query != made.query:
            # Of two commands at once, this one resumes the other's query: the reports must not be queried twice.
            return await ask_batch(querier, batch, options, site_key, now, on_status=on_status)
        try:
            result = await querier.ask(saved, batch, on_status)
        except QueryFailed as error:
            if not error.taken:
                folder.drop(saved)
            _name(error, saved)
            raise
    folder.keep_result(result)
    return result


async def _resume(querier: Querier, saved: SavedQuery, batch: BatchReader, on_status: OnStatus) -> QueryResult:
    try:
        return await querier.ask(saved, batch, on_status)
    except QueryFailed as error:
        if not error.taken:
            # The querier may have corrected the set or key, but the saved query still has the wrong ones.
            error.hint = f"This query was saved by an earlier run. Submit a new one with --new. {error.hint}".strip()
        _name(error, saved)
        raise


def _name(error: QueryFailed, saved: SavedQuery) -> None:
    """Add the name that an operator finds in a helper's log, if a helper has the query."""
    if error.taken:
        error.hint = f"{error.hint} The helpers' logs call it {saved.query.short_name}.".strip()


async def withdraw_all(querier: Querier, folder: QueryFolder, site_key: IdentityKey) -> None:
    """Withdraw every query of a batch that the helpers have not voted for, best effort."""

    async def withdraw(saved: SavedQuery) -> None:
        with contextlib.suppress(QueryFailed):
            await querier.withdraw(saved, site_key)
            folder.keep_outcome(saved.query, None)

    await asyncio.gather(*(withdraw(saved) for saved in folder.all()))


def _resumable(
    folder: QueryFolder, batch: BatchReader, options: QueryOptions, site_key: IdentityKey
) -> SavedQuery | None:
    """Return the newest query, or None; raise an error if it differs from what the options say."""
    saved = folder.newest()
    if saved is None:
        return None
    difference = _difference(saved, batch, options, site_key)
    if difference:
        old = f"trefoil query fetch --id {saved.query.query_id.hex()[:SHOWN_DIGITS]}"
        hint = f"Submit a new one with --new; reports that are used up are left out. To fetch the old answer: {old}"
        raise TrefoilError(f"{batch.path} {difference}", hint, kind=ErrorKind.INCONSISTENT)
    return saved


def _difference(saved: SavedQuery, batch: BatchReader, options: QueryOptions, site_key: IdentityKey) -> str:
    query = saved.query
    if query.batch_root != batch.root():
        return "has changed since it was queried"
    # The deadline may differ: a query may be resumed late.
    chosen = (query.noise, query.minimum_reports, query.tolerated_bad_permille)
    wanted = (options.noise, options.minimum_reports, options.tolerated_bad_permille)
    if chosen != wanted or options.epsilon_micros not in (None, query.epsilon_micros):
        return "was queried before, with another ε, noise or minimum"
    if options.keeps_rest not in (None, query.keeps_rest):
        return f"was queried before, and {'keeps the rest' if query.keeps_rest else 'uses its reports up'}"
    if options.kind and not kind_to_query(batch, options.kind).is_counted_by(query):
        return "was queried before, for another kind of reports"
    try:
        saved.signed.verify(site_key.public)
    except ProtocolError:
        return "was queried before, with another site key"
    return ""


T = TypeVar("T")


def ask(
    batch: Path | str,
    helper_set: HelperSet,
    site_key: IdentityKey,
    *,
    epsilon: float | None = None,
    noise: NoiseMode | str = NoiseMode.LOCAL,
    tolerate: float = 0.1,
    seconds: int = 600,
    new: bool = False,
    debug: bool = False,
    kind: str = "",
    keep_rest: bool | None = None,
) -> QueryResult:
    """Query the three helpers for a batch file, as `trefoil query run` does; called again, it resumes.

    `tolerate` is the fraction of invalid reports above which the query fails. `debug` is for batches of debug reports,
    whose answer has no noise. `kind` names the reports to count in a batch of several kinds. `keep_rest` takes of each
    report what the answer costs; by default reports are used up.

    >>> helper_set = trefoil.HelperSet.load("/tmp/trefoil/helpers.json")  # doctest: +SKIP
    >>> site_key = trefoil.load_site_key("/tmp/trefoil/sites/shop.example.key")  # doctest: +SKIP
    >>> trefoil.ask("shop.batch", helper_set, site_key, epsilon=0.5)  # doctest: +SKIP
    """
    _check_types(batch, helper_set, site_key, epsilon, noise)
    options = QueryOptions(
        epsilon_micros=None if epsilon is None else entitlement(epsilon),
        noise=NoiseMode(noise),
        tolerated_bad_permille=round(1000 * tolerate),
        seconds=seconds,
        debug=debug,
        kind=kind,
        keeps_rest=keep_rest,
    )
    now = int(time.time())  # noqa: TID251 - an edge: a script reads the real clock
    return run(ask_batch(Querier(helper_set), BatchReader(Path(batch)), options, site_key, now, new=new))


def _check_types(batch: object, helper_set: object, site_key: object, epsilon: object, noise: object) -> None:
    """Reject an argument of another type by a sentence: scripts often pass a path where its content belongs."""
    modes = [*NoiseMode, *(mode.value for mode in NoiseMode)]
    for fits, name, what, given in (
        (isinstance(batch, Path | str), "batch", "the path of a batch file", batch),
        (isinstance(helper_set, HelperSet), "helper_set", 'a helper set: HelperSet.load("helpers.json")', helper_set),
        (isinstance(site_key, IdentityKey), "site_key", 'a site key: load_site_key("shop.example.key")', site_key),
        (epsilon is None or isinstance(epsilon, int | float), "epsilon", "a number, such as 0.5", epsilon),
        (noise in modes, "noise", f"one of {', '.join(mode.value for mode in NoiseMode)}", noise),
    ):
        if not fits:
            # The type alone: a key of another kind must not end up in a traceback.
            text = repr(given) if isinstance(given, str | Path) else type(given).__name__
            raise TrefoilError(f"{name} is {text}", f"It must be {what}.", kind=ErrorKind.WRONG_TYPE)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result: in a thread if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        with ThreadPoolExecutor(1, "trefoil") as thread:
            return thread.submit(asyncio.run, work).result()
    return asyncio.run(work)  # outside the `except`: an error of `work` must not look like one of it
