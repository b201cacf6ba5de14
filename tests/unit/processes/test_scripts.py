"""An interpreter is shown with its script, without the other arguments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wattspan.processes.scripts import (
    INTERPRETERS,
    TORCHRUN,
    OptionGrammar,
    OptionKind,
    interpreter_of,
    script_of,
)

HUSH = "hush-hush"


def line(*words: str) -> bytes:
    return "".join(f"{word}\0" for word in words).encode()


def told(*words: str, comm: str | None = None) -> str | None:
    program = words[0].rpartition("/")[2].removeprefix("-")
    return script_of(comm if comm is not None else program[:15], line(*words), 64)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("python3", "train.py", HUSH), "python3 train.py"),
        (("/usr/bin/python3.11", "/srv/a b/train.py"), "python3.11 train.py"),
        (("python3", "-u", "-W", HUSH, "-X", HUSH, "train.py"), "python3 train.py"),
        (("python3", f"-uW{HUSH}", f"-X{HUSH}", "train.py", HUSH), "python3 train.py"),
        (("python3", "--check-hash-based-pycs", HUSH, "train.py"), "python3 train.py"),
        (("python3", "--", "train.py", HUSH), "python3 train.py"),
        (("python3", "srv/app/", HUSH), "python3 app"),
        (("python3", "-m", "vllm.entrypoints", HUSH), "python3 -m vllm.entrypoints"),
        (("python3", "-Imhttp.server", HUSH), "python3 -m http.server"),
        (("python3", "-c", HUSH, "train.py"), "python3 -c"),
        (("python3", f"-uc{HUSH}", "train.py"), "python3 -c"),
        (("pypy3", "train.py"), "pypy3 train.py"),
        (("python3", "/usr/bin/torchrun", "--nproc-per-node", HUSH, "x.py"), "torchrun x.py"),
        (("python3", "torchrun", f"--unheard-of={HUSH}", "-m", "a.b", HUSH), "torchrun a.b"),
        (("python3", "torchrun", "--unheard-of", HUSH), "python3 torchrun"),
        (("bash", "-euo", "pipefail", "+x", "job.sh", HUSH), "bash job.sh"),
        (("bash", "--rcfile", HUSH, "--norc", "job.sh", HUSH), "bash job.sh"),
        (("sh", "-c", HUSH), "sh -c"),
        (("-bash", "-lc", HUSH), "bash -c"),
        (("perl", "-lne", HUSH, HUSH), "perl -e"),
        (("perl", "-w", "-I", HUSH, "-Mstrict", "-i.bak", "tidy.pl"), "perl tidy.pl"),
        (("perl", "-d:NYTProf", "tidy.pl"), "perl tidy.pl"),
        (("ruby", "-W0", "-r", HUSH, "--encoding", HUSH, "web.rb"), "ruby web.rb"),
        (("ruby", "-W0e", HUSH, HUSH), "ruby -e"),
        (("node", "--max-old-space-size=99", "-r", HUSH, "web.js"), "node web.js"),
        (("node", "--require=", "web.js", HUSH), "node web.js"),
        (("node", "--inspect", "--no-warnings", "web.js"), "node web.js"),
        (("node", f"--eval={HUSH}", HUSH), "node --eval"),
        (("node", "-p", HUSH), "node -p"),
        (("java", f"-Dpassword={HUSH}", "-Xmx4g", "-cp", HUSH, "org.a.Main"), "java org.a.Main"),
        (("java", "-jar", "/opt/app.jar", HUSH), "java app.jar"),
        (("java", "--module=a/org.a.Main", HUSH), "java --module org.a.Main"),
        (("php", "-d", HUSH, "-f", "cron.php", HUSH), "php cron.php"),
        (("php", "-r", HUSH), "php -r"),
        (("/usr/lib/R/bin/exec/R", "--no-echo", "--file=fit.R", "--args", HUSH), "R fit.R"),
        (("julia", "--project", "-t", HUSH, "sim.jl", HUSH), "julia sim.jl"),
    ],
)
def test_interpreter_is_named_with_its_script(words: tuple[str, ...], name: str) -> None:
    assert told(*words) == name


@pytest.mark.parametrize(
    "words",
    [
        ("python3",),
        ("python3", "-"),
        ("python3", "-", HUSH),
        ("python3", "-i"),
        ("python3", "-m"),
        ("python3", "-m", ""),
        ("python3", "--", ""),
        ("python3", "..", HUSH),
        ("python3", "--unheard-of", HUSH),
        ("python3", f"--unheard-of={HUSH}", HUSH),
        ("python3", "-Z", HUSH),
        ("bash", "-s", HUSH),
        ("bash", "-oe", HUSH, HUSH),
        ("perl", "-0xAne", HUSH),
        ("perl", "-de", HUSH, HUSH),
        ("ruby", "-Kue", HUSH, HUSH),
        ("php", "--", HUSH),
        ("java", "@options", HUSH),
        ("R", HUSH),
        ("R", "--args", HUSH),
        ("mysqld", HUSH),
        ("tcsh", "-x", HUSH),
    ],
)
def test_ambiguous_command_line_yields_no_script(words: tuple[str, ...]) -> None:
    assert told(*words) is None


@pytest.mark.parametrize(
    "title",
    [
        b"gunicorn: worker [hush]\0\0\0\0",
        b"postgres: hush hush 10.0.0.1(1) SELECT",
        b"python3 train.py --password=hush\0",
        b"/usr/bin/python3 train.py hush",
        b"nginx: master process /usr/sbin/nginx -g hush;\0",
        b"",
        b"\0",
        b"\0\0\0hush\0",
    ],
)
def test_overwritten_title_yields_no_script(title: bytes) -> None:
    assert script_of("python3", title, 64) is None


def test_truncated_word_is_ignored() -> None:
    assert script_of("python3", b"python3\0-u\0/srv/train.py", 64) is None


def test_only_the_beginning_of_a_long_command_line_is_parsed() -> None:
    assert told("java", *["-Da=b"] * 200, "-jar", "a.jar") == "java a.jar"
    assert told("java", *["-Da=b"] * 300, "-jar", "a.jar") is None


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        ("train.py", "python3 train.py"),  # the kernel's name for a file that begins with #!
        ("python3.11", "python3 train.py"),
        ("pt_main_thread", "python3 train.py"),  # by PyTorch
        ("llm-trainer", None),  # by the process itself
        ("mysqld", None),
    ],
)
def test_command_line_that_contradicts_the_kernels_name_is_ignored(
    comm: str, name: str | None
) -> None:
    assert told("python3", "./train.py", comm=comm) == name


def test_script_name_is_compared_up_to_15_bytes() -> None:
    assert told("perl", "./a-very-long-script.pl", comm="a-very-long-scr") == (
        "perl a-very-long-script.pl"
    )


def test_name_is_cleaned_and_bounded() -> None:
    assert told("python3", "a\nb\x1b[1m.py") == "python3 a?b?[1m.py"
    name = told("python3", "-m", "a." * 4000 + "train")
    assert len(name) == 64
    assert name.startswith("python3 -m a.")
    assert name.endswith(".train")


def test_interpreter_of_removes_the_script() -> None:
    assert interpreter_of("python3 train.py") == "python3"
    assert interpreter_of("torchrun x.py") == "torchrun"
    assert interpreter_of("tmux: server") == "tmux: server"
    assert interpreter_of("python3") == "python3"


@pytest.mark.parametrize("grammar", [*(one for _, one in INTERPRETERS), TORCHRUN])
def test_options_of_an_interpreter_are_well_formed(grammar: OptionGrammar) -> None:
    assert all(len(letter) == 1 for letter in grammar.letters)
    assert all(word.startswith("-") and "=" not in word for word in grammar.words)
    assert OptionKind.REST not in grammar.words.values()


_SHOW = {
    "python": "import sys\nprint(sys.argv[0], sys.argv[1:])\n",
    "sh": 'echo "$0 [$*]"\n',
    "perl": 'print "$0 [@ARGV]\\n";\n',
}
_FORMS = {
    "python": ["-uB", "-W ignore", "-Wignore -X dev -I", "-X utf8 --", "-sEO"],
    "sh": ["-e", "-eu -o noglob", "+x -f", "--", "-o noglob --"],
    "perl": ["-w", "-I .", "-lw -I.", "-Mstrict -T", "-CS --"],
}


@pytest.mark.parametrize("kind", _SHOW)
def test_script_is_the_one_that_the_interpreter_runs(kind: str, tmp_path: Path) -> None:
    program = sys.executable if kind == "python" else shutil.which(kind)
    if program is None:
        pytest.skip(f"there is no {kind} here")
    script = tmp_path / "job.x"
    script.write_text(_SHOW[kind])
    for form in _FORMS[kind]:
        words = [program, *form.split(), str(script), HUSH]
        ran = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert ran.stdout.startswith(f"{script} ["), (form, ran.stdout)
        assert told(*words) == f"{Path(program).name} job.x", form
