"""The command line by which certified settings of a job are remembered."""

import os
import subprocess
import sys

from wattspan.model import Consumer
from wattspan.service.tuning_assembly import job_command
from wattspan.tuning.decisions.certified_settings import command_digest

PROGRAM = "import sys; print(flush=True); sys.stdin.read()"


def test_job_command_is_the_digest_of_its_arguments() -> None:
    command = [sys.executable, "-c", PROGRAM, "--name", "two words", ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        job.stdout.readline()  # the kernel has no arguments yet when Popen returns
        found = job_command(Consumer(job.pid, 1))
    assert found == command_digest(command[:-1]), "empty arguments do not count"
    assert found != command_digest(["another"])


def test_job_command_of_an_ended_process_is_empty() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert job_command(Consumer(child, 1)) == ""
