"""`tared doctor`: what this machine has, what is missing, and the remedy.

It must start where OpenCV is missing, which is therefore imported inside functions only.

Reading order: finding, examine, then machine, software, configured (with first_frame, its child process) and service.

Public names:
    examine  as_dict, examine, healthy
    finding  Finding
"""
