"""UpdateSettings: the numbers that decide how large a rollout is and how often it is used."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from memtools import UpdateSettings


def test_samples_are_the_product_and_the_text_names_each_number():
    settings = UpdateSettings(batch_size=4, group_size=2, num_epochs=3, kl_threshold=0.02)
    assert settings.num_samples == 8
    assert str(settings) == (
        "batch_size 4 x group_size 2 = 8 samples, num_epochs 3, kl_threshold 0.02"
    )
    assert str(UpdateSettings(2, 3, single_update=True)).endswith("= 6 samples, single update")
    assert str(UpdateSettings()) == "batch_size 1 x group_size 1 = 1 samples, num_epochs 1"


def test_they_are_frozen_and_replaced_with_checks():
    settings = UpdateSettings(num_epochs=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.num_epochs = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="num_epochs 3; pass num_epochs=1"):
        dataclasses.replace(settings, single_update=True)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"group_size": 2.0}, TypeError, "group_size must be an int, got float"),
        ({"num_epochs": True}, TypeError, "num_epochs must be an int, got bool"),
        ({"kl_threshold": 0}, ValueError, "kl_threshold must be above 0 and finite, got 0"),
        ({"kl_threshold": float("inf")}, ValueError, "above 0 and finite"),
        ({"kl_threshold": "x"}, TypeError, "kl_threshold must be a number, got str"),
        ({"single_update": 1}, TypeError, "single_update must be True or False, got int"),
        ({"single_update": True, "kl_threshold": 0.1}, ValueError, "no second epoch"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        UpdateSettings(**arguments)


def test_a_command_line_gives_the_same_settings():
    parser = argparse.ArgumentParser()
    UpdateSettings.add_arguments(parser, batch_size=4, num_epochs=3)
    plain = UpdateSettings.from_arguments(parser.parse_args([]))
    assert plain == UpdateSettings(batch_size=4, num_epochs=3)
    words = ["--batch-size", "2", "--group-size", "8", "--kl-threshold", "0.05"]
    given = UpdateSettings.from_arguments(parser.parse_args(words))
    assert given == UpdateSettings(2, 8, 3, 0.05)
    single = ["--num-epochs", "1", "--single-update"]
    assert UpdateSettings.from_arguments(parser.parse_args(single)).single_update
    assert "(default: none)" in parser.format_help()
    stops = argparse.ArgumentParser()
    UpdateSettings.add_arguments(stops, kl_threshold=0.1)
    alone = stops.parse_args(["--kl-threshold", "none", "--single-update"])
    assert UpdateSettings.from_arguments(alone) == UpdateSettings(single_update=True)
    with pytest.raises(SystemExit):
        stops.parse_args(["--kl-threshold", "little"])
    with pytest.raises(TypeError, match="takes an argparse.ArgumentParser, got int"):
        UpdateSettings.add_arguments(3)
    with pytest.raises(TypeError, match="Namespace has no batch_size"):
        UpdateSettings.from_arguments(argparse.Namespace())
    with pytest.raises(ValueError, match="batch_size"):
        UpdateSettings.add_arguments(parser, batch_size=-1)
