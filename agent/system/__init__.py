"""The machine and the operating system below the daemon: sensors, clock, process, state directory, systemd service.

The modules are independent of each other.

Public names:
    board         BoardReading, BoardState, health, is_synchronised, read_text
    process       ending_in_time, handling_signals, notify_service_manager, raise_interrupt
    service_unit  DROP_INS, InstallStep, SystemdService, TARED, carry_out, need_root, plan_install, plan_uninstall,
                  unit_text
    state_dir     lock_state_dir, remove_leftovers, remove_unfinished_builds
"""
