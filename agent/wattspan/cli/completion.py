"""``wattspan completion``: the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_PLACES = {
    "bash": "wattspan completion bash > ~/.local/share/bash-completion/completions/wattspan",
    "zsh": 'wattspan completion zsh > "${fpath[1]}/_wattspan"',
    "fish": "wattspan completion fish > ~/.config/fish/completions/wattspan.fish",
}


@click.command(
    name="completion", epilog="\b\nTo install it:\n" + "\n".join(f"  {p}" for p in _PLACES.values())
)
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has these three since 8.0
    command = context.find_root().command
    click.echo(kind(command, {}, "wattspan", "_WATTSPAN_COMPLETE").source())
