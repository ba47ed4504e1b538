"""`python -m fleet.cli`: the whole command line, as `tared`."""

from fleet.cli.main import main

raise SystemExit(main())
