"""docker-compose.yml and deploy/: what can be known about them without starting anything."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DEPLOY = ROOT / "deploy"
YAML_FILES = [COMPOSE, *sorted(DEPLOY.rglob("*.yml"))]
DASHBOARDS = sorted(DEPLOY.rglob("*.json"))

Line = tuple[int, str]  # how far it is indented, and what it says
KEY = re.compile(r"([\w-]+):(?: +(.+))?")
PLAIN = re.compile(r"(?!.*(?:: | #))[\w./$-].*")


def read_yaml(text: str) -> Any:
    """The plain part of YAML that these files keep to; whatever goes beyond it is refused.

    A YAML parser is no dependency of this project, and one file of plain settings is no reason to add one.
    """
    lines = [
        (len(line) - len(line.lstrip(" ")), line.strip(" "))
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    value = read_block(lines)
    if lines:
        raise ValueError(f"does not belong where it stands: {lines[0]}")
    return value


def read_block(lines: list[Line]) -> Any:
    indent, text = lines[0]
    if text.startswith("- "):
        items = []
        while lines and lines[0][0] == indent and lines[0][1].startswith("- "):
            lines[0] = (indent + 2, lines[0][1].removeprefix("- "))
            items.append(read_block(lines))
        return items
    if not KEY.fullmatch(text):
        lines.pop(0)
        return read_scalar(text)
    mapping: dict[str, Any] = {}
    while lines and lines[0][0] == indent and (match := KEY.fullmatch(lines[0][1])):
        key, value = match.groups()
        if key in mapping:
            raise ValueError(f"said twice: {lines[0]}")
        lines.pop(0)
        if value is not None:
            mapping[key] = read_scalar(value)
        else:
            mapping[key] = read_block(lines) if lines and lines[0][0] > indent else None
    return mapping


def read_scalar(text: str) -> Any:
    if text[0] in '["' or text in {"true", "false"} or text.isdecimal():
        return json.loads(text)
    if not PLAIN.fullmatch(text):
        raise ValueError(f"more than plain YAML: {text}")
    return text


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_yaml(COMPOSE.read_text())


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.name)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text())


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_file_is_plain_yaml(path: Path) -> None:
    assert isinstance(read_yaml(path.read_text()), dict)


@pytest.mark.parametrize(
    "text", ["a: b: c", "a: 1\n  b: 2", "a: 1\na: 2", "a: [1, 2", "a: &b", "a:\n  - 1\n b: 2", "\ta: 1"]
)
def test_what_is_not_plain_yaml_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_yaml(text)


def test_docker_compose_understands_the_file() -> None:
    """Nothing is contacted: `config` only reads."""

    def docker_compose(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "compose", *arguments], capture_output=True, text=True, timeout=30)

    if shutil.which("docker") is None or docker_compose("version").returncode != 0:
        pytest.skip("no docker compose client here; the other tests read the file by themselves")
    answer = docker_compose("--file", str(COMPOSE), "config", "--quiet")
    assert answer.returncode == 0, answer.stderr


def test_every_mounted_file_exists_and_every_volume_is_declared(compose: dict[str, Any]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service["volumes"]]
    sources = {mount.split(":")[0] for mount in mounts}
    files = {source for source in sources if source.startswith("./")}
    assert files, "nothing is mounted from deploy/"
    assert [source for source in sorted(files) if not (ROOT / source).exists()] == []
    assert sources - files == compose["volumes"].keys()


def test_every_service_is_pinned_checked_and_bound_to_this_machine(
    compose: dict[str, Any],
) -> None:
    assert compose["services"].keys() == {"postgres", "redis", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[\w/]+:v?\d+[\d.]*", service["image"]), name
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_every_password_can_be_set_from_the_environment(compose: dict[str, Any]) -> None:
    passwords = [
        value
        for service in compose["services"].values()
        for variable, value in service.get("environment", {}).items()
        if "PASSWORD" in variable or "AUTH" in variable.split("_")[-1]
    ]
    assert len(passwords) == 2
    assert all(re.fullmatch(r"\$\{FENCING_\w+_PASSWORD:-fencing\}", password) for password in passwords)


def test_redis_never_evicts_a_counter_and_survives_a_restart(compose: dict[str, Any]) -> None:
    assert option(compose, "--maxmemory-policy") == "noeviction"
    assert option(compose, "--appendonly") == "yes"


def option(compose: dict[str, Any], name: str) -> str:
    """What the command line of Redis says after this option."""
    command = compose["services"]["redis"]["command"]
    return command[command.index(name) + 1]


def test_grafana_finds_its_dashboards_and_its_datasource(compose: dict[str, Any]) -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [provider] = read_yaml((provisioning / "dashboards" / "fencing.yml").read_text())["providers"]
    [datasource] = read_yaml((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    grafana = compose["services"]["grafana"]
    mounted_at = dict(mount.split(":")[:2] for mount in grafana["volumes"])

    assert mounted_at["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {f"{provider['options']['path']}/{path.name}" for path in DASHBOARDS}
    assert datasource["url"] == "http://prometheus:9090"
    assert datasource["uid"] == "prometheus"


def test_every_panel_has_its_own_id_and_asks_the_provisioned_datasource(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": "prometheus", "uid": "prometheus"}, panel["title"]


def test_every_query_asks_for_our_metrics_in_the_chosen_namespace(dashboard: dict[str, Any]) -> None:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert queries
    for query in queries:
        metrics = re.findall(r"fencing_\w+", query)
        assert metrics, query
        assert query.count('{namespace=~"$namespace"}') == len(metrics), query
