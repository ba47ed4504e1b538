"""Print the code by which a shell completes command lines, and answer the shell at a tab: `tared completion`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from agent.cli.arguments import Parser, command, option, print_result

SHELLS = ("bash", "zsh", "fish")
_HOW = """\
for this session:
  source <(tared completion bash)            # the same with zsh
  tared completion fish | source
permanently: save the printed code as one of:
  ~/.local/share/bash-completion/completions/tared
  _tared in a folder of zsh's $fpath
  ~/.config/fish/completions/tared.fish"""


def add_completion(commands: Any) -> None:
    """Add `tared completion`."""
    completion = command(commands, "completion", _completion, "print the code by which a shell completes commands")
    completion.formatter_class = argparse.RawDescriptionHelpFormatter
    completion.epilog = _HOW
    option(completion, "shell", "SHELL", "bash, zsh or fish", choices=SHELLS)


def _completion(options: argparse.Namespace) -> int:
    """Run `tared completion`: print the code of a shell."""
    from argcomplete.shell_integration import shellcode

    code = shellcode(["tared"], shell=options.shell)
    return print_result(options, {"shell": options.shell, "code": code}, lambda: print(code))


def complete(parser: Parser) -> None:
    """Answer a shell that asks how a command line goes on, and end the process; return if none asks."""
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(parser)
