"""The fleet for people: the devices as a list, as a page, and live.

The modules are independent of each other, except that page uses words of listing.

Public names:
    listing  as_objects, print_devices
    page     page
    watch    watch
"""
