"""Dashboard and alerts ask for metrics, labels and values that the server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from scope_runners.serve.metrics import ServerMetrics
from tests.deploy.files import DEPLOY, documents
from tests.serve.viewed import ViewedSession, view

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "scope-rt.json").read_text())
FROM_PROMETHEUS = {"job", "instance"}
NOT_METRICS = re.compile(r'"[^"]*"|\$\w+|\[[^]]*\]|\b(?:by|on) \([^)]*\)')


def told() -> dict[str, dict[str, set[str]]]:
    """Of every sample that `/metrics` may have: its labels, and the values of each."""
    sessions = [ViewedSession(), ViewedSession(view(recording="take1"))]
    samples: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(ServerMetrics(lambda: sessions).text().decode()):
        for sample in family.samples:
            labels = samples.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return samples


SAMPLES = told()
PANELS = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
ALERTS: list[dict[str, Any]] = [
    rule for group in documents("prometheus/alerts.yml")[0]["groups"] for rule in group["rules"]
]
RULES = [pytest.param(rule["expr"], id=rule["alert"]) for rule in ALERTS]


def unknown_in(expression: str) -> list[str]:
    """What the expression asks for and nobody tells."""
    found = []
    names = set(re.findall(r"\b[a-z]\w*_\w+\b", NOT_METRICS.sub("", expression)))
    functions = set(re.findall(r"\b(\w+)\s*\(", expression))
    labels: dict[str, set[str]] = {}
    for name in names - functions:
        if name not in SAMPLES:
            found.append(name)
        for label, values in SAMPLES.get(name, {}).items():
            labels.setdefault(label, set()).update(values)
    for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', expression):
        if label in FROM_PROMETHEUS:
            continue
        if label not in labels:
            found.append(label)
        elif operator == "=" and value not in labels[label]:
            found.append(f"{label}={value}")
        elif operator == "=~" and not value.startswith("$"):
            found += [f"{label}={v}" for v in value.split("|") if v not in labels[label]]
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        found += [label for label in grouped.split(", ") if label not in labels]
    return found


@pytest.mark.parametrize("expression", [*PANELS, *RULES])
def test_an_expression_asks_for_what_the_server_tells(expression: str) -> None:
    if expression.startswith("up{"):
        return  # Prometheus's own
    assert unknown_in(expression) == []


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("rate(scope_frame_total[5m])", ["scope_frame_total"]),
        ('scope_viewers{viewer="x"}', ["viewer"]),
        ('scope_parity{parity="wrong"} == 1', ["parity=wrong"]),
        ("sum by (rank) (scope_viewers)", ["rank"]),
        ('scope_sessions{state=~"live|dead"}', ["state=dead"]),
    ],
)
def test_what_nobody_tells_is_found(expression: str, unknown: list[str]) -> None:
    assert unknown_in(expression) == unknown


def test_what_a_panel_shows_is_from_the_source_that_is_provisioned() -> None:
    (source,) = documents("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places) == len(set(places))


def test_grafana_finds_the_dashboard_where_compose_puts_it() -> None:
    (provider,) = documents("grafana/provisioning/dashboards/scope-rt.yml")[0]["providers"]
    volumes = documents("compose.yaml")[0]["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HAS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not here"
)


@HAS_PROMTOOL
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml")
    said = promtool("check", "rules", DEPLOY / "prometheus" / "alerts.yml")
    assert f"{len(ALERTS)} rules found" in said


BUCKET = "scope_prompt_latency_seconds_bucket"
WELL = {
    'up{job="scope-rt"}': "1x90",
    'scope_session_state{session="a",state="live"}': "1x90",
    'scope_session_state{session="a",state="failed"}': "0x90",
    'scope_session_state{session="a",state="recovering"}': "0x5 1x0 0x84",
    'scope_parity{session="a",parity="bad"}': "0x90",
    'scope_recoveries_total{session="a"}': "0x40 1x50",
    'scope_frames_per_second{session="a"}': "16x90",
    'scope_target_frames_per_second{session="a"}': "16x90",
    'scope_stalls_total{session="a"}': "0x30 3x60",
    f'{BUCKET}{{le="1.0",session="a"}}': "0+2x90",
    f'{BUCKET}{{le="5.0",session="a"}}': "0+2x90",
    f'{BUCKET}{{le="+Inf",session="a"}}': "0+2x90",
}
"""A minute a step: a session that loses a rank once, and stalls for a moment."""
ILL: dict[str, dict[str, str]] = {
    "ScopeServerDown": {'up{job="scope-rt"}': "0x90"},
    "ScopeSessionFailed": {'scope_session_state{session="a",state="failed"}': "1x90"},
    "ScopeWrongChunks": {'scope_parity{session="a",parity="bad"}': "1x90"},
    "ScopeNotRecovered": {'scope_session_state{session="a",state="recovering"}': "1x90"},
    "ScopeRanksRestart": {'scope_recoveries_total{session="a"}': "0+1x90"},
    "ScopeTooSlow": {'scope_frames_per_second{session="a"}': "12x90"},
    "ScopeStalls": {'scope_stalls_total{session="a"}': "0+5x90"},
    "ScopeSlowPrompts": {f'{BUCKET}{{le="1.0",session="a"}}': "0+1x90"},
}


@HAS_PROMTOOL
def test_every_alert_fires_on_what_it_names_and_on_nothing_else(tmp_path: Path) -> None:
    assert set(ILL) == {rule["alert"] for rule in ALERTS}
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    cases = [case(WELL, {})]
    cases += [case(WELL | changed, {alert: 1}) for alert, changed in ILL.items()]
    told = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "cases.json").write_text(json.dumps(told))
    promtool("test", "rules", tmp_path / "cases.json")


def case(series: dict[str, str], firing: dict[str, int]) -> dict[str, Any]:
    """A test of promtool's: which alerts fire after an hour."""
    expected = [
        {"labels": f'{{alertname="{alert}"}}', "value": count} for alert, count in firing.items()
    ]
    return {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "1h",
                "exp_samples": expected,
            }
        ],
    }
