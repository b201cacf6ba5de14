"""A command line is published only as the program and the last part of one word."""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st

from wattspan.processes.scripts import (
    INTERPRETERS,
    PYTHON,
    OptionGrammar,
    OptionKind,
    grammar_of,
    interpreter_of,
    script_of,
)

LONGEST = 64
SECRET = "hushhush"
PROGRAMS = [
    *("python3", "bash", "sh", "perl", "ruby", "node", "java", "php8.2", "R", "julia", "pypy3.10")
]
OPTIONS = sorted(
    {
        *(word for _, grammar in INTERPRETERS for word in grammar.words),
        *(f"-{letter}" for _, grammar in INTERPRETERS for letter in grammar.letters),
    }
)

words = st.one_of(
    st.sampled_from([*OPTIONS, "-", "--", "+x", "torchrun", "-euo", "-lne", "@x", "a/b.py", "/"]),
    st.builds("{}={}".format, st.sampled_from(OPTIONS), st.text(max_size=9)),
    st.builds("-{}".format, st.text(max_size=5)),
    st.text(max_size=90),
)
lines = st.builds(
    lambda program, rest, end: "\0".join([program, *rest]).encode("utf-8", "replace") + end,
    st.one_of(st.sampled_from(PROGRAMS), st.text(max_size=20)),
    st.lists(words, max_size=8),
    st.sampled_from([b"\0", b"", b"\0\0\0"]),
)
comms = st.sampled_from([*PROGRAMS, "torchrun", "pt_main_thread", "b.py", "", "work"])


@given(comms, st.one_of(lines, st.binary(max_size=300)))
@example("pt_main_thread", b"python3\0torchrun\0-m\0a.b\0")
def test_name_contains_only_the_program_and_one_base_name(comm: str, line: bytes) -> None:
    name = script_of(comm, line, LONGEST)
    if name is None:
        return
    assert len(name) <= LONGEST
    assert name.isprintable()
    program, _, rest = script_of(comm, line, 10**6).partition(" ")  # type: ignore[union-attr]
    told = [shown(word) for word in line.decode("utf-8", "replace").split("\0")]
    assert program in {tail(told[0]).removeprefix("-"), "torchrun"}
    option, _, module = rest.partition(" ")
    tails = {tail(part.rstrip("/")) for word in told for part in endings(word)}
    assert rest in OPTIONS or rest in tails or (option in OPTIONS and module in tails)
    assert interpreter_of(name) == program


def shown(word: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in word)


def tail(path: str) -> str:
    return path.rpartition("/")[2]


def endings(word: str) -> list[str]:
    """A word, and the part of it that may be an option's value."""
    return [word, word.partition("=")[2], *(word[at:] for at in range(2, len(word)))]


@st.composite
def known_lines(draw: st.DrawFn) -> tuple[list[str], str]:
    """A parsed command line full of secrets, and its publishable part."""
    program = draw(st.sampled_from(PROGRAMS))
    grammar = grammar_of(program)
    assert grammar is not None
    line = [program]
    for _ in range(draw(st.integers(0, 5))):
        line += draw(harmless(grammar))
    code = [letter for letter, kind in grammar.letters.items() if kind is OptionKind.CODE]
    long = [word for word, kind in grammar.words.items() if kind is OptionKind.CODE]
    ends = ["code"] if code or long else []
    ends += ["script"] if grammar.bare else []
    match draw(st.sampled_from(ends)):
        case "code":
            option = draw(st.sampled_from([*(f"-{one}" for one in code), *long]))
            return [*line, option, SECRET, SECRET], f"{program} {option}"
        case _:
            return [*line, f"/{SECRET}/job.x", SECRET, f"--{SECRET}"], f"{program} job.x"


def harmless(grammar: OptionGrammar) -> st.SearchStrategy[list[str]]:
    """An option, with a secret where its value is."""
    forms: list[st.SearchStrategy[list[str]]] = []
    for letter, kind in grammar.letters.items():
        if kind is OptionKind.ALONE:
            forms.append(st.just([f"-{letter}"]))
        elif kind is OptionKind.REST:
            forms.append(st.sampled_from([[f"-{letter}"], [f"-{letter}{SECRET}"]]))
        elif kind is OptionKind.VALUE:
            forms.append(st.sampled_from([[f"-{letter}", SECRET], [f"-{letter}{SECRET}"]]))
        elif kind is OptionKind.NEXT:
            forms.append(st.just([f"-{letter}", SECRET]))
    for word, kind in grammar.words.items():
        if kind is OptionKind.ALONE:
            forms.append(st.just([word]))
        elif kind is OptionKind.VALUE:
            forms.append(st.sampled_from([[word, SECRET], [f"{word}={SECRET}"]]))
        elif kind is OptionKind.NEXT:
            forms.append(st.just([word, SECRET]))
    forms += [st.just([f"{beginning}{SECRET}"]) for beginning in grammar.beginnings]
    return st.one_of(forms)


@given(known_lines())
def test_values_of_options_are_never_shown(case: tuple[list[str], str]) -> None:
    words, name = case
    line = "\0".join([*words, ""]).encode()
    assert script_of(words[0], line, LONGEST) == name


@given(known_lines(), st.integers(0, 400))
def test_truncated_command_line_shows_nothing_more(
    case: tuple[list[str], str], length: int
) -> None:
    words, name = case
    line = "\0".join([*words, ""]).encode()
    assert script_of(words[0], line[:length], LONGEST) in (None, name)


@given(st.lists(words, max_size=8))
def test_name_chosen_by_a_process_is_kept(arguments: list[str]) -> None:
    assume(not any(tail(word.rstrip("/")).startswith("llm") for word in arguments))
    line = "\0".join(["python3", *arguments, ""]).encode("utf-8", "replace")
    assert grammar_of("python3") is PYTHON
    assert script_of("llm-trainer", line, LONGEST) is None
