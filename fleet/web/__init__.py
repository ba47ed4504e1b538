"""Show boards in a browser, live, and send them commands: `tared web`, a process of its own.

Reading order: `boards` (reports of boards by MQTT), `orders` (commands on their way), `pictures` (what a camera of this
machine sees), `views` (all of it as pages show it), `table` (rows of the fleet), `server` (HTTP: pages, the stream of
changes, commands), `command` (the process).

Public names:
    boards     LiveBoards, LiveBoard
    orders     Orders, Order
    pictures   fetch_picture, no_picture, camera_choices
    views      board_page, fleet_row, state_of
    table      FleetTable
    server     create_app, WebOptions
    command    run_web
"""
