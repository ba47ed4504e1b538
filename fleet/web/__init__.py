"""Show boards and their fleet in a browser, and order what people press: `tared web`, a process of its own.

Reading order: `boards` (reports of boards by MQTT), `orders` (commands on their way), `pictures` (what a camera of this
machine sees), `views` (all of it as pages show it), `table` (the fleet's rows, kept as HTML), `server` (HTTP: pages,
commands), `command` (the process). `forms` and `streams` (changes as server-sent events) serve both halves.

With a fleet's store: `room` (reads and writes it in threads), `room_views` (devices and rollouts as pages show them),
`room_pages` (HTTP).

Public names:
    boards      LiveBoards, LiveBoard
    orders      Orders, Order
    pictures    fetch_picture, no_picture, camera_choices
    views       board_page
    table       FleetTable
    forms       basic_credentials, read_form
    streams     Streams, event
    room        FleetRoom, Reading
    room_pages  room_routes
    server      create_app, WebOptions
    command     run_web, Listen
"""
