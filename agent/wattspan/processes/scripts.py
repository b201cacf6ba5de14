"""Name of the script that an interpreter runs, from its command line and nothing else of it.

A word after an option may be the value of the option, and a value can be a secret. The script is
therefore searched only behind options that are listed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from wattspan.util.text import clean_label


class OptionKind(Enum):
    """The meaning of an option for the words behind it."""

    ALONE = auto()  # no value; in a word of letters, further letters follow
    REST = auto()  # its value, if any, is the rest of its word
    VALUE = auto()  # its value is the rest of its word, or else the next word
    NEXT = auto()  # its value is the next word; it is the last letter of its own
    CODE = auto()  # program text follows: there is no script
    MODULE = auto()  # its value is the name of a module to run
    SCRIPT = auto()  # its value is the path of a script to run


class OptionGrammar(NamedTuple):
    """The options of one interpreter.

    ``letters`` may share one word behind a hyphen. ``words`` are whole options, with hyphens for
    underscores, and with values behind an equals sign or in the next word. ``beginnings`` are the
    beginnings of options that are one word each. ``joined``: every unknown option with two hyphens
    and an equals sign is one word. ``ends``: a script may follow ``--``. ``bare``: a script may be
    given without an option.
    """

    letters: Mapping[str, OptionKind] = MappingProxyType({})
    words: Mapping[str, OptionKind] = MappingProxyType({})
    beginnings: tuple[str, ...] = ()
    signs: tuple[str, ...] = ("-",)
    joined: bool = False
    ends: bool = False
    bare: bool = True


def _letters(**by_kind: str) -> dict[str, OptionKind]:
    return {letter: OptionKind[kind.upper()] for kind, text in by_kind.items() for letter in text}


def _words(**by_kind: str) -> dict[str, OptionKind]:
    return {
        word: OptionKind[kind.upper()] for kind, text in by_kind.items() for word in text.split()
    }


_DIGITS = "0123456789"

PYTHON = OptionGrammar(
    letters=_letters(alone="bBdEiIOPqRsStuvx3", value="WXQ", code="c", module="m"),
    words=_words(next="--check-hash-based-pycs"),
    ends=True,
)
_SHELL = OptionGrammar(
    letters=_letters(alone="abefhiklmnprtuvxBCDEHPT", next="oO", code="c"),
    words=_words(
        alone="--login --noediting --noprofile --norc --posix --restricted",
        next="--rcfile --init-file",
    ),
    signs=("-", "+"),
    ends=True,
)
_PERL = OptionGrammar(
    letters=_letters(alone="acfglnpsStTuUwWX" + _DIGITS, value="I", rest="CDFiMm", code="eE"),
    words=_words(alone="-d -x"),
    beginnings=("-d:", "-dt:"),
    ends=True,
)
_RUBY = OptionGrammar(
    letters=_letters(alone="acdlnpsSTUvwWy" + _DIGITS, value="CEIrX", rest="Fi", code="e"),
    words=_words(alone="--debug --jit --verbose --yjit", value="--disable --enable --encoding"),
    beginnings=("-W:", "--disable-", "--enable-", "--yjit-"),
    ends=True,
)
_NODE = OptionGrammar(
    words=_words(
        alone="""
            -i --interactive --enable-source-maps --expose-gc --inspect --inspect-brk --prof
            --trace-deprecation --trace-uncaught --trace-warnings --use-openssl-ca --watch
        """,
        value="-r --require --import --loader --experimental-loader --title -C --conditions",
        code="-e --eval -p --print -pe",
    ),
    beginnings=("--no-", "--harmony"),
    joined=True,
    ends=True,
)
_JAVA = OptionGrammar(
    words=_words(
        alone="-server -client -ea -da -esa -dsa -enableassertions --enable-preview",
        value="""
            -cp -classpath --class-path -p --module-path --add-modules --source --add-exports
            --add-opens --enable-native-access
        """,
        module="-m --module",
        script="-jar",
    ),
    beginnings=("-ea:", "-da:", "-D", "-X", "-verbose", "-agentlib:", "-agentpath:", "-javaagent:"),
)
_PHP = OptionGrammar(letters=_letters(alone="Cnq", value="cdStz", code="rBRE", script="fF"))
_R = OptionGrammar(
    words=_words(
        alone="-q -s --no-echo --no-restore --no-save --quiet --silent --slave --vanilla --verbose",
        code="-e",
        script="-f --file",
    ),
    joined=True,
    bare=False,
)
_JULIA = OptionGrammar(
    letters=_letters(alone="iq", value="CHJLpt", code="eE", module="m"),
    words=_words(
        alone="-O0 -O1 -O2 -O3 -g0 -g1 -g2 --project --quiet --optimize",
        value="--color --load --procs --startup-file --sysimage --threads",
        code="--eval --print",
    ),
    joined=True,
    ends=True,
)

TORCHRUN = OptionGrammar(
    words=_words(
        alone="-m --module --no-python --run-path --standalone",
        value="""
            -r --redirects -t --tee --log-dir --role --nnodes --nproc-per-node --node-rank
            --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval
            --start-method --local-addr --master-addr --master-port --local-ranks-filter
            --logs-specs
        """,
    ),
    joined=True,
)
"""A Python script whose first argument is the script to show, unlike that of an interpreter."""

INTERPRETERS = (
    (re.compile(r"(?:python|pypy)[0-9.]{0,8}[dt]?"), PYTHON),
    (re.compile(r"(?:ba|da|a|z|k|mk)?sh"), _SHELL),
    (re.compile(r"perl[0-9.]{0,8}"), _PERL),
    (re.compile(r"ruby[0-9.]{0,8}"), _RUBY),
    (re.compile(r"node(?:js)?"), _NODE),
    (re.compile(r"java"), _JAVA),
    (re.compile(r"php[0-9.]{0,8}"), _PHP),
    (re.compile(r"R"), _R),
    (re.compile(r"julia"), _JULIA),
)
"""The patterns of program names, each with the grammar of its interpreter."""

FRAMEWORK_THREAD_NAMES = frozenset(
    {"pt_main_thread", "pt_elastic", "MainThread", "node-MainThread"}
)
"""Names that PyTorch and Node.js give to each of their processes."""


def grammar_of(program: str) -> OptionGrammar | None:
    """The grammar of the interpreter called ``program``; None if it is unknown."""
    return next((g for names, g in INTERPRETERS if names.fullmatch(program)), None)


_COMM = 15  # bytes of a name that the kernel keeps
_MAX_WORDS = 256  # limit of the words of one command line: new processes may be thousands
_LAUNCHER = "torchrun"


class ScriptInvocation(NamedTuple):
    """The script: by its path, by an option and its name, or by an option alone."""

    option: str
    name: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


def script_of(comm: str, command_line: bytes, longest: int) -> str | None:
    """The name of an interpreter and the base name of its script, as in ``python3 train.py``.

    A module follows its option (``python3 -m http.server``), program text is represented by its
    option (``python3 -c``), and other arguments are never shown. None without a script: the process
    is then known by ``comm``, its name in the kernel. The same holds if ``comm`` is neither the
    name of the interpreter nor of the script: the process has set its own name, or the command line
    belongs to an earlier program.

    ``command_line`` is the content of ``/proc/PID/cmdline``, or its beginning: a word without an
    end is ignored. The result is printable and has at most ``longest`` characters.
    """
    ended = command_line.split(b"\0", _MAX_WORDS)[:-1]
    words = (word.decode("utf-8", "replace") for word in ended)
    program = _last_part(next(words, "")).removeprefix("-")
    grammar = grammar_of(program)
    script = _find(words, grammar) if grammar is not None else None
    if script is None:
        return None
    names = {_truncate(program), _truncate(script.name), *FRAMEWORK_THREAD_NAMES}
    if comm not in names and grammar_of(comm) is not grammar:
        return None
    if grammar is PYTHON and script == ScriptInvocation("", _LAUNCHER):
        launched = _find(words, TORCHRUN)
        program, script = (_LAUNCHER, launched) if launched is not None else (program, script)
    return clean_label(f"{program} {script}", longest)


def interpreter_of(name: str) -> str:
    """The name of the interpreter in a result of ``script_of``; another name unchanged."""
    program, space, _ = name.partition(" ")
    made = space and (program == _LAUNCHER or grammar_of(program) is not None)
    return program if made else name


def _find(words: Iterator[str], grammar: OptionGrammar) -> ScriptInvocation | None:
    """The script in these arguments; the arguments behind it stay in ``words``."""
    for word in words:
        if word == "--":
            return _path(next(words, "")) if grammar.ends else None
        if not word.startswith(grammar.signs):
            return _path(word) if grammar.bare else None
        option, joined, value = word.partition("=")
        kind = grammar.words.get(option.replace("_", "-"))
        if kind is not None:
            found = _apply_option(kind, option, value if joined else None, words)
        elif word.startswith(grammar.beginnings) or (
            grammar.joined and word.startswith("--") and "=" in word
        ):
            continue
        elif word.startswith("--"):
            return None
        else:
            found = _parse_letters(word, words, grammar)
        if found is not _NO_SCRIPT:
            return found
    return None


_NO_SCRIPT = ScriptInvocation("", "")
"""The result for a known option that names no script."""


def _parse_letters(
    word: str, words: Iterator[str], grammar: OptionGrammar
) -> ScriptInvocation | None:
    """The meaning of a word of option letters."""
    for at, letter in enumerate(word[1:], start=1):
        kind = grammar.letters.get(letter)
        if kind is None or (kind is OptionKind.NEXT and word[at + 1 :]):
            return None
        if kind is not OptionKind.ALONE:
            return _apply_option(kind, f"-{letter}", word[at + 1 :] or None, words)
    return _NO_SCRIPT if len(word) > 1 else None


def _apply_option(
    kind: OptionKind, option: str, value: str | None, words: Iterator[str]
) -> ScriptInvocation | None:
    """The meaning of an option with ``value``, if any, in its own word."""
    if kind is OptionKind.CODE:
        return ScriptInvocation(option, "")
    if kind is OptionKind.ALONE or kind is OptionKind.REST:
        return _NO_SCRIPT
    if value is None:
        value = next(words, "")
    if kind is OptionKind.SCRIPT:
        return _path(value)
    if kind is OptionKind.MODULE:
        script = _path(value)
        return script and ScriptInvocation(option, script.name)
    return _NO_SCRIPT


def _path(word: str) -> ScriptInvocation | None:
    """The script at a path, by the last part of the path; None if that is not a name."""
    name = _last_part(word.rstrip("/"))
    return (
        ScriptInvocation("", name) if name.strip(".") and not name.startswith(("-", "@")) else None
    )


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]


def _truncate(name: str) -> str:
    """The part of ``name`` that the kernel keeps."""
    return name.encode()[:_COMM].decode("utf-8", "replace")
