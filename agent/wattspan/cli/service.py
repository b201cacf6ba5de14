"""``wattspan service``: the files of the systemd services, put in place and taken away."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wattspan.ports import WattspanError
from wattspan.service.configuration import echo_json, json_option
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.service.installation.files import ServiceFile
    from wattspan.service.installation.plan import Action

F = TypeVar("F", bound=Callable[..., Any])


def _placing(function: F) -> F:
    """``--root`` and ``--program``, which say where the files and the program are."""
    function = click.option(
        "--program",
        metavar="PATH",
        help="What the services run, as they see it.  [default: this very program]",
    )(function)
    return click.option(
        "--root",
        metavar="DIR",
        type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
        default=Path("/"),
        help="The root of another system, whose files are written; no command is run for it.",
    )(function)


_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Say what would be done, and change nothing."
)


@click.group(name="service")
def command() -> None:
    """Install, remove or look at the systemd services of this wattspan.

    Files go below /usr/local/lib, never to /etc, which is the administrator's; a file that somebody
    else wrote or has changed is left alone. Where wattspan came as a package of the system, that
    has brought the services, and this has nothing to do.
    """


@command.command()
@_dry_run_option
@click.option("--print", "print_only", is_flag=True, help="Print the files, and write none.")
@_placing
@json_option
def install(
    dry_run: bool, print_only: bool, root: Path, program: str | None, as_json: bool
) -> None:
    """Write the units, make their user, and have systemd look. Starts nothing. For root."""
    from wattspan.service.installation import inspection, plan
    from wattspan.service.installation.inspection import program_files
    from wattspan.service.installation.program import requirement_faults, writable_by_others

    program, files = _files(program)
    if print_only:
        _print(files, as_json)
        return
    found = inspection.inspect_host(root, files)
    trusted = inspection.trusted_owners(root)
    why_not = requirement_faults(inspection.required_files(root, program), trusted)
    # Only what can be run at all is walked: somebody's home may hold anything.
    refused = plan.refusals(
        found, why_not or writable_by_others(program_files(root, program), trusted)
    )
    if refused:
        if as_json:
            echo_json({"done": False, "dry_run": dry_run, "refused": list(refused), "actions": []})
        raise WattspanError("\n".join(refused))
    _carry_out(plan.install(files, found), root, dry_run=dry_run, as_json=as_json)


@command.command()
@_dry_run_option
@click.option("--purge", is_flag=True, help="Remove what was measured as well.")
@_placing
@json_option
def uninstall(dry_run: bool, purge: bool, root: Path, program: str | None, as_json: bool) -> None:
    """Stop the services, give every limit back, and remove what `install` wrote. For root.

    Exits with 6, and removes nothing, if a limit could not be given back.
    """
    from wattspan.service.installation import inspection, plan

    program, files = _files(program)
    found = inspection.inspect_host(root, files)
    planned = plan.uninstall(files, found, program, purge=purge)
    _carry_out(planned, root, dry_run=dry_run, as_json=as_json)


@command.command()
@_placing
@json_option
def status(root: Path, program: str | None, as_json: bool) -> None:
    """Say of each file and unit how it stands.

    Exits with 1 if a file is not as it should be, or is read in place of a package's.
    """
    from wattspan.service.installation.inspection import service_status

    program, files = _files(program)
    stands = service_status(root, files, program)
    if as_json:
        echo_json(stands.facts())
    else:
        for line in stands.lines():
            click.echo(printable(line))
    if not stands.well:
        raise click.exceptions.Exit(1)


def _files(program: str | None) -> tuple[str, tuple[ServiceFile, ...]]:
    from wattspan.service.installation.files import service_files, service_files_directory
    from wattspan.service.installation.inspection import own_program

    chosen = program or own_program()
    if not chosen.startswith("/"):
        raise click.UsageError(f"--program {chosen}: services need the whole path, from /.")
    return chosen, service_files(service_files_directory(), chosen)


def _print(files: Sequence[ServiceFile], as_json: bool) -> None:
    if as_json:
        echo_json({"files": {file.path: file.text for file in files}})
        return
    click.echo("\n".join(f"==> {file.path} <==\n{file.text}" for file in files), nl=False)


def _carry_out(actions: Sequence[Action], root: Path, *, dry_run: bool, as_json: bool) -> None:
    from wattspan.service.installation.apply import InstallationError, apply_plan, system_runner
    from wattspan.service.installation.plan import Note, action_facts

    if not dry_run and root == Path("/") and os.geteuid() != 0:
        raise InstallationError(
            "Only root may change the services of this host: call it by sudo, or see what it would "
            "do with --dry-run."
        )
    failed: tuple[str, ...] = ()
    if dry_run:
        if not as_json:
            for action in actions:
                click.echo(printable(action.sentence(done=False)))
            click.echo("Nothing was changed.")
    else:
        say = (lambda told: None) if as_json else (lambda told: click.echo(printable(told)))
        failed = apply_plan(actions, root, say, system_runner(os.environ))
        if not as_json and not any(not isinstance(action, Note) for action in actions):
            click.echo("There was nothing to do.")
    if as_json:
        echo_json(
            {
                "done": not dry_run and not failed,
                "dry_run": dry_run,
                "refused": [],
                "failed": list(failed),
                "actions": [action_facts(action) for action in actions],
            }
        )
    if failed:
        raise InstallationError("\n".join(failed))
