"""Ask a real Prometheus, which scrapes a real Ray and a run on it, what dashboards and alerts ask.

Ray's names and rayapp's must give data; those of GPUs and EFA, which are not here, must parse.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Browser, Page, needs_chromium
from nodes import started
from patience import PATIENCE_S
from ports import free_port

from rayapp.storage import Storage, open_storage

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PROMETHEUS, GRAFANA = ROOT / "cluster" / "prometheus", ROOT / "cluster" / "grafana"
DASHBOARDS = sorted(GRAFANA.glob("dashboards/*.json"))
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian's package: prometheus)",
)


def with_prometheus(test: Callable[..., None]) -> Any:
    """A run on a Ray that Prometheus scrapes: started once, in some 40 s."""
    return pytest.mark.full(needs_prometheus(test))


# What a process tells that is no training: what the tiny run on CPUs has not (an MFU, bad steps).
DRIVEN = """
import sys, time
import ray
from ray.util.metrics import Gauge
from rayapp.observe.gauges import Steps, tell_end
from rayapp.config.fields import TOKENS
from rayapp.observe.metrics import columns_of, line_of
ray.init(address=sys.argv[1], log_to_driver=False)
told = Steps("driven", rank=0)
planned = Gauge("rayapp_planned_step_s", "", ("run",))  # the run beside it has no plan: a CPU
several = ("loss_by_source", "tokens_by_source", "eval_loss_by_source", "eval_metrics", "rank_s")
numbers = {name: {"a": 2} if name in several else 0.5 for name in columns_of(TOKENS)}
step = 0
while True:
    step += 1
    bad = step % 10 == 0
    facts = {"step": step, "tokens": 64, "workers": 2, "attempt": 1, "mfu": 0.25}
    facts |= {"skipped": bad, "loss": float("nan") if bad else 2.0, "eval_loss": None}
    told.step(line_of(TOKENS, numbers, facts))
    planned.set(0.5, {"run": "driven"})
    tell_end("driven", "stopped")  # at each step: Ray shows it for 5 s
    time.sleep(0.5)
