"""Read cameras and recordings, and hand their frames to the frame path.

Reading order: `config` (the `camera:` section), `source` (a parsed SRC argument), `reader` (picture by picture) with
`opencv`, `gstreamer`, `mjpeg` and `images` below it, `stream_health` (lost, frozen, damaged), `capture` (thread,
mailbox).

Stale frames, those that nobody took before a newer one came, are dropped and counted in `capture.FrameSlot.put`.

Public names:
    config         CameraConfig
    source         Source, CaptureSettings, Framing, parse_source
    reader         read_images, source_length, source_seconds, source_fps, Image
    images         ImageFiles
    opencv         opencv_version
    gstreamer      check_gstreamer, gstreamer_version, WITHOUT_GSTREAMER
    capture        Frame, FrameSlot, CaptureThread
    stream_health  StreamState, SILENCE_S
"""
