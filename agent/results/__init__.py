"""Give the answers of the frame path away: as JSON lines on a socket, in a file, on an MQTT topic, and as pictures.

Reading order: `writer` (the thread and the line), then its outputs `socket_output`, `file_output` and `mqtt_output`;
`preview` (the thread that shows pictures), then `viewer` (one connection); `snapshot` and `drawn_frames` stand alone.

Public names:
    writer         ResultsWriter, Output
    socket_output  ResultsSocket
    file_output    ResultsFile
    mqtt_output    ResultsTopic
    preview        Preview
    viewer         Viewer, Picture, parse_request
    snapshot       annotate, encode_jpeg
    drawn_frames   open_drawn_frames
    unix_listener  UnixListener
"""