"""


@dataclass(frozen=True)
class Live:
    """A Prometheus that scrapes a Ray with a run on it."""

    url: str
    dashboard: str
    token: str
    run: Storage
    training: subprocess.Popen[bytes]

    def get(self, path: str, **query: str) -> Any:
        text = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{text}", timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return what a query gives now: a list of {metric, value}."""
        return list(self.get("query", query=expression)["result"])

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        until = time.monotonic() + PATIENCE_S
        while not (found := self.ask(expression)):
            assert time.monotonic() < until, f"no data: {expression}"
            time.sleep(0.5)
        return found


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    temporary = tempfile.mkdtemp()  # short: Ray makes sockets below it
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{BIN}:{os.environ['PATH']}",  # jobs run `python`
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Nodes report every 5 s. Gauges last for 10: five scrapes, of which a busy machine may
        # answer few in time.
        "RAY_metrics_report_interval_ms": "5000",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        processes.append(process)
        return process

    gcs, dashboard, port = free_port(), free_port(), free_port()
    options = {"port": gcs, "dashboard-port": dashboard, "temp-dir": temporary, "num-cpus": 8}
    options |= {"object-store-memory": 200_000_000, "ray-client-server-port": free_port()}
    options |= {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    processes.append(started(command, environment, folder / "ray.log"))
    for source in PROMETHEUS.glob("*.yml"):
        text = source.read_text()
        if source.name == "prometheus.yml":
            assert DISCOVERY in text
            text = text.replace(DISCOVERY, f"{temporary}/{Path(DISCOVERY).name}")
            text = re.sub(r"(interval|timeout): \d+s", r"\1: 2s", text)
        (folder / source.name).write_text(text)
    start(
        "prometheus",
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    run = open_storage(str(folder / "runs")) / "watched"
    try:
        until = time.monotonic() + PATIENCE_S
        while not (Path(temporary, Path(DISCOVERY).name).exists() and answers(dashboard)):
            log = (folder / "ray.log").read_text()
            assert processes[0].poll() is None and time.monotonic() < until, log
            time.sleep(0.5)
        address = f"127.0.0.1:{gcs}"
        command = [sys.executable, "-m", "rayapp", "submit", str(ROOT / "configs/tiny_cpu.yaml")]
        command += [f"--address=http://127.0.0.1:{dashboard}", "--follow"]
        command += [f"--run.storage={folder}/runs", "--run.name=watched"]
        command += ["--train.max_steps=100000"]
        command += ["--model.tokenizer=bytes", "--model.overrides={num_hidden_layers: 1}"]
        command += ["--train.tokens_per_step=2048", "--train.micro_batch=2", "--data.seq_len=128"]
        command += [
            f"--data.path={ROOT}/rayapp/train/*.py",
            f"--data.eval_path={ROOT}/rayapp/train/loop.py",
        ]
        command += ["--data.eval_fraction=0", "--eval.every_steps=10"]
        command += ["--eval.prompts=", "--checkpoint.every_s=none", "--checkpoint.every_steps=10"]
        command += ["--cluster.instance=c7i.2xlarge", "--cluster.usd_per_hour=0.357"]
        training = start("finetune", *command)
        driven = start("driven", sys.executable, "-c", DRIVEN, address)
        found = Live(
            f"http://127.0.0.1:{port}",
            f"http://127.0.0.1:{dashboard}",
            environment["RAY_AUTH_TOKEN"],
            run,
            training,
        )
        until = time.monotonic() + PATIENCE_S
        while not found_step(found, "watched", 25):
            log = (folder / "finetune.log").read_text()[-3000:]
            assert training.poll() is None and time.monotonic() < until, log
            assert driven.poll() is None, (folder / "driven.log").read_text()[-3000:]
            time.sleep(1)
        yield found
    finally:
        for process in reversed(processes):
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def found_step(live: Live, run: str, step: int) -> bool:
    try:
        return bool(live.ask(f'ray_rayapp_step{{run="{run}"}} >= {step}'))
    except OSError:  # it has just been started
        return False


def expressions(path: Path) -> list[tuple[str, str]]:
    """Return (panel's title, query) of a dashboard, its variables replaced as Grafana does."""
    found = []
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "20s").replace("[10m]", "[20s]")
            for variable in ("run", "node", "host"):
                text = text.replace(f"${variable}", ".*")
            assert "$" not in text, text
            found.append((panel["title"], text))
    return found


@with_prometheus
@pytest.mark.parametrize("name", ["training", "ray"])
def test_every_panel_has_data(live: Live, name: str) -> None:
    for title, expression in expressions(GRAFANA / "dashboards" / f"{name}.json"):
        values = live.wait_for(expression)
        assert values, f"{title}: {expression}"
    for variable in variables(name):
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
        assert live.get(f"label/{label}/values", **{"match[]": metric})


@with_prometheus
@pytest.mark.parametrize("name", ["gpu", "efa"])
def test_what_is_not_here_is_asked_for_rightly(live: Live, name: str) -> None:
    for _, expression in expressions(GRAFANA / "dashboards" / f"{name}.json"):
        assert live.ask(expression) == []  # and the request did not fail


def variables(name: str) -> list[str]:
    dashboard = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    listed = dashboard["templating"]["list"]
    return [each["query"]["query"] for each in listed if each["type"] == "query"]


@with_prometheus
def test_every_name_of_ours_and_rays_is_there(live: Live) -> None:
    """Each metric by itself: in an `or` one of a wrong name would go unseen."""
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    texts = [rule["expr"] for group in rules for rule in group["rules"]]
    texts += [text for path in DASHBOARDS for _, text in expressions(path)]
    asked = {name for text in texts for name in re.findall(r"\bray_\w+", text)}
    cloudwatch = (ROOT / "infra/modules/observability/main.tf").read_text()
    asked |= set(re.findall(r"\bray_rayapp_\w+", cloudwatch))
    assert len(asked) > 40
    for name in sorted(asked):
        (live.wait_for(f"last_over_time({name}[1h])"), name)


def whole_moment(live: Live) -> str:
    """Return a moment at which both ranks and the driver had told: on a busy machine not all do."""
    until = time.monotonic() + 120
    while True:
        time.sleep(6)
        at = f"{time.time() - 5:.3f}"
        told = [
            live.get("query", query=f'ray_rayapp_{name}{{run="watched"}}', time=at)["result"]
            for name in ("step", "attempt", "checkpoint_step", "peak_gib")
        ]
        if [len(each) for each in told] == [1, 1, 1, 2]:
            return at
        assert time.monotonic() < until, told


@with_prometheus
def test_the_values_are_those_of_the_run(live: Live) -> None:
    live.wait_for('ray_rayapp_checkpoint_step{run="watched"} > 0')  # looked at every 10 s
    at = whole_moment(live)

    def value(name: str, tags: str = "") -> float:
        query = f'ray_rayapp_{name}{{run="watched"{tags}}}'
        (found,) = live.get("query", query=query, time=at)["result"]
        assert found["metric"]["job"] == "ray"
        return float(found["value"][1])

    time.sleep(10)  # Prometheus has what follows that moment, and metrics.jsonl too
    lines = [json.loads(line) for line in live.run.read("metrics.jsonl").splitlines()]
    step = int(value("step"))
    near = lines[max(0, step - 2) : step + 1]  # one may be told while the values are taken
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "epoch"):
        assert any(value(name) == pytest.approx(line[name], rel=1e-6) for line in near), name
    # A process sends its counts and its gauges apart, so each is compared over one report around.
    around = {"query": 'ray_rayapp_step{run="watched"}[10s]', "time": str(float(at) + 5)}
    (gauge,) = live.get("query", **around)["result"]
    first, *_, last = (int(float(step)) for _, step in gauge["values"])
    assert first <= step <= last
    assert first - 1 <= value("step_s_count") <= last + 1
    tokens = [sum(line["tokens"] for line in lines[:steps]) for steps in (first - 1, last + 1)]
    assert tokens[0] <= value("tokens_total") <= tokens[1]
    assert value("workers") == 2 and value("attempt") == 1
    assert value("num_steps") == 100_000 and value("usd_per_hour") == pytest.approx(0.357)
    assert value("cost_usd") == pytest.approx(value("wall_s") / 3600 * 0.357, rel=0.05)
    assert 0 < value("goodput", ', cause="step"') < 1
    assert value("checkpoint_step") % 10 == 0 and value("checkpoint_step") > 0
    shares = live.get("query", query='sum(ray_rayapp_goodput{run="watched"})', time=at)["result"]
    assert float(shares[0]["value"][1]) == pytest.approx(1.0)
    ranks = live.get("query", query='ray_rayapp_peak_gib{run="watched"}', time=at)["result"]
    assert sorted(each["metric"]["rank"] for each in ranks) == ["0", "1"]
    assert not live.ask('ray_rayapp_mfu{run="watched"}')  # unknown on CPUs, so not told


