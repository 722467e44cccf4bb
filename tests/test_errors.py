"""An error names the line of the user's own code that it came from."""

import json

import pytest

from agentrl.errors import describe


def test_the_frame_is_that_of_the_code_that_called_the_library():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert f"({__file__}:" in describe(caught.value)
    assert describe(caught.value).endswith(
        "in test_the_frame_is_that_of_the_code_that_called_the_library)"
    )


def test_without_code_of_the_user_the_frame_is_the_innermost_one():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    beginning_in_the_library = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    assert "json/decoder.py:" in describe(beginning_in_the_library)


def test_an_error_without_traceback_has_no_frame():
    assert describe(KeyError("x")) == "KeyError: 'x'"


def test_a_group_is_told_by_its_first_error():
    inner = ExceptionGroup("", [ValueError("y")])
    assert (
        describe(ExceptionGroup("unhandled errors", [KeyError("x"), inner]))
        == "KeyError: 'x', and 1 other at once"
    )
    assert describe(inner) == "ValueError: y"


def test_every_error_has_a_text_that_can_be_stored():
    class UntoldError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert describe(UntoldError()) == "UntoldError: its text cannot be read (RuntimeError)"
    assert describe(ValueError("half \ud800")) == r"ValueError: half \ud800"
