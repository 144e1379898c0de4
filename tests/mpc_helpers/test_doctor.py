"""`trefoil doctor` finds each fault that stops queries, says where it is and what to do, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from mpc_helpers.local import doctor
from mpc_helpers.local.doctor import (
    HERE,
    CheckResult,
    Examination,
    Severity,
    SiteKey,
    Subject,
    examine_as_operator,
    examine_as_querier,
)
from mpc_helpers.local.launcher import prepare
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.links import listen
from mpc_helpers.service import workers as workers_module
from mpc_helpers.service.health import Concern, Reason
from protocol.cli.app import app
from protocol.helper_set import HelperSet, write_set
from protocol.keys import IdentityKey, load_identity
from protocol.noise import NoiseMode
from protocol.units import DAY
from tests.mpc_helpers.test_ports import black_hole
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, three_helpers

HOUR = 3600
WAIT_SECONDS = 60.0


async def as_querier(
    three: ThreeHelpers, site: SiteKey | None = None, clock: Callable[[], int] = real_now
) -> Examination:
    return await examine_as_querier(three.trio.helper_set_path, site, clock)


async def as_operator(three: ThreeHelpers, party: int = 0, clock: Callable[[], int] = real_now) -> Examination:
    return await examine_as_operator(three.trio.config_path(party), clock)


def problems(examination: Examination) -> list[CheckResult]:
    return [each for each in examination.findings if each.severity is not Severity.OK]


def faults(examination: Examination) -> set[tuple[Subject, str]]:
    """The subject and place of every fault; each says something and what to do."""
    assert all(each.text and each.remedy for each in problems(examination))
    return {(each.subject, each.place) for each in examination.faults}


async def until(three: ThreeHelpers, wanted: Callable[[Examination], bool]) -> Examination:
    """Examine as a querier until a condition holds: helpers that miss a peer look for it every second."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not wanted(examination := await as_querier(three)):
            await asyncio.sleep(0.2)
    return examination


@contextlib.asynccontextmanager
async def healthy(folder: Path, **options: object) -> AsyncIterator[ThreeHelpers]:
    """Three helpers that have met."""
    async with three_helpers(folder, options=options) as three:
        await until(three, lambda examination: not problems(examination))
        yield three


def configure(three: ThreeHelpers, party: int, **changed: object) -> None:
    path = three.trio.config_path(party)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def sign(three: ThreeHelpers, helper_set: HelperSet, by: int = 3) -> None:
    """Write a set for this machine, signed by the first helpers."""
    unsigned = HelperSet(helper_set.number, helper_set.helpers)
    for party in range(by):
        unsigned = unsigned.signed_by(load_identity(three.trio.helper_folder(party) / "identity.key"))
    write_set(three.trio.helper_set_path, unsigned)


