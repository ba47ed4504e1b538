"""The alert rules and the dashboard of docs/, as promtool judges them.

Each alert rises where it should and stays away on a good day. Each metric that is named is one that the code can serve.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT
from promtool import promtool

RULES = ROOT / "docs/prometheus/tared.rules.yml"
DASHBOARD = ROOT / "docs/grafana/tared.json"
# By alert: the series that raise it, a value a minute, {BAD|GOOD}. ALL: to the end; MOST: until shortly before.
CASES = {
    "TaredDown": ['up{job="tared",instance="b"} {0|1}'],
    "TaredCameraDown": ['tared_camera_up{instance="b",camera="c"} {0|1}'],
    "TaredNoFrames": [
        'tared_frames_total{instance="b",camera="c"} {7xALL|0+900xALL}',
        'tared_camera_up{instance="b",camera="c"} {1|1}',
    ],
    "TaredDroppingFrames": [
        'tared_frames_total{instance="b",camera="c"} {0+900xALL|0+900xALL}',
        'tared_dropped_frames_total{instance="b",camera="c",cause="stale"} {0+150xALL|0+50xALL}',
    ],
    "TaredLatencyHigh": [
        'tared_frame_latency_seconds_bucket{instance="b",camera="c",le="0.524"} {0+80xALL|0+100xALL}',
        'tared_frame_latency_seconds_bucket{instance="b",camera="c",le="1.049"} {0+100xALL|0+100xALL}',
        'tared_frame_latency_seconds_bucket{instance="b",camera="c",le="+Inf"} {0+100xALL|0+100xALL}',
        'tared_frame_latency_seconds_bucket{instance="b",camera="c",le="0.131"} {0+70xALL|0+100xALL}',
    ],
    "TaredFidelityLow": ['tared_fidelity_ratio{instance="b",camera="c",bound="high"} {0.8|0.99}'],
    "TaredDegraded": ['tared_degraded_info{instance="b",reason="no job has started"} {1|_}'],
    "TaredDriftUnanswered": ['tared_drift_state{instance="b",camera="c",tared_drift_state="alarm"} {1|0}'],
    "TaredJobRolledBack": ['tared_jobs_total{instance="b",trigger="alarm",end="rolled_back"} {0xMOST 1x9|0}'],
    "TaredJobsFail": ['tared_jobs_total{instance="b",trigger="alarm",end="failed"} {0xMOST 3x9|0xMOST 1x9}'],
    "TaredJobsRefused": ['tared_jobs_total{instance="b",trigger="alarm",end="refused"} {0xMOST 3x9|0xMOST 1x9}'],
    "TaredJobHeldBack": ['tared_job_held_back_info{instance="b",code="headroom",reason="too hot; cool it"} {1|_}'],
    "TaredViewTrouble": ['tared_view_trouble{instance="b",camera="c",trouble="blurred"} {1|_}'],
    "TaredObserverDown": ['tared_observer_up{instance="b",camera="c"} {0|1}'],
    "TaredMqttDown": ['tared_mqtt_connected{instance="b"} {0|1}'],
    "TaredOutboxOld": ['tared_mqtt_outbox_oldest_seconds{instance="b"} {4000|2}'],
    "TaredMessagesLost": ['tared_mqtt_dropped_messages_total{instance="b",cause="outbox"} {0+1xALL|0}'],
    "TaredManyErrors": ['tared_errors_total{instance="b",code="state.write"} {0+1xALL|0}'],
    "TaredThrottling": ['tared_board_throttling{instance="b"} {1|0}'],
    "TaredMemoryLow": ['tared_board_memory_available_bytes{instance="b"} {1e8|1e9}'],
    "TaredRoomDown": ['up{job="tared-fleet",instance="r"} {0|1}'],
    "TaredCollectorDisconnected": ['tared_collector_connected{instance="r",connection="reports"} {0|1}'],
    "TaredCollectorStuck": [
        'tared_collector_last_write_timestamp_seconds{instance="r"} {100|0+60xALL}',
        'tared_collector_waiting_messages{instance="r",connection="reports"} {9|9}',
    ],
    "TaredCollectorSilent": [
        'tared_collector_last_write_timestamp_seconds{instance="r"} {100|0+60xALL}',
        'tared_fleet_devices{instance="r",fleet="f",state="online"} {9|9}',
    ],
    "TaredCollectorBehind": ['tared_collector_waiting_messages{instance="r",connection="reports"} {20000|9}'],
    "TaredCollectorRefuses": [
        'tared_collector_refused_documents_total{instance="r",code="message.invalid"} {0+60xALL|0+1xALL}'
    ],
    "TaredStoreUnreadable": ['tared_fleet_store_up{instance="r"} {0|1}'],
    "TaredBoardsSilent": [
        'tared_fleet_devices{instance="r",fleet="f",state="online"} {100|100}',
        'tared_fleet_heard_devices{instance="r",fleet="f",state="online"} {80|95}',
    ],
    "TaredBoardsDegraded": [
        'tared_fleet_devices{instance="r",fleet="f",state="online"} {80|95}',
        'tared_fleet_devices{instance="r",fleet="f",state="degraded"} {20|5}',
    ],
    "TaredRolloutGateFailed": ['tared_rollout_gate_failures_total{instance="r"} {3xMOST 4x9|3}'],
    "TaredRolloutUnheld": ['tared_rollouts_unheld{instance="r",job="tared-fleet"} {1|0}'],
    "TaredRolloutPaused": ['tared_rollouts{instance="r",job="tared-fleet",state="PAUSED"} {1|0}'],
    "TaredControllerDisconnected": ['tared_controller_connected{instance="r"} {0|1}'],
}


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def dashboard_expressions() -> list[str]:
    """With what Grafana would put in the place of its variables."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in _panels(dashboard["panels"]) for target in panel.get("targets", [])]
    found += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return [each.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$fleet", ".*") for each in found]


def test_promtool_accepts_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    promtool("check", "rules", RULES)
    queries = [each for each in dashboard_expressions() if not each.startswith("label_values(")]
    assert len(queries) > 20
    recorded = [{"record": f"r{number}", "expr": each} for number, each in enumerate(queries)]
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", tmp_path / "dashboard.yml")


def test_each_alert_says_what_it_is_and_what_to_do() -> None:
    assert {rule["alert"] for rule in rules()} == CASES.keys()
    page = (ROOT / "docs/guides/prometheus.md").read_text(encoding="utf-8")
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert f"`{rule['alert']}`" in page


@pytest.mark.trial
@pytest.mark.parametrize("rises", [True, False])
def test_each_alert_rises_when_it_should_and_not_on_a_good_day(tmp_path: Path, rises: bool) -> None:
    """promtool compares labels and annotations as they are written, templates carried out.

    Each alert has a file of its own: promtool evaluates all rules of a file for each case.
    """
    files = list[Path]()
    for rule in rules():
        place = tmp_path / rule["alert"]
        place.mkdir()
        (place / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "tared", "rules": [rule]}]}))
        document = {"rule_files": ["rules.yml"], "evaluation_interval": "5m", "tests": [_case(rule, rises)]}
        files.append(place / "tests.yml")
        files[-1].write_text(yaml.safe_dump(document))
    promtool("test", "rules", *files)


