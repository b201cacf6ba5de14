import os
import pty
import termios

import pytest

from wattspan.cli.top.controls import Keyboard, decode


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b[5~x", ["pageup", "x"]),
        ("\x1b", ["escape"]),
        ("\t\r", ["tab", "enter"]),
        ("é/", ["é", "/"]),
        ("\x1b[1;5C", []),
        ("\x1b[", []),
        ("\x00\x07a", ["a"]),
    ],
)
def test_terminal_input_is_decoded_to_keys(sent: str, keys: list[str]) -> None:
    assert decode(sent) == keys


def test_keyboard_reads_single_keys_and_restores_the_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with Keyboard(theirs) as keyboard:
            assert keyboard.wait(0) == []
            os.write(ours, b"s\x1b[B")
            assert keyboard.wait(20) == ["s", "down"]
            assert termios.tcgetattr(theirs)[3] & termios.ICANON == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def test_keyboard_does_not_wait_on_a_closed_input() -> None:
    reader, writer = os.pipe()
    try:
        keyboard = Keyboard(reader)
        os.close(writer)
        assert keyboard.wait(20) == []
        assert keyboard.wait(0) == []
    finally:
        os.close(reader)