async def test_healthy_helpers_have_no_fault_from_either_place(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        before = {path: path.read_bytes() for path in three.trio.folder.rglob("*.json")}
        site = SiteKey(SITE, three.site_key())
        for examination in (await as_querier(three, site), await as_operator(three), await as_operator(three, 2)):
            assert problems(examination) == [] or {each.subject for each in problems(examination)} == {Subject.PORT}
            checked = {(each.subject, each.place) for each in examination.findings}
            for subject in (Subject.PORT, Subject.CERTIFICATE, Subject.HELPER_SET, Subject.LEDGER, Subject.DISK):
                assert {(subject, f"helper-{number}") for number in (1, 2, 3)} <= checked
        assert {(Subject.LEDGER, HERE), (Subject.DISK, HERE), (Subject.KEY, HERE)} <= checked
        assert {path: path.read_bytes() for path in three.trio.folder.rglob("*.json")} == before
        # The query that asks for the registration left nothing behind.
        assert all(queries.counts() == {} for queries in three.queries.values())
        assert not list(three.trio.folder.glob("helper-*/data/queries/*"))


def test_every_concern_of_a_health_page_is_a_subject_with_a_remedy() -> None:
    assert {concern.value for concern in Concern} <= {subject.value for subject in Subject}
    assert all(subject.remedy for subject in Subject)


async def test_a_set_that_lacks_a_signature(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        sign(three, three.helper_set, by=2)
        for examination in (await as_querier(three), await as_operator(three)):
            assert faults(examination) == {(Subject.HELPER_SET, HERE)}
            assert "helper-3" in examination.faults[0].text


async def test_a_helper_that_does_not_run_or_is_behind_a_firewall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 1.0)
    async with healthy(tmp_path) as three:
        await three.stop(1)
        examination = await until(three, lambda each: (Subject.PEER, "helper-1") in faults(each))
        assert (Subject.PORT, "helper-2") in faults(examination) and not examination.own_faults
        # The operator of another helper can only wait for it.
        examination = await as_operator(three, 0)
        assert (Subject.PEER, "helper-1") in faults(examination) and not examination.own_faults
        assert (Subject.PORT, "helper-2") in {
            (each.subject, each.place) for each in (await as_operator(three, 1)).own_faults
        }
        with black_hole() as port:
            first, second, third = three.helper_set.helpers
            sign(
                three,
                replace(three.helper_set, helpers=(first, replace(second, address=f"https://127.0.0.1:{port}"), third)),
            )
            (fault,) = (each for each in (await as_querier(three)).faults if each.place == "helper-2")
            assert fault.subject is Subject.PORT and f"127.0.0.1:{port}" in fault.text


async def test_another_certificate_than_the_pinned_one(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        first, second, third = three.helper_set.helpers
        sign(three, replace(three.helper_set, helpers=(first, second, replace(third, tls_pin=bytes(32)))))
        assert faults(await as_querier(three)) == {(Subject.CERTIFICATE, "helper-3")}
        # Its own operator learns that the file is not the one that the set pins.
        assert (Subject.CERTIFICATE, HERE) in faults(await as_operator(three, 2))


async def test_keys_and_certificates_that_end(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        keys_end = max(entry.not_after for helper in three.helper_set.helpers for entry in helper.hpke_keys)

        def at(moment: int) -> list[CheckResult]:
            return [
                each
                for each in doctor.compare(three.helper_set, seen, lambda: moment)
                if each.severity is not Severity.OK and each.subject in (Subject.KEY, Subject.CERTIFICATE)
            ]

        seen = await doctor.visit_all(three.helper_set, real_now)
        assert at(real_now()) == []
        assert {(each.subject, each.severity) for each in at(keys_end - DAY)} == {(Subject.KEY, Severity.WARNING)}
        assert (Subject.KEY, Severity.FAULT) in {(each.subject, each.severity) for each in at(keys_end + DAY)}
        ends = tls.ends(seen[0].certificate)
        assert (Subject.CERTIFICATE, Severity.WARNING) in {(each.subject, each.severity) for each in at(ends - DAY)}
        assert (Subject.CERTIFICATE, Severity.FAULT) in {(each.subject, each.severity) for each in at(ends + DAY)}


async def test_a_clock_that_differs_is_where_it_is_wrong(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        three.clocks[2] = lambda: real_now() + 2 * HOUR
        await asyncio.gather(*(three.start(party) for party in range(3)))
        examination = await as_querier(three)
        assert [each.place for each in examination.faults if each.subject is Subject.CLOCK] == ["helper-3"]
        assert not examination.own_faults
        # Its operator's machine has the wrong clock too: both others agree with each other.
        examination = await as_operator(three, 2, three.clocks[2])
        assert [each.place for each in examination.faults if each.subject is Subject.CLOCK] == [HERE]


async def test_the_clock_of_a_querier(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        examination = await as_querier(three, clock=lambda: real_now() - 600)
        assert faults(examination) == {(Subject.CLOCK, HERE)} and "600 s behind" in examination.faults[0].text


async def test_a_helper_that_runs_another_set(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        old, path = three.helper_set, three.trio.helper_set_path
        # Only the number differs: what a renewed certificate or a new address makes. Both are answered.
        sign(three, replace(old, number=old.number + 1))
        examination = await as_querier(three)
        assert not examination.faults and {each.subject for each in problems(examination)} == {Subject.HELPER_SET}
        other = prepare(tmp_path / "other", now=real_now()).helper_set.helpers
        keys = [replace(helper, hpke_keys=new.hpke_keys) for helper, new in zip(old.helpers, other, strict=True)]
        sign(three, replace(old, number=old.number + 2, helpers=(keys[0], keys[1], keys[2])))
        examination = await as_querier(three)
        assert faults(examination) == {(Subject.HELPER_SET, f"helper-{number}") for number in (1, 2, 3)}
        assert "restarts it" in examination.faults[0].remedy
        assert path.exists()


async def test_what_a_helper_knows_of_itself(tmp_path: Path) -> None:
    """A full disk stops queries, a failed proof does not; both are on its health page."""
    async with healthy(tmp_path) as three:
        three.storage(1)._free = lambda _folder: 0
        FailedProofs(load_config(three.trio.config_path(2)).failed_proofs).judge(lambda: False, "helper 1 cheated")
        examination = await as_querier(three)
        assert faults(examination) == {(Subject.DISK, "helper-2")}
        assert {(each.subject, each.place) for each in problems(examination)} == {
            (Subject.DISK, "helper-2"),
            (Subject.PROOFS, "helper-3"),
        }


async def test_a_ledger_that_peers_do_not_believe(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        alarm = Reason(Concern.LEDGER, "helper 2 has a ledger that went back", stops=True)
        three.daemons[0].health.sources.append(lambda: [alarm])
        assert faults(await as_querier(three)) == {(Subject.LEDGER, "helper-1")}


async def test_a_site_that_one_helper_has_not_registered(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        three.queries[1].policy.sites = {}
        assert faults(await as_querier(three, SiteKey(SITE, three.site_key()))) == {(Subject.SITE, "helper-2")}
        three.queries[1].policy.sites = three.queries[0].policy.sites
        wrong = await as_querier(three, SiteKey(SITE, IdentityKey.generate()))
        assert faults(wrong) == {(Subject.SITE, f"helper-{number}") for number in (1, 2, 3)}


async def test_helpers_without_a_common_noise_mode(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        for party, mode in enumerate(NoiseMode):
            configure(three, party, noise_modes=[mode.value])
            await three.start(party)
        examination = await as_querier(three)
        assert (Subject.CONFIGURATION, HERE) in faults(examination)


async def test_pages_of_a_malicious_helper_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with healthy(tmp_path) as three:
        for page in (b"", b"[]", b"\xff", b'{"reasons": 5}', b'{"ready": true, "reasons": [5, {"concern": []}]}'):

            async def get(*_: object, page: bytes = page) -> tuple[bytes, str]:
                return page, "no date"

            monkeypatch.setattr(doctor, "_get", get)
            assert (await as_querier(three)).faults


BREAKS: list[tuple[str, Subject, Callable[[Path], object]]] = [
    ("no configuration", Subject.CONFIGURATION, lambda folder: (folder / "config.json").write_text("{")),
    ("no set", Subject.HELPER_SET, lambda folder: (folder.parent / "helpers.json").unlink()),
    ("a key that others can read", Subject.KEY, lambda folder: (folder / "identity.key").chmod(0o644)),
    ("a lost HPKE key", Subject.KEY, lambda folder: shutil.rmtree(folder / "hpke")),
    ("a TLS key that others can read", Subject.CERTIFICATE, lambda folder: (folder / "tls.key").chmod(0o644)),
    ("no ledger", Subject.LEDGER, lambda folder: (folder / "ledger.sqlite").unlink()),
    ("a damaged ledger", Subject.LEDGER, lambda folder: (folder / "ledger.sqlite").write_bytes(bytes(4096))),
]


@pytest.mark.parametrize(("subject", "damage"), [each[1:] for each in BREAKS], ids=[each[0] for each in BREAKS])
async def test_files_that_keep_a_helper_from_starting(
    tmp_path: Path, subject: Subject, damage: Callable[[Path], object]
) -> None:
    """The helpers do not run, as where this happens: what is wrong here is named beside that."""
    async with three_helpers(tmp_path, start=False) as three:
        assert all(each.place != HERE for each in (await as_operator(three)).faults)
        damage(three.trio.helper_folder(0))
        examination = await as_operator(three)
        assert (subject, HERE) in faults(examination) and examination.own_faults


async def test_the_key_of_another_helper(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        mine, other = (three.trio.helper_folder(party) / "identity.key" for party in (0, 1))
        shutil.copy(other, mine)
        assert (Subject.HELPER_SET, HERE) in faults(await as_operator(three))


async def test_a_disk_without_space_or_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        configure(three, 0, limits={"spare_megabytes": 2**32 - 1})
        assert (Subject.DISK, HERE) in faults(await as_operator(three))
        configure(three, 0, limits={})
        assert (Subject.DISK, HERE) not in faults(await as_operator(three))
        # As root, these tests may write anywhere.
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert (Subject.DISK, HERE) in faults(await as_operator(three))


async def test_the_ledger_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(SqliteEngine, "check_readable", lambda *_: pytest.fail("it was opened"))
        assert Subject.LEDGER in {each.subject for each in problems(await as_operator(three))}


async def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        with listen("127.0.0.1") as held:
            configure(three, 0, mpc_ports=[held.getsockname()[1]])
            (fault,) = (each for each in (await as_operator(three)).faults if each.place == HERE)
            assert fault.subject is Subject.PORT and str(held.getsockname()[1]) in fault.text


async def test_an_mpc_port_that_the_firewall_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module.probe, "__defaults__", (0.2,))
    async with three_helpers(tmp_path, start=False) as three:
        with black_hole() as port:
            configure(three, 2, mpc_host="127.0.0.3", mpc_ports=[port])
            await asyncio.gather(*(three.start(party) for party in range(3)))
            examination = await as_operator(three)
            assert (Subject.PORT, HERE) in faults(examination)
            assert any(f"127.0.0.1:{port}" in each.text for each in examination.own_faults)
            # Nobody connects from helper 3 to the others.
            assert (Subject.PORT, HERE) not in faults(await as_operator(three, 2))


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_the_command_prints_problems_and_exits_by_who_can_mend_them(tmp_path: Path) -> None:
    """None of the three runs. A querier retries later; the operator of one of them starts it."""
    trio = prepare(tmp_path / "trio", now=real_now())
    code, said = run("--helpers", trio.helper_set_path)
    assert code == 75 and "fault, helper-2, port:" in said
    code, said = run("--config", trio.config_path(0))
    assert code == 1 and "fault, helper-1, port:" in said
    code, said = run("--config", trio.config_path(0), "--json", "-")
    document = json.loads(said)
    assert code == 1 and document["healthy"] is False
    assert {"subject", "place", "severity", "text", "remedy"} == set(document["findings"][0])
    key = trio.site_key_path(SITE)
    for wrong in (
        [],
        ["--helpers", "a", "--config", "b"],
        ["--helpers", "a", "--site", SITE],
        ["--config", "a", "--site", SITE, "--site-key", key],
    ):
        assert run(*wrong)[0] == 2
    assert run("--helpers", tmp_path / "nothing.json")[0] == 1


async def test_the_command_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    async with healthy(tmp_path) as three:
        options = [
            "--helpers",
            three.trio.helper_set_path,
            "--site",
            SITE,
            "--site-key",
            three.trio.site_key_path(SITE),
        ]
        code, said = await asyncio.to_thread(run, *options)
        assert code == 0 and "nothing is wrong" in said


def test_a_black_hole_drops_connections() -> None:
    """What several tests here rest on."""
    with black_hole() as port, socket.socket() as client:
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.connect(("127.0.0.1", port))
