"""Settings: what is allowed, where they come from, and what changing them does."""

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
import torch._dynamo

import dash_inductor
from dash_inductor import config
from dash_inductor.config import BOUNDS, CHOICES, Config, Settings, configure, current, from_environment, variable


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_current", Config())


def test_defaults():
    assert from_environment({}) == Config()
    assert from_environment({"DASH": "1", "PATH": "/bin", "DASH_INDUCTORS": "many"}) == Config()


# Of each setting what its variable says, and its value.
SAID: dict[str, tuple[str, object]] = {
    "enabled": ("0", False),
    "on_unsupported": ("error", "error"),
    "guarantee": ("device", "device"),
    "schedule": ("descending", "descending"),
    "launch": ("grouped", "grouped"),
    "template": ("one_pass", "one_pass"),
    "kernel": ("gluon", "gluon"),
    "sm_reserve": ("16", 16),
    "segment": ("1024", 1024),
    "emulate": ("1", True),
    "seed": ("7", 7),
    "sms": ("4", 4),
    "guard": ("off", "off"),
    "costs": ("mine.toml", "mine.toml"),
    "silence": ("flash_attn,fla::chunk", "flash_attn,fla::chunk"),
}


def test_every_setting_has_a_variable():
    assert set(SAID) == {field.name for field in fields(Config)}
    environ = {variable(name): text for name, (text, _) in SAID.items()}
    assert {"DASH_INDUCTOR", "DASH_INDUCTOR_SM_RESERVE"} < set(environ)
    assert from_environment(environ) == Config(**{name: value for name, (_, value) in SAID.items()})


def test_type_checkers_know_every_setting_and_value():
    hints = get_type_hints(Settings)
    assert set(hints) == {field.name for field in fields(Config)}
    assert hints["schedule"] is str  # its values are those in the register alone
    known = {name: get_args(hint) for name, hint in hints.items() if get_args(hint)}
    assert {**known, "schedule": CHOICES["schedule"]} == CHOICES


@pytest.mark.parametrize(("name", "allowed"), CHOICES.items())
def test_every_choice(name, allowed):
    for value in allowed:
        assert getattr(from_environment({variable(name): value}), name) == value
    for maker, key in ((from_environment, variable(name)), (lambda settings: Config(**settings), name)):
        with pytest.raises(ValueError, match=f"^{key}='sometimes' is not one of {', '.join(allowed)}"):
            maker({key: "sometimes"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DASH_INDUCTOR": "yes"}, "DASH_INDUCTOR='yes' is not one of 0, 1"),
        ({"DASH_INDUCTOR": ""}, "DASH_INDUCTOR='' is not one of 0, 1"),
        ({"DASH_INDUCTOR_EMULATE": "true"}, "DASH_INDUCTOR_EMULATE='true' is not one of 0, 1"),
        ({"DASH_INDUCTOR_SEED": "-1"}, "DASH_INDUCTOR_SEED='-1' is not a whole number >= 0"),
        ({"DASH_INDUCTOR_SEED": "1.5"}, "DASH_INDUCTOR_SEED='1.5' is not a whole number >= 0"),
        ({"DASH_INDUCTOR_SMS": "0"}, "DASH_INDUCTOR_SMS=0 is not from 1 to 1024"),
        ({"DASH_INDUCTOR_SMS": "9" * 20}, "DASH_INDUCTOR_SMS=9{20} is not from 1 to 1024"),
        ({"DASH_INDUCTOR_SEED": "9" * 5000}, "DASH_INDUCTOR_SEED='9{5000}' is not a whole number >= 0 of at most 20 digits"),
        (
            {"DASH_INDUCTOR_ENABLED": "0"},
            "DASH_INDUCTOR_ENABLED is not a setting; the settings are DASH_INDUCTOR, DASH_INDUCTOR_COSTS, DASH_INDUCTOR_EM",
        ),
        ({"DASH_INDUCTOR_schedule": "shift"}, "DASH_INDUCTOR_schedule is not a setting"),
        (
            {"DASH_INDUCTOR_LAUNCH": "chained", "DASH_INDUCTOR_SCHEDULE": "shift"},
            "DASH_INDUCTOR_LAUNCH='chained' takes schedule ascending or descending, not 'shift'",
        ),
    ],
)
def test_wrong_variables(environ, message):
    with pytest.raises(ValueError, match=message):
        from_environment(environ)


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setattr(config, "_current", None)
    monkeypatch.setenv("DASH_INDUCTOR_SMS", "9")
    assert current().sms == 9
    monkeypatch.setenv("DASH_INDUCTOR_SMS", "10")
    assert current().sms == 9


def test_every_number_is_bounded():
    assert set(BOUNDS) == {field.name for field in fields(Config) if type(field.default) is int}


def test_configure_resets_dynamo_when_something_changes(monkeypatch):
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(current()))
    before = configure(schedule="ascending")
    assert before == Config()
    assert resets == [Config(schedule="ascending")]
    assert configure(schedule="ascending") == Config(schedule="ascending")
    assert configure() == Config(schedule="ascending")
    assert len(resets) == 1


NOT_KEPT = "takes whatever SMs are free: sm_reserve=4 would not be kept"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shedule": "shift"}, "no setting shedule; the settings are enabled, on_unsupported, guarantee, schedule"),
        ({"schedule": "fifo"}, "schedule='fifo' is not one of auto, ascending, descending, shift, symmetric"),
        *(
            ({name: value}, f"{name}={value} is not from {least} to {most}")
            for name, (least, most) in BOUNDS.items()
            for value in (least - 1, most + 1)
        ),
        ({"seed": 1.5}, "seed=1.5 is not a whole number"),
        ({"sms": "6"}, "sms='6' is not a whole number"),
        ({"sms": True}, "sms=True is not a whole number"),
        ({"sm_reserve": None}, "sm_reserve=None is not a whole number"),
        ({"emulate": 1}, "emulate=1 is not True or False"),
        ({"enabled": "0"}, "enabled='0' is not True or False"),
        ({"schedule": None}, "schedule=None is not one of auto, ascending"),
        ({"costs": "h100"}, "costs='h100' is not the path of a cost file, which ends in .toml"),
        ({"sm_reserve": 4, "launch": "chained"}, f"launch='chained' {NOT_KEPT}"),
        ({"sm_reserve": 4, "template": "two_pass"}, f"template='two_pass' {NOT_KEPT}"),
        ({"schedule": "symmetric", "launch": "chained"}, "launch='chained' takes schedule ascending or descending"),
        ({"template": "two_pass", "schedule": "ascending"}, "template='two_pass' takes schedule auto, not 'ascending'"),
        ({"kernel": "gluon", "template": "two_pass"}, "kernel='gluon' takes template one_pass or auto, not 'two_pass'"),
        ({"schedule": "searched"}, "schedule='searched' is not one of auto, ascending, descending, shift, symmetric"),
    ],
)
@pytest.mark.parametrize("change", [configure, dash_inductor.enable])
def test_wrong_settings_change_nothing(change, settings, message):
    with pytest.raises(ValueError, match=message):
        change(**settings)
    assert current() == Config()
