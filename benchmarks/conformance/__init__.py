"""The standard's scenarios, run against `device/`: `trefoil conformance`.

- `scenario`: scenario files and the limits of their folder
- `runner`: a device for each, its calls in order, every outcome that differs
- `view`: how they went
- `command`: `trefoil conformance`
"""