def _case(rule: dict[str, Any], rises: bool) -> dict[str, Any]:
    inputs, known = [], dict[str, str]()
    minutes = 1600 if "1d" in f"{rule['expr']} {rule.get('for')}" else 400
    for line in CASES[rule["alert"]]:
        series, values = line.rsplit("} {", 1)
        bad, good = values.removesuffix("}").split("|")
        chosen = bad if rises else good
        values = chosen if "x" in chosen else f"{chosen}xALL"
        values = values.replace("ALL", str(minutes)).replace("MOST", str(minutes - 10))
        inputs.append({"series": f"{series}}}", "values": values})
        known.update(re.findall(r'(\w+)="([^"]*)"', series))
    expected = [_expected(rule, known)] if rises else []
    at = f"{minutes - 5}m"
    return {
        "interval": "1m",
        "input_series": inputs,
        "alert_rule_test": [{"eval_time": at, "alertname": rule["alert"], "exp_alerts": expected}],
    }


def _expected(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """Its labels are those by which its expression groups, else those of the series."""
    outer = re.search(r"\b(?:sum|max) by \(([^)]*)\)", rule["expr"])
    kept = [each.strip() for each in outer[1].split(",")] if outer and not rule["expr"].startswith("time()") else None
    if rule["alert"] == "TaredLatencyHigh":
        kept = ["instance", "camera"]
    if rule["expr"].startswith("time()"):
        kept = ["instance"]
    own = {name: value for name, value in labels.items() if kept is None or name in kept}
    annotations = {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: own.get(match[1], ""), text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": {**own, **rule["labels"]}, "exp_annotations": annotations}
