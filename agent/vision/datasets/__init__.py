"""Readers of labelled images, recognised by their files: class folders, YOLO's labels, COCO's JSON, masks as PNG."""
