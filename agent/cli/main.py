"""Run the board's half of the command line, `tared`; each command runs the same code as the daemon.

The entry point is fleet/cli/main.py. It adds the control room's commands, which no module of a board may import.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from agent.cli.arguments import Parser, add_config_option, command, number, option, print_result
from agent.cli.configuration import add_configuration
from agent.cli.first_config import add_init
from agent.cli.label import add_label
from agent.cli.offline import add_offline
from agent.cli.service import add_service
from agent.cli.store import EXIT_DAMAGED, add_store
from agent.common.errors import ConfigError
from agent.common.redaction import hide_arguments, shown_output
from calibrate.errors import TaredError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # 128 + SIGPIPE, as shells have it
_PAGES = "127.0.0.1:8470"
EXIT_RESTART = 75  # EX_TEMPFAIL of sysexits.h: systemd's Restart=on-failure does not start again after 0

EXIT_CODES = {
    0: "success",
    EXIT_DAMAGED: "a finding of doctor or store verify, or a command of send that did not succeed",
    EXIT_ERROR: "an error, which stderr names with its code and remedy",
    EXIT_RESTART: "the daemon has ended to be started again, after the command restart",
    EXIT_INTERRUPTED: "interrupted by SIGINT or SIGTERM",
    EXIT_PIPE: "the reader of stdout has closed it",
}

_SHELLS = ("bash", "zsh", "fish")
_HOW_TO_COMPLETE = """\
for this session:
  source <(tared completion bash)            # the same with zsh
  tared completion fish | source
permanently: save the printed code as one of:
  ~/.local/share/bash-completion/completions/tared
  _tared in a folder of zsh's $fpath
  ~/.config/fish/completions/tared.fish"""

CommandGroup = Callable[[Any], None]  # adds its commands to argparse's subparsers


@shown_output()
def main(arguments: Sequence[str] | None = None, extra: Sequence[CommandGroup] = ()) -> int:
    """Run one command and return its exit code.

    Errors go to stderr as one line `error: CODE: found; expected; remedy`; the exit code is then 2. With --json
    stdout has an object then, too: {"error": {code, found, expected, remedy}}.

    Args:
        arguments: The command line without the program's name; None: the process's own.
        extra: Further command groups, added to the board's.
    """
    # The threads of NumPy's OpenBLAS spin after each product, and no product here is large enough to need them. The
    # variable is read when NumPy is first imported, by the command or by a process that it starts.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so `finally` runs; the daemon sets its own
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)  # also of a line that cannot be parsed
    hide_arguments()
    try:
        parser = make_parser(extra)
        if "_ARGCOMPLETE" in os.environ:  # a shell asks how the command line goes on; the answer ends the process
            from argcomplete import autocomplete

            autocomplete(parser)
        options = parser.parse_args(arguments)
        if os.environ.get("TARED_NVTX"):
            from engines.trace import start_tracing

            start_tracing()
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ConfigError as error:  # lists the errors of a file, one per line
        return _fail(error, f"error: {error}", as_json)
    except TaredError as error:
        return _fail(error, "error: " + " ".join(str(error).split()), as_json)
    except BrokenPipeError:  # the reader of our stdout has gone, as `head` does, so its buffer cannot be flushed either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _fail(error: TaredError, text: str, as_json: bool) -> int:
    from agent.common.console import say_error  # progress bars: a command that succeeds may never need them

    say_error(text)
    if as_json:
        print(json.dumps({"error": error.as_dict()}))
    return EXIT_ERROR


class _Version(argparse.Action):
    """Looks the version up only for --version: that takes longer than all other preparations together."""

    def __call__(self, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"tared {version('tared')}")
        raise SystemExit(0)


def make_parser(extra: Sequence[CommandGroup]) -> Parser:
    """Return the parser of the whole command line."""
    exits = "; ".join(f"{status} {meaning}" for status, meaning in EXIT_CODES.items())
    about = "Keeps a quantised vision model true on the board that runs it."
    parser = Parser(prog="tared", description=about, epilog=f"Exit codes: {exits}.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_commands("commands", "COMMAND")

    run = command(commands, "run", _run, "run the daemon; a finite source ends the run with a summary")
    add_config_option(run)
    stop = "stop after N frames of each camera (default: at the end of the source)"
    option(run, "--frames", "N", stop, number(int, 1), default=0)
    runtime = "the inference runtime; auto: the fastest that works (default: the configured one)"
    option(run, "--backend", "RUNTIME", runtime)
    pages = f"run 'tared web' beside it, for browsers; without an address at {_PAGES} (default: it does not run)"
    option(run, "--web", "HOST:PORT", pages, nargs="?", const=_PAGES)

    add_offline(commands)
    add_store(commands)
    add_label(commands)
    add_init(commands)
    add_configuration(commands)
    for add_group in extra:
        add_group(commands)
    add_service(commands)
    _add_completion(commands)
    return parser


def _add_completion(commands: Any) -> None:
    """Add `tared completion`."""
    completion = command(commands, "completion", _completion, "print the code by which a shell completes commands")
    completion.formatter_class = argparse.RawDescriptionHelpFormatter
    completion.epilog = _HOW_TO_COMPLETE
    option(completion, "shell", "SHELL", "bash, zsh or fish", choices=_SHELLS)


def _completion(options: argparse.Namespace) -> int:
    """Run `tared completion`: print the code of a shell."""
    from argcomplete.shell_integration import shellcode

    code = shellcode(["tared"], shell=options.shell)
    return print_result(options, {"shell": options.shell, "code": code}, lambda: print(code))


def _write_report(state_dir: Path) -> str:
    """Write the report on a run that has ended; return where it lies, empty where that fails."""
    from agent.common.console import say_error
    from agent.jobs.job import read_journal
    from agent.reports.command import make_report
    from engines.store.signing import find_key

    report = state_dir.resolve() / "report.html"
    try:
        make_report(state_dir, report, find_key(), read_journal)
    except TaredError as error:  # the run itself was a success
        say_error(f"no report: {error}")
        return ""
    return str(report)


def _run(options: argparse.Namespace) -> int:
    """Run `tared run`: serve until the source ends or a signal comes, then print the summary."""
    from agent.common.heap import limit_malloc_arenas

    limit_malloc_arenas()  # before what follows starts any thread
    from agent.common.console import set_up_logging
    from agent.common.table import ShownConsole
    from agent.config import load_config
    from agent.daemon.handlers import RESTART
    from agent.daemon.pages import serving_pages
    from agent.daemon.run import run_daemon
    from agent.daemon.summary_table import print_summary

    config = load_config(options.config)
    if options.backend:
        config = config.model_copy(update={"backend": options.backend})
    set_up_logging(config.log_level, config.log_format)
    faulthandler.enable(2)  # after a SIGABRT of systemd's watchdog, the journal has every thread's stack
    pages = partial(serving_pages, options.web, options.config) if options.web is not None else None
    summary = run_daemon(config, options.frames, pages)
    if options.json:
        print(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, ShownConsole(), "" if summary.stopped_by else _write_report(config.state_dir))
    return EXIT_RESTART if summary.stopped_by == RESTART else 0
