"""compose.yml and the Grafana board: configuration that fits together, and the images' commands run as processes.

No container runtime is needed. Names, volumes and mounts are checked against each other and against the files that are
here; `setup.sh` and the commands of the helpers' services run as they stand, with folders and ports of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mpc_helpers.identity.tls import make_identity
from mpc_helpers.local.launcher import health
from protocol.helper_set import HelperSet
from tests.mpc_helpers.test_monitoring import WANTED
from tests.processes.test_alerts import OPERATIONS, ROOT, needs
from tests.processes.test_helper_commands import NAMES, free_port, reports_to
from tests.support.exposition import read_exposition
from tests.support.three_helpers import real_now, wait_until, write_batch

WAIT_SECONDS = 200.0
COMPOSE: dict[str, Any] = yaml.safe_load((OPERATIONS / "compose.yml").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((OPERATIONS / "prometheus.yml").read_text())
BOARD: dict[str, Any] = json.loads((OPERATIONS / "grafana" / "board.json").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
# The keys of a service that this file uses, of those in the Compose specification.
SERVICE_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "ports", "volumes", "profiles", "depends_on"),
    *("restart", "stop_grace_period", "read_only", "tmpfs", "cap_drop", "security_opt", "ulimits", "healthcheck"),
}


def mounts(service: str) -> list[tuple[str, str]]:
    """The source and the target of each mount."""
    return [tuple(mount.split(":")[:2]) for mount in SERVICES[service].get("volumes", [])]


def test_services_volumes_and_files_fit_together() -> None:
    assert {*NAMES, "setup", "prometheus", "grafana"} <= set(SERVICES)
    used = set()
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("depends_on", [])) <= set(SERVICES)
        for source, target in mounts(name):
            assert target.startswith("/")
            if source.startswith("./"):
                assert (OPERATIONS / source).is_file(), source
            else:
                used.add(source)
    assert used == set(COMPOSE["volumes"])
    build = SERVICES["north"]["build"]
    assert (OPERATIONS / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()


def test_a_helper_has_its_own_keys_and_nothing_of_the_others() -> None:
    for name in NAMES:
        service = SERVICES[name]
        assert mounts(name) == [(name, f"/etc/trefoil/{name}")]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert "ports" not in service and "privileged" not in service
    # Only this machine sees metrics and board.
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
        assert not {source for source, _ in mounts(name)} & set(NAMES)
    # A volume takes its owner from the folder in the image.
    image = (OPERATIONS / "Dockerfile").read_text()
    for _, target in mounts("setup")[1:]:
        assert target in image
    assert "\nUSER trefoil\n" in image and image.index("USER trefoil") > image.index("useradd")


def test_prometheus_and_grafana_find_what_setup_makes() -> None:
    setup = (OPERATIONS / "setup.sh").read_text()
    for name, job in zip(NAMES, PROMETHEUS["scrape_configs"], strict=True):
        assert job["static_configs"] == [{"targets": [f"{name}:8443"], "labels": {"instance": name}}]
        assert f"https://{name}:8443" in setup
        assert job["tls_config"] == {"ca_file": f"/monitoring/{name}.crt", "server_name": name}
        assert job["authorization"] == {"credentials_file": f"/monitoring/{name}.token"}
        # The alert rules select this job.
        assert job["relabel_configs"] == [{"target_label": "job", "replacement": "trefoil"}]
    mounted = dict(mounts("prometheus"))
    assert mounted["./alerts.yml"] == f"/etc/prometheus/{PROMETHEUS['rule_files'][0]}"
    source = yaml.safe_load((OPERATIONS / "grafana" / "datasources.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    used = [each["datasource"] for panel in BOARD["panels"] for each in (panel, *panel["targets"])]
    assert all(each == {"type": source["type"], "uid": source["uid"]} for each in used)
    folder = yaml.safe_load((OPERATIONS / "grafana" / "dashboards.yml").read_text())["providers"][0]["options"]["path"]
    assert dict(mounts("grafana"))["./grafana/board.json"].startswith(folder + "/")


def test_the_board_shows_every_metric_and_no_other() -> None:
    named = set(re.findall(r"\b(?:trefoil|process)_\w+", " ".join(EXPRESSIONS)))
    assert named == WANTED


def test_panels_do_not_overlap() -> None:
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24
    for names in ([panel["id"] for panel in BOARD["panels"]], [panel["title"] for panel in BOARD["panels"]]):
        assert len(set(names)) == len(names)


@needs("promtool")
def test_prometheus_reads_its_configuration_and_every_expression_of_the_board(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(EXPRESSIONS)]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    for command in (["rules", tmp_path / "board.yml"], ["config", "--syntax-only", OPERATIONS / "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Site:
    """The services of compose.yml on this machine: folders stand for volumes, ports of loopback for names."""

    folder: Path
    addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("keys", "monitoring", "public", "bin"):
            (self.folder / name).mkdir()
        script = f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m trefoil "$@"\n'
        (self.folder / "bin" / "trefoil").write_text(script)
        (self.folder / "bin" / "trefoil").chmod(0o755)
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in NAMES}

    @property
    def environment(self) -> dict[str, str]:
        places = {f"TREFOIL_{name.upper()}": f"https://{address}" for name, address in self.addresses.items()}
        folders = {f"TREFOIL_{name.upper()}": str(self.folder / name) for name in ("keys", "monitoring", "public")}
        return {**os.environ, **places, **folders, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def here(self, words: list[str]) -> list[str]:
        """A command of an image, with this machine's folders."""
        mounted = {"/etc/trefoil": "keys", "/monitoring": "monitoring", "/public": "public"}
        for inside, outside in mounted.items():
            words = [word.replace(inside, str(self.folder / outside)) for word in words]
        return words

    def run(self, *words: str, code: int = 0) -> str:
        public, environment = self.folder / "public", self.environment
        done = subprocess.run(
            words, cwd=public, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    @property
    def helper_set(self) -> HelperSet:
        return HelperSet.load(self.folder / "public" / "helpers.json")

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """The three helpers' services, ready."""
        processes = []
        try:
            for name in NAMES:
                with (self.folder / f"{name}.log").open("wb") as log:
                    command = ["trefoil", *self.here(SERVICES[name]["command"])]
                    processes.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
            wait_until(lambda: all((health(helper) or {}).get("ready") for helper in self.helper_set.helpers))
            yield
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                assert process.wait(WAIT_SECONDS) == 0

    def metrics(self, name: str) -> str:
        """A scrape with the certificate and the token that Prometheus has."""
        context = ssl.create_default_context(cafile=self.folder / "monitoring" / f"{name}.crt")
        # Prometheus compares with server_name; the certificate has no address.
        context.check_hostname = False
        token = (self.folder / "monitoring" / f"{name}.token").read_text().strip()
        request = urllib.request.Request(
            f"https://{self.addresses[name]}/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10, context=context) as page:  # noqa: S310 - https, above
            return str(page.read().decode())


def test_the_services_commands_set_up_serve_answer_and_are_scraped(tmp_path: Path) -> None:
    site = Site(tmp_path)
    setup = ["sh", str(OPERATIONS / "setup.sh")]
    site.run(*setup)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # At the next start everything is there already.
    site.run(*setup)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    for name in NAMES:
        # One of the ports that keygen wrote: two queries in a row need it within seconds of each other.
        config = tmp_path / "keys" / name / "config.json"
        stored = json.loads(config.read_text())
        config.write_text(json.dumps({**stored, "mpc_ports": stored["mpc_ports"][:1]}))
    with site.started():
        for name in NAMES:
            site.run(*site.here(SERVICES[name]["healthcheck"]["test"][1:]))
            assert set(read_exposition(site.metrics(name))) == WANTED
        asking = ["--helpers", "helpers.json", "--site", "shop.example", "--site-key", "shop.key"]
        assert "nothing is wrong" in site.run("trefoil", "doctor", *asking)
        site.run("trefoil", "doctor", "--config", str(tmp_path / "keys" / "north" / "config.json"))
        for number in range(2):
            write_batch(tmp_path / "public" / f"{number}.batch", reports_to(site.helper_set, 5))
            query = f"trefoil query --reports {number}.batch --helpers helpers.json --site-key shop.key"
            assert "5 of 5 reports counted" in site.run(*query.split())
        if shutil.which("prometheus"):
            check_that_prometheus_scrapes_them(site)
    lines = [json.loads(line) for name in NAMES for line in (tmp_path / f"{name}.log").read_text().splitlines()]
    assert lines and not [line for line in lines if line["level"] in ("warning", "error")]


def check_that_prometheus_scrapes_them(site: Site) -> None:
    text = (OPERATIONS / "prometheus.yml").read_text().replace("15s", "1s")
    text = text.replace("/monitoring", str(site.folder / "monitoring"))
    for name, address in site.addresses.items():
        text = text.replace(f'"{name}:8443"', f'"{address}"')
        # As while a certificate is renewed: the next one is in the file too, before the helper has it.
        (site.folder / f"next-{name}").mkdir()
        following = make_identity(site.folder / f"next-{name}", name, real_now()).certificate.read_text()
        trusted = site.folder / "monitoring" / f"{name}.crt"
        trusted.write_text(following + trusted.read_text())
    (site.folder / "prometheus.yml").write_text(text)
    shutil.copy(OPERATIONS / "alerts.yml", site.folder)
    where = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={site.folder}/prometheus.yml", f"--storage.tsdb.path={site.folder}/tsdb"]
    with (site.folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={where}"], stdout=log, stderr=log)

    def up() -> bool:
        question = f"http://{where}/api/v1/query?query=trefoil_ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(question, timeout=5) as page:
            series = json.load(page)["data"]["result"]
            return {each["metric"]["instance"] for each in series} == set(NAMES)
        return False

    try:
        wait_until(up)
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
