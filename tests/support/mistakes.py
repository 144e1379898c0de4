"""Mistakes that people make on the command line, by kind, a folder to make them in, and every command of the tree.

Every line is run, and must leave the folder as it was. MISTAKES.md is what they give: message, hint, exit code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device import agent
from mpc_helpers.local.launcher import prepare
from protocol.cli import app as cli
from protocol.helper_set import HelperSet
from protocol.report import seal_report
from protocol.units import DAY
from tests.support.three_helpers import real_now, terms, write_batch


def commands() -> dict[str, Any]:
    """Commands by what a person types, in the order of the story. Any: typer's class differs by version."""
    return dict(_below(cli.tree(), ()))


def _below(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _below(each, (*names, name))
    else:
        yield " ".join(names), command


def options(command: Any) -> dict[str, Any]:
    """A command's parameters by what a person types."""
    return {name: each for each in command.params for name in each.opts if name.startswith("-")}


HELPERS = "--helpers trio/helpers.json"
KEY = "--site-key trio/sites/shop.example.key"
QUERY = f"query --reports shop.batch {HELPERS} {KEY}"
CONVERT = f"device convert shop.example --db ann.db {HELPERS} --buckets 4 --batch new.batch"
IMPRESSION = "device impression news.example --db new.db"
NEW_SET = "helper-set new new.json --entry"
ENTRIES = "--entry north/entry.json --entry south/entry.json --entry west/entry.json"
KEYGEN = "keygen helper --dir new --name north --address https://north.example:8443"
REPORTS = f"reports {HELPERS} --count 3 --buckets 4 --out new.batch"
CONFIG = "--config trio/helper-1/config.json"
FEATURES = "regression features --rows rows.csv --features new.json"
PREDICT = "regression predict --model features.json --features features.json --rows rows.csv"
LABEL = (
    f"device label news.example --db ann.db {HELPERS} --features features.json --field hour=2 "
    "--field advertiser=a.example --ago 700000 --advertiser a.example --batch new.batch --records new.records"
)
COLLECT = "collect new --site shop.example --certificate north/tls.crt --key north/tls.key"
SMALL = "experiment microbenchmark --scale 0.01"
LONG = "x" * 5000
LONGEST = 300
DATABASES = ("ann.db", "new.db", "ledger.sqlite", "reports.sqlite")
# What differs from run to run, and what stands for it in the table.
VARYING = (
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"port \d{4,5}", "port PORT"),
    (r"(?<![0-9a-f])(?=[0-9]*[a-f])[0-9a-f]{16,}", "DIGITS"),
    (r"of [0-9a-f]{8} \(", "of KIND ("),
    (r"'127\.0\.0\.1', \d+", "'127.0.0.1', PORT"),
    (r"_ssl\.c:\d+", "_ssl.c"),
    (r"x{60,}", "xxx…"),
    (r"n{60,}", "nnn…"),
)
HEADER = """\
# Mistakes, and what they give

{count} command lines that go wrong, each run by `tests/documents/test_mistakes.py` in a folder with three helpers
that do not run, a device, batches and files of no use. A command that fails leaves nothing behind, but for a query
that nobody answered: it is kept to be asked again. None gives a traceback. With `--json -` standard output is one
document with the same code, message and hint.
`python -m tests.support.mistakes` writes this page again.

Exit codes: 1 a mistake to mend first, 2 a wrong command line, 3 refused for ever, 70 a defect in Trefoil, 75 try again
later, 130 interrupted.
"""

