"""`tared doctor`: what this machine has, what is missing, and the remedy.

It must start where OpenCV or paho are missing, which are therefore imported inside functions only.

Reading order: finding, examine, then machine, software, configured (with first_frame, its child process) and service.

Public names:
    examine  as_dict, examine, healthy
    finding  Finding
"""
