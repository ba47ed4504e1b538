"""The fleet for people: devices and rollouts as tables, as a page, and live.

`words` and `sections` are what the others share, and the pages of `fleet/web`.

Public names:
    listing   device_objects, rollout_object, rollout_details, print_devices, print_plan, print_rollout, print_rollouts
    page      page
    sections  DRIFT_COLORS, STATE_COLORS, distributions, state_word, step_mark, thirty_days
    watch     watch
    words     ago, figure, interval, tag_names, unread, unsigned_warning
"""
