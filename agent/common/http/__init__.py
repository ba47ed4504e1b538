"""Serve HTTP in one thread, with bounded connections, bytes and time: to strangers on a port of this machine.

Whoever connects cannot exhaust threads, descriptors or memory: one thread serves all, and waits for none of them. The
preview, the metrics and the page of `tared label` are served by it.

Reading order: `request` (what is asked, refusals, answers), `connection` (one of them), `reception` (all of them).

Public names:
    request     Request, RefusedRequest, parse_head, response, response_head
    connection  HttpConnection
    reception   Reception, listen
"""
