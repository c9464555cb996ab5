"""The table of settings is complete and has one row for each name."""

from __future__ import annotations

import dataclasses

from mlbert.core.settings import LAUNCH_SETTINGS, Limits, TrainConfig, settings_by_env, train_settings


def test_every_field_is_a_row_with_a_meaning() -> None:
    rows = train_settings()
    assert list(rows) == [field.name for field in dataclasses.fields(TrainConfig)]
    for name, row in rows.items():
        assert row.flag == f"--{name}"
        assert row.env.isupper()
        assert row.meaning.endswith(".")


def test_the_table_holds_no_default() -> None:
    for field in dataclasses.fields(TrainConfig):
        assert field.default is dataclasses.MISSING, field.name
        assert field.default_factory is dataclasses.MISSING, field.name


def test_names_are_unique_over_program_and_launchers() -> None:
    assert len(settings_by_env()) == len(train_settings()) + len(LAUNCH_SETTINGS)


def test_optional_types_are_recognised() -> None:
    rows = train_settings()
    assert rows["seed"].optional
    assert rows["seed"].kind is int
    assert rows["init_checkpoint"].type_name == "path or none"
    assert not rows["train_batch_size"].optional


def test_no_number_is_without_bounds() -> None:
    for setting in settings_by_env().values():
        if setting.kind in (int, float):
            why = [setting.limits.reason_against(number) for number in (-1e30, 1e30)]
            assert all(why), f"{setting.env}: {why}"


def test_limits_say_why() -> None:
    assert Limits(at_least=1).reason_against(0) == "must be at least 1"
    assert Limits(above=0, below=1).reason_against(1.0) == "must be below 1"
    assert Limits(above=0, below=1).reason_against(0.5) is None
    assert Limits(at_most=2**32 - 1).reason_against(2**32) == "must be at most 4294967295"
    assert Limits(choices=("a", "b")).reason_against("c") == "must be one of a, b"
