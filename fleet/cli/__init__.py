"""The command line `tared`: the control room's commands, added to the board's (agent/cli).

Each command declares its arguments, and imports what it runs only when it runs. Reading order: main, arguments, then a
group: operator, fleet (which adds rollout).

Public names:
    main  main, the entry point `tared`
"""
