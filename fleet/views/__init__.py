"""The fleet for people: devices and rollouts as tables, as a page, and live.

The modules are independent of each other, except that page uses words of listing.

Public names:
    listing  device_objects, rollout_object, rollout_details, print_devices, print_plan, print_rollout, print_rollouts
    page     page
    watch    watch
"""