MISTAKES: dict[str, list[str]] = {
    "No such thing": [
        "queri",
        "device convrt",
        "query --report shop.batch",
        "query -q",
        "--nonsense",
        "demo --noise loud",
        "batch split shop.batch --out new --by month",
        f"{CONVERT} --function third",
        f"{CONVERT} --function nowhere:third",
        f"{CONVERT} --flag special",
        f"{SMALL} --policy nowhere:Policy",
        f"{SMALL} --accounting own",
        "experiment regression --noise loud",
        f"query fetch --reports shop.batch {HELPERS} --id 00",
    ],
    "Something is missing": [
        "query",
        f"query --reports shop.batch {HELPERS}",
        f"query withdraw --reports shop.batch {HELPERS}",
        "device impression --db ann.db --bucket 1",
        f"device convert shop.example --db ann.db {HELPERS} --buckets 4",
        "device convert shop.example --db ann.db --buckets 4 --batch new.batch",
        "device clear --db ann.db",
        "device clear --db ann.db --stored-data",
        "batch merge --out new.batch",
        f"{NEW_SET} north/entry.json --entry south/entry.json",
        "experiment patcg --impressions rows.csv",
        "collect new --site shop.example",
        "device",
        "ledger",
    ],
    "Wrong type or out of range": [
        f"{IMPRESSION} --bucket two",
        f"{IMPRESSION} --bucket -1",
        f"{IMPRESSION} --bucket 5000",
        f"{IMPRESSION} --bucket 1 --lifetime-days 0",
        f"{IMPRESSION} --bucket 1 --priority 9999999999",
        f"{IMPRESSION} --bucket 1 --match-value -1",
        f"{CONVERT} --value 0",
        f"{CONVERT} --value 2 --max-value 1",
        f"{CONVERT} --credit 0",
        f"{CONVERT} --credit nan",
        f"{CONVERT} --lookback-days 0",
        f"device convert shop.example --db ann.db {HELPERS} --buckets 0 --batch new.batch",
        f"{CONVERT} --kappa -1",
        f"{CONVERT} --unit {LONG}",
        f"{LABEL} --window-days 0",
        f"{LABEL} --field colour",
        "demo --reports 0",
        "demo --buckets 0",
        "demo --seed -1",
        "demo --kappa -1",
        f"{QUERY} --tolerate 2",
        f"{QUERY} --minimum -1",
        f"{QUERY} --seconds 0",
        f"{QUERY} --cutoff 0",
        f"{REPORTS} --count 0",
        f"{REPORTS} --skew -1",
        f"{REPORTS} --seed -1",
        f"{REPORTS} --flagged 2",
        f"{REPORTS} --flagged 0.5",
        f"{REPORTS} --buckets 0",
        f"{KEYGEN} --days 0",
        f"{KEYGEN} --suite 3",
        f"{KEYGEN} --address north.example",
        f"{KEYGEN} --address https://north.example:99999",
        f"{KEYGEN} --name {'n' * 101}",
        f"{KEYGEN} --name höhe",
        f"ledger export {CONFIG} --lost-by 1 --out new",
        f"ledger export {CONFIG} --lost-by 4 --out new",
        f"ledger accept-peer {CONFIG} --helper 1",
        f"{NEW_SET} north/entry.json --entry south/entry.json --entry west/entry.json --number 0",
        "live --port 99999",
        "device dashboard --db ann.db --port -1",
        f"{COLLECT} --port 99999",
        "launch --dir new --port 1",
        "launch --dir new --port 99999 --port 1 --port 2",
        f"{FEATURES} --number hour --bins 0",
        f"{FEATURES} --number hour --bins 1000000000",
        "regression plan --features features.json --reports 0 --rate 0.05",
        "regression plan --features features.json --reports 10 --rate 2",
        "regression plan --features features.json --reports 10 --rate 1e-320",
        "bench report --rounds 0",
        "bench report --rounds 1 --buckets 0",
        "bench device --samples 1",
        "bench throughput --reports 0",
        "bench noise --buckets 99999999",
        f"{SMALL} --participation 7",
        f"{SMALL} --rate -1",
        "experiment bias --draws 0",
        "experiment microbenchmark --scale 0",
        f"{SMALL} --epoch-days 0",
        "plan --reports 0 --value-cap 5",
        "plan --reports 10 --value-cap 5 --confidence 1",
        "bias shop.batch --per-device 0",
    ],
    "The unit of ε": [
        f"{CONVERT} --epsilon 0",
        f"{CONVERT} --epsilon -1",
        f"{CONVERT} --epsilon nan",
        f"{CONVERT} --epsilon 1e999",
        f"{CONVERT} --epsilon one",
        f"{QUERY} --epsilon 0",
        f"{QUERY} --epsilon nan",
        f"{QUERY} --epsilon 1e-9",
        f"{QUERY} --epsilon 1e999",
        f"{QUERY} --epsilon 100",
        f"{QUERY} --epsilon 0.25",
        f"{QUERY} --keep-rest",
        "demo --epsilon -1",
        f"{REPORTS} --epsilon 0",
        "plan --reports 10 --value-cap 5 --budget -1",
    ],
    "A site that is none": [
        f"device convert 'not a site' --db ann.db {HELPERS} --buckets 4 --batch new.batch",
        "device impression com --db new.db --bucket 1",
        "device impression '' --db new.db --bucket 1",
        "device impression https://news.example/page --db new.db --bucket 1",
        f"device impression {LONG} --db new.db --bucket 1",
        "device conversion shop.example --db new.db --publisher ''",
        "launch --dir new --site 'not a site'",
        f"{REPORTS} --site ''",
        "device budget --db ann.db --site ''",
    ],
    "A file that is not there": [
        f"query --reports nowhere.batch {HELPERS} {KEY}",
        f"query --reports shop.batch --helpers nowhere.json {KEY}",
        f"query --reports shop.batch {HELPERS} --site-key nowhere.key",
        "device budget --db nowhere.db",
        "device reports --db nowhere.db",
        "device on --db nowhere.db",
        "device dashboard --db nowhere.db",
        "batch ls nowhere.batch",
        "batch check nowhere.batch",
        "batch merge shop.batch nowhere.batch --out new.batch",
        "batch split nowhere.batch --out new",
        "bias nowhere.batch --per-device 1",
        "helper-set verify nowhere.json",
        "helper-set sign nowhere.json --key north/identity.key",
        f"{NEW_SET} nowhere.json --entry south/entry.json --entry west/entry.json",
        "helper --config nowhere.json",
        "alarm show --config nowhere.json",
        "ledger create --config nowhere.json",
        "keygen hpke --dir nowhere",
        "regression features --rows nowhere.csv --features new.json --number hour",
        "experiment criteo --data nowhere.tsv",
        "conformance w3c nowhere",
        "reports --helpers nowhere.json --count 3 --out new.batch",
        "collect new --site shop.example --certificate nowhere.crt --key north/tls.key",
    ],
    "A file of another kind": [
        f"query --reports trio/sites/shop.example.key {HELPERS} {KEY}",
        f"query --reports trio {HELPERS} {KEY}",
        f"query --reports empty {HELPERS} {KEY}",
        f"query --reports truncated.batch {HELPERS} {KEY}",
        f"query --reports loop {HELPERS} {KEY}",
        f"query --reports shop.batch --helpers shop.batch {KEY}",
        f"query --reports shop.batch --helpers north/entry.json {KEY}",
        f"query --reports shop.batch --helpers empty {KEY}",
        f"query --reports shop.batch --helpers trio {KEY}",
        f"query --reports shop.batch {HELPERS} --site-key shop.batch",
        f"query --reports shop.batch {HELPERS} --site-key empty",
        f"query --reports shop.batch {HELPERS} --site-key trio",
        f"query --reports shop.batch {HELPERS} --site-key loop",
        "device budget --db shop.batch",
        "device budget --db empty",
        "device budget --db trio",
        "device budget --db loop",
        "batch ls trio",
        "batch check rows.csv",
        "batch check shop.batch ann.db",
        "helper-set verify shop.batch",
        "helper-set verify unsigned.json",
        "helper-set sign unsigned.json --key shop.batch",
        f"{NEW_SET} shop.batch --entry south/entry.json --entry west/entry.json",
        "helper --config trio/helpers.json",
        "alarm show --config trio",
        "regression features --rows latin1.csv --features new.json --number hour",
        "regression features --rows shop.batch --features new.json --number hour",
        "regression plan --features rows.csv --reports 10 --rate 0.5",
        "regression plan --features deep.json --reports 10 --rate 0.5",
        "helper-set verify deep.json",
        "helper --config deep.json",
        f"{PREDICT}",
        "conformance w3c nothing",
        "experiment criteo --data shop.batch",
        "experiment patcg --impressions rows.csv --conversions rows.csv",
        "collect new --site shop.example --certificate rows.csv --key rows.csv",
        f"{CONVERT.replace('new.batch', 'rows.csv')}",
        f"{CONVERT.replace('new.batch', 'other.batch')}",
        f"{CONVERT.replace('new.batch', 'shop.batch')} --unit clicks",
    ],
    "The wrong one of two": [
        "device convert shop.example --db ann.db --helpers expired/helpers.json --buckets 4 --batch new.batch",
        "helper-set sign trio/helpers.json --key north/identity.key",
        f"{NEW_SET} north/entry.json --entry north/entry.json --entry west/entry.json",
        "helper-set join new.json --copy trio/helpers.json --copy other/helpers.json",
        "batch merge shop.batch other.batch --out new.batch",
        f"ledger rebuild {CONFIG} --entries rows.csv --entries rows.csv",
        f"query --reports shop.batch {HELPERS} --site-key open.key",
        "device convert shop.example --db ann.db --helpers unsigned.json --buckets 4 --batch new.batch",
        "experiment bias --workload patcg --plot new",
        f"{FEATURES} --number minute",
        f"{SMALL} --mpc --kappa 1",
    ],
    "Twice": [
        "keygen site trio/sites/shop.example.key",
        "keygen helper --name north --address https://north.example:8443 --dir north",
        "device create --db ann.db",
        f"helper-set new unsigned.json {ENTRIES}",
        f"ledger create {CONFIG}",
        f"ledger upgrade {CONFIG}",
        f"device convert shop.example --db ann.db {HELPERS} --buckets 4 --batch new.batch --report new.report",
        "batch merge shop.batch --out shop.batch",
    ],
    "Twice what is taken once": [
        f"{QUERY} --reports other.batch",
        f"{QUERY} --helpers other/helpers.json",
        f"{QUERY} --site-key open.key",
        f"{QUERY} --epsilon 0.5 --epsilon 1",
        f"query series --reports trio {HELPERS} {KEY} --every day --every week",
        f"query list --reports shop.batch --reports other.batch {HELPERS}",
        f"{CONVERT} --value 1 --value 2 --max-value 5",
        f"{CONVERT} --batch other.batch",
        f"{IMPRESSION} --bucket 1 --bucket 2",
        "device budget --db ann.db --db new.db",
        f"{REPORTS} --count 4",
        "plan --reports 10 --reports 20 --value-cap 5",
        f"{SMALL} --seed 1 --seed 2",
        "batch split shop.batch --out new --out trio",
        "bias shop.batch --per-device 1 --per-device 2",
        f"{KEYGEN} --name south",
        f"ledger export {CONFIG} --lost-by 2 --lost-by 3 --out new",
        "demo --reports 10 --reports 20",
    ],
    "Seeds and workloads": [
        f"{SMALL} --seeds 0",
        f"{SMALL} --seeds 5000",
        f"{SMALL} --seeds many",
        f"{SMALL} --seed -1",
        f"{SMALL} --kappa 2000",
        f"{SMALL} --kappa 0.00001",
        f"{SMALL} --function own:function",
        f"{SMALL} --policy json:dumps",
        "experiment criteo --scale 0.001 --seeds 3 --epoch-days 1000",
        "experiment patcg --scale 2",
        "experiment patcg --impressions rows.csv --conversions nowhere.parquet",
        "experiment all --seeds 0",
        "experiment all --scale 0",
        "experiment bias --scale 0.01 --kappa -1",
        "experiment regression --columns 7",
        "experiment regression --epsilon 0",
        "experiment regression --reports 0",
    ],
    "Where a result would replace something": [
        "plan --reports 10 --value-cap 5 --json shop.batch",
        "batch ls shop.batch --json other.batch",
        "batch check shop.batch --json rows.csv",
        "device budget --db ann.db --json ann.db",
        "helper-set verify trio/helpers.json --json trio/sites/shop.example.key",
        f"{QUERY} --json shop.batch",
        f"query list --reports shop.batch {HELPERS} --json trio/helpers.json",
        f"query fetch --reports shop.batch {HELPERS} --id 00 --left-out shop.batch",
        "batch check shop.batch --json features.json",
        "batch merge shop.batch --out loop",
        "regression features --rows rows.csv --number hour --features shop.batch",
        "regression fit --answer a --reports shop.batch --records r --features features.json --model ann.db",
        f"{PREDICT} --out rows.csv",
    ],
    "κ and other numbers": [
        f"{CONVERT} --kappa 0.5",
        f"{CONVERT} --kappa much",
        f"{CONVERT} --kappa inf",
        f"{REPORTS} --kappa 1.5",
        "plan --reports 10 --value-cap 5 --kappa 1.5",
        "plan --reports 10 --value-cap 5 --kappa -1",
        "plan --reports 10 --value-cap 5 --error 0",
        "plan --reports 10 --value-cap 5 --expected-mean 6",
        "plan --reports 10 --value-cap 5 --participation 0",
        "plan --reports 10 --value-cap 0",
        "plan --reports 10 --value-cap 5 --buckets 0",
        "demo --kappa 0.1",
        "bias shop.batch --per-device 1 --digits 7",
        "bias shop.batch --per-device 1 --budget 0",
        "bias shop.batch --per-device 1 --lookback-days 0",
        "bias shop.batch --per-device 1 --lookback-days 1000000000000",
        "bias shop.batch --per-device 1 --epoch-days 1000000",
        "bias empty --per-device 1",
    ],
    "Batches and collectors": [
        "batch split trio --out new",
        "batch ls rows.csv",
        "batch ls",
        "batch merge truncated.batch --out new.batch",
        "batch split truncated.batch --out new",
        "batch check truncated.batch",
        "batch check empty",
        "batch check trio",
        f"query series --reports nowhere {HELPERS} {KEY}",
        f"query series --reports shop.batch {HELPERS} {KEY}",
        f"query fetch --reports shop.batch {HELPERS} --id zz",
        f"query list --reports '' {HELPERS}",
        f"{QUERY} --kind 00000000",
        f"{QUERY} --debug",
        f"{COLLECT} --per-second 0",
        f"{COLLECT} --helpers nowhere.json",
        f"{COLLECT} --site 'not a site'",
        f"{COLLECT} --host ''",
        "conformance w3c rows.csv",
    ],
    "Nobody is there": [
        f"{QUERY} --seconds 31",
        "device dashboard --db ann.db --port {taken}",
        f"{COLLECT} --port {{taken}}",
        "live --port {taken}",
    ],
    "Results that cannot be written": [
        "plan --reports 10 --value-cap 5 --json trio",
        "plan --reports 10 --value-cap 5 --json rows.csv/plan.json",
        "demo --json trio",
        f"{QUERY} --json rows.csv/answer.json",
        f"{QUERY} --plot answer.gif",
        f"{QUERY} --plot rows.csv/answer.png",
        f"{SMALL} --plot rows.csv",
        "bench throughput --plot rows.csv",
        f"{CONVERT.replace('new.batch', 'rows.csv/new.batch')}",
        f"{CONVERT.replace('new.batch', 'trio')}",
        f"reports {HELPERS} --count 3 --out trio",
        f"reports {HELPERS} --count 3 --out rows.csv/new.batch",
        "keygen site rows.csv/new.key",
        "keygen site trio",
        "keygen helper --dir rows.csv --name north --address https://north.example:8443",
        "launch --dir rows.csv",
        "batch split shop.batch --out rows.csv",
        "batch merge shop.batch --out trio",
        "device create --db rows.csv/new.db",
        "device create --db trio",
        f"ledger export {CONFIG} --lost-by 2 --out trio",
        "collect rows.csv --site shop.example --certificate north/tls.crt --key north/tls.key",
        "regression features --rows rows.csv --number hour --features trio",
    ],
    "Strange bytes": [
        "batch ls nowhere-\udcff",
        "batch ls 'nowhere-\x1b[31m'",
        f"batch ls {LONG}",
        f"device budget --db {LONG}",
        "device impression news-\udcff.example --db new.db --bucket 1",
    ],
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one mistake gave."""

    line: str
    code: int
    message: str
    hint: str
    left: tuple[str, ...]
    errors: str


def make_world(folder: Path) -> None:
    """Everything that the lines name: three helpers that do not run, others, a device, batches, and files of no use."""
    for name, days in (("trio", 0), ("other", 0), ("expired", 200)):
        prepare(folder / name, now=real_now() - days * DAY, sites={"shop.example": ["shop.example"]})
    (folder / "nothing").mkdir()
    for name in ("north", "south", "west"):
        _ran(folder, f"keygen helper --name {name} --address https://{name}.example:8443 --dir {name}")
    _ran(folder, f"helper-set new unsigned.json {ENTRIES}")
    (folder / "rows.csv").write_text("advertiser,hour\n" + "a.example,1\nb.example,2\n" * 20)
    _ran(folder, "regression features --rows rows.csv --category advertiser --number hour --features features.json")
    agent.create(folder / "ann.db")
    helper_set = HelperSet.load(folder / "trio" / "helpers.json")
    for name, site in (("shop", "shop.example"), ("other", "cafe.example")):
        promised = terms(4, site=site, caller=site)
        write_batch(folder / f"{name}.batch", [seal_report([1, 0, 0, 0], promised, helper_set) for _ in range(3)])
    (folder / "truncated.batch").write_bytes((folder / "shop.batch").read_bytes()[:-7])
    (folder / "empty").touch()
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "latin1.csv").write_bytes("hour,Höhe\n1,2\n".encode("latin-1"))
    (folder / "loop").symlink_to("loop")
    (folder / "open.key").write_bytes((folder / "trio/sites/shop.example.key").read_bytes())
    (folder / "open.key").chmod(0o644)


def _ran(folder: Path, line: str) -> None:
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(shlex.split(line))
    if code:
        raise RuntimeError(f"the folder for mistakes cannot be made: {line}")


def run(line: str, **places: object) -> Outcome:
    """Make one mistake in the current folder, in this process. Where JSON is taken, it is asked for too."""
    words = shlex.split(line.format(**places))
    with_json = _takes_json(words)
    before, out, err = snapshot(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*words, "--json", "-"] if with_json else words)
    message, _, hint = err.getvalue().partition("\nhint:  ")
    message = message[message.find("error: ") :].removeprefix("error: ").strip()
    if with_json:
        told = json.loads(out.getvalue())["error"]
        if (told["exit"], shown(told["message"]), shown(told["hint"])) != (code, shown(message), shown(hint)):
            raise AssertionError(f"{line}: what a program reads is not what a person reads: {told}")
    left = tuple(sorted({str(path) for path, _ in snapshot() ^ before}))
    # A query that nobody answered is kept to be asked again; here every line starts from the same folder.
    for path in Path().glob("*.queries"):
        shutil.rmtree(path)
    return Outcome(line, code, shown(message), shown(hint.strip()), left, err.getvalue())


def _takes_json(words: list[str]) -> bool:
    known = commands()
    names = (" ".join(words[:count]) for count in (1, 2, 3))
    found = next((name for name in names if name in known), None)
    return found is not None and "--json" in options(known[found]) and "--json" not in words


def snapshot() -> set[tuple[Path, str]]:
    """Every file below the current folder, with what is in it."""
    return set(_files(Path()))


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.iterdir():
        if path.is_symlink():
            yield path, f"-> {path.readlink()}"
        elif path.is_dir():
            yield path, "folder"
            yield from _files(path)
        elif path.name.startswith(DATABASES):
            yield path, "a database, which notes when it is opened"
        else:
            yield path, hashlib.sha256(path.read_bytes()).hexdigest()


def shown(text: str) -> str:
    """On one line, and the same on every machine and day."""
    text = text.replace(f"{Path.cwd()}/", "")
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def page(outcomes: Sequence[Outcome]) -> str:
    """MISTAKES.md."""
    by_line = {outcome.line: outcome for outcome in outcomes}
    parts = [HEADER.format(count=len(outcomes))]
    for kind, lines in MISTAKES.items():
        parts.append(f"\n## {kind}\n\n| command | exit | message | hint | left on disk |\n|---|---:|---|---|---|\n")
        for line in lines:
            found = by_line[line]
            message = found.message or "(shows the help of the group)"
            left = "the query, to be asked again" if found.left else "nothing"
            command = _cell(shown(ascii(line)[1:-1]))
            cells = (f"`{command}`", str(found.code), _cell(message), _cell(found.hint), left)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def all_outcomes(folder: Path) -> list[Outcome]:
    """Every mistake once, in a folder made for them."""
    make_world(folder)
    with contextlib.chdir(folder), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        return [run(line, taken=port) for lines in MISTAKES.values() for line in lines]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        text = page(all_outcomes(Path(name)))
    (Path(__file__).parents[1] / "MISTAKES.md").write_text(text)
