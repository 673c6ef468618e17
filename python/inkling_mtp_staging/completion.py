"""Shell completion: a static script for each shell, made from the argument parser."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Command:
    """A command, what can follow it, and the line that describes each."""

    name: str
    description: str
    options: Mapping[str, str]
    choices: Sequence[str]


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Return the commands of a parser that has subparsers."""
    # argparse has no public way to list what a parser accepts.
    (subparsers,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return [
        Command(
            name=listed.dest,
            description=listed.help,
            options=_options(subparsers.choices[listed.dest]),
            choices=_choices(subparsers.choices[listed.dest]),
        )
        for listed in subparsers._choices_actions
    ]


def script(shell: str, parser: argparse.ArgumentParser, takes_folder: str) -> str:
    """Return the completion script of `parser` for a shell of `SHELLS`.

    `takes_folder` is the option whose value is a folder.
    """
    return SHELLS[shell](
        parser.prog, commands_of(parser), _options(parser), takes_folder
    )


def _bash(
    program: str,
    commands: Iterable[Command],
    options: Mapping[str, str],
    takes_folder: str,
) -> str:
    function = _function_name(program)
    names = [command.name for command in commands]
    cases = "".join(
        f"        {command.name}) words='{_words([*command.choices, *command.options])}'"
        " ;;\n"
        for command in commands
    )
    return f"""\
{function}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words IFS=$'\\n'
    if [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == {takes_folder} ]]; then
        COMPREPLY=($(compgen -d -- "$current"))
        return
    fi
    if ((COMP_CWORD == 1)); then
        words='{_words([*names, *options])}'
    else
        case ${{COMP_WORDS[1]}} in
{cases}        esac
    fi
    COMPREPLY=($(compgen -W "${{words// /$'\\n'}}" -- "$current"))
}}
complete -o filenames -F {function} {program}
"""


def _zsh(
    program: str,
    commands: Iterable[Command],
    options: Mapping[str, str],
    takes_folder: str,
) -> str:
    function = _function_name(program)
    listed = " ".join(
        shlex.quote(f"{name}:{description}")
        for name, description in [
            *((command.name, command.description) for command in commands),
            *options.items(),
        ]
    )
    cases = ""
    for command in commands:
        specs = [
            f"{option}[{description}]"
            + (":folder:_files -/" if option == takes_folder else "")
            for option, description in command.options.items()
        ]
        if command.choices:
            specs.append(f"1:choice:({_words(command.choices)})")
        arguments = " ".join(map(shlex.quote, specs))
        cases += f"        {command.name}) _arguments {arguments} ;;\n"
    return f"""\
#compdef {program}
{function}() {{
    local -a commands=({listed})
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
{cases}    esac
}}
if [[ $funcstack[1] == {function} ]]; then
    {function} "$@"
else
    compdef {function} {program}
fi
"""


def _fish(
    program: str,
    commands: Iterable[Command],
    options: Mapping[str, str],
    takes_folder: str,
) -> str:
    first = "-n __fish_use_subcommand"
    lines = [f"complete -c {program} -f"]
    for option, description in options.items():
        lines.append(
            f"complete -c {program} {first} -l {option[2:]} -d {shlex.quote(description)}"
        )
    for command in commands:
        lines.append(
            f"complete -c {program} {first} -a {command.name} "
            f"-d {shlex.quote(command.description)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for choice in command.choices:
            lines.append(f"complete -c {program} {seen} -a {choice}")
        for option, description in command.options.items():
            value = (
                " -r -a '(__fish_complete_directories)'"
                if option == takes_folder
                else ""
            )
            lines.append(
                f"complete -c {program} {seen} -l {option[2:]}{value} "
                f"-d {shlex.quote(description)}"
            )
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[..., str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {
        action.option_strings[-1]: _plain(action.help)
        for action in parser._actions
        if action.option_strings
    }


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [
        choice
        for action in parser._actions
        if not action.option_strings
        for choice in action.choices
    ]


def _plain(text: str) -> str:
    """Return `text` without what a shell's completion reads as its own marks."""
    return "".join(character for character in text if character not in "'\\:[]")


def _words(words: Iterable[str]) -> str:
    return " ".join(words)


def _function_name(program: str) -> str:
    return "_" + program.replace("-", "_")
