"""Run the board's commands alone, without the control room's: `python -m agent.cli`."""

from agent.cli.main import main

raise SystemExit(main())
