"""Every command block of every document is run here, in order, so that documentation cannot rot.

A block is ```console with lines that begin with "$ ". ```console background holds commands that stay up: they are
started, the page goes on once they answer, and they are stopped at its end. `make` is checked without being run: it
would make the virtual environment that these tests run in. Python examples are run each on its own. A command that is
only named, in a sentence or a table, must exist and know its options.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpc_helpers.local.launcher import health
from protocol.cli.app import tree
from protocol.helper_set import HelperSet

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)
SECONDS = 120
_NAMED = re.compile(r"(?:`|^    |^\$ )((?:trefoil|make) [^`\n]+)", re.MULTILINE)
_BLOCK = re.compile(r"^```console([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    background: bool
    commands: list[str]


def blocks(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        commands = [line[2:] for line in match[2].splitlines() if line.startswith("$ ")]
        found.append(Block(match[1].strip() == "background", commands))
    return found


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Path]:
    """A folder to run a page in, with `trefoil` on the path and /tmp/trefoil standing for a folder in it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    command = tools / "trefoil"
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m trefoil "$@"\n'
    )
    command.chmod(0o755)
    yield tmp_path


def environment(workplace: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{workplace / 'bin'}:{os.environ['PATH']}", "TERM": "dumb"}


def free_ports() -> Iterator[int]:
    """Ports that are free with the eight after them, for a helper and its MPC, below those that the system chooses."""
    for first in random.sample(range(20_000, 32_000, 9), 1_000):
        with contextlib.ExitStack() as listening:
            try:
                for port in range(first, first + 9):
                    listening.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
        yield first


def with_free_ports(text: str) -> str:
    """The page with other ports in its addresses and options: another run may use these, or have been killed there."""
    found = free_ports()
    ports: dict[str, int] = {}

    def other(match: re.Match[str]) -> str:
        if match[2] not in ports:
            ports[match[2]] = next(found)
        return f"{match[1]}{ports[match[2]]}"

    return re.sub(r"(127\.0\.0\.1:|localhost:|--port )(\d+)", other, text)


def here(command: str, workplace: Path) -> str:
    """The command with the page's example folder inside the workplace."""
    return command.replace("/tmp/trefoil", str(workplace / "trefoil"))


@contextlib.contextmanager
def started(commands: list[str], workplace: Path) -> Iterator[None]:
    running = []
    try:
        for number, command in enumerate(commands):
            with (workplace / f"background-{number}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        ["sh", "-c", f"exec {here(command, workplace)}"],
                        cwd=workplace,
                        env=environment(workplace),
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        wait_until_helpers_answer(workplace)
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            try:
                process.wait(30)
            finally:
                # With its workers, should it leave any.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def wait_until_helpers_answer(workplace: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for path in (workplace / "trefoil" / "helpers.json", workplace / "helpers.json"):
            if path.exists() and all(health(helper) for helper in HelperSet.load(path).helpers):
                return
        time.sleep(0.2)
    logs = "\n".join(log.read_text() for log in sorted(workplace.glob("background-*.log")))
    pytest.fail(f"the helpers of the page did not start:\n{logs}")


def run(command: str, workplace: Path) -> None:
    if command.startswith("make "):
        target = command.split()[1]
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)
        return
    done = subprocess.run(
        ["sh", "-c", here(command, workplace)],
        cwd=workplace,
        env=environment(workplace),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works(page: str, workplace: Path) -> None:
    found = blocks(with_free_ports((ROOT / page).read_text()))
    with contextlib.ExitStack() as background:
        for block in found:
            assert block.commands, f"{page} has a console block without a command"
            if block.background:
                background.enter_context(started(block.commands, workplace))
            else:
                for command in block.commands:
                    run(command, workplace)


def test_the_pages_together_show_every_role() -> None:
    shown = " ".join(
        command for page in PAGES for block in blocks((ROOT / page).read_text()) for command in block.commands
    )
    missing = [
        word
        for word in ("launch", "device", "query", "helper", "reports", "helper-set")
        if f"trefoil {word}" not in shown
    ]
    assert not missing


def test_a_command_that_fails_fails_its_page(workplace: Path) -> None:
    with pytest.raises(AssertionError, match="no helper set"):
        run("trefoil query --reports none --helpers none --site-key none", workplace)


def unknown(command: str) -> str | None:
    """What is wrong with a command that a page names: a word that is no command, an option that it does not know."""
    program, *words = command.split()
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[0].rstrip(",") in targets else words[0]
    place = tree()
    while hasattr(place, "commands") and words and not words[0].startswith("-"):
        if words[0] not in place.commands:
            return words[0]
        place = place.commands[words.pop(0)]
    # `trefoil query --reports …` is short for `trefoil query run`.
    place = place.commands["run"] if words and hasattr(place, "commands") and "run" in place.commands else place
    known = {option for parameter in place.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next((option for option in options if option not in known | {"--help"}), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_is_known(page: str) -> None:
    named = {command: unknown(command) for command in _NAMED.findall((ROOT / page).read_text())}
    assert {command: wrong for command, wrong in named.items() if wrong} == {}


@pytest.mark.parametrize("command", ["trefoil dance", "trefoil bench sing", "trefoil query --sing", "make merry"])
def test_a_command_that_is_not_known_is_noticed(command: str) -> None:
    assert unknown(command) == command.split()[-1]


@pytest.mark.parametrize(("page", "number"), [(page, n) for page in PAGES for n in range(len(examples(page)))])
def test_every_python_example_of_a_page_holds(page: str, number: int, workplace: Path) -> None:
    script = workplace / "example.py"
    script.write_text(examples(page)[number])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=workplace,
        env=environment(workplace) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
