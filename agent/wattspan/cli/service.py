"""``wattspan service``: install, remove and show the systemd services."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from wattspan.cli.options import echo_json, echo_result, json_option, with_options
from wattspan.installation import plan
from wattspan.installation import program as checks
from wattspan.installation.files import (
    ServiceFile,
    inspect_host,
    service_files,
    service_files_directory,
    service_status,
)
from wattspan.ports import WattspanError
from wattspan.util.text import printable

_placing = with_options(
    click.option(
        "--root",
        metavar="DIR",
        type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
        default=Path("/"),
        show_default=False,
        help="The root directory of another system: write its files, run no command.",
    ),
    click.option(
        "--program",
        metavar="PATH",
        help="Absolute path of the program that the services run.  [default: this program]",
    ),
)
_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the actions, and change nothing."
)


@click.group(name="service")
def command() -> None:
    """Install, remove or show the systemd services.

    Unit files are written below /usr/local/lib, never to /etc, which belongs to the administrator.
    Files that another program wrote, or that were edited, stay unchanged. A system package of
    wattspan brings its own services; these commands then change nothing.
    """


@command.command()
@_dry_run_option
@click.option("--print", "print_only", is_flag=True, help="Print the files, and write nothing.")
@_placing
@json_option
def install(
    dry_run: bool, print_only: bool, root: Path, program: str | None, as_json: bool
) -> None:
    """Write the units, create their user and reload systemd. Starts nothing. Requires root."""
    program, files = _files(program)
    if print_only:
        if as_json:
            echo_json({"files": {file.path: file.text for file in files}})
        else:
            text = "\n".join(f"==> {file.path} <==\n{file.text}" for file in files)
            click.echo(text, nl=False)
        return
    found = inspect_host(root, files)
    trusted = checks.trusted_owners(root)
    why_not = checks.requirement_faults(checks.required_files(root, program), trusted)
    # Search directories for files of other users only if the program can run.
    refused = plan.refusals(
        found, why_not or checks.writable_by_others(checks.program_files(root, program), trusted)
    )
    if refused:
        if as_json:
            echo_json({"done": False, "dry_run": dry_run, "refused": list(refused), "actions": []})
        raise WattspanError("\n".join(refused))
    _carry_out(plan.install(files, found), root, dry_run=dry_run, as_json=as_json)


@command.command()
@_dry_run_option
@click.option("--purge", is_flag=True, help="Remove the measured data as well.")
@_placing
@json_option
def uninstall(dry_run: bool, purge: bool, root: Path, program: str | None, as_json: bool) -> None:
    """Stop the services, restore power limits and remove installed files. Requires root.

    Exits with 6, and removes nothing, if a limit cannot be restored.
    """
    program, files = _files(program)
    found = inspect_host(root, files)
    planned = plan.uninstall(files, found, program, purge=purge)
    _carry_out(planned, root, dry_run=dry_run, as_json=as_json)


@command.command()
@_placing
@json_option
def status(root: Path, program: str | None, as_json: bool) -> None:
    """Show the state of each file and unit.

    Exits with 1 if a file differs from the installed one, or replaces a file of a package.
    """
    program, files = _files(program)
    current = service_status(root, files, program)
    echo_result(asdict(current), current.lines(), as_json=as_json)
    if not current.is_current:
        raise click.exceptions.Exit(1)


def _files(program: str | None) -> tuple[str, tuple[ServiceFile, ...]]:
    chosen = program or checks.own_program()
    if not chosen.startswith("/"):
        raise click.UsageError(f"--program {chosen}: not an absolute path. Begin it with /.")
    return chosen, service_files(service_files_directory(), chosen)


def _carry_out(actions: Sequence[plan.Action], root: Path, *, dry_run: bool, as_json: bool) -> None:
    def echo(text: str) -> None:
        if not as_json:
            click.echo(printable(text))

    if not dry_run and root == Path("/") and os.geteuid() != 0:
        raise plan.InstallationError(
            "Only root may change the services of this host. Use sudo, or print the actions with "
            "--dry-run."
        )
    failed: tuple[str, ...] = ()
    if dry_run:
        for action in actions:
            echo(action.sentence(done=False))
        echo("Nothing was changed.")
    else:
        failed = plan.apply_plan(actions, root, echo, plan.run_command)
        if all(isinstance(action, plan.Note) for action in actions):
            echo("There was nothing to do.")
    if as_json:
        echo_json(
            {
                "done": not dry_run and not failed,
                "dry_run": dry_run,
                "refused": [],
                "failed": list(failed),
                "actions": [plan.action_facts(action) for action in actions],
            }
        )
    if failed:
        raise plan.InstallationError("\n".join(failed))
