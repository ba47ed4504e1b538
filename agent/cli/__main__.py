"""`python -m agent.cli`: the board's commands alone, without the control room's."""

from agent.cli.main import main

raise SystemExit(main())
