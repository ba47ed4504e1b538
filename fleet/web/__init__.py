"""Show boards in a browser, live, and send them commands: `tared web`, a process of its own.

Reading order: `boards` (reports of boards by MQTT), `orders` (commands on their way), `views` (both as the
pages show them), `server` (HTTP: pages, the stream of changes, commands), `command` (the process).

Public names:
    boards   LiveBoards, LiveBoard
    orders   Orders, Order
    views    board_page, fleet_rows
    server   create_app, WebOptions
    command  run_web
"""
