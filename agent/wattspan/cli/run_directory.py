"""Where the agent's sockets are: as configured, or the user's own place for who is not root."""

from __future__ import annotations

import os
from pathlib import Path

from wattspan.config import AgentSettings, Config


def run_directory(config: Config) -> Path:
    """The default is another one for who may not write there."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if config.agent.run_dir == AgentSettings().run_dir and os.geteuid() != 0 and own:
        return Path(own) / "wattspan"
    return Path(config.agent.run_dir)


def agents_directories(config: Config) -> tuple[str, ...]:
    """Where an agent may be: where the environment says, or the configuration, or as usual."""
    from wattspan.client.places import run_directories

    usual = tuple(run_directories())
    if os.environ.get("WATTSPAN_RUN_DIR"):
        return usual
    return tuple(dict.fromkeys((config.agent.run_dir, *usual)))


def capper_socket(config: Config) -> Path:
    """Where the capper answers that somebody at a terminal means: the first that is there."""
    from wattspan.capper.paths import SYSTEM_RUN, capper_socket_path

    own = run_directory(config)
    places = [own, SYSTEM_RUN] if config.agent.run_dir == AgentSettings().run_dir else [own]
    wanted = [
        capper_socket_path(place, emulated=emulated)
        for place in places
        for emulated in (False, True)
    ]
    return next((path for path in wanted if path.exists()), wanted[0])


def asked_for(config: Config, key: str) -> bool:
    """Whether somebody set ``key``: a listener that was asked for must be had."""
    origin = config.origins.get(key)
    return origin is not None and origin.kind != "default"
