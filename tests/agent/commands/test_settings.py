"""Settings at run time, and the documents `desired` and `reported`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device import NOW, TOPICS
from kept import kept_in, refusing, spoil

from agent.camera.config import CameraConfig
from agent.commands.authority import Authority
from agent.commands.dispatcher import Authorisation
from agent.commands.settings import LIVE, Settings, admit_desired, check_expiry, parse_desired
from agent.common.errors import AgentError
from agent.config import CommandsConfig, Config, RecalibrationConfig
from agent.contract.signing import Signer, new_key
from agent.vision.spec import ModelSpec

Make = Callable[..., Settings]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = ModelSpec(path=tmp_path / "model.onnx", task="raw")
    return Config(model=model, camera=CameraConfig(source="v4l2:/dev/video0"), state_dir=tmp_path)


@pytest.fixture
def make(config: Config, tmp_path: Path) -> Make:
    def settings(
        changes: list[Config] | None = None, trusts: Callable[[str], bool] = lambda _: True, of: Config = config
    ) -> Settings:
        on_change = changes.append if changes is not None else lambda _: None
        return Settings(of, kept_in(tmp_path), trusts, on_change)

    return settings


def refusal(settings: Settings, values: dict[str, Any], version: int = 9) -> str:
    before = settings.config
    with pytest.raises(AgentError) as caught:
        settings.set(values, Authorisation(version))
    assert settings.config == before
    return caught.value.code


def test_settings_hold_after_a_restart(make: Make) -> None:
    changes: list[Config] = []
    settings = make(changes)
    settings.set({"recalibration.max_loss": 0.25, "mqtt.telemetry_period_s": 60}, Authorisation(3))
    assert [each.recalibration.max_loss for each in changes] == [0.25]
    for each in (settings, make()):
        assert each.config.recalibration == RecalibrationConfig(max_loss=0.25)
        assert each.config.mqtt.telemetry_period_s == 60.0
        reported = each.reported()
        assert reported.version == 3
        assert set(reported.values) == set(LIVE)
        assert reported.values["recalibration.max_loss"] == 0.25


def test_further_settings_are_added_and_null_restores_the_file(make: Make, config: Config) -> None:
    settings = make()
    settings.set({"recalibration.max_loss": 0.25, "log_level": "debug"}, Authorisation(1))
    settings.set({"recalibration.automatic": False}, Authorisation(2))
    settings.set({"recalibration.max_loss": None}, Authorisation(3))
    for each in (settings, make()):
        assert each.config.recalibration.max_loss == config.recalibration.max_loss
        assert each.reported().values["recalibration.max_loss"] == 0.1, "what the task accepts"
        assert not each.config.recalibration.automatic
        assert each.config.log_level == "debug"


def test_a_whole_document_leaves_nothing_else(make: Make, config: Config) -> None:
    settings = make()
    settings.set({"recalibration.max_loss": 0.25}, Authorisation(1))
    settings.set({"log_level": "debug"}, Authorisation(2), whole=True)
    assert settings.config == config.model_copy(update={"log_level": "debug"})


@pytest.mark.parametrize(
    "values",
    [
        {"recalibration.max_loss": 2},
        {"mqtt.telemetry_period_s": 0.4},
        {"mqtt.telemetry_period_s": 3601},
        {"log_level": "loud"},
        {"mqtt.host": "broker.example.com"},
        {"privacy.snapshot": True},
        {"privacy.preview": True},
        {"commands.unsigned": "allow"},
        {"recalibration.max_loss": 0.2, "state_dir": "/"},
    ],
)
def test_a_refused_setting_changes_nothing(make: Make, values: dict[str, Any]) -> None:
    assert refusal(make(), values) == "command.set"
    assert make().version == 0


def test_a_preview_that_its_owner_permits_can_be_closed_from_afar_and_no_more(make: Make, config: Config) -> None:
    permitted = config.model_copy(update={"privacy": config.privacy.model_copy(update={"preview": True})})
    make(of=permitted).set({"privacy.preview": False}, Authorisation(1))
    settings = make(of=permitted)
    assert not settings.config.privacy.preview
    settings.set({"privacy.preview": None}, Authorisation(2))
    assert settings.config.privacy.preview
    assert not make(of=config).config.privacy.preview


def test_an_old_document_is_no_way_back(make: Make) -> None:
    settings = make()
    settings.set({"recalibration.max_loss": 0.25}, Authorisation(5))
    for each in (settings, make()):
        for version in (1, 5):
            assert refusal(each, {"recalibration.max_loss": 0.9}, version) == "command.version"


def test_settings_of_a_revoked_key_go_and_those_of_others_stay(make: Make, config: Config) -> None:
    both = make(trusts={"honest", "stolen"}.__contains__)
    both.set({"log_level": "debug"}, Authorisation(5, "honest"))
    both.set({"recalibration.automatic": False}, Authorisation(9, "stolen"))
    for _ in range(2):
        settings = make(trusts={"honest"}.__contains__)
        assert settings.config == config.model_copy(update={"log_level": "debug"})
        assert settings.version == 5
        with pytest.raises(AgentError, match=r"command\.version"):
            settings.set({"log_level": "info"}, Authorisation(5, "honest"))


def test_a_period_of_config_yaml_is_not_bounded_by_what_may_be_set(make: Make, config: Config) -> None:
    fast = config.model_copy(update={"mqtt": config.mqtt.model_copy(update={"telemetry_period_s": 0.1})})
    settings = make(of=fast)
    settings.set({"log_level": "debug"}, Authorisation(1))
    assert settings.config.mqtt.telemetry_period_s == 0.1


def test_a_disk_that_refuses_changes_nothing(make: Make) -> None:
    settings = make()
    with refusing(settings.state):
        assert refusal(settings, {"log_level": "debug"}) == "state.write"


def test_a_value_that_no_longer_fits_is_reported_and_the_others_hold(
    make: Make, config: Config, tmp_path: Path
) -> None:
    make().set({"recalibration.max_loss": 0.25, "log_level": "debug"}, Authorisation(1))
    errors: list[AgentError] = []
    spoil(tmp_path, "UPDATE settings SET value = '25' WHERE key = 'recalibration.max_loss'")
    settings = Settings(config, kept_in(tmp_path, errors.append), lambda _: True, lambda _: None)
    assert [error.code for error in errors] == ["command.set"]
    assert settings.config == config.model_copy(update={"log_level": "debug"})


class Signed:
    def __init__(self, folder: Path) -> None:
        self.signer = Signer(new_key(folder / "ann")[0])
        self.authority = Authority(CommandsConfig(operator_keys=(folder / "ann.pub",)), TOPICS, False, lambda: True)

    def parse(self, now: float = NOW, **document: Any) -> str:
        """The code of the refusal, empty where there is none."""
        try:
            admitted = admit_desired(json.dumps(document).encode(), self.authority)
            check_expiry(parse_desired(*admitted), now, self.authority)
        except AgentError as error:
            return error.code
        return ""


def test_a_desired_document_is_signed_where_commands_are(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    document: dict[str, Any] = {"version": 1, "values": {"log_level": "debug"}, "to": "fleet/board"}
    assert signed.parse(**document) == "command.unsigned"
    assert signed.parse(**signed.signer.sign(document)) == "message.invalid", "it does not say until when"
    document["expires"] = NOW + 1.0
    assert signed.parse(**signed.signer.sign(document)) == ""
    assert signed.parse(**{**signed.signer.sign(document), "version": 2}) == "command.signature"
    assert signed.parse(**signed.signer.sign({**document, "to": "fleet/other"})) == "command.target"
    assert signed.parse(NOW + 1.0, **signed.signer.sign(document)) == "command.expired"


def test_a_signed_command_is_no_desired_document(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    command: dict[str, Any] = {
        "id": "c",
        "op": "set",
        "args": {"values": {}},
        "issued": NOW,
        "expires": NOW + 9,
        "version": 1,
    }
    assert signed.parse(**signed.signer.sign({**command, "to": "fleet/board"})) == "message.invalid"
    assert signed.parse(**signed.signer.sign({**command, "values": {}, "to": "fleet/board"})) == "message.invalid"