@with_prometheus
def test_alerts_are_evaluated_and_only_the_bad_run_fires(live: Live) -> None:
    rules = [rule for group in live.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {
        rule["alert"]
        for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
        for rule in group["rules"]
    }
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    live.wait_for('ALERTS{alertname="LossNotFinite", alertstate="firing"}')
    # A busy machine answers no scrape within this test's two seconds for a while, and NodeLost then
    # fires rightly: rules_test.yml judges that rule.
    firing = [each["labels"] for each in live.get("alerts")["alerts"] if each["state"] == "firing"]
    assert [
        (each["alertname"], each.get("run")) for each in firing if each["alertname"] != "NodeLost"
    ] == [("LossNotFinite", "driven")]


@with_prometheus
def test_rays_train_api_knows_the_run(live: Live) -> None:
    request = urllib.request.Request(
        f"{live.dashboard}/api/train/v2/runs/v1", headers={"Authorization": f"Bearer {live.token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        (found,) = json.load(answer)["train_runs"]
    assert (found["name"], found["status"]) == ("watched", "RUNNING")
    workers = found["attempts"][0]["workers"]
    assert [each["status"] for each in workers] == ["ALIVE", "ALIVE"]
    for each in workers:  # Ray puts this name before the lines of the process
        logs = Path(each["log_file_path"]).parent.parent
        (log,) = logs.glob(f"worker-*-{each['pid']}.out")
        assert f":actor_name:watched/rank-{each['world_rank']}\n" in log.read_text()
    assert found["run_settings"]["train_loop_config"] is None  # it would show to everyone


@with_prometheus
@needs_chromium
def test_rays_dashboard_shows_the_run(live: Live, tmp_path: Path) -> None:
    """In a browser with the token: the job with what was asked, its workers, its log."""
    authorized = {"Authorization": f"Bearer {live.token}"}
    with Browser() as browser:
        stranger = browser.open(f"{live.dashboard}/#/jobs")
        wait_for_text(stranger, "oken")
        assert "watched" not in stranger.evaluate(TEXT)
        stranger.close()
        page = browser.open("about:blank")
        page.call("Network.setExtraHTTPHeaders", headers=authorized)
        page.call("Page.navigate", url=f"{live.dashboard}/#/jobs")
        text = wait_for_text(page, "watched")
        assert "\twatched\t" in text, "the name that was given to the job"
        assert "--run.name=watched" in text and "RUNNING" in text
        assert live.token not in text
        page.call("Page.navigate", url="about:blank")
        page.call("Page.navigate", url=f"{live.dashboard}/#/jobs")
        assert re.search(r"step \d+/100000, loss \d", wait_for_text(page, "/100000, loss "))
        page.screenshot(tmp_path / "jobs.png")
        page.call("Page.navigate", url=f"{live.dashboard}/#/actors")
        text = wait_for_text(page, "RayTrainWorker")
        assert "ALIVE" in text
        page.screenshot(tmp_path / "actors.png")


TEXT = "document.body?.innerText ?? ''"  # none while a page comes


def wait_for_text(page: Page, wanted: str, seconds: float = 60.0) -> str:
    until = time.monotonic() + seconds
    while wanted not in (text := str(page.evaluate(TEXT))):
        assert time.monotonic() < until, text
        time.sleep(0.5)
    return text


@with_prometheus
def test_what_ends_leaves_its_last_counts(live: Live) -> None:
    live.run.write("STOP", b"")
    assert live.training.wait(timeout=PATIENCE_S) == 3
    lines = [json.loads(line) for line in live.run.read("metrics.jsonl").splitlines()]
    tokens = sum(line["tokens"] for line in lines)
    live.wait_for(f'sum(ray_rayapp_tokens_total{{run="watched"}}) == {tokens}')
    live.wait_for('last_over_time(ray_rayapp_failed{run="watched"}[5m]) == 0')  # shown for 20 s
    live.wait_for('absent(ray_rayapp_step{run="watched"})')
    live.wait_for('absent(ray_rayapp_last_step_unix_s{run="watched"})')


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)


@needs_prometheus
def test_promtool_finds_nothing_wrong() -> None:
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_each_alert_is_tested_to_fire_and_not_to(tmp_path: Path) -> None:
    """An alert that always or never fires must fail promtool's tests."""
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    shutil.copy(PROMETHEUS / "rules_test.yml", tmp_path)
    listed = [rule for group in rules["groups"] for rule in group["rules"]]
    for changed in ("vector(1)", "vector(0) > 1"):
        for rule in listed:
            rule["expr"] = changed
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
        done = promtool("test", "rules", "rules_test.yml", cwd=tmp_path)
        failed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
        assert done.returncode == 1 and failed == {rule["alert"] for rule in listed}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field(path: Path) -> None:
    """Grafana's own SDK reads it, and what it writes again has all that is in the file."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import units
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    ours = json.loads(path.read_text())
    theirs = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(ours)))
    assert_holds(theirs, ours, path.stem)
    listed = set(re.findall(r'Literal\["([^"]+)"\] = ', Path(units.__file__).read_text()))
    for panel in ours["panels"]:
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"] in listed
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None


def assert_holds(theirs: Any, ours: Any, where: str) -> None:
    if isinstance(ours, dict):
        for name, value in ours.items():
            assert name in theirs or value is None, f"{where}.{name}"
            assert_holds(theirs.get(name), value, f"{where}.{name}")
    elif isinstance(ours, list):
        assert len(theirs) == len(ours), where
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            assert_holds(one, other, f"{where}[{number}]")
    else:
        assert theirs == ours, where


def test_dashboards_fit_together() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert [path.stem for path in DASHBOARDS] == ["efa", "gpu", "ray", "training"]
    assert len({each["uid"] for each in dashboards}) == 4
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    (source,) = sources["datasources"]
    for dashboard in dashboards:
        assert dashboard["schemaVersion"] >= 39
        known = {each["name"]: each for each in dashboard["templating"]["list"]}
        assert known["datasource"]["current"]["value"] == source["uid"]
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = set()
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            own = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not own & cells, panel["title"]
            cells |= own
            text = json.dumps(panel)
            used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
            assert used <= known.keys(), panel["title"]
            assert all(target["legendFormat"] for target in panel.get("targets", []))
