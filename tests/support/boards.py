"""Boards as Linux shows them: small trees of sysfs, after NVIDIA's and the kernel's documentation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ORIN_NANO = {
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE CORE_0 1\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "var/lib/nvpmodel/status": "pmode:0002\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
    "sys/class/thermal/thermal_zone0/temp": "51562",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "active",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "51000",
    "sys/class/thermal/thermal_zone0/trip_point_1_type": "passive",
    "sys/class/thermal/thermal_zone0/trip_point_1_temp": "99000",
    "sys/class/thermal/thermal_zone0/trip_point_2_type": "critical",
    "sys/class/thermal/thermal_zone0/trip_point_2_temp": "104500",
    "sys/class/thermal/thermal_zone8/type": "tj-thermal",
    "sys/class/thermal/thermal_zone8/temp": "52000",
    "sys/class/thermal/cooling_device0/type": "cpufreq-cpu0",
    "sys/class/thermal/cooling_device0/cur_state": "0",
    "sys/class/thermal/cooling_device1/type": "gpu-throttle-alert",
    "sys/class/thermal/cooling_device1/cur_state": "0",
    "sys/class/thermal/cooling_device2/type": "pwm-fan",
    "sys/class/thermal/cooling_device2/cur_state": "2",
    "sys/class/thermal/cooling_device3/type": "hot-surface-alert",
    "sys/class/thermal/cooling_device3/cur_state": "1",
    "sys/class/hwmon/hwmon1/name": "ina3221",
    "sys/class/hwmon/hwmon1/in1_label": "VDD_IN",
    "sys/class/hwmon/hwmon1/in1_input": "5072",
    "sys/class/hwmon/hwmon1/curr1_input": "1000",
    "sys/class/hwmon/hwmon1/curr1_max": "4000",
    "sys/class/hwmon/hwmon1/curr1_crit": "5000",
    "sys/class/hwmon/hwmon1/in2_label": "VDD_CPU_GPU_CV",
    "sys/class/hwmon/hwmon1/in2_input": "5064",
    "sys/class/hwmon/hwmon1/curr2_input": "200",
    "sys/class/hwmon/hwmon1/curr2_max": "32760",
    "sys/class/hwmon/hwmon1/curr2_crit": "32760",
    "sys/class/hwmon/hwmon1/in7_label": "sum of shunt voltages",
    "sys/class/hwmon/hwmon1/in7_input": "6",
    "sys/class/hwmon/hwmon2/name": "soctherm_oc",
    "sys/class/hwmon/hwmon2/oc1_event_cnt": "0",
    "sys/class/hwmon/hwmon2/oc3_event_cnt": "3",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1510400",  # the power mode's limit, no throttling
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "1728000",
}

AGX_XAVIER = {
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n",
    "var/lib/nvpmodel/status": "pmode:0003",
    "sys/class/thermal/thermal_zone1/type": "GPU-therm",
    "sys/class/thermal/thermal_zone1/temp": "44500",
    "sys/class/thermal/thermal_zone5/type": "PMIC-Die",
    "sys/class/thermal/thermal_zone5/temp": "100000",
    "sys/class/thermal/cooling_device0/type": "thermal-cpufreq-0",
    "sys/class/thermal/cooling_device0/cur_state": "4",
    "sys/class/hwmon/hwmon3/name": "ina3221",
    "sys/class/hwmon/hwmon3/in1_label": "GPU",
    "sys/class/hwmon/hwmon3/in1_input": "19000",
    "sys/class/hwmon/hwmon3/curr1_input": "100",
    "sys/class/hwmon/hwmon3/curr1_max": "0",
    "sys/class/hwmon/hwmon3/curr1_crit": "10000",
    "sys/class/hwmon/hwmon3/in2_label": "CPU",
    "sys/class/hwmon/hwmon3/in2_input": "19000",
    "sys/class/hwmon/hwmon3/curr2_input": "50",
    "sys/class/hwmon/hwmon4/name": "ina3221",
    "sys/class/hwmon/hwmon4/in1_label": "NC",
    "sys/class/hwmon/hwmon4/in1_input": "19000",
    "sys/class/hwmon/hwmon4/curr1_input": "9000",
}

NANO = {
    "var/lib/nvpmodel/status": "pmode:0000 fmode:fanNull",
    "sys/class/thermal/thermal_zone0/type": "AO-therm",
    "sys/class/thermal/thermal_zone0/temp": "39500",
    "sys/class/thermal/thermal_zone4/type": "PMIC-Die",
    "sys/class/thermal/thermal_zone4/temp": "100000",
    "sys/class/thermal/cooling_device1/type": "cpu-balanced",
    "sys/class/thermal/cooling_device1/cur_state": "0",
    "sys/bus/iio/devices/iio:device0/name": "ina3221x",
    "sys/bus/iio/devices/iio:device0/rail_name_0": "POM_5V_IN",
    "sys/bus/iio/devices/iio:device0/in_voltage0_input": "5000",
    "sys/bus/iio/devices/iio:device0/in_current0_input": "500",
    "sys/bus/iio/devices/iio:device0/warn_current_limit_0": "2000 ma",
    "sys/bus/iio/devices/iio:device0/crit_current_limit_0": "4000 ma",
    "sys/bus/iio/devices/iio:device0/rail_name_1": "POM_5V_GPU",
    "sys/bus/iio/devices/iio:device0/in_voltage1_input": "5000",
    "sys/bus/iio/devices/iio:device0/in_current1_input": "100",
}

LAPTOP = {
    "sys/class/thermal/thermal_zone0/type": "x86_pkg_temp",
    "sys/class/thermal/thermal_zone0/temp": "47000",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "0",
    "sys/class/thermal/cooling_device0/type": "intel_powerclamp",
    "sys/class/thermal/cooling_device0/cur_state": "-1",
    "sys/class/thermal/cooling_device1/type": "LCD",
    "sys/class/thermal/cooling_device1/cur_state": "96",
    "sys/class/hwmon/hwmon0/name": "coretemp",
    "sys/class/hwmon/hwmon0/in1_label": "Package id 0",
    "sys/class/hwmon/hwmon0/in1_input": "1200",
    "sys/class/hwmon/hwmon0/curr1_input": "1200",
}


def lay_down(tree: Mapping[str, str], root: Path) -> Path:
    """Write the files under `root`, and return it."""
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
