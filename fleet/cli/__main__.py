"""Run the whole command line, as `tared` does: `python -m fleet.cli`."""

from fleet.cli.main import main

raise SystemExit(main())
