"""Serving engines in the configuration: labels, faults and their remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.config import Config, load
from wattspan.config.tables import MAX_ENGINES
from wattspan.ports import ConfigError


def _read(tmp_path: Path, *engines: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text("".join(f"[[serving.engine]]\n{one}\n" for one in engines))
    return load(path, environ={})


def test_one_key_is_enough(tmp_path: Path) -> None:
    (engine,) = _read(tmp_path, 'url = "http://127.0.0.1:8000"').serving.engine
    assert (engine.label, engine.kind, str(engine.interval)) == ("127.0.0.1:8000", "auto", "5s")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ('url = "127.0.0.1:8000"', "is not an address"),
        ('url = "https://127.0.0.1:8000"', "Write http://"),
        ('url = "HTTPS://127.0.0.1:8000"', "Write http://"),
        (f'url = "http://127.0.0.1:8000"\nprocess = "{"9" * 5000}"', "at most 256"),
        ('url = "http://alice:geheim@127.0.0.1:8000"', "user name"),
        ('url = "http://127.0.0.1:8000/metrics?drain=1"', "query"),
        ('url = "http://127.0.0.1:8000"\nkind = "ollama"', "sent as spans"),
        ('url = "http://127.0.0.1:8000"\nkind = "vlm"', "vllm"),
        ('url = "http://127.0.0.1:8000"\ninterval = "500ms"', "1s"),
        ('url = "http://127.0.0.1:8000"\ninterval = "2m"', "1m"),
        ('url = "http://127.0.0.1:8000"\ntoken_file = "/etc/token"', "process is empty"),
        (
            'url = "http://127.0.0.1:8000"\nprocess = "vllm.service"\ntoken_file = "token"',
            "relative path",
        ),
        ('name = "chat"', "url"),
    ],
)
def test_fault_names_the_cause(tmp_path: Path, engine: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _read(tmp_path, engine)


def test_secret_of_an_address_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, 'url = "http://alice:geheim@127.0.0.1:8000"')
    assert "geheim" not in str(caught.value)


def test_labels_are_unique_and_engines_bounded(tmp_path: Path) -> None:
    same = 'url = "http://127.0.0.1:8000"'
    with pytest.raises(ConfigError, match="names an engine above"):
        _read(tmp_path, same, same)
    named = [f'url = "http://127.0.0.1:{n}"\nprocess = "vllm.service"' for n in (8000, 8001)]
    with pytest.raises(ConfigError, match="would count twice"):
        _read(tmp_path, *named)
    many = [f'url = "http://127.0.0.1:{8000 + number}"' for number in range(MAX_ENGINES + 1)]
    with pytest.raises(ConfigError, match=f"at most {MAX_ENGINES}"):
        _read(tmp_path, *many)
