"""The MQTT contract as pure types: topics, documents, commands, signatures. No sockets, no clocks.

Boards and the fleet share it. Reading order, with the names that other packages use:

1. `topics`      Topics, check_name, may_reply_to: which topic carries what
2. `wire`        read_object, MessageError, describe_errors: from bytes to a JSON object, within limits
3. `messages`    Document, Status, Birth, Telemetry, Event, Dropped, Ack ...: what boards publish
4. `board_status`  BoardStatus, CameraStatus, DriftStatus, JobStatus, PreviewStatus: the answer to `status`
5. `commands`    Command, OPS, CommandResult, Desired, Reported, Release, Labels ...: what boards are sent, and answer
6. `signing`     Signer, Keyring, new_key: who may send it
7. `histograms`  Facts, Upload, read_upload, write_upload: a calibration's histograms, whole and in chunks

Rows of telemetry and events are numbered by (epoch, seq), without gaps; a collector acknowledges them with an Ack
(agent/uplink/outbox.py).
"""
